"""Weights and JSON as the `from_pretrained` of transformers reads them."""

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
from vision.checkpoints.formats import huggingface
from vision.checkpoints.metadata import INTERPOLATIONS
from vision.config import pair
from vision.models.configs import SwinV2Config, ViTConfig
from vision.models.vit import ViT

CLASSES = {
    "vit": ("ViTForImageClassification", "ViTModel"),
    "deit": ("DeiTForImageClassificationWithTeacher", "DeiTModel"),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Model"),
    "dinov2_with_registers": (
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegistersModel",
    ),
    "swin": ("SwinForImageClassification", "SwinModel"),
    "swinv2": ("Swinv2ForImageClassification", "Swinv2Model"),
}
"""transformers' classes of each type, with and without a head."""
NAME = "Hugging Face"


def huggingface_model(export: Export) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by the names of files, and what config.json says."""
    not_timm(export)
    if isinstance(export.model, ViT):
        kind, tensors, values = _vit(export)
    else:
        kind, tensors, values = _swin(export)
    inferred = export.inferred
    size = inferred.image_size
    labels = inferred.class_names or tuple(f"LABEL_{i}" for i in range(inferred.classes))
    config = {
        "architectures": [CLASSES[kind][0 if inferred.classes else 1]],
        "model_type": kind,
        "image_size": size[0] if size[0] == size[1] else list(size),
        "num_channels": inferred.channels,
        "hidden_act": "gelu",
        "qkv_bias": True,
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
        **values,
    }
    return tensors, config


def _kind(config: ViTConfig) -> str:
    if config.distillation_token:
        return "deit"
    if config.registers:
        return "dinov2_with_registers"
    if config.layer_scale is not None or config.mlp == "swiglu":
        return "dinov2"
    return "dinov2" if config.pool == "class_token_and_mean" else "vit"


def _vit(export: Export) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    _, config = vit_of(export, NAME)
    kind, pooled = _kind(config), config.pool
    wanted = "class_token_and_mean" if kind.startswith("dinov2") else "class_token"
    if not config.class_token or (export.inferred.classes and pooled != wanted):
        refuse(NAME, f"the head of its type '{kind}' sees pool={wanted}, not pool={pooled}")
    if config.qk_norm:
        refuse(NAME, "its types have no norms of queries and keys")
    if config.registers and config.distillation_token:
        refuse(NAME, "its type 'deit' has no registers")
    if kind in ("vit", "deit") and (config.layer_scale is not None or config.mlp == "swiglu"):
        refuse(NAME, f"its type '{kind}' has neither layer scale nor a gated MLP")
    tensors = without_positions(export.tensors)
    tensors["positions.table"] = position_rows(export, 1 + int(config.distillation_token))
    patch = pair(config.patch_size)
    values: dict[str, Any] = {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "patch_size": patch[0] if patch[0] == patch[1] else list(patch),
        "layer_norm_eps": config.norm_eps,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    names = huggingface.vit_from_ours(tensors, kind)
    if not kind.startswith("dinov2"):
        return kind, names, values | {"intermediate_size": int(config.width * config.mlp_ratio)}
    if config.layer_scale is None:
        refuse(NAME, f"its type '{kind}' has layer scale")
    values |= _dinov2_mlp(config) | {"layerscale_value": config.layer_scale}
    if config.registers:
        values["num_register_tokens"] = config.registers
    # Pretraining's token for hidden patches, which a classifier never sees.
    token = export.tensors["cls_token"]
    names[f"{kind}.embeddings.mask_token"] = token.new_zeros(1, config.width)
    return kind, names, values


def _dinov2_mlp(config: ViTConfig) -> dict[str, Any]:
    """The ratio as its type 'dinov2' counts it: whole, and 3/2 of a gated layer's."""
    hidden = int(config.width * config.mlp_ratio)
    gated = config.mlp == "swiglu"
    ratio = round(hidden * (1.5 if gated else 1) / config.width)
    theirs = config.width * ratio
    theirs = (int(theirs * 2 / 3) + 7) // 8 * 8 if gated else theirs
    if theirs != hidden:
        refuse(NAME, f"its type 'dinov2' has no MLP of {hidden} channels for {config.width}")
    return {"mlp_ratio": ratio, "use_swiglu_ffn": gated}


def _swin(export: Export) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    _, config = swin_of(export, NAME)
    window, patch = pair(config.window), pair(config.patch_size)
    if window[0] != window[1]:
        refuse(NAME, f"its windows are square, not {list(window)}")
    kind = "swinv2" if isinstance(config, SwinV2Config) else "swin"
    values: dict[str, Any] = {
        "embed_dim": config.width,
        "hidden_size": config.width * 2 ** (len(config.depths) - 1),
        "depths": list(config.depths),
        "num_heads": list(config.heads),
        "patch_size": patch[0] if patch[0] == patch[1] else list(patch),
        "window_size": window[0],
        "mlp_ratio": config.mlp_ratio,
        "layer_norm_eps": config.norm_eps,
        "drop_path_rate": 0.0,
    }
    if isinstance(config, SwinV2Config):
        trained = config.pretrained_window
        values["pretrained_window_sizes"] = list(trained or [0] * len(config.depths))
    return kind, huggingface.swin_from_ours(export.tensors, kind), values


def huggingface_preprocessor(export: Export) -> dict[str, dict[str, Any]]:
    """The file that says how pictures are prepared: shorter side, then the middle."""
    pictures, (height, width) = export.preprocess(), export.inferred.image_size
    shorter = round(min(height, width) / pictures["crop_ratio"])
    values = {
        "image_processor_type": "BitImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": shorter},
        "resample": INTERPOLATIONS.index(pictures["interpolation"]),
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": pictures["mean"],
        "image_std": pictures["std"],
    }
    return {"preprocessor_config.json": values}
