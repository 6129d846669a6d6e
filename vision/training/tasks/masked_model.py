"""The model of masked pretraining from its settings, checked against the encoder and its images."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vision.checkpoints.layouts.rules import DECODER
from vision.checkpoints.load_report import LoadReport
from vision.config import ConfigError, pair
from vision.models.layers import Classifier, Grid
from vision.models.reconstruction import (
    DecoderShape,
    MaskedAutoencoder,
    MaskedModel,
    SimMIM,
    stride,
)
from vision.models.stems import ConvStem
from vision.models.swin import Swin
from vision.models.vit import ViT
from vision.randomness import generator
from vision.training.tasks.configs import MaskedConfig

RATIO = {"mae": 0.75, "simmim": 0.6}
SIMMIM_SQUARE = 32


class MaskPlan(NamedTuple):
    """How the mask of an image is divided and how much of it is hidden."""

    squares: Grid
    """Rows and columns of squares, each hidden or visible as a whole."""
    cells: Grid
    """Rows and columns of tokens in a square."""
    hidden: int
    """Number of hidden squares."""


def method_of(config: MaskedConfig, encoder: Classifier) -> Literal["mae", "simmim"]:
    """MAE or SimMIM, or a refusal with the one that works."""
    if not isinstance(encoder, ViT | Swin):
        raise ConfigError(
            "task=masked pretrains the ViT, Swin and Swin V2 of this project: an LR-Net or a "
            "model of timm cannot hide its tokens. Choose model=vit_base, model=swin_tiny, …"
        )
    vit = isinstance(encoder, ViT)
    method = ("mae" if vit else "simmim") if config.method == "auto" else config.method
    if method == "simmim":
        return "simmim"
    other = "or use task.method=simmim"
    if not isinstance(encoder, ViT):
        raise ConfigError(
            "task.method=mae needs a ViT: the windows of a Swin need every token. Choose "
            "model=vit_…, or use task.method=simmim."
        )
    if isinstance(encoder.patch_embed, ConvStem):
        raise ConfigError(
            f"task.method=mae: the convolutions of model.stem={encoder.config.stem} carry hidden "
            f"pixels into visible patches. Choose model.stem=patch, {other}."
        )
    if encoder.config.relative_bias != "none":
        raise ConfigError(
            f"task.method=mae: model.relative_bias={encoder.config.relative_bias} has a bias for "
            f"every pair of a whole grid. Choose model.relative_bias=none, {other}."
        )
    return "mae"


def plan_masks(config: MaskedConfig, encoder: ViT | Swin, image_size: Grid) -> MaskPlan:
    """The squares of a mask; refused where they do not fit the images, or hide all or nothing."""
    method, patch = method_of(config, encoder), pair(encoder.config.patch_size)
    if any(size % step for size, step in zip(image_size, stride(encoder), strict=True)):
        raise ConfigError(
            f"task=masked: images of {_sides(image_size)} pixels are not whole patches of "
            f"{_sides(stride(encoder))}, which the encoder's outputs predict. Choose "
            "data.image_size or model.patch_size accordingly."
        )
    square = patch if method == "mae" else (SIMMIM_SQUARE, SIMMIM_SQUARE)
    if config.mask_size != "auto":
        square = config.mask_size, config.mask_size
    fits = all(
        side % step == 0 and size % side == 0
        for size, side, step in zip(image_size, square, patch, strict=True)
    )
    squares = image_size[0] // square[0], image_size[1] // square[1]
    if not fits or math.prod(squares) < 2:
        raise ConfigError(
            f"task.mask_size = {_sides(square)}: images of {_sides(image_size)} pixels with "
            f"patches of {_sides(patch)} are not made of at least two such squares. Choose a "
            "multiple of the patch that divides the images, such as "
            f"task.mask_size={_fitting(image_size, patch)}."
        )
    ratio = RATIO[method] if config.ratio == "auto" else config.ratio
    number = math.prod(squares)
    # As the originals round: MAE keeps ⌊n (1 − ratio)⌋, SimMIM hides ⌈n · ratio⌉.
    hidden = math.ceil(round(number * ratio, 6))
    if not 0 < hidden < number:
        raise ConfigError(
            f"task.ratio = {ratio:g} hides {hidden} of the {number} squares of an image (task."
            f"mask_size = {_sides(square)}); some must be hidden and some visible, such as "
            "task.ratio=0.6."
        )
    return MaskPlan(squares, (square[0] // patch[0], square[1] // patch[1]), hidden)


def masked_model(
    config: MaskedConfig, encoder: Classifier, image_size: Grid, channels: int, seed: int
) -> MaskedModel:
    """The encoder with a decoder whose weights are drawn from the seed; on `meta` without any."""
    method = method_of(config, encoder)
    assert isinstance(encoder, ViT | Swin)
    plan = plan_masks(config, encoder, image_size)
    normalize = method == "mae" if config.normalize_targets == "auto" else config.normalize_targets
    on_meta = next(encoder.parameters()).is_meta
    model: MaskedModel
    with torch.device("meta" if on_meta else "cpu"):
        if isinstance(encoder, ViT) and method == "mae":
            shape = DecoderShape(config.decoder.width, config.decoder.depth, config.decoder.heads)
            hidden = plan.hidden * math.prod(plan.cells)
            model = MaskedAutoencoder(encoder, shape, hidden, channels, normalize)
        else:
            model = SimMIM(encoder, channels, normalize)
    if not on_meta:
        drawn = int(generator(seed, "decoder").integers(1 << 62))
        with torch.no_grad():
            model.init_weights(torch.Generator().manual_seed(drawn))
    return model


def load_decoder(
    model: MaskedModel, stored: Mapping[str, Tensor], report: LoadReport
) -> LoadReport:
    """Put the decoder of weights into the model if it is of the same method and size; returns the
    report with what became of it.
    """
    own = {n: t for n, t in model.state_dict().items() if not n.startswith("encoder.")}
    table = stored.get("positions.table")
    stored = {name: tensor for name, tensor in stored.items() if name != "positions.table"}
    if not stored:
        reason = "the weights have no decoder"
    elif {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in stored.items()}:
        reason = "the decoder of the weights is of another method or size"
    elif table is not None and not _same_positions(model, table):
        reason = "the decoder of the weights has other positions than MAE's sines and cosines"
    else:
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(stored[name])
        ignored = {name: why for name, why in report.ignored.items() if why != DECODER}
        return replace(report, loaded=(*report.loaded, *own), ignored=ignored)
    return replace(report, new={**report.new, **dict.fromkeys(own, reason)})


def _same_positions(model: MaskedModel, table: Tensor) -> bool:
    """Whether a stored table, with a row for the class token, is the computed one; one of another
    grid is computed anew.
    """
    assert isinstance(model, MaskedAutoencoder)
    own = model.positions(model.encoder.grid)
    cells = table[:, -own.shape[1] :]
    return table.shape[1] != own.shape[1] + 1 or torch.allclose(cells.float(), own, atol=1e-4)


def _sides(size: Grid) -> str:
    return f"{size[0]} × {size[1]}"


def _fitting(image_size: Grid, patch: Grid) -> int:
    """The largest square, up to SimMIM's, of which an image has four or more; else a patch."""
    step = math.lcm(*patch)
    sides = (
        side
        for side in range(step, SIMMIM_SQUARE + 1, step)
        if all(size % side == 0 and size // side > 1 for size in image_size)
    )
    return max(sides, default=step)
