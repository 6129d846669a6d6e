"""A model on every image of a split, counted once over all processes.

During training `evaluate` gives metrics, summed on the device; `predict` gives the logits of every
image, perhaps averaged over several views (test-time augmentation).
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vision.config import ConfigError
from vision.data.batches import Batch
from vision.data.preprocess import Preprocess, normalizer
from vision.evaluation.configs import Augmentation
from vision.evaluation.metrics import add_batch, empty_sums, results, with_flips
from vision.models.build import Precision, autocast
from vision.models.layers import Activation, Classifier, evaluating, static_bias

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all processes."""


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, position biases being computed once.

    Afterwards every submodule has the mode that it had before.
    """
    # Sharded parameters are gathered by a forward pass only.
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    # Not inference_mode: tensors that FSDP allocates in it cannot be used for training later.
    with evaluating(model), torch.no_grad(), nullcontext() if sharded else static_bias(model):
        yield


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    preprocess: Preprocess,
    classes: int,
    device: torch.device,
    precision: Precision,
    reduce: Reduce | None = None,
    channels_last: bool = False,
    flip_test: bool = False,
) -> dict[str, float]:
    """The metrics of a model on all images of the batches; see `vision.evaluation.metrics`.

    With `flip_test` there are beside them those of the mean probabilities of each image and its
    mirror image.

    Rows with the id −1 are not counted. With several processes, each gives its own batches, all the
    same number of them, and `reduce` sums a tensor over all processes; all return the numbers that
    a single process would. The model is in evaluation mode meanwhile, and afterwards as it was.
    """
    normalize = normalizer(preprocess, device)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    sums = torch.stack([empty_sums(classes, device)] * (2 if flip_test else 1))
    with evaluation_mode(model):
        for batch in batches:
            images = normalize(batch.images.to(device, non_blocking=True))
            seen = views(images, preprocess.image_size, "flip" if flip_test else "none")
            with autocast(precision, device):
                outputs = [model(view.contiguous(memory_format=layout)) for view in seen]
            labels = batch.labels.to(device, non_blocking=True)
            valid = batch.ids.to(device, non_blocking=True) >= 0
            for number, part in enumerate(sums):
                logits = average(outputs[: number + 1], "softmax")
                sums[number] = add_batch(part, logits, labels, valid)
    usual, *flipped = map(results, sums if reduce is None else reduce(sums))
    return with_flips(usual, flipped[0]) if flipped else usual


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
    """float32 (n, classes); for several views, those of their mean probabilities."""
    flipped: Tensor | None
    """The same for the mean probabilities of each image and its mirror image (`flip_test`)."""
    features: Tensor | None
    """Input of the head in the first view: float32 (n, c)."""
    speed: Speed


def predict(
    model: nn.Module,
    batches: Iterable[Batch],
    samples: int,
    preprocess: Preprocess,
    classes: int,
    device: torch.device,
    precision: Precision,
    *,
    augmentation: Augmentation = "none",
    flip_test: bool = False,
    keep_features: bool = False,
    activation: Activation = "softmax",
    channels_last: bool = False,
    reduce: Reduce | None = None,
) -> Predictions:
    """Run the model on all batches of a source with this number of samples.

    Batches are preprocessed as in `preprocess_for_views`. With several processes, each gives
    its own batches, and `reduce` sums a tensor over them; all return the same predictions.
    """
    normalize = normalizer(preprocess, device)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    logits = torch.zeros(samples, classes)
    flipped = torch.zeros(samples, classes) if flip_test else None
    features: Tensor | None = None
    counted = torch.zeros(samples, dtype=torch.int64)
    spans: list[tuple[int, float]] = []
    begin = time.perf_counter()
    with evaluation_mode(model):
        for batch in batches:
            valid = batch.ids >= 0
            ids = batch.ids[valid]
            images = normalize(batch.images.to(device, non_blocking=True))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            with autocast(precision, device):
                seen = views(images, preprocess.image_size, augmentation)
                first, *others = (view.contiguous(memory_format=layout) for view in seen)
                pooled = None
                if keep_features:
                    assert isinstance(model, Classifier)
                    tokens = model.forward_features(first)
                    pooled = model.pool(tokens).flatten(1)
                    outputs = [model.forward_head(tokens)]
                else:  # the whole forward pass, which gathers sharded parameters
                    outputs = [model(first)]
                outputs += [model(view) for view in others]
            found = average(outputs, activation).cpu()  # waits for the device
            spans.append((len(ids), time.perf_counter() - start))
            if not classes:  # a model without a head returns its features
                found = found[:, :0]
            logits[ids] = found[valid]
            if flipped is not None:
                with autocast(precision, device):
                    outputs.append(model(first.flip(-1)))
                flipped[ids] = average(outputs, activation).cpu()[valid]
            counted[ids] += 1
            if pooled is not None:
                features = torch.zeros(samples, pooled.shape[1]) if features is None else features
                features[ids] = pooled.float().cpu()[valid]
    speed = _speed(spans, time.perf_counter() - begin, reduce)
    if reduce is not None:
        # Each row is nonzero in one process only, so the sum is exact.
        logits, counted = reduce(logits), reduce(counted)
        flipped = reduce(flipped) if flipped is not None else None
        features = reduce(features) if features is not None else None
    assert int(counted.max()) <= 1, "an image was counted more than once"
    ids = counted.nonzero()[:, 0]
    if len(ids) == 0:
        raise ConfigError("data: no images to evaluate, or none could be read.")
    flipped = None if flipped is None else flipped[ids]
    return Predictions(
        ids, logits[ids], flipped, None if features is None else features[ids], speed
    )


def _speed(spans: list[tuple[int, float]], total: float, reduce: Reduce | None) -> Speed:
    """The speed from the number of images and the seconds of every batch."""
    later, seconds = (sum(numbers) for numbers in zip((0, 0.0), *spans[1:], strict=True))
    images = sum(number for number, _ in spans)
    rates = torch.tensor([later / seconds if seconds else 0.0, images / total], dtype=torch.float64)
    in_model, overall = (rates if reduce is None else reduce(rates)).tolist()
    return Speed(in_model or None, overall)


def preprocess_for_views(preprocess: Preprocess, augmentation: Augmentation) -> Preprocess:
    """The preprocessing of images to cut views from: for crops, without the central crop.

    The ten crops are then those of Krizhevsky et al. (NeurIPS 2012, section 4.1): 224 pixels from
    the corners and the centre of 256.
    """
    if augmentation in ("none", "flip"):
        return preprocess
    height, width = (math.floor(side / preprocess.crop_ratio) for side in preprocess.image_size)
    if (height, width) == preprocess.image_size:
        raise ConfigError(
            f"augmentation={augmentation}: crop_ratio = {preprocess.crop_ratio:g} leaves nothing "
            f"around the central {height} × {width} pixels to crop from; choose a smaller one, "
            "such as preprocess.crop_ratio=0.875, or augmentation=flip."
        )
    return replace(preprocess, image_size=(height, width), crop_ratio=1.0)


def views(images: Tensor, size: tuple[int, int], augmentation: Augmentation) -> list[Tensor]:
    """The views (b c h w) of images from `preprocess_for_views`; the usual one comes first."""
    found = _crops(images, size) if augmentation in ("five_crop", "ten_crop") else [images]
    mirrored = [view.flip(-1) for view in found] if augmentation in ("flip", "ten_crop") else []
    return [*found, *mirrored]


def average(logits: Sequence[Tensor], activation: Activation) -> Tensor:
    """Logits of the mean probabilities of several views; those of a single view unchanged."""
    if len(logits) == 1:
        return logits[0].float()
    seen = torch.stack([view.float() for view in logits])
    if activation == "softmax":
        return seen.log_softmax(-1).logsumexp(0) - math.log(len(logits))
    present, absent = (torch.nn.functional.logsigmoid(v).logsumexp(0) for v in (seen, -seen))
    return present - absent


def _crops(images: Tensor, size: tuple[int, int]) -> list[Tensor]:
    """The centre, then the corners."""
    height, width = size
    below, right = images.shape[-2] - height, images.shape[-1] - width
    places = [(round(below / 2), round(right / 2)), (0, 0), (0, right), (below, 0), (below, right)]
    return [images[..., top : top + height, left : left + width] for top, left in places]
