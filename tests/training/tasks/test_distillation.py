"""Distillation against DeiT's formulas, written here again, with students of every family."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_runs import small_config
from small_tasks import DISTILLED, TASKS, a_teacher
from torch import Tensor

from vision.checkpoints.open import open_model
from vision.data.preprocess import normalizer
from vision.models.build import build_model
from vision.models.configs import TimmConfig
from vision.training.job import TrainingJob, build_job
from vision.training.loop import train
from vision.training.run.distributed import World
from vision.training.run.run_folder import Run
from vision.training.run.stop import StopRequest
from vision.training.tasks.distillation import Distillation, distillation_loss

CPU = torch.device("cpu")


def a_job(folder: Path, *more: str, model: str = "vit_mini") -> TrainingJob:
    """A run that is ready for its first step."""
    config = small_config(folder, *TASKS["distill"](folder), *more, model=model)
    return build_job(config, Run(folder / "run"), World(0, 1, CPU), StopRequest(), None)


def first_batch(job: TrainingJob) -> Any:
    return next(job.task.training_batches(job.order, 0, job.config.batch_size))


def deits_loss(
    class_logits: Tensor,
    dist_logits: Tensor,
    teacher: Tensor,
    targets: Tensor,
    kind: str,
    temperature: float,
    alpha: float,
) -> float:
    """The formulas of DeiT's code, in double precision and with sums written out."""
    class_logits, dist_logits, teacher, targets = (
        numbers.detach().double() for numbers in (class_logits, dist_logits, teacher, targets)
    )
    base = -(targets * class_logits.log_softmax(1)).sum(1).mean()
    if kind == "hard":
        rows = torch.arange(len(teacher))
        taught = -dist_logits.log_softmax(1)[rows, teacher.argmax(1)].mean()
    else:
        p, q = (numbers.div(temperature).softmax(1) for numbers in (teacher, dist_logits))
        taught = (p * (p.log() - q.log())).sum() * temperature**2 / dist_logits.numel()
    return float(base * (1 - alpha) + taught * alpha)


@pytest.mark.parametrize(
    ("model", "more", "heads"),
    [
        ("vit_mini", DISTILLED, 2),
        ("vit_mini", [], 1),
        ("swin_mini", [], 1),
        ("swinv2_mini", [], 1),
    ],
)
def test_loss_is_that_of_deit_for_mixed_images_that_both_models_see(
    tmp_path: Path, model: str, more: list[str], heads: int
) -> None:
    job = a_job(tmp_path, *more, "augment=deit", model=model)
    task, batch = job.task, first_batch(job)
    assert isinstance(task, Distillation)
    images, targets = task.inputs(batch, 3, 0)
    assert 0 < targets.max() < 1
    # The teacher again, through the one door, with its own size and no help from the task.
    teacher = open_model(tmp_path / "teacher", device=CPU)
    own, other = job.data.preprocess, teacher.preprocess
    mean, std, other_mean, other_std = (
        torch.tensor(numbers)[:, None, None]
        for numbers in (own.mean, own.std, other.mean, other.std)
    )
    pixels = F.interpolate(images * std + mean, (24, 24), mode="bicubic", antialias=True)
    with torch.no_grad():
        wanted = teacher.model((pixels.clamp(0, 1) - other_mean) / other_std)
        logits = task.model(images, apart=True)
    assert len(logits) == heads
    agreement = int((logits.mean(0).argmax(1) == wanted.argmax(1)).sum())
    for kind, temperature, alpha in [("hard", 1.0, 0.5), ("soft", 3.0, 0.1), ("soft", 1.0, 1.0)]:
        changes = {"loss": kind, "temperature": temperature, "alpha": alpha}
        task.settings = task.settings.model_copy(update=changes)
        with torch.no_grad():
            loss, sums = task.loss(job.module, batch, 3, 0)
        expected = deits_loss(logits[0], logits[-1], wanted, targets, kind, temperature, alpha)
        assert float(loss) == pytest.approx(expected, abs=1e-5)
        assert sums[[0, 2, 3]].tolist() == pytest.approx([float(loss) * 8, agreement, 8])


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_loss_of_the_teacher_equals_torchs_divergence_and_cross_entropy(
    tmp_path: Path, kind: str
) -> None:
    config = small_config(
        tmp_path, "task=distill", "task.teacher=x", f"task.loss={kind}", "task.temperature=2.0"
    ).task
    generator = torch.Generator().manual_seed(0)
    student, teacher = (4 * torch.randn(12, 7, generator=generator) for _ in range(2))
    if kind == "soft":
        divergence = torch.nn.KLDivLoss(reduction="sum", log_target=True)
        expected = divergence((student / 2).log_softmax(1), (teacher / 2).log_softmax(1)) * 4 / 84
    else:
        expected = F.nll_loss(student.log_softmax(1), teacher.argmax(1))
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        found = distillation_loss(student.to(dtype), teacher, config)  # type: ignore[arg-type]
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("alpha", "taught", "untaught"), [(1, "head_dist", "head"), (0, "head", "head_dist")]
)
def test_labels_teach_the_class_head_and_the_teacher_the_other(
    tmp_path: Path, alpha: int, taught: str, untaught: str
) -> None:
    job = a_job(tmp_path, *DISTILLED, f"task.alpha={alpha}")
    loss, _ = job.task.loss(job.module, first_batch(job), 0, 0)
    loss.backward()
    gradients = {
        name: getattr(job.task.model, name).weight.grad.abs().max() for name in (taught, untaught)
    }
    assert gradients[taught] > 0 == gradients[untaught]


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "levit_128s"])
@pytest.mark.parametrize("frozen", [False, True])
def test_heads_of_a_timm_model_are_apart_and_their_mean_is_its_answer(
    name: str, frozen: bool
) -> None:
    config = TimmConfig(
        kind="timm", name=name, drop_path=None, checkpoint_activations=False, pretrained=None
    )
    model = build_model(config, (224, 224), classes=5, seed=0).train(not frozen)
    for module in model.modules():  # means of a batch and dropout would differ between two calls
        module.eval() if isinstance(module, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d) else None
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.manual_seed(0)
        heads = model(images, apart=True)
        torch.manual_seed(0)
        whole = model(images)
    assert heads.shape == (2, 2, 5)
    assert not heads[0].allclose(heads[1])
    torch.testing.assert_close(heads.mean(0), whole)
    assert model.model.training is not frozen  # type: ignore[union-attr]


def test_student_with_two_heads_is_evaluated_by_their_mean_and_opens_anywhere(
    tmp_path: Path,
) -> None:
    settings = [*TASKS["distill"](tmp_path), *DISTILLED, "duration=4steps", "evaluate_every=4steps"]
    assert train(small_config(tmp_path / "student", *settings)) == 0
    opened = open_model(tmp_path / "student" / "run", weights="raw")
    assert opened.record is not None and opened.record.step == 4
    job = a_job(tmp_path / "again", *DISTILLED)
    batch = first_batch(job)
    images = normalizer(opened.preprocess, CPU)(batch.images)
    with torch.no_grad():
        heads, mean = opened.model(images, apart=True), opened.model(images)
    torch.testing.assert_close(mean, heads.mean(0))
    assert not any("teacher" in name for name in opened.tensors)


def test_teacher_is_in_evaluation_mode_without_gradients_in_its_own_precision(
    tmp_path: Path,
) -> None:
    a_teacher(tmp_path, "model.dropout=0.5")
    job = a_job(tmp_path, "task.teacher_precision=bf16", "channels_last=true")
    assert isinstance(job.task, Distillation)
    teacher, images = job.task.teacher, torch.randn(4, 3, 16, 16)
    rough = teacher(images)
    assert rough.equal(teacher(images))
    assert rough.dtype == torch.float32 and not rough.requires_grad
    exact = a_job(tmp_path).task
    assert isinstance(exact, Distillation)
    assert 1e-6 < (rough - exact.teacher(images)).abs().max() < 0.1
    own = {id(p) for p in job.module.parameters()}
    assert not own & {id(p) for p in teacher.model.parameters()}
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
