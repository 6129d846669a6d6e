"""The model card of a published folder: README.md as the Hugging Face hub reads it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vision import __version__
from vision.evaluation.configs import SHARES
from vision.evaluation.model_metrics import ModelMetrics
from vision.evaluation.report.eval_report import FLIPS, LABEL_ROWS, ROWS, Report
from vision.inference.predict import Loaded
from vision.models.configs import TimmConfig
from vision.terminal import percent

LISTED = 60
"""Number of classes that the card lists."""


@dataclass(frozen=True)
class Card:
    """What a card says beside the model and its results."""

    name: str
    repository: str | None
    license: str | None
    layout: str
    reason: str
    """Why the layout is not timm's, if it is not."""
    figures: tuple[str, ...]


def model_card(loaded: Loaded, card: Card, report: Report | None) -> str:
    """The card in Markdown, with its metadata in front."""
    height, width = loaded.preprocess.image_size
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    config = loaded.opened.config
    kind = config.name if isinstance(config, TimmConfig) else config.kind
    several = "any number of classes per image" if loaded.opened.multi_label else "one per image"
    parts = [
        f"---\n{yaml.safe_dump(_metadata(loaded, card, report), sort_keys=False)}---",
        f"# {card.name}",
        f"An image classifier: {kind}, {parameters:,} parameters, images of {height} × {width} "
        f"pixels, {len(loaded.classes)} classes ({several}).",
        *_results(card, report),
        "## Use",
        *_use(loaded, card),
        "## Images",
        "\n".join(_images(loaded)),
        "## Training",
        "\n".join(_training(loaded)),
        "## Classes",
        _classes(loaded),
        "## Licence",
        f"`{card.license}`" if card.license else "No licence was given with these weights.",
        f"Written by vision {__version__}; the folder was opened again and gave the same "
        "probabilities.",
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(loaded: Loaded, card: Card, report: Report | None) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if card.license:
        values["license"] = card.license
    values |= {
        "library_name": "timm" if card.layout == "timm" else "vit-swin",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", card.layout, loaded.opened.config.kind],
    }
    if base := _base_model(loaded):
        values["base_model"] = base
    if report is not None:
        values["model-index"] = [{"name": card.name, "results": [_index(report)]}]
    return values


def _base_model(loaded: Loaded) -> str | None:
    """The repository of the weights that the run started from."""
    record = loaded.opened.record
    scheme, _, name = (record.config.init or "" if record else "").partition(":")
    if scheme == "timm":
        return f"timm/{name}"
    return name.partition("@")[0] if scheme == "hf" else None


def _index(report: Report) -> dict[str, Any]:
    """The main results as the hub reads them."""
    metrics = report.models[0].results.metrics
    names = {"top1": "accuracy", "macro_f1": "f1", "map": "mean_average_precision"}
    return {
        "task": {"type": "image-classification"},
        "dataset": {"type": "imagefolder", "name": _data(report), "split": report.split},
        "metrics": [
            {"type": kind, "value": round(metrics[name], 6), "name": _rows(report)[name]}
            for name, kind in names.items()
            if name in metrics
        ],
    }


def _data(report: Report) -> str:
    """The data without the path to it, which is nobody else's business."""
    kind, _, place = report.data.partition(" ")
    return f"{kind} {Path(place).name}" if place else kind


def _rows(report: Report) -> dict[str, str]:
    return ROWS if report.task == "classify" else LABEL_ROWS


def _results(card: Card, report: Report | None) -> Iterator[str]:
    yield "## Results"
    if report is None:
        yield "This model was not measured when it was published."
        return
    results = report.models[0].results
    yield f"On {report.images:,} images ({_data(report)}, {report.split}):"
    lines = ["| metric | value | 95 % interval |", "| --- | --- | --- |"]
    for suffix, words in FLIPS.items():
        for name, label in _rows(report).items():
            key = name + suffix
            if key not in results.metrics or (name == "top5" and len(results.classes) <= 5):
                continue
            share = name in SHARES
            interval = [_number(v, share) for v in results.intervals.get(key, ())]
            value = _number(results.metrics[key], share)
            lines.append(f"| {label}{words} | {value} | {' to '.join(interval)} |")
    yield "\n".join(lines)
    if isinstance(results, ModelMetrics):
        if scaled := results.calibration.temperature:
            helped = "" if scaled.after.ece < scaled.before.ece else ", which did not help"
            yield (
                f"Calibration: dividing the logits by T = {scaled.temperature:.3f}, fitted on one "
                f"half of the images, changes the calibration error on the other from "
                f"{scaled.before.ece:.4f} to {scaled.after.ece:.4f}{helped}."
            )
        yield "\n".join(f"![{Path(name).stem}]({name})" for name in card.figures)


def _number(value: float, share: bool) -> str:
    if not math.isfinite(value):
        return "not finite"
    return percent(value) if share else f"{value:.4f}"


def _use(loaded: Loaded, card: Card) -> Iterator[str]:
    """Code for each library that opens the folder."""
    opened = loaded.opened
    ours = f'vision.load("{f"hf:{card.repository}" if card.repository else "FOLDER"}"'
    if isinstance(opened.config, TimmConfig):
        ours += f', model=TimmConfig(kind="timm", **{_baseline(opened.config)!r})'
    own = ["import vision", "", f"model = {ours})", 'print(model.predict("photo.jpg").top)']
    if isinstance(opened.config, TimmConfig):
        own.insert(1, "from vision.models.configs import TimmConfig")
    if card.layout == "timm":
        hub = f"hf-hub:{card.repository}" if card.repository else "local-dir:FOLDER"
        yield "The folder has timm's layout: timm, transformers and vision open it."
        yield _code(
            "import timm",
            "from PIL import Image",
            "",
            f'model = timm.create_model("{hub}", pretrained=True).eval()',
            "config = timm.data.resolve_model_data_config(model)",
            "transform = timm.data.create_transform(**config, is_training=False)",
            'logits = model(transform(Image.open("photo.jpg").convert("RGB"))[None])',
        )
        yield _code(
            "from transformers import pipeline",
            "",
            f'classify = pipeline("image-classification", model="{card.repository or "FOLDER"}")',
            'print(classify("photo.jpg"))',
        )
    else:
        yield (
            "The folder has the layout of vision (the package vit-swin), which opens "
            f"it; timm and transformers do not{f': {card.reason}' if card.reason else '.'}"
        )
    yield _code(*own)


def _baseline(config: TimmConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude={"kind"})


def _code(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def _images(loaded: Loaded) -> Iterator[str]:
    images = loaded.preprocess
    height, width = images.image_size
    yield (
        f"- shorter side resized to {height} / {images.crop_ratio:g} pixels "
        f"({images.interpolation}), centre of {height} × {width} cut out"
    )
    yield f"- mean {_listed(images.mean)}, standard deviation {_listed(images.std)}"
    yield f"- {images.channels} channels"


def _listed(numbers: tuple[float, ...]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def _training(loaded: Loaded) -> Iterator[str]:
    """As far as the checkpoint knows it; paths stay at home."""
    record = loaded.opened.record
    if record is None or record.config.data is None:
        yield f"- weights in the layout of {loaded.report.layout}"
        return
    place = getattr(record.config.data, "root", None) or getattr(record.config.data, "path", None)
    yield f"- data: {record.config.data.kind}" + (f" {Path(place).name}" if place else "")
    init = record.config.init
    start = "random weights" if init is None else init if ":" in init else Path(init).name
    yield f"- from {start}, {record.step:,} steps, {loaded.opened.weights} weights"
    yield f"- task: {record.config.task.kind}; trained: {record.config.tune.kind}"


def _classes(loaded: Loaded) -> str:
    names = [f"`{name.replace('`', ' ')}`" for name in loaded.classes[:LISTED]]
    more = len(loaded.classes) - LISTED
    rest = f" and {more:,} more, in config.json" if more > 0 else ""
    lines = ", ".join(" ".join(name.split()) for name in names) + rest
    if not loaded.opened.multi_label:
        return lines
    limits = set(loaded.opened.thresholds)
    shared = f"{limits.pop():g} for all" if len(limits) == 1 else "in config.json, one for each"
    return f"{lines}\n\nA class counts as present from its threshold on: {shared}."
