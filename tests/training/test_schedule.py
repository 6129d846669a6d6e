"""A run in steps, and its learning rates: closed forms, and timm's and torch's schedulers."""

import copy
import math
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from timm.scheduler import CosineLRScheduler, PolyLRScheduler

from vision.config import ConfigError, parse
from vision.data.order import BatchOrder, epoch_length
from vision.training.configs import ScheduleConfig, TrainConfig
from vision.training.schedule import Schedule, build_schedule, lr_at

SCHEDULE = {
    "shape": "cosine",
    "power": 1.0,
    "warmup": "0steps",
    "warmup_from": 1e-6,
    "end_at": 1e-5,
    "scale_ends": False,
    "cooldown": "0steps",
}


@cache
def composed() -> dict[str, Any]:
    folder = Path(__file__).parents[2] / "configs"
    with initialize_config_dir(str(folder), version_base=None):
        values = OmegaConf.to_container(compose("train"))
    assert isinstance(values, dict)
    return values  # type: ignore[return-value]


def config(**changes: Any) -> TrainConfig:
    """The default run, with dotted settings changed: `schedule__warmup`."""
    values = copy.deepcopy(composed())
    values |= {"batch_size": 10, "duration": "10epochs", "schedule": dict(SCHEDULE)}
    values["optimizer"] |= {"learning_rate": 1e-3, "reference_batch": None}
    for key, value in changes.items():
        group, _, name = key.rpartition("__")
        (values[group] if group else values)[name] = value
    return parse(TrainConfig, values)


def plan(samples: int = 100, **changes: Any) -> Schedule:
    return build_schedule(config(**changes), samples)


def rates(planned: Schedule) -> list[float]:
    return [lr_at(step, planned) for step in range(planned.total + 1)]


def sgd(rate: float) -> torch.optim.SGD:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)


def timm_rates(scheduler: Any, steps: int) -> list[float]:
    found = []
    for step in range(steps + 1):
        scheduler.step_update(step)
        found.append(scheduler.optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("7steps", 7),
        ("1step", 1),
        ("3epochs", 30),
        ("0.5epochs", 5),
        ("0.25epochs", 3),  # 2.5: a half goes up
        ("0.001epochs", 1),
        ("1e3samples", 100),
        ("44samples", 4),
        ("46samples", 5),
        ("1sample", 1),
    ],
)
def test_length_in_any_unit_becomes_the_nearest_number_of_steps(text: str, steps: int) -> None:
    planned = plan(duration=text, evaluate_every=text, checkpoint__every=text, log__every=text)
    assert planned.decay == planned.total == steps
    assert planned.evaluate_every == planned.checkpoint_every == steps
    assert planned.log_every == min(steps, planned.steps_per_epoch)  # a loss in every epoch


@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize("samples", [100, 101, 109, 37])
def test_epoch_has_as_many_steps_as_the_loader_makes(samples: int, tail: str) -> None:
    planned = plan(samples, loader__tail=tail, duration="2epochs")
    batches = BatchOrder(0, 10, tail=tail)  # type: ignore[arg-type]
    assert planned.steps_per_epoch * 10 == epoch_length(samples, batches)
    assert planned.steps_per_epoch == (samples // 10 if tail == "drop" else math.ceil(samples / 10))
    assert planned.total == 2 * planned.steps_per_epoch


def test_plan_of_fewer_images_than_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"9 images, fewer than one global batch of 10"):
        plan(9)
    assert plan(9, loader__tail="pad").steps_per_epoch == 1


def test_cooldown_comes_after_the_duration() -> None:
    planned = plan(duration="3epochs", schedule__cooldown="1epochs", schedule__warmup="1epochs")
    assert (planned.warmup, planned.decay, planned.total) == (10, 30, 40)
    assert lr_at(29, planned) > planned.settings.end_at
    assert {lr_at(step, planned) for step in range(30, 41)} == {planned.settings.end_at}


def test_learning_rate_is_scaled_by_the_batch_only_if_asked() -> None:
    assert plan().peak == 1e-3
    assert plan(optimizer__reference_batch=40).peak == pytest.approx(2.5e-4)
    assert plan(optimizer__reference_batch=5).peak == pytest.approx(2e-3)


@pytest.mark.parametrize("shape", ["cosine", "linear", "polynomial", "constant"])
def test_learning_rate_has_its_closed_form_at_marked_steps(shape: str) -> None:
    changes = {"schedule__shape": shape, "schedule__power": 3.0, "schedule__warmup": "2epochs"}
    planned = plan(**changes)
    height = {
        "cosine": lambda x: 0.5 + 0.5 * math.cos(math.pi * x),
        "linear": lambda x: 1 - x,
        "polynomial": lambda x: (1 - x) ** 3,
        "constant": lambda x: 1.0,
    }[shape]
    assert lr_at(0, planned) == 1e-6
    assert lr_at(5, planned) == pytest.approx(1e-6 + (1e-3 - 1e-6) / 4)
    assert lr_at(20, planned) == 1e-3
    for step in (40, 60, 99):
        expected = 1e-5 + (1e-3 - 1e-5) * height((step - 20) / 80)
        assert lr_at(step, planned) == pytest.approx(expected, rel=1e-12)
    assert lr_at(100, planned) == (1e-3 if shape == "constant" else 1e-5)


@pytest.mark.parametrize("warmup", [0, 1, 17])
def test_cosine_equals_timms_scheduler(warmup: int) -> None:
    planned = plan(schedule__warmup=f"{warmup}steps", schedule__cooldown="5steps")
    scheduler = CosineLRScheduler(
        sgd(1e-3),
        t_initial=100 - warmup,
        lr_min=1e-5,
        warmup_t=warmup,
        warmup_lr_init=1e-6,
        warmup_prefix=True,
        t_in_epochs=False,
    )
    assert rates(planned) == pytest.approx(timm_rates(scheduler, 105), rel=1e-12)


@pytest.mark.parametrize(("shape", "power"), [("polynomial", 2.5), ("linear", 1.0)])
def test_polynomial_equals_timms_scheduler(shape: str, power: float) -> None:
    planned = plan(schedule__shape=shape, schedule__power=power, schedule__warmup="9steps")
    scheduler = PolyLRScheduler(
        sgd(1e-3),
        t_initial=91,
        power=power,
        lr_min=1e-5,
        warmup_t=9,
        warmup_lr_init=1e-6,
        warmup_prefix=True,
        t_in_epochs=False,
    )
    assert rates(planned) == pytest.approx(timm_rates(scheduler, 100), rel=1e-12)


@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_learning_rate_equals_torchs_schedulers(shape: str) -> None:
    planned = plan(schedule__shape=shape, schedule__warmup="20steps")
    optimizer = sgd(1e-3)
    lr = torch.optim.lr_scheduler
    decay: Any = (
        lr.CosineAnnealingLR(optimizer, 80, eta_min=1e-5)
        if shape == "cosine"
        else lr.LinearLR(optimizer, 1.0, 1e-2, total_iters=80)
    )
    rise = lr.LinearLR(optimizer, 1e-3, 1.0, total_iters=20)
    scheduler = lr.SequentialLR(optimizer, [rise, decay], milestones=[20])
    expected = []
    for _ in range(101):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates(planned) == pytest.approx(expected, rel=1e-9)


@given(
    warmup=st.integers(0, 50),
    decay=st.integers(1, 50),
    cooldown=st.integers(0, 20),
    shape=st.sampled_from(["cosine", "linear", "polynomial", "constant"]),
)
def test_learning_rate_rises_then_falls_within_its_bounds(
    warmup: int, decay: int, cooldown: int, shape: Any
) -> None:
    total = warmup + decay
    every = (1, None, 1, 1)
    changes = {"shape": shape, "power": 2.0, "warmup_from": 0.001, "end_at": 0.01}
    settings = parse(ScheduleConfig, SCHEDULE | changes)
    planned = Schedule(10, warmup, total, total + cooldown, *every, 0.1, settings)
    found = rates(planned)
    assert all(a < b for a, b in pairwise(found[: warmup + 1]))
    assert all(a >= b for a, b in pairwise(found[warmup:]))
    assert max(found) == found[warmup] == 0.1
    assert min(found) >= 0.001
    assert found[-1] == (0.1 if shape == "constant" else 0.01)


def test_warmup_as_long_as_the_run_rises_to_its_end() -> None:
    planned = plan(schedule__warmup="10epochs", schedule__cooldown="1epochs")
    assert planned.warmup == planned.decay == 100
    assert lr_at(99, planned) == pytest.approx(1e-6 + (1e-3 - 1e-6) * 0.99)
    assert lr_at(100, planned) == 1e-5


def test_warmup_longer_than_the_run_is_refused_naming_both() -> None:
    with pytest.raises(
        ConfigError, match=r"warmup = 11epochs \(110 steps\).*duration = 10epochs \(100 steps\)"
    ):
        plan(schedule__warmup="11epochs")


@pytest.mark.parametrize("name", ["duration", "evaluate_every", "checkpoint__every", "log__every"])
def test_length_of_nothing_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name.replace('__', '.')} = 0epochs: .*more than 0"):
        plan(**{name: "0epochs"})


def test_endless_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="duration = 1e999steps: expected a finite length"):
        plan(duration="1e999steps")


def test_end_above_the_scaled_peak_is_refused_with_its_reason() -> None:
    with pytest.raises(ConfigError, match=r"end_at = 1e-05 is above .*5e-06.*10 / 2000"):
        plan(optimizer__reference_batch=2000)
    constant = plan(optimizer__reference_batch=2000, schedule__shape="constant")
    assert lr_at(50, constant) == pytest.approx(5e-6)
    with pytest.raises(ConfigError, match=r"warmup_from = 0.1 is above the peak"):
        plan(schedule__warmup="5steps", schedule__warmup_from=0.1)


def test_evaluation_and_checkpoint_come_regularly_and_at_the_end() -> None:
    planned = plan(
        duration="25steps",
        evaluate_every="10steps",
        checkpoint__every="100steps",
        log__every="10steps",
    )
    steps = range(planned.total + 1)
    assert [step for step in steps if planned.due(step, planned.evaluate_every)] == [10, 20, 25]
    assert [step for step in steps if planned.due(step, planned.checkpoint_every)] == [25]
    assert planned.due(20, planned.log_every) and not planned.due(20, None)


def test_ends_scale_with_the_batch_as_in_swins_code() -> None:
    changes = {"schedule__scale_ends": True, "optimizer__reference_batch": 512}
    rates_at = {"schedule__warmup_from": 5e-7, "schedule__end_at": 5e-6}
    planned = plan(samples=2048, batch_size=1024, schedule__warmup="2epochs", **changes, **rates_at)
    assert rates(planned)[0] == pytest.approx(1e-6)
    assert rates(planned)[-1] == pytest.approx(1e-5)
    with pytest.raises(ConfigError, match=r"scale_ends = true .*reference_batch, which is null"):
        plan(schedule__scale_ends=True)


def run_of(experiment: str) -> TrainConfig:
    folder = Path(__file__).parents[2] / "configs"
    with initialize_config_dir(str(folder), version_base=None):
        values = OmegaConf.to_container(compose("train", [f"experiment={experiment}"]))
    assert isinstance(values, dict)
    return parse(TrainConfig, {str(key): value for key, value in values.items() if key != "hydra"})


def test_deit_trains_for_300_epochs_and_evaluates_its_weights() -> None:
    run = run_of("deit_small")
    assert build_schedule(run, 1_281_167).total == 300 * (1_281_167 // 1024)
    assert run.ema is None


@pytest.mark.parametrize(
    ("experiment", "first", "peak", "last"),
    [("swin_tiny", 1e-6, 1e-3, 1e-5), ("simmim_swin_base", 4e-6, 8e-4, 4e-5)],
)
def test_rates_are_those_of_the_official_code_at_its_batch(
    experiment: str, first: float, peak: float, last: float
) -> None:
    planned = build_schedule(run_of(experiment), 1_281_167)
    assert lr_at(0, planned) == pytest.approx(first)
    assert lr_at(planned.total, planned) == pytest.approx(last)
    assert planned.peak == pytest.approx(peak)


def test_deit3_is_fine_tuned_by_the_originals_command() -> None:
    run = run_of("deit3_base_finetune")
    planned = build_schedule(run, 1_281_167)
    assert (run.duration, run.batch_size, run.data.image_size) == ("20epochs", 8 * 64, 224)
    assert (run.optimizer.name, run.optimizer.weight_decay, run.loss.kind) == (
        "adamw",
        0.1,
        "cross_entropy",
    )
    assert lr_at(planned.warmup, planned) == lr_at(planned.total, planned) == 1e-5
    augment = run.augment
    assert (augment.mixup, augment.cutmix, augment.label_smoothing) == (0.8, 1.0, 0.1)
    assert (augment.erase, augment.repeats) == (0.0, 1)
    assert augment.policy == "timm:rand-m9-mstd0.5-inc1"
    assert run.preprocess.crop_ratio == 1.0
