"""Weights and config.json as timm reads them: `timm.create_model("local-dir:FOLDER")`."""

from typing import Any

from torch import Tensor

from vision.checkpoints.exporting import (
    Export,
    not_timm,
    position_rows,
    refuse,
    swin_of,
    vit_of,
    without_positions,
)
from vision.checkpoints.formats import timm
from vision.config import pair
from vision.models.configs import SwinV2Config, ViTConfig
from vision.models.vit import ViT


def timm_model(export: Export) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by timm's names, and what config.json says."""
    not_timm(export)
    if isinstance(export.model, ViT):
        architecture, tensors, arguments = _vit(export)
        classifier = "head"
    else:
        architecture, tensors, arguments = _swin(export)
        classifier = "head.fc"
    inferred, pictures = export.inferred, export.preprocess()
    size = [inferred.channels, *inferred.image_size]
    config = {
        "architecture": architecture,
        "num_classes": inferred.classes,
        "num_features": export.tensors["norm.weight"].shape[0],
        "global_pool": arguments.get("global_pool", "avg"),
        "model_args": {"in_chans": inferred.channels, **arguments},
        "pretrained_cfg": {
            "num_classes": inferred.classes,
            "input_size": size,
            "fixed_input_size": True,
            "mean": pictures["mean"],
            "std": pictures["std"],
            "interpolation": pictures["interpolation"],
            "crop_pct": pictures["crop_ratio"],
            "first_conv": "patch_embed.proj",
            "classifier": classifier,
        },
    }
    if inferred.class_names is not None:
        config["label_names"] = list(inferred.class_names)
    return tensors, config


def _vit(export: Export) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    model, config = vit_of(export, "timm")
    if config.pool == "class_token_and_mean":
        refuse("timm", "its head sees the class token and the mean of the patches at once")
    tensors = without_positions(export.tensors)
    arguments: dict[str, Any] = {
        "img_size": list(export.inferred.image_size),
        "patch_size": list(pair(config.patch_size)),
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": config.mlp_ratio,
        "qk_norm": config.qk_norm,
        "init_values": config.layer_scale,
    }
    if config.norm_eps != 1e-6:
        export.notes.append(f"norm_eps={config.norm_eps} here; timm's ViT has 1e-06.")
    if config.distillation_token:
        if config.registers or config.mlp == "swiglu":
            refuse("timm", "a distilled ViT has neither registers nor a gated MLP there")
        tensors["positions.table"] = position_rows(export, 2)
        arguments["global_pool"] = "token"
        names = timm.vit_from_ours(tensors, norm_after_pool=False)
        return "deit_base_distilled_patch16_224", names, arguments
    rows = getattr(model.positions, "class_rows", 0)
    if config.positions == "none":
        arguments["pos_embed"] = "none"
    else:
        # timm gives registers a position as soon as the class token has one; theirs is zero.
        tensors["positions.table"] = position_rows(export, rows, config.registers if rows else 0)
    # The norm of a class token is the same before and after it is picked.
    after = config.pool_norm == "after" and config.pool == "mean"
    arguments |= {
        "class_token": config.class_token,
        "no_embed_class": rows == 0,
        "reg_tokens": config.registers,
        "global_pool": "avg" if config.pool == "mean" else "token",
        "fc_norm": after,
    }
    return _architecture(config, arguments), timm.vit_from_ours(tensors, after), arguments


def _architecture(config: ViTConfig, arguments: dict[str, Any]) -> str:
    """Any of timm's ViTs will do, since the arguments say everything but the kind of MLP."""
    if config.mlp == "gelu":
        return "vit_base_patch16_224"
    arguments["mlp_ratio"] = 2 * config.mlp_ratio  # gate and gated together
    return "vit_giant_patch14_dinov2"


def _swin(export: Export) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    _, config = swin_of(export, "timm")
    if config.norm_eps != 1e-5:
        export.notes.append(f"norm_eps={config.norm_eps} here; timm's Swin has 1e-05.")
    arguments: dict[str, Any] = {
        "img_size": list(export.inferred.image_size),
        "patch_size": list(pair(config.patch_size)),
        "embed_dim": config.width,
        "depths": list(config.depths),
        "num_heads": list(config.heads),
        "window_size": list(pair(config.window)),
        "mlp_ratio": config.mlp_ratio,
    }
    architecture = "swin_tiny_patch4_window7_224"
    if isinstance(config, SwinV2Config):
        architecture = "swinv2_tiny_window8_256"
        trained = config.pretrained_window
        if trained is not None:
            arguments["pretrained_window_sizes"] = list(trained)
    return architecture, timm.swin_from_ours(export.tensors), arguments
