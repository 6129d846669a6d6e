"""What travels beside the weights: our own record, config.json of Hugging Face or timm, and the
preprocessing that the pictures of a layout's models are known to have had.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.formats.recognise import Layout
from vision.models.layers import Grid

IMAGENET: dict[str, Any] = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
MINUS_ONE_TO_ONE: dict[str, Any] = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic")
"""In the order of Pillow's numbers, which Hugging Face stores."""


@dataclass
class Metadata:
    """What is written beside the weights about the model and its pictures."""

    origin: str
    model: dict[str, Any] = field(default_factory=dict)
    """Settings of a ModelConfig, in its words; for our own runs all of them."""
    image_size: Grid | None = None
    class_names: tuple[str, ...] | None = None
    preprocess: dict[str, Any] = field(default_factory=dict)
    """Some of mean, std, interpolation and crop_ratio."""
    preprocess_origin: str = ""
    notes: list[str] = field(default_factory=list)
    """What was written there and is not followed."""


def read_metadata(extra: Mapping[str, Any], layout: Layout, ours: bool) -> Metadata:
    """The first of our record, Hugging Face's config, timm's config and timm's name that is there,
    with the layout's usual preprocessing where nothing is written about it.
    """
    config = extra.get("config")
    config = config if isinstance(config, Mapping) else {}
    if ours:
        return _from_record(extra)
    try:
        found = _from_config(config, extra)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"The config.json beside it cannot be used: {error!r}.") from error
    usual = usual_preprocess(layout)
    if not found.preprocess and usual:
        found.preprocess = usual
        found.preprocess_origin = f"usual for weights of {layout}"
    return found


def _from_config(config: Mapping[str, Any], extra: Mapping[str, Any]) -> Metadata:
    if "model_type" in config:
        return _from_hugging_face(config, extra.get("preprocessor"))
    if "architecture" in config:
        return _from_timm(config)
    if isinstance(extra.get("arch"), str):
        return Metadata("the name of the architecture in the file", **_from_name(extra["arch"]))
    return Metadata("")


def usual_preprocess(layout: Layout) -> dict[str, Any]:
    """How the pictures of published models of a layout were prepared.

    timm's and mmpretrain's files hold weights from everywhere: their names alone say nothing.
    """
    match layout:
        case "Google npz":
            return dict(MINUS_ONE_TO_ONE)
        case "torchvision ViT":
            return dict(IMAGENET)
        case "torchvision Swin" | "DeiT":
            return IMAGENET | {"interpolation": "bicubic"}
        case "official Swin" | "DINO" | "MAE":
            return IMAGENET | {"interpolation": "bicubic", "crop_ratio": 0.875}
        case _:
            return {}


def _from_record(record: Mapping[str, Any]) -> Metadata:
    try:
        values = record["preprocess"]
        height, width = values["image_size"]
        names = ("mean", "std", "interpolation", "crop_ratio")
        return Metadata(
            origin="the run's record",
            model=dict(record.get("model", record["config"]["model"]))
            | {"channels": record["channels"]},
            image_size=(height, width),
            class_names=tuple(record["classes"]),
            preprocess={name: values[name] for name in names},
            preprocess_origin="the checkpoint",
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"The checkpoint's record is not complete: {error!r}.") from error


def _from_hugging_face(config: Mapping[str, Any], preprocessor: Any) -> Metadata:
    found = Metadata("config.json (Hugging Face)")
    model = found.model
    if "num_attention_heads" in config:
        model["heads"] = config["num_attention_heads"]
    if "layer_norm_eps" in config:
        model["norm_eps"] = float(config["layer_norm_eps"])
    if "window_size" in config:
        model["window"] = config["window_size"]
    trained = config.get("pretrained_window_sizes")
    if trained and any(trained):
        model["pretrained_window"] = list(trained)
    found.image_size = _size(config.get("image_size"))
    activation = config.get("hidden_act", "gelu")
    if activation != "gelu":
        found.notes.append(f"config.json asks for hidden_act={activation}; here it is gelu.")
    labels = config.get("id2label")
    if isinstance(labels, Mapping):
        names = [str(labels[key]) for key in sorted(labels, key=int)]
        if names != [f"LABEL_{index}" for index in range(len(names))]:
            found.class_names = tuple(names)
    if isinstance(preprocessor, Mapping):
        found.preprocess = _hugging_face_preprocess(preprocessor)
        found.preprocess_origin = "preprocessor_config.json"
    return found


def _hugging_face_preprocess(values: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if values.get("do_normalize", True) and "image_mean" in values and "image_std" in values:
        result |= {"mean": list(values["image_mean"]), "std": list(values["image_std"])}
    resample = values.get("resample")
    if isinstance(resample, int) and 0 <= resample < len(INTERPOLATIONS):
        result["interpolation"] = INTERPOLATIONS[resample]
    size = values.get("size")
    shorter = size.get("shortest_edge") if isinstance(size, Mapping) else None
    crop = _size(values.get("crop_size"))
    if values.get("do_center_crop") and shorter and crop is not None and crop[0] <= shorter:
        result["crop_ratio"] = crop[0] / shorter
    elif not values.get("do_center_crop") and size is not None:
        result["crop_ratio"] = 1.0  # the whole picture
    return result


def _from_timm(config: Mapping[str, Any]) -> Metadata:
    pictures = config.get("pretrained_cfg")
    pictures = pictures if isinstance(pictures, Mapping) else config
    found = Metadata("config.json (timm)", **_from_name(str(config["architecture"])))
    size = pictures.get("input_size")
    if isinstance(size, list | tuple) and len(size) == 3:
        found.image_size = _size(size[1:])
    arguments = config.get("model_args")
    arguments = arguments if isinstance(arguments, Mapping) else {}
    words = {"num_heads": "heads", "window_size": "window"}
    found.model |= {ours: arguments[name] for name, ours in words.items() if name in arguments}
    if any(arguments.get("pretrained_window_sizes") or ()):
        found.model["pretrained_window"] = list(arguments["pretrained_window_sizes"])
    found.image_size = _size(arguments.get("img_size")) or found.image_size
    pooling = arguments.get("global_pool", config.get("global_pool"))
    if pooling in ("avg", "token"):
        found.model["pool"] = {"avg": "mean", "token": "class_token"}[pooling]
    names = config.get("label_names", pictures.get("label_names"))
    if isinstance(names, list | tuple):
        found.class_names = tuple(str(name) for name in names)
    words = {
        "mean": "mean",
        "std": "std",
        "interpolation": "interpolation",
        "crop_pct": "crop_ratio",
    }
    found.preprocess = {ours: pictures[name] for name, ours in words.items() if name in pictures}
    if found.preprocess.get("interpolation") not in INTERPOLATIONS:
        found.preprocess.pop("interpolation", None)
    found.preprocess_origin = "config.json (timm)"
    return found


def _from_name(architecture: str) -> dict[str, Any]:
    """What timm's names of Swin V2 tell and its weights do not: swinv2_base_window12to16_192to256
    has window 16 at 256 pixels and was pretrained with window 12, in the last stage 6.
    """
    match = re.match(r"swin(?:v2)?_\w+?_window(?:(\d+)to)?(\d+)_(?:\d+to)?(\d+)", architecture)
    if match is None:
        return {}
    model: dict[str, Any] = {"window": int(match[2])}
    if match[1]:
        model["pretrained_window"] = [int(match[1])] * 3 + [int(match[1]) // 2]
    return {"model": model, "image_size": (int(match[3]), int(match[3]))}


def _size(value: Any) -> Grid | None:
    """A size as others write it: a number, a pair, or a mapping of height and width."""
    if isinstance(value, Mapping):
        value = (value.get("height"), value.get("width"))
    if isinstance(value, int) and not isinstance(value, bool):
        value = (value, value)
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    height, width = value
    if not isinstance(height, int) or not isinstance(width, int) or min(height, width) < 1:
        return None
    return height, width
