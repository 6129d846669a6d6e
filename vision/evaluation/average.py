"""`vision average`: the mean of the weights of several runs, evaluated as it goes.

uniform   the mean of all (uniform soup, Wortsman et al., ICML 2022)
greedy    from the best run on, each next one that does not make the mean worse (greedy soup)
wise      (1 − alpha) · start + alpha · result of one run (WiSE-FT, Wortsman et al., CVPR 2022)

LoRA's additions are merged into their weights first.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from torch import Tensor

from vision.checkpoints.native.checkpoint import write_checkpoint
from vision.checkpoints.native.checkpoint_folder import run_of
from vision.checkpoints.open import OpenedModel, open_model
from vision.config import ConfigError, shorten
from vision.data.configs import DataConfig
from vision.data.preprocess import NAMES
from vision.evaluation.average_images import AverageImages, average_images
from vision.evaluation.configs import LOWER_IS_BETTER, AverageConfig
from vision.terminal import plain

TRAINING_ONLY = ("dropout", "attention_dropout", "drop_path", "drop_path_schedule", "pretrained")
"""Settings of a model that its outputs in evaluation do not depend on."""
SHOWN = ("top1", "map", "balanced_accuracy", "micro_f1", "macro_f1", "loss")
"""Metrics of the table, where the models have them."""
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class AveragedRun:
    """Weights that were evaluated, and perhaps averaged."""

    place: str
    opened: OpenedModel
    metrics: Mapping[str, float]
    used: bool
    """Whether they are part of the average."""


@dataclass(frozen=True)
class Average:
    """The outcome of `vision average`."""

    config: AverageConfig
    metric: str
    """The metric of the settings, or what `auto` stands for."""
    images: int
    members: tuple[AveragedRun, ...]
    metrics: Mapping[str, float]
    """Of the average."""
    thresholds: Sequence[float]
    """Of the average, for several labels per image."""
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """As plain mappings and lists, for JSON and the record of the checkpoint."""
        config = self.config
        members = [
            {
                "checkpoint": str(member.opened.path),
                "weights": member.opened.weights,
                "step": 0 if member.opened.record is None else member.opened.record.step,
                "used": member.used,
                "metrics": dict(member.metrics),
            }
            for member in self.members
        ]
        return {
            "method": config.method,
            "alpha": config.alpha if config.method == "wise" else None,
            "metric": self.metric,
            "split": config.split,
            "images": self.images,
            "members": members,
            "metrics": dict(self.metrics),
            "output": str(config.output),
        }

    def table(self) -> Group:
        """A row for each member and one for the average."""
        shown = (name for name in SHOWN if name in self.metrics)
        names = dict.fromkeys((self.metric, *shown))
        table = Table()
        table.add_column(plain(f"{self.config.split}: {self.images:,} images"))
        for name in (*names, "averaged"):
            table.add_column(name, justify="right")
        for member in self.members:
            used = "yes" if member.used else "no"
            table.add_row(plain(member.place), *_cells(member.metrics, names), used)
        table.add_section()
        number = sum(member.used for member in self.members)
        title = f"{self.config.method} of {number}"
        if self.config.method == "wise":
            title = f"wise, alpha {self.config.alpha:g}"
        table.add_row(title, *_cells(self.metrics, names), "", style="bold")
        lines = [*self.notes, f"written: {self.config.output}"]
        return Group(table, *map(plain, lines))


def _cells(metrics: Mapping[str, float], names: Iterable[str]) -> list[str]:
    return [f"{metrics[name]:.4f}" for name in names]


def average(config: AverageConfig, device: torch.device) -> Average:
    """Average the weights of runs, evaluate them and write the checkpoint."""
    if config.output.exists():
        raise ConfigError(f"output: {config.output} exists already; name a new file.")
    if config.method == "wise":
        places, opened, notes = _ends(config)
    else:
        places = _distinct(config.runs)
        opened = [_open(place, config) for place in places]
        notes = []
        for other in opened[1:]:
            _check_same_model(opened[0], other)
    images = average_images(opened, config, device)
    # Copies: the model that evaluates them shares its memory with the tensors that it came with.
    weights = [{name: t.clone() for name, t in one.tensors.items()} for one in opened]
    evaluated = [images.evaluate(*parts) for parts in zip(weights, places, strict=True)]
    used = list(range(len(opened)))
    match config.method:
        case "uniform":
            result = mean_weights(weights)
        case "wise":
            result = mix_weights(weights[0], weights[1], config.alpha)
        case "greedy":
            used, result = _greedy(weights, [one.metrics for one in evaluated], images)
    if any(".running_mean" in name for name in result):
        notes.append("statistics of batch norms are averaged, not computed anew")
    found = evaluated[used[0]]
    if len(used) > 1:
        found = images.evaluate(result, "average")
    members = tuple(
        AveragedRun(place, one, its.metrics, number in used)
        for number, (place, one, its) in enumerate(zip(places, opened, evaluated, strict=True))
    )
    outcome = Average(config, images.metric, len(images.source), members, *found, tuple(notes))
    config.output.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": tensor for name, tensor in result.items()}
    write_checkpoint(config.output, tensors, _record(opened[-1], images.data, outcome))
    return outcome


def mean_weights(members: Sequence[Weights]) -> dict[str, Tensor]:
    """The mean of every tensor, summed in double precision; integers are those of the first."""
    result = {}
    for name, first in members[0].items():
        result[name] = first
        if first.is_floating_point():
            total = torch.stack([member[name].double() for member in members]).mean(0)
            result[name] = total.to(first.dtype)
    return result


def mix_weights(start: Weights, end: Weights, alpha: float) -> dict[str, Tensor]:
    """(1 − alpha) · start + alpha · end in double precision; integers are those of the end."""
    return {
        name: ((1 - alpha) * start[name].double() + alpha * tensor.double()).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in end.items()
    }


def _greedy(
    weights: Sequence[Weights], metrics: Sequence[Mapping[str, float]], images: AverageImages
) -> tuple[list[int], dict[str, Tensor]]:
    """The members of the greedy soup, from the best one on, and their mean."""
    metric = images.metric
    sign = -1 if metric in LOWER_IS_BETTER else 1
    order = sorted(range(len(weights)), key=lambda number: -sign * metrics[number][metric])
    used, best = order[:1], metrics[order[0]][metric]
    for number in order[1:]:
        tried = mean_weights([weights[i] for i in (*used, number)])
        value = images.evaluate(tried, f"average of {len(used) + 1}").metrics[metric]
        if sign * value >= sign * best:
            used, best = [*used, number], value
    return used, mean_weights([weights[i] for i in used])


def _distinct(places: Iterable[str]) -> list[str]:
    """The places without repetitions: a link such as `latest` points to a run that is named too."""
    kept = {Path(place).resolve(): place for place in reversed(list(places))}
    if len(kept) < 2:
        raise ConfigError(
            f"runs: found {shorten(list(kept.values()))} alone; name at least two runs to average, "
            "or one with method=wise, which averages it with the weights that it started from."
        )
    return list(reversed(kept.values()))


def _open(place: str, config: AverageConfig) -> OpenedModel:
    opened = open_model(place, weights=config.weights, setting="runs")
    opened.check_head()
    if opened.record is None:
        raise ConfigError(
            f"runs: {place} is not a checkpoint of this project, so its classes and images are "
            "unknown; average runs that were trained here."
        )
    return opened


def _ends(config: AverageConfig) -> tuple[list[str], list[OpenedModel], list[str]]:
    """Start and result of a run, the start as a model of the result's kind; and notes."""
    if len(config.runs) != 1:
        raise ConfigError(
            f"runs: method=wise needs one run, found {len(config.runs)}: {shorten(config.runs)}. "
            "The weights that it started from are init=…"
        )
    place = config.runs[0]
    result = _open(place, config)
    assert result.record is not None
    run = run_of(result.path.resolve())
    init = config.init or result.record.config.init
    if config.init is None and run is not None and (run / "probe").is_dir():
        init = str(run / "probe")
    if init == "pretrained":
        init = result.config.pretrained
    if init is None:
        raise ConfigError(
            f"runs: {place} was not started from other weights, or its record does not name them; "
            "give them with init=…"
        )
    start = open_model(
        init,
        model=result.config,
        image_size=result.image_size,
        channels=result.channels,
        classes=result.classes,
        setting="init",
    )
    known = start.class_names in (None, result.class_names)  # None: weights of another project
    if known and not start.report.new:
        return [init, place], [start, result], []
    head = {n: tensor for n, tensor in result.tensors.items() if n in result.model.head_names()}
    start = replace(start, tensors={**start.tensors, **head})
    note = f"{init} has no head for these classes: that of {place} is used with both"
    return [init, place], [start, result], [note]


def _check_same_model(first: OpenedModel, other: OpenedModel) -> None:
    """Refuse another architecture, size, classes or preprocessing, by what differs."""
    both = f"runs: {first.path} and {other.path}"
    one, two = (
        {
            **{f"model.{k}": v for k, v in o.config.model_dump(mode="json").items()},
            "image size": o.image_size,
            "channels": o.channels,
            "several labels per image": o.multi_label,
            **{n: getattr(o.preprocess, n) for n in NAMES},
        }
        for o in (first, other)
    )
    ignored = {f"model.{name}" for name in TRAINING_ONLY}
    differing = [
        f"{name} {one.get(name)} and {two.get(name)}"
        for name in {**one, **two}
        if name not in ignored and one.get(name) != two.get(name)
    ]
    if differing:
        raise ConfigError(
            f"{both} have different models or images, so their weights cannot be averaged: "
            f"{shorten(differing)}."
        )
    if first.class_names != other.class_names:
        raise ConfigError(
            f"{both} have different classes, so their weights cannot be averaged: "
            f"{shorten(first.class_names or ())}; {shorten(other.class_names or ())}."
        )


def _record(opened: OpenedModel, data: DataConfig, outcome: Average) -> dict[str, Any]:
    """A record that opens everywhere: the run's, with the members in place of its training."""
    record = opened.record
    assert record is not None
    kind = "multi_label" if opened.multi_label else "classify"
    return {
        "step": 0,
        "config": {
            "data": data.model_dump(mode="json"),
            "tune": {"kind": "all"},
            "task": {"kind": kind},
        },
        "thresholds": list(outcome.thresholds),
        "model": opened.config.model_dump(mode="json"),
        "classes": list(record.classes),
        "channels": opened.channels,
        "preprocess": {
            "image_size": list(opened.image_size),
            **record.preprocess.model_dump(mode="json", exclude={"image_size"}),
        },
        "origin": {"layout": opened.resized_as},
        "average": outcome.as_dict(),
    }
