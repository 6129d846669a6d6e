"""Weights as they are stored, and what other projects write beside them: config.json of Hugging
Face or timm, and open_clip_config.json.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.files.containers import Weights
from vision.checkpoints.layouts.recognise import Layout
from vision.checkpoints.layouts.rules import Converted
from vision.checkpoints.native.run_record import RunRecord
from vision.models.layers import Grid

INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic")
"""In the order of Pillow's numbers, which Hugging Face stores."""


@dataclass
class Metadata:
    """What is written beside the weights about the model and its images."""

    origin: str
    architecture: str | None = None
    """timm's name of the architecture."""
    model: dict[str, Any] = field(default_factory=dict)
    """Settings of a ModelConfig, in its words; for our own runs all of them."""
    image_size: Grid | None = None
    class_names: tuple[str, ...] | None = None
    preprocess: dict[str, Any] = field(default_factory=dict)
    """Some of mean, std, interpolation and crop_ratio."""
    preprocess_origin: str = ""
    notes: list[str] = field(default_factory=list)
    """What was written there and is not followed."""


@dataclass(frozen=True, kw_only=True)
class StoredWeights(Weights):
    """The weights of one model by the names of a layout, and what is written beside them."""

    path: Path
    layout: Layout | None
    """None: only timm itself knows the names of these tensors."""
    converted: Converted
    metadata: Metadata
    record: RunRecord | None = None
    """Of a run of this project."""
    in_memory: bool = False
    """Whether the tensors belong to someone else, who must not see them change."""
    averaged: bool = False
    warnings: tuple[str, ...] = ()
    integrity: str = ""
    """Whether the file could be checked for damage."""


def read_metadata(extra: Mapping[str, Any], described: bool = True) -> Metadata:
    """The first of Hugging Face's config, timm's config and timm's name that is there. Without
    `described` the settings of the model are not asked for: timm itself builds it.
    """
    config = extra.get("config")
    config = config if isinstance(config, Mapping) else {}
    try:
        found = _from_config(config, extra, described)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"The JSON beside it cannot be used: {error!r}.") from error
    found.architecture = architecture_of(extra)
    return found


def architecture_of(extra: Mapping[str, Any]) -> str | None:
    """timm's name of the architecture."""
    config = extra.get("config")
    name = config.get("architecture") if isinstance(config, Mapping) else None
    name = name or extra.get("arch")
    return name if isinstance(name, str) else None


def _from_config(config: Mapping[str, Any], extra: Mapping[str, Any], described: bool) -> Metadata:
    if "model_type" in config:
        return _from_hugging_face(config, extra.get("preprocessor"))
    if "architecture" in config:
        return _from_timm(config, described)
    if isinstance(extra.get("open_clip"), Mapping):
        return _from_openclip(extra["open_clip"], described)
    if isinstance(extra.get("arch"), str):
        return Metadata("the name of the architecture in the file", **_from_name(extra["arch"]))
    return Metadata("")


def _from_hugging_face(config: Mapping[str, Any], preprocessor: Any) -> Metadata:
    from vision.checkpoints.layouts.huggingface.huggingface_config import (
        model_settings,
        tower_config,
    )

    found = Metadata("config.json (Hugging Face)", model=model_settings(config))
    _, fields = tower_config(config)
    found.image_size = _size(fields.get("image_size"))
    if "window_size" not in fields:
        _whole_patches(found, fields.get("patch_size"), "transformers")
    labels = config.get("id2label")
    if isinstance(labels, Mapping):
        names = [str(labels[key]) for key in sorted(labels, key=int)]
        if names != [f"LABEL_{index}" for index in range(len(names))]:
            found.class_names = tuple(names)
    if isinstance(preprocessor, Mapping):
        found.preprocess = _hugging_face_preprocess(preprocessor)
        found.preprocess_origin = "preprocessor_config.json"
    return found


def _whole_patches(found: Metadata, patch: Any, project: str) -> None:
    """Take the size of the images as far as the project cuts them into patches: the rest is left
    out there, while here it would be filled up.
    """
    size, sides = found.image_size, _size(patch)
    if size is None or sides is None:
        return
    whole = size[0] // sides[0] * sides[0], size[1] // sides[1] * sides[1]
    if whole != size:
        found.image_size = whole
        found.notes.append(
            f"config.json has images of {size[0]} × {size[1]} pixels, of which {project} uses "
            f"the first {whole[0]} × {whole[1]}, whole patches; here images have this size."
        )


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
        result["crop_ratio"] = 1.0  # the whole image
    return result


def _from_openclip(config: Mapping[str, Any], described: bool) -> Metadata:
    from vision.checkpoints.layouts.openclip import FILE, tower_settings

    model, images = config["model_cfg"], config.get("preprocess_cfg") or {}
    found = Metadata(FILE, preprocess_origin=FILE)
    found.model = tower_settings(model) if described else {}
    found.image_size = _size((model.get("vision_cfg") or {}).get("image_size", 224))
    found.preprocess = {name: list(images[name]) for name in ("mean", "std") if name in images}
    found.preprocess |= {"interpolation": "bicubic", "crop_ratio": 1.0}
    if images.get("interpolation") in INTERPOLATIONS:
        found.preprocess["interpolation"] = images["interpolation"]
    if images.get("resize_mode", "shortest") != "shortest":
        found.notes.append(
            f"{FILE} has resize_mode={images['resize_mode']}; here the shorter side is resized and "
            f"the middle is cut out."
        )
    return found


def _from_timm(config: Mapping[str, Any], described: bool) -> Metadata:
    from vision.checkpoints.layouts.timm.timm_names import PREPROCESS

    images = config.get("pretrained_cfg")
    images = images if isinstance(images, Mapping) else config
    architecture, arguments = str(config["architecture"]), config.get("model_args")
    arguments = dict(arguments) if isinstance(arguments, Mapping) else {}
    found = Metadata("config.json (timm)", **_from_name(architecture))
    size = images.get("input_size")
    if isinstance(size, list | tuple) and len(size) == 3:
        found.image_size = _size(size[1:])
    found.image_size = _size(arguments.get("img_size")) or found.image_size
    if described:
        _describe_timm(found, config, architecture, arguments, images)
    names = config.get("label_names", images.get("label_names"))
    if isinstance(names, list | tuple):
        found.class_names = tuple(str(name) for name in names)
    found.preprocess = {ours: images[name] for name, ours in PREPROCESS.items() if name in images}
    if found.preprocess.get("interpolation") not in INTERPOLATIONS:
        found.preprocess.pop("interpolation", None)
    found.preprocess_origin = "config.json (timm)"
    return found


def _describe_timm(
    found: Metadata,
    config: Mapping[str, Any],
    architecture: str,
    arguments: dict[str, Any],
    pretrained: Mapping[str, Any],
) -> None:
    """Settings as timm's own model has them; of an architecture that timm does not have, what
    config.json says itself.
    """
    from vision.checkpoints.layouts.timm.timm_models import describe

    if isinstance(config.get("global_pool"), str) and config["global_pool"]:
        arguments.setdefault("global_pool", config["global_pool"])  # as the saved model had it
    described = describe(architecture, arguments, pretrained) if architecture else None
    if described is not None:
        found.model = described.settings
        found.notes += described.notes
        if found.model["kind"] == "vit" and not arguments.get("dynamic_img_pad"):
            _whole_patches(found, found.model["patch_size"], "timm")
        return
    words = {"num_heads": "heads", "window_size": "window"}
    found.model |= {ours: arguments[name] for name, ours in words.items() if name in arguments}
    if any(arguments.get("pretrained_window_sizes") or ()):
        found.model["pretrained_window"] = list(arguments["pretrained_window_sizes"])
    if arguments.get("global_pool") in ("avg", "token"):
        found.model["pool"] = "mean" if arguments["global_pool"] == "avg" else "class_token"
    if architecture:
        found.notes.append(
            f"this version of timm does not have '{architecture}': settings that tensors do not "
            f"show are assumed."
        )


def _from_name(architecture: str) -> dict[str, Any]:
    """Settings in timm's names that a Swin V2 does not show: swinv2_base_window12to16_192to256 has
    window 16 at 256 pixels and was pretrained with window 12, in the last stage 6.
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
