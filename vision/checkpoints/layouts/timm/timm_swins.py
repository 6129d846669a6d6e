"""Settings of our Swin and Swin V2, read off timm's."""

from typing import Any

from timm.layers import Mlp, PatchEmbed  # type: ignore[attr-defined]
from timm.models import swin_transformer as first
from timm.models import swin_transformer_v2 as second
from torch import nn

from vision.checkpoints.fit.stored_windows import window_setting
from vision.checkpoints.layouts.rules import mlp_ratio
from vision.checkpoints.layouts.timm.timm_models import (
    Described,
    activation,
    norm_eps,
    normed,
    patch_size,
    require,
    same,
)

Window = tuple[int, int]


def swin(model: Any) -> Described | None:
    """Settings of one of timm's Swins, all that change its function; None: it is not a Swin."""
    if type(model) not in (first.SwinTransformer, second.SwinTransformerV2):
        return None
    stem, stages = model.patch_embed, list(model.layers)
    require(type(stem) is PatchEmbed, f"its stem is a {type(stem).__name__}")
    require(normed(stem.norm) and stem.proj.bias is not None, "its stem has no norm or no bias")
    require(normed(model.norm), "it has no norm behind the last stage")
    require(model.global_pool == "avg", f"its pooling is '{model.global_pool}'")
    blocks = [[_block(block) for block in stage.blocks] for stage in stages]
    width = stem.proj.out_channels
    for s, stage in enumerate(stages):
        _check_stage(s, stage, width)
    heads = [same([b["heads"] for b in stage], "heads differ in a stage") for stage in blocks]
    ratios = [b["ratio"] for stage in blocks for b in stage]
    windows = [_window(stage) for stage in stages]
    settings = {
        "kind": "swin_v2" if type(model) is second.SwinTransformerV2 else "swin",
        "patch_size": patch_size(stem, stem.proj),
        "width": width,
        "depths": [len(stage.blocks) for stage in stages],
        "heads": heads,
        "window": window_setting(windows, [_grid(stage) for stage in stages]),
        "stem": "patch",
        "initialization": "trunc_normal",
        "shift": _shift(stages),
        "positions": "relative",
        "mlp_ratio": same(ratios, "its stages have MLPs of different ratios"),
        "norm_eps": norm_eps(model),
    }
    if settings["kind"] == "swin_v2" and (trained := _pretrained(stages)) is not None:
        settings["pretrained_window"] = trained
    return Described(settings)


def _block(block: Any) -> dict[str, Any]:
    """What must be the same in all blocks of a stage."""
    attn, mlp = block.attn, block.mlp
    plain = (first.SwinTransformerBlock, second.SwinTransformerV2Block)
    require(type(block) in plain, f"its blocks are {type(block).__name__}")
    require(normed(block.norm1) and normed(block.norm2), "its blocks lack norms")
    biased = attn.qkv.bias is not None or getattr(attn, "q_bias", None) is not None
    require(biased and attn.proj.bias is not None, "its attention lacks biases")
    require(attn.proj.in_features == block.dim, "the width of its heads is set otherwise")
    require(type(mlp) is Mlp and activation(mlp.act) == "gelu", "its MLPs are not plain GELU ones")
    require(not normed(mlp.norm), "its MLPs have norms")
    return {"heads": attn.num_heads, "ratio": mlp_ratio(mlp.fc2.in_features, block.dim)}


def _check_stage(s: int, stage: Any, width: int) -> None:
    dims = {block.dim for block in stage.blocks}
    require(dims == {width * 2**s}, "the width of its stages does not double")
    merged = type(stage.downsample) in (first.PatchMerging, second.PatchMerging)
    require(merged if s else type(stage.downsample) is nn.Identity, "it merges patches otherwise")


def _grid(stage: Any) -> Window:
    y, x = same([tuple(b.input_resolution) for b in stage.blocks], "grids differ in a stage")
    return y, x


def _window(stage: Any) -> Window:
    y, x = same([tuple(b.window_size) for b in stage.blocks], "windows differ in a stage")
    grid = _grid(stage)
    require(y <= grid[0] and x <= grid[1], f"a window of {y} × {x} is larger than its grid")
    return y, x


def _shift(stages: list[Any]) -> bool:
    """Whether every second block is shifted by half a window wherever there is room."""
    found, wanted = [], []
    for stage in stages:
        window, grid = _window(stage), _grid(stage)
        for index, block in enumerate(stage.blocks):
            found.append(tuple(block.shift_size))
            room = [w // 2 if g > w else 0 for g, w in zip(grid, window, strict=True)]
            wanted.append(tuple(room) if index % 2 else (0, 0))
    none = all(shift == (0, 0) for shift in found)
    require(found == wanted or none, "its windows are shifted otherwise")
    return found == wanted


def _pretrained(stages: list[Any]) -> list[int] | None:
    """The windows that the position networks measure offsets in; None: their own."""
    trained = [tuple(stage.blocks[0].attn.pretrained_window_size) for stage in stages]
    if all(window == (0, 0) for window in trained):
        return None
    plain = all(y == x and y > 0 for y, x in trained)
    require(plain, f"its pretrained windows {trained} are not square")
    return [y for y, _ in trained]
