"""Weights and config.json as timm reads them: `timm.create_model("local-dir:FOLDER")`."""

from typing import Any

import torch
from torch import Tensor

from vision.checkpoints.layouts.exporting import (
    Export,
    one_window,
    position_rows,
    refuse,
    swin_of,
    without_positions,
)
from vision.checkpoints.layouts.rules import from_ours
from vision.checkpoints.layouts.timm.timm_candidates import (
    Candidate,
    candidates,
    class_row,
    differences,
    normed_after,
)
from vision.checkpoints.layouts.timm.timm_models import describe
from vision.checkpoints.layouts.timm.timm_names import (
    NORM_AFTER_POOL,
    POOLS,
    PREPROCESS,
    SWIN,
    VIT,
)
from vision.config import pair, per_stage
from vision.models.configs import SwinConfig, SwinV2Config, TimmConfig, ViTConfig
from vision.models.positions.rotary import dinov3_periods
from vision.models.swin import Swin
from vision.models.windows import clip_windows


def timm_model(export: Export) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by timm's names, and what config.json says."""
    config = export.opened.config
    if isinstance(config, TimmConfig):
        return _baseline(export, config)
    if isinstance(config, ViTConfig):
        architecture, tensors, arguments = _vit(export, config)
        classifier, features = "head", config.width
    else:
        architecture, tensors, arguments = _swin(export)
        classifier, features = "head.fc", export.tensors["norm.weight"].shape[0]
    fields = {
        "architecture": architecture,
        "num_features": features,
        "global_pool": arguments.get("global_pool", "avg"),
        "model_args": {"in_chans": export.opened.channels, **arguments},
    }
    layers = {
        "fixed_input_size": True,
        "first_conv": "patch_embed.proj",
        "classifier": classifier,
    }
    return tensors, _config(export, fields, layers)


def _baseline(export: Export, config: TimmConfig) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A run of one of timm's own models, which has timm's names already."""
    from vision.models.timm import TimmModel  # timm is slow to load

    model = export.opened.model
    assert isinstance(model, TimmModel)
    inner = model.model
    fields = {
        "architecture": config.name,
        "num_features": inner.num_features,
        "model_args": model.arguments,
    }
    kept = ("fixed_input_size", "first_conv", "classifier")
    layers = {name: inner.pretrained_cfg[name] for name in kept if name in inner.pretrained_cfg}
    tensors = {name.removeprefix("model."): tensor for name, tensor in export.tensors.items()}
    return tensors, _config(export, fields, layers)


def _config(export: Export, fields: dict[str, Any], layers: dict[str, Any]) -> dict[str, Any]:
    """config.json with what every model has: its classes, and how its images are prepared."""
    opened, images = export.opened, export.opened.preprocess.values()
    prepared = {
        "num_classes": opened.classes,
        "input_size": [opened.channels, *opened.image_size],
        **{theirs: images[ours] for theirs, ours in PREPROCESS.items()},
    }
    config = fields | {"num_classes": opened.classes, "pretrained_cfg": prepared | layers}
    if opened.class_names is not None:
        config["label_names"] = list(opened.class_names)
    return config


def _vit(export: Export, config: ViTConfig) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """The first of timm's classes that computes the same, by its own definition."""
    if config.pool == "class_token_and_mean":
        refuse("timm", "its head sees the class token and the mean of the patches at once")
    if config.pool not in POOLS.values():
        refuse("timm", f"it has nothing like pool={config.pool}")
    if config.representation or config.projection:
        refuse("timm", "a layer lies between pooling and head (representation or projection)")
    reasons: list[str] = []
    near: Candidate | None = None
    for candidate in candidates(config, export.opened.image_size):
        described = describe(candidate.architecture, candidate.arguments, {})
        if described is None:
            continue
        found = differences(described.settings, config)
        if not found:
            near = candidate
            break
        near = candidate if near is None and set(found) == {"norm_eps"} else near
        reasons.append(f"its {candidate.architecture} has {', '.join(found.values())}")
    else:
        if near is None:
            refuse("timm", "; ".join(reasons))
        export.notes.append(
            f"norm_eps={config.norm_eps} here; timm's {near.architecture} has another."
        )
    return near.architecture, _vit_tensors(export, config, near), dict(near.arguments)


def _vit_tensors(export: Export, config: ViTConfig, candidate: Candidate) -> dict[str, Tensor]:
    tensors = without_positions(export.tensors)
    if config.positions not in ("none", "rotary"):
        rows = 2 if config.distillation_token else int(class_row(config))
        # timm gives registers a position as soon as the class token has one; theirs is zero.
        tensors["positions.table"] = position_rows(export, rows, config.registers if rows else 0)
    periods = tensors.pop("rotary.periods", None)
    if periods is not None and not torch.equal(periods.float(), dinov3_periods(len(periods))):
        export.notes.append("rotary.periods are rounded in these weights; timm computes them anew.")
    last = (NORM_AFTER_POOL,) if normed_after(config) else ()
    return from_ours((*last, *candidate.rules, *VIT), tensors)


def _swin(export: Export) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    model, config = swin_of(export, "timm")
    if config.norm_eps != 1e-5:
        export.notes.append(f"norm_eps={config.norm_eps} here; timm's Swin has 1e-05.")
    arguments: dict[str, Any] = {
        "img_size": list(export.opened.image_size),
        "patch_size": list(pair(config.patch_size)),
        "embed_dim": config.width,
        "depths": list(config.depths),
        "num_heads": list(config.heads),
        "window_size": _window_size(model),
        "mlp_ratio": config.mlp_ratio,
    }
    architecture = "swin_tiny_patch4_window7_224"
    if isinstance(config, SwinV2Config):
        architecture = "swinv2_tiny_window8_256"
        trained = config.pretrained_window
        if trained is not None:
            arguments["pretrained_window_sizes"] = list(trained)
    return architecture, from_ours(SWIN, export.tensors), arguments


def _window_size(model: Swin) -> list[Any]:
    """One window for all stages, or one for each of a first Swin."""
    window, grids = model.config.window, [shape.grid for shape in model.shapes(model.grid)]
    clipped = [clip_windows(w, [g])[0] for w, g in zip(model.windows, grids, strict=True)]
    several = isinstance(model.config, SwinConfig) and per_stage(window)
    # Two entries would be height and width; what is larger than its grid is clipped there.
    if several and len(model.windows) != 2 and clipped == model.windows:
        return [list(window) for window in model.windows]
    return list(one_window(model, "timm"))
