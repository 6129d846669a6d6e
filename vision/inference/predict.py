"""`vision predict`: what a model says of image files."""

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from glob import glob, has_magic
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray

from vision.config import ConfigError
from vision.data.images.decode import UnreadableImageError
from vision.data.preprocess import normalizer
from vision.data.sources.folder import SUFFIXES
from vision.inference.configs import PredictConfig
from vision.inference.load import Loaded, Prediction, check_head, predictions
from vision.models.layers import static_bias
from vision.terminal import plain, print_wide, progress_bar

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

ATTENTION = "_attention"
"""What is added to the name of an image for that of its attention."""
READERS = 4
"""Threads that read and decode while the model computes."""


@dataclass(frozen=True)
class Answer:
    """A file and what the model says of it, or why it could not be read."""

    path: Path
    prediction: Prediction | None
    problem: str | None


def find_images(places: Sequence[str], listed: TextIO | None = None) -> list[Path]:
    """The files that are meant: files themselves, all images in folders, patterns, a list (-).

    Every file once, in the order of the places; within a folder by name.
    """
    if not places:
        raise ConfigError("images: which ones? For example: images=photo.jpg or images=photos/")
    found: dict[Path, None] = {}
    for place in places:
        if place == "-":
            lines = (line.strip() for line in (listed or sys.stdin))
            found.update(dict.fromkeys(Path(line) for line in lines if line))
            continue
        path = Path(place).expanduser()
        if path.is_dir():
            files = [f for f in sorted(path.rglob("*")) if _is_image(f)]
        elif not path.exists() and has_magic(place):
            matches = sorted(glob(place, recursive=True))  # noqa: PTH207 (absolute patterns too)
            files = [f for f in map(Path, matches) if f.is_file()]
        else:
            files = [path]
        if not files:
            raise ConfigError(f"images: there is no image in '{place}'.")
        found.update(dict.fromkeys(files))
    return list(found)


def _is_image(file: Path) -> bool:
    """Told by its suffix; what `attention=true` has written is none."""
    return file.suffix.lower() in SUFFIXES and not file.stem.endswith(ATTENTION)


def answers(loaded: Loaded, files: Sequence[Path], batch_size: int, top: int) -> Iterator[Answer]:
    """What the model says of every file, in their order; bad files say why they are."""
    normalize = normalizer(loaded.preprocess, loaded.device)
    with ThreadPoolExecutor(READERS) as readers, static_bias(loaded.model):
        read = _ahead(readers, loaded, files, 2 * batch_size)
        while batch := list(islice(read, batch_size)):
            good = [pixels for _, pixels in batch if not isinstance(pixels, str)]
            named: Iterator[Prediction] = iter(())
            if good:
                pixels = torch.from_numpy(np.stack(good)).to(loaded.device)
                with torch.inference_mode():  # not around a yield: it would reach whoever reads
                    logits = loaded.model(normalize(rearrange(pixels, "b h w c -> b c h w")))
                named = iter(predictions(logits, loaded.classes, top))
            for path, result in batch:
                if isinstance(result, str):
                    yield Answer(path, None, result)
                else:
                    yield Answer(path, next(named), None)


def _ahead(
    readers: ThreadPoolExecutor, loaded: Loaded, files: Sequence[Path], ahead: int
) -> Iterator[tuple[Path, NDArray[np.uint8] | str]]:
    """Files with their pixels, or with the reason why they have none; so many read in advance."""
    waiting = [(path, readers.submit(_pixels, loaded, path)) for path in files[:ahead]]
    following = iter(files[ahead:])
    while waiting:
        path, future = waiting.pop(0)
        if (another := next(following, None)) is not None:
            waiting.append((another, readers.submit(_pixels, loaded, another)))
        yield path, future.result()


def _pixels(loaded: Loaded, path: Path) -> NDArray[np.uint8] | str:
    try:
        return loaded.pixels(path)
    except UnreadableImageError as error:
        return str(error)
    except OSError as error:
        return f"{path}: {error.strerror or error}"


def run(loaded: Loaded, config: PredictConfig) -> int:
    """Name all images; returns 1 if some could not be read."""
    check_head(loaded)
    files = find_images(config.images)
    to_terminal = config.output is None and sys.stdout.isatty()
    kind = config.format
    if kind == "auto":
        kind = "table" if to_terminal else _kind_of(config.output)
    bad: list[Answer] = []

    def watched(progress: "Progress | None") -> Iterator[Answer]:
        task = None if progress is None else progress.add_task("images", total=len(files))
        for answer in answers(loaded, files, config.batch_size, config.top):
            if progress is not None and task is not None:
                progress.advance(task)
            if answer.prediction is None:
                bad.append(answer)
            elif config.attention:
                _save_attention(loaded, answer.path)
            yield answer

    bar = progress_bar() if len(files) > 1 else nullcontext()
    with _opened(config.output) as target, bar as progress:
        match kind:
            case "table":
                found = [answer for answer in watched(progress) if answer.prediction]
                print_wide(table(found), target)
            case "csv":
                write_csv(watched(progress), target, config.top)
            case "jsonl":
                for answer in watched(progress):
                    print(json.dumps(as_dict(answer), ensure_ascii=False), file=target, flush=True)
    for answer in bad:
        print(f"error: {answer.problem}", file=sys.stderr)
    if bad:
        print(f"{len(bad)} of {len(files)} images could not be read.", file=sys.stderr)
    return 1 if bad else 0


def _save_attention(loaded: Loaded, path: Path) -> None:
    """Beside the image, another one that shows where the model looks, and its caption."""
    from vision.inspection.capture.recording import CaptureError
    from vision.inspection.figures.show import show_attention

    try:
        drawing = show_attention(loaded, path)
        drawing.save(path.with_name(f"{path.stem}{ATTENTION}"))
    except (CaptureError, ValueError) as error:
        raise ConfigError(f"attention=true: {error}") from error
    except OSError as error:
        raise ConfigError(f"attention=true: {path.parent}: {error.strerror or error}") from error


def _kind_of(output: Path | None) -> Literal["csv", "jsonl"]:
    return "csv" if output is not None and output.suffix == ".csv" else "jsonl"


def _opened(output: Path | None) -> AbstractContextManager[TextIO]:
    if output is None:
        return nullcontext(sys.stdout)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        return output.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"output: {output} cannot be written: {error.strerror}") from error


def as_dict(answer: Answer) -> dict[str, object]:
    """For a line of JSON."""
    if answer.prediction is None:
        return {"image": str(answer.path), "error": answer.problem}
    top = [{"label": label, "probability": p} for label, p in answer.prediction.top]
    return {
        "image": str(answer.path),
        "label": answer.prediction.label,
        "probability": answer.prediction.probability,
        "top": top,
    }


def write_csv(found: Iterable[Answer], target: TextIO, top: int) -> None:
    """A row for each image; label and probability of the best classes; why it has none."""
    writer = csv.writer(target)
    ranks = [
        f"{column}_{rank}" for rank in range(1, top + 1) for column in ("label", "probability")
    ]
    writer.writerow(["image", *ranks, "error"])
    for answer in found:
        cells = (
            [] if answer.prediction is None else [x for pair in answer.prediction.top for x in pair]
        )
        cells += [""] * (len(ranks) - len(cells))
        writer.writerow([answer.path, *cells, answer.problem or ""])


def table(found: Sequence[Answer]) -> "Table":
    """For a terminal: the best classes of every image, with a bar for each probability."""
    from rich.table import Table

    result = Table()
    result.add_column("image", overflow="fold")
    result.add_column("class")
    result.add_column("probability", justify="right")
    result.add_column("")
    for answer in found:
        assert answer.prediction is not None
        for rank, (label, probability) in enumerate(answer.prediction.top):
            name = str(answer.path) if rank == 0 else ""
            style = "bold" if rank == 0 else "dim"
            share = f"{100 * probability:.1f} %"
            result.add_row(plain(name), plain(label), share, bar(probability), style=style)
        result.add_section()
    return result


def bar(share: float, width: int = 20) -> str:
    """A bar of eighths of a character."""
    eighths = round(share * width * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
