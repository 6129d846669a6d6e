"""The images that `vision average` evaluates weights on, the same for all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vision.checkpoints.open import OpenedModel
from vision.config import ConfigError, shorten
from vision.data.batches import build_loader, evaluation_batches
from vision.data.configs import DataConfig
from vision.data.sources.build_source import build_source
from vision.data.sources.source import Source
from vision.evaluation.configs import AverageConfig
from vision.evaluation.evaluate import evaluate, predict
from vision.evaluation.evaluated_model import check_labels, own_data
from vision.evaluation.multi_label_metrics import best_thresholds, overall_metrics, sort_scores
from vision.terminal import tracked


class EvaluatedWeights(NamedTuple):
    """Metrics of weights and, for several labels per image, their best thresholds."""

    metrics: dict[str, float]
    thresholds: list[float]


@dataclass(frozen=True)
class AverageImages:
    """The images that all weights are evaluated on, and a model that takes them one by one."""

    config: AverageConfig
    opened: OpenedModel
    data: DataConfig
    source: Source
    device: torch.device

    @property
    def metric(self) -> str:
        """The metric of the settings."""
        given = self.config.metric
        if given != "auto":
            return given
        return "map" if self.opened.multi_label else "top1"

    def evaluate(self, weights: Mapping[str, Tensor], title: str) -> EvaluatedWeights:
        """The metrics of these weights."""
        config, preprocess, model = self.config, self.opened.preprocess, self.opened.model
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(weights.get(name, tensor))
        loader = build_loader(
            self.source, preprocess, self.data, config.loader, on_cpu=self.device.type == "cpu"
        )
        size, total = config.batch_size, len(self.source)
        batches = tracked(evaluation_batches(loader, size), title, -(-total // size))
        given = preprocess, self.opened.classes, self.device, config.precision
        model = model.to(self.device)
        if not self.opened.multi_label:
            return self._with_metric(evaluate(model, batches, *given), [])
        found = predict(model, batches, total, *given, activation=model.activation)
        scores = sort_scores(found.logits, torch.from_numpy(self.source.labels)[found.ids])
        return self._with_metric(overall_metrics(scores), best_thresholds(scores).tolist())

    def _with_metric(self, metrics: dict[str, float], thresholds: list[float]) -> EvaluatedWeights:
        """The result; refused without the metric of the settings."""
        if self.metric not in metrics:
            several = "several labels" if self.opened.multi_label else "one class"
            names = [name for name in metrics if name != "samples"]
            raise ConfigError(
                f"metric = {self.metric}: the images have {several} each; choose one of "
                f"{', '.join(names)}."
            )
        return EvaluatedWeights(metrics, thresholds)


def average_images(
    opened: Sequence[OpenedModel], config: AverageConfig, device: torch.device
) -> AverageImages:
    """The images of the split, the same for all runs."""
    result = opened[-1]
    data = config.data or own_data(result)
    source = build_source(data, config.split)
    check_labels(result, source, str(result.path))
    if source.classes != result.class_names:
        raise ConfigError(
            f"data: {shorten(source.classes)} are not the classes of {result.path} in their order: "
            f"{shorten(result.class_names or ())}."
        )
    if config.data is None and config.method != "wise":
        for other in opened[:-1]:
            theirs = own_data(other)
            if theirs != data and _images(build_source(theirs, config.split)) != _images(source):
                raise ConfigError(
                    f"runs: {other.path} and {result.path} have different {config.split} images; "
                    "choose the images for all with data=…"
                )
    return AverageImages(config, result, data, source, device)


def _images(source: Source) -> list[tuple[str, object]]:
    """Name and label, or labels, of every image."""
    return [(source.name(i), np.asarray(source.labels[i]).tolist()) for i in range(len(source))]
