"""Classification with a teacher, as in DeiT (Touvron et al., "Training data-efficient image
transformers & distillation through attention", ICML 2021).

The class head learns from the labels, the head of a distillation token from the teacher; a model
with one head learns from both. Evaluation takes the mean of the heads.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vision.data.batches import Batch
from vision.models.build import autocast
from vision.training.run.log import Reporter
from vision.training.tasks.classification import Classification, training_loss
from vision.training.tasks.configs import DistillConfig
from vision.training.tasks.task import sums_of
from vision.training.tasks.teacher import Teacher


class Distillation(Classification):
    """The loss of the labels and that of a teacher, which sees the same images."""

    measures = ("loss", "top1", "agreement")

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.config.task, DistillConfig)
        self.settings = self.config.task
        self.teacher = Teacher(
            self.settings,
            self.classes,
            self.data.preprocess,
            self.world,
            channels_last=self.config.channels_last,
        )
        if self.config.compile:
            self.teacher.model.compile()
        stored, allowed = self.run.newest_record(), self.config.allow_changes
        self.changed = self.teacher.check_unchanged(stored, allowed)

    def prepare(self, batch_size: int, reporter: Reporter) -> None:
        """Report the teacher."""
        if self.changed:
            reporter.warn(self.changed)
        identity = self.teacher.identity
        reporter.say(f"Teacher: {identity['file']} (digest {identity['digest']:.12}).")
        for note in self.teacher.notes:
            reporter.say(f"Teacher: {note}.")

    def loss(self, module: nn.Module, batch: Batch, step: int, part: int) -> tuple[Tensor, Tensor]:
        """The loss of each head for mixed targets and for the teacher's answer."""
        images, targets = self.inputs(batch, step, part)
        wanted = self.teacher(images)
        with autocast(self.config.precision, self.world.device):
            heads = module(images, apart=True)
        base = training_loss(heads[0], targets, self.config.loss, self.balance)
        taught = distillation_loss(heads[-1], wanted, self.settings)
        loss = base * (1 - self.settings.alpha) + taught * self.settings.alpha
        answers = heads.detach().mean(0).argmax(1)
        agreed = ((answers == other.argmax(1)).sum() for other in (targets, wanted))
        return loss, sums_of(loss, len(targets), *agreed)

    def record(self) -> dict[str, Any]:
        """The same, and the identity of the teacher."""
        return super().record() | {"teacher": dict(self.teacher.identity)}


def distillation_loss(logits: Tensor, teacher: Tensor, config: DistillConfig) -> Tensor:
    """The mean loss of logits (n, classes) for those of a teacher, in full precision.

    hard: cross-entropy with the teacher's most probable class. soft: the divergence from its
    probabilities at the temperature, times the temperature's square, so that gradients keep their
    size. As in the code of DeiT it is the mean over images and classes, smaller than the paper's by
    the number of classes.
    """
    logits, teacher = logits.float(), teacher.float()
    if config.loss == "hard":
        return F.cross_entropy(logits, teacher.argmax(1))
    own, wanted = (numbers / config.temperature for numbers in (logits, teacher))
    divergence = F.kl_div(
        own.log_softmax(1), wanted.log_softmax(1), reduction="sum", log_target=True
    )
    return divergence * config.temperature**2 / logits.numel()
