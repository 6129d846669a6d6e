"""A model's explanation of an image: its top classes and a map by each method.

All figures are drawn from this record.

Axes: b batch · k classes to explain · y, x rows and columns of cells.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vision.config import ConfigError, suggest
from vision.data.images.decode import Pixels
from vision.data.preprocess import Preprocess, input_batch
from vision.inspection.capture.capture import Passes
from vision.inspection.capture.captured import Captured, CaptureError
from vision.inspection.methods.attribution import Maps, attribute, methods_of
from vision.inspection.methods.rollout import Query
from vision.inspection.methods.spec import METHODS, MethodChoice, parse_method
from vision.models.layers import probabilities

Numbers = NDArray[np.floating[Any]]
Interpolation = Literal["bilinear", "nearest"]
TOP = 5
"""Number of classes listed per image."""
SUITED = ("rollout", "cam_rollout", "chefer", "token_gradcam", "attention", "norm")
"""Methods to choose three defaults from, in order of preference."""


class Subject(Protocol):
    """A model with the settings of its input, such as the result of `vision.load`."""

    @property
    def model(self) -> nn.Module:
        """In evaluation mode."""

    @property
    def classes(self) -> Sequence[str]:
        """Names in the model's order; empty if the model has no head or they are unknown."""

    @property
    def preprocess(self) -> Preprocess:
        """How pixels become the model's input."""


LEAST_LIMIT = 2.0
"""Smallest end of a colour scale, in multiples of uniform: a nearly uniform map must look dull."""


@dataclass(frozen=True)
class ClassProbability:
    """A class and its probability for an image."""

    number: int
    name: str
    probability: float


@dataclass(frozen=True, eq=False)
class Heatmap:
    """The map of one method for one image and, where it is of a class, for one class."""

    choice: MethodChoice
    values: Numbers
    """In cells, as multiples of a uniform map's: (y x)."""
    pixels: Numbers
    """The same at the size of the image: (height width)."""
    explained: ClassProbability | None
    """The class that it explains."""
    elsewhere: float | None
    """The share of prefix tokens; None where values are not shares."""
    layer: str | None
    query: str | None


@dataclass(frozen=True, eq=False)
class Explanation:
    """One model's view of one image."""

    model: str
    """Name of the model."""
    pixels: Pixels
    """The image as the model sees it: (height width channels)."""
    top: tuple[ClassProbability, ...]
    """The most probable classes first; empty for a model without a head."""
    heatmaps: tuple[Heatmap, ...]

    def heatmaps_of(self, choice: MethodChoice) -> list[Heatmap]:
        """Those of one method: one, or one for each class."""
        return [heatmap for heatmap in self.heatmaps if str(heatmap.choice) == str(choice)]


@contextmanager
def settings_error(where: str) -> Iterator[None]:
    """A model without attention, or a layer, token or cell that does not exist, as a mistake in the
    settings.
    """
    try:
        yield
    except ConfigError:
        raise
    except (CaptureError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def as_batch(subject: Subject, pixels: Sequence[Pixels]) -> Tensor:
    """Images as the input of the model: (b channels height width)."""
    return input_batch(pixels, subject.preprocess, next(subject.model.parameters()).device)


def default_methods(*models: Captured) -> tuple[MethodChoice, ...]:
    """Three methods that suit all of some models: one without a class, and two for a class."""
    fit = available_methods(SUITED, *models)
    if any(choice.name == "cam_rollout" for choice in fit):  # like Chefer's, on a finer grid
        fit = [choice for choice in fit if choice.name != "chefer"]
    return tuple(fit[:3])


def every_method(model: Captured) -> tuple[MethodChoice, ...]:
    """Every available method but PCA, whose sign has no meaning, also with normalised rows."""
    texts = []
    for name, spec in METHODS.items():
        texts += [name] if name != "pca" else []
        texts += [f"{name}:normalize:true"] if "normalize" in spec.options else []
    return tuple(available_methods(texts, model))


def available_methods(texts: Sequence[str], *models: Captured) -> list[MethodChoice]:
    """The methods that are available for all models without naming a query."""
    found = [parse_method(text) for text in texts]
    for model in models:
        reasons = methods_of(model)
        found = [
            choice
            for choice in found
            if reasons[choice.name] is None
            and (model.anatomy.pool != "other" or not choice.spec.query)
            and (model.tokens is not None or not choice.spec.last_tokens)
        ]
    return found


def check_methods(captured: Captured, choices: Sequence[MethodChoice]) -> None:
    """Raise a ConfigError for a method that is not available."""
    reasons = methods_of(captured)
    for choice in choices:
        if reasons[choice.name]:
            available = ", ".join(name for name, reason in reasons.items() if reason is None)
            raise ConfigError(
                f"methods: {choice.name} is not available for {captured.model}: "
                f"{reasons[choice.name]} Available: {available}."
            )


def class_numbers(names: Sequence[str], known: Sequence[str]) -> tuple[int, ...]:
    """The numbers of classes, or a ConfigError that suggests the nearest name."""
    if names and not known:
        raise ConfigError("classes: the model has no head and so no classes; leave classes out.")
    for name in names:
        if name not in known:
            raise ConfigError(f"classes: unknown class '{name}'. {suggest(name, known)}")
    return tuple(list(known).index(name) for name in names)


def explain(
    subject: Subject,
    pixels: Sequence[Pixels],
    choices: Sequence[MethodChoice] | None = None,
    *,
    classes: int | Sequence[int] | Tensor = 3,
    query: Query | None = None,
    interpolation: Interpolation = "bilinear",
    name: str = "",
    passes: Passes | None = None,
) -> list[Explanation]:
    """One model's view of a batch of images: top classes, and a map by every method.

    choices: by default three that suit the model. classes: the number of most probable classes to
    explain, or numbers of classes; a tensor (b k) has some for each image. passes: of these
    images, to share their captures with others.
    """
    passes = passes or Passes(subject.model, as_batch(subject, pixels))
    plain = passes.plain
    choices = default_methods(plain) if choices is None else choices
    check_methods(plain, choices)
    targets = explained_classes(plain, classes)
    heatmaps: list[list[Heatmap]] = [[] for _ in pixels]
    for choice in choices:
        count = targets.shape[1] if choice.spec.for_class else 1
        sources = passes.gradients(targets) if choice.spec.gradients else [plain] * count
        for rank, source in enumerate(sources):
            of_class = choice.spec.for_class or query == "cam"
            target = targets[:, rank] if of_class else None
            maps = _maps(source, choice, target, query)
            for of_image, heatmap in zip(
                heatmaps, _heatmaps(maps, interpolation, plain, subject.classes), strict=True
            ):
                of_image.append(heatmap)
    tops = explained_classes(plain, TOP)
    return [
        Explanation(
            name or plain.model,
            shown,
            tuple(class_probability(plain, i, c, subject.classes) for c in tops[i].tolist()),
            tuple(heatmaps[i]),
        )
        for i, shown in enumerate(pixels)
    ]


def _maps(
    captured: Captured, choice: MethodChoice, target: Tensor | None, query: Query | None
) -> Maps:
    asked = query if choice.spec.query else None
    with settings_error(str(choice)):
        return attribute(captured, None, choice.name, target=target, query=asked, **choice.options)


def _heatmaps(
    maps: Maps, interpolation: Interpolation, captured: Captured, names: Sequence[str]
) -> list[Heatmap]:
    values = maps.times_uniform().float().cpu().numpy()
    pixels = (maps.to_pixels(interpolation) / maps.unit).float().cpu().numpy()
    prefix = torch.stack([*maps.prefix.values(), torch.zeros_like(maps.values[:, 0, 0])]).sum(0)
    return [
        Heatmap(
            maps.choice,
            values[i],
            pixels[i],
            class_probability(captured, i, int(maps.targets[i]), names)
            if maps.targets is not None and maps.choice.spec.for_class
            else None,
            None if maps.uniform is None else float(prefix[i]),
            maps.layer,
            maps.query,
        )
        for i in range(len(values))
    ]


def class_probability(
    captured: Captured, image: int, number: int, names: Sequence[str], temperature: float = 1.0
) -> ClassProbability:
    """A class of one image of a batch."""
    assert captured.logits is not None
    name = names[number] if number < len(names) else f"class {number}"
    chances = probabilities(captured.logits[image].float() / temperature, captured.activation)
    probability = float(chances[number])
    return ClassProbability(number, name, probability)


def explained_classes(captured: Captured, classes: int | Sequence[int] | Tensor) -> Tensor:
    """The classes to explain: (b k); none for a model without a head."""
    if captured.logits is None:
        return torch.empty(captured.batch, 0, dtype=torch.int64)
    number = captured.logits.shape[1]
    if isinstance(classes, int):
        return captured.logits.topk(min(classes, number), dim=1).indices
    chosen = torch.as_tensor(classes, device=captured.logits.device)
    if bool(((chosen < 0) | (chosen >= number)).any()):
        raise ConfigError(f"classes must be from 0 to {number - 1}, found {chosen.tolist()}.")
    return chosen if chosen.ndim == 2 else chosen.expand(captured.batch, -1)
