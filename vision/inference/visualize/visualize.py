"""`vision visualize`: figures of attention for images, and scores of how true they are."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vision.config import ConfigError
from vision.data.images.decode import UnreadableImageError
from vision.inference.load import Loaded
from vision.inference.predict import find_images
from vision.inference.visualize.configs import VisualizeConfig, inches
from vision.inference.visualize.draw import Viewer, draw_figure, draw_page
from vision.inference.visualize.images import Item, batches, items_of_data, items_of_files, some
from vision.inspection.capture.capture import capture
from vision.inspection.capture.recording import Captured, CaptureError
from vision.inspection.explain import (
    Pixels,
    all_requests,
    as_batch,
    check_requests,
    class_numbers,
    default_requests,
)
from vision.inspection.figures.captions import Caption, record_of, stored_record
from vision.inspection.figures.diagnostics import diagnostics, gather_heads
from vision.inspection.figures.drawing import Style, caption_file, write_whole
from vision.inspection.methods.requests import parse_requests
from vision.inspection.trust.masks import mask_file

MOST_FOR_STATISTICS = 128
"""Images that the statistics of heads are taken over, as in the ViT paper."""
NOT_DRAWING = (
    "checkpoint", "images", "data", "split", "count", "batch_size", "overwrite", "output",
    "format", "device", "formats", "masks", "boxes",
)  # fmt: skip
"""Settings that do not change a figure of an image, or that its record has in another way."""
SCORED = ("comparison", "page")
"""Figures that show scores, and so depend on masks."""


@dataclass(frozen=True, eq=False)
class Job:
    """One kind of figure of one model, or of several side by side."""

    label: str
    """In the names of files."""
    figure: str
    subjects: tuple[Viewer, ...]


@dataclass
class Outcome:
    """What became of the images."""

    written: int = 0
    skipped: int = 0
    problems: list[str] = field(default_factory=list)

    def problem(self, message: str) -> None:
        """Note an image that cannot be read, once."""
        if message not in self.problems:
            self.problems.append(message)


def viewers(loaded: Sequence[Loaded], config: VisualizeConfig, first: Item) -> list[Viewer]:
    """The models with what is asked of each, or a ConfigError before any work is done.

    Every model is shown an image: whether it has attention is known only then.
    """
    names = _names(config.checkpoint)
    probes = [_probe(name, one, first) for name, one in zip(names, loaded, strict=True)]
    asked = None if config.methods == "auto" else parse_requests(config.methods)
    found = []
    for name, one, probe in zip(names, loaded, probes, strict=True):
        if asked is not None:
            check_requests(probe, asked)
        classes: int | tuple[int, ...]
        if isinstance(config.classes, int):
            classes = config.classes
        else:
            classes = class_numbers(config.classes, one.classes)
        if "microscope" in config.figures and not probe.windowed:
            raise ConfigError(
                f"figures: {name} ({probe.model}) has no windows to put under a microscope; use "
                "figures=[queries]."
            )
        requests = asked or default_requests(*probes)
        found.append(Viewer(name, one, requests, asked or all_requests(probe), classes))
    return found


def _probe(name: str, loaded: Loaded, item: Item) -> Captured:
    size = loaded.preprocess.image_size
    try:
        pixels = item.pixels(loaded)
        images = as_batch(loaded, [pixels])
    except UnreadableImageError:  # told of in its turn
        images = torch.zeros(1, loaded.preprocess.channels, *size, device=loaded.device)
    try:
        return capture(loaded.model, images, reduce="mean")
    except (CaptureError, ValueError) as error:
        raise ConfigError(f"checkpoint: {name}: {error}") from error


def _names(places: Sequence[str]) -> list[str]:
    """Short names of models: the last part of each path, or all of it where two are alike."""
    short = [Path(place).name if "/" in place else place for place in places]
    return [s if short.count(s) == 1 else p for s, p in zip(short, places, strict=True)]


def draw_all(subjects: Sequence[Viewer], items: Sequence[Item], config: VisualizeConfig) -> Outcome:
    """Every figure of every image; what is there already with the same settings is kept."""
    from rich.console import Console
    from rich.progress import Progress

    outcome = Outcome()
    jobs = _jobs(subjects, config)
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    with bar as progress:
        task = progress.add_task("images", total=len(items))
        for part in batches(items, config.batch_size):
            for job in jobs:
                _draw_batch(job, part, config, outcome)
            progress.advance(task, len(part))
        if "diagnostics" in config.figures:
            for subject in subjects:
                _diagnose(subject, items, config, outcome, several=len(subjects) > 1)
    return outcome


def _jobs(subjects: Sequence[Viewer], config: VisualizeConfig) -> list[Job]:
    """The figures of single images; the sheet has all models, the others are drawn for each."""
    wanted = [*config.figures, *(["page"] if config.page else [])]
    jobs = []
    for figure in dict.fromkeys(wanted):
        if figure == "sheet" or (figure != "diagnostics" and len(subjects) == 1):
            jobs.append(Job(figure, figure, tuple(subjects)))
        elif figure != "diagnostics":
            jobs += [Job(f"{figure}-{file_name(s.name)}", figure, (s,)) for s in subjects]
    return jobs


def file_name(text: str) -> str:
    """A name as part of a file's name."""
    return text.replace("/", "_").replace(":", "_")


def _draw_batch(job: Job, items: Sequence[Item], config: VisualizeConfig, outcome: Outcome) -> None:
    left = [item for item in items if not _is_there(item, job, config)]
    outcome.skipped += len(items) - len(left)
    ready: list[Item] = []
    pixels: list[list[Pixels]] = []
    for item in left:
        try:
            pixels.append([item.pixels(subject.loaded) for subject in job.subjects])
            ready.append(item)
        except UnreadableImageError as error:
            outcome.problem(str(error))
    if not ready:
        return
    if job.figure == "page":
        for item, (one,) in zip(ready, pixels, strict=True):
            try:
                draw_page(job.subjects[0], item, one, config, _stem(item, job, config))
            except UnreadableImageError as error:  # its mask
                outcome.problem(str(error))
                continue
            _save_page_caption(item, job, config)
            outcome.written += 1
        return
    found = draw_figure(job.figure, job.subjects, ready, pixels, config, style_of(config))
    for item, drawing in zip(ready, found, strict=True):
        named = drawing.with_facts(("Image", item.name), *_origin(job.subjects, config))
        named.save(_stem(item, job, config), config.formats, _record(item, job, config))
    outcome.written += len(ready)


def _diagnose(
    subject: Viewer,
    items: Sequence[Item],
    config: VisualizeConfig,
    outcome: Outcome,
    *,
    several: bool,
) -> None:
    """Statistics of heads over the images that can be read."""
    pixels: list[Pixels] = []
    for item in items[:MOST_FOR_STATISTICS]:
        try:
            pixels.append(item.pixels(subject.loaded))
        except UnreadableImageError as error:
            outcome.problem(str(error))
    if not pixels:
        return
    size = config.batch_size
    parts = (pixels[start : start + size] for start in range(0, len(pixels), size))
    heads = gather_heads(subject.loaded.model, (as_batch(subject.loaded, p) for p in parts))
    drawing = diagnostics(subject.loaded.model, heads, name=subject.name, style=style_of(config))
    drawing = drawing.with_facts(*_origin([subject], config))
    key = f"diagnostics-{file_name(subject.name)}" if several else "diagnostics"
    drawing.save(config.output / key, config.formats)
    outcome.written += 1


def style_of(config: VisualizeConfig) -> Style:
    """How figures shall look."""
    width = None if config.width is None else inches(config.width)
    return Style(config.style == "paper", width, config.dpi)


def _stem(item: Item, job: Job, config: VisualizeConfig) -> Path:
    return config.output / f"{item.key}.{job.label}"


def _save_page_caption(item: Item, job: Job, config: VisualizeConfig) -> None:
    facts = (("Image", item.name), *_origin(job.subjects, config))
    caption = Caption("A page in which the attention for an image can be explored.", facts)
    text = caption.text(_record(item, job, config))
    write_whole(caption_file(_stem(item, job, config)), text.encode())


def _origin(subjects: Sequence[Viewer], config: VisualizeConfig) -> list[tuple[str, str]]:
    checkpoints = "; ".join(str(subject.loaded.source) for subject in subjects)
    return [("Checkpoint", checkpoints), ("Command", command_of(config))]


def command_of(config: VisualizeConfig) -> str:
    """The words that ask for these figures again."""
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


def _record(item: Item, job: Job, config: VisualizeConfig) -> str:
    """Stands for all that a figure depends on: settings, image, weights."""
    settings = config.model_dump(mode="json", exclude=set(NOT_DRAWING))
    files = [Path(subject.loaded.source) for subject in job.subjects]
    files += [item.file] if item.file is not None else []
    if job.figure in SCORED:
        files += [config.boxes] if config.boxes is not None else []
        if config.masks is not None and item.file is not None:
            files.append(mask_file(config.masks, item.file))
    asked = [[str(r) for r in subject.requests] for subject in job.subjects]
    about = {"figure": job.label, "image": item.name, "asked": asked}
    return record_of(about | settings, files)


def _is_there(item: Item, job: Job, config: VisualizeConfig) -> bool:
    """Whether a figure has been drawn with the same settings, in all formats."""
    if config.overwrite:
        return False
    stem = _stem(item, job, config)
    kinds = ["html"] if job.figure == "page" else config.formats
    whole = all(stem.with_name(f"{stem.name}.{kind}").is_file() for kind in kinds)
    return whole and stored_record(caption_file(stem)) == _record(item, job, config)


def report(outcome: Outcome, images: int, output: Path) -> int:
    """Say what was done; the exit code is 1 if some images could not be read."""
    kept = f", {outcome.skipped} were there already" if outcome.skipped else ""
    print(f"{outcome.written} figures are in {output}{kept}.")
    for problem in outcome.problems:
        print(f"error: {problem}", file=sys.stderr)
    if outcome.problems:
        print(f"{len(outcome.problems)} of {images} images could not be read.", file=sys.stderr)
    return 1 if outcome.problems else 0


def run(loaded: Sequence[Loaded], config: VisualizeConfig) -> int:
    """Scores if they are asked for, then the figures; returns the exit code."""
    from vision.inference.visualize.score_table import score_all

    items = _items(config)
    subjects = viewers(loaded, config, items[0])
    code = score_all(subjects, items, config) if config.score else 0
    if not config.figures and not config.page:
        return code
    return max(code, report(draw_all(subjects, items, config), len(items), config.output))


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
