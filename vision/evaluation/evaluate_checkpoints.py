"""`vision eval`: how good the models of checkpoints are on the images of a split."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.files.reading import find_file, is_own, read_raw
from vision.checkpoints.files.remote import resolve
from vision.checkpoints.open import print_notes
from vision.config import ConfigError, pair
from vision.data.batches import build_loader, evaluation_batches
from vision.data.configs import DataConfig, ShapesConfig, Split
from vision.data.loader import Batch, Loader
from vision.data.sources.build import build_source
from vision.data.sources.source import Source
from vision.evaluation.all_metrics import accuracy, as_labels, compare, measure
from vision.evaluation.classes import match_classes
from vision.evaluation.configs import HUBS, EvalConfig
from vision.evaluation.evaluated import EvaluatedModel, cost_of, open_evaluated
from vision.evaluation.neighbours import as_logits, nearest_classes
from vision.evaluation.predictions import Predictions, Reduce, predict
from vision.evaluation.report.eval_report import ModelReport, Report, short_names
from vision.evaluation.report.prediction_files import check_parquet
from vision.evaluation.report.report_files import Answers, output_folder, remove_if_empty, save
from vision.evaluation.views import loaded_as
from vision.models.swin import Swin
from vision.terminal import progress_bar


@dataclass(frozen=True)
class Processes:
    """The processes of an evaluation, seen from one of them."""

    device: torch.device
    rank: int = 0
    ranks: int = 1
    reduce: Reduce | None = None


def evaluate_checkpoints(config: EvalConfig, processes: Processes) -> Report | None:
    """Evaluate what the checkpoints hold; every process takes its share of the images.

    Only the first process gets the report, and writes the files.
    """
    if config.save and config.predictions == "parquet":
        check_parquet()
    paths = [locate(place, config.data) for place in config.checkpoints]
    folder = output_folder(config, paths) if config.save and processes.rank == 0 else None
    answers: list[Answers] = []
    try:
        for place in config.checkpoints:
            answers.append(_answers(place, config, processes))
            _check_same_images(answers[0], answers[-1])
    except BaseException:
        if folder is not None:
            remove_if_empty(folder)
        raise
    if processes.rank != 0:
        return None
    report = _report(config, answers)
    if folder is None:
        return report
    return replace(report, files=save(folder, config, report, answers))


def locate(place: str, data: DataConfig | None) -> Path:
    """The file that a place stands for; the name itself for weights on a hub.

    A foreign file does not say which images it is for, so that `data` must do so.
    """
    if place.startswith(HUBS):
        return Path(place)
    path = resolve(place, "checkpoint")
    try:
        path = find_file(path) if path.is_dir() else path
    except CheckpointError as error:
        raise ConfigError(f"checkpoint: {error}") from error
    if data is None and not is_own(path):
        read_raw(path)  # a file that is not a checkpoint at all is refused as what it is
        raise ConfigError(
            f"checkpoint: {path} is not of a run of this project. Weights of other projects do not "
            "say which images they are for: give data=…"
        )
    return path


def _answers(place: str, config: EvalConfig, processes: Processes) -> Answers:
    """What one model says of the images, and of its neighbours if asked for."""
    subject = open_evaluated(place, config, processes.device)
    if processes.rank == 0:
        print_notes(subject.notes)
    loaded_as(subject.preprocess, config.augmentation)  # an error before any image is read
    source = build_source(subject.data, config.split)
    mapping, note = match_classes(subject.classes, source.classes, place)
    memory: tuple[Source, Loader] | None = None
    if config.neighbours:
        memory = _memory(config, subject, processes)
    loader = _loader(config, subject, source, processes)
    predictions = _predict(config, subject, loader, processes, config.split)
    labels = as_labels(mapping, source.labels, predictions.ids)
    votes = None
    if memory is not None:
        # Features of an image as such, whatever the views that its classes are predicted from.
        plain = config.model_copy(update={"augmentation": "none"})
        known = _predict(plain, subject, memory[1], processes, "train")
        assert known.features is not None
        assert predictions.features is not None
        own, _ = match_classes(subject.classes, memory[0].classes, place)
        labelled = as_labels(own, memory[0].labels, known.ids)
        number, k = len(subject.classes), config.neighbours
        votes = nearest_classes(known.features, labelled, predictions.features, number, k)
        if subject.headless:
            predictions = replace(predictions, logits=as_logits(votes))
    notes = tuple(f"{Path(place).name}: {line}" for line in subject.notes)
    return Answers(subject, source, predictions, labels, votes, (*notes, *([note] if note else [])))


def _memory(
    config: EvalConfig, subject: EvaluatedModel, processes: Processes
) -> tuple[Source, Loader]:
    """The training images, for k-NN: checked before the long work starts."""
    plain = config.model_copy(update={"augmentation": "none"})
    source = build_source(subject.data, "train")
    if config.neighbours > len(source):
        raise ConfigError(
            f"neighbours = {config.neighbours}, but there are only {len(source)} training images."
        )
    return source, _loader(plain, subject, source, processes)


def _loader(
    config: EvalConfig, subject: EvaluatedModel, source: Source, processes: Processes
) -> Loader:
    return build_loader(
        source,
        loaded_as(subject.preprocess, config.augmentation),
        subject.data,
        config.loader,
        processes=processes.ranks,
        on_cpu=processes.device.type == "cpu",
    )


def _predict(
    config: EvalConfig, subject: EvaluatedModel, loader: Loader, processes: Processes, split: Split
) -> Predictions:
    batches = evaluation_batches(loader, config.batch_size, processes.rank, processes.ranks)
    total = -(-len(loader.source) // (processes.ranks * config.batch_size))
    if processes.rank == 0:
        (name,) = short_names([subject.opened.path], [subject.step])
        batches = _shown(batches, total, f"{name}: {split}")
    return predict(
        subject.opened.model,
        batches,
        len(loader.source),
        subject.preprocess,
        subject.opened.classes,
        processes.device,
        config.precision,
        augmentation=config.augmentation,
        keep_features=config.neighbours > 0,
        reduce=processes.reduce,
    )


def _shown(batches: Iterable[Batch], total: int, title: str) -> Iterator[Batch]:
    """The same batches, with a bar of progress where a person is looking."""
    with progress_bar() as progress:
        yield from progress.track(batches, total, description=title)


def _check_same_images(first: Answers, other: Answers) -> None:
    """Models are compared image by image, so they must have seen the same ones."""
    if first is other:
        return
    names = [[a.subject.classes[i] for i in a.labels.tolist()] for a in (first, other)]
    same = torch.equal(first.predictions.ids, other.predictions.ids) and names[0] == names[1]
    if same and first.subject.data != other.subject.data:
        same = all(
            first.source.name(number) == other.source.name(number)
            for number in first.predictions.ids.tolist()
        )
    both = f"checkpoint: {first.subject.opened.path} and {other.subject.opened.path}"
    if not same:
        raise ConfigError(
            f"{both} were trained on different data, so that their own images cannot be compared; "
            "choose the images for both with data=…"
        )
    if first.subject.classes != other.subject.classes:
        raise ConfigError(f"{both} have different classes; evaluate them one by one.")


def _report(config: EvalConfig, answers: list[Answers]) -> Report:
    steps = [answer.subject.step for answer in answers]
    names = short_names([answer.subject.opened.path for answer in answers], steps)
    models: list[ModelReport] = []
    for name, answer in zip(names, answers, strict=True):
        model = _model_report(config, name, answer)
        if models and config.resamples:
            differences = compare(model.measured, models[0].measured)
            model = replace(model, differences=differences)
        models.append(model)
    first = answers[0]
    read = set(first.predictions.ids.tolist())
    skipped = [first.source.name(i) for i in range(len(first.source)) if i not in read]
    return Report(
        split=config.split,
        data=_data_name(first.subject.data),
        images=len(first.predictions.ids),
        skipped=tuple(skipped),
        classes=first.subject.classes,
        augmentation=config.augmentation,
        k=config.neighbours,
        settings=config.model_dump(mode="json"),
        models=tuple(models),
        notes=tuple(_notes(config, answers)),
    )


def _model_report(config: EvalConfig, name: str, answer: Answers) -> ModelReport:
    subject, predictions = answer.subject, answer.predictions
    measured = measure(
        predictions.logits,
        answer.labels,
        bins=config.bins,
        resamples=config.resamples,
        seed=config.seed,
    )
    neighbours = None if answer.votes is None else accuracy(answer.votes, answer.labels)
    model = subject.opened.model
    return ModelReport(
        name=name,
        checkpoint=subject.opened.path,
        step=subject.step,
        weights=subject.opened.weights,
        image_size=subject.preprocess.image_size,
        window=tuple(model.windows) if isinstance(model, Swin) else None,
        crop_ratio=subject.preprocess.crop_ratio,
        measured=measured,
        neighbours=neighbours,
        cost=cost_of(subject),
        speed=predictions.speed,
    )


def _data_name(data: DataConfig) -> str:
    place = getattr(data, "root", None) or getattr(data, "path", None)
    return data.kind if place is None else f"{data.kind} {place}"


def _notes(config: EvalConfig, answers: list[Answers]) -> Iterator[str]:
    """What a reader of the numbers has to know."""
    yield from dict.fromkeys(note for answer in answers for note in answer.notes)
    data = config.data
    if data is not None and not isinstance(data, ShapesConfig) and config.image_size is None:
        size = answers[0].subject.preprocess.image_size
        if data.image_size != "auto" and size != pair(data.image_size):
            yield (
                f"Images are shown at {size[0]} × {size[1]} pixels, as in training, not at "
                f"data.image_size = {data.image_size}; image_size=… chooses another size."
            )
    for answer in answers:
        bad = int((~answer.predictions.logits.isfinite().all(1)).sum())
        if bad:
            yield f"{answer.subject.opened.path}: {bad} images have logits that are not finite."
