"""`vision eval` as a user meets it, on small runs that were really trained."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eval_calls import SMALL, Capture, evaluate, refused
from PIL import Image
from sklearn import metrics as sklearn_metrics
from small_runs import small_config, words

from vision.checkpoints.native.checkpoint import read_checkpoint, write_checkpoint
from vision.cli.app import main
from vision.data.sources.build_source import build_source

QUICK = ["duration=6steps", "evaluate_every=6steps", "schedule.warmup=1steps"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders a, b (ViT, other seed) and swin, each with a finished run on the same images."""
    folder = tmp_path_factory.mktemp("runs")
    for name, model, more in (
        ("a", "vit_mini", ["ema=0.5"]),
        ("b", "vit_mini", ["seed=1"]),
        ("swin", "swin_mini", []),
    ):
        given = words(folder, *QUICK, *more, model=model)
        assert main(["train", *given, f"name={name}"]) == 0
    return folder


def write_images(root: Path, folder: Path, *, classes: int = 8) -> Path:
    """The validation images of the small runs as PNG files, a folder per class."""
    source = build_source(small_config(root).data, "val")
    for index in range(len(source)):
        label = int(source.labels[index])
        if label < classes:
            place = folder / "val" / source.classes[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.asarray(source.read(index))).save(place / f"{index:03d}.png")
    return folder


def test_files_agree_with_each_other_and_with_scikit_learn(
    runs: Path, tmp_path: Path, capsys: Capture
) -> None:
    given = [f"checkpoint={runs / 'a'}", f"output={tmp_path / 'out'}", "probabilities=all"]
    printed = evaluate(capsys, *given)
    stored = json.loads((tmp_path / "out" / "report.json").read_text())
    with (tmp_path / "out" / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = stored["class_names"]
    labels = [names.index(row["label"]) for row in rows]
    chances = np.array([[float(row[f"p({name})"]) for name in names] for row in rows])
    answers = chances.argmax(1)
    (model,) = stored["models"]
    assert printed["models"][0]["metrics"] == model["metrics"]
    assert model["weights"] == "ema" and len(rows) == stored["images"] == 24
    metrics = model["metrics"]
    assert metrics["top1"] == sklearn_metrics.accuracy_score(labels, answers)
    assert metrics["top5"] == pytest.approx(
        sklearn_metrics.top_k_accuracy_score(labels, chances, k=5, labels=range(8))
    )
    chances /= chances.sum(1, keepdims=True)
    loss = sklearn_metrics.log_loss(labels, chances, labels=range(8))
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["nll"] == pytest.approx(loss, rel=1e-6)
    confusion = np.zeros((8, 8), dtype=int)
    for actual, predicted, count in model["confusion"]:
        confusion[actual, predicted] = count
    assert np.array_equal(confusion, sklearn_metrics.confusion_matrix(labels, answers))
    for row, answer in zip(rows, answers, strict=True):
        assert row["predicted"] == row["top1"] == names[answer]
        assert row["correct"] == str(row["label"] == row["predicted"])
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
    assert (tmp_path / "out" / "confusion.png").read_bytes().startswith(b"\x89PNG")


def test_files_are_by_default_in_the_folder_of_the_run(runs: Path, capsys: Capture) -> None:
    given = ["resamples=0", "predictions=none", "gallery=0"]
    evaluate(capsys, f"checkpoint={runs / 'b'}", *given)
    evaluate(capsys, f"checkpoint={runs / 'b'}", *given, "augmentation=flip", "split=test")
    found = {str(p.relative_to(runs / "b" / "evaluation")) for p in runs.glob("b/evaluation/*/*")}
    folders = ("val", "test-flip")
    names = ("report.json", "report.html", "confusion.png")
    assert found == {f"{folder}/{name}" for folder in folders for name in names}


def test_flips_at_test_time_are_reported_beside_the_usual_numbers(
    runs: Path, tmp_path: Path, capsys: Capture
) -> None:
    given = [f"checkpoint={runs / 'a'}", f"output={tmp_path / 'out'}"]
    (usual,) = evaluate(capsys, *given)["models"]
    (averaged,) = evaluate(capsys, *given, "augmentation=flip")["models"]
    (found,) = evaluate(capsys, *given, "flip_test=true")["models"]
    for numbers in ("metrics", "intervals"):
        flipped = {f"{name}_flipped": value for name, value in averaged[numbers].items()}
        flipped.pop("samples_flipped", None)
        assert found[numbers] == usual[numbers] | flipped
    assert found["calibration"] == usual["calibration"]
    assert main(["eval", *SMALL, *given, "flip_test=true"]) == 0
    printed = capsys.readouterr().out
    assert f"{100 * found['metrics']['top1_flipped']:.2f} %" in printed
    assert "top-1 accuracy, with flips" in printed
    stored = json.loads((tmp_path / "out" / "report.json").read_text())
    assert stored["models"][0]["metrics"] == found["metrics"]
    assert "flip_test" in refused(capsys, *given, "flip_test=true", "augmentation=ten_crop")


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Counts are equal, means agree to six digits."""
    for model, other in zip(found["models"], expected["models"], strict=True):
        assert model["metrics"] == pytest.approx(other["metrics"], rel=1e-6)
        for name in ("top1", "top5", "balanced_accuracy", "samples"):
            assert model["metrics"][name] == other["metrics"][name]
        for name, limits in model["intervals"].items():
            assert limits == pytest.approx(other["intervals"][name], rel=1e-6)
        temperature = other["calibration"]["temperature"]["temperature"]
        assert model["calibration"]["temperature"]["temperature"] == pytest.approx(
            temperature, rel=1e-5
        )


@pytest.mark.slow
def test_two_processes_give_the_same_numbers_and_files_as_one(
    runs: Path, tmp_path: Path, capsys: Capture
) -> None:
    given = [f"checkpoint=[{runs / 'a'},{runs / 'swin'}]", "batch_size=5", "neighbours=3"]
    alone = evaluate(capsys, *given, f"output={tmp_path / 'one'}")
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "eval.py"]
    result = subprocess.run(
        [sys.executable, *launch, *SMALL, "format=json", *given, f"output={tmp_path / 'two'}"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    together = json.loads(result.stdout)
    assert_same(together, alone)
    assert [m["neighbours"] for m in together["models"]] == [
        m["neighbours"] for m in alone["models"]
    ]
    for name in ("a", "swin"):
        tables = [tmp_path / place / f"predictions-{name}.csv" for place in ("one", "two")]
        samples = [[row["sample"] for row in csv.DictReader(t.open(newline=""))] for t in tables]
        assert samples[0] == samples[1] == [str(i) for i in range(24)]


def test_same_images_in_folders_of_another_order_give_the_same_numbers(
    runs: Path, tmp_path: Path, capsys: Capture
) -> None:
    root = write_images(runs, tmp_path / "images")
    direct = evaluate(capsys, f"checkpoint={runs / 'a'}", "save=false")
    given = ["data=folder", f"data.root={root}", "data.image_size=224", "save=false"]
    found = evaluate(capsys, f"checkpoint={runs / 'a'}", *given)
    for name in ("top1", "top5", "samples", "balanced_accuracy"):
        expected = direct["models"][0]["metrics"][name]
        assert found["models"][0]["metrics"][name] == pytest.approx(expected, rel=1e-12)
    assert found["models"][0]["metrics"]["loss"] == pytest.approx(
        direct["models"][0]["metrics"]["loss"], rel=1e-6
    )
    assert any("another order" in note for note in found["notes"])
    assert any("data.image_size = 224" in note for note in found["notes"])


def test_data_with_some_of_the_classes_is_evaluated_among_all_of_them(
    runs: Path, tmp_path: Path, capsys: Capture
) -> None:
    root = write_images(runs, tmp_path / "images", classes=3)
    given = ["data=folder", f"data.root={root}", f"output={tmp_path / 'out'}"]
    found = evaluate(capsys, f"checkpoint={runs / 'a'}", *given)
    assert found["images"] == 9
    assert any("3 of the 8 classes" in note for note in found["notes"])
    stored = json.loads((tmp_path / "out" / "report.json").read_text())
    rows = stored["models"][0]["classes"]
    assert [row["images"] for row in rows] == [3, 3, 3, 0, 0, 0, 0, 0]
    assert rows[7]["recall"] is None


def test_data_with_other_classes_is_refused_by_name(
    runs: Path, tmp_path: Path, capsys: Capture
) -> None:
    root = write_images(runs, tmp_path / "images")
    (root / "val" / "blue striped disc").rename(root / "val" / "blue striped discs")
    text = refused(capsys, f"checkpoint={runs / 'a'}", "data=folder", f"data.root={root}")
    assert "1 of the 8 classes of the data are unknown" in text
    assert "blue striped discs: Did you mean 'blue striped disc'?" in text


def test_empty_folder_is_refused(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "val").mkdir()
    text = refused(capsys, f"checkpoint={runs / 'a'}", "data=folder", f"data.root={tmp_path}")
    assert str(tmp_path) in text and "no images" in text


def test_image_of_0_bytes_is_named_or_skipped_and_reported(
    runs: Path, tmp_path: Path, capsys: Capture
) -> None:
    root = write_images(runs, tmp_path / "images")
    empty = next(root.rglob("*.png"))
    empty.write_bytes(b"")
    given = [f"checkpoint={runs / 'a'}", "data=folder", f"data.root={root}", "save=false"]
    text = refused(capsys, *given, code=1)
    assert str(empty) in text and "0 bytes" in text
    skip = ["data.on_error=skip", "data.max_error_share=0.1"]
    found = evaluate(capsys, *given, *skip)
    assert found["images"] == found["models"][0]["metrics"]["samples"] == 23
    assert found["skipped"] == [str(empty)]


def test_checkpoint_of_a_future_version_is_refused(
    runs: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, record = read_checkpoint(runs / "a" / "checkpoints" / "best.safetensors")
    with monkeypatch.context() as future:
        future.setattr("vision.checkpoints.native.header.FORMAT", 99)
        write_checkpoint(tmp_path / "new.safetensors", tensors, {**record, "format": 99})
    text = refused(capsys, f"checkpoint={tmp_path / 'new.safetensors'}", code=1)
    assert "new.safetensors" in text and "format 99" in text


def test_several_checkpoints_are_compared_with_the_first(
    runs: Path, tmp_path: Path, capsys: Capture
) -> None:
    both = f"checkpoint=[{runs / 'a'},{runs / 'b'},{runs / 'a'}]"
    found = evaluate(capsys, both, f"output={tmp_path}")
    first, second, again = found["models"]
    assert first["differences"] is None
    gap = second["metrics"]["loss"] - first["metrics"]["loss"]
    assert second["differences"]["loss"]["value"] == pytest.approx(gap)
    assert second["differences"]["loss"]["low"] <= gap <= second["differences"]["loss"]["high"]
    assert all(d["low"] == d["high"] == 0 for d in again["differences"].values())
    assert len({model["name"] for model in found["models"]}) == 3
    assert len(list(tmp_path.glob("predictions-*.csv"))) == 3
    capsys.readouterr()
    assert main(["eval", *SMALL, both, "save=false"]) == 0
    table = capsys.readouterr().out
    assert "Difference from" in table and "undecided" in table


def test_checkpoints_of_different_data_are_not_compared(
    runs: Path, tmp_path: Path, capsys: Capture
) -> None:
    other = words(tmp_path, "duration=1steps", "evaluate_every=1steps", "schedule.warmup=0steps")
    assert main(["train", *other, "data.seed=5"]) == 0
    both = f"checkpoint=[{runs / 'a'},{tmp_path / 'run'}]"
    assert "trained on different data" in refused(capsys, both, "save=false")
    found = evaluate(capsys, both, "save=false", "data=shapes", "data.val_samples=16")
    assert found["images"] == 16


def test_raw_and_averaged_weights_give_different_numbers(runs: Path, capsys: Capture) -> None:
    losses = {}
    for weights in ("raw", "ema", "auto"):
        found = evaluate(capsys, f"checkpoint={runs / 'a'}", "save=false", f"weights={weights}")
        losses[weights] = found["models"][0]["metrics"]["loss"]
    assert losses["auto"] == losses["ema"] != losses["raw"]
    assert "weights=ema" in refused(capsys, f"checkpoint={runs / 'b'}", "weights=ema")


def test_another_geometry_changes_the_numbers_but_not_the_images(
    runs: Path, capsys: Capture
) -> None:
    call = [f"checkpoint={runs / 'swin'}", "save=false"]
    usual = evaluate(capsys, *call)["models"][0]["metrics"]
    for given in ("image_size=[16,24]", "model.window=2", "preprocess.crop_ratio=0.7"):
        other = evaluate(capsys, *call, given)["models"][0]["metrics"]
        assert other["samples"] == usual["samples"]
        assert other["loss"] != usual["loss"]
        assert other["loss"] == pytest.approx(usual["loss"], rel=0.3)


def test_window_of_a_model_without_windows_is_refused(runs: Path, capsys: Capture) -> None:
    assert "only a Swin has windows" in refused(
        capsys, f"checkpoint={runs / 'a'}", "model.window=2"
    )


def test_neighbours_are_those_that_scikit_learn_finds(runs: Path, capsys: Capture) -> None:
    from sklearn.neighbors import KNeighborsClassifier

    from vision.checkpoints.open import open_model
    from vision.data.images.decode import open_image
    from vision.data.preprocess import evaluation_pixels, normalizer

    found = evaluate(capsys, f"checkpoint={runs / 'swin'}", "save=false", "neighbours=4")
    stored = open_model(runs / "swin")
    normalize = normalizer(stored.preprocess, torch.device("cpu"))

    def features(split: Any) -> tuple[np.ndarray, np.ndarray]:
        assert stored.record is not None and stored.record.config.data is not None
        source = build_source(stored.record.config.data, split)
        opened = [open_image(source.read(i), 3, "") for i in range(len(source))]
        pixels = np.stack([evaluation_pixels(p, stored.preprocess) for p in opened])
        images = normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2))
        with torch.no_grad():
            tokens = stored.model.forward_features(images)
        return tokens.mean(1).numpy(), source.labels

    peer = KNeighborsClassifier(4, metric="cosine", weights=lambda d: np.exp((1 - d) / 0.07))
    peer.fit(*features("train"))
    expected = peer.score(*features("val"))
    assert found["models"][0]["neighbours"] == {"k": 4, "top1": expected}
    text = refused(capsys, f"checkpoint={runs / 'swin'}", "neighbours=41", "save=false")
    assert "neighbours = 41, but there are only 40 training images" in text


def test_parquet_has_the_rows_of_the_csv_file(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    for kind in ("csv", "parquet"):
        given = [f"checkpoint={runs / 'a'}", f"output={tmp_path}", f"predictions={kind}"]
        evaluate(capsys, *given)
    with (tmp_path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    table = parquet.read_table(tmp_path / "predictions.parquet").to_pylist()
    assert [{key: str(value) for key, value in row.items()} for row in table] == rows


def test_parquet_without_pyarrow_is_refused_before_any_work(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vision.evaluation.report.report_files.find_spec", lambda name: None)
    text = refused(capsys, f"checkpoint={runs / 'a'}", "predictions=parquet")
    assert "needs pyarrow" in text and "predictions=csv" in text


def test_output_that_cannot_be_written_is_named(
    runs: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "file").write_text("")
    text = refused(capsys, f"checkpoint={runs / 'a'}", f"output={tmp_path / 'file' / 'x'}")
    assert f"{tmp_path / 'file'} is not a folder" in text and "output" in text


def test_table_for_people_has_the_numbers_of_the_report(runs: Path, capsys: Capture) -> None:
    found = evaluate(capsys, f"checkpoint={runs / 'a'}", "save=false")["models"][0]
    assert main(["eval", *SMALL, f"checkpoint={runs / 'a'}", "save=false"]) == 0
    text = capsys.readouterr().out
    for name in ("top1", "loss", "brier", "ece", "macro_f1"):
        value = found["metrics"][name]
        share = name in ("top1", "top5", "balanced_accuracy", "macro_f1")
        assert (f"{100 * value:.2f} %" if share else f"{value:.4f}") in text
    assert "worst classes" in text and f"{found['cost']['parameters']:,}" in text
