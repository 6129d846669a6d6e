"""Cost of a model: parameters, multiplications, memory of a training step, attention matrices.

The figures are those of the model itself, built and run on `meta` (see `tracing.py`), so they hold
for every model that `build_model` builds.

Definitions, each for one image:

- **MACs**: multiply-adds of the matrix products (linear layers, convolutions, attention) of one
  forward pass, padding included. A network that computes positions (Fourier, Swin V2) runs once per
  batch and is counted in full.
- **Activation bytes**: bytes that every further image of a batch adds to the storages that autograd
  keeps for the backward pass of a training step, in fp32, on a CPU. Tensors shared by a batch
  (parameters, indices, masks) are not counted. With `checkpoint_activations` a block keeps its
  input only.
- **Attention entries**: elements of the matrices softmax(q kᵀ) of one head of one block, all of
  Swin's windows and their padding together. Bytes are those in fp32 if they were stored; fused
  attention does not store them.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from vision.config import ConfigError, Size, pair
from vision.models.build import build_model
from vision.models.configs import ModelConfig, TimmConfig
from vision.models.cost.tracing import Group, Matrices, Shape, Traced, groups_of, trace
from vision.models.layers import Classifier, Grid
from vision.models.swin import Swin
from vision.models.vit import ViT

if TYPE_CHECKING:
    from rich.table import Table

FLOAT = 4
"""Bytes of a number in fp32."""


@dataclass(frozen=True)
class AttentionCost:
    """The attention matrices of a group of equal blocks; entries are for one head of one block."""

    blocks: int
    heads: int
    patches: int
    """Entries between patches alone."""
    tokens: int
    """Entries with prefix tokens: class token, distillation token and registers."""
    everywhere: int
    """Entries if every patch attended to every patch, as without Swin's windows."""

    def bytes(self, kind: str) -> dict[str, int]:
        """Bytes of the entries of a kind: of one head of one block, of all heads of one block, and
        of all heads of all blocks of the group.
        """
        head = FLOAT * int(getattr(self, kind))
        return {"head": head, "heads": self.heads * head, "blocks": self.blocks * self.heads * head}


@dataclass(frozen=True)
class LayerCost:
    """A layer, or a group of equal blocks: the figures are those of the whole group."""

    name: str
    stage: int | None
    """Swin's stage, counted from 1."""
    output: Shape
    """Shape of the output for one image, without padding."""
    parameters: int
    macs: int
    activation_bytes: int
    attention: AttentionCost | None = None


@dataclass(frozen=True)
class ModelCost:
    """The layers of a model in order, and their sums."""

    layers: tuple[LayerCost, ...]

    @property
    def parameters(self) -> int:
        """All parameters: exactly those of the model that `build_model` builds."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def macs(self) -> int:
        """Multiply-adds of a forward pass of one image."""
        return sum(layer.macs for layer in self.layers)

    @property
    def activation_bytes(self) -> int:
        """Bytes that autograd keeps for the backward pass of one image."""
        return sum(layer.activation_bytes for layer in self.layers)

    @property
    def attention_bytes(self) -> dict[str, int] | None:
        """Bytes of the matrices of all heads and blocks, by kind of entries; None for a model whose
        attention is not known.
        """
        groups = [layer.attention for layer in self.layers if layer.attention is not None]
        if not groups:
            return None
        return {kind: sum(group.bytes(kind)["blocks"] for group in groups) for kind in KINDS}


KINDS = {
    "patches": "patches alone",
    "tokens": "with prefix tokens",
    "everywhere": "global",
}
"""The entries that an AttentionCost has, and their titles in a table."""


def cost(
    config: ModelConfig,
    image_size: Size,
    channels: int = 3,
    classes: int = 1000,
    *,
    trained_size: Size | None = None,
) -> ModelCost:
    """The cost of the model of a config on images of this size. `classes=0`: without a head.

    With `trained_size` the model is built for images of that size, which decides on its windows and
    position tables, and run on images of `image_size`.
    """
    size = pair(image_size)
    if min(size) < 1 or channels < 1 or classes < 0:
        raise ValueError(
            f"expected an image of at least one pixel and one channel, and a number of classes "
            f"that is not negative; found image_size={image_size}, channels={channels}, "
            f"classes={classes}."
        )
    built_for = size if trained_size is None else pair(trained_size)
    with torch.inference_mode(False):
        model = build_model(config, built_for, channels=channels, classes=classes, device="meta")
        groups = groups_of(model)
        try:
            traced = trace(model, groups, (channels, *size))
        except (RuntimeError, AssertionError, ValueError) as error:
            if not isinstance(config, TimmConfig):
                raise
            raise ConfigError(
                f"model.name={config.name}: the model cannot be run on images of "
                f"{size[0]} × {size[1]}: {error}"
            ) from error
    return ModelCost(tuple(_layers(model, groups, traced, size)))


def _layers(
    model: Classifier, groups: list[Group], traced: list[Traced], size: Grid
) -> Iterator[LayerCost]:
    """A row for every group with parameters, products or activations."""
    grids = _grids(model, size)
    for i, (group, figures) in enumerate(zip(groups, traced, strict=True)):
        if not (figures.parameters or figures.macs or figures.activation_bytes):
            continue
        output, grid = figures.output, grids[(group.stage or 1) - 1] if grids else None
        if grid is not None and i == 0:  # prefix tokens join the patches on their way to the blocks
            output = traced[1].input
        if isinstance(model, Swin) and grid is not None and i + 1 < len(groups):
            output = *grid, output[-1]  # instead of padded windows
        yield LayerCost(
            name=group.name,
            stage=group.stage,
            output=output,
            parameters=figures.parameters,
            macs=figures.macs,
            activation_bytes=figures.activation_bytes,
            attention=_attention(model, group.blocks, figures.attention, grid),
        )


def _grids(model: Classifier, size: Grid) -> list[Grid]:
    """The grid of patches of every stage; empty for a model of timm, whose grid is unknown."""
    match model:
        case Swin():
            return [shape.grid for shape in model.shapes(model.patch_embed.grid(size))]
        case ViT():
            return [model.patch_embed.grid(size)]
        case _:
            return []


def _attention(
    model: Classifier, blocks: int, matrices: Matrices | None, grid: Grid | None
) -> AttentionCost | None:
    if not blocks or matrices is None or grid is None:
        return None
    windows, heads, queries, keys = matrices
    prefix = model.prefix if isinstance(model, ViT) else 0
    return AttentionCost(
        blocks,
        heads,
        patches=windows * (queries - prefix) * (keys - prefix),
        tokens=windows * queries * keys,
        everywhere=(grid[0] * grid[1]) ** 2,
    )


def as_dict(cost: ModelCost) -> dict[str, Any]:
    """The figures as plain mappings and lists, for JSON."""
    layers = []
    for layer in cost.layers:
        figures = asdict(layer)
        if layer.attention is not None:
            figures["attention"]["bytes"] = {kind: layer.attention.bytes(kind) for kind in KINDS}
        layers.append(figures)
    return {
        "parameters": cost.parameters,
        "macs": cost.macs,
        "activation_bytes": cost.activation_bytes,
        "attention_bytes": cost.attention_bytes,
        "layers": layers,
    }


def table(cost: ModelCost) -> "Table":
    """The figures for a terminal: a row per layer and one of totals.

    A cell on attention has the entries and bytes of one head of one block, then the bytes of all
    heads of one block and of all blocks. Columns that would repeat another are left out.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    groups = [layer.attention for layer in cost.layers if layer.attention is not None]
    kinds = [
        kind
        for kind in KINDS
        if any(kind == "patches" or getattr(group, kind) != group.patches for group in groups)
    ]
    titles = KINDS | ({"patches": "in windows"} if "everywhere" in kinds else {})
    result = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    result.caption = "per image; bytes are those of fp32"
    for title in ("layer", "output"):
        result.add_column(title, no_wrap=True)
    for title in ("parameters", "MACs", "activations", *(f"attention\n{titles[k]}" for k in kinds)):
        result.add_column(title, justify="right", no_wrap=True)
    for layer in cost.layers:
        name = layer.name if layer.stage is None else f"stage {layer.stage}: {layer.name}"
        output = " × ".join(map(str, layer.output))
        cells = [_attention_cell(layer.attention, kind) for kind in kinds]
        result.add_row(name, output, *_figures(layer), *cells)
    result.add_section()
    totals = cost.attention_bytes or {}
    result.add_row("total", "", *_figures(cost), *(format_bytes(totals[k]) for k in kinds))
    return result


def _figures(row: LayerCost | ModelCost) -> list[str]:
    return [f"{row.parameters:,}", format_macs(row.macs), format_bytes(row.activation_bytes)]


def _attention_cell(attention: AttentionCost | None, kind: str) -> str:
    if attention is None:
        return ""
    head, heads, blocks = map(format_bytes, attention.bytes(kind).values())
    return (
        f"{getattr(attention, kind):,} = {head}\n"
        f"{attention.heads} heads {heads}\n"
        f"{attention.blocks} blocks {blocks}"
    )


def format_bytes(number: int) -> str:
    """Bytes in the largest unit that leaves at least one: 153,664 is 150 KiB."""
    size, units = float(number), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if size >= 100 or units[0] == "B" else f"{size:.3g} {units[0]}"


def format_macs(number: int) -> str:
    if number == 0:
        return "0"
    return f"{number / 1e9:.2f} G" if number >= 1e8 else f"{number / 1e6:.2f} M"
