"""The page: image, numbers, style and script in one HTML file that opens from disk."""

import base64
import html
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import matplotlib
import numpy as np
from PIL import Image
from torch import Tensor, nn

from vision.files import replacing, write_all
from vision.inspection.capture.capture import Passes
from vision.inspection.explain import available_methods, class_probability, explained_classes
from vision.inspection.explorer.pack import PageClass, PageContent, pack
from vision.inspection.explorer.self_contained import data_url, script_data
from vision.inspection.methods.attribution import attribute
from vision.inspection.methods.layer_maps import cam_seed, token_norms
from vision.inspection.methods.rollout import gradient_weighted, seed_of
from vision.inspection.methods.spec import parse_methods
from vision.inspection.trust.scoring import METRICS

SCRIPTS = (
    "elements.js",
    "core.js",
    "rollout.js",
    "methods.js",
    "state.js",
    "draw.js",
    "tiles.js",
    "panels.js",
    "explain.js",
    "input.js",
    "main.js",
)
"""In the order in which the page runs them."""
IMAGE_SIDE = 1024
"""Pixels along the longer side of the stored image, at most."""
LOSSLESS_SIDE = 128
"""The same of an image that is stored without loss."""
PAGE_METHODS = parse_methods(
    [
        "attention",
        "rollout",
        "cam_rollout",
        "gradient_rollout:clamp:before:normalize:true",
        "chefer",
        "cam",
        "token_gradcam",
        "attention_gradcam",
        "norm",
    ]
)
"""The methods of the page, with the options that it starts with."""
FINISHED = ("attention_gradcam", "token_gradcam", "cam")
"""Methods for a class whose maps are stored; the page computes the others itself."""
Scores = Mapping[str, Mapping[str, float]]
"""By name of the method and by metric, in percent; `random` and `centre` are baselines."""


def write_page(
    model: nn.Module, image: Tensor, shown: Image.Image, output: Path, **options: Any
) -> None:
    """Write the page of `build_page`, which takes the same options, to a file."""
    page = build_page(model, image, shown, **options)
    output.parent.mkdir(parents=True, exist_ok=True)
    with replacing(output) as file:
        write_all(file, page)


def build_page(
    model: nn.Module,
    image: Tensor,
    shown: Image.Image,
    *,
    classes: Sequence[str] | None = None,
    top: int | Sequence[int] = 3,
    max_megabytes: float = 10.0,
    scores: Scores | None = None,
    scores_note: str = "",
    title: str = "Attention",
    subtitle: str = "",
    passes: Passes | None = None,
    temperature: float = 1.0,
) -> bytes:
    """One self-contained page in which the attention for an image can be explored.

    image: the input of the model, (channels height width) or with a batch of one. shown: the same
    view for the eye. classes: names in the model's order. top: the number of most probable classes
    that can be explained, or the numbers of classes. scores: of the methods on this image;
    scores_note: a remark on them, or why there are none. Attention that does not fit into
    max_megabytes is reduced, and the page describes how. passes: of this image, to share its
    captures with others. temperature: by which logits are divided for the probabilities.
    """
    image = _single(image)
    _check_image(shown, image)
    if not max_megabytes > 0:
        raise ValueError(f"max_megabytes must be above 0, found {max_megabytes}.")
    passes = passes or Passes(model, image)
    content = gather(passes, names=classes, classes=top, temperature=temperature)
    checked = _checked_scores(scores)
    about = {
        "title": title,
        "subtitle": subtitle,
        "scores": checked,
        "scores_note": scores_note,
        "metrics": {m: METRICS[m] for row in checked.values() for m in row if m in METRICS},
        "methods": _methods(),
    }
    frame = _frame(title, data_url(shown, IMAGE_SIDE, LOSSLESS_SIDE))
    budget = int(max_megabytes * 1e6) - len(frame.encode())
    packed = pack(content, limit=(budget - _header_room(content, about)) * 3 // 4)
    return _filled(frame, packed.header | about, packed.stream)


def gather(
    passes: Passes,
    *,
    names: Sequence[str] | None,
    classes: int | Sequence[int],
    temperature: float = 1.0,
) -> PageContent:
    """The content of the page of a single image.

    names: of all classes. classes: the number of most probable classes to explain, or numbers.
    """
    captured = passes.plain
    tokens = None if captured.tokens is None else token_norms(captured)
    pool = None
    if captured.anatomy.pool != "other":
        shares, prefix = seed_of(captured)[0, 0], len(captured.layout.prefix)
        pool = {"prefix": shares[:prefix].tolist(), "cells": float(shares[prefix:].sum())}
    return PageContent(
        captured=captured,
        pool=pool,
        classes=_classes(passes, names, classes, temperature),
        norms=None if tokens is None else captured.layout.to_grid(tokens[0]),
    )


def _classes(
    passes: Passes, names: Sequence[str] | None, classes: int | Sequence[int], temperature: float
) -> list[PageClass]:
    if isinstance(classes, int) and classes < 0:
        raise ValueError(f"The number of classes must be 0 or more, found {classes}.")
    logits = passes.plain.logits
    if logits is not None and names is not None and len(names) != logits.shape[1]:
        raise ValueError(
            f"The model has {logits.shape[1]} classes, but {len(names)} names were given: pass "
            "one name for each class in the model's order, or none."
        )
    targets = explained_classes(passes.plain, classes)
    found = []
    for captured in passes.gradients(targets):
        assert captured.targets is not None
        available = [choice.name for choice in available_methods(FINISHED, captured)]
        if captured.layers[-1].inputs is None:
            available.remove("token_gradcam")
        maps = {name: attribute(captured, method=name).values[0] for name in available}
        number = int(captured.targets[0])
        found.append(
            PageClass(
                about=class_probability(captured, 0, number, names or (), temperature),
                matrices=[gradient_weighted(layer, "before")[0] for layer in captured.layers],
                seed=cam_seed(captured, captured.targets)[0, 0] if "cam" in maps else None,
                maps={name: values.clamp_min(0) for name, values in maps.items()},
            )
        )
    return found


def _methods() -> list[dict[str, Any]]:
    """The specs of the page's methods, for its script."""
    return [
        {
            "id": choice.name,
            "title": choice.title,
            "formula": choice.spec.formula,
            "reference": choice.spec.reference,
            "notes": choice.spec.notes,
            "query": choice.spec.query and choice.name not in FINISHED,
            "forClass": choice.spec.for_class,
            "gradients": choice.spec.gradients,
            "finished": choice.name in (*FINISHED, "norm"),
            "options": list(choice.spec.options),
        }
        for choice in PAGE_METHODS
    ]


def _single(image: Tensor) -> Tensor:
    image = image if image.ndim == 4 else image[None]
    if image.ndim != 4 or image.shape[0] != 1:
        raise ValueError(
            f"A page shows one image (channels, height, width), found {tuple(image.shape)}."
        )
    return image


def _check_image(shown: Image.Image, image: Tensor) -> None:
    """The shown image has the proportions of the model's input."""
    height, width = image.shape[-2:]
    ratio = (shown.width / shown.height) / (width / height)
    # One pixel of rounding along the shorter side is allowed.
    allowed = 0.01 + 1 / min(height, width, *shown.size)
    if abs(math.log(ratio)) > allowed:
        raise ValueError(
            f"The image is {shown.width} x {shown.height}, but the model is given "
            f"{width} x {height} (width x height), which has other proportions: pass the image "
            "as it is after resizing and cropping."
        )


def _checked_scores(scores: Scores | None) -> dict[str, dict[str, float]]:
    checked: dict[str, dict[str, float]] = {}
    for method, row in (scores or {}).items():
        for metric, value in row.items():
            if not math.isfinite(value):
                raise ValueError(f"The score {metric} of {method} is {value}, not finite.")
        checked[method] = {metric: float(value) for metric, value in row.items()}
    return checked


def _frame(title: str, image: str) -> str:
    """The page without its numbers: a template whose last two places are open."""
    static = files("vision.inspection.explorer") / "static"
    script = "\n".join((static / name).read_text("utf-8") for name in SCRIPTS)
    page = Template((static / "page.html").read_text("utf-8"))
    return page.substitute(
        title=html.escape(title),
        image=image,
        colours=base64.b64encode(_colours()).decode(),
        style=(static / "page.css").read_text("utf-8"),
        script=f"(() => {{\n'use strict';\n{script}\n}})();",
    )


def _filled(frame: str, header: Mapping[str, Any], stream: bytes) -> bytes:
    before, between, after = frame.split(">@@</script>")
    numbers = base64.b64encode(stream).decode()
    return "".join(
        (before, ">", script_data(header), "</script>", between, ">", numbers, "</script>", after)
    ).encode()


def _header_room(content: PageContent, about: Mapping[str, Any]) -> int:
    """An upper bound of the header's bytes: references, window outlines, names."""
    layers = content.captured.layers
    windows = sum(len(x.layout.index) for x in layers if x.layout.index is not None)
    names = sum(len(json.dumps(c.about.name)) for c in content.classes)
    references = len(layers) * (1500 + 500 * len(content.classes))
    return 10_000 + len(script_data(about).encode()) + names + references + 120 * windows


def _colours() -> bytes:
    """256 colours for shares from 0 to the limit, then 256 for differences: red, green, blue."""
    steps = np.linspace(0, 1, 256)
    tables = [matplotlib.colormaps[name](steps)[:, :3] for name in ("inferno", "PuOr_r")]
    return np.rint(np.concatenate(tables) * 255).astype(np.uint8).tobytes()
