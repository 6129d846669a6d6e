"""The numbers of a run's record, compared with the shapes of the tensors beside it.

A record may ask for a billion blocks or for images of a billion pixels. Building such a model takes
hours and all memory, even without weights, so the record is compared with the shapes first.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vision.checkpoints.errors import OLDER, CheckpointError
from vision.checkpoints.native.run_record import LoraRecord, RunRecord
from vision.config import pair
from vision.models.attention import width_of_head
from vision.models.build import build_model
from vision.models.configs import (
    AnySwinConfig,
    LRNetConfig,
    OwnModelConfig,
    TimmConfig,
    ViTConfig,
)
from vision.models.stems import halvings
from vision.models.windows import stage_windows

_Patched = ViTConfig | AnySwinConfig
Shapes = Mapping[str, Sequence[int]]
Comparison = tuple[str, Any, Any]
"""A field of the record, its value there, and the value that the tensors have."""

_LARGEST = 2**29
"""Numbers of a table that a model derives from the size of its images. A Swin V2 with a window of
48 at 1536 × 1536 pixels, larger than any published one, has two thirds of it.
"""
_BLOCK = re.compile(r"(?:layers\.(\d+)\.)?blocks\.(\d+)\.")


def check_sizes(record: RunRecord, shapes: Shapes, path: Path) -> None:
    """Refuse a record that contradicts the tensors beside it, before a model is built from it.

    `shapes` are those of the model's tensors by their plain names, before LoRA's additions are
    merged. Only what decides time and memory is compared; whether every tensor fits is seen when
    they are loaded.
    """
    if isinstance(record.model, TimmConfig):
        numbers = _check_timm(record, record.model, shapes, path)
    else:
        for field, recorded, found in _compared(record, record.model, shapes):
            if recorded != found:
                said = f"{field} = {_shown(recorded)}, its tensors say {_shown(found)}"
                raise CheckpointError(f"{path} contradicts itself: its record says {said}. {OLDER}")
        numbers = _derived(record, record.model)
    if numbers > _LARGEST:
        raise CheckpointError(
            f"{path} has an invalid record: images of {_shown(record.preprocess.image_size)} "
            f"pixels would need tables of {numbers} numbers; at most {_LARGEST} are possible. "
            f"{OLDER}"
        )
    if isinstance(record.config.tune, LoraRecord):
        _check_additions(record.config.tune, shapes, path)


def _check_timm(record: RunRecord, config: TimmConfig, shapes: Shapes, path: Path) -> int:
    """Refuse a model of timm that is far larger than its tensors; return the size of its tables.
    Only timm knows its sizes, so it builds the model, on the meta device, where weights and tables
    take no memory.
    """
    size, classes = record.preprocess.image_size, len(record.classes)
    try:
        model = build_model(config, size, channels=record.channels, classes=classes, device="meta")
    # timm raises any of these for a size or a number of channels that a model cannot have.
    except (ValueError, TypeError, ArithmeticError, RuntimeError, AssertionError) as error:
        raise CheckpointError(
            f"{path} has an invalid record: timm cannot build '{_shown(config.name)}' for images "
            f"of {_shown(size)} pixels ({_shown(error)}). {OLDER}"
        ) from error
    wanted = sum(parameter.numel() for parameter in model.parameters())
    found = sum(math.prod(shape) for shape in shapes.values())
    if wanted > 2 * found:
        raise CheckpointError(
            f"{path} contradicts itself: {_shown(config.name)} of timm has {wanted} parameters, "
            f"its tensors have {found} numbers. {OLDER}"
        )
    return sum(buffer.numel() for buffer in model.buffers())


def _compared(record: RunRecord, config: OwnModelConfig, shapes: Shapes) -> Iterator[Comparison]:
    """Every number of the record that is seen in a shape."""
    yield "the number of classes", len(record.classes), _axis(shapes, "head.weight", 0)
    blocks = _blocks(shapes)
    if isinstance(config, LRNetConfig):
        yield from _relations(record, config, shapes, blocks)
        return
    yield from _stem(record, config, shapes)
    if isinstance(config, ViTConfig):
        yield "model.depth", config.depth, blocks.get("", 0)
        yield "model.registers", config.registers, _axis(shapes, "reg_token", 1)
        yield _hidden(config.width, config.mlp_ratio, shapes, "blocks.0")
        heads = config.heads * width_of_head(config)
        yield "model.heads · head_width", heads, _axis(shapes, "blocks.0.attn.proj.weight", 1)
        if config.positions in ("learned", "learned_rotary"):
            yield _rows(record, config, shapes)
        if config.pool == "attention":
            ratio = config.pool_mlp_ratio or config.mlp_ratio
            yield _hidden(config.width, ratio, shapes, "pooling")
        for field in ("representation", "projection"):
            width = getattr(config, field) or 0
            yield f"model.{field}", width, _axis(shapes, f"{field}.weight", 0)
        return
    yield "model.depths", _depths(config), blocks
    for stage in range(len(config.depths)):
        yield _hidden(config.width * 2**stage, config.mlp_ratio, shapes, f"layers.{stage}.blocks.0")
    if config.positions == "absolute":
        yield (
            "the cells of the grid",
            _cells(record, config),
            _axis(shapes, "absolute_pos_embed", 1),
        )


def _relations(
    record: RunRecord, config: LRNetConfig, shapes: Shapes, blocks: dict[str, int]
) -> Iterator[Comparison]:
    """The numbers of an LR-Net."""
    first = "layers.0.blocks.0"
    yield "channels", record.channels, _axis(shapes, "stem.proj.weight", 1)
    yield "model.width", config.width, _axis(shapes, "stem.proj.weight", 0)
    yield "model.depths", _depths(config), blocks
    outer = config.width * config.expansion
    yield "model.expansion · width", outer, _axis(shapes, f"{first}.expand.weight", 0)
    groups = config.width // config.share
    yield "width / model.share", groups, _axis(shapes, f"{first}.relation.key.weight", 0)


def _depths(config: AnySwinConfig | LRNetConfig) -> dict[str, int]:
    return {str(stage): depth for stage, depth in enumerate(config.depths)}


def _stem(record: RunRecord, config: _Patched, shapes: Shapes) -> Iterator[Comparison]:
    """Channels, width and patch, by the shapes of the stem."""
    if config.stem in ("conv", "conv_whitened"):
        first = "whitening" if config.stem == "conv_whitened" else "convs.0"
        steps = len(halvings(pair(config.patch_size)))
        norms = [name for name in shapes if name.startswith("patch_embed.norms.")]
        yield "channels", record.channels, _axis(shapes, f"patch_embed.{first}.weight", 1)
        yield "the norms of the stem", 2 * steps, len(norms)
        last = f"patch_embed.norms.{steps - 1}.weight"
        yield "model.width", config.width, _axis(shapes, last, 0)
        return
    embedding = tuple(shapes.get("patch_embed.proj.weight", ()))
    yield "the axes of patch_embed.proj.weight", 4, len(embedding)
    yield "model.width", config.width, embedding[0]
    yield "channels", record.channels, embedding[1]
    yield "model.patch_size", pair(config.patch_size), embedding[2:]


def _hidden(width: int, ratio: float, shapes: Shapes, block: str) -> Comparison:
    """The hidden width of the MLP of a block or of the pooling."""
    hidden = int(min(width * ratio, 2**62))  # the ratio may be infinite
    return "model.mlp_ratio · width", hidden, _axis(shapes, f"{block}.mlp.fc2.weight", 1)


def _rows(record: RunRecord, config: ViTConfig, shapes: Shapes) -> Comparison:
    """The rows of a learned table: one per cell, and those of the tokens before them."""
    tokens = int(config.class_token) + int(config.distillation_token)
    rows = _cells(record, config) + (tokens if config.class_token_position else 0)
    return "the rows of positions.table", rows, _axis(shapes, "positions.table", 1)


def _blocks(shapes: Shapes) -> dict[str, int]:
    """The number of blocks of each stage; of a ViT under an empty name."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name in shapes:
        if match := _BLOCK.match(name):
            found[match[1] or ""].add(match[2])
    return {stage: len(blocks) for stage, blocks in found.items()}


def _derived(record: RunRecord, config: OwnModelConfig) -> int:
    """The approximate size of the largest table that follows from the size of the images: the
    positions of every token, or a mask or bias for every pair of tokens of a window or image.
    """
    if isinstance(config, LRNetConfig):
        return config.neighbourhood**2
    cells = _cells(record, config)
    if isinstance(config, ViTConfig):
        return cells * (config.width if config.relative_bias == "none" else cells)
    windows = stage_windows(config, record.preprocess.image_size)
    return cells * max(math.prod(window) for window in windows)


def _cells(record: RunRecord, config: _Patched) -> int:
    """The number of patches of an image; an incomplete one counts."""
    sides = zip(record.preprocess.image_size, pair(config.patch_size), strict=True)
    return math.prod(-(-pixels // patch) for pixels, patch in sides)


def _check_additions(tune: LoraRecord, shapes: Shapes, path: Path) -> None:
    """Refuse additions that cannot be merged: A (p r c) and B (p o r) for a weight (of·o c)."""
    names = [name.removesuffix(".lora_a") for name in shapes if name.endswith(".lora_a")]
    if not names:
        raise CheckpointError(f"{path} is of a run with tune=lora, but has no additions (lora_a).")
    for name in names:
        layer = name.rpartition(".")[2]
        of = 3 if layer == "qkv" else 1
        parts = sum(part in tune.targets for part in (("q", "k", "v") if of == 3 else (layer,)))
        match [tuple(shapes.get(f"{name}.{leaf}", ())) for leaf in ("lora_a", "lora_b", "weight")]:
            case [(p, r, c), (q, o, s), (rows, columns)] if (
                p == q == parts > 0 and r == s > 0 and c == columns and rows == of * o
            ):
                continue
        raise CheckpointError(
            f"{path} has additions to '{name[:100]}' that do not fit its weight and "
            f"tune.targets = {list(tune.targets)}. {OLDER}"
        )


def _axis(shapes: Shapes, name: str, axis: int) -> int:
    """The length of a tensor's axis; 0 for a tensor that is not there."""
    shape = shapes.get(name, ())
    return shape[axis] if axis < len(shape) else 0


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]} …"
