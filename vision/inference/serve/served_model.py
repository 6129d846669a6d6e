"""A checkpoint that is served: its answers to images, with calibrated probabilities."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vision.checkpoints.native.checkpoint_folder import run_of
from vision.checkpoints.open import OpenedModel
from vision.data.images.decode import Pixels, to_image
from vision.data.preprocess import input_pixels
from vision.evaluation.report.eval_report import short_names
from vision.files import read_file
from vision.inference.predict import Loaded, Prediction
from vision.inspection.capture.anatomy import anatomy_of
from vision.inspection.capture.capture import Passes
from vision.inspection.capture.captured import CaptureError
from vision.inspection.explain import available_methods, default_methods, explain
from vision.inspection.explorer.page import PAGE_METHODS, build_page
from vision.inspection.methods.spec import parse_method
from vision.models.layers import static_bias

Arrays = dict[str, Any]
"""NumPy arrays by name."""


@dataclass(frozen=True)
class Temperature:
    """The number that logits are divided by, and where it is from."""

    value: float
    origin: str


@dataclass(frozen=True)
class Answer:
    """One image's row of a forward pass."""

    features: Tensor
    """Input of the head: (c,)."""
    logits: Tensor | None
    """(classes,); None for a model without a head."""


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model under its name."""

    name: str
    loaded: Loaded
    temperature: Temperature

    def pixels(self, content: bytes, max_pixels: int) -> Pixels:
        """What the model sees of an image, or an UnreadableImageError."""
        return input_pixels(content, "file", self.loaded.preprocess, max_pixels)

    def forward(self, pixels: Sequence[Pixels]) -> list[Answer]:
        """The answers to a batch of images, from one forward pass."""
        model = self.loaded.model
        with torch.inference_mode(), static_bias(model):
            pooled = model.pool(model.forward_features(self.loaded.batch(pixels)))
            logits = model.classify(pooled).cpu() if self.loaded.classes else None
        rows = [None] * len(pixels) if logits is None else logits.unbind(0)
        pairs = zip(pooled.cpu().unbind(0), rows, strict=True)
        return [Answer(features, row) for features, row in pairs]

    def prediction(self, answer: Answer, top: int) -> Prediction:
        """The most probable classes."""
        assert answer.logits is not None
        return self.loaded.predictions(answer.logits[None] / self.temperature.value, top)[0]

    def maps(self, pixels: Pixels, methods: Sequence[str], classes: int) -> "AttentionMaps":
        """The maps of some methods (none given: those that suit the model)."""
        passes = self._passes(pixels)
        choices = [parse_method(text) for text in methods] or default_methods(passes.plain)
        explained = explain(self.loaded, [pixels], choices, classes=classes, passes=passes)[0]
        maps: list[dict[str, Any]] = []
        arrays: Arrays = {}
        for number, heatmap in enumerate(explained.heatmaps):
            shown = heatmap.explained
            about = {
                "method": str(heatmap.choice),
                "title": heatmap.choice.title,
                "class": None if shown is None else shown.name,
                "outside": heatmap.elsewhere,
            }
            maps.append(about | {"values": np.round(heatmap.values.astype(float), 6).tolist()})
            arrays[f"map_{number:02}"] = heatmap.values
        for layer in passes.plain.layers:
            arrays[f"weights_{layer.number:02}"] = layer.weights[0].float().cpu().numpy()
        available = available_methods([str(choice) for choice in PAGE_METHODS], passes.plain)
        return AttentionMaps(maps, [str(choice) for choice in available], arrays)

    def explorer(self, pixels: Pixels, classes: int, title: str) -> bytes:
        """The explorer of one image, as a self-contained page."""
        passes, loaded = self._passes(pixels), self.loaded
        return build_page(
            loaded.model,
            passes.images,
            to_image(pixels),
            classes=loaded.classes or None,
            top=classes if loaded.classes else 0,
            title=title,
            subtitle=self.name,
            scores_note="Scores take many forward passes: vision visualize page=true score=true.",
            passes=passes,
            temperature=self.temperature.value,
        )

    def _passes(self, pixels: Pixels) -> Passes:
        return Passes(self.loaded.model, self.loaded.batch([pixels]))

    def about(self) -> dict[str, Any]:
        """The model for clients; no path of the server's files is among it."""
        opened = self.loaded.opened
        return {
            "name": self.name,
            "kind": opened.config.kind,
            "image_size": list(opened.image_size),
            "channels": opened.channels,
            "classes": list(self.loaded.classes),
            "parameters": sum(p.numel() for p in opened.model.parameters()),
            "temperature": self.temperature.value,
            "temperature_origin": self.temperature.origin,
            **self.loaded.preprocess.values(),
            "patch": patch_size(opened),
            "assumed": list(opened.report.assumed),
        }


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """Maps of one image, and the arrays for an npz file."""

    maps: list[dict[str, Any]]
    available: list[str]
    arrays: Arrays


def patch_size(opened: OpenedModel) -> list[int] | None:
    """Pixels of a patch, vertically and horizontally; None for a model without patches."""
    try:
        return list(anatomy_of(opened.model).patch)
    except CaptureError:
        return None


def served_models(
    loaded: Sequence[Loaded], temperature: Literal["auto"] | float
) -> list[ServedModel]:
    """Models under short, different names."""
    steps = [0 if x.opened.record is None else x.opened.record.step for x in loaded]
    names = short_names([x.opened.path for x in loaded], steps)
    return [
        ServedModel(name, each, temperature_for(each, temperature))
        for name, each in zip(names, loaded, strict=True)
    ]


def temperature_for(loaded: Loaded, asked: Literal["auto"] | float) -> Temperature:
    """The temperature that was asked for, or of the newest evaluation of the same weights."""
    if asked != "auto":
        return Temperature(asked, "the settings")
    opened = loaded.opened
    file = Path(opened.path).resolve()
    run = run_of(file)
    if opened.record is not None and run is not None:
        reports = run.glob("evaluation/*/report.json")
        for report in sorted(reports, key=lambda path: path.stat().st_mtime, reverse=True):
            if (value := fitted_temperature(report, file, opened)) is not None:
                return Temperature(value, f"the evaluation {report.parent.name}")
    return Temperature(1.0, "none: not calibrated")


def fitted_temperature(report: Path, file: Path, opened: OpenedModel) -> float | None:
    """The temperature in a report, if it is about these very weights at this image size."""
    assert opened.record is not None
    try:
        models: list[Mapping[str, Any]] = json.loads(read_file(report))["models"]
        for model in models:
            same = (
                Path(model["checkpoint"]).parts[-3:] == file.parts[-3:]  # run/checkpoints/file
                and model["step"] == opened.record.step
                and model["weights"] == opened.weights
                and tuple(model["image_size"]) == tuple(opened.image_size)
            )
            if same:
                scaled = model["calibration"]["temperature"]
                usable = scaled is not None and not scaled["at_limit"]
                return float(scaled["temperature"]) if usable else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a report of another version, or cut short
    return None
