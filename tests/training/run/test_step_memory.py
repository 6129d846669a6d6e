"""Estimated memory of a step against torch's own allocator, and what a run does with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import small_config, status, words
from small_tasks import TASKS, a_teacher

from vision.checkpoints.open import open_model
from vision.cli.app import main
from vision.training.configs import TrainConfig
from vision.training.job import TrainingJob, build_job
from vision.training.loop import train
from vision.training.run import step_memory
from vision.training.run.distributed import World
from vision.training.run.run_folder import Run
from vision.training.run.step_memory import StepMemory, control_group_limit, device_memory
from vision.training.run.stop import StopRequest
from vision.training.step import forward_backward, update

ALONE = World(0, 1, torch.device("cpu"))


def allocated(action: Callable[[], object]) -> tuple[int, int]:
    """Bytes that an action leaves allocated, and the most at a time, by torch's profiler."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        action()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = peak = 0
    for _, size in changes:
        now += size
        peak = max(peak, now)
    return now, peak


def measured(job: TrainingJob) -> int:
    """Peak of a step of a run that has taken one before."""
    state, batch = job.state, job.task.trial_batch(job.micro_batch)

    def backward() -> None:
        forward_backward(job.task, job.module, [batch] * job.order.accumulation, state.scaler, 0)

    backward()
    update(state, job.config)
    moments = [t for s in state.optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    weights = [*state.model.parameters(), *state.model.buffers(), *(state.average or {}).values()]
    lasting = sum(tensor.nbytes for tensor in (*weights, *moments))
    gradients, in_backward = allocated(backward)
    _, in_update = allocated(lambda: update(state, job.config))
    return lasting + max(in_backward, gradients + in_update)


LARGER = ["model.width=64", "data.image_size=32"]


@pytest.mark.parametrize(
    ("settings", "model", "error"),
    [
        ([], "vit_mini", 0.02),
        (["precision=bf16", "ema=0.9", "model.dropout=0.1"], "vit_mini", 0.04),
        (["max_batch_per_device=2", "model.drop_path=0.2"], "swin_mini", 0.02),
        (["optimizer.name=muon", "precision=bf16"], "swinv2_mini", 0.05),
        (["tune=lora", "tune.rank=2", "model.checkpoint_activations=true"], "vit_mini", 0.08),
    ],
)
def test_estimate_is_what_the_allocator_gives(
    tmp_path: Path, settings: list[str], model: str, error: float
) -> None:
    config = small_config(tmp_path, *LARGER, *settings, model=model)
    job = build_job(config, Run(tmp_path / "run"), ALONE, StopRequest(), init=None)
    estimated = job.start.memory.peak(job.micro_batch)
    assert estimated == pytest.approx(measured(job), rel=error)


def memory_of(config: TrainConfig, world: World = ALONE) -> StepMemory:
    assert config.model.kind != "auto"
    return StepMemory(config, config.model, (16, 16), 3, 8, world)


def test_peak_grows_with_images_and_shrinks_with_shards(tmp_path: Path) -> None:
    settings = ["batch_size=64", "optimizer.name=sgd", "optimizer.betas=null", "optimizer.eps=null"]
    ddp = memory_of(small_config(tmp_path, *settings, "parallel=ddp"), World(0, 4, ALONE.device))
    fsdp = memory_of(small_config(tmp_path, *settings, "parallel=fsdp"), World(0, 4, ALONE.device))
    one, two, four = (ddp.peak(n) for n in (1, 2, 4))
    assert 2 * (two - one) == pytest.approx(four - two, rel=0.01)
    assert fsdp.peak(4) < ddp.peak(4)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the memory of the device."""

    def has(size: float) -> None:
        monkeypatch.setattr(step_memory, "device_memory", lambda device: int(size))

    return has


def test_run_far_above_the_memory_is_refused_before_any_work_with_what_fits(
    tmp_path: Path, memory: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    estimate = memory_of(small_config(tmp_path))
    memory(estimate.peak(2) / 0.85)
    large = ["batch_size=32", "duration=2steps", "max_batch_per_device=null"]
    assert main(["train", *words(tmp_path, *large)]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert "KiB at 32 images per device" in message and "max_batch_per_device=2:" in message
    assert "16 × 16 (data.image_size)" in message
    assert not list(tmp_path.iterdir())
    assert main(["train", *words(tmp_path, *large), "max_batch_per_device=2"]) == 0
    assert "may not fit" not in capsys.readouterr().out


def test_run_that_may_not_fit_is_warned_about(
    tmp_path: Path, memory: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    memory(memory_of(small_config(tmp_path)).peak(8) / 1.2)
    whole = small_config(tmp_path, "duration=2steps", "max_batch_per_device=null")
    assert train(whole) == 0
    output = capsys.readouterr().out
    assert "may not fit. Try max_batch_per_device=" in output


def test_auto_takes_the_largest_part_that_the_estimate_allows(
    tmp_path: Path, memory: Callable[[float], None]
) -> None:
    memory(memory_of(small_config(tmp_path)).peak(4) / 0.85)
    words = ["duration=2steps", "max_batch_per_device=auto"]
    assert train(small_config(tmp_path, *words)) == 0
    assert status(tmp_path)["micro_batch"] == 4


def test_model_far_above_the_memory_is_refused_without_counting_to_its_end(
    tmp_path: Path, memory: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    memory(2**20)
    huge = ["model.width=4096", "model.depth=400", "model.heads=8"]
    assert main(["train", *words(tmp_path, *huge)]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert "more than 8 MiB" in message and "a smaller model" in message


def test_weights_of_a_teacher_are_part_of_the_estimate(tmp_path: Path) -> None:
    teacher = open_model(a_teacher(tmp_path)).model
    peaks = []
    for more in ([], TASKS["distill"](tmp_path)):
        config = small_config(tmp_path, *more)
        model: Any = config.model
        peaks.append(StepMemory(config, model, (16, 16), 3, 8, ALONE).peak(8))
    assert peaks[1] - peaks[0] == sum(p.nbytes for p in teacher.parameters())


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": "5000"}, 5000),
        ("0::/job/step\n", {"job/step/memory.max": "70", "job/memory.max": "5000"}, 70),
        ("0::/not/visible\n", {"memory.max": "900"}, 900),
        ("0::/\n", {}, None),
        (
            "9:cpu,cpuacct:/a\n4:memory:/slurm/job\n0::/\n",
            {
                "memory/slurm/job/memory.limit_in_bytes": "800",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "a/memory.limit_in_bytes": "1",
            },
            800,
        ),
        ("", {"memory.max": "1"}, None),
    ],
    ids=["above", "own", "host's path", "none", "version 1", "no groups"],
)
def test_smallest_limit_of_a_group_and_those_above_it_counts(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int | None
) -> None:
    write(tmp_path / "cgroup", groups)
    for name, limit in limits.items():
        write(tmp_path / "fs" / name, f"{limit}\n")
    assert control_group_limit(tmp_path / "cgroup", tmp_path / "fs") == expected


def test_memory_of_a_cpu_is_limited_and_shared_by_its_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_memory, "control_group_limit", lambda *paths: 4096)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert device_memory(torch.device("cpu")) == 1024
    assert device_memory(torch.device("meta")) is None
