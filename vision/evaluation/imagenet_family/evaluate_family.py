"""`vision eval data=imagenet_family`: checkpoints on ImageNet's other test sets."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vision.config import ConfigError
from vision.data.configs import ImageNetFamilyConfig
from vision.evaluation.configs import EvalConfig
from vision.evaluation.evaluate import Predictions
from vision.evaluation.evaluate_checkpoints import Processes, predict_source, report_folder
from vision.evaluation.evaluated_model import (
    EvaluatedModel,
    open_for_evaluation,
    read_class_names,
    shown_path,
)
from vision.evaluation.imagenet_family.class_map import imagenet_columns, imagenet_logits
from vision.evaluation.imagenet_family.family_figure import draw_family
from vision.evaluation.imagenet_family.family_report import FamilyModel, FamilyReport, SetResult
from vision.evaluation.imagenet_family.family_sets import FamilySet, find_sets
from vision.evaluation.report.eval_report import short_names
from vision.evaluation.report.report_files import unwritable
from vision.files import replacing, write_all, write_text

SHOWN = 5
"""k of the second accuracy."""


@dataclass(frozen=True)
class MappedModel:
    """A model, and the logit of each of ImageNet's classes."""

    model: EvaluatedModel
    columns: Tensor


def evaluate_family(config: EvalConfig, processes: Processes) -> FamilyReport | None:
    """Evaluate all checkpoints on all sets; every process takes its share of the images.

    Only the first process returns the report and writes the files.
    """
    data = config.data
    assert isinstance(data, ImageNetFamilyConfig)
    sets, not_found = find_sets(data.root)
    mapped = [_open(place, config, sets[0], processes) for place in config.checkpoints]
    models = [one.model for one in mapped]
    names = short_names([m.checkpoint for m in models], [m.step for m in models])
    with report_folder(config, models, processes) as folder:
        results = [
            _results(one, name, sets, config, processes)
            for one, name in zip(mapped, names, strict=True)
        ]
        _check_same_images(results)
    if processes.rank != 0:
        return None
    notes = [f"{name}: {note}" for name, m in zip(names, models, strict=True) for note in m.notes]
    report = FamilyReport(
        data.root, tuple(results), tuple(not_found), config.resamples, config.seed, tuple(notes)
    )
    return report if folder is None else _save(folder, report)


def _open(place: str, config: EvalConfig, first: FamilySet, processes: Processes) -> MappedModel:
    opened, preprocess, notes = open_for_evaluation(place, config, processes.device)
    if opened.multi_label:
        raise ConfigError(
            f"data: the model of {place} was trained with task=multi_label, but the images of "
            "ImageNet's test sets have one class each."
        )
    names = opened.class_names
    if config.class_names is not None:
        names = read_class_names(config.class_names, opened)
    columns, mapping = imagenet_columns(opened.classes, names, place)
    assert config.data is not None
    model = EvaluatedModel(
        checkpoint=shown_path(place, opened),
        opened=opened,
        preprocess=preprocess,
        classes=first.source.classes,
        data=config.data,
        source=first.source,
        labels=torch.from_numpy(first.source.labels),
        notes=(*notes, *mapping),
    )
    return MappedModel(model, columns)


def _results(
    mapped: MappedModel, name: str, sets: list[FamilySet], config: EvalConfig, processes: Processes
) -> FamilyModel:
    """One model on all sets. Sets of the same images are predicted once."""
    found: dict[str, SetResult] = {}
    corruptions: dict[str, dict[int, float]] = {}
    corrupted, previous = 0, None
    for one in sets:
        if previous is None or previous[0] is not one.source:
            previous = (one.source, _predict(mapped.model, one, config, processes))
        result = score(one, previous[1], mapped.columns)
        if one.corruption is None:
            found[one.name] = result
        else:
            corruptions.setdefault(one.corruption, {})[one.severity] = 1 - result.top1
            corrupted += result.images
    return FamilyModel(name, mapped.model.checkpoint, found, corruptions, corrupted)


def _predict(
    model: EvaluatedModel, one: FamilySet, config: EvalConfig, processes: Processes
) -> Predictions:
    if one.name == "c" and config.preprocess.crop_ratio == "auto":
        # Its images are the central crops already: its authors do not crop them again.
        model = replace(model, preprocess=replace(model.preprocess, crop_ratio=1.0))
    return predict_source(model, one.source, config, processes, config.augmentation)


def score(one: FamilySet, predictions: Predictions, columns: Tensor) -> SetResult:
    """The accuracy of predictions for a set; images without a right answer are left out."""
    classes = one.classes
    logits = imagenet_logits(predictions.logits, columns, classes)
    ids = predictions.ids
    if one.accepted is None:
        right = torch.zeros(logits.shape, dtype=torch.bool)
        right[torch.arange(len(ids)), torch.from_numpy(one.source.labels)[ids]] = True
    else:
        right = torch.zeros(logits.shape, dtype=torch.bool)
        for row, index in enumerate(ids.tolist()):
            right[row, list(one.accepted[index])] = True
        kept = right.any(1)
        logits, right = logits[kept], right[kept]
    if not len(logits):
        raise ConfigError(f"data.root: no image of {one.source.root} has a label in real.json.")
    # An answer without a logit is none, however few classes are compared.
    right &= logits.isfinite()
    order = logits.argsort(dim=1, descending=True, stable=True)[:, :SHOWN]
    hits = right.gather(1, order)
    return SetResult(
        images=len(logits),
        skipped=len(one.source) - len(ids),
        classes=logits.shape[1] if classes is None else len(classes),
        right=hits[:, 0].numpy().astype(np.bool_),
        top5=float(hits.any(1).double().mean()),
    )


def _check_same_images(results: list[FamilyModel]) -> None:
    """Models are compared image by image: unreadable ones are the same for all."""
    for other in results[1:]:
        for name, result in other.sets.items():
            if result.images != results[0].sets[name].images:
                raise ConfigError(
                    f"checkpoint: {results[0].name} and {other.name} could not read the same "
                    f"images of {name}; use data.on_error=raise to see which."
                )


def _save(folder: Path, report: FamilyReport) -> FamilyReport:
    """Write family.json and family.png; returns the report with their names."""
    report = replace(report, files=(folder / "family.json", folder / "family.png"))
    text, drawn = json.dumps(report.as_dict(), indent=1), draw_family(report)
    try:
        write_text(report.files[0], text)
        with replacing(report.files[1]) as target:
            write_all(target, drawn)
    except OSError as error:
        raise unwritable(folder, error) from error
    return report
