"""`vision export precision=fp16|int8`: the accuracy that fewer bits cost, measured on images.

Of the ways to write int8 the fastest one is taken that loses no more accuracy than is accepted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vision.config import ConfigError, UserError
from vision.data.batches import build_loader, evaluation_batches
from vision.data.preprocess import normalizer
from vision.data.sources.source import Source, Subset
from vision.evaluation.evaluate import predict
from vision.evaluation.evaluated_model import EvaluatedModel, own_data, with_images
from vision.evaluation.metrics import label_rank
from vision.evaluation.multi_label_metrics import compute_label_metrics
from vision.inference.configs import ExportConfig
from vision.inference.onnx_files import OnnxModel, example, speed_ratios, write_int8, write_onnx
from vision.inference.predict import Loaded
from vision.terminal import percent, tracked

_CALIBRATION_BATCH = 8
_CPU = torch.device("cpu")


class ExportError(UserError):
    """An export whose outputs differ from those of the model."""


@dataclass(frozen=True)
class Reduced:
    """A file with fewer bits, and what they cost."""

    file: Path
    way: str
    """fp16, int8 (dynamic) or int8 (static)."""
    metric: str
    images: int
    before: float
    """Of the model in fp32."""
    after: float
    speed: float
    """Times the speed of the file in fp32 on this processor, by CPU time, with one thread."""

    def __str__(self) -> str:
        before, after = percent(self.before), percent(self.after)
        return (
            f"{self.way}: {self.metric} {after} (fp32: {before}) on {self.images:,} images, "
            f"{self.speed:.1f} times the speed of the file in fp32 on this CPU"
        )


def images_to_measure(loaded: Loaded, config: ExportConfig) -> EvaluatedModel:
    """The images that the loss of accuracy is measured on."""
    loaded.opened.check_head()
    data = config.data or own_data(loaded.opened)
    return with_images(loaded.opened, config.checkpoint, loaded.preprocess, data, config.split)


def write_reduced(
    loaded: Loaded, config: ExportConfig, images: EvaluatedModel, full: Path, folder: Path
) -> Reduced:
    """Write the model with fewer bits to a folder, from the file in fp32 (`full`), and measure it.
    An ExportError if it loses more accuracy than is accepted.
    """
    if config.precision == "fp16":
        files = {"fp16": folder / "fp16.onnx"}
        write_onnx(loaded, config.opset, files["fp16"], half=True)
    else:
        ways = write_int8(full, _calibration(images, config), folder)
        files = {f"int8 ({way})": file for way, file in ways.items()}
    speeds = speed_ratios({"fp32": full, **files}, "fp32", example(loaded)[:1])
    metric = "mean average precision" if images.opened.multi_label else "top-1 accuracy"
    before = _accuracy(loaded.model, images, config, "fp32")
    tried = []
    for way in sorted(files, key=lambda way: -speeds[way]):
        after = _accuracy(OnnxModel(files[way]), images, config, way)
        found = Reduced(files[way], way, metric, len(images.source), before, after, speeds[way])
        if before - after <= config.max_accuracy_loss:
            return found
        tried.append(found)
    lost = min(found.before - found.after for found in tried)
    raise ExportError(
        f"precision={config.precision}: {'; '.join(map(str, tried))}. At least "
        f"{100 * lost:.2f} points are lost, more than max_accuracy_loss="
        f"{config.max_accuracy_loss:g} accepts; nothing was written. "
        f"max_accuracy_loss={np.ceil(1e4 * lost) / 1e4:g} accepts it."
    )


def _calibration(images: EvaluatedModel, config: ExportConfig) -> Iterator[Tensor]:
    """Training images, evenly spaced so that all classes occur, as the model takes them."""
    train = images.training_images()
    number = min(config.calibration_images, len(train))
    if not number:
        raise ConfigError("data: no training images to calibrate int8 with.")
    source = Subset(train, np.arange(number) * len(train) // number)
    normalize = normalizer(images.preprocess, _CPU)
    loader = build_loader(source, images.preprocess, images.data, config.loader)
    batches = evaluation_batches(loader, _CALIBRATION_BATCH)
    for batch in tracked(batches, "calibrating", _rounds(source, _CALIBRATION_BATCH)):
        yield normalize(batch.images[batch.ids >= 0])


def _accuracy(model: nn.Module, images: EvaluatedModel, config: ExportConfig, way: str) -> float:
    """Top-1 accuracy, or mean average precision for several labels."""
    loader = build_loader(images.source, images.preprocess, images.data, config.loader)
    batches = evaluation_batches(loader, config.batch_size)
    found = predict(
        model,
        tracked(batches, f"measuring {way}", _rounds(images.source, config.batch_size)),
        len(images.source),
        images.preprocess,
        images.opened.classes,
        _CPU,
        "fp32",
    )
    labels = images.labels[found.ids]
    if images.opened.multi_label:
        limits = images.opened.thresholds
        measured = compute_label_metrics(
            found.logits, labels, images.classes, limits, resamples=0, seed=0
        )
        return measured.metrics["map"]
    return float((label_rank(found.logits, labels) == 0).double().mean())


def _rounds(source: Source, batch: int) -> int:
    return -(-len(source) // batch)
