"""What a user can get wrong: one clear message, the documented exit code, no traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_runs import small_config, status, words
from started_runs import start

from vision.checkpoints.native.checkpoint import read_checkpoint
from vision.checkpoints.native.checkpoint_folder import latest
from vision.cli.app import main
from vision.config import ConfigError
from vision.training.job import build_job
from vision.training.run.distributed import World
from vision.training.run.run_folder import Run
from vision.training.run.stop import StopRequest

SHORT = ["duration=3steps", "evaluate_every=3steps"]


def train(folder: Path, *more: str, shapes: bool = True) -> int:
    return main(["train", *words(folder, *SHORT, *more, shapes=shapes)])


def message(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said on the error stream: a message and nothing else."""
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert "Traceback" not in text
    return text


def test_data_folder_that_does_not_exist_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "nowhere"
    assert train(tmp_path / "out", "data=folder", f"data.root={root}", shapes=False) == 2
    text = message(capsys)
    assert str(root) in text and "data.root" in text
    assert len(text.splitlines()) == 1
    assert not (tmp_path / "out" / "run").exists()


@pytest.mark.parametrize(("place", "code"), [("nowhere", 2), ("empty", 1)])
def test_checkpoint_that_does_not_exist_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, code: int
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["eval", f"checkpoint={tmp_path / place}"]) == code
    text = message(capsys)
    assert str(tmp_path / place) in text
    assert len(text.splitlines()) == 1


def test_checkpoint_damaged_or_of_another_kind_is_refused_by_eval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path) == 0
    best = latest(tmp_path / "run" / "checkpoints")[-1]
    whole = best.read_bytes()
    torch.save({"weight": torch.zeros(2)}, tmp_path / "foreign.pt")
    changed = bytearray(whole)
    tensor = read_checkpoint(best, prefix="model.").tensors["model.norm.weight"]
    changed[whole.rindex(tensor.numpy().tobytes())] ^= 1
    for name, content in (("cut", whole[:-10]), ("changed", bytes(changed))):
        (tmp_path / name).write_bytes(content)
    capsys.readouterr()
    for name in ("cut", "changed", "foreign.pt"):
        assert main(["eval", f"checkpoint={tmp_path / name}", "device=cpu"]) == 1
        assert str(tmp_path / name) in message(capsys)


def test_resume_with_another_model_shows_the_difference_or_what_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path) == 0
    stopped = status(tmp_path) | {"status": "preempted"}
    (tmp_path / "run" / "status.json").write_text(json.dumps(stopped))
    capsys.readouterr()
    assert train(tmp_path, "model.width=32") == 2
    assert "model.width: 16 → 32" in message(capsys)
    assert train(tmp_path, "model.width=32", "allow_changes=true") == 2
    text = message(capsys)
    assert "does not fit the model" in text and "16" in text and "32" in text
    assert train(tmp_path, "model.depth=3", "allow_changes=true") == 2
    assert "does not fit the model: missing ['blocks.2." in message(capsys)
    sgd = ["optimizer.name=sgd", "optimizer.betas=null"]
    assert train(tmp_path, *sgd, "allow_changes=true") == 2
    assert "optimizer.name: the run was started with adamw" in message(capsys)
    assert train(tmp_path, "ema=0.9", "allow_changes=true") == 2
    assert "averaged weights" in message(capsys)
    assert train(tmp_path) == 0  # nothing of this has harmed the run


def test_resume_with_changes_allowed_goes_on_with_the_new_settings(tmp_path: Path) -> None:
    assert train(tmp_path) == 0
    stopped = status(tmp_path) | {"status": "preempted"}
    (tmp_path / "run" / "status.json").write_text(json.dumps(stopped))
    changes = ["optimizer.weight_decay=0.25", "optimizer.betas=[0.8,0.9]"]
    changes.append("optimizer.layer_decay=0.5")
    assert train(tmp_path, *changes, "duration=4steps", "allow_changes=true") == 0
    newest = latest(tmp_path / "run" / "checkpoints")[0]
    groups = read_checkpoint(newest).record["optimizer"]["param_groups"]
    assert newest.name == "step_00000004.safetensors"
    assert {group["weight_decay"] for group in groups} == {0.25, 0.0}
    assert all(group["betas"] == {"$tuple": [0.8, 0.9]} for group in groups)
    assert {group["lr_scale"] for group in groups} == {1.0, 0.5, 0.25, 0.125}


def test_batch_that_processes_cannot_share_is_refused_with_what_would_fit(tmp_path: Path) -> None:
    config = small_config(tmp_path, "batch_size=9")
    world = World(0, 2, torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=r"batch_size = 9 cannot be shared equally by 2 .*multiple"
    ):
        build_job(config, Run(tmp_path / "run"), world, StopRequest(), init=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["batch_size=9"], "batch_size = 9 cannot be shared equally by 2 processes"),
        (["batch_size=2", "data.train_samples=1"], "has 1 images, fewer than one global batch"),
    ],
    ids=["batch not divisible", "more processes than images"],
)
def test_mistake_under_torchrun_ends_both_processes_with_one_message(
    tmp_path: Path, settings: list[str], expected: str
) -> None:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    process = start(sys.executable, *launch, "train.py", *words(tmp_path, *settings))
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "error: " in output and output.count(expected) == 1
    assert "vision/training" not in output  # no traceback into this project
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_fewer_validation_images_than_processes_are_counted_once(tmp_path: Path) -> None:
    settings = [*SHORT, "data.val_samples=1", "log.wandb=disabled"]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    process = start(sys.executable, *launch, "train.py", *words(tmp_path, *settings))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    alone = words(tmp_path / "alone", *settings)
    assert main(["train", *alone]) == 0
    both = [
        [json.loads(x) for x in (place / "run" / "metrics.jsonl").read_text().splitlines()][-1]
        for place in (tmp_path, tmp_path / "alone")
    ]
    assert both[0]["split"] == "val"
    assert both[0]["loss"] == pytest.approx(both[1]["loss"], rel=1e-4)


def test_fp16_on_a_cpu_is_allowed_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "precision=fp16") == 0
    assert "precision=fp16 on a CPU is slow" in capsys.readouterr().out


def test_output_below_a_file_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert train(tmp_path / "file") == 2
    assert f"{tmp_path / 'file' / 'run'} cannot be used: Not a directory" in message(capsys)


def test_mistake_from_the_shell_prints_one_line_and_exits_2(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "train.py", *words(tmp_path, "data.train_samples=4")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: the training set has 4 images, fewer than one global batch")
