"""The same answer however it is computed: any batch size, workers and number of processes."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from vision.cli.composition import compose
from vision.config import parse
from vision.evaluation.configs import EvalConfig
from vision.evaluation.evaluate_checkpoints import Processes, evaluate_checkpoints

IMAGES = 43
"""A prime number: no batch size and no number of processes divides it."""
SETTINGS = [
    *("data=shapes", "data.image_size=32", f"data.val_samples={IMAGES}", "data.train_samples=29"),
    *("image_size=32", "resamples=50", "neighbours=3", "probabilities=all", "gallery=2"),
]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {"patch_size": 8, "embed_dim": 192, "num_heads": 3}),
    "swin": ("swin_tiny_patch4_window7_224", {"window_size": 4, "embed_dim": 24}),
}
EXACT = ("top1", "top5", "balanced_accuracy", "macro_f1", "samples")


@pytest.fixture(scope="module", params=MODELS)
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that give many different answers."""
    name, arguments = MODELS[request.param]
    depths = {"depth": 2} if request.param == "vit" else {"depths": (2, 2), "num_heads": (2, 4)}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = timm.create_model(name, img_size=32, num_classes=8, **arguments, **depths)
        for parameter in model.parameters():
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp(request.param) / "weights.pth"
    torch.save(model.state_dict(), path)
    return path


def evaluate(
    weights: Path, folder: Path, *given: str, ranks: int = 1
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """The report and the predictions of so many processes, one after the other.

    The others come first and leave what they would send; the first one adds it to its own.
    """
    settings = [*SETTINGS, "loader.workers=0", *given]
    values, _ = compose("eval", [f"checkpoint={weights}", f"output={folder}", *settings])
    config = parse(EvalConfig, values)
    device = torch.device("cpu")
    sent: list[list[Tensor]] = []
    for rank in range(1, ranks):
        own: list[Tensor] = []

        def keep(tensor: Tensor, own: list[Tensor] = own) -> Tensor:
            own.append(tensor.clone())
            return tensor

        assert evaluate_checkpoints(config, Processes(device, rank, ranks, keep)) is None
        sent.append(own)

    def add(tensor: Tensor) -> Tensor:
        others = [own.pop(0) for own in sent]
        assert all(other.shape == tensor.shape for other in others)
        return torch.stack([tensor, *others]).sum(0)

    report = evaluate_checkpoints(config, Processes(device, 0, ranks, add))
    assert report is not None and not any(sent)
    return read(folder)


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    with (folder / "predictions.csv").open(newline="") as file:
        return report, list(csv.DictReader(file))


def assert_same(
    found: tuple[dict[str, Any], list[dict[str, str]]],
    expected: tuple[dict[str, Any], list[dict[str, str]]],
) -> None:
    """Every count is equal, every mean agrees to six digits, every image has the same answer."""
    (model,), (other,) = found[0]["models"], expected[0]["models"]
    assert {name: model["metrics"][name] for name in EXACT} == {
        name: other["metrics"][name] for name in EXACT
    }
    assert model["metrics"] == pytest.approx(other["metrics"], rel=1e-6)
    for name in ("confusion", "classes", "confused", "neighbours", "cost"):
        assert model[name] == other[name], name
    for name, limits in model["intervals"].items():
        assert limits == pytest.approx(other["intervals"][name], rel=1e-6), name
    for part in ("all", "temperature"):
        assert_close(model["calibration"][part], other["calibration"][part])
    for row, same in zip(found[1], expected[1], strict=True):
        assert row.keys() == same.keys()
        for key, value in row.items():
            if key == "loss" or key.startswith(("label_probability", "probability", "p(")):
                assert float(value) == pytest.approx(float(same[key]), rel=2e-6, abs=1e-7), key
            else:
                assert value == same[key], key


def assert_close(found: Any, expected: Any) -> None:
    """Whole numbers are equal, others agree to five digits (a temperature is found by search)."""
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert_close(value, expected[key])
    elif isinstance(found, list):
        for value, other in zip(found, expected, strict=True):
            assert_close(value, other)
    elif isinstance(found, float):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    else:
        assert found == expected


def check_divisions(weights: Path, folder: Path, divisions: list[tuple[int, int, int]]) -> None:
    """The same answer for each batch size, number of workers and number of processes."""
    whole = evaluate(weights, folder / "whole", f"batch_size={IMAGES}")
    assert whole[0]["images"] == IMAGES == len(whole[1])
    assert len({row["predicted"] for row in whole[1]}) >= 3  # or counts would say little
    for index, (batch_size, workers, ranks) in enumerate(divisions):
        given = [f"batch_size={batch_size}", f"loader.workers={workers}"]
        found = evaluate(weights, folder / str(index), *given, ranks=ranks)
        assert_same(found, whole)


def test_answer_is_the_same_for_any_batch_size_workers_and_processes(
    weights: Path, tmp_path: Path
) -> None:
    check_divisions(weights, tmp_path, [(5, 2, 1), (1, 0, 3)])


@pytest.mark.slow
def test_answer_is_the_same_for_more_batch_sizes_and_processes(
    weights: Path, tmp_path: Path
) -> None:
    divisions = [(1, 0, 1), (7, 0, 1), (64, 1, 1), (6, 0, 2), (64, 0, 2), (4, 0, 3), (1, 0, 5)]
    check_divisions(weights, tmp_path, divisions)


@pytest.mark.slow
def test_two_real_processes_give_the_answer_of_one(weights: Path, tmp_path: Path) -> None:
    alone = evaluate(weights, tmp_path / "one", "batch_size=43")
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "eval.py"]
    given = [f"checkpoint={weights}", f"output={tmp_path / 'two'}", "batch_size=6"]
    result = subprocess.run(
        [sys.executable, *launch, *SETTINGS, *given, "device=cpu", "loader.workers=1"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert_same(read(tmp_path / "two"), alone)
