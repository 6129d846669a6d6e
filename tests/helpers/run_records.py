"""Records of checkpoints as runs store them, with mistakes where a test wants them."""

import copy
from pathlib import Path
from typing import Any

from model_settings import small_model

PATH = Path("runs/a/checkpoints/best.safetensors")


def vit_record(**changes: Any) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """What a run of a small ViT stores, and the shapes of its tensors."""
    return stored(small_model("vit_base", (32, 32), **changes))


def stored(model: Any) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    values = {
        "step": 3,
        "config": {
            "model": model.config.model_dump(mode="json"),
            "data": {
                "kind": "shapes",
                "seed": 0,
                "samples_per_class": None,
                "train_fraction": 1.0,
                "sampling": "uniform",
                "on_error": "raise",
                "max_error_share": 0.01,
                "image_size": 32,
                "train_samples": 40,
                "val_samples": 24,
                "test_samples": 24,
            },
            "tune": {"kind": "all"},
        },
        "model": model.config.model_dump(mode="json"),
        "classes": ["ant", "bee", "cat", "dog", "elk", "fox", "gnu"],
        "channels": 3,
        "preprocess": {
            "image_size": [32, 32],
            "mean": [0.1, 0.2, 0.3],
            "std": [0.4, 0.5, 0.6],
            "interpolation": "bicubic",
            "crop_ratio": 0.875,
            "origin": {"mean": "the config"},
        },
    }
    return values, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def changed(record: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """A copy with another value in one field, or without the field (`...`)."""
    record = copy.deepcopy(record)
    *parents, last = field.split(".")
    place: Any = record
    for name in parents:
        place = place[name]
    if value is ...:
        place.pop(last, None)
    else:
        place[last] = value
    return record
