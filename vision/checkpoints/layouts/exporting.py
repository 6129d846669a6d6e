"""Shared parts of all exports: the weights, their model, and refusals."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from vision.checkpoints.open import OpenedModel
from vision.config import ConfigError, pair, per_stage
from vision.models.attention import width_of_head
from vision.models.configs import AnySwinConfig, LRNetConfig, SwinV2Config, TimmConfig, ViTConfig
from vision.models.layers import Grid
from vision.models.positions.added import LearnedPositions
from vision.models.swin import Stage, Swin
from vision.models.vit import ViT
from vision.models.windows import StageWindows, clip_windows

CPU = torch.device("cpu")


@dataclass
class Export:
    """Weights on their way out."""

    opened: OpenedModel
    tensors: Mapping[str, Tensor]
    notes: list[str] = field(default_factory=list)


def refuse(library: str, reason: str) -> NoReturn:
    """The library has no such model."""
    raise ConfigError(f"{library} cannot express this model: {reason}. format=vision keeps it all.")


Needs = Mapping[str, tuple[Any, ...]]
"""Values that settings of a model must have, where any other would compute something else."""
ANY: tuple[Any, ...] = ()
PLAIN_VIT: Needs = {
    "stem": ("patch",),
    "class_token": (True,),
    "registers": (0,),
    "distillation_token": (False,),
    "positions": ("learned", "sincos2d", "fourier", "none"),
    "relative_bias": ("none",),
    "embedding_norm": (False,),
    "block_norm": ("before",),
    "qkv_bias": ("qkv", "none"),
    "qk_norm": (False,),
    "attention_norm": (False,),
    "layer_scale": (None,),
    "mlp": ("plain",),
    "mlp_norm": (False,),
    "pool": ("class_token",),
    "pool_norm": ("before", "after"),
    "representation": (None,),
    "projection": (None,),
}
"""The ViT of the paper, whose fixed positions can be written as a table."""


def check_settings(config: ViTConfig, needs: Needs, library: str, model: str) -> None:
    """Refuse a ViT with a setting that `model` of a library does not have."""
    for name, allowed in needs.items():
        value = getattr(config, name)
        if allowed and value not in allowed:
            wanted = " or ".join(f"{name}={option}" for option in allowed)
            refuse(library, f"{model} has {wanted}, not {name}={value}")
    if config.heads * width_of_head(config) != config.width:
        refuse(library, f"{model} has heads of width / heads, not head_width={config.head_width}")


def swin_of(export: Export, library: str) -> tuple[Swin, AnySwinConfig]:
    """The model, if it is a Swin as others build it."""
    model, config = export.opened.model, export.opened.config
    assert isinstance(model, Swin) and isinstance(config, AnySwinConfig)
    if config.positions != "relative":
        refuse(library, f"a Swin has relative positions there, not positions={config.positions}")
    if not config.shift:
        refuse(library, "every second block shifts its windows there (here shift=false)")
    if any(shape.padded != shape.grid for shape in model.shapes(model.grid)):
        _compare_padding(export, config, library)
    return model, config


def _compare_padding(export: Export, config: AnySwinConfig, library: str) -> None:
    """Note what a library does at an image size whose grids windows do not divide; refuse where its
    code cannot run at that size.
    """
    size = " × ".join(map(str, export.opened.image_size))
    second = isinstance(config, SwinV2Config)
    if library == "official" or (library == "timm" and second):
        refuse(library, f"its code needs windows that divide each grid, unlike those at {size} px")
    if library == "timm":
        export.notes.append(
            f"At {size} px a stage is padded to whole windows. timm shifts such a grid before it "
            f"pads it, so logits differ."
        )
    elif config.padding == "mask":
        export.notes.append(
            f"At {size} px a stage is padded to whole windows. This model masks padding; in "
            f"{library}'s code it takes part in attention (padding=attend here), so logits differ."
        )


def one_window(model: Swin, library: str) -> Grid:
    """The window that a library clips to each stage's grid, or a refusal."""
    window = model.config.window
    if not per_stage(window):
        return pair(window)  # type: ignore[arg-type]
    largest = max(h for h, _ in model.windows), max(w for _, w in model.windows)
    if clip_windows(largest, [shape.grid for shape in model.shapes(model.grid)]) != model.windows:
        refuse(library, f"its stages have windows of their own, {model.windows}")
    return largest


def own_config(export: Export) -> ViTConfig | AnySwinConfig:
    """The config of a model of this project; a run of one of timm's has timm's names already."""
    config = export.opened.config
    if isinstance(config, TimmConfig):
        raise ConfigError(
            f"The weights are those of timm's {config.name}; this format is for ViT and Swin of "
            f"this project. format=timm writes it."
        )
    if isinstance(config, LRNetConfig):
        raise ConfigError(
            "No other library has an LR-Net; format=vision keeps it. `vision export` writes ONNX "
            "or a program of torch.export."
        )
    return config


def position_rows(export: Export, rows: int, before: int = 0) -> Tensor:
    """The table of positions with `rows` rows for tokens in front: zero where there are none here,
    and `before` zeros more between them and the patches, for registers.

    Any other encoding becomes the table that it adds to the patches.
    """
    model = export.opened.model
    assert isinstance(model, ViT)
    cells, width = model.grid[0] * model.grid[1], model.config.width
    like = export.tensors["patch_embed.proj.weight"]
    if isinstance(model.positions, LearnedPositions):
        table = export.tensors["positions.table"]
    elif model.positions is None:
        table = like.new_zeros(1, cells, width)
    else:
        with torch.no_grad():
            table = model.positions(model.grid).to(like.dtype)
        export.notes.append(f"positions={model.config.positions} became a table of {model.grid}.")
    own = table.shape[1] - cells
    first = table[:, :own] if own else table.new_zeros(1, rows, width)
    middle = table.new_zeros(1, before, width)
    return torch.cat([first[:, :rows], middle, table[:, own:]], dim=1)


def without_positions(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All weights but those of the positions."""
    return {name: t for name, t in tensors.items() if not name.startswith("positions.")}


def window_buffers(model: Swin) -> dict[str, Tensor]:
    """What other projects store of the geometry of windows, by our names: for every block the row
    of each pair's offset, and of V2 the offsets themselves.
    """
    buffers: dict[str, Tensor] = {}
    for s, stage in enumerate(model.layers):
        assert isinstance(stage, Stage)
        for b, block in enumerate(stage.blocks):
            window = model.windows[s]
            index, *offsets = block.attn.relative.compute(window, CPU)
            buffers[f"layers.{s}.blocks.{b}.attn.relative_position_index"] = index
            if offsets:
                table = offsets[0].reshape(1, 2 * window[0] - 1, 2 * window[1] - 1, 2)
                buffers[f"layers.{s}.blocks.{b}.attn.relative_coords_table"] = table
    return buffers


def shift_masks(model: Swin) -> dict[str, Tensor]:
    """The masks of shifted blocks as the official code stores them: -100 across regions."""
    masks: dict[str, Tensor] = {}
    for s, stage in enumerate(model.layers):
        assert isinstance(stage, Stage)
        index = StageWindows(*stage.tensors.compute(stage.tensors.geometry, CPU))
        if index.shifted_mask is None:
            continue
        mask = torch.where(index.shifted_mask[:, 0] == 0, 0.0, -100.0)
        for b in range(1, len(stage.blocks), 2):
            masks[f"layers.{s}.blocks.{b}.attn_mask"] = mask
    return masks
