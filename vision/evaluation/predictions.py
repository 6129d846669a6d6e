"""What a model says of every image of a split, gathered from all processes, each image once."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from vision.config import ConfigError
from vision.data.loader import Batch
from vision.data.preprocess import Preprocess, normalizer
from vision.evaluation.configs import Augmentation
from vision.evaluation.evaluate import biases_once, evaluation_mode
from vision.evaluation.neighbours import recorded_features
from vision.evaluation.views import average, views
from vision.models.layers import Classifier
from vision.models.precision import Precision, autocast

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all processes."""


@dataclass(frozen=True)
class Speed:
    """Images per second, all processes together; None: there was nothing but a first batch."""

    model: float | None
    """In the forward passes alone; the first batch, which warms up, is left out."""
    total: float
    """From beginning to end, reading and decoding included."""


@dataclass(frozen=True)
class Predictions:
    """Logits for the images that could be read, in the order of the source."""

    ids: Tensor
    """Number of each image in its source: int64 (n,)."""
    logits: Tensor
    """float32 (n, classes); with several views, the logarithm of their mean probabilities."""
    features: Tensor | None
    """What the head was given in the first view: float32 (n, c)."""
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
    """Run the model on all batches of a source with so many images.

    Batches are as `augmentation.loaded_as` wants them. With several processes each gives its own,
    and `reduce` sums a tensor over them; all get the same answer.
    """
    normalize = normalizer(preprocess, device)
    logits = torch.zeros(samples, classes)
    features: Tensor | None = None
    counted = torch.zeros(samples, dtype=torch.int64)
    clock = _Clock(device)
    with evaluation_mode(model), torch.no_grad(), biases_once(model), ExitStack() as stack:
        recorded = stack.enter_context(recorded_features(model)) if keep_features else []
        for batch in batches:
            images = normalize(batch.images.to(device, non_blocking=True))
            with clock.running(int((batch.ids >= 0).sum())), autocast(precision, device):
                answers = [
                    model(view) for view in views(images, preprocess.image_size, augmentation)
                ]
            if not classes:  # without a head the answers are features, which are recorded
                answers = [answer[:, :0] for answer in answers]
            found = average(answers).cpu()
            if found.shape[1] != classes:
                raise ValueError(
                    f"the model gives {found.shape[1]} logits, but there are {classes} classes."
                )
            valid = batch.ids >= 0
            logits[batch.ids[valid]] = found[valid]
            counted[batch.ids[valid]] += 1
            if keep_features:
                first = recorded[0].float().cpu()
                recorded.clear()
                features = torch.zeros(samples, first.shape[1]) if features is None else features
                features[batch.ids[valid]] = first[valid]
    speed = clock.speed(reduce)
    if reduce is not None:
        # Every row is zero but in one process, so that the sum has its very bits.
        logits, counted = reduce(logits), reduce(counted)
        features = reduce(features) if features is not None else None
    assert int(counted.max()) <= 1, "an image was counted more than once"
    ids = counted.nonzero()[:, 0]
    if len(ids) == 0:
        raise ConfigError("data: there is no image to evaluate, or none could be read.")
    return Predictions(ids, logits[ids], None if features is None else features[ids], speed)


class _Clock:
    """Time in the model. A GPU is asked for its own times, without making it wait."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.spans: list[tuple[int, float | tuple[torch.cuda.Event, torch.cuda.Event]]] = []
        self.start = time.perf_counter()

    @contextmanager
    def running(self, images: int) -> Iterator[None]:
        if not self.on_gpu:
            start = time.perf_counter()
            yield
            self.spans.append((images, time.perf_counter() - start))
            return
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        yield
        events[1].record()
        self.spans.append((images, events))

    def speed(self, reduce: Reduce | None) -> Speed:
        if self.on_gpu:
            torch.cuda.synchronize()
        whole = time.perf_counter() - self.start
        seconds = sum(
            span if isinstance(span, float) else float(span[0].elapsed_time(span[1])) / 1e3
            for _, span in self.spans[1:]
        )
        images = sum(number for number, _ in self.spans)
        later = sum(number for number, _ in self.spans[1:])
        in_model = later / seconds if later and seconds else 0.0
        rates = torch.tensor([in_model, images / whole if whole else 0.0], dtype=torch.float64)
        model, total = (reduce(rates) if reduce is not None else rates).tolist()
        return Speed(model or None, total)
