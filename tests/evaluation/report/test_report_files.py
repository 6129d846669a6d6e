"""The report's page: complete in one file, and in a browser what it says it is."""

import csv
import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chromium import chromium
from PIL import Image

from vision.evaluation.evaluate import Speed
from vision.evaluation.model_metrics import compare, compute_metrics, confident_mistakes
from vision.evaluation.neighbours import NeighboursAccuracy
from vision.evaluation.report.eval_report import (
    Cost,
    ModelReport,
    Report,
    short_names,
)
from vision.evaluation.report.report_files import page, write_predictions
from vision.inspection.explorer.self_contained import data_url
from vision.terminal import print_wide

HOSTILE = '</script><img src=x onerror="document.title=1">'


def made_up(
    classes: int, models: int, hostile: str = HOSTILE
) -> tuple[Report, list[list[dict[str, Any]]]]:
    """A report on made-up logits, and its galleries; one class has a hostile name."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(4 * classes) % classes
    names = (hostile, *(f"class {i}" for i in range(1, classes)))
    reports: list[ModelReport] = []
    galleries = []
    for number in range(models):
        logits = torch.randn(len(labels), classes, generator=generator)
        logits[torch.arange(len(labels)), labels] += 2.5 + number
        logits *= 2  # surer, so that confidences spread over several bins
        results = compute_metrics(logits, labels, names, bins=15, resamples=40, seed=0)
        differences = compare(results, reports[0].results) if reports else None
        reports.append(
            ModelReport(
                name=f"model {number}",
                checkpoint=Path(f"runs/{number}/checkpoints/best.safetensors"),
                step=1000,
                weights="ema",
                image_size=(224, 224),
                window=None,
                crop_ratio=0.875,
                results=results,
                neighbours=NeighboursAccuracy(20, 0.5),
                cost=Cost(28_000_000, 4_500_000_000),
                speed=Speed(812.0, 640.0),
                differences=differences,
            )
        )
        galleries.append(
            [
                {
                    "name": f"{mistake.row}.png",
                    "label": mistake.label,
                    "predicted": mistake.predicted,
                    "confidence": mistake.confidence,
                    "own": mistake.own,
                    "image": data_url(
                        Image.new("RGB", (32, 32), (mistake.label % 255, 90, 9)), 192, 64
                    ),
                }
                for mistake in confident_mistakes(logits, labels, 24)
            ]
        )
    report = Report(
        split="val",
        data="made up",
        images=len(labels),
        skipped=("a.png",),
        class_names=names,
        augmentation="none",
        settings={},
        models=tuple(reports),
        notes=("A note.",),
    )
    return report, galleries


def made_report(classes: int, models: int = 1) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """The same as plain data."""
    report, galleries = made_up(classes, models)
    return report.as_dict(), galleries


@pytest.mark.parametrize("name", ["[/b]", "[red]x[/red]", ":cat:", "[link=x]y[/link]"])
@pytest.mark.parametrize("models", [1, 2])
def test_tables_show_names_as_they_are(name: str, models: int) -> None:
    report, _ = made_up(3, models, hostile=f"class {name}")
    named = [replace(model, name=f"model {name} {i}") for i, model in enumerate(report.models)]
    report = replace(report, data=f"data {name}", notes=(f"note {name}",), models=tuple(named))
    stream = io.StringIO()
    print_wide(report.table(), stream)
    text = stream.getvalue()
    assert all(f"{word} {name}" in text for word in ("class", "data", "note", "model"))
    assert "[0." in text  # the intervals


def test_page_is_one_file_that_asks_for_nothing_else() -> None:
    text = page(*made_report(10, 2))
    assert not re.search(r"(https?:)?//(?!www\.w3\.org/2000/svg)[\w.-]+\.\w+/", text)
    assert not re.search(r"<link|@import|src=\"(?!data:)|url\((?!data:)", text.split("<script")[0])
    assert "default-src 'none'" in text
    for mark in ("/*STYLE*/", "/*DATA*/", "/*SCRIPT*/"):
        assert mark not in text


def test_page_holds_the_whole_report_whatever_classes_are_called() -> None:
    report, galleries = made_report(10)
    data = page(report, galleries).split('id="data">')[1].split("</script>")[0]
    held = json.loads(data)
    assert held["report"]["class_names"][0] == HOSTILE
    assert held["report"]["models"] == json.loads(json.dumps(report["models"]))
    assert held["galleries"] == galleries


def test_class_that_is_named_like_a_mark_of_the_template_stays_data() -> None:
    report, galleries = made_up(3, 1, hostile="/*SCRIPT*/")
    text = page(report.as_dict(), galleries)
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert data["report"]["class_names"][0] == "/*SCRIPT*/"


def test_confident_mistakes_are_wrong_and_sorted_by_confidence() -> None:
    logits = torch.tensor([[3.0, 0.0], [0.0, 1.0], [5.0, 0.0], [0.0, 2.0]])
    labels = torch.tensor([1, 1, 1, 0])
    found = confident_mistakes(logits, labels, 10)
    assert [(m.row, m.label, m.predicted) for m in found] == [(2, 1, 0), (0, 1, 0), (3, 0, 1)]
    assert found[0].confidence == pytest.approx(torch.tensor([5.0, 0.0]).softmax(0)[0].item())
    assert found[0].own == pytest.approx(1 - found[0].confidence)
    assert len(confident_mistakes(logits, labels, 1)) == 1


def test_csv_of_the_report_does_not_run_names_as_formulas_and_parquet_is_exact(
    tmp_path: Path,
) -> None:
    source = SimpleNamespace(name=lambda index: f"@photo{index}.png")
    answers: Any = SimpleNamespace(
        model=SimpleNamespace(classes=("=1+1", "dog"), source=source),
        predictions=SimpleNamespace(ids=torch.arange(2), logits=torch.eye(2)),
        labels=torch.tensor([0, 1]),
    )
    write_predictions(tmp_path / "predictions.csv", answers, "all")
    with (tmp_path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["'@photo0.png", "'@photo1.png"]
    assert [row["label"] for row in rows] == [row["top1"] for row in rows] == ["'=1+1", "dog"]
    assert rows[0]["loss"] == rows[1]["loss"] and float(rows[0]["p(dog)"]) < 0.5
    parquet = pytest.importorskip("pyarrow.parquet")
    write_predictions(tmp_path / "predictions.parquet", answers, "top5")
    table = parquet.read_table(tmp_path / "predictions.parquet").to_pydict()
    assert table["label"] == ["=1+1", "dog"] and table["name"][0] == "@photo0.png"


def test_numbers_that_json_does_not_know_become_null() -> None:
    logits = torch.randn(20, 3)
    logits[2, 1] = float("nan")
    labels, names = torch.arange(20) % 3, ("a", "b", "c")
    results = compute_metrics(logits, labels, names, bins=15, resamples=5, seed=0)
    report, _ = made_report(10)
    assert json.dumps(report, allow_nan=False)
    model = ModelReport("x", Path("x"), 1, "raw", (8, 8), None, 1.0, results, None,
                        Cost(1, 1), Speed(None, 1.0))  # fmt: skip
    values = Report("val", "x", 20, (), "none", {}, names, (model,)).as_dict()
    assert values["models"][0]["metrics"]["loss"] is None
    json.dumps(values, allow_nan=False)


def test_short_names_tell_checkpoints_apart() -> None:
    best = [Path(f"/runs/{name}/checkpoints/best.safetensors") for name in "ab"]
    assert short_names(best, [3, 4]) == ["a", "b"]
    steps = [Path(f"/runs/a/checkpoints/step_{n}.safetensors") for n in (3, 4)]
    assert short_names(steps, [3, 4]) == ["a step 3", "a step 4"]
    assert len(set(short_names([best[0], best[0]], [3, 3]))) == 2


# In a browser -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started
        started.close()


def open_page(browser: Any, folder: Path, classes: int, models: int = 1, **options: Any) -> Any:
    """The page in a browser; every message or request that it makes is kept in `.said`."""
    path = folder / "report.html"
    path.write_text(page(*made_report(classes, models)), encoding="utf-8")
    tab = browser.new_page(viewport={"width": 1200, "height": 900}, **options)
    tab.said = []
    tab.on("console", lambda message: tab.said.append(message.text))
    tab.on("pageerror", lambda error: tab.said.append(str(error)))
    allowed = ("file:", "data:")
    tab.on(
        "request", lambda r: None if r.url.startswith(allowed) else tab.said.append(f"request {r}")
    )
    tab.goto(path.as_uri())
    return tab


@pytest.mark.slow
@pytest.mark.parametrize("classes", [10, 1000])
def test_page_shows_every_section_without_errors_or_requests(
    browser: Any, tmp_path: Path, classes: int
) -> None:
    tab = open_page(browser, tmp_path, classes)
    report = tab.evaluate("api.report")
    assert f"{100 * report['models'][0]['metrics']['top1']:.2f}" in tab.inner_text("#summary")
    assert tab.locator("#classes tbody tr").count() == classes
    images = tab.evaluate("api.galleries[0].length")
    assert tab.locator("#gallery img").count() == images > 3
    assert tab.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    filled = [bin_ for bin_ in report["models"][0]["calibration"]["all"]["bins"] if bin_["count"]]
    assert tab.locator("#reliability .bin").count() == len(filled) > 3
    assert "A note." in tab.inner_text("#notes") and "a.png" in tab.inner_text("#notes")
    assert tab.title() == "Evaluation: model 0"  # no class name has become code
    assert tab.said == []
    for width in (1200, 700, 360):
        tab.set_viewport_size({"width": width, "height": 800})
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_confusion_matrix_reads_what_is_under_the_pointer(browser: Any, tmp_path: Path) -> None:
    tab = open_page(browser, tmp_path, 10)
    count = {(a, p): n for a, p, n in tab.evaluate("api.report.models[0].confusion")}
    box = tab.evaluate("api.matrix.state()")
    cell = box["side"] / 10
    canvas = tab.locator("#confusion")
    canvas.scroll_into_view_if_needed()
    for actual, predicted in [(0, 0), (3, 7), (9, 2), (5, 5)]:
        place = {
            "x": box["left"] + (predicted + 0.5) * cell,
            "y": box["top"] + (actual + 0.5) * cell,
        }
        canvas.hover(position=place)
        text = tab.inner_text("#readout")
        assert f"{count.get((actual, predicted), 0)} of 4 images" in text
        assert f"actual {tab.evaluate('api.report.class_names')[actual]}" in text
    (actual, predicted), _ = next(entry for entry in count.items() if entry[0][0] != entry[0][1])
    place = {"x": box["left"] + (predicted + 0.5) * cell, "y": box["top"] + (actual + 0.5) * cell}
    canvas.click(position=place)
    assert tab.evaluate("api.state.pair") == [actual, predicted]
    chosen = tab.locator("#gallery img").count()
    tab.click("#show-all")
    assert tab.locator("#gallery img").count() == tab.evaluate("api.galleries[0].length") > chosen


@pytest.mark.slow
def test_thousand_classes_share_squares_until_one_zooms_in(browser: Any, tmp_path: Path) -> None:
    tab = open_page(browser, tmp_path, 1000)
    block = tab.evaluate("api.matrix.state().block")
    assert block > 1 and f"{block} × {block} classes" in tab.inner_text("#readout")
    box = tab.evaluate("api.matrix.state()")
    # No image is lost in joint squares.
    total = tab.evaluate(
        """(box) => { let sum = 0; const seen = new Set();
        for (let y = box.top + 1; y < box.top + box.side; y += 1)
          for (let x = box.left + 1; x < box.left + box.side; x += 1) {
            const s = api.matrix.at(x, y); const key = s.row + ':' + s.column;
            if (!seen.has(key)) { seen.add(key); sum += s.right + s.wrong; } }
        return sum; }""",
        box,
    )
    assert total == 4000
    tab.fill("#jump", "class 437")
    tab.press("#jump", "Enter")
    tab.locator("#jump").blur()
    assert tab.evaluate("api.matrix.state().block") == 1
    middle = tab.evaluate(
        "api.matrix.at(api.matrix.state().left + api.matrix.state().side * .52, "
        "api.matrix.state().top + api.matrix.state().side * .52)"
    )
    assert middle["rows"] == [437]
    # The legend tells what the darkest mistake in view is, which no class outside of it decides.
    view = tab.evaluate("api.matrix.view")
    rows, columns = (
        range(math.floor(view[axis]), math.ceil(view[axis] + view["span"])) for axis in "yx"
    )
    most = max(
        (n for a, p, n in tab.evaluate("api.report.models[0].confusion")
         if a != p and a in rows and p in columns),
        default=0,
    )  # fmt: skip
    assert tab.evaluate("api.matrix.state().most") == most / 4 <= 1
    assert f"0 to {100 * most / 4:.1f}" in tab.inner_text("#legend")
    tab.click("#zoom-fit")
    assert tab.evaluate("api.matrix.state().block") == block
    for order in ("recall", "similar"):
        tab.select_option("#order", order)
        seen = tab.evaluate("similarOrder(api.report.models[0])")
        assert sorted(seen) == list(range(1000))
    assert tab.said == []


@pytest.mark.slow
def test_classes_are_sorted_and_filtered(browser: Any, tmp_path: Path) -> None:
    tab = open_page(browser, tmp_path, 10)
    rows = tab.evaluate("api.report.models[0].classes")

    def shown() -> list[str]:
        return [
            text.strip() for text in tab.locator("#classes tbody td:first-child").all_inner_texts()
        ]

    recall = [row["recall"] for row in sorted(rows, key=lambda row: row["recall"])]
    by_name = {row["name"]: row for row in rows}
    assert [by_name[name]["recall"] for name in shown()] == recall
    tab.click("#classes th button[data-key=f1]")
    falling = sorted((row["f1"] for row in rows), reverse=True)
    assert [by_name[name]["f1"] for name in shown()] == falling
    tab.fill("#class-filter", "class 7")
    assert shown() == ["class 7"]


@pytest.mark.slow
def test_models_can_be_chosen_and_themes_changed(browser: Any, tmp_path: Path) -> None:
    tab = open_page(browser, tmp_path, 10, models=2, color_scheme="dark")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    dark = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.click("#theme")
    assert tab.evaluate("document.documentElement.dataset.theme") == "light"
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    assert tab.is_visible("#comparison")
    assert tab.locator("#comparison-table tr").count() == 6
    tab.set_viewport_size({"width": 360, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    tab.select_option("#model", "1")
    top1 = tab.evaluate("api.report.models[1].metrics.top1")
    assert f"{100 * top1:.2f}" in tab.inner_text("#summary")
    assert tab.said == []
