"""`vision eval data=imagenet_family`: checkpoints on ImageNet's other test sets.

A model's classes are mapped to ImageNet's 1,000 by their synsets (WordNet).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import timm.data
import torch
from torch import Tensor

from vision.config import ConfigError, shorten
from vision.data.configs import ImageNetFamilyConfig
from vision.data.sources.wordnet import imagenet_synsets, readable_names
from vision.evaluation.configs import EvalConfig
from vision.evaluation.evaluate import Predictions
from vision.evaluation.evaluate_checkpoints import Processes, predict_source, report_folder
from vision.evaluation.evaluated_model import (
    EvaluatedModel,
    open_for_evaluation,
    read_class_names,
    shown_path,
)
from vision.evaluation.imagenet_family.family_figure import draw_family
from vision.evaluation.imagenet_family.family_report import FamilyModel, FamilyReport, SetResult
from vision.evaluation.imagenet_family.family_sets import FamilySet, find_sets
from vision.evaluation.report.eval_report import short_names
from vision.evaluation.report.report_files import unwritable
from vision.files import replacing, write_all, write_text

SHOWN = 5
"""k of the second accuracy."""
UNKNOWN = -1
_TIMM: Any = timm.data  # without types


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
    right = torch.zeros(logits.shape, dtype=torch.bool)
    if one.accepted is None:
        right[torch.arange(len(ids)), torch.from_numpy(one.source.labels)[ids]] = True
    else:
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


def imagenet_columns(
    classes: int, names: Sequence[str] | None, checkpoint: str
) -> tuple[Tensor, list[str]]:
    """The logit of each of ImageNet's 1,000 classes, −1 for a class that the model does not have;
    and notes for readers.

    Classes with names are matched by synset or by readable name; without, the number of classes
    says which set they are of: ImageNet-1k, or the 12k, 21k and 22k that timm knows.
    """
    synsets, notes = imagenet_synsets(), []
    subset = _TIMM.infer_imagenet_subset({"num_classes": classes})
    if names is not None:
        readable = dict(zip(readable_names(synsets), synsets, strict=True))
        own = [name if name in set(synsets) else readable.get(name, "") for name in names]
    else:
        own = []
    if not any(own):
        if subset is None:
            listed = f": {shorten(tuple(names))}" if names else ""
            raise ConfigError(
                f"data=imagenet_family: the {classes} classes of {checkpoint} are not ImageNet's"
                f"{listed}. Give their names with class_names=names.txt: synsets such as "
                "n01440764, one per line in the order of the logits."
            )
        own = list(_TIMM.ImageNetInfo(subset).label_names())
        words = "in the usual order" if classes == len(synsets) else "mapped to 1,000 by synset"
        notes.append(f"{classes:,} classes: assumed to be those of {subset}, {words}")
    place = {synset: column for column, synset in enumerate(own) if synset}
    columns = torch.tensor([place.get(synset, UNKNOWN) for synset in synsets])
    if missing := [s for s, column in zip(synsets, columns.tolist(), strict=True) if column < 0]:
        pairs = zip(missing, readable_names(tuple(missing)), strict=True)
        named = shorten([" ".join(pair) for pair in pairs])
        notes.append(
            f"{len(missing)} of the 1,000 classes are unknown to the model, and its "
            f"answers for their images count as wrong: {named}"
        )
    return columns, notes


def imagenet_logits(
    logits: Tensor, columns: Tensor, classes: Sequence[int] | None = None
) -> Tensor:
    """Logits (n, classes of the model) → (n, 1000); −∞ for classes that the model does not have or
    that are not among `classes`.
    """
    found = logits[:, columns.clamp(min=0)]
    left_out = columns < 0
    if classes is not None:
        allowed = torch.zeros_like(left_out)
        allowed[list(classes)] = True
        left_out |= ~allowed
    return found.masked_fill(left_out, -torch.inf)


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
