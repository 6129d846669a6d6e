"""`vision average` against plain means of state dicts, and a brute-force greedy soup."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetune_runs import base_run, tuned_config
from sklearn.metrics import average_precision_score, f1_score
from small_runs import folder_of_images, words
from torch import Tensor

import vision
from vision.checkpoints.native.header import read_record
from vision.checkpoints.open import open_model
from vision.cli.app import main
from vision.data.sources.build_source import build_source
from vision.training.loop import train

QUICK = ["duration=10steps", "evaluate_every=10steps", "schedule.warmup=1steps"]
SMALL = ["device=cpu", "loader.workers=0"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A first run, three that start from it, one of them with LoRA, and a Swin."""
    folder = tmp_path_factory.mktemp("runs")
    base_run(folder / "base", "optimizer.learning_rate=5e-3")
    settings = {
        "one": ["optimizer.learning_rate=2e-3"],
        "two": ["optimizer.learning_rate=5e-3", "seed=1", "ema=0.5"],
        "lora": ["tune=lora", "tune.rank=2", "optimizer.learning_rate=2e-2", "seed=2"],
    }
    for name, more in settings.items():
        assert train(tuned_config(folder / name, folder / "base/run", *more)) == 0
    assert main(["train", *words(folder / "swin", *QUICK, model="swin_mini")]) == 0
    return folder


def members(runs: Path) -> list[str]:
    return [str(runs / name / "run") for name in ("one", "two", "lora")]


def averaged(capsys: Capture, output: Path, *given: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["average", *SMALL, "format=json", f"output={output}", *given]) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def refused(capsys: Capture, output: Path, *given: str) -> str:
    capsys.readouterr()
    assert main(["average", *SMALL, f"output={output}", *given]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "Traceback" not in said
    return said


def tensors(place: str | Path) -> dict[str, Tensor]:
    """The weights as the model uses them: those of LoRA are merged."""
    return dict(open_model(place).model.state_dict())


def accuracy(state: dict[str, Tensor], place: str) -> float:
    """Top-1 on the validation images, without any of the evaluation's code."""
    opened = open_model(place)
    opened.model.load_state_dict(state)
    assert opened.record is not None
    assert opened.record.config.data is not None
    source = build_source(opened.record.config.data, "val")
    preprocess = opened.preprocess
    mean, std = (torch.tensor(v)[:, None, None] for v in (preprocess.mean, preprocess.std))
    right = 0
    with torch.no_grad():
        for index in range(len(source)):
            pixels = torch.tensor(source.read(index)).permute(2, 0, 1) / 255
            logits = opened.model(((pixels - mean) / std)[None])
            right += int(logits.argmax() == int(source.labels[index]))
    return right / len(source)


def plain_mean(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum(s[name] for s in states) / len(states) for name in states[0]}  # type: ignore[misc]


def test_uniform_soup_is_the_plain_mean(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "soup.safetensors"
    report = averaged(capsys, output, *members(runs))
    expected = plain_mean([tensors(place) for place in members(runs)])
    found = tensors(output)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    assert report["metrics"]["top1"] == pytest.approx(accuracy(found, str(output)))
    for member, place in zip(report["members"], members(runs), strict=True):
        assert member["used"]
        assert member["metrics"]["top1"] == pytest.approx(accuracy(tensors(place), place))
    assert read_record(output)["average"]["members"] == report["members"]


def test_a_soup_opens_everywhere(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "soup.safetensors"
    report = averaged(capsys, output, *members(runs))
    capsys.readouterr()
    evaluation = ["eval", *SMALL, f"checkpoint={output}", "save=false", "format=json"]
    assert main(evaluation) == 0
    stored = json.loads(capsys.readouterr().out)["models"][0]["metrics"]
    assert stored["top1"] == pytest.approx(report["metrics"]["top1"])
    assert vision.load(str(output)).opened.class_names == open_model(members(runs)[0]).class_names
    config = tuned_config(tmp_path, output, "duration=1steps", "schedule.warmup=0steps")
    assert train(config) == 0


@pytest.mark.parametrize("metric", ["top1", "loss"])
def test_greedy_soup_equals_brute_force(
    metric: str, runs: Path, tmp_path: Path, capsys: Capture
) -> None:
    output = tmp_path / "soup.safetensors"
    places = [*members(runs), str(runs / "base/run")]
    report = averaged(capsys, output, "method=greedy", f"metric={metric}", *places)
    states = [tensors(place) for place in places]
    single = [member["metrics"][metric] for member in report["members"]]
    sign = 1 if metric == "top1" else -1
    order = sorted(range(len(places)), key=lambda i: -sign * single[i])

    def value(chosen: list[int]) -> float:
        mean = plain_mean([states[i] for i in chosen])
        if metric == "top1":
            return accuracy(mean, places[0])
        file = tmp_path / f"{'-'.join(map(str, chosen))}.safetensors"
        given = [places[i] for i in chosen]
        soup: float = averaged(capsys, file, *given)["metrics"]["loss"]
        return soup

    chosen, best = order[:1], single[order[0]]
    for number in order[1:]:
        tried = value([*chosen, number])
        if sign * tried >= sign * best:
            chosen, best = [*chosen, number], tried
    assert [member["used"] for member in report["members"]] == [
        i in chosen for i in range(len(places))
    ]
    assert report["metrics"][metric] == pytest.approx(best)
    assert sign * report["metrics"][metric] >= max(sign * v for v in single)
    expected = plain_mean([states[i] for i in chosen])
    for name, tensor in tensors(output).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("run", ["one", "lora"])
def test_wise_ends_are_the_start_and_the_result(
    run: str, runs: Path, tmp_path: Path, capsys: Capture
) -> None:
    result, start = runs / run / "run", runs / "base/run"
    images = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    logits = {}
    for alpha in (0.0, 0.25, 1.0):
        output = tmp_path / f"{alpha}.safetensors"
        report = averaged(capsys, output, str(result), "method=wise", f"alpha={alpha}")
        assert [m["checkpoint"].split("/")[-4] for m in report["members"]] == ["base", run]
        with torch.no_grad():
            logits[alpha] = open_model(output).model(images)
    with torch.no_grad():
        first, last = (open_model(place).model(images) for place in (start, result))
    assert logits[0.0].equal(first)
    assert logits[1.0].equal(last)
    between = tensors(tmp_path / "0.25.safetensors")
    ends = tensors(start), tensors(result)
    for name, tensor in between.items():
        torch.testing.assert_close(tensor, 0.75 * ends[0][name] + 0.25 * ends[1][name])


def test_wise_without_a_head_in_the_start_keeps_that_of_the_result(
    runs: Path, tmp_path: Path, capsys: Capture
) -> None:
    images = folder_of_images(tmp_path / "images", 12)
    other = ["data=folder", f"data.root={images}", "data.val_fraction=0.25"]
    config = tuned_config(tmp_path / "other", runs / "base/run", *other, data=False)
    assert train(config) == 0
    output = tmp_path / "wise.safetensors"
    result = tmp_path / "other/run"
    given = [*SMALL, str(result), "method=wise", "alpha=0", f"output={output}"]
    assert main(["average", *given]) == 0
    assert "has no head for these classes" in " ".join(capsys.readouterr().out.split())
    found = tensors(output)
    for name in ("head.weight", "head.bias"):
        assert found[name].equal(tensors(result)[name])
    assert found["blocks.0.mlp.fc1.weight"].equal(
        tensors(runs / "base/run")["blocks.0.mlp.fc1.weight"]
    )


def test_soup_of_several_labels_is_evaluated_and_opened_as_such(
    tmp_path: Path, capsys: Capture
) -> None:
    several = [*QUICK, "task=multi_label", "data=shapes_two", "augment=none"]
    for seed in (0, 1):
        assert main(["train", *words(tmp_path / str(seed), *several, f"seed={seed}")]) == 0
    places = [str(tmp_path / str(seed) / "run") for seed in (0, 1)]
    output = tmp_path / "soup.safetensors"
    report = averaged(capsys, output, *places)
    assert report["metric"] == "map"
    best = json.loads((tmp_path / "0/run/status.json").read_text())["best"]
    assert report["members"][0]["metrics"]["map"] == pytest.approx(best, rel=1e-6)
    loaded = vision.load(str(output))
    assert loaded.opened.multi_label
    assert loaded.opened.record is not None
    assert loaded.opened.record.config.data is not None
    source = build_source(loaded.opened.record.config.data, "val")
    found = loaded.predict([source.read(i) for i in range(len(source))], top=8)
    chances = np.array([[dict(p.top)[name] for name in loaded.classes] for p in found])
    expected = [average_precision_score(source.labels[:, c], chances[:, c]) for c in range(8)]
    assert report["metrics"]["map"] == pytest.approx(np.mean(expected), abs=1e-6)
    tuned = (chances >= np.array(loaded.opened.thresholds) - 1e-9).astype(int)
    usual = (chances >= 0.5).astype(int)
    for c in range(8):
        truth = source.labels[:, c]
        assert f1_score(truth, tuned[:, c]) >= f1_score(truth, usual[:, c], zero_division=0)
    said = refused(capsys, tmp_path / "x", *places, "metric=top1")
    assert "choose one of loss, map" in said
    assert main(["average", *SMALL, *places, f"output={tmp_path / 'table'}"]) == 0
    assert "micro_f1" in capsys.readouterr().out


def test_what_cannot_be_averaged_is_refused(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "x.safetensors"
    one, two, _ = members(runs)
    link = tmp_path / "latest"
    link.symlink_to(one)
    for given in ([one], [one, one], [one, str(link)]):
        assert "at least two runs" in refused(capsys, output, *given)
    said = refused(capsys, output, one, str(runs / "swin/run"))
    assert "swin" in said
    assert "model.kind" in said
    assert "needs one run, found 2" in refused(capsys, output, one, two, "method=wise")
    base = str(runs / "base/run")
    assert "not started from other weights" in refused(capsys, output, base, "method=wise")
    assert "alpha" in refused(capsys, output, one, "method=wise", "alpha=1.5")
    assert "no-such" in refused(capsys, output, one, "no-such")
    assert not output.exists()
    output.write_text("here already")
    assert "exists already" in refused(capsys, output, one, two)
