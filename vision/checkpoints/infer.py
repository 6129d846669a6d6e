"""The model that a file's weights belong to: its config, from shapes first.

What shapes do not tell is taken from what is written beside the weights, then from what the caller
gives, then from known models; the last is told as assumed. What remains open is asked back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.geometry import need, patch_weight
from vision.checkpoints.infer_swin import swin_values
from vision.checkpoints.infer_vit import vit_values
from vision.checkpoints.source import AnySource, Source, WhichWeights, open_source
from vision.config import ConfigError, Size, pair, parse, suggest
from vision.models.configs import ModelConfig, SwinConfig, SwinV2Config, TimmConfig, ViTConfig
from vision.models.layers import Grid

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Inferred:
    """The model that weights belong to, and the pictures that it was trained on."""

    config: ModelConfig
    image_size: Grid
    channels: int
    classes: int
    """0: the weights have no head."""
    class_names: tuple[str, ...] | None
    preprocess: Mapping[str, Any]
    """Some of mean, std, interpolation and crop_ratio, as far as they are known."""
    preprocess_origin: str
    layout: str
    assumed: tuple[str, ...]
    """What the file does not tell, and why it is thought to be so."""

    def table(self, name: str) -> "Table":
        """What the file of this name is, for a terminal."""
        from rich.table import Table

        result = Table.grid(padding=(0, 2))
        result.add_column()
        result.add_column(overflow="fold")
        height, width = self.image_size
        names = ", ".join(self.class_names[:3]) + " …" if self.class_names else "not named"
        settings = self.config.model_dump(mode="json", exclude={"kind"})
        rows = [
            ("file", name),
            ("layout", self.layout),
            ("model", f"{self.config.kind}, {height} × {width} px, {self.channels} channels"),
            ("settings", ", ".join(f"{key} {value}" for key, value in settings.items())),
            ("classes", f"{self.classes} ({names})" if self.classes else "none: no head"),
            *(
                (f"{key}", f"{value} ({self.preprocess_origin})")
                for key, value in self.preprocess.items()
            ),
            *(("assumed", line) for line in self.assumed),
        ]
        for word, sentence in rows:
            result.add_row(word, str(sentence))
        return result

    def as_dict(self) -> dict[str, Any]:
        """Plain mappings and lists, for JSON."""
        return {
            "config": self.config.model_dump(mode="json"),
            "image_size": list(self.image_size),
            "channels": self.channels,
            "classes": self.classes,
            "class_names": None if self.class_names is None else list(self.class_names),
            "preprocess": dict(self.preprocess),
            "preprocess_origin": self.preprocess_origin,
            "layout": self.layout,
            "assumed": list(self.assumed),
        }


def infer_model(
    source: AnySource | Source,
    *,
    weights: WhichWeights = "auto",
    trained_size: Size | None = None,
    **given: Any,
) -> Inferred:
    """The model of a file. `given` are settings of its config that the file cannot tell, such as
    `heads=4`, `window=8` or `pretrained_window=[12, 12, 12, 6]`; `trained_size` is the size of the
    pictures, for tables that are not square.
    """
    found = source if isinstance(source, Source) else open_source(source, weights)
    _check_given(given)
    size = None if trained_size is None else pair(trained_size)
    try:
        return _infer(found, size, given)
    except CheckpointError as error:
        raise CheckpointError(f"{found.name}: {error}") from error


def _infer(source: Source, size: Grid | None, given: Mapping[str, Any]) -> Inferred:
    tensors, known = source.converted.tensors, source.metadata
    assumed: list[str] = []
    if source.layout == "vision" and known.model:
        values, image_size = dict(known.model), size or known.image_size
        values.pop("channels")
        assert image_size is not None
    elif "blocks.0.attn.qkv.weight" in tensors:
        values, image_size = vit_values(source, size, given, assumed)
    elif "layers.0.blocks.0.attn.qkv.weight" in tensors:
        values, image_size = swin_values(source, size, given, assumed)
    else:
        raise CheckpointError("there is no first block with 'attn.qkv.weight'.")
    config: ModelConfig = parse(ModelConfig, values | dict(given))  # type: ignore[arg-type]
    classes = need(tensors, "head.weight", 2).shape[0] if "head.weight" in tensors else 0
    if source.layout == "vision" and known.class_names is not None:
        classes = len(known.class_names)
    names = known.class_names
    if not known.preprocess:
        assumed.append(
            "mean and std of ImageNet: nothing beside the weights says how pictures were prepared "
            "(AugReg's weights in timm's layout want 0.5)"
        )
    return Inferred(
        config=config,
        image_size=image_size,
        channels=_channels(tensors, known.model),
        classes=classes,
        class_names=names if names is not None and len(names) == classes else None,
        preprocess=known.preprocess,
        preprocess_origin=known.preprocess_origin,
        layout=source.layout,
        assumed=tuple(assumed),
    )


def _channels(tensors: Mapping[str, Tensor], model: Mapping[str, Any]) -> int:
    if "patch_embed.proj.weight" in tensors:
        return patch_weight(tensors).shape[1]
    return int(model["channels"])


def _check_given(given: Mapping[str, Any]) -> None:
    """A misspelt setting is an error at once, whatever the model turns out to be."""
    known = {
        name
        for kind in (ViTConfig, SwinConfig, SwinV2Config, TimmConfig)
        for name in kind.model_fields
    } - {"kind"}
    for name in given:
        if name not in known:
            raise ConfigError(f"{name}: a model has no such setting. {suggest(name, known)}")
