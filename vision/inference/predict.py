"""Predictions for images in Python: `vision.load`; and the image files that a command is given."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any, TextIO, overload

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vision.checkpoints.configs import WhichWeights
from vision.checkpoints.load_report import LoadReport
from vision.checkpoints.native.checkpoint_folder import run_of
from vision.checkpoints.open import OpenedModel, open_model
from vision.config import ConfigError, Size
from vision.data.images.decode import Pixels, UnreadableImageError
from vision.data.preprocess import Preprocess, input_batch, input_pixels
from vision.data.sources.folder import SUFFIXES
from vision.evaluation.configs import HUBS
from vision.files import files_below, read_file
from vision.models.configs import ModelChoice
from vision.models.layers import Classifier, probabilities, static_bias

ImageInput = str | Path | bytes | Image.Image | NDArray[np.uint8] | Tensor
"""The name or the content of a file, a Pillow image, a uint8 array (height, width, channels) or a
uint8 tensor (channels, height, width).
"""
ImageInputs = list[ImageInput] | tuple[ImageInput, ...]

ATTENTION = "_attention"
"""Suffix of the names of attention figures."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image."""

    label: str
    """The most probable class."""
    probability: float
    top: tuple[tuple[str, float], ...]
    """The most probable classes with their probabilities, best first."""
    present: tuple[tuple[str, float], ...] | None = None
    """All classes at or above their thresholds, best first, of a model for several labels; None for
    one class per image."""


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
        chances = probabilities(logits.double(), self.model.activation)
        best = chances.topk(min(top, len(self.classes)), dim=1)
        found = []
        for row, values, indices in zip(
            chances, best.values.tolist(), best.indices.tolist(), strict=True
        ):
            named = tuple((self.classes[i], p) for i, p in zip(indices, values, strict=True))
            found.append(Prediction(*named[0], named, self._present(row)))
        return found

    def _present(self, chances: Tensor) -> tuple[tuple[str, float], ...] | None:
        if not self.opened.multi_label:
            return None
        order = chances.argsort(descending=True, stable=True).tolist()
        limits, values = self.opened.thresholds, chances.tolist()
        return tuple((self.classes[i], values[i]) for i in order if values[i] >= limits[i])

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


def beside_checkpoint(place: str, file: Path) -> Path:
    """The run's folder, or that of the file; the current folder for a hub name."""
    if place.startswith(HUBS):
        return Path()
    return run_of(file) or file.parent


def find_images(places: Sequence[str], listed: TextIO | None = None) -> list[Path]:
    """Expand files, folders, patterns and a list of names (-) to image files.

    Every file occurs once, in the order of the places and within a folder by name.
    """
    if not places:
        raise ConfigError("images: none given. Example: images=photo.jpg or images=photos/")
    found: dict[Path, None] = {}
    for place in places:
        if place == "-":
            lines = (line.strip() for line in (listed or sys.stdin))
            found.update(dict.fromkeys(Path(line) for line in lines if line))
            continue
        path = Path(place).expanduser()
        if path.is_dir():
            files = [f for f in files_below(path) if _is_image(f)]
        elif not path.exists() and has_magic(place):
            matches = sorted(glob(place, recursive=True))  # noqa: PTH207 (absolute patterns too)
            files = [f for f in map(Path, matches) if not f.is_dir()]
        else:
            files = [path]
        if not files:
            raise ConfigError(f"images: no images found in '{place}'.")
        found.update(dict.fromkeys(files))
    return list(found)


def _is_image(file: Path) -> bool:
    """By its suffix; figures that `attention=true` has written do not count."""
    return file.suffix.lower() in SUFFIXES and not file.stem.endswith(ATTENTION)
