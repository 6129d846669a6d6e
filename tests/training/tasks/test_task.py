"""A task of one's own needs nothing but its class: loop, step and checkpoints take it as it is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from finetune_runs import stop_after
from small_runs import RICH, assert_same_bits, last_tensors, metrics, small_config, status
from torch import Tensor, nn

from vision.checkpoints.native.checkpoint import read_checkpoint
from vision.data.batches import Batch, evaluation_batches, training_batches
from vision.data.order import BatchOrder
from vision.data.preprocess import normalizer
from vision.evaluation.evaluate import evaluation_mode
from vision.models.build import build_model
from vision.models.layers import Classifier
from vision.training import job
from vision.training.loop import train
from vision.training.run.run_folder import PREEMPTED
from vision.training.tasks.classification import Classification, loss_and_sums
from vision.training.tasks.task import Task


class Distillation(Classification):
    """The loss of classification, and the divergence from a teacher."""

    measures = ("loss", "top1", "agreement")

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.data.preprocess.image_size
        self.teacher = build_model(self.config.model, size, classes=len(self.classes), seed=7)
        self.teacher.eval().requires_grad_(False)

    def loss(self, module: nn.Module, batch: Batch, step: int, part: int) -> tuple[Tensor, Tensor]:
        images, targets = self.inputs(batch, step, part)
        logits, wanted = module(images), self.teacher(images)
        loss, sums = loss_and_sums(logits, targets, self.config.loss, self.balance)
        loss = loss + F.kl_div(logits.log_softmax(1), wanted.softmax(1), reduction="batchmean")
        agreement = (logits.argmax(1) == wanted.argmax(1)).sum()
        return loss, torch.stack([loss.detach() * len(images), sums[1], agreement, sums[2]])

    def record(self) -> dict[str, Any]:
        return super().record() | {"teacher": "seed 7"}


class Autoencoder(Classifier):
    """A model with a decoder of pixels."""

    def __init__(self, encoder: Classifier, size: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(16, size)
        for parameter in self.head.parameters():
            nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(0))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder.pool(self.encoder.forward_features(images)))

    def layer_of(self, parameter: str) -> int:
        return int(parameter.startswith("head."))


class Reconstruction(Task[Batch]):
    """The squared error of pixels, without labels."""

    measures = headline = ("loss",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model = self.module = Autoencoder(self.model, 3 * 16 * 16)
        self.train_loader = self.image_loader(self.data.train, self.config.augment)
        self.normalize = normalizer(self.data.preprocess, self.world.device)

    def training_batches(self, order: BatchOrder, start: int, stop: int) -> Iterator[Batch]:
        return training_batches(self.train_loader, order, start, stop)

    def loss(self, module: nn.Module, batch: Batch, step: int, part: int) -> tuple[Tensor, Tensor]:
        images = self.normalize(batch.images)
        loss = F.mse_loss(module(images), images.flatten(1))
        return loss, torch.stack([loss.detach(), torch.ones(())]) * len(images)

    @torch.no_grad()
    def evaluate(self, batch_size: int) -> dict[str, float]:
        batches = evaluation_batches(self.val_loader, batch_size)
        with evaluation_mode(self.module):
            sums = sum(self.loss(self.module, batch, 0, 0)[1] for batch in batches)
        assert isinstance(sums, Tensor)
        return {"loss": float(sums[0] / sums[1])}

    def trial_batch(self, size: int) -> None:
        return None


@pytest.mark.parametrize("task", [Distillation, Reconstruction])
def test_task_of_ones_own_trains_evaluates_and_resumes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: type[Task[Any]]
) -> None:
    monkeypatch.setattr(job, "select_task", task)
    more = ["max_batch_per_device=4", "checkpoint.best=loss", "optimizer.learning_rate=0.01"]
    settings = [*RICH, *more, "augment=none"]
    assert train(small_config(tmp_path / "whole", *settings)) == 0
    stop_after(monkeypatch, [3, 8])
    config = small_config(tmp_path / "stopped", *settings)
    assert [train(config) for _ in range(3)] == [PREEMPTED, PREEMPTED, 0]
    assert_same_bits(last_tensors(tmp_path / "whole"), last_tensors(tmp_path / "stopped"))
    means = [{n: e[n] for n in task.measures} for e in metrics(tmp_path / "whole")]
    assert means[-1]["loss"] < means[0]["loss"]
    best = min(event["loss"] for event in metrics(tmp_path / "whole", "val_ema"))
    assert status(tmp_path / "whole")["best"] == best
    stored = read_checkpoint(tmp_path / "whole" / "run" / "checkpoints" / "best.safetensors")
    if task is Distillation:
        assert stored.record["teacher"] == "seed 7"
        assert 0 <= means[-1]["agreement"] <= 1
    else:
        assert stored.tensors["model.head.weight"].shape == (768, 16)
        assert stored.tensors["ema.encoder.norm.weight"].shape == (16,)
