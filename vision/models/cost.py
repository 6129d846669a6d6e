"""What a model costs: parameters, multiplications, memory of a training step, attention matrices.

The figures follow from the config and the size of a picture; no model of this project is built for
them. Only a timm model, whose inside this project does not know, is run once on fake tensors.

Definitions, each for one picture:

- **MACs**: multiply-adds of the matrix products (linear layers, convolutions, attention) of one
  forward pass, padding included. A network that computes positions (Fourier, Swin V2) runs once per
  batch and is counted in full.
- **Activation bytes**: what every further picture of a batch adds to what the backward pass needs:
  the storages that autograd keeps from the forward pass of a training step, in fp32, on a CPU. What
  a batch shares (parameters, indices, masks) is not counted. With `checkpoint_activations` a block
  keeps its input only.
- **Attention entries**: elements of the matrices softmax(q kᵀ) of one head of one block, all of
  Swin's windows and their padding together. Bytes are those in fp32 if they were stored; fused
  attention does not store them.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vision.config import Size, pair
from vision.models.configs import ModelConfig, SwinConfig, SwinV2Config, TimmConfig, ViTConfig
from vision.models.cost_layers import AttentionCost, LayerCost, swin_layers, vit_layers

if TYPE_CHECKING:
    from rich.table import Table


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
        """Multiply-adds of a forward pass of one picture."""
        return sum(layer.macs for layer in self.layers)

    @property
    def activation_bytes(self) -> int:
        """What autograd keeps for the backward pass of one picture."""
        return sum(layer.activation_bytes for layer in self.layers)

    @property
    def attention_bytes(self) -> dict[str, int] | None:
        """Bytes of the matrices of all heads and blocks, by kind of entries; None for a model whose
        attention is not known.
        """
        groups = [layer.attention for layer in self.layers if layer.attention is not None]
        if not groups:
            return None
        return {
            kind: sum(group.bytes_of_blocks(getattr(group, kind)) for group in groups)
            for kind in KINDS
        }


KINDS = {
    "patches": "patches alone",
    "tokens": "with prefix tokens",
    "everywhere": "global",
}
"""The entries that an AttentionCost has, and how a table calls them."""


def cost(
    config: ModelConfig, image_size: Size, channels: int = 3, classes: int = 1000
) -> ModelCost:
    """What the model of a config costs on pictures of this size. `classes=0`: without a head."""
    size = pair(image_size)
    if min(size) < 1 or channels < 1 or classes < 0:
        raise ValueError(
            f"expected a picture of at least one pixel and one channel, and no negative number of "
            f"classes; found image_size={image_size}, channels={channels}, classes={classes}."
        )
    match config:
        case ViTConfig():
            layers = vit_layers(config, size, channels, classes)
        case SwinConfig() | SwinV2Config():
            layers = swin_layers(config, size, channels, classes)
        case TimmConfig():
            from vision.models.cost_traced import traced_layers  # needs timm, which is slow to load

            layers = traced_layers(config, size, channels, classes)
    return ModelCost(tuple(layers))


def as_dict(cost: ModelCost) -> dict[str, Any]:
    """The figures as plain mappings and lists, for JSON."""
    layers = []
    for layer in cost.layers:
        figures = asdict(layer)
        if layer.attention is not None:
            figures["attention"]["bytes"] = {
                kind: {
                    "head": layer.attention.bytes_of_head(getattr(layer.attention, kind)),
                    "heads": layer.attention.bytes_of_heads(getattr(layer.attention, kind)),
                    "blocks": layer.attention.bytes_of_blocks(getattr(layer.attention, kind)),
                }
                for kind in KINDS
            }
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
    result.caption = "per picture; bytes are those of fp32"
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
    return [f"{row.parameters:,}", _format_macs(row.macs), format_bytes(row.activation_bytes)]


def _attention_cell(attention: AttentionCost | None, kind: str) -> str:
    if attention is None:
        return ""
    entries: int = getattr(attention, kind)
    lines = [
        f"{entries:,} = {format_bytes(attention.bytes_of_head(entries))}",
        f"{attention.heads} heads {format_bytes(attention.bytes_of_heads(entries))}",
        f"{attention.blocks} blocks {format_bytes(attention.bytes_of_blocks(entries))}",
    ]
    return "\n".join(lines)


def format_bytes(number: int) -> str:
    """Bytes in the largest unit that leaves at least one: 153,664 is 150 KiB."""
    size, units = float(number), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if size >= 100 or units[0] == "B" else f"{size:.3g} {units[0]}"


def _format_macs(number: int) -> str:
    if number == 0:
        return "0"
    return f"{number / 1e9:.2f} G" if number >= 1e8 else f"{number / 1e6:.2f} M"
