"""Images for the log: what the model is trained on, and what it says of validation images."""

import torch
from PIL import Image

from vision.data.loader import Batch
from vision.data.tools.contact_sheet import contact_sheet
from vision.evaluation.evaluate import evaluation_mode
from vision.models.precision import autocast
from vision.training.job import Job
from vision.training.step import inputs

TRAINING, VALIDATION = 32, 16
"""Most images on a sheet."""


def training_sheet(job: Job, batch: Batch) -> Image.Image:
    """The first part of the present step as the model gets it: augmented, normalised and mixed."""
    images, targets = inputs(batch, job.setup, job.state.step, part=0)
    return contact_sheet(
        images[:TRAINING],
        targets[:TRAINING],
        job.train_loader.source.classes,
        job.preprocess,
        title=f"Step {job.state.step + 1}, as the model gets it",
    )


@torch.no_grad()
def prediction_sheet(job: Job, batch: Batch) -> Image.Image:
    """Validation images over their label and what the model says. All processes must call this
    together: weights may be spread over them.
    """
    shown = (batch.ids >= 0).nonzero().flatten()[:VALIDATION]
    shown = shown if len(shown) else torch.arange(1)  # a process whose every row is a filling one
    images = job.setup.normalize(batch.images[shown].to(job.world.device))
    with evaluation_mode(job.state.model), autocast(job.config.precision, job.world.device):
        logits = job.state.model(images)
    shares, answers = logits.float().softmax(1).max(1)
    classes = job.val_loader.source.classes
    captions = [
        f"{classes[label]} / {classes[answer]} {share:.0%}"
        for label, answer, share in zip(
            batch.labels[shown].tolist(), answers.tolist(), shares.tolist(), strict=True
        )
    ]
    return contact_sheet(
        images,
        torch.arange(len(captions)),
        captions,
        job.preprocess,
        columns=4,
        title=f"Step {job.state.step}: label / answer",
    )
