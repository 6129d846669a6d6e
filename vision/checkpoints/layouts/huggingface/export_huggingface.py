"""Weights and JSON as the `from_pretrained` of transformers reads them: which of its types computes
the same, and with which config.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision.checkpoints.layouts.config_fields import written
from vision.checkpoints.layouts.exporting import (
    ANY,
    PLAIN_VIT,
    Export,
    Needs,
    check_settings,
    one_window,
    own_config,
    position_rows,
    refuse,
    swin_of,
    without_positions,
)
from vision.checkpoints.layouts.huggingface import huggingface_names as huggingface
from vision.checkpoints.layouts.huggingface.huggingface_config import READ, TOWERS
from vision.checkpoints.metadata import INTERPOLATIONS
from vision.config import pair, square
from vision.models.configs import SwinV2Config, ViTConfig
from vision.models.positions.rotary import dinov3_periods

NAME = "Hugging Face"


class Kind(NamedTuple):
    """A type of transformers."""

    classes: tuple[str | None, str | None]
    """Its classes with and without a head; None: there is none."""
    needs: Needs = {}  # noqa: RUF012
    """Settings of a ViT."""


_DINOV2 = {**PLAIN_VIT, "layer_scale": ANY, "mlp": ("plain", "gated")}
_DINOV2["pool"] = ("class_token_and_mean",)
_CLIP: Needs = {
    **PLAIN_VIT,
    "stem": ("patch_no_bias",),
    "embedding_norm": (True,),
    "qkv_bias": ("qkv",),
}
_SIGLIP: Needs = {
    **PLAIN_VIT,
    "class_token": (False,),
    "qkv_bias": ("qkv",),
    "pool_norm": ("before",),
}
KINDS = {
    "vit": Kind(("ViTForImageClassification", "ViTModel"), PLAIN_VIT),
    "deit": Kind(
        ("DeiTForImageClassificationWithTeacher", "DeiTModel"),
        {**PLAIN_VIT, "distillation_token": (True,)},
    ),
    "dinov2": Kind(("Dinov2ForImageClassification", "Dinov2Model"), _DINOV2),
    "dinov2_with_registers": Kind(
        ("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersModel"),
        {**_DINOV2, "registers": ANY},
    ),
    "dinov3_vit": Kind(
        (None, "DINOv3ViTModel"),
        {
            **_DINOV2,
            "registers": ANY,
            "positions": ("rotary",),
            "rotary": ("dinov3", "dinov3_hf"),
            "qkv_bias": ANY,
            "pool": ("class_token",),
        },
    ),
    "clip_vision_model": Kind((None, "CLIPVisionModel"), {**_CLIP, "projection": ANY}),
    "clip": Kind(
        ("CLIPForImageClassification", None),
        {**_CLIP, "pool": ("mean",), "pool_norm": ("none",)},
    ),
    "siglip_vision_model": Kind((None, "SiglipVisionModel"), {**_SIGLIP, "pool": ("attention",)}),
    "siglip": Kind(("SiglipForImageClassification", None), {**_SIGLIP, "pool": ("mean",)}),
    "beit": Kind(
        ("BeitForImageClassification", "BeitModel"),
        {
            **PLAIN_VIT,
            "relative_bias": ANY,
            "qkv_bias": ("qv",),
            "layer_scale": ANY,
            "pool": ("class_token", "mean"),
        },
    ),
    "swin": Kind(("SwinForImageClassification", "SwinModel")),
    "swinv2": Kind(("Swinv2ForImageClassification", "Swinv2Model")),
}


def huggingface_model(export: Export) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by the names of files, and what config.json says."""
    config = own_config(export)
    if isinstance(config, ViTConfig):
        kind, tensors, values = _vit(export, config)
    else:
        kind, tensors, values = _swin(export)
    opened = export.opened
    name = KINDS[kind].classes[0 if opened.classes else 1]
    if kind == "clip_vision_model" and "projection.weight" in export.tensors:
        name = "CLIPVisionModelWithProjection"
    fields: dict[str, Any] = {
        "model_type": TOWERS.get(kind, kind),
        "image_size": square(opened.image_size),
        "num_channels": opened.channels,
        "patch_size": square(pair(config.patch_size)),
        **written(READ[TOWERS.get(kind, kind)], config),
        **values,
    }
    if kind in TOWERS:
        fields = {"model_type": kind, "vision_config": fields}
    fields["architectures"] = [name]
    if opened.classes:
        labels = opened.class_names or tuple(f"LABEL_{i}" for i in range(opened.classes))
        fields["id2label"] = {str(index): label for index, label in enumerate(labels)}
        fields["label2id"] = {label: index for index, label in enumerate(labels)}
        if opened.multi_label:
            fields["problem_type"] = "multi_label_classification"
    return tensors, fields


def _swin(export: Export) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    model, config = swin_of(export, NAME)
    window = one_window(model, NAME)
    if window[0] != window[1]:
        refuse(NAME, f"its windows are square, not {list(window)}")
    kind = "swinv2" if isinstance(config, SwinV2Config) else "swin"
    if kind == "swin" and set(model.windows) != {window}:
        refuse(NAME, f"the windows {model.windows} shrink with the grid; its tables do not")
    shapes = {
        "embed_dim": config.width,
        "hidden_size": config.width * 2 ** (len(config.depths) - 1),
        "depths": list(config.depths),
        "window_size": window[0],
        "mlp_ratio": config.mlp_ratio,
        "drop_path_rate": 0.0,
    }
    return kind, huggingface.swin_from_ours(export.tensors, kind), shapes


def huggingface_preprocessor(export: Export) -> dict[str, dict[str, Any]]:
    """The file that says how images are prepared: shorter side, then the middle."""
    images, (height, width) = export.opened.preprocess, export.opened.image_size
    shorter = round(min(height, width) / images.crop_ratio)
    values = {
        "image_processor_type": "BitImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": shorter},
        "resample": INTERPOLATIONS.index(images.interpolation),
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": list(images.mean),
        "image_std": list(images.std),
    }
    return {"preprocessor_config.json": values}


def _vit(export: Export, config: ViTConfig) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """Type, tensors by the names of files, and fields of the config that tensors show."""
    kind = _kind(config)
    _check(export, config, kind)
    values = {"hidden_size": config.width, "num_hidden_layers": config.depth}
    values |= _shapes(export, config, kind)
    tensors = _with_positions(export, config, kind)
    names = huggingface.vit_from_ours(tensors, kind, config.pool_norm == "after")
    if kind.startswith("dinov"):
        # Pretraining's token for hidden patches, which a classifier never sees.
        shape = (1, 1, config.width) if kind == "dinov3_vit" else (1, config.width)
        place = "embeddings" if kind == "dinov3_vit" else f"{kind}.embeddings"
        names[f"{place}.mask_token"] = export.tensors["cls_token"].new_zeros(shape)
    if kind == "clip":  # the norm that its classifier leaves out
        norm = torch.nn.LayerNorm(config.width).state_dict()
        names |= {f"vision_model.post_layernorm.{part}": norm[part] for part in norm}
    return kind, names, values


def _kind(config: ViTConfig) -> str:
    """The only type that may compute the same."""
    if config.positions == "rotary":
        return "dinov3_vit"
    if config.embedding_norm:
        return "clip" if config.pool == "mean" else "clip_vision_model"
    if not config.class_token:
        return "siglip" if config.pool == "mean" else "siglip_vision_model"
    if config.relative_bias != "none" or config.qkv_bias == "qv":
        return "beit"
    if config.distillation_token:
        return "deit"
    if config.registers:
        return "dinov2_with_registers"
    if config.layer_scale is not None or config.mlp == "gated":
        return "dinov2"
    return "dinov2" if config.pool == "class_token_and_mean" else "vit"


def _check(export: Export, config: ViTConfig, kind: str) -> None:
    """Refuse a model that the type does not compute."""
    has_head = bool(export.opened.classes)
    needs = KINDS[kind].needs
    if kind.startswith("dinov2") and not has_head:
        needs = {**needs, "pool": ("class_token", "class_token_and_mean")}
    check_settings(config, needs, NAME, f"its type '{kind}'")
    if KINDS[kind].classes[0 if has_head else 1] is None:
        what = "no head" if has_head else "a head, which these weights lack,"
        refuse(NAME, f"its type '{kind}' has {what} for these features")
    if kind.startswith("dinov") and config.layer_scale is None:
        refuse(NAME, f"its type '{kind}' has layer scale")
    if kind.startswith("dinov2") and config.mlp == "gated" and config.activation != "silu":
        refuse(NAME, f"its type '{kind}' has gates of silu, not activation={config.activation}")
    if kind == "beit" and (config.pool == "mean") != (config.pool_norm == "after"):
        refuse(NAME, f"its type '{kind}' norms a mean after pooling and a class token before")
    if kind == "siglip_vision_model" and config.pool_heads not in (None, config.heads):
        refuse(NAME, f"its type '{kind}' has as many heads in its pooling as in its blocks")
    if kind == "siglip_vision_model" and config.pool_mlp_ratio not in (None, config.mlp_ratio):
        refuse(NAME, f"its type '{kind}' has the same MLP in its pooling as in its blocks")


def _shapes(export: Export, config: ViTConfig, kind: str) -> dict[str, Any]:
    """Fields of a type's config that are read off the tensors here."""
    hidden = {"intermediate_size": int(config.width * config.mlp_ratio)}
    match kind:
        case "dinov2" | "dinov2_with_registers":
            values = {"mlp_ratio": _dinov2_ratio(config), "layerscale_value": config.layer_scale}
            return values | ({"num_register_tokens": config.registers} if config.registers else {})
        case "dinov3_vit":
            return hidden | _dinov3_fields(export, config)
        case "clip_vision_model" if config.projection:
            return hidden | {"projection_dim": config.projection}
        case "siglip":
            return hidden | {"vision_use_head": False}
        case "beit":
            return hidden | {
                "use_relative_position_bias": config.relative_bias == "block",
                "use_shared_relative_position_bias": config.relative_bias == "shared",
            }
        case _:
            return hidden


def _dinov2_ratio(config: ViTConfig) -> int:
    """The ratio as its type 'dinov2' counts it: whole, and 3/2 of a gated layer's."""
    hidden = int(config.width * config.mlp_ratio)
    gated = config.mlp == "gated"
    ratio = round(hidden * (1.5 if gated else 1) / config.width)
    theirs = config.width * ratio
    theirs = (int(theirs * 2 / 3) + 7) // 8 * 8 if gated else theirs
    if theirs != hidden:
        refuse(NAME, f"its type 'dinov2' has no MLP of {hidden} channels for {config.width}")
    return ratio


def _dinov3_fields(export: Export, config: ViTConfig) -> dict[str, Any]:
    periods = export.tensors.get("rotary.periods", torch.empty(0)).float()
    errors = (periods / dinov3_periods(len(periods)) - 1).abs()
    if (error := max(errors.tolist(), default=0.0)) > 1e-6:
        export.notes.append(
            f"transformers computes the periods of positions; those of these weights differ from "
            f"them by up to {error:.1g} of their value."
        )
    shift, jitter, rescale = config.rotary_jitter
    return {
        "num_register_tokens": config.registers,
        "layerscale_value": config.layer_scale,
        "query_bias": config.qkv_bias != "none",
        "key_bias": config.qkv_bias == "qkv",
        "value_bias": config.qkv_bias != "none",
        "pos_embed_shift": shift or None,
        "pos_embed_jitter": jitter if jitter > 1 else None,
        "pos_embed_rescale": rescale if rescale > 1 else None,
    }


def _with_positions(export: Export, config: ViTConfig, kind: str) -> dict[str, Tensor]:
    """All tensors, the table of positions with the rows that the type gives to tokens."""
    tensors = without_positions(export.tensors)
    if kind == "dinov3_vit" or (kind == "beit" and config.positions == "none"):
        return tensors
    rows = int(config.class_token) + int(config.distillation_token)
    return tensors | {"positions.table": position_rows(export, rows)}
