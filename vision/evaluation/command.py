"""`vision eval`: how good the models of checkpoints are on the pictures of a split."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vision.config import ConfigError, pair
from vision.data.build import build_source
from vision.data.configs import DataConfig, ShapesConfig, Split
from vision.data.loader import Batch, Loader, Recipe, evaluation_batches, resolve_workers
from vision.data.source import Source
from vision.evaluation.augmentation import loaded_as
from vision.evaluation.configs import NEEDS_DATA, EvalConfig
from vision.evaluation.files import check_parquet
from vision.evaluation.foreign import is_own, locate, open_stored
from vision.evaluation.geometry import cost_of, with_geometry
from vision.evaluation.labels import match_classes
from vision.evaluation.measure import accuracy, as_labels, compare, measure
from vision.evaluation.neighbours import nearest_classes
from vision.evaluation.output import Answers, output_folder, remove_if_empty, save
from vision.evaluation.predictions import Predictions, Reduce, predict
from vision.evaluation.report import ModelReport, Report, short_names
from vision.evaluation.stored import Stored
from vision.models.swin import Swin


@dataclass(frozen=True)
class Processes:
    """The processes of an evaluation, seen from one of them."""

    device: torch.device
    rank: int = 0
    ranks: int = 1
    reduce: Reduce | None = None


def evaluate_checkpoints(config: EvalConfig, processes: Processes) -> Report | None:
    """Evaluate what the checkpoints hold; every process takes its share of the pictures.

    Only the first process gets the report, and writes the files.
    """
    if config.save and config.predictions == "parquet":
        check_parquet()
    if config.tells_model and config.data is None:
        raise ConfigError(NEEDS_DATA)
    paths = [locate(place, config.data) for place in config.checkpoints]
    if config.tells_model and all(is_own(path) for path in paths):
        raise ConfigError(f"model: {paths[0]} knows its own model; leave model out.")
    folder = output_folder(config, paths) if config.save and processes.rank == 0 else None
    answers: list[Answers] = []
    try:
        for path in paths:
            answers.append(_answers(path, config, processes))
            _check_same_pictures(answers[0], answers[-1])
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


def _answers(path: Path, config: EvalConfig, processes: Processes) -> Answers:
    """What one model says of the pictures, and of its neighbours if asked for."""
    stored, notes = open_stored(path, config, processes.device)
    stored = with_geometry(stored, config.image_size, config.window, config.preprocess)
    loaded_as(stored.preprocess, config.augmentation)  # an error before any picture is read
    data = stored.data if config.data is None else config.data
    source = build_source(data, config.split)
    mapping, note = match_classes(stored.classes, source.classes, str(path))
    memory: tuple[Source, Loader] | None = None
    if config.neighbours:
        memory = _memory(config, stored, data, processes)
    loader = _loader(config, stored, data, source, processes)
    predictions = _predict(config, stored, loader, processes, config.split)
    labels = as_labels(mapping, source.labels, predictions.ids)
    votes = None
    if memory is not None:
        # Features of a picture as such, whatever the views that its classes are told from.
        plain = config.model_copy(update={"augmentation": "none"})
        known = _predict(plain, stored, memory[1], processes, "train")
        assert known.features is not None
        assert predictions.features is not None
        own, _ = match_classes(stored.classes, memory[0].classes, str(path))
        votes = (known.features, as_labels(own, memory[0].labels, known.ids))
    notes += (note,) if note else ()
    return Answers(stored, data, source, predictions, labels, votes, notes)


def _memory(
    config: EvalConfig, stored: Stored, data: DataConfig, processes: Processes
) -> tuple[Source, Loader]:
    """The training pictures, for k-NN: checked before the long work starts."""
    plain = config.model_copy(update={"augmentation": "none"})
    source = build_source(data, "train")
    if config.neighbours > len(source):
        raise ConfigError(
            f"neighbours = {config.neighbours}, but there are only {len(source)} training pictures."
        )
    return source, _loader(plain, stored, data, source, processes)


def _loader(
    config: EvalConfig, stored: Stored, data: DataConfig, source: Source, processes: Processes
) -> Loader:
    on_cpu = processes.device.type == "cpu"
    workers, _ = resolve_workers(config.loader.workers, processes.ranks, on_cpu=on_cpu)
    preprocess = loaded_as(stored.preprocess, config.augmentation)
    recipe = Recipe(preprocess, None, 0, config.loader.max_pixels, data.on_error)
    return Loader(source, recipe, config.loader, workers, data.max_error_share)


def _predict(
    config: EvalConfig, stored: Stored, loader: Loader, processes: Processes, split: Split
) -> Predictions:
    batches = evaluation_batches(loader, config.batch_size, processes.rank, processes.ranks)
    total = -(-len(loader.source) // (processes.ranks * config.batch_size))
    if processes.rank == 0:
        (name,) = short_names([stored.path], [stored.step])
        batches = _shown(batches, total, f"{name}: {split}")
    return predict(
        stored.model,
        batches,
        len(loader.source),
        stored.preprocess,
        len(stored.classes),
        processes.device,
        config.precision,
        augmentation=config.augmentation,
        keep_features=config.neighbours > 0,
        reduce=processes.reduce,
    )


def _shown(batches: Iterable[Batch], total: int, title: str) -> Iterator[Batch]:
    """The same batches, with a bar of progress where a person is looking."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(
        batches, title, total, console=console, transient=True, disable=not console.is_terminal
    )


def _check_same_pictures(first: Answers, other: Answers) -> None:
    """Models are compared picture by picture, so they must have seen the same ones."""
    if first is other:
        return
    names = [[a.stored.classes[i] for i in a.labels.tolist()] for a in (first, other)]
    same = torch.equal(first.predictions.ids, other.predictions.ids) and names[0] == names[1]
    if same and first.data != other.data:
        same = all(
            first.source.name(number) == other.source.name(number)
            for number in first.predictions.ids.tolist()
        )
    if not same:
        raise ConfigError(
            f"checkpoint: {first.stored.path} and {other.stored.path} were trained on different "
            "data, so that their own pictures cannot be compared; choose the pictures for both "
            "with data=…"
        )
    if first.stored.classes != other.stored.classes:
        raise ConfigError(
            f"checkpoint: {first.stored.path} and {other.stored.path} have different classes; "
            "evaluate them one by one."
        )


def _report(config: EvalConfig, answers: list[Answers]) -> Report:
    steps = [answer.stored.step for answer in answers]
    names = short_names([answer.stored.path for answer in answers], steps)
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
        data=_data_name(first.data),
        pictures=len(first.predictions.ids),
        skipped=tuple(skipped),
        classes=first.stored.classes,
        augmentation=config.augmentation,
        k=config.neighbours,
        settings=config.model_dump(mode="json"),
        models=tuple(models),
        notes=tuple(_notes(config, answers)),
    )


def _model_report(config: EvalConfig, name: str, answer: Answers) -> ModelReport:
    stored, predictions = answer.stored, answer.predictions
    measured = measure(
        predictions.logits,
        answer.labels,
        bins=config.bins,
        resamples=config.resamples,
        seed=config.seed,
    )
    neighbours = None
    if answer.memory is not None:
        assert predictions.features is not None
        number = len(stored.classes)
        votes = nearest_classes(*answer.memory, predictions.features, number, config.neighbours)
        neighbours = accuracy(votes, answer.labels)
    model = stored.model
    return ModelReport(
        name=name,
        checkpoint=stored.path,
        step=stored.step,
        weights=stored.weights,
        image_size=stored.preprocess.image_size,
        window=tuple(model.windows) if isinstance(model, Swin) else None,
        crop_ratio=stored.preprocess.crop_ratio,
        measured=measured,
        neighbours=neighbours,
        cost=cost_of(stored),
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
        size = answers[0].stored.preprocess.image_size
        if data.image_size != "auto" and size != pair(data.image_size):
            yield (
                f"Pictures are shown at {size[0]} × {size[1]} pixels, as in training, not at "
                f"data.image_size = {data.image_size}; image_size=… chooses another size."
            )
    for answer in answers:
        bad = int((~answer.predictions.logits.isfinite().all(1)).sum())
        if bad:
            yield f"{answer.stored.path}: {bad} pictures have logits that are not finite numbers."
