"""The predictions of a model for every image of a split, gathered from all processes."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from vision.config import ConfigError
from vision.data.batches import Batch
from vision.data.preprocess import Preprocess, normalizer
from vision.evaluation.configs import Augmentation
from vision.evaluation.evaluate import biases_once, evaluation_mode
from vision.evaluation.views import average, views
from vision.models.layers import Classifier
from vision.models.precision import Precision, autocast

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all processes."""


@dataclass(frozen=True)
class Speed:
    """Images per second, all processes together."""

    model: float | None
    """In the forward passes alone, without the first batch, which warms up; None if there was only
    one batch."""
    total: float
    """From beginning to end, reading and decoding included."""


@dataclass(frozen=True)
class Predictions:
    """Logits of the images that could be read, in the order of the source."""

    ids: Tensor
    """Index of each image in its source: int64 (n,)."""
    logits: Tensor
    """float32 (n, classes); for several views, the logarithm of their mean probabilities."""
    features: Tensor | None
    """Input of the head in the first view: float32 (n, c)."""
    speed: Speed


def predict(
    model: Classifier,
    batches: Iterable[Batch],
    samples: int,
    preprocess: Preprocess,
    classes: int,
    device: torch.device,
    precision: Precision,
    *,
    augmentation: Augmentation = "none",
    keep_features: bool = False,
    reduce: Reduce | None = None,
) -> Predictions:
    """Run the model on all batches of a source with this number of samples.

    Batches are preprocessed as in `views.preprocess_for_views`. With several processes, each gives
    its own batches, and `reduce` sums a tensor over them; all return the same predictions.
    """
    normalize = normalizer(preprocess, device)
    logits = torch.zeros(samples, classes)
    features: Tensor | None = None
    counted = torch.zeros(samples, dtype=torch.int64)
    spans: list[tuple[int, float]] = []
    begin = time.perf_counter()
    with evaluation_mode(model), torch.no_grad(), biases_once(model):
        for batch in batches:
            valid = batch.ids >= 0
            ids = batch.ids[valid]
            images = normalize(batch.images.to(device, non_blocking=True))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            with autocast(precision, device):
                first, *others = views(images, preprocess.image_size, augmentation)
                tokens = model.forward_features(first)
                pooled = model.pool(tokens).flatten(1) if keep_features else None
                outputs = [model.forward_head(tokens), *(model(view) for view in others)]
            found = average(outputs).cpu()  # waits for the device
            spans.append((len(ids), time.perf_counter() - start))
            if not classes:  # a model without a head returns its features
                found = found[:, :0]
            logits[ids] = found[valid]
            counted[ids] += 1
            if pooled is not None:
                features = torch.zeros(samples, pooled.shape[1]) if features is None else features
                features[ids] = pooled.float().cpu()[valid]
    speed = _speed(spans, time.perf_counter() - begin, reduce)
    if reduce is not None:
        # Each row is nonzero in one process only, so the sum is exact.
        logits, counted = reduce(logits), reduce(counted)
        features = reduce(features) if features is not None else None
    assert int(counted.max()) <= 1, "an image was counted more than once"
    ids = counted.nonzero()[:, 0]
    if len(ids) == 0:
        raise ConfigError("data: there is no image to evaluate, or none could be read.")
    return Predictions(ids, logits[ids], None if features is None else features[ids], speed)


def _speed(spans: list[tuple[int, float]], total: float, reduce: Reduce | None) -> Speed:
    """The speed from the number of images and the seconds of every batch."""
    later, seconds = (sum(numbers) for numbers in zip((0, 0.0), *spans[1:], strict=True))
    images = sum(number for number, _ in spans)
    rates = torch.tensor([later / seconds if seconds else 0.0, images / total], dtype=torch.float64)
    in_model, overall = (rates if reduce is None else reduce(rates)).tolist()
    return Speed(in_model or None, overall)
