"""The config of a Swin of either version from the shapes of its weights."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.geometry import (
    PLAIN,
    count,
    mlp_ratio,
    need,
    patch_weight,
    stage_windows,
    stored_offsets,
    stored_windows_of_a_picture,
)
from vision.checkpoints.source import Source
from vision.config import ConfigError, pair
from vision.models.layers import Grid


def swin_values(
    source: Source, size: Grid | None, given: Mapping[str, Any], assumed: list[str]
) -> tuple[dict[str, Any], Grid]:
    tensors, known = source.converted.tensors, source.metadata
    projection = patch_weight(tensors)
    width, patch = projection.shape[0], (projection.shape[2], projection.shape[3])
    second = "layers.0.blocks.0.attn.logit_scale" in tensors
    stages = count(tensors, r"layers\.(\d+)\.blocks\..*")
    hidden = need(tensors, "layers.0.blocks.0.mlp.fc2.weight", 2).shape[1]
    values: dict[str, Any] = {
        "kind": "swin_v2" if second else "swin",
        "patch_size": patch[0] if patch[0] == patch[1] else list(patch),
        "width": width,
        "depths": [count(tensors, rf"layers\.{s}\.blocks\.(\d+)\..*") for s in range(stages)],
        "heads": [_swin_heads(tensors, stage, given) for stage in range(stages)],
        "mlp_ratio": mlp_ratio(hidden, width),
        "shift": True,
        "positions": _swin_positions(tensors),
        "norm_eps": known.model.get("norm_eps", 1e-5),
        **PLAIN,
    }
    windows: list[int]
    if second:
        windows = _second_windows(source, stages, given)
        values["pretrained_window"] = _pretrained(source, given)
    else:
        windows = _first_windows(source, given)
    values["window"] = max(windows)
    size = size or known.image_size or _swin_size(source, windows, patch, stages, assumed)
    return values, size


def _swin_heads(tensors: Mapping[str, Tensor], stage: int, given: Mapping[str, Any]) -> int:
    place = f"layers.{stage}.blocks.0.attn"
    if f"{place}.logit_scale" in tensors:
        return need(tensors, f"{place}.logit_scale", 3).shape[0]
    if f"{place}.relative_position_bias_table" in tensors:
        return need(tensors, f"{place}.relative_position_bias_table", 2).shape[1]
    if "heads" in given:
        return 1  # replaced by what is given
    raise ConfigError(
        "Without tables of relative positions the weights do not tell the heads of each stage. "
        "Give them: heads=[…]."
    )


def _swin_positions(tensors: Mapping[str, Tensor]) -> str:
    place = "layers.0.blocks.0.attn"
    relative = f"{place}.relative_position_bias_table" in tensors
    relative |= f"{place}.cpb_mlp.0.weight" in tensors
    absolute = "absolute_pos_embed" in tensors
    if relative and absolute:
        raise CheckpointError(
            "the Swin has absolute and relative positions at once; here a Swin has one of them."
        )
    return "relative" if relative else "absolute" if absolute else "none"


def _first_windows(source: Source, given: Mapping[str, Any]) -> list[int]:
    windows = stage_windows(source.converted.tensors)
    square = [window for window in windows if window is not None]
    if windows and len(square) == len(windows):
        return square
    return _told_window(source, given, "The tables of relative positions are not square")


def _second_windows(source: Source, stages: int, given: Mapping[str, Any]) -> list[int]:
    offsets = stored_offsets(source.tensors)
    if len(offsets) == stages and "window" not in given:
        return [offset.window for offset in offsets]
    return _told_window(source, given, "The weights of a Swin V2 fit any window")


def _told_window(source: Source, given: Mapping[str, Any], why: str) -> list[int]:
    window = given.get("window", source.metadata.model.get("window"))
    if window is None:
        raise ConfigError(
            f"{why}, and nothing beside them tells it. Give it: window=8 (and image_size and "
            f"pretrained_window where they are not the usual ones)."
        )
    return [max(pair(window if isinstance(window, int) else tuple(window)))]


def _pretrained(source: Source, given: Mapping[str, Any]) -> list[int] | None:
    offsets = stored_offsets(source.tensors)
    if "pretrained_window" in source.metadata.model:
        return list(source.metadata.model["pretrained_window"])
    if any(offset.window != offset.trained for offset in offsets):
        return [offset.trained for offset in offsets]
    return None


def _swin_size(
    source: Source, windows: list[int], patch: Grid, stages: int, assumed: list[str]
) -> Grid:
    """The size of the pictures: by the stored mask, by a last stage whose grid is smaller than the
    window, or as if the last stage were one window, as in all published models.
    """
    side = stored_windows_of_a_picture(source.tensors)
    cells = None if side is None else side * windows[0]
    for stage, window in enumerate(windows):
        if cells is None and window < windows[0]:
            cells = window * 2**stage
    if cells is None:
        cells = max(windows) * 2 ** (stages - 1)
        size = cells * patch[0], cells * patch[1]
        assumed.append(
            f"pictures of {size[0]} × {size[1]} pixels: the last stage is one window, as usual"
        )
    return cells * patch[0], cells * patch[1]
