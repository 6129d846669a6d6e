"""`vision.load`: a model from any checkpoint, with what is needed to use it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

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
from vision.data.images.decode import open_image
from vision.data.images.transforms import evaluation_pixels
from vision.data.preprocess import Preprocess, normalizer
from vision.data.sources.wordnet import imagenet_synsets, readable_names
from vision.models.configs import ModelChoice
from vision.models.layers import Classifier, static_bias

ImageInput = str | Path | bytes | Image.Image | NDArray[np.uint8] | Tensor
"""A file's name or content, a Pillow image, a uint8 array (height, width, channels), or a uint8
tensor (channels, height, width).
"""

ImageInputs = list[ImageInput] | tuple[ImageInput, ...]


@dataclass(frozen=True)
class Prediction:
    """What a model says of one image."""

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
    """How images become the model's numbers."""
    classes: tuple[str, ...]
    """Names of the classes; empty: the model has no head."""

    @property
    def model(self) -> Classifier:
        """The model, in evaluation mode."""
        return self.opened.model

    @property
    def source(self) -> Path:
        """The file that the weights are from."""
        return self.opened.path

    @property
    def report(self) -> LoadReport:
        """What became of each tensor of the file, and what was assumed."""
        return self.opened.report

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def transform(self, image: ImageInput) -> Tensor:
        """An image of any kind as the model takes it: (channels, height, width), normalised."""
        pixels = torch.from_numpy(np.array(self.pixels(image)))
        batch = rearrange(pixels, "h w c -> 1 c h w").to(self.device)
        return normalizer(self.preprocess, self.device)(batch)[0]

    def pixels(self, image: ImageInput) -> NDArray[np.uint8]:
        """What the model sees of an image, as uint8 (height, width, channels)."""
        channels = self.preprocess.channels
        name = str(image) if isinstance(image, str | Path) else "the image"
        if isinstance(image, str | Path):
            image = Path(image).read_bytes()
        elif isinstance(image, Tensor):
            image = rearrange(image, "c h w -> h w c").cpu().numpy()
        return evaluation_pixels(open_image(image, channels, name), self.preprocess)

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
        check_head(self)
        listed = images if isinstance(images, list | tuple) else [images]
        answers = predictions(self._run(listed, batch_size, head=True), self.classes, top)
        return answers if isinstance(images, list | tuple) else answers[0]

    def features(self, images: ImageInput | ImageInputs, batch_size: int = 32) -> Tensor:
        """What the head is given: (width,) for an image, (n, width) for a list."""
        listed = images if isinstance(images, list | tuple) else [images]
        found = self._run(listed, batch_size, head=False)
        return found if isinstance(images, list | tuple) else found[0]

    def _run(self, inputs: Sequence[ImageInput], batch_size: int, head: bool) -> Tensor:
        outputs = []
        with torch.inference_mode(), static_bias(self.model):
            for start in range(0, len(inputs), batch_size):
                images = torch.stack(
                    [self.transform(p) for p in inputs[start : start + batch_size]]
                )
                tokens = self.model.forward_features(images)
                outputs.append(self.model.forward_head(tokens) if head else self.model.pool(tokens))
        return torch.cat(outputs) if outputs else torch.empty(0)


def predictions(logits: Tensor, classes: Sequence[str], top: int) -> list[Prediction]:
    """The most probable classes of every row of logits."""
    best = logits.double().softmax(dim=1).topk(min(top, logits.shape[1]), dim=1)
    rows = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    answers = []
    for values, indices in rows:
        named = tuple((classes[i], value) for i, value in zip(indices, values, strict=True))
        answers.append(Prediction(named[0][0], named[0][1], named))
    return answers


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
    """A model from a run's folder, a checkpoint file of any known format, or a name (timm:…, hf:…).

    What the weights do not show is `given`: heads=4, norm_eps=1e-5 or any other setting of a model;
    `trained_size` is the size of the images in training. `image_size` is the size of the images
    that the model shall see, by default the one that it was trained with.
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
    return Loaded(opened, opened.preprocess, opened.class_names or _numbered(opened.classes))


def _numbered(classes: int) -> tuple[str, ...]:
    """Names where a file has none: ImageNet's for its 1,000 classes, else numbers."""
    if classes == 1000:
        return readable_names(imagenet_synsets())
    return tuple(f"class {number}" for number in range(classes))


def check_head(loaded: Loaded, setting: str = "checkpoint") -> None:
    """An error that says what to do with a model that has no head."""
    if loaded.classes:
        return
    raise ConfigError(
        f"{setting}: {loaded.source} has no head, so that it names no classes. Train one: python "
        f"train.py recipe=probe model=auto init={loaded.source} data=…; judge the features by "
        f"their neighbours: python eval.py checkpoint={loaded.source} neighbours=20 data=…; or "
        f"use them in Python: vision.load(…).features(images)."
    )
