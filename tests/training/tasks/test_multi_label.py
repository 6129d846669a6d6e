"""Multi-label training: its loss against timm and torch, and runs that are killed or shared out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm.loss
import torch
import torch.nn.functional as F
from finetune_runs import stop_after
from sklearn.metrics import average_precision_score
from small_runs import RICH, assert_same_bits, last_tensors, metrics, small_config, status
from started_runs import torchrun

import vision
from vision.checkpoints.native.checkpoint_folder import latest
from vision.checkpoints.native.header import read_record
from vision.config import ConfigError, parse
from vision.data.images.mixing import Mix, soft_targets
from vision.data.sources.shapes import ShapesTwo
from vision.training.loop import train
from vision.training.run.run_folder import PREEMPTED
from vision.training.tasks.configs import MultiLabelConfig
from vision.training.tasks.multi_label import multi_label_loss, positive_weights, sum_of_f1

TWO = ["task=multi_label", "data=shapes_two"]
FIELDS: dict[str, Any] = {
    "kind": "multi_label",
    "loss": "bce",
    "pos_weight": "none",
    "gamma_positive": 1.0,
    "gamma_negative": 4.0,
    "clip": 0.05,
}


def config(**given: Any) -> MultiLabelConfig:
    return parse(MultiLabelConfig, FIELDS | given)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(12, 7, generator=generator)
    return logits.requires_grad_(), torch.randint(2, (12, 7), generator=generator)


@pytest.mark.parametrize("gammas", [(1.0, 4.0, 0.05), (0.0, 2.0, 0.0)])
def test_asymmetric_loss_and_its_gradient_equal_timms(gammas: tuple[float, float, float]) -> None:
    logits, labels = batch()
    positive, negative, clip = gammas
    settings = config(
        loss="asymmetric", gamma_positive=positive, gamma_negative=negative, clip=clip
    )
    loss = multi_label_loss(logits, labels.float(), settings, torch.ones(7)) * labels.numel()
    reference: Any = timm.loss.AsymmetricLossMultiLabel(
        gamma_neg=negative, gamma_pos=positive, clip=clip
    )
    expected = reference(logits, labels.float())
    torch.testing.assert_close(loss, expected)
    found, wanted = (torch.autograd.grad(value, logits)[0] for value in (loss, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_asymmetric_loss_of_certain_answers_has_finite_gradients(gamma: float) -> None:
    settings = config(loss="asymmetric", gamma_positive=gamma, gamma_negative=gamma)
    logits = torch.tensor([[-200.0, -5.0, 200.0]] * 2, requires_grad=True)
    labels = torch.tensor([[0.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    loss = multi_label_loss(logits, labels, settings, torch.ones(3))
    assert torch.autograd.grad(loss, logits)[0].isfinite().all()


def test_bce_with_weights_equals_torchs_and_unknown_labels_cost_nothing() -> None:
    logits, labels = batch()
    weights = torch.linspace(0.5, 3, 7)
    expected = F.binary_cross_entropy_with_logits(logits, labels.float(), pos_weight=weights)
    torch.testing.assert_close(
        multi_label_loss(logits, labels.float(), config(), weights), expected
    )
    unknown = labels.clone()
    unknown[:, 2] = -1
    loss = multi_label_loss(logits, unknown.float(), config(), weights)
    assert torch.autograd.grad(loss, logits)[0][:, 2].eq(0).all()
    kept = [0, 1, 3, 4, 5, 6]
    known = F.binary_cross_entropy_with_logits(
        logits[:, kept], labels[:, kept].float(), pos_weight=weights[kept]
    )
    torch.testing.assert_close(loss, known * 6 / 7)


def test_mixed_and_smoothed_targets_are_the_expected_labels() -> None:
    labels = torch.tensor([[1, 0, -1], [1, 1, 0]], dtype=torch.int8)
    mixed = soft_targets(labels, 3, Mix(0.7), 0.1)
    expected = torch.tensor([[0.95, 0.3 * 0.9 + 0.05, -1], [0.95, 0.7 * 0.9 + 0.05, -1]])
    torch.testing.assert_close(mixed, expected)


def test_balanced_weights_are_the_ratio_of_absent_to_present() -> None:
    source = ShapesTwo((16, 16), 0, "train", 40)
    source.labels[0] = -1
    present, absent = (source.labels == 1).sum(0), (source.labels == 0).sum(0)
    np.testing.assert_allclose(
        positive_weights(config(pos_weight="balanced"), source), absent / present, rtol=1e-6
    )
    with pytest.raises(ConfigError, match=r"pos_weight has 2 numbers.*8 classes"):
        positive_weights(config(pos_weight=[1, 2]), source)


def test_training_f1_of_images() -> None:
    logits = torch.tensor([[1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]])
    targets = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])
    assert float(sum_of_f1(logits, targets)) == pytest.approx(2 / 3 + 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to, with everything random that it can have."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(small_config(folder, *TWO, *RICH, "task.loss=asymmetric")) == 0
    return folder


def test_stopped_run_ends_in_the_same_bits_and_thresholds(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = small_config(tmp_path, *TWO, *RICH, "task.loss=asymmetric")
    with monkeypatch.context() as patch:
        stop_after(patch, [9])
        assert train(settings) == PREEMPTED
    assert train(settings) == 0
    assert_same_bits(last_tensors(whole), last_tensors(tmp_path))
    for split in ("val", "val_ema"):
        assert metrics(whole, split) == metrics(tmp_path, split)
    first, second = (
        read_record(latest(folder / "run" / "checkpoints")[0])["thresholds"]
        for folder in (whole, tmp_path)
    )
    assert first == second
    assert len(first) == 8


def test_evaluation_in_training_equals_scikit_learn_on_the_loaded_model(whole: Path) -> None:
    loaded = vision.load(latest(whole / "run" / "checkpoints")[0])
    source = ShapesTwo((16, 16), 0, "val", 24)
    found = loaded.predict([source.read(i) for i in range(24)], top=8)
    chances = np.array([[dict(p.top)[name] for name in loaded.classes] for p in found])
    expected = np.mean(
        [average_precision_score(source.labels[:, c], chances[:, c]) for c in range(8)]
    )
    assert metrics(whole, "val_ema")[-1]["map"] == pytest.approx(expected, abs=1e-6)
    limits = dict(zip(loaded.classes, loaded.opened.thresholds, strict=True))
    for prediction in found:
        assert prediction.present is not None
        present = {name for name, chance in prediction.top if chance >= limits[name]}
        assert {name for name, _ in prediction.present} == present


def test_accumulated_parts_give_the_loss_of_the_whole_batch(tmp_path: Path) -> None:
    short = [*TWO, "duration=3steps", "evaluate_every=3steps", "schedule.warmup=1steps"]
    for limit in ("null", "2"):
        settings = small_config(tmp_path / limit, *short, f"max_batch_per_device={limit}")
        assert train(settings) == 0
    one, parts = (metrics(tmp_path / limit) for limit in ("null", "2"))
    assert [e["loss"] for e in one] == pytest.approx([e["loss"] for e in parts], rel=1e-5)
    assert [e["sample_f1"] for e in one] == pytest.approx([e["sample_f1"] for e in parts])


def test_bf16_run_with_flips_is_evaluated(tmp_path: Path) -> None:
    short = ["duration=2steps", "evaluate_every=2steps", "schedule.warmup=1steps"]
    settings = small_config(tmp_path, *TWO, *short, "precision=bf16", "flip_test=true")
    assert train(settings) == 0
    (event,) = metrics(tmp_path, "val")
    assert {"loss", "map", "micro_f1", "macro_f1", "sample_f1", "map_flipped"} <= event.keys()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_learn_and_evaluate_as_one(tmp_path: Path, parallel: str) -> None:
    short = [*TWO, "duration=6steps", "evaluate_every=3steps", "data.val_samples=23"]
    assert train(small_config(tmp_path / "one", *short)) == 0
    process = torchrun(tmp_path / "two", *short, f"parallel={parallel}")
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    assert status(tmp_path / "two")["status"] == "finished"
    one, two = (metrics(tmp_path / name, "val") for name in ("one", "two"))
    for first, second in zip(one, two, strict=True):
        assert first.pop("split") == second.pop("split")
        assert first == pytest.approx(second, rel=1e-3, abs=1e-3)
        assert second["samples"] == 23


REFUSED = {
    "one class": (["task=multi_label"], r"have one class each; use task=classify"),
    "several labels": (["data=shapes_two"], r"have several labels each; use task=multi_label"),
    "balanced": ([*TWO, "data.sampling=balanced"], r"sampling=uniform and task.pos_weight"),
    "per class": ([*TWO, "data.samples_per_class=3"], r"data.train_fraction"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_task_that_does_not_fit_the_data_is_refused_with_the_remedy(
    tmp_path: Path, case: str
) -> None:
    settings, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        train(small_config(tmp_path, *settings))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (["checkpoint.best=top1"], "top1 is a metric that task=multi_label does not measure"),
        (["objective=val/top1"], "objective=val/top1: .* choose one of loss, map"),
        (["tune=head", "augment=none", "tune.cache=true"], "use tune.cache=false"),
    ],
)
def test_settings_of_one_class_per_image_are_refused(
    tmp_path: Path, setting: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        small_config(tmp_path, *TWO, *setting)
