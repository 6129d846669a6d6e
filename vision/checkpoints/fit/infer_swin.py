"""The config of a Swin of either version from the shapes of its weights.

Windows and image size are measured in the file where its tables and masks show them. What is given
or written beside the weights must agree with that; if it does not, it is refused with the value
that fits.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.fit.infer_vit import PLAIN
from vision.checkpoints.fit.stored_windows import StoredStage, stored_stages, window_setting
from vision.checkpoints.layouts.rules import count, mlp_ratio, need, stem_shape
from vision.checkpoints.metadata import StoredWeights
from vision.config import Config, ConfigError, Size, Window, pair, parse, per_stage, square
from vision.models.layers import Grid, ceil_div
from vision.models.windows import clip_windows, stage_grids

CLIPPED = ("timm Swin", "official Swin")
"""Layouts of projects in which a window is never larger than its grid."""


def swin_values(
    source: StoredWeights, size: Grid | None, given: Mapping[str, Any], assumed: list[str]
) -> tuple[dict[str, Any], Grid]:
    """Settings of the model's config, and the image size that it was trained with."""
    tensors, known = source.converted.tensors, source.metadata
    stem = stem_shape(tensors)
    width, patch = stem.width, stem.patch
    second = "layers.0.blocks.0.attn.logit_scale" in tensors
    stages = count(tensors, r"layers\.(\d+)\.blocks\..*")
    hidden = need(tensors, "layers.0.blocks.0.mlp.fc2.weight", 2).shape[1]
    stored = stored_stages(source.tensors, tensors, stages)
    windows, size = _measure(source, stored, patch, size, given, assumed)
    values: dict[str, Any] = {
        "kind": "swin_v2" if second else "swin",
        "stem": stem.kind,
        "patch_size": square(patch),
        "width": width,
        "depths": [count(tensors, rf"layers\.{s}\.blocks\.(\d+)\..*") for s in range(stages)],
        "heads": [_swin_heads(tensors, stage, given) for stage in range(stages)],
        "mlp_ratio": mlp_ratio(hidden, width),
        "window": window_setting(windows, _grids(size, patch, stages)),
        "shift": True,
        "positions": _swin_positions(tensors),
        "padding": "mask",
        "initialization": "trunc_normal",
        "norm_eps": known.model.get("norm_eps", 1e-5),
        **PLAIN,
    }
    if second:
        values["pretrained_window"] = _pretrained(source, stored, given)
    if source.layout == "timm Swin" and _padded(windows, _grids(size, patch, stages)):
        assumed.append(
            f"padding=mask: windows do not divide the grids of {size[0]} × {size[1]} pixels; timm "
            f"shifts such a grid before it pads it, which no setting reproduces"
        )
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
        "Without tables of relative positions the heads of each stage cannot be inferred. "
        "Give them: model.heads=[…]."
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


class _GivenWindow(Config):  # parsed alone: the other settings follow from the weights
    window: Window


class _Stated(NamedTuple):
    """A window that is given, or written beside the weights."""

    text: str
    windows: tuple[Size, ...]
    """One for each stage."""
    exact: bool
    """Whether they are the stages' own, not to be clipped."""

    def at(self, grids: Sequence[Grid]) -> list[Grid]:
        """The windows of a model with these grids."""
        if self.exact:
            return [pair(window) for window in self.windows]
        each = zip(self.windows, grids, strict=True)
        return [clip_windows(window, [grid])[0] for window, grid in each]


def _measure(
    source: StoredWeights,
    stored: list[StoredStage],
    patch: Grid,
    size: Grid | None,
    given: Mapping[str, Any],
    assumed: list[str],
) -> tuple[list[Grid], Grid]:
    """The window of each stage and the image size: as measured in the file, else as stated."""
    stages = len(stored)
    windows = [window for stage in stored if (window := stage.window()) is not None]
    stated = _stated(source, stages, given)
    if len(windows) < stages:
        if stated is None:
            raise ConfigError(
                "The window of this Swin cannot be inferred from the weights, nor from anything "
                "beside them. Give it: model.window=8 (and model.trained_size and "
                "model.pretrained_window where they are not the usual ones)."
            )
        windows = [pair(window) for window in stated.windows]
    measured = _measured_size(stored, patch)
    hint = size or source.metadata.image_size
    trained = size or measured or hint or _usual_size(windows, patch)
    if stated is not None:
        windows = _checked(stated, stored, _grids(trained, patch, stages))
    if hint is not None:
        text = f"{source.metadata.origin}: image size" if size is None else "trained_size"
        _check_size(text, hint, windows, stored, patch, clipped=source.layout in CLIPPED)
    elif measured is None:
        one = isinstance(window_setting(windows, _grids(trained, patch, stages)), int)
        if not one or _clipped_stage(windows) is None:
            assumed.append(
                f"images of {trained[0]} × {trained[1]} pixels: the last stage is one window, as "
                f"usual"
            )
    return windows, trained


def _stated(source: StoredWeights, stages: int, given: Mapping[str, Any]) -> _Stated | None:
    """The window that is given, else the one that is written beside the weights."""
    value, text = given.get("window"), "model.window="
    theirs = value is None
    if theirs:
        value, text = source.metadata.model.get("window"), f"{source.metadata.origin}: window "
        if value is None:
            return None
        if isinstance(value, list | tuple) and len(value) != 2:  # timm's, one side for each stage
            value = [[entry, entry] if isinstance(entry, int) else entry for entry in value]
    window = parse(_GivenWindow, {"window": value}).window
    if not per_stage(window):
        return _Stated(f"{text}{value}", (window,) * stages, exact=False)  # type: ignore[arg-type]
    if len(window) != stages:
        raise CheckpointError(
            f"{text}{value} has {len(window)} entries, but the weights have {stages} stages. Give "
            f"one entry [height, width] per stage."
        )
    return _Stated(f"{text}{value}", window, exact=not theirs)


def _checked(stated: _Stated, stored: list[StoredStage], grids: Sequence[Grid]) -> list[Grid]:
    """The stated windows on these grids, if the file can have them."""
    windows = stated.at(grids)
    for s, stage in enumerate(stored):
        if stage.fits(windows[s]):
            continue
        shown = [window for each in stored if (window := each.window()) is not None]
        fitting = (
            f" model.window={window_setting(shown, grids)}:" if len(shown) == len(stored) else ""
        )
        raise CheckpointError(
            f"{stated.text} contradicts the weights: in stage {s + 1} {stage.evidence()}. Give"
            f"{fitting} the window that they were trained with."
        )
    return windows


def _check_size(
    text: str,
    size: Grid,
    windows: list[Grid],
    stored: list[StoredStage],
    patch: Grid,
    *,
    clipped: bool,
) -> None:
    """Refuse an image size at which the file could not have the masks and tables that it has."""
    for s, grid in enumerate(_grids(size, patch, len(stored))):
        stage, window = stored[s], windows[s]
        down, across = ceil_div(grid[0], window[0]), ceil_div(grid[1], window[1])
        counts = stage.counts()
        if counts is not None and counts != (down, across):
            reason = f"attn_mask has {counts[0]} × {counts[1]} windows, not {down} × {across}"
        elif stage.mask is not None and len(stage.mask) != down * across:
            reason = f"attn_mask has {len(stage.mask)} windows, not {down} × {across}"
        elif clipped and (window[0] > grid[0] or window[1] > grid[1]):
            reason = f"{stage.evidence()}, larger than the grid of {grid[0]} × {grid[1]}"
        else:
            continue
        height, width = _measured_size(stored, patch) or _usual_size(windows, patch)
        raise CheckpointError(
            f"{text} {size[0]} × {size[1]} contradicts the weights: in stage {s + 1} {reason}. "
            f"Give trained_size=[{height},{width}], which fits."
        )


def _pretrained(
    source: StoredWeights, stored: list[StoredStage], given: Mapping[str, Any]
) -> list[int] | None:
    """The windows of pretraining, unless they are the model's own."""
    stated = given.get("pretrained_window") or source.metadata.model.get("pretrained_window")
    offsets = [stage.offsets for stage in stored if stage.offsets is not None]
    if len(offsets) < len(stored):
        return None if stated is None else list(stated)
    trained = [offset.trained for offset in offsets]
    # The offset within a window of one token is zero in any unit.
    telling = [s for s, offset in enumerate(offsets) if max(offset.window) > 1]
    if stated is not None and any(list(stated)[s : s + 1] != [trained[s]] for s in telling):
        raise CheckpointError(
            f"model.pretrained_window={list(stated)} contradicts the weights, whose tables of "
            f"offsets (relative_coords_table) are those of {trained}: give "
            f"model.pretrained_window={trained}."
        )
    return None if all(offset.unit == offset.window for offset in offsets) else trained


def _measured_size(stored: list[StoredStage], patch: Grid) -> Grid | None:
    """The image size by the first stored mask: the number of windows times their size."""
    for s, stage in enumerate(stored):
        counts, window = stage.counts(), stage.window()
        if counts is not None and window is not None:
            y, x = (c * w * 2**s for c, w in zip(counts, window, strict=True))
            return y * patch[0], x * patch[1]
    return None


def _usual_size(windows: Sequence[Grid], patch: Grid) -> Grid:
    """The image size by the first stage whose window is clipped to its grid; or as if the last
    stage were one window, as in all published models.
    """
    stage = _clipped_stage(windows) or len(windows) - 1
    y, x = (side * 2**stage for side in windows[stage])
    return y * patch[0], x * patch[1]


def _clipped_stage(windows: Sequence[Grid]) -> int | None:
    """The first stage whose window is smaller than the one before."""
    return next((s for s in range(1, len(windows)) if windows[s] < windows[s - 1]), None)


def _grids(size: Grid, patch: Grid, stages: int) -> list[Grid]:
    grid = ceil_div(size[0], patch[0]), ceil_div(size[1], patch[1])
    return stage_grids(grid, stages)


def _padded(windows: Sequence[Grid], grids: Sequence[Grid]) -> bool:
    return any(y % h or x % w for (h, w), (y, x) in zip(windows, grids, strict=True))
