"""A multi-label run in the other commands: eval, predict, visualize, export and convert."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from eval_calls import Capture, evaluate, refused
from PIL import Image
from sklearn.metrics import average_precision_score
from small_runs import SMALL, SMALL_MODELS
from untrained_runs import a_run

import vision
from vision.cli.app import main
from vision.data.sources.shapes import ShapesTwo

CLASSES = ("blue", "green", "red")
COLOURS = {"blue": (20, 20, 230), "green": (20, 200, 20), "red": (230, 20, 20)}


def write_table(root: Path, images: int = 40) -> Path:
    """Images of one to three stripes, whose colours are the labels; some labels are unknown."""
    random = np.random.default_rng(0)
    rows: list[list[object]] = [["path", *CLASSES, "split"]]
    for number in range(images):
        present = random.random(3) < 0.5
        shown = [COLOURS[c] for c, there in zip(CLASSES, present, strict=True) if there]
        pixels = np.full((16, 16, 3), 120, np.uint8)
        for place, colour in enumerate(shown):
            pixels[:, 5 * place : 5 * place + 5] = colour
        Image.fromarray(pixels).save(root / f"{number}.png")
        cells = ["" if random.random() < 0.1 else int(there) for there in present]
        rows.append([f"{number}.png", *cells, "val" if number % 3 == 0 else "train"])
    with (root / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return root / "labels.csv"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few steps on a table with unknown labels."""
    folder = tmp_path_factory.mktemp("run")
    table = write_table(folder)
    settings = [*SMALL_MODELS["vit_mini"], *SMALL, "duration=6steps", "evaluate_every=6steps"]
    data = ["data=folder", f"data.root={folder}", f"data.table={table}"]
    more = ["task=multi_label", "task.pos_weight=balanced", f"output={folder}", "name=run"]
    assert main(["train", *settings, *data, *more]) == 0
    return folder / "run"


def test_eval_reports_metrics_and_average_precision_of_each_class(
    run: Path, capsys: Capture
) -> None:
    evaluate(capsys, f"checkpoint={run}", "probabilities=all")
    folder = run / "evaluation" / "val"
    report = json.loads((folder / "report.json").read_text())
    (model,) = report["models"]
    assert report["task"] == "multi_label"
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    with (run.parent / "labels.csv").open() as file:
        labels = {row["path"]: row for row in csv.DictReader(file)}
    own = [labels[Path(row["name"]).name] for row in rows]
    for found in model["classes"]:
        name = found["name"]
        known = [i for i, row in enumerate(own) if row[name]]
        truth = [int(own[i][name]) for i in known]
        chances = [float(rows[i][f"p({name})"]) for i in known]
        expected = average_precision_score(truth, chances)
        assert found["average_precision"] == pytest.approx(expected, abs=1e-6)
        assert found["known"] == len(known)
    present = [float(rows[0][f"p({c['name']})"]) >= c["threshold"] for c in model["classes"]]
    chosen = [c["name"] for c, there in zip(model["classes"], present, strict=True) if there]
    assert rows[0]["predicted"] == ";".join(chosen)
    trained = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [event for event in trained if event["split"].startswith("val")][-1]
    for name in ("map", "micro_f1", "macro_f1", "sample_f1", "loss"):
        assert model["metrics"][name] == pytest.approx(last[name], abs=1e-6), name
    assert "labelGallerySection" in (folder / "report.html").read_text()


def test_eval_refuses_images_with_one_class_and_neighbours(
    run: Path, tmp_path: Path, capsys: Capture
) -> None:
    shapes = ["data=shapes", "data.val_samples=8", "save=false"]
    assert "task=multi_label, but these images have one" in refused(
        capsys, f"checkpoint={run}", *shapes
    )
    assert "use neighbours=0" in refused(capsys, f"checkpoint={run}", "neighbours=2", "save=false")
    single = a_run(tmp_path / "single")
    two = ["data=shapes_two", "data.val_samples=8", "save=false"]
    assert "train one with task=multi_label" in refused(capsys, f"checkpoint={single}", *two)


def test_predict_lists_all_classes_at_or_above_their_thresholds(run: Path, capsys: Capture) -> None:
    loaded = vision.load(run)
    image = run.parent / "0.png"
    prediction = loaded.predict(image, top=3)
    assert prediction.present is not None
    chances = dict(prediction.top)
    assert sum(chances.values()) != pytest.approx(1)  # sigmoids
    limits = dict(zip(loaded.classes, loaded.opened.thresholds, strict=True))
    expected = [name for name, chance in prediction.top if chance >= limits[name]]
    capsys.readouterr()
    assert main(["predict", f"checkpoint={run}", str(image), "format=jsonl", "device=cpu"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert [entry["label"] for entry in line["labels"]] == expected
    assert main(["predict", f"checkpoint={run}", str(image), "format=csv", "device=cpu"]) == 0
    header, row = csv.reader(capsys.readouterr().out.splitlines())
    assert row[header.index("labels")] == ";".join(expected)
    assert main(["predict", f"checkpoint={run}", str(image), "format=table", "device=cpu"]) == 0
    assert capsys.readouterr().out.count("✓") == len(expected)


def test_export_and_conversion_carry_labels_and_thresholds(run: Path, tmp_path: Path) -> None:
    words = ["format=safetensors", f"output={tmp_path / 'export'}"]
    assert main(["export", f"checkpoint={run}", *words]) == 0
    loaded = vision.load(run)
    limits = json.loads((tmp_path / "export" / "thresholds.json").read_text())
    assert list(limits.items()) == list(zip(loaded.classes, loaded.opened.thresholds, strict=True))
    assert "1 / (1 + np.exp(-logits[0]))" in (tmp_path / "export" / "README.md").read_text()
    output = tmp_path / "again.safetensors"
    assert main(["convert", f"source={run}", "format=vision", f"output={output}"]) == 0
    again = vision.load(output).opened
    assert again.multi_label
    assert again.thresholds == loaded.opened.thresholds


def test_figures_show_the_sigmoid_of_each_class(run: Path, tmp_path: Path) -> None:
    from vision.inspection.explain import explain

    loaded = vision.load(run)
    pixels = loaded.pixels(run.parent / "1.png")
    (explanation,) = explain(loaded, [pixels], classes=[0, 1, 2])
    chances = dict(loaded.predict(run.parent / "1.png", top=3).top)
    for entry in explanation.top:
        assert entry.probability == pytest.approx(chances[entry.name], abs=1e-5)
    explained = [h.explained.name for h in explanation.heatmaps if h.explained is not None]
    assert set(explained) == set(CLASSES)  # a map for each class


def test_fine_tuning_for_one_class_per_image_is_softmax_again(tmp_path: Path) -> None:
    source = ShapesTwo((16, 16), 0, "test", 1)
    small = [*SMALL_MODELS["vit_mini"], *SMALL, "data.train_samples=16", "data.val_samples=8"]
    short = ["duration=2steps", "evaluate_every=2steps", "schedule.warmup=1steps"]
    place = f"output={tmp_path}"
    two = ["task=multi_label", "data=shapes_two", "name=two", place]
    assert main(["train", *small, *short, *two]) == 0
    one = [f"init={tmp_path / 'two'}", "name=one", place]
    assert main(["train", *small, *short, *one]) == 0
    prediction = vision.load(tmp_path / "one").predict(source.read(0), top=8)
    assert prediction.present is None
    assert sum(chance for _, chance in prediction.top) == pytest.approx(1)
