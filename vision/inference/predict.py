"""Predictions for images: `vision.load` in Python, `vision predict` on the command line."""

import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, overload

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vision.checkpoints.configs import WhichWeights
from vision.checkpoints.load_report import LoadReport
from vision.checkpoints.open import OpenedModel, open_model
from vision.config import ConfigError, Size
from vision.data.images.decode import Pixels, UnreadableImageError
from vision.data.preprocess import Preprocess, input_batch, input_pixels
from vision.files import read_file
from vision.inference.configs import PredictConfig
from vision.inference.image_files import ATTENTION, find_images
from vision.models.configs import ModelChoice
from vision.models.layers import Classifier, static_bias
from vision.terminal import percent, plain, print_wide, tracked

if TYPE_CHECKING:
    from rich.table import Table

ImageInput = str | Path | bytes | Image.Image | NDArray[np.uint8] | Tensor
"""The name or the content of a file, a Pillow image, a uint8 array (height, width, channels) or a
uint8 tensor (channels, height, width).
"""
ImageInputs = list[ImageInput] | tuple[ImageInput, ...]
READERS = 4
"""Threads that read and decode while the model runs."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image."""

    label: str
    """The most probable class."""
    probability: float
    top: tuple[tuple[str, float], ...]
    """The most probable classes with their probabilities, best first."""


@dataclass(frozen=True)
class Loaded:
    """A model ready to use: `predict`, `features`, or `model` itself as a plain module."""

    opened: OpenedModel
    preprocess: Preprocess
    """How images become the model's input."""
    classes: tuple[str, ...]
    """Names of the classes; empty for a model without a head."""

    def __repr__(self) -> str:
        """A few lines; `print(loaded.model)` has every layer."""
        opened, (height, width) = self.opened, self.preprocess.image_size
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        shown = ", ".join(self.classes[:3]) + (", …" if len(self.classes) > 3 else "")
        return (
            f"{opened.config.kind}, {parameters:,} parameters, from {opened.path}\n"
            f"images      {height} × {width}, {self.preprocess.channels} channels\n"
            f"classes     {len(self.classes)}{f' ({shown})' if shown else ''}\n"
            f"device      {self.device}"
        )

    @property
    def model(self) -> Classifier:
        """The model, in evaluation mode."""
        return self.opened.model

    @property
    def report(self) -> LoadReport:
        """How each tensor of the file was used, and what was assumed."""
        return self.opened.report

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    def transform(self, image: ImageInput) -> Tensor:
        """An image as the model takes it: (channels, height, width), normalised."""
        return self.batch([self.pixels(image)])[0]

    def pixels(self, image: ImageInput) -> Pixels:
        """What the model sees of an image, as uint8 (height, width, channels)."""
        name = "the image"
        if isinstance(image, str | Path):
            name, image = str(image), read_file(image)
        elif isinstance(image, Tensor):
            image = rearrange(image, "c h w -> h w c").cpu().numpy()
        return input_pixels(image, name, self.preprocess)

    def try_pixels(self, path: Path) -> Pixels | str:
        """The pixels of a file, or the reason why it cannot be read."""
        try:
            return self.pixels(path)
        except OSError as error:
            named = isinstance(error, UnreadableImageError)
            return str(error) if named else f"{path}: {error.strerror or error}"

    def batch(self, pixels: Sequence[Pixels]) -> Tensor:
        """Images from `pixels` as the model takes them: (b channels height width), normalised."""
        return input_batch(pixels, self.preprocess, self.device)

    @overload
    def predict(self, images: ImageInput, top: int = 5, batch_size: int = 32) -> Prediction: ...
    @overload
    def predict(
        self, images: ImageInputs, top: int = 5, batch_size: int = 32
    ) -> list[Prediction]: ...
    def predict(
        self, images: ImageInput | ImageInputs, top: int = 5, batch_size: int = 32
    ) -> Prediction | list[Prediction]:
        """The most probable classes of an image, or of each image of a list."""
        self.opened.check_head()
        found = self.predictions(self._run(self.model, images, batch_size), top)
        return found if isinstance(images, list | tuple) else found[0]

    def features(self, images: ImageInput | ImageInputs, batch_size: int = 32) -> Tensor:
        """The input of the head: (width,) for an image, (n, width) for a list."""
        model = self.model
        found = self._run(
            lambda batch: model.pool(model.forward_features(batch)), images, batch_size
        )
        return found if isinstance(images, list | tuple) else found[0]

    def predictions(self, logits: Tensor, top: int) -> list[Prediction]:
        """The most probable classes of every row of logits."""
        best = logits.double().softmax(dim=1).topk(min(top, len(self.classes)), dim=1)
        found = []
        for values, indices in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            named = tuple((self.classes[i], p) for i, p in zip(indices, values, strict=True))
            found.append(Prediction(*named[0], named))
        return found

    def _run(
        self,
        function: Callable[[Tensor], Tensor],
        images: ImageInput | ImageInputs,
        batch_size: int,
    ) -> Tensor:
        listed = images if isinstance(images, list | tuple) else [images]
        with torch.inference_mode(), static_bias(self.model):
            outputs = [
                function(self.batch([self.pixels(i) for i in listed[start : start + batch_size]]))
                for start in range(0, len(listed), batch_size)
            ]
        return torch.cat(outputs) if outputs else torch.empty(0)


def load(
    place: str | Path,
    *,
    model: ModelChoice | None = None,
    weights: WhichWeights = "auto",
    rename: Sequence[tuple[str, str]] = (),
    image_size: Size | None = None,
    device: torch.device | str = "cpu",
    **given: Any,
) -> Loaded:
    """Load a model from a run's folder, a checkpoint file of any known format, or a name (timm:…,
    hf:…).

    What cannot be inferred from the weights is `given`: heads=4, norm_eps=1e-5 or any other setting
    of a model; `trained_size` is the size of the training images. `image_size` is the size of the
    images to run the model on, by default that of the training images.
    """
    opened = open_model(
        place,
        model=model,
        weights=weights,
        rename=rename,
        image_size=image_size,
        device=device,
        **given,
    )
    names = opened.names or tuple(f"class {number}" for number in range(opened.classes))
    return Loaded(opened, opened.preprocess, names)


@dataclass(frozen=True)
class PredictedFile:
    """A file with its prediction, or the reason why it could not be read."""

    path: Path
    prediction: Prediction | None
    problem: str | None


def predict_files(
    loaded: Loaded, files: Sequence[Path], batch_size: int, top: int
) -> Iterator[PredictedFile]:
    """The predictions of all files, in order. The next batch is read while the model runs."""
    with ThreadPoolExecutor(READERS) as readers, static_bias(loaded.model):
        upcoming = readers.map(loaded.try_pixels, files[:batch_size])
        for start in range(0, len(files), batch_size):
            end = start + batch_size
            results = list(upcoming)
            upcoming = readers.map(loaded.try_pixels, files[end : end + batch_size])
            good = [pixels for pixels in results if not isinstance(pixels, str)]
            named: Iterator[Prediction] = iter(())
            if good:
                with torch.inference_mode():  # not around a yield: it would affect the caller
                    named = iter(loaded.predictions(loaded.model(loaded.batch(good)), top))
            for path, result in zip(files[start:end], results, strict=True):
                if isinstance(result, str):
                    yield PredictedFile(path, None, result)
                else:
                    yield PredictedFile(path, next(named), None)


def run(loaded: Loaded, config: PredictConfig) -> int:
    """Predict all images and print or write the results; returns 1 if some could not be read."""
    loaded.opened.check_head()
    files = find_images(config.images)
    kind = config.format
    if kind == "auto":
        csv_file = config.output is not None and config.output.suffix == ".csv"
        kind = "csv" if csv_file else "jsonl"
        if config.output is None and sys.stdout.isatty():
            kind = "table"
    bad: list[PredictedFile] = []

    def results() -> Iterator[PredictedFile]:
        found = predict_files(loaded, files, config.batch_size, config.top)
        for file in tracked(found, "images", len(files)) if len(files) > 1 else found:
            if file.prediction is None:
                bad.append(file)
            elif config.attention:
                _save_attention(loaded, file.path)
            yield file

    with _opened(config.output) as target:
        match kind:
            case "table":
                print_wide(table([file for file in results() if file.prediction]), target)
            case "csv":
                write_csv(results(), target, config.top)
            case "jsonl":
                for file in results():
                    print(json.dumps(as_dict(file), ensure_ascii=False), file=target, flush=True)
    for file in bad:
        print(f"error: {file.problem}", file=sys.stderr)
    if bad:
        print(f"{len(bad)} of {len(files)} images could not be read.", file=sys.stderr)
    return 1 if bad else 0


def _save_attention(loaded: Loaded, path: Path) -> None:
    """Save a figure of the attention and its caption beside the image."""
    from vision.inspection.explain import settings_error
    from vision.inspection.figures.sheet import show_attention

    try:
        with settings_error("attention=true"):
            drawing = show_attention(loaded, path)
        drawing.save(path.with_name(f"{path.stem}{ATTENTION}"))
    except OSError as error:
        raise ConfigError(f"attention=true: {path.parent}: {error.strerror or error}") from error


def _opened(output: Path | None) -> AbstractContextManager[TextIO]:
    # A name may hold half of a character (a lone surrogate): it is written as JSON escapes it.
    errors = "backslashreplace"
    if output is None:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors=errors)
        return nullcontext(sys.stdout)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        return output.open("w", encoding="utf-8", errors=errors, newline="")
    except OSError as error:
        raise ConfigError(f"output: {output} cannot be written: {error.strerror}") from error


def as_dict(file: PredictedFile) -> dict[str, object]:
    """A result as a mapping for JSON."""
    if file.prediction is None:
        return {"image": str(file.path), "error": file.problem}
    top = [{"label": label, "probability": p} for label, p in file.prediction.top]
    return {"image": str(file.path), **top[0], "top": top}


def write_csv(files: Iterable[PredictedFile], target: TextIO, top: int) -> None:
    """Write a row for each image: the most probable classes, or the error."""
    writer = csv.writer(target)
    ranks = [
        f"{column}_{rank}" for rank in range(1, top + 1) for column in ("label", "probability")
    ]
    writer.writerow(["image", *ranks, "error"])
    for file in files:
        best = file.prediction.top if file.prediction else ()
        cells = [cell for pair in best for cell in pair]
        missing = [""] * (len(ranks) - len(cells))
        writer.writerow([file.path, *cells, *missing, file.problem or ""])


def table(files: Sequence[PredictedFile]) -> "Table":
    """A table for a terminal: the most probable classes of every image with bars."""
    from rich.bar import Bar
    from rich.table import Column, Table

    folded, right = Column("image", overflow="fold"), Column("probability", justify="right")
    result = Table(folded, "class", right, "")
    for file in files:
        assert file.prediction is not None
        for rank, (label, probability) in enumerate(file.prediction.top):
            name = str(file.path) if rank == 0 else ""
            style = "bold" if rank == 0 else "dim"
            shown = (percent(probability), Bar(1, 0, probability, width=20))
            result.add_row(plain(name), plain(label), *shown, style=style)
        result.add_section()
    return result
