"""Any model of timm behind the interface of this project's models, as a baseline."""

from functools import cache
from typing import Any

import timm
import torch
from timm.models import group_parameters
from torch import Tensor, nn

from vision.config import ConfigError, suggest
from vision.models.configs import TimmConfig
from vision.models.layers import Classifier, Grid, ceil_div


class TimmModel(Classifier):
    """A timm model; its weights are drawn by timm itself."""

    # timm excludes these from decay in its Swin V2, but looks for modules of these names.
    undecayed = frozenset({"logit_scale", "cpb_mlp", "relative_position_bias_table"})

    def __init__(self, config: TimmConfig, image_size: Grid, channels: int, classes: int) -> None:
        super().__init__()
        self.config = config
        self.model, self.arguments = _create(config, image_size, channels, classes)
        if config.checkpoint_activations:
            self.model.set_grad_checkpointing(enable=True)
        self.layers: dict[str, int] = {}
        if hasattr(self.model, "group_matcher"):
            matcher = self.model.group_matcher(coarse=False)
            self.layers = dict(group_parameters(self.model, matcher, reverse=True))

    def forward_features(self, images: Tensor) -> Tensor:
        """Images (b channels height width) → timm's features of this model"""
        return self.model.forward_features(images)

    def forward_head(self, features: Tensor) -> Tensor:
        """Features → logits (b classes)"""
        return self.model.forward_head(features)

    def forward_heads(self, features: Tensor) -> Tensor:
        """Features → logits of each head by itself (heads b classes): two of a model that timm has
        for distillation.
        """
        if not hasattr(self.model, "set_distilled_training"):
            return super().forward_heads(features)
        # timm keeps the heads apart in training mode alone, which a frozen model does not have.
        mode, self.model.training = self.model.training, True
        self.model.set_distilled_training(True)
        try:
            found = self.model.forward_head(features)
        finally:
            self.model.set_distilled_training(False)
            self.model.training = mode
        return torch.stack(found) if isinstance(found, tuple) else found[None]

    def pool(self, features: Tensor) -> Tensor:
        """Features → input of timm's classifying layer (b c)"""
        return self.model.forward_head(features, pre_logits=True)

    def classify(self, pooled: Tensor) -> Tensor:
        """Pooled features (b c) → logits (b classes)"""
        head = self.model.get_classifier()
        if not isinstance(head, nn.Module):
            raise ConfigError(f"model.name: {self.config.name} has no single layer as its head.")
        return head(pooled)

    def heads(self) -> list[nn.Module]:
        """The layers that timm names; none for a model whose head is not a single layer."""
        head = self.model.get_classifier()
        found = list(head) if isinstance(head, tuple | list | nn.ModuleList) else [head]
        return [part for part in found if isinstance(part, nn.Module)]

    def layer_of(self, parameter: str) -> int:
        """Depth in timm's groups of parameters; 0 for a model without such groups."""
        return self.layers.get(parameter.removeprefix("model."), 0)

    def no_weight_decay(self) -> frozenset[str]:
        """Parameters with one axis, and those that timm names."""
        named = self.model.no_weight_decay() if hasattr(self.model, "no_weight_decay") else ()
        # Some of timm's names belong to modules, some to parameters that this model lacks.
        return super().no_weight_decay() | frozenset(
            f"model.{parameter}"
            for parameter, _ in self.model.named_parameters()
            if any(parameter == name or parameter.startswith(f"{name}.") for name in named)
        )

    def init_weights(self, generator: torch.Generator) -> None:
        """Not available: timm draws weights from the global generator while it builds a model."""
        raise NotImplementedError("a timm model is initialised while it is built; see build_model")


@cache
def check_size(config: TimmConfig, size: Grid, channels: int, classes: int) -> None:
    """Refuse images of a size that the model does not take, though it takes those that it was made
    for: by a forward pass on `meta`; then by one with contents, since an index beyond a table is
    noticed there alone.
    """
    known = timm.models.get_pretrained_cfg(config.name)  # None for a user's own, registered model
    height, width = known.input_size[1:] if known is not None else (224, 224)
    usual = (int(height), int(width))
    if usual == size:
        return
    failure = _failure_at(config, size, channels, classes, usual)
    if failure and not _failure(config, usual, channels, classes, "meta"):
        larger = _next_size(config, size, channels, classes, usual)
        also = "" if larger is None else f", and takes {_words(larger)}: {_setting(larger)}"
        raise ConfigError(
            f"model.name: {config.name} does not take images of {_words(size)} ({failure}). "
            f"It was made for {_words(usual)}: {_setting(usual)}{also}."
        )


def _failure_at(config: TimmConfig, size: Grid, channels: int, classes: int, usual: Grid) -> str:
    """The error of a forward pass, with contents for images that are smaller than usual."""
    failure = _failure(config, size, channels, classes, "meta")
    if not failure and max(size) < max(usual):
        failure = _failure(config, size, channels, classes, "cpu")
    return failure


def _next_size(
    config: TimmConfig, size: Grid, channels: int, classes: int, usual: Grid
) -> Grid | None:
    """A size above `size` and below the usual one that the model takes; None if there is none among
    squares of whole strides.
    """
    for step in (32, 64, 128):
        side = ceil_div(max(size), step) * step
        square = (side, side)
        if max(size) < side < min(usual) and not _failure_at(
            config, square, channels, classes, usual
        ):
            return square
    return None


def _words(size: Grid) -> str:
    return f"{size[0]} × {size[1]}"


def _setting(size: Grid) -> str:
    return f"data.image_size={size[0] if size[0] == size[1] else f'[{size[0]},{size[1]}]'}"


def _failure(config: TimmConfig, size: Grid, channels: int, classes: int, device: str) -> str:
    """The error of a forward pass; empty if there is none."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device), torch.no_grad():
            model, _ = _create(config, size, channels, classes)
            model.eval()(torch.zeros(1, channels, *size))
    except ConfigError:
        raise
    except Exception as error:  # whatever a model of timm raises
        said = str(error).strip().partition("\n")[0][:150]
        return f"{type(error).__name__}: {said}" if said else type(error).__name__
    return ""


def _create(
    config: TimmConfig, size: Grid, channels: int, classes: int
) -> tuple[Any, dict[str, Any]]:
    """timm's model, and what it was asked for of the images."""
    if not timm.is_model(config.name):
        known = timm.list_models()
        raise ConfigError(
            f"model.name: timm has no model '{config.name}'. {suggest(config.name, known)}"
        )
    arguments: dict[str, Any] = {"in_chans": channels, "num_classes": classes}
    if config.drop_path is not None:
        arguments["drop_path_rate"] = config.drop_path
    try:
        try:
            # Most transformers must know their image size; the others refuse the argument.
            model = timm.create_model(config.name, img_size=size, **arguments)
            return model, {"in_chans": channels, "img_size": list(size)}
        except TypeError as error:
            if "img_size" not in str(error):
                raise
        return timm.create_model(config.name, **arguments), {"in_chans": channels}
    except TypeError as error:
        raise ConfigError(f"model: timm refuses to build {config.name}: {error}") from error
