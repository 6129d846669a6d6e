"""Weights and JSON as the `from_pretrained` of transformers reads them."""

from typing import Any

from torch import Tensor

from vision.checkpoints.layouts.exporting import Export, not_timm, one_window, refuse, swin_of
from vision.checkpoints.layouts.huggingface import huggingface_names as huggingface
from vision.checkpoints.layouts.huggingface.export_huggingface_vits import NAME, vit_model
from vision.checkpoints.layouts.huggingface.huggingface_config import TOWERS
from vision.checkpoints.layouts.rules import square
from vision.checkpoints.metadata import INTERPOLATIONS
from vision.config import pair
from vision.models.configs import SwinV2Config
from vision.models.vit import ViT

SWIN_CLASSES = {
    "swin": ("SwinForImageClassification", "SwinModel"),
    "swinv2": ("Swinv2ForImageClassification", "Swinv2Model"),
}
"""transformers' classes of each type, with and without a head."""


def huggingface_model(export: Export) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by the names of files, and what config.json says."""
    not_timm(export)
    if isinstance(export.model, ViT):
        kind, name, tensors, values = vit_model(export)
    else:
        kind, tensors, values = _swin(export)
        name = SWIN_CLASSES[kind][0 if export.opened.classes else 1]
    opened = export.opened
    config: dict[str, Any] = {
        "model_type": TOWERS.get(kind, kind),
        "image_size": square(opened.image_size),
        "num_channels": opened.channels,
        **values,
    }
    if kind in TOWERS:
        config = {"model_type": kind, "vision_config": config}
    config["architectures"] = [name]
    if opened.classes:
        labels = opened.class_names or tuple(f"LABEL_{i}" for i in range(opened.classes))
        config["id2label"] = {str(index): label for index, label in enumerate(labels)}
        config["label2id"] = {label: index for index, label in enumerate(labels)}
    return tensors, config


def _swin(export: Export) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    model, config = swin_of(export, NAME)
    window = one_window(model, NAME)
    if window[0] != window[1]:
        refuse(NAME, f"its windows are square, not {list(window)}")
    kind = "swinv2" if isinstance(config, SwinV2Config) else "swin"
    if kind == "swin" and set(model.windows) != {window}:
        refuse(NAME, f"the windows {model.windows} shrink with the grid; its tables do not")
    values: dict[str, Any] = {
        "embed_dim": config.width,
        "hidden_size": config.width * 2 ** (len(config.depths) - 1),
        "depths": list(config.depths),
        "num_heads": list(config.heads),
        "patch_size": square(pair(config.patch_size)),
        "window_size": window[0],
        "mlp_ratio": config.mlp_ratio,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": "gelu",
        "qkv_bias": True,
        "drop_path_rate": 0.0,
    }
    if isinstance(config, SwinV2Config):
        trained = config.pretrained_window
        values["pretrained_window_sizes"] = list(trained or [0] * len(config.depths))
    return kind, huggingface.swin_from_ours(export.tensors, kind), values


def huggingface_preprocessor(export: Export) -> dict[str, dict[str, Any]]:
    """The file that says how images are prepared: shorter side, then the middle."""
    images, (height, width) = export.preprocess(), export.opened.image_size
    shorter = round(min(height, width) / images["crop_ratio"])
    values = {
        "image_processor_type": "BitImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": shorter},
        "resample": INTERPOLATIONS.index(images["interpolation"]),
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": images["mean"],
        "image_std": images["std"],
    }
    return {"preprocessor_config.json": values}
