"""A run as training leaves it, with weights that were never trained."""

from collections.abc import Sequence
from pathlib import Path

import torch
from small_runs import composed

from vision.checkpoints.native.checkpoint import write_checkpoint
from vision.config import parse
from vision.models.build import build_model
from vision.training.configs import TrainConfig

CLASSES = ["bear", "cat", "dog", "eel"]


def a_run(folder: Path, *overrides: str, classes: Sequence[str] = CLASSES) -> Path:
    """The folder of a run of a small model for images of 24 × 24 pixels."""
    chosen = overrides or ("model=vit_mini", "model.width=32")
    config = parse(TrainConfig, composed("data.image_size=24", *chosen))
    model = build_model(config.model, (24, 24), classes=len(classes), seed=1)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"model.{name}": tensor + 0.3 * torch.rand(tensor.shape, generator=generator)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in model.state_dict().items()
    }
    record = {
        "config": config.model_dump(mode="json"),
        "classes": list(classes),
        "channels": 3,
        "step": 7,
        "preprocess": {
            "image_size": [24, 24],
            "mean": [0.485, 0.456, 0.406],
            "std": [0.229, 0.224, 0.225],
            "interpolation": "bicubic",
            "crop_ratio": 0.875,
        },
    }
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    write_checkpoint(checkpoints / "best.safetensors", tensors, record)
    return folder
