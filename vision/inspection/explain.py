"""What a model says of images and where it looks: the one record that all figures draw from.

Axes: b batch · k classes that are asked for · y, x rows and columns of cells.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vision.config import ConfigError, suggest
from vision.data.images.decode import open_image
from vision.data.images.transforms import evaluation_pixels
from vision.data.preprocess import Preprocess, normalizer
from vision.data.sources.source import StoredImage
from vision.inspection.capture.capture import capture
from vision.inspection.capture.layout import Place
from vision.inspection.capture.recording import Captured, Fusion
from vision.inspection.methods.attribution import attribute, methods_of
from vision.inspection.methods.maps import Maps
from vision.inspection.methods.requests import Request, parse_request
from vision.inspection.methods.spec import METHODS, QUERIED

Pixels = NDArray[np.uint8]
Numbers = NDArray[np.floating[Any]]
Interpolation = Literal["bilinear", "nearest"]
Query = Place | Literal["pool", "cam"]


class Subject(Protocol):
    """A model with what is needed to show it images; what `vision.load` gives is one."""

    @property
    def model(self) -> nn.Module:
        """In evaluation mode."""
        ...

    @property
    def classes(self) -> Sequence[str]:
        """Names in the model's order; empty where there are none, or where they are not known."""
        ...

    @property
    def preprocess(self) -> Preprocess:
        """How pixels become the model's numbers."""
        ...


@dataclass(frozen=True)
class Answer:
    """A class and how probable the model finds it."""

    number: int
    name: str
    probability: float


@dataclass(frozen=True, eq=False)
class Panel:
    """The map of one method for one image and, where it is of a class, for one class."""

    request: Request
    values: Numbers
    """In cells, as multiples of a uniform map's: (y x)."""
    pixels: Numbers
    """The same at the size of the image: (height width)."""
    answer: Answer | None
    """The class that it is of."""
    elsewhere: float | None
    """The share of tokens that are no cells; None where values are no shares."""
    layer: str | None
    query: str | None
    options: Mapping[str, Any]
    """All of the method's, also those that were not asked for."""


@dataclass(frozen=True, eq=False)
class Look:
    """One model's view of one image."""

    model: str
    """Its name."""
    pixels: Pixels
    """What it is shown: (height width channels)."""
    answers: tuple[Answer, ...]
    """The most probable classes first; empty for a model without a head."""
    panels: tuple[Panel, ...]

    def panels_of(self, request: Request) -> list[Panel]:
        """Those of one method: one, or one for each class."""
        return [panel for panel in self.panels if str(panel.request) == str(request)]


def shown_pixels(subject: Subject, image: StoredImage | Image.Image, name: str) -> Pixels:
    """What the model sees of an image (a file's bytes, an image or an array), not normalised."""
    preprocess = subject.preprocess
    return evaluation_pixels(open_image(image, preprocess.channels, name), preprocess)


def as_batch(subject: Subject, pixels: Sequence[Pixels]) -> Tensor:
    """Images as the model takes them: (b channels height width)."""
    device = next(subject.model.parameters()).device
    stacked = torch.from_numpy(np.stack(pixels)).to(device).movedim(-1, 1)
    return normalizer(subject.preprocess, device)(stacked)


SUITED = ("rollout", "cam_rollout", "chefer", "token_gradcam", "attention", "norm")
ALL = (
    "attention",
    "rollout",
    "gradient_rollout",
    "gradient_rollout:normalize:true",
    "chefer",
    "chefer:normalize:true",
    "attention_gradcam",
    "token_gradcam",
    "cam",
    "cam_rollout",
    "norm",
)
"""Every method but PCA, whose sign says nothing."""


def default_requests(*models: Captured) -> tuple[Request, ...]:
    """Three methods that suit all of some models: one without a class, and two for a class."""
    fit = possible_requests(SUITED, *models)
    if any(r.method == "cam_rollout" for r in fit):  # says what Chefer's does, on a finer grid
        fit = [r for r in fit if r.method != "chefer"]
    return tuple(fit[:3])


def all_requests(model: Captured) -> tuple[Request, ...]:
    """Every method that a model can have."""
    return tuple(possible_requests(ALL, model))


def possible_requests(texts: Sequence[str], *models: Captured) -> list[Request]:
    """Those of some methods that all models can have."""
    found = [parse_request(text) for text in texts]
    for model in models:
        reasons = methods_of(model)
        pooled = model.ending.pool != "other"
        known = model.tokens is not None
        found = [
            request
            for request in found
            if reasons[request.method] is None
            and (pooled or request.method not in QUERIED)
            and (known or request.method not in ("norm", "cam", "cam_rollout"))
        ]
    return found


def check_requests(captured: Captured, requests: Sequence[Request]) -> None:
    """All methods can be had, or a ConfigError that says which cannot and why."""
    reasons = methods_of(captured)
    for request in requests:
        if reasons[request.method]:
            can = ", ".join(name for name, reason in reasons.items() if reason is None)
            raise ConfigError(
                f"methods: {captured.model} cannot have {request.method}: "
                f"{reasons[request.method]} It can have: {can}."
            )


def class_numbers(names: Sequence[str], known: Sequence[str]) -> tuple[int, ...]:
    """The numbers of classes, or a ConfigError that suggests the nearest name."""
    if names and not known:
        raise ConfigError("classes: the model has no head and so no classes; leave classes out.")
    numbers = []
    for name in names:
        if name not in known:
            raise ConfigError(f"classes: there is no class '{name}'. {suggest(name, known)}")
        numbers.append(list(known).index(name))
    return tuple(numbers)


def look_at(
    subject: Subject,
    pixels: Sequence[Pixels],
    requests: Sequence[Request] | None = None,
    *,
    classes: int | Sequence[int] | Tensor = 3,
    query: Query | None = None,
    interpolation: Interpolation = "bilinear",
    name: str = "",
) -> list[Look]:
    """The views of one model of a batch of images: answers, and a map by every method.

    requests: by default three that suit the model. classes: so many of the most probable ones, or
    numbers of classes, for methods that explain a class; a tensor (b k) has some for each image.
    """
    images = as_batch(subject, pixels)
    first = capture(subject.model, images, reduce="mean")
    requests = default_requests(first) if requests is None else requests
    check_requests(first, requests)
    answers = _answers(first, subject.classes, 5)
    targets = _targets(first, classes)
    found: dict[tuple[int, int], Maps] = {}
    sources: dict[Fusion | None, Captured] = {"mean": first}
    for number, request in enumerate(requests):
        if request.about.gradients:
            continue
        source = _plain_source(subject.model, images, request, sources)
        for rank in range(targets.shape[1] if request.about.for_class else 1):
            target = targets[:, rank] if request.about.for_class or query == "cam" else None
            found[number, rank] = _map(source, request, target, query)
    if any(request.about.gradients for request in requests):
        for rank in range(targets.shape[1]):
            target = targets[:, rank]
            captured = capture(subject.model, images, targets=target, gradients=True)
            for number, request in enumerate(requests):
                if request.about.gradients:
                    found[number, rank] = _map(captured, request, target, query)
    drawn = {key: _Drawn(maps, interpolation) for key, maps in sorted(found.items())}
    looks = []
    for i, shown in enumerate(pixels):
        panels = [
            _panel(requests[number], drawing, i, first, subject.classes)
            for (number, _), drawing in drawn.items()
        ]
        looks.append(Look(name or first.model, shown, answers[i], tuple(panels)))
    return looks


def _plain_source(
    model: nn.Module, images: Tensor, request: Request, sources: dict[Fusion | None, Captured]
) -> Captured:
    """A capture that has what the method needs, with heads fused as it came, to bound memory."""
    options = {**request.about.options, **request.options}
    wanted = options.get("fusion", options.get("head", "mean"))
    if isinstance(wanted, int):
        try:
            heads = [wanted] if wanted >= 0 else None  # from the end: of how many is not known yet
            return capture(model, images, layers=[options["layer"]], heads=heads)
        except ValueError as error:
            raise ConfigError(f"{request}: {error}") from error
    if wanted not in ("mean", "max", "min"):
        raise ConfigError(f"{request}: heads are fused by mean, max or min, found '{wanted}'.")
    fusion: Fusion = wanted
    if fusion not in sources:
        sources[fusion] = capture(model, images, reduce=fusion)
    return sources[fusion]


def _map(captured: Captured, request: Request, target: Tensor | None, query: Query | None) -> Maps:
    asked = query if request.method in QUERIED else None
    try:
        return attribute(
            captured, None, request.method, target=target, query=asked, **request.options
        )
    except ValueError as error:  # a layer, a head or a token that is not there
        raise ConfigError(f"{request}: {error}") from error


class _Drawn:
    """Maps on the CPU as numbers, computed once for a batch."""

    def __init__(self, maps: Maps, interpolation: Interpolation) -> None:
        self.maps = maps
        units = maps.times_uniform()
        self.values = units.float().cpu().numpy()
        pixels = maps.to_pixels(interpolation)
        self.pixels = (pixels * _factor(maps)[:, None, None]).float().cpu().numpy()
        prefix = list(maps.prefix.values())
        shares = maps.uniform is not None
        none = torch.zeros(len(units))
        total = torch.stack([p.float().cpu() for p in prefix]).sum(0) if prefix else none
        self.elsewhere: list[float] | None = total.tolist() if shares else None


def _factor(maps: Maps) -> Tensor:
    """What values are multiplied with to be multiples of a uniform map's: (b)."""
    if maps.uniform is not None:
        return maps.values.new_full((len(maps.values),), 1 / maps.uniform)
    mean = maps.values.clamp_min(0).mean(dim=(1, 2))
    return 1 / mean.masked_fill(mean == 0, 1)


def _panel(
    request: Request, drawn: _Drawn, i: int, captured: Captured, classes: Sequence[str]
) -> Panel:
    maps = drawn.maps
    answer = None
    if maps.targets is not None and METHODS[request.method].for_class:
        number = int(maps.targets[i])
        assert captured.logits is not None
        probability = float(captured.logits[i].float().softmax(0)[number])
        answer = Answer(number, _class_name(classes, number), probability)
    return Panel(
        request,
        drawn.values[i],
        drawn.pixels[i],
        answer,
        None if drawn.elsewhere is None else drawn.elsewhere[i],
        maps.layer,
        maps.query,
        maps.options,
    )


def _answers(captured: Captured, classes: Sequence[str], top: int) -> list[tuple[Answer, ...]]:
    if captured.logits is None:
        return [()] * captured.batch
    best = captured.logits.float().softmax(1).topk(min(top, captured.logits.shape[1]), dim=1)
    return [
        tuple(Answer(c, _class_name(classes, c), p) for c, p in zip(numbers, shares, strict=True))
        for numbers, shares in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _class_name(classes: Sequence[str], number: int) -> str:
    return classes[number] if number < len(classes) else f"class {number}"


def _targets(captured: Captured, classes: int | Sequence[int] | Tensor) -> Tensor:
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
