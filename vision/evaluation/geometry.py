"""A trained model for pictures of another size, or a Swin with another window."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vision.checkpoints.resize import resize_positions, resize_relative
from vision.config import ConfigError, Size, pair
from vision.data.configs import PreprocessConfig
from vision.data.preprocess import Preprocess, resolve_preprocess
from vision.evaluation.stored import Stored
from vision.models.baseline import TimmModel
from vision.models.build import build_model
from vision.models.configs import SwinV2Config
from vision.models.cost import cost
from vision.models.layers import Classifier
from vision.models.swin import Swin


@dataclass(frozen=True)
class Cost:
    """What a model needs."""

    parameters: int
    macs: int | None
    """Multiply-adds for one picture; None: not known for Swin's windows at this size."""


def with_geometry(
    stored: Stored, image_size: Size | None, window: Size | None, given: PreprocessConfig
) -> Stored:
    """The same weights for other pictures or windows; None and auto: as it was trained.

    Pictures of another size alone leave the model as it is: it resizes its positions on the way,
    and windows stay those of its training.
    """
    before, model = stored.preprocess, stored.model
    size = before.image_size if image_size is None else pair(image_size)
    known = [(before.origin[name], {name: getattr(before, name)}) for name in before.origin]
    preprocess = resolve_preprocess(given, size, before.channels, known)
    if size != before.image_size and isinstance(model, TimmModel):
        _check_size(model, preprocess)
    if window is not None:
        model = _with_window(model, pair(window), preprocess, len(stored.classes))
    return replace(stored, model=model, preprocess=preprocess)


def _check_size(model: TimmModel, preprocess: Preprocess) -> None:
    """Models of timm resize nothing on the way, and many refuse pictures of another size."""
    device = next(model.parameters()).device
    images = torch.zeros(1, preprocess.channels, *preprocess.image_size, device=device)
    try:
        with torch.no_grad():
            model(images)
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"image_size: {model.config.name} of timm does not take pictures of "
            f"{preprocess.image_size[0]} × {preprocess.image_size[1]} pixels ({error})."
        ) from error


def _with_window(
    model: Classifier, window: tuple[int, int], preprocess: Preprocess, classes: int
) -> Classifier:
    """A Swin with windows of this size, or as large as its grids allow."""
    if not isinstance(model, Swin):
        raise ConfigError(f"window: only a Swin has windows; the model is {_kind(model)}.")
    old = model.config
    changes: dict[str, object] = {"window": window}
    if isinstance(old, SwinV2Config) and old.pretrained_window is None:
        if any(height != width for height, width in model.windows):
            raise ConfigError(f"window: the model's windows {model.windows} are not square.")
        # The position network knows distances as shares of the window that it was trained with.
        changes["pretrained_window"] = tuple(height for height, _ in model.windows)
    config = old.model_copy(update=changes)
    wanted = build_model(
        config,
        preprocess.image_size,
        channels=preprocess.channels,
        classes=classes,
        device="meta",
    )
    assert isinstance(wanted, Swin)
    tensors = model.state_dict()
    fitted = {name: _fit(name, tensor, model, wanted) for name, tensor in tensors.items()}
    wanted.load_state_dict(fitted, assign=True)
    return wanted.to(next(iter(tensors.values())).device).eval()


@torch.no_grad()
def _fit(name: str, tensor: Tensor, model: Swin, wanted: Swin) -> Tensor:
    if name.endswith("relative_position_bias_table"):
        stage = int(name.split(".")[1])
        old, new = model.windows[stage], wanted.windows[stage]
        return resize_relative(tensor, old, new, "geometric")
    if name == "absolute_pos_embed":
        return resize_positions(tensor, 0, model.grid, wanted.grid, "bicubic_antialias")
    return tensor


def cost_of(stored: Stored) -> Cost:
    """Parameters of the model, and its multiply-adds at the size of the pictures."""
    model, size = stored.model, stored.preprocess.image_size
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config = model.config
    if isinstance(model, Swin):
        grid = model.patch_embed.grid(size)
        largest = pair(model.config.window)
        usual = [(min(largest[0], y), min(largest[1], x)) for y, x in model._grids(grid)]
        if usual != model.windows:  # fixed at the size of its training, where grids were smaller
            return Cost(parameters, None)
    figures = cost(config, size, stored.preprocess.channels, len(stored.classes))  # type: ignore[arg-type]
    return Cost(parameters, figures.macs)


def _kind(model: Classifier) -> str:
    return str(getattr(model.config, "kind", type(model).__name__))
