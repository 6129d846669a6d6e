"""Whether maps can be believed: all metrics of all methods, beside a random map and the centre."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vision.inspection.explain import Pixels, Subject, as_batch, look_at
from vision.inspection.methods.requests import Request
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
from vision.inspection.trust.masks import Pair, Sample
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
"""All in percent; see `scores` and `perturbation` for what each is."""
BASELINES = ("random", "centre")
CHUNK = 128
"""Images in a forward pass."""
Advance = Callable[[int], None]


@dataclass
class _Tally:
    """What is known of one method so far."""

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
            mean = _mean_curves(self.curves)
            found["positive"] = perturbation_area(mean.positive_kept)
            found["negative"] = perturbation_area(mean.negative_kept)
            found["deletion"] = 100 * curve_area(mean.positive)
            found["insertion"] = 100 * curve_area(mean.insertion)
        return {name: found[name] for name in METRICS if name in found}


def score(
    subject: Subject,
    samples: Sequence[Sample],
    requests: Sequence[Request],
    *,
    pairs: Sequence[Pair] = (),
    steps: int | None = 10,
    seed: int = 0,
    batch_size: int = 16,
    advance: Advance | None = None,
) -> dict[str, dict[str, float]]:
    """Every metric that can be had, by method as it was asked for; baselines come first.

    Maps are of the class that the model gives an image; of images with two objects, of both.
    steps: how many it takes to hide an image; None: only compare maps with masks.
    """
    if not samples and not pairs:
        raise ValueError("There are no images to score maps on.")
    if steps is None and any(sample.mask is None for sample in samples):
        raise ValueError("Without steps all that can be scored are images that have a mask.")
    tallies = {name: _Tally() for name in (*BASELINES, *map(str, requests))}
    predict = _predictor(subject)
    with static_bias(subject.model):
        for start, sample, values, target in _maps(subject, samples, requests, batch_size, seed):
            image = torch.from_numpy(sample.pixels.copy()).movedim(-1, 0)
            for name, one in values.items():
                curves = None
                if steps is not None:
                    target = _need_class(target)
                    curves = perturb(predict, image, one, target, steps=steps, seed=[seed, start])
                tallies[name].add(one, sample.mask, curves)
            if advance is not None:
                advance(1)
    for name, one, asked, other in _pair_maps(subject, pairs, requests, batch_size, seed):
        tallies[name].add_pair(one, asked, other)
    return {name: tally.result() for name, tally in tallies.items()}


def _maps(
    subject: Subject,
    samples: Sequence[Sample],
    requests: Sequence[Request],
    batch_size: int,
    seed: int,
) -> Iterator[tuple[int, Sample, dict[str, Map], int | None]]:
    """The number of a sample, the sample, its maps by name, and the class, if there is one."""
    for start in range(0, len(samples), batch_size):
        part = samples[start : start + batch_size]
        looks = look_at(subject, [s.pixels for s in part], requests, classes=1)
        for i, (sample, look) in enumerate(zip(part, looks, strict=True)):
            maps = {str(panel.request): panel.pixels for panel in look.panels}
            grid = look.panels[0].values.shape
            yield (
                start + i,
                sample,
                _baselines(sample.pixels, grid, [seed, start + i]) | maps,
                look.answers[0].number if look.answers else None,
            )


def _need_class(target: int | None) -> int:
    if target is None:
        raise ValueError(
            "Scores ask what hiding pixels does to the answer, but this model has no classes: "
            "score one with a classification head."
        )
    return target


def _pair_maps(
    subject: Subject,
    pairs: Sequence[Pair],
    requests: Sequence[Request],
    batch_size: int,
    seed: int,
) -> Iterator[tuple[str, Map, Mask, Mask]]:
    """For each method, image and class: name, map, mask of the class, mask of the other."""
    for start in range(0, len(pairs), batch_size):
        part = pairs[start : start + batch_size]
        targets = torch.tensor([pair.labels for pair in part])
        looks = look_at(subject, [p.pixels for p in part], requests, classes=targets)
        for i, (pair, look) in enumerate(zip(part, looks, strict=True)):
            grid = look.panels[0].values.shape
            maps = {
                name: [m, m]
                for name, m in _baselines(pair.pixels, grid, [seed, start + i, 1]).items()
            }
            for request in requests:
                found = [panel.pixels for panel in look.panels_of(request)]
                maps[str(request)] = found if len(found) == 2 else found * 2
            for name, both in maps.items():
                yield name, both[0], pair.masks[0], pair.masks[1]
                yield name, both[1], pair.masks[1], pair.masks[0]


def _baselines(pixels: Pixels, grid: tuple[int, ...], seed: list[int]) -> dict[str, Map]:
    """Maps that know nothing of the model, on its grid, at the size of the image."""
    size = (grid[0], grid[1])
    cells = {"random": random_map(size, seed), "centre": centre_map(size)}
    return {name: _enlarged(values, pixels.shape[:2]) for name, values in cells.items()}


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


def _mean_curves(curves: Sequence[Curves]) -> Curves:
    names = ("positive", "positive_kept", "negative_kept", "insertion")
    means = [np.mean([getattr(c, name) for c in curves], axis=0) for name in names]
    return Curves(*means)
