"""Classification with a teacher, as in DeiT (Touvron et al., "Training data-efficient image
transformers & distillation through attention", ICML 2021).

The teacher is opened once and never changes. The class head learns from the labels, the head of a
distillation token from the teacher; a model with one head learns from both. Evaluation takes the
mean of the heads.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.files.remote import resolve
from vision.checkpoints.fingerprint import digest_weights
from vision.checkpoints.open import OpenedModel, open_model
from vision.config import ConfigError, shorten
from vision.data.batches import Batch
from vision.data.preprocess import Preprocess
from vision.models.build import autocast
from vision.models.configs import ModelChoice, TimmConfig
from vision.models.layers import static_bias
from vision.training.run.distributed import World
from vision.training.run.log import Reporter
from vision.training.tasks.classification import Classification, training_loss
from vision.training.tasks.configs import DistillConfig
from vision.training.tasks.task import sums_of


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


class Teacher:
    """A model that gives its logits for the images of a student, in the order of its classes."""

    def __init__(
        self,
        config: DistillConfig,
        classes: tuple[str, ...],
        student: Preprocess,
        world: World,
        *,
        channels_last: bool,
    ) -> None:
        opened = open_teacher(config, world)
        self.order = matched_classes(opened, config, classes)
        """For each class of the data its number in the teacher; None: the same."""
        unnamed = ["classes without names are taken to be those of the data in the same order"]
        self.notes = opened.notes() + unnamed * (opened.class_names is None)
        """Assumptions about the teacher."""
        self.precision, self.device = config.teacher_precision, world.device
        self.convert = ImageConversion(student, opened.preprocess, world.device, config.teacher)
        self.identity: Mapping[str, Any] = {
            "place": config.teacher,
            "file": str(opened.path),
            "weights": opened.weights,
            "digest": digest_weights(opened.model),
        }
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        self.model = opened.model.to(world.device).to(memory_format=self.layout)
        self.model.requires_grad_(False)
        self._biases = ExitStack()  # held as long as the teacher is: its weights never change
        self._biases.enter_context(static_bias(self.model))

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Normalised images of the student → logits in float32 (b classes)."""
        images = self.convert(images).contiguous(memory_format=self.layout)
        with autocast(self.precision, self.device):
            logits = self.model(images)
        return logits.float() if self.order is None else logits.float()[:, self.order]

    def check_unchanged(self, stored: Mapping[str, Any], allow_changes: bool) -> str:
        """Refuse other weights than those that a run had before; a sentence where they are allowed,
        and "" for the same.
        """
        before = stored.get("teacher")
        if not isinstance(before, dict) or before.get("digest") == self.identity["digest"]:
            return ""
        changed = (
            f"task.teacher: {self.identity['file']} has other weights than the teacher that this "
            f"run was started with ({before.get('file')}, digest {before.get('digest')!s:.12} "
            f"before, {self.identity['digest']:.12} now)"
        )
        if allow_changes:
            return f"{changed}; the run is resumed with the new ones (allow_changes=true)."
        raise ConfigError(
            f"{changed}. Restore the file, choose another name for a run with the new teacher, or "
            "allow_changes=true to resume with it."
        )


def open_teacher(config: DistillConfig, world: World) -> OpenedModel:
    """The model of the settings, for images of the size that it sees.

    All processes must call this together: one of them downloads.
    """
    if world.main:
        resolve(config.teacher, "task.teacher")
    world.wait()
    scheme, _, name = config.teacher.partition(":")
    # timm's names are its own models, whether this project has them too or not.
    architecture = config.teacher_model or (name if scheme == "timm" else None)
    model: ModelChoice | None = None
    if architecture is not None:
        model = TimmConfig(
            kind="timm",
            name=architecture,
            drop_path=None,
            checkpoint_activations=False,
            pretrained=None,
        )
    try:
        return open_model(
            config.teacher,
            model=model,
            weights=config.teacher_weights,
            image_size=config.teacher_image_size,
            setting="task.teacher",
        )
    except CheckpointError as error:
        remedy = str(error).replace("model=timm model.name=", "task.teacher_model=")
        raise CheckpointError(f"task.teacher: {remedy}") from error


def teacher_bytes(config: DistillConfig, world: World) -> int:
    """Memory of the weights of a teacher. All processes must call this together."""
    model = open_teacher(config, world).model
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def matched_classes(
    opened: OpenedModel, config: DistillConfig, classes: tuple[str, ...]
) -> list[int] | None:
    """For each class of the data its number in the teacher, by name; None: the same order.

    A teacher without a head or of other classes is refused.
    """
    place, names = config.teacher, opened.class_names
    train = (
        f"train one for them: python train.py recipe=finetune model=auto init={place} data=…, and "
        "task.teacher=outputs/… of that run"
    )
    if not opened.classes:
        raise ConfigError(
            f"task.teacher: {place} has no head and cannot predict the {len(classes)} classes of "
            f"the data; {train}."
        )
    if opened.multi_label:
        raise ConfigError(
            f"task.teacher: {place} was trained with task=multi_label and gives each class a "
            f"probability of its own, but an image of the data has one class; {train}."
        )
    same_number = opened.classes == len(classes)
    if same_number and (names in (None, classes) or config.teacher_classes == "in_order"):
        return None
    index = {name: number for number, name in enumerate(names or ())}
    if same_number and index.keys() == set(classes):
        return [index[name] for name in classes]
    theirs = f": {shorten(names)}" if names else " without names"
    renamed = " If they differ in their names alone, set task.teacher_classes=in_order."
    raise ConfigError(
        f"task.teacher: {place} has {opened.classes} classes{theirs}; the data has {len(classes)}: "
        f"{shorten(classes)}. Choose a teacher of the same classes, or {train}."
        f"{renamed * same_number}"
    )


class ImageConversion:
    """The images of a student, normalised and mixed, as a teacher takes them.

    Means, deviations and channels are exchanged exactly; images are resized if the teacher has
    another size. Whatever augmentation and mixing did to an image is seen by both.
    """

    def __init__(
        self, student: Preprocess, teacher: Preprocess, device: torch.device, place: str
    ) -> None:
        self.channels, self.size = teacher.channels, teacher.image_size
        if student.channels not in (1, teacher.channels):
            raise ConfigError(
                f"task.teacher: {place} is for images of {teacher.channels} channels, but the data "
                f"has {student.channels}; choose a teacher for {student.channels} channels."
            )
        self.same = (student.mean, student.std) == (teacher.mean, teacher.std)
        """Whether nothing but the size may differ."""
        self.resized = student.image_size != teacher.image_size
        # Pillow's Lanczos is not available on a device; bicubic is the nearest to it.
        self.mode = "bicubic" if teacher.interpolation == "lanczos" else teacher.interpolation
        self.own, self.wanted = (
            tuple(
                rearrange(torch.tensor(numbers, dtype=torch.float32), "c -> 1 c 1 1").to(device)
                for numbers in (preprocess.mean, preprocess.std)
            )
            for preprocess in (student, teacher)
        )

    def __call__(self, images: Tensor) -> Tensor:
        """(b c h w) → (b channels height width)"""
        if self.same and not self.resized:
            return images
        pixels = torch.addcmul(self.own[0], images, self.own[1])
        if self.resized:
            pixels = self._resize(pixels).clamp(0, 1)  # bicubic weights may lead out of the range
        if pixels.shape[1] != self.channels:
            pixels = repeat(pixels, "b 1 h w -> b c h w", c=self.channels)
        return (pixels - self.wanted[0]) / self.wanted[1]

    def _resize(self, pixels: Tensor) -> Tensor:
        if self.mode == "nearest":
            return F.interpolate(pixels, self.size, mode="nearest-exact")
        return F.interpolate(pixels, self.size, mode=self.mode, antialias=True)
