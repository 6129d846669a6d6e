"""All metrics of all methods, beside a random map and the image's centre."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vision.data.images.decode import Pixels
from vision.inspection.capture.capture import Passes
from vision.inspection.explain import Explanation, Subject, as_batch, explain
from vision.inspection.methods.spec import MethodChoice
from vision.inspection.trust.localization import (
    Map,
    Mask,
    Overlap,
    average_precision,
    centre_map,
    energy,
    overlap,
    pointing,
    pooled,
    random_map,
    separation,
)
from vision.inspection.trust.perturbation import Curves, curve_area, perturb, perturbation_area
from vision.models.layers import static_bias

METRICS = {
    "pointing": "pointing ↑",
    "energy": "energy ↑",
    "pixel_accuracy": "pixel acc. ↑",
    "map": "mAP ↑",
    "miou": "mIoU ↑",
    "positive": "positive ↓",
    "negative": "negative ↑",
    "deletion": "deletion ↓",
    "insertion": "insertion ↑",
    "pair_pointing": "2-obj. pointing ↑",
    "separation": "2-obj. separation ↑",
}
"""Titles, all in percent; defined in `localization` and `perturbation`."""
BASELINES = ("random", "centre")
CHUNK = 128
"""Images in a forward pass."""


class Sample(NamedTuple):
    """An image as the model sees it, and the mask of its object if known."""

    pixels: Pixels
    mask: Mask | None


class Pair(NamedTuple):
    """An image with two objects of different classes, with a mask for each."""

    pixels: Pixels
    labels: tuple[int, int]
    masks: tuple[Mask, Mask]


@dataclass
class _Tally:
    """The measurements of one method so far."""

    numbers: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    overlaps: list[Overlap] = field(default_factory=list)
    curves: list[Curves] = field(default_factory=list)

    def add(self, values: Map, mask: Mask | None, curves: Curves | None) -> None:
        """One image."""
        if curves is not None:
            self.curves.append(curves)
        if mask is not None:
            self.numbers["pointing"].append(pointing(values, mask))
            self.numbers["energy"].append(energy(values, mask))
            self.numbers["map"].append(average_precision(values, mask))
            self.overlaps.append(overlap(values, mask))

    def add_pair(self, values: Map, asked: Mask, other: Mask) -> None:
        """One class of an image with two objects."""
        self.numbers["pair_pointing"].append(pointing(values, asked))
        self.numbers["separation"].append(separation(values, asked, other))

    def result(self) -> dict[str, float]:
        """In percent, by metric."""
        found = {name: 100 * float(np.mean(n)) for name, n in self.numbers.items()}
        if self.overlaps:
            total = pooled(self.overlaps)
            found["pixel_accuracy"] = 100 * total.accuracy
            found["miou"] = 100 * total.mean_iou
        if self.curves:
            mean = Curves(*(np.mean(values, axis=0) for values in zip(*self.curves, strict=True)))
            found["positive"] = perturbation_area(mean.positive_kept)
            found["negative"] = perturbation_area(mean.negative_kept)
            found["deletion"] = 100 * curve_area(mean.positive)
            found["insertion"] = 100 * curve_area(mean.insertion)
        return {name: found[name] for name in METRICS if name in found}


def score(
    subject: Subject,
    samples: Sequence[Sample],
    choices: Sequence[MethodChoice],
    *,
    pairs: Sequence[Pair] = (),
    steps: int | None = 10,
    seed: int = 0,
    batch_size: int = 16,
    advance: Callable[[int], None] = lambda images: None,
    passes: Passes | None = None,
) -> dict[str, dict[str, float]]:
    """Every available metric by method, baselines first.

    Maps are of the predicted class; of images with two objects, of both.
    steps: from a whole image to a hidden one; None: only compare maps with masks. passes: of a
    single batch of samples, to share their captures with others.
    """
    if not samples and not pairs:
        raise ValueError("No images to score maps on.")
    if steps is None and any(sample.mask is None for sample in samples):
        raise ValueError("Without steps every image needs a mask to score its maps.")
    tallies = {name: _Tally() for name in (*BASELINES, *map(str, choices))}
    predict = _predictor(subject)
    with static_bias(subject.model):
        for start in range(0, len(samples), batch_size):
            part = samples[start : start + batch_size]
            pixels = [sample.pixels for sample in part]
            explained = explain(subject, pixels, choices, classes=1, passes=passes)
            for i, (sample, one) in enumerate(zip(part, explained, strict=True), start):
                image = torch.from_numpy(sample.pixels.copy()).movedim(-1, 0)
                for name, (values, *_) in _maps_by_name(one, [seed, i]).items():
                    curves = None
                    if steps is not None:
                        target = _predicted(one)
                        curves = perturb(
                            predict,
                            image,
                            values,
                            target,
                            steps=steps,
                            seed=[seed, i],
                            activation=getattr(subject.model, "activation", "softmax"),
                        )
                    tallies[name].add(values, sample.mask, curves)
                advance(1)
    for start in range(0, len(pairs), batch_size):
        both = pairs[start : start + batch_size]
        targets = torch.tensor([pair.labels for pair in both])
        explained = explain(subject, [pair.pixels for pair in both], choices, classes=targets)
        for i, (pair, one) in enumerate(zip(both, explained, strict=True), start):
            for name, maps in _maps_by_name(one, [seed, i, 1]).items():
                tallies[name].add_pair(maps[0], pair.masks[0], pair.masks[1])
                tallies[name].add_pair(maps[-1], pair.masks[1], pair.masks[0])
    return {name: tally.result() for name, tally in tallies.items()}


def _predicted(explanation: Explanation) -> int:
    if not explanation.top:
        raise ValueError(
            "Scores measure how hiding pixels changes the predicted class, but this model has no "
            "classes: score one with a classification head."
        )
    return explanation.top[0].number


def _maps_by_name(explanation: Explanation, seed: Sequence[int]) -> dict[str, list[Map]]:
    """The maps of baselines and methods at the size of the image, one or one for each class."""
    rows, columns = explanation.heatmaps[0].values.shape
    cells = {"random": random_map((rows, columns), seed), "centre": centre_map((rows, columns))}
    size = explanation.pixels.shape[:2]
    maps = {name: [_enlarged(values, size)] for name, values in cells.items()}
    for heatmap in explanation.heatmaps:
        maps.setdefault(str(heatmap.choice), []).append(heatmap.pixels)
    return maps


def _enlarged(values: Map, size: tuple[int, ...]) -> Map:
    cells = torch.from_numpy(np.ascontiguousarray(values))[None, None]
    large = F.interpolate(cells, size=list(size), mode="bilinear", align_corners=False)
    return large[0, 0].numpy()


def _predictor(subject: Subject) -> Callable[[Tensor], Tensor]:
    """From uint8 images to logits, a chunk at a time."""

    def predict(images: Tensor) -> Tensor:
        outputs = []
        for part in images.split(CHUNK):
            pixels = list(part.movedim(1, -1).numpy())
            outputs.append(subject.model(as_batch(subject, pixels)))
        return torch.cat(outputs)

    return predict
