"""Whole training runs in this process: what they learn, what they store, what they refuse."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small_runs import (
    RICH,
    assert_same_bits,
    folder_of_images,
    last_tensors,
    metrics,
    small_config,
    status,
    words,
)

from vision.checkpoints.native.checkpoint import read_checkpoint
from vision.checkpoints.native.checkpoint_folder import latest
from vision.checkpoints.open import open_model
from vision.cli.app import main
from vision.cli.composition import compose
from vision.config import ConfigError, UserError, parse
from vision.data.batches import Loader, Pipeline, training_batches
from vision.data.images.decode import UnreadableImageError
from vision.data.order import BatchOrder
from vision.data.preprocess import normalizer, resolve_preprocess, usual_values
from vision.data.sources.build_source import build_source
from vision.evaluation.evaluated_model import own_data
from vision.models.build import build_model
from vision.training.configs import TrainConfig
from vision.training.loop import train
from vision.training.run import step_memory
from vision.training.step import NonFiniteError
from vision.training.tasks import classification


def plain_losses(config: TrainConfig, steps: int) -> list[float]:
    """The first losses of a run, by a loop from the definition: AdamW, warm-up, clipping."""
    source = build_source(config.data, "train")
    known = usual_values(config.data)
    preprocess = resolve_preprocess(config.preprocess, config.data.image_size, 3, known)
    model = build_model(config.model, preprocess.image_size, classes=8, seed=config.seed).train()
    decayed = [p for n, p in model.named_parameters() if n not in model.no_weight_decay()]
    others = [p for n, p in model.named_parameters() if n in model.no_weight_decay()]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.99),
        weight_decay=0.05,
    )
    pipeline = Pipeline(source, preprocess, config.augment, config.seed, 10**6, "raise")
    loader = Loader(pipeline, config.loader, 0)
    batches = training_batches(loader, BatchOrder(config.seed, config.batch_size))
    normalize = normalizer(preprocess, torch.device("cpu"))
    losses = []
    for step in range(steps):
        batch = next(batches)
        for group in optimizer.param_groups:
            # Warm-up of two steps from 1e-6 to 2e-3, then a cosine over 18 steps to 1e-5.
            progress = torch.tensor((step - 2) / 18)
            cosine = 1e-5 + (2e-3 - 1e-5) * (1 + torch.cos(torch.pi * progress)) / 2
            group["lr"] = 1e-6 + (2e-3 - 1e-6) * step / 2 if step < 2 else float(cosine)
        loss = F.cross_entropy(model(normalize(batch.images)), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("model", ["vit_mini", "swin_mini", "swinv2_mini"])
def test_train_first_losses_equal_those_of_a_plain_loop(tmp_path: Path, model: str) -> None:
    config = small_config(tmp_path, model=model)
    assert train(config) == 0
    found = [event["loss"] for event in metrics(tmp_path)][:5]
    assert found == pytest.approx(plain_losses(config, 5), rel=1e-5)


def test_train_overfits_a_single_batch(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        "augment=none",
        "data.train_samples=16",
        "batch_size=16",
        "duration=150steps",
        "optimizer.learning_rate=1e-2",
        "optimizer.weight_decay=0",
        "evaluate_every=150steps",
        "checkpoint.every=150steps",
    )
    assert train(config) == 0
    assert metrics(tmp_path)[-1]["loss"] < 0.05
    assert metrics(tmp_path)[-1]["top1"] == 1


def test_train_stores_what_evaluation_needs_and_says_that_it_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, *RICH)
    assert train(config) == 0
    assert status(tmp_path)["status"] == "finished"
    steps = [event["step"] for event in metrics(tmp_path, "val")]
    assert steps == [7, 14, 20]
    assert [event["step"] for event in metrics(tmp_path, "val_ema")] == steps
    files = {f.stem: read_checkpoint(f).record for f in latest(tmp_path / "run" / "checkpoints")}
    # The last two, and what was the best when they were stored.
    assert {"step_00000018", "step_00000020", "best"} <= files.keys()
    before = [f"step_{files[name]['best_step']:08d}" for name in ("step_00000018", "step_00000020")]
    assert files.keys() <= {"step_00000018", "step_00000020", "best", *before}
    before = last_tensors(tmp_path)
    assert train(config) == 0
    assert "is finished already" in capsys.readouterr().out
    assert_same_bits(before, last_tensors(tmp_path))


def test_train_with_changed_settings_is_refused_with_the_difference(tmp_path: Path) -> None:
    train(small_config(tmp_path, "duration=3steps"))
    with pytest.raises(ConfigError) as caught:
        train(small_config(tmp_path, "duration=3steps", "optimizer.learning_rate=0.003"))
    assert "optimizer.learning_rate: 0.002 → 0.003" in str(caught.value)
    assert "allow_changes=true" in str(caught.value)


def test_train_with_settings_that_do_not_matter_changed_is_the_same_run(tmp_path: Path) -> None:
    train(small_config(tmp_path, "duration=3steps"))
    more = ["loader.workers=1", "log.every=2steps", "max_batch_per_device=4"]
    assert train(small_config(tmp_path, "duration=3steps", *more)) == 0


def test_train_on_existing_refuse_refuses(tmp_path: Path) -> None:
    train(small_config(tmp_path, "duration=3steps"))
    with pytest.raises(ConfigError, match="exists"):
        train(small_config(tmp_path, "duration=3steps", "on_existing=refuse"))


def test_train_accumulated_in_parts_equals_one_part(tmp_path: Path) -> None:
    for name, limit in (("whole", "null"), ("parts", "2")):
        words = ["duration=5steps", f"max_batch_per_device={limit}"]
        assert train(small_config(tmp_path / name, *words)) == 0
    whole, parts = (
        [event["loss"] for event in metrics(tmp_path / name)] for name in ("whole", "parts")
    )
    assert parts == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_train_in_16_bits_stays_close_to_fp32(tmp_path: Path, precision: str) -> None:
    losses = {}
    for kind in ("fp32", precision):
        assert train(small_config(tmp_path / kind, f"precision={kind}", "duration=6steps")) == 0
        losses[kind] = [event["loss"] for event in metrics(tmp_path / kind)]
    assert losses[precision] == pytest.approx(losses["fp32"], abs=0.03)
    assert losses[precision] != losses["fp32"]


def test_train_with_loss_that_overflows_names_step_images_and_module(tmp_path: Path) -> None:
    words = ["optimizer.learning_rate=1e30", "optimizer.clip=none", "schedule.warmup=0steps"]
    with pytest.raises(NonFiniteError) as caught:
        train(small_config(tmp_path, *words))
    message = str(caught.value)
    assert "the loss of step 2 is not a finite number: first in " in message
    assert "for the images " in message
    assert status(tmp_path)["status"] == "failed"


def test_train_on_nonfinite_skip_goes_on_without_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    original = classification.training_loss
    calls = iter(range(1000))

    def sometimes_nan(*arguments: object) -> torch.Tensor:
        loss = original(*arguments)
        return loss * float("nan") if next(calls) == 2 else loss

    monkeypatch.setattr(classification, "training_loss", sometimes_nan)
    assert train(small_config(tmp_path, "on_nonfinite=skip", "duration=5steps")) == 0
    assert "The step is skipped." in capsys.readouterr().out
    assert all(t.isfinite().all() for t in last_tensors(tmp_path).values())


def test_train_with_batch_larger_than_data_says_so(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValueError), match="fewer than one global batch of 64"):
        train(small_config(tmp_path, "batch_size=64"))


@pytest.mark.parametrize("model", ["vit_mini", "swin_mini", "swinv2_mini"])
def test_train_deterministic_has_no_operation_that_torch_refuses(
    tmp_path: Path, model: str
) -> None:
    settings = [*RICH, "duration=4steps"]
    assert train(small_config(tmp_path / "plain", *settings, model=model)) == 0
    try:
        strict = small_config(tmp_path / "strict", *settings, "deterministic=true", model=model)
        assert train(strict) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_bits(last_tensors(tmp_path / "plain"), last_tensors(tmp_path / "strict"))


def no_memory_on_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def no_memory_on_a_cpu() -> None:
    torch.empty(2**60, dtype=torch.uint8)


@pytest.mark.parametrize("fail", [no_memory_on_a_gpu, no_memory_on_a_cpu])
def test_train_out_of_memory_names_peak_micro_batch_and_the_setting_to_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None]
) -> None:
    monkeypatch.setattr(classification, "training_loss", lambda *arguments: fail())
    expected = r"at 8 images per device \(peak [0-9.]+ GiB\).*max_batch_per_device=4"
    with pytest.raises(UserError, match=expected):
        train(small_config(tmp_path / "eight"))
    with pytest.raises(UserError, match=r"at 1 image .*model\.checkpoint_activations=true"):
        train(small_config(tmp_path / "one", "max_batch_per_device=1"))
    # Where the memory is unknown, sizes are tried.
    monkeypatch.setattr(step_memory, "device_memory", lambda device: None)
    with pytest.raises(UserError, match=r"at 1 image per device.*checkpoint_activations"):
        train(small_config(tmp_path / "auto", "max_batch_per_device=auto"))


def test_train_max_batch_auto_finds_and_stores_what_fits_and_learns_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(small_config(tmp_path / "whole", "duration=4steps")) == 0
    original = classification.training_loss
    seen: list[int] = []

    def only_two_fit(logits: torch.Tensor, *others: object) -> torch.Tensor:
        if len(logits) > 2:
            no_memory_on_a_gpu()
        seen.append(len(logits))
        if len(seen) == 1 + 3 * 4 + 1:  # after a trial and three steps of four parts
            raise KeyboardInterrupt
        return original(logits, *others)

    words = ["duration=4steps", "max_batch_per_device=auto", "checkpoint.every=1steps"]
    monkeypatch.setattr(step_memory, "device_memory", lambda device: None)  # so sizes are tried
    monkeypatch.setattr(classification, "training_loss", only_two_fit)
    with pytest.raises(KeyboardInterrupt):
        train(small_config(tmp_path / "auto", *words))
    assert "8 = 2 per device × 1 device × 4 accumulated" in capsys.readouterr().out
    assert status(tmp_path / "auto")["micro_batch"] == 2
    # A resumed run takes as many at once, though more would fit now.
    monkeypatch.setattr(classification, "training_loss", original)
    assert train(small_config(tmp_path / "auto", *words)) == 0
    assert "8 = 2 per device × 1 device × 4 accumulated" in capsys.readouterr().out
    losses = [[e["loss"] for e in metrics(tmp_path / name)] for name in ("whole", "auto")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("metric", ["loss", "top1", "balanced_accuracy", "macro_f1"])
def test_train_keeps_the_checkpoint_that_is_best_by_the_named_metric(
    tmp_path: Path, metric: str
) -> None:
    rising_and_falling = ["evaluate_every=1steps", "optimizer.learning_rate=0.05"]
    assert train(small_config(tmp_path, f"checkpoint.best={metric}", *rising_and_falling)) == 0
    values = {event["step"]: event[metric] for event in metrics(tmp_path, "val")}
    best = (min if metric == "loss" else max)(values, key=lambda step: values[step])
    stored = read_checkpoint(tmp_path / "run" / "checkpoints" / "best.safetensors")
    assert stored.record["step"] == best
    assert stored.record["best"] == values[best] == status(tmp_path)["best"]


def test_train_with_flips_at_test_time_reports_both_and_learns_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["evaluate_every=2steps", "duration=6steps", "ema=0.5"]
    assert train(small_config(tmp_path / "plain", *more)) == 0
    capsys.readouterr()
    assert train(small_config(tmp_path / "both", *more, "flip_test=true")) == 0
    printed = capsys.readouterr().out
    for split in ("val", "val_ema"):
        plain, both = metrics(tmp_path / "plain", split), metrics(tmp_path / "both", split)
        assert [{name: event[name] for name in plain[0]} for event in both] == plain
        assert all(event["loss_flipped"] != event["loss"] for event in both)
        assert f"top-1 with flips {both[-1]['top1_flipped'] * 100:.2f} %" in printed
    assert status(tmp_path / "plain")["best"] == status(tmp_path / "both")["best"]
    assert_same_bits(last_tensors(tmp_path / "plain"), last_tensors(tmp_path / "both"))


def test_train_ends_with_commands_that_can_be_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(small_config(tmp_path, "duration=2steps")) == 0
    lines = capsys.readouterr().out.split("Next:\n")[1].splitlines()
    assert len(lines) == 4
    for line in lines:
        command = shlex.split(line.replace("python eval.py", "vision eval"), comments=True)
        assert main([*command[1:], "--cfg", "job"]) == 0
        assert str(tmp_path) in capsys.readouterr().out


def test_train_on_a_folder_keeps_its_split_when_images_are_added(tmp_path: Path) -> None:
    root = folder_of_images(tmp_path / "images", 12)
    more = [f"data.root={root}", "data.val_fraction=0.25", "duration=4steps"]
    config = folder_config(tmp_path, *more)
    assert train(config) == 0
    before = (tmp_path / "run" / "split.csv").read_text()
    folder_of_images(tmp_path / "images", 30)
    assert (tmp_path / "run" / "split.csv").read_text() == before
    stored = open_model(tmp_path / "run")
    assert stored.class_names == ("dark", "light")
    assert len(build_source(own_data(stored), "val")) == 6  # not 15


def test_train_skipping_unreadable_images_lists_them_in_the_run(tmp_path: Path) -> None:
    root = folder_of_images(tmp_path / "images", 12)
    (root / "dark" / "3.png").write_bytes(b"")
    more = [f"data.root={root}", "data.val_fraction=0.25", "duration=6steps"]
    with pytest.raises(UnreadableImageError, match=r"dark/3\.png"):
        train(folder_config(tmp_path / "raise", *more))
    more += ["data.on_error=skip", "data.max_error_share=0.2"]
    assert train(folder_config(tmp_path / "skip", *more)) == 0
    listed = (tmp_path / "skip" / "run" / "skipped-0.jsonl").read_text()
    assert json.loads(listed)["image"].endswith("dark/3.png")
    assert "0 bytes" in json.loads(listed)["reason"]


def folder_config(folder: Path, *more: str) -> TrainConfig:
    values, _ = compose("train", ["data=folder", *words(folder, *more, shapes=False)])
    return parse(TrainConfig, values)
