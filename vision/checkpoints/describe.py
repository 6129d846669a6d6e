"""Describe what a place holds: weights under this project's names, and the model that they belong
to, with its config, the images that it was trained on and its classes.

Shapes come first; what is written beside the weights replaces them; what the caller gives replaces
both. What none of them says is taken from known models and listed as assumed, or asked back.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vision.checkpoints.configs import WhichWeights
from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.files.containers import AVERAGED, unwrap
from vision.checkpoints.files.reading import Raw, read_raw
from vision.checkpoints.files.remote import pretrained_config, resolve
from vision.checkpoints.files.renaming import rename as rename_tensors
from vision.checkpoints.fit.assign import remedy
from vision.checkpoints.fit.infer_swin import swin_values
from vision.checkpoints.fit.infer_vit import vit_values
from vision.checkpoints.layouts.recognise import convert_names, recognise
from vision.checkpoints.layouts.rules import DECODER, Converted, need, stem_shape
from vision.checkpoints.metadata import Metadata, StoredWeights, architecture_of, read_metadata
from vision.checkpoints.native.run_record import LoraRecord, RunRecord, check_sizes, run_record
from vision.config import ConfigError, pair, parse, suggest
from vision.data.preprocess import DEFAULT, NAMES, Known
from vision.models.configs import MODEL_FIELDS, AnySwinConfig, ModelConfig, TimmConfig
from vision.models.layers import Grid
from vision.models.lora import merge_tensors
from vision.models.windows import change_window

Place = str | Path | Mapping[str, Tensor]
"""A run's folder, a file or folder of any known format, timm:NAME, hf:OWNER/NAME, or tensors."""
SHOWN = ("patch_size", "width", "depth", "depths", "mlp_ratio", "mlp", "class_token", "registers")
"""Settings of a model that the shapes of its weights show."""


_UNNAMED = re.compile(r"model\.name=…(?: \(timm's name[^)]*\))?")
"""The remedy of a refusal that does not know timm's name of the architecture."""


@dataclass(frozen=True)
class Description:
    """What is known of the model of a checkpoint."""

    config: ModelConfig
    trained_size: Grid
    """Size of the images that the weights were trained on."""
    channels: int
    classes: int
    """0: the model has no head."""
    class_names: tuple[str, ...] | None
    known: Known
    """Values of the preprocessing with their origins."""
    assumed: tuple[str, ...] = ()
    other_windows: bool = False
    """Whether a Swin gets other windows than those that it was trained with."""


def read_weights(
    place: Place,
    weights: WhichWeights = "auto",
    rename: Sequence[tuple[str, str]] = (),
    setting: str = "checkpoint",
    timm: bool = False,
    model: nn.Module | None = None,
) -> StoredWeights:
    """Read and recognise weights. The layout is recognised by names, never by that of the file.

    `setting` is the setting that gave the place, for messages. With `timm` names are left to timm.
    Tensors in memory that have the names of `model` are taken as they are.
    """
    if isinstance(place, Mapping):
        return _from_memory(place, rename, model)
    path = Path(place).expanduser()
    if not path.exists():  # a name on a hub, or nothing
        path = resolve(str(place), setting)
    raw = read_raw(path)
    if raw.own:
        return _weights_of_run(raw, weights)
    found = unwrap(raw, weights, rename)
    beside = raw.extra
    if str(place).startswith("timm:"):  # timm describes its own weights, where the file does not
        beside = pretrained_config(str(place)) | beside
    inert = f"{', '.join(raw.inert)}: kept as plain data, nothing was executed."
    try:
        layout = None if timm else recognise(found.tensors)
        converted = (
            convert_names(layout, found.tensors) if layout else Converted(dict(found.tensors))
        )
        metadata = read_metadata(beside, described=not timm) if beside else Metadata("")
    except CheckpointError as error:
        name = architecture_of(beside)
        text = _UNNAMED.sub(f"model.name={name}", str(error)) if name else str(error)
        raise CheckpointError(f"{raw.path}: {text}") from error
    return StoredWeights(
        **vars(found),
        path=raw.path,
        layout=layout,
        converted=converted,
        metadata=metadata,
        averaged=any(part in AVERAGED for part in found.path_taken),
        warnings=(*raw.warnings, *((inert,) if raw.inert else ()), *metadata.notes),
        integrity=raw.integrity,
    )


def _weights_of_run(raw: Raw, weights: WhichWeights) -> StoredWeights:
    """The weights of a run of this project. The first word of a name says what a tensor belongs to,
    and only that, since a model may have a part named "model" itself.
    """
    parts: dict[str, dict[str, Tensor]] = {"model": {}}
    for name, tensor in raw.tensors.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = tensor
    if weights == "ema" and "ema" not in parts:
        raise ConfigError(
            f"weights=ema: {raw.path} was trained without an average; use weights=raw."
        )
    chosen = "model" if weights == "raw" or "ema" not in parts else "ema"
    # Buffers that are not averaged (counters) come from the weights as trained.
    tensors = parts["model"] | parts[chosen]
    record = run_record(raw.extra, raw.path)
    pretrained = record.config.task.kind == "masked"
    decoder = {n: t for n, t in tensors.items() if pretrained and not n.startswith("encoder.")}
    if pretrained:
        own = (name for name in tensors if name not in decoder)
        tensors = {name.removeprefix("encoder."): tensors[name] for name in own}
    check_sizes(record, {name: t.shape for name, t in tensors.items()}, raw.path)
    tune = record.config.tune
    if isinstance(tune, LoraRecord):
        tensors = merge_tensors(tensors, tune.alpha, tune.targets)
    return StoredWeights(
        path=raw.path,
        layout="vision",
        tensors=tensors,
        converted=Converted(tensors, dict.fromkeys(decoder, DECODER), decoder=decoder),
        metadata=Metadata(""),
        record=record,
        averaged=chosen == "ema",
        path_taken=(chosen,),
        left={part: len(names) for part, names in parts.items() if part != chosen},
        integrity=raw.integrity,
    )


def _from_memory(
    tensors: Mapping[str, Tensor], rules: Sequence[tuple[str, str]], model: nn.Module | None
) -> StoredWeights:
    if not tensors:
        raise ValueError("expected tensors by name, found an empty mapping.")
    tensors, changes = rename_tensors(tensors, rules)
    own = {name for name in model.state_dict() if not name.startswith("head")} if model else None
    layout = recognise(tensors) if own is None or not own <= tensors.keys() else "vision"
    return StoredWeights(
        path=Path("tensors in memory"),
        layout=layout,
        tensors=tensors,
        converted=convert_names(layout, tensors),
        metadata=Metadata(""),
        in_memory=True,
        path_taken=tuple(changes),
    )


def describe(
    stored: StoredWeights, model: ModelConfig | None, given: Mapping[str, Any]
) -> Description:
    if stored.record is not None:
        return _describe_run(stored, stored.record, model, given)
    known = stored.metadata
    assumed: list[str] = []
    if isinstance(model, TimmConfig):
        from vision.checkpoints.fit.timm_weights import describe_timm  # timm is slow to load

        known, channels, classes, assumed = describe_timm(model, stored.tensors, known)
        config: ModelConfig = model
        size = known.image_size or (224, 224)
    else:
        config, size = _infer(stored, model, given, assumed)
        tensors = stored.converted.tensors
        channels = stem_shape(tensors).channels
        classes = need(tensors, "head.weight", 2).shape[0] if "head.weight" in tensors else 0
    preprocess, origin = known.preprocess, known.preprocess_origin
    if not preprocess:
        preprocess = stored.converted.preprocess
        origin = f"usual for weights of {stored.layout}"
    if not preprocess:
        assumed.append(
            "mean and std of ImageNet: nothing beside the weights says how images were prepared "
            "(AugReg's weights in timm's layout want 0.5)"
        )
    names = known.class_names
    return Description(
        config,
        size,
        channels,
        classes,
        names if names is not None and len(names) == classes else None,
        [(origin, preprocess)],
        tuple(assumed),
    )


def _describe_run(
    stored: StoredWeights, record: RunRecord, model: ModelConfig | None, given: Mapping[str, Any]
) -> Description:
    """The record of a run says everything."""
    values = record.preprocess
    # What nobody decided stays so: it depends on each image (see Preprocess.crop_ratio_for).
    undecided = [name for name in NAMES if values.origin.get(name) == DEFAULT]
    run = f"the run {stored.path}"
    config, given = model or record.model, dict(given)
    window = given.pop("window", None)
    if given:
        config = _parsed(config.model_dump(mode="json") | given)
    if window is not None:
        if not isinstance(config, AnySwinConfig):
            raise ConfigError(f"model.window: only a Swin has windows, not a {config.kind}.")
        config = change_window(config, window, values.image_size)
    return Description(
        config,
        values.image_size,
        record.channels,
        len(record.classes),
        record.classes or None,
        [(DEFAULT if n in undecided else run, {n: getattr(values, n)}) for n in NAMES],
        other_windows=window is not None,
    )


def _infer(
    stored: StoredWeights,
    model: ModelConfig | None,
    given: Mapping[str, Any],
    assumed: list[str],
) -> tuple[ModelConfig, Grid]:
    """The config of foreign weights, or the one that they must have, and the trained size."""
    given = dict(given)
    size = given.pop("trained_size", None)
    trained = None if size is None else pair(size if isinstance(size, int) else tuple(size))
    if model is not None:
        _check_same_model(stored, model)
        said = model.model_dump(mode="json", exclude={"kind", "pretrained"})
        with suppress(CheckpointError, ConfigError):  # the weights do not show their size
            return model, _values(stored, trained, said, [])[1]
        return model, trained or stored.metadata.image_size or (224, 224)
    values, found = _values(stored, trained, given, assumed)
    return _parsed(values | given), found


def _values(
    stored: StoredWeights, size: Grid | None, given: Mapping[str, Any], assumed: list[str]
) -> tuple[dict[str, Any], Grid]:
    match _kind(stored):
        case "vit":
            return vit_values(stored, size, given, assumed)
        case "swin" | "swin_v2":
            return swin_values(stored, size, given, assumed)
    raise CheckpointError(f"the first block, with 'attn.qkv.weight', is missing. {remedy(stored)}")


def _kind(stored: StoredWeights) -> str | None:
    tensors = stored.converted.tensors
    if "blocks.0.attn.qkv.weight" in tensors:
        return "vit"
    if "layers.0.blocks.0.attn.qkv.weight" not in tensors:
        return None
    return "swin_v2" if "layers.0.blocks.0.attn.logit_scale" in tensors else "swin"


def _check_same_model(stored: StoredWeights, model: ModelConfig) -> None:
    """Refuse weights of another model in one sentence, and not tensor by tensor."""
    kind = _kind(stored)
    given = model.model_dump(mode="json")
    differing = [("kind", kind, model.kind)] if kind not in (None, model.kind) else []
    if kind == model.kind:
        # Any number of heads divides by 1; the window of a Swin V2 is not shown.
        unseen = {"heads": 1} if kind == "vit" else {k: given[k] for k in ("heads", "window")}
        with suppress(ConfigError, CheckpointError):
            values, _ = _values(stored, None, unseen, [])
            differing = [
                (name, values[name], given[name])
                for name in SHOWN
                if name in values and values[name] != given[name]
            ]
    if differing:
        said = ", ".join(f"{name} {own}, not {other}" for name, own, other in differing)
        raise ConfigError(
            f"the weights are those of another model: {said}. model=auto takes the one that the "
            f"weights show."
        )


def _parsed(values: Mapping[str, Any]) -> ModelConfig:
    try:
        config: ModelConfig = parse(ModelConfig, values)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError("\n".join(f"model.{line}" for line in str(error).splitlines())) from error
    return config


def check_given(given: Mapping[str, Any]) -> None:
    """A misspelt setting is an error at once, whatever the model turns out to be."""
    for name in given:
        if name not in MODEL_FIELDS:
            raise ConfigError(f"{name}: a model has no such setting. {suggest(name, MODEL_FIELDS)}")
