"""`vision eval`: evaluate checkpoints on the images of a split."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from vision.checkpoints.open import print_notes
from vision.config import ConfigError, pair
from vision.data.batches import build_loader, evaluation_batches
from vision.data.configs import (
    EvalDataConfig,
    ImageNetFamilyConfig,
    ShapesConfig,
)
from vision.data.sources.source import Source
from vision.evaluation.configs import Augmentation, EvalConfig
from vision.evaluation.evaluate import Predictions, Reduce, predict, preprocess_for_views
from vision.evaluation.evaluated_model import (
    Answers,
    EvaluatedModel,
    match_classes,
    open_evaluated_model,
)
from vision.evaluation.metrics import with_flips
from vision.evaluation.model_metrics import ModelMetrics, compare, compute_metrics
from vision.evaluation.multi_label_metrics import MultiLabelMetrics, compute_label_metrics
from vision.evaluation.neighbours import NeighboursAccuracy, nearest_classes, vote_logits
from vision.evaluation.report.eval_report import (
    Cost,
    ModelReport,
    Report,
    short_name,
    short_names,
)
from vision.evaluation.report.report_files import (
    check_parquet,
    output_folder,
    remove_if_empty,
    save,
)
from vision.models.cost.count import cost
from vision.models.swin import Swin
from vision.terminal import tracked


@dataclass(frozen=True)
class Processes:
    """The processes of an evaluation, as seen by one of them."""

    device: torch.device
    rank: int = 0
    ranks: int = 1
    reduce: Reduce | None = None


def evaluate_checkpoints(config: EvalConfig, processes: Processes) -> Report | None:
    """Evaluate all checkpoints; every process takes its share of the images.

    Only the first process returns the report and writes the files.
    """
    if config.save and config.predictions == "parquet":
        check_parquet()
    models = [open_evaluated_model(place, config, processes.device) for place in config.checkpoints]
    answers: list[Answers] = []
    with report_folder(config, models, processes) as folder:
        for model in models:
            answers.append(_answers(model, config, processes))
            _check_same_images(answers[0], answers[-1])
    if processes.rank != 0:
        return None
    report = _report(config, answers)
    return report if folder is None else save(folder, config, report, answers)


@contextmanager
def report_folder(
    config: EvalConfig, models: Sequence[EvaluatedModel], processes: Processes
) -> Iterator[Path | None]:
    """The notes on all models, then the folder of the report, in the first process alone. A failed
    evaluation leaves no empty folder behind.
    """
    folder = None
    if processes.rank == 0:
        for model in models:
            print_notes(model.notes)
        folder = output_folder(config, models[0].checkpoint) if config.save else None
    try:
        yield folder
    except BaseException:
        if folder is not None:
            remove_if_empty(folder)
        raise


def _answers(model: EvaluatedModel, config: EvalConfig, processes: Processes) -> Answers:
    """Predict the images of the split, and their nearest neighbours if requested."""
    memory = _memory(model, config, processes) if config.neighbours else None
    if config.flip_test and not model.opened.classes:
        raise ConfigError(
            f"flip_test: {model.checkpoint} has no classifying layer whose probabilities could be "
            "averaged; use flip_test=false."
        )
    predictions = predict_source(
        model, model.source, config, processes, config.augmentation, config.flip_test
    )
    labels = model.labels[predictions.ids]
    if memory is None:
        return Answers(model, predictions, labels, None)
    assert predictions.features is not None
    votes = nearest_classes(*memory, predictions.features, len(model.classes), config.neighbours)
    if not model.opened.classes:
        predictions = replace(predictions, logits=vote_logits(votes))
    accuracy = float((votes.argmax(1) == labels).double().mean())
    return Answers(model, predictions, labels, NeighboursAccuracy(config.neighbours, accuracy))


def _memory(
    model: EvaluatedModel, config: EvalConfig, processes: Processes
) -> tuple[Tensor, Tensor]:
    """Features and labels of the training images, for k-NN."""
    source = model.training_images()
    if config.neighbours > len(source):
        raise ConfigError(
            f"neighbours = {config.neighbours}, but there are only {len(source)} training images."
        )
    labels, _ = match_classes(model.classes, source, str(model.checkpoint))
    found = predict_source(model, source, config, processes, "none")
    assert found.features is not None
    return found.features, labels[found.ids]


def predict_source(
    model: EvaluatedModel,
    source: Source,
    config: EvalConfig,
    processes: Processes,
    augmentation: Augmentation,
    flip_test: bool = False,
) -> Predictions:
    """Run a model on all images of a source; every process takes its share."""
    loader = build_loader(
        source,
        preprocess_for_views(model.preprocess, augmentation),
        model.data,
        config.loader,
        processes=processes.ranks,
        on_cpu=processes.device.type == "cpu",
    )
    batches = evaluation_batches(loader, config.batch_size, processes.rank, processes.ranks)
    if processes.rank == 0:
        total = -(-len(source) // (processes.ranks * config.batch_size))
        batches = tracked(batches, short_name(model.checkpoint), total)
    return predict(
        model.opened.model,
        batches,
        len(source),
        model.preprocess,
        model.opened.classes,
        processes.device,
        config.precision,
        augmentation=augmentation,
        flip_test=flip_test,
        keep_features=config.neighbours > 0,
        activation=model.opened.model.activation,
        reduce=processes.reduce,
    )


def _check_same_images(first: Answers, other: Answers) -> None:
    """Models are compared image by image, so all must have the same images and classes."""
    both = f"checkpoint: {first.model.checkpoint} and {other.model.checkpoint}"
    if _images(first) != _images(other):
        raise ConfigError(
            f"{both} were trained on different data, so their own images cannot be compared; "
            "choose the images for both with data=…"
        )
    if first.model.classes != other.model.classes:
        raise ConfigError(f"{both} have different classes; evaluate them one by one.")


def _images(answers: Answers) -> list[tuple[str, str]]:
    """Name and label of every image."""
    model = answers.model
    rows = zip(answers.predictions.ids.tolist(), answers.labels.tolist(), strict=True)
    return [(model.source.name(index), str(label)) for index, label in rows]


def _report(config: EvalConfig, answers: list[Answers]) -> Report:
    models = [answer.model for answer in answers]
    names = short_names([m.checkpoint for m in models], [m.step for m in models])
    reports: list[ModelReport] = []
    for name, answer in zip(names, answers, strict=True):
        report = _model_report(config, name, answer)
        if reports and config.resamples:
            report = replace(report, differences=compare(report.results, reports[0].results))
        reports.append(report)
    source, ids = models[0].source, set(answers[0].predictions.ids.tolist())
    return Report(
        split=config.split,
        data=_data_name(models[0].data),
        images=len(ids),
        skipped=tuple(source.name(i) for i in range(len(source)) if i not in ids),
        augmentation=config.augmentation,
        settings=config.model_dump(mode="json"),
        task="multi_label" if models[0].opened.multi_label else "classify",
        class_names=models[0].classes,
        models=tuple(reports),
        notes=tuple(dict.fromkeys(_notes(config, answers))),
    )


def _model_report(config: EvalConfig, name: str, answers: Answers) -> ModelReport:
    model, opened = answers.model, answers.model.opened
    parameters = sum(parameter.numel() for parameter in opened.model.parameters())
    results = _metrics(config, answers, answers.predictions.logits)
    if answers.predictions.flipped is not None:
        flipped = _metrics(config, answers, answers.predictions.flipped)
        results = replace(
            results,
            metrics=with_flips(results.metrics, flipped.metrics),
            intervals=with_flips(results.intervals, flipped.intervals),
        )
    macs = cost(opened.config, opened.image_size, opened.channels, opened.classes).macs
    return ModelReport(
        name=name,
        checkpoint=model.checkpoint,
        step=model.step,
        weights=opened.weights,
        image_size=model.preprocess.image_size,
        window=tuple(opened.model.windows) if isinstance(opened.model, Swin) else None,
        crop_ratio=model.preprocess.crop_ratio,
        results=results,
        neighbours=answers.neighbours,
        cost=Cost(parameters, macs),
        speed=answers.predictions.speed,
    )


def _metrics(
    config: EvalConfig, answers: Answers, logits: Tensor
) -> ModelMetrics | MultiLabelMetrics:
    opened, given = answers.model.opened, (logits, answers.labels, answers.model.classes)
    resamples, seed = config.resamples, config.seed
    if opened.multi_label:
        return compute_label_metrics(*given, opened.thresholds, resamples=resamples, seed=seed)
    return compute_metrics(*given, bins=config.bins, resamples=resamples, seed=seed)


def _data_name(data: EvalDataConfig) -> str:
    place = getattr(data, "root", None) or getattr(data, "path", None)
    return data.kind if place is None else f"{data.kind} {place}"


def _notes(config: EvalConfig, answers: list[Answers]) -> Iterator[str]:
    """Notes for readers of the report."""
    for place, answer in zip(config.checkpoints, answers, strict=True):
        yield from (f"{Path(place).name}: {note}" for note in answer.model.notes)
    data = config.data
    given = None if isinstance(data, ShapesConfig | ImageNetFamilyConfig) else data
    if given is not None and config.image_size is None:
        size = answers[0].model.preprocess.image_size
        if given.image_size != "auto" and size != pair(given.image_size):
            yield (
                f"Images have {size[0]} × {size[1]} pixels, as in training, not data.image_size = "
                f"{given.image_size}; image_size=… chooses another size."
            )
    for answer in answers:
        if answer.model.opened.multi_label and config.split == "val":
            yield "Thresholds were chosen on validation images: F1 at them is optimistic here."
        bad = int((~answer.predictions.logits.isfinite().all(1)).sum())
        if bad:
            yield f"{answer.model.checkpoint}: {bad} images have logits that are not finite."
