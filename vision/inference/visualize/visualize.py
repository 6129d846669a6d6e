"""`vision visualize`: figures of attention for images, and scores of their methods."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vision.config import ConfigError
from vision.data.images.decode import UnreadableImageError
from vision.evaluation.report.eval_report import short_name
from vision.files import write_text
from vision.inference.predict import Loaded, beside_checkpoint, find_images
from vision.inference.visualize.configs import VisualizeConfig, inches
from vision.inference.visualize.draw import View, VisualizedModel, draw_figure, draw_page
from vision.inference.visualize.images import Item, items_of_data, items_of_files, mask_file, some
from vision.inspection.capture.capture import capture
from vision.inspection.capture.captured import Captured
from vision.inspection.explain import (
    as_batch,
    check_methods,
    class_numbers,
    default_methods,
    every_method,
    settings_error,
)
from vision.inspection.figures.diagnostics import diagnostics, gather_heads
from vision.inspection.figures.drawing import Caption, Style, caption_file, record_of, stored_record
from vision.inspection.methods.spec import parse_methods
from vision.terminal import progress_bar

MOST_FOR_STATISTICS = 128
"""Images that the statistics of heads are taken over, as in the ViT paper."""
NOT_DRAWING = (
    "checkpoint", "images", "data", "split", "count", "batch_size", "overwrite", "output",
    "format", "device", "formats", "masks", "boxes",
)  # fmt: skip
"""Settings that do not change a figure of an image, or that its record has in another way."""
NAMED = 10
"""Most figures that are named on the terminal."""
SCORED = ("comparison", "page")
"""Figures that show scores, and so depend on masks."""


@dataclass(frozen=True, eq=False)
class FigureTask:
    """One kind of figure of one model, or of several side by side."""

    label: str
    """In the names of files."""
    figure: str
    models: tuple[VisualizedModel, ...]


@dataclass
class Outcome:
    """Counts of figures, and the images that could not be read."""

    written: list[Path] = field(default_factory=list)
    skipped: int = 0
    problems: dict[str, None] = field(default_factory=dict)
    """Messages, each once."""


def run(loaded: Sequence[Loaded], config: VisualizeConfig) -> int:
    """Scores if they are asked for, then the figures; returns the exit code."""
    from vision.inference.visualize.score_table import score_all

    config = with_folder(config, [one.opened.path for one in loaded])
    items = _items(config)
    models = visualized_models(loaded, config, items[0])
    code = score_all(models, items, config) if config.score else 0
    if not config.figures and not config.page:
        return code
    outcome = draw_all(models, items, config)
    kept = f", {outcome.skipped} were there already" if outcome.skipped else ""
    print(f"{len(outcome.written)} figures are in {config.output}{kept}.")
    for file in outcome.written[:NAMED]:
        print(f"  {file}")
    if (more := len(outcome.written) - NAMED) > 0:
        print(f"  and {more} more")
    for problem in outcome.problems:
        print(f"error: {problem}", file=sys.stderr)
    if outcome.problems:
        print(f"{len(outcome.problems)} of {len(items)} images could not be read.", file=sys.stderr)
    return max(code, 1 if outcome.problems else 0)


def with_folder(config: VisualizeConfig, files: Sequence[Path]) -> VisualizeConfig:
    """The settings with a folder in place of output=auto."""
    if str(config.output) != "auto":
        return config
    folder = Path("attention")
    if len(files) == 1:
        folder = beside_checkpoint(config.checkpoint[0], files[0]) / folder
    return config.model_copy(update={"output": folder})


def _items(config: VisualizeConfig) -> list[Item]:
    if config.data is not None:
        return some(items_of_data(config.data, config.split), config.count)
    if not config.images:
        raise ConfigError(
            "images: which ones? For example images=photo.jpg, images=photos/, or images of a "
            "data set: data=shapes"
        )
    files = find_images(config.images)
    return some(items_of_files(files, config.masks, config.boxes), config.count)


def visualized_models(
    loaded: Sequence[Loaded], config: VisualizeConfig, first: Item
) -> list[VisualizedModel]:
    """The models with their methods and classes, or a ConfigError before any work is done.

    Every model runs on one image: only then is it known whether it has attention.
    """
    short = [short_name(one.opened.path) for one in loaded]
    names = [s if short.count(s) == 1 else p for s, p in zip(short, config.checkpoint, strict=True)]
    probes = [_probe(name, one, first) for name, one in zip(names, loaded, strict=True)]
    asked = None if config.methods == "auto" else parse_methods(config.methods)
    found = []
    for name, one, probe in zip(names, loaded, probes, strict=True):
        if asked is not None:
            check_methods(probe, asked)
        named = config.classes
        classes = named if isinstance(named, int) else class_numbers(named, one.classes)
        if "microscope" in config.figures and not probe.windowed:
            raise ConfigError(
                f"figures: microscope needs windows, and {name} ({probe.model}) has none; use "
                "figures=[queries]."
            )
        choices = asked or default_methods(*probes)
        every = asked or every_method(probe)
        found.append(VisualizedModel(name, one, choices, every, classes))
    return found


def _probe(name: str, loaded: Loaded, item: Item) -> Captured:
    try:
        images = as_batch(loaded, [item.pixels(loaded)])
    except UnreadableImageError:  # reported when it is drawn
        size = loaded.preprocess.image_size
        images = torch.zeros(1, loaded.preprocess.channels, *size, device=loaded.device)
    with settings_error(f"checkpoint: {name}"):
        return capture(loaded.model, images, reduce="mean")


def draw_all(
    models: Sequence[VisualizedModel], items: Sequence[Item], config: VisualizeConfig
) -> Outcome:
    """Every figure of every image; existing figures with the same settings are kept."""
    outcome = Outcome()
    tasks = _tasks(models, config)
    with progress_bar() as progress:
        bar = progress.add_task("figures", total=len(items) * len(tasks))
        for item in items:
            for _ in _draw_image(item, tasks, config, outcome):
                progress.advance(bar)
        if "diagnostics" in config.figures:
            for model in models:
                _diagnose(model, items, config, outcome)
    return outcome


def _tasks(models: Sequence[VisualizedModel], config: VisualizeConfig) -> list[FigureTask]:
    """The figures of single images; the sheet has all models, the others are drawn for each."""
    wanted = dict.fromkeys([*config.figures, *(["page"] if config.page else [])])
    tasks = []
    for figure in (name for name in wanted if name != "diagnostics"):
        if figure == "sheet" or len(models) == 1:
            tasks.append(FigureTask(figure, figure, tuple(models)))
        else:
            tasks += [FigureTask(f"{figure}-{_file_name(m.name)}", figure, (m,)) for m in models]
    return tasks


def _file_name(text: str) -> str:
    return text.replace("/", "_").replace(":", "_")


def _draw_image(
    item: Item, tasks: Sequence[FigureTask], config: VisualizeConfig, outcome: Outcome
) -> Iterator[None]:
    """All figures of one image, from the same captures; yields after each."""
    left = [task for task in tasks if not _exists(item, task, config)]
    outcome.skipped += len(tasks) - len(left)
    yield from [None] * (len(tasks) - len(left))
    style = style_of(config)
    views: dict[str, View] = {}
    for task in left:
        try:
            for model in task.models:
                if model.name not in views:
                    pixels = item.pixels(model.loaded)
                    views[model.name] = View(model, item, pixels, config, style)
            file = _draw_task(task, [views[model.name] for model in task.models])
            outcome.written.append(file)
        except UnreadableImageError as error:  # the image, or its mask
            outcome.problems[str(error)] = None
        yield


def _draw_task(task: FigureTask, views: Sequence[View]) -> Path:
    """Draw a figure; returns its first file."""
    item, config = views[0].item, views[0].config
    stem, record = _stem(item, task, config), _record(item, task, config)
    facts = (("Image", item.name), *_origin(task.models, config))
    if task.figure == "page":
        page = stem.with_name(f"{stem.name}.html")
        draw_page(views[0], page)
        caption = Caption("A page in which the attention for an image can be explored.", facts)
        write_text(caption_file(stem), caption.text(record))
        return page
    drawing = draw_figure(task.figure, views).with_facts(*facts)
    return drawing.save(stem, config.formats, record)[0]


def _diagnose(
    model: VisualizedModel, items: Sequence[Item], config: VisualizeConfig, outcome: Outcome
) -> None:
    loaded, pixels = model.loaded, []
    for item in items[:MOST_FOR_STATISTICS]:
        try:
            pixels.append(item.pixels(loaded))
        except UnreadableImageError as error:
            outcome.problems[str(error)] = None
    if not pixels:
        return
    size = config.batch_size
    parts = (pixels[start : start + size] for start in range(0, len(pixels), size))
    captures = (capture(loaded.model, as_batch(loaded, part)) for part in parts)
    heads = gather_heads(loaded.model, captures)
    drawing = diagnostics(loaded.model, heads, name=model.name, style=style_of(config))
    drawing = drawing.with_facts(*_origin([model], config))
    several = len(config.checkpoint) > 1
    label = f"diagnostics-{_file_name(model.name)}" if several else "diagnostics"
    outcome.written.append(drawing.save(config.output / label, config.formats)[0])


def style_of(config: VisualizeConfig) -> Style:
    """The style that the settings describe."""
    width = None if config.width is None else inches(config.width)
    paper = config.style == "paper"
    return Style(paper, width, config.dpi, config.percentile, config.interpolation)


def _stem(item: Item, task: FigureTask, config: VisualizeConfig) -> Path:
    return config.output / f"{item.key}.{task.label}"


def _origin(
    models: Sequence[VisualizedModel], config: VisualizeConfig
) -> tuple[tuple[str, str], ...]:
    checkpoints = "; ".join(str(model.loaded.opened.path) for model in models)
    return ("Checkpoint", checkpoints), ("Command", command_of(config))


def command_of(config: VisualizeConfig) -> str:
    """The command that draws these figures."""
    values: dict[str, Any] = config.model_dump(mode="json")
    words = ["vision visualize", f"checkpoint={_listed(values['checkpoint'])}"]
    if values["images"]:
        words.append(f"images={_listed(values['images'])}")
    if config.data is not None:
        words += [f"data={config.data.kind}", f"split={config.split}"]
    for name in ("figures", "methods", "classes", "query", "interpolation", "percentile", "style"):
        if values[name] is not None:
            words.append(f"{name}={_listed(values[name])}")
    return " ".join(words)


def _listed(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]" if len(value) != 1 else str(value[0])
    return str(value)


def _record(item: Item, task: FigureTask, config: VisualizeConfig) -> str:
    """A code of everything that a figure depends on: settings, image, weights."""
    settings = config.model_dump(mode="json", exclude=set(NOT_DRAWING))
    files = [Path(model.loaded.opened.path) for model in task.models]
    files += [item.file] if item.file is not None else []
    if task.figure in SCORED:
        files += [config.boxes] if config.boxes is not None else []
        if config.masks is not None and item.file is not None:
            files.append(mask_file(config.masks, item.file))
    asked = [[str(choice) for choice in model.choices] for model in task.models]
    about = {"figure": task.label, "image": item.name, "asked": asked}
    return record_of(about | settings, files)


def _exists(item: Item, task: FigureTask, config: VisualizeConfig) -> bool:
    """Whether a figure was drawn with the same settings, in all formats."""
    if config.overwrite:
        return False
    stem = _stem(item, task, config)
    kinds = ["html"] if task.figure == "page" else config.formats
    whole = all(stem.with_name(f"{stem.name}.{kind}").is_file() for kind in kinds)
    return whole and stored_record(caption_file(stem)) == _record(item, task, config)
