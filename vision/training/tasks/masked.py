"""Masked pretraining: most of each image is hidden, and its pixels are predicted, without labels.

The mask of a training image is a function of (seed, image, use in the epoch, epoch); that of a
validation image of the image alone, so that evaluations of one run and of different ones compare.
"""

from collections.abc import Sequence

import numpy as np
import torch
from einops import rearrange, repeat
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor, nn

from vision.data.batches import Batch
from vision.data.tools.contact_sheet import contact_sheet
from vision.evaluation.evaluate import evaluation_mode
from vision.evaluation.metrics import summable
from vision.models.build import autocast
from vision.models.reconstruction import MaskedModel
from vision.randomness import generator
from vision.training.tasks.configs import MaskedConfig
from vision.training.tasks.masked_model import MaskPlan, plan_masks
from vision.training.tasks.task import ImageTask, sums_of

SHOWN = 8
"""Largest number of images on a sheet."""


class Masked(ImageTask):
    """The error of predicted pixels where they are hidden (MAE or SimMIM)."""

    measures = headline = ("loss",)
    drawn = "reconstructions"

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.model, MaskedModel) and isinstance(self.config.task, MaskedConfig)
        self.masked: MaskedModel = self.model
        size = self.data.preprocess.image_size
        self.plan = plan_masks(self.config.task, self.masked.encoder, size)

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Normalised training images with their masks (n y x)."""
        uses = zip(batch.ids.tolist(), batch.occurrences.tolist(), strict=True)
        randoms = [
            generator(self.config.seed, "mask", epoch=batch.epoch, index=index, occurrence=use)
            for index, use in uses
        ]
        return self.images(batch.images), self._masks(randoms)

    def evaluated_inputs(self, images: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised validation images with their masks (n y x)."""
        randoms = [generator(0, "evaluated_mask", index=max(i, 0)) for i in ids.tolist()]
        return self.images(images), self._masks(randoms)

    def _masks(self, randoms: Sequence[np.random.Generator]) -> Tensor:
        masks = torch.from_numpy(draw_masks(self.plan, randoms))
        return masks.to(self.world.device, non_blocking=True)

    def loss(self, module: nn.Module, batch: Batch, step: int, part: int) -> tuple[Tensor, Tensor]:
        """The mean error of the hidden pixels."""
        images, masks = self.inputs(batch)
        with autocast(self.config.precision, self.world.device):
            predicted = module(images, masks)
        loss = self.masked.losses(predicted, images, masks).mean()
        return loss, sums_of(loss, len(images))

    def evaluate(self, batch_size: int) -> dict[str, float]:
        """The mean loss of the validation images."""
        world, device = self.world, self.world.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        sums = torch.zeros(2, dtype=dtype, device=device)
        with evaluation_mode(self.module):
            for batch in self.validation_batches(batch_size):
                images, masks = self.evaluated_inputs(batch.images, batch.ids)
                with autocast(self.config.precision, device):
                    predicted = self.module(images, masks)
                valid = batch.ids.to(device, non_blocking=True) >= 0
                losses = self.masked.losses(predicted, images, masks).where(valid, 0.0)
                sums += torch.stack([summable(losses, dtype).sum(), valid.sum(dtype=dtype)])
        loss, count = world.sum(sums).tolist()
        return {"loss": loss / count}

    def training_sheet(self, batch: Batch) -> Image:
        """The first images, augmented, as they are and with their masks."""
        images, masks = (part[:SHOWN] for part in self.inputs(batch))
        tiles = [self._covered(images, masks), images]
        return self._sheet(tiles, ["masked image", "original"], "Step 1, as the model gets it")

    @torch.no_grad()
    def prediction_sheet(self, batch_size: int, step: int) -> Image:
        """Validation images: what the encoder sees, what is predicted, and the original."""
        batch = self.first_validation_images(batch_size)
        shown = (batch.ids >= 0).nonzero().flatten()[:SHOWN]
        shown = shown if len(shown) else torch.arange(1)  # a process with nothing but filling rows
        images, masks = self.evaluated_inputs(batch.images[shown], batch.ids[shown])
        with evaluation_mode(self.module), autocast(self.config.precision, self.world.device):
            predicted = self.module(images, masks).float()
        if self.masked.normalize:
            mean, deviation = self.masked.patch_statistics(images)
            predicted = predicted * deviation + mean
        tiles = [
            self._covered(images, masks),
            torch.where(_by_pixel(masks, images), predicted, images),
            images,
        ]
        names = ["masked image", "reconstruction", "original"]
        return self._sheet(tiles, names, f"Step {step}: {' · '.join(names)}")

    def _covered(self, images: Tensor, masks: Tensor) -> Tensor:
        """Images with grey in place of what is hidden."""
        preprocess = self.data.preprocess
        pairs = zip(preprocess.mean, preprocess.std, strict=True)
        grey = images.new_tensor([(0.5 - mean) / std for mean, std in pairs])
        return torch.where(_by_pixel(masks, images), grey[:, None, None], images)

    def _sheet(self, tiles: list[Tensor], names: list[str], title: str) -> Image:
        """One row for each image, or two images in a row."""
        images = rearrange(torch.stack(tiles, dim=1), "n tile c h w -> (n tile) c h w")
        targets = torch.arange(len(tiles)).repeat(len(tiles[0]))
        columns = len(tiles) * (2 if len(tiles[0]) > 1 else 1)
        return contact_sheet(images, targets, names, self.data.preprocess, columns, title)


def draw_masks(plan: MaskPlan, randoms: Sequence[np.random.Generator]) -> NDArray[np.bool_]:
    """A mask for each generator (n y x): true where a token is hidden, the same number in all."""
    rows, columns = plan.squares
    squares = np.zeros((len(randoms), rows * columns), dtype=np.bool_)
    for mask, random in zip(squares, randoms, strict=True):
        mask[random.permutation(rows * columns)[: plan.hidden]] = True
    h, w = plan.cells
    return repeat(squares, "n (y x) -> n (y h) (x w)", y=rows, h=h, w=w)


def _by_pixel(masks: Tensor, images: Tensor) -> Tensor:
    """Masks (n y x) of tokens for each pixel: (n 1 height width)."""
    p, q = images.shape[2] // masks.shape[1], images.shape[3] // masks.shape[2]
    return repeat(masks, "n y x -> n 1 (y p) (x q)", p=p, q=q)
