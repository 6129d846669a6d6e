"""`vision visualize`: figures, scores and what is said of bad input."""

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from untrained_runs import CLASSES, a_run

from vision.cli.app import main
from vision.cli.composition import compose
from vision.config import ConfigError, parse
from vision.inference.predict import load
from vision.inference.visualize.configs import VisualizeConfig
from vision.inference.visualize.images import items_of_files, mask_file, some
from vision.inference.visualize.score_table import Scores, table
from vision.inference.visualize.visualize import visualized_models


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tmp_path_factory.mktemp("runs") / "vit")


@pytest.fixture(scope="module")
def swin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tmp_path_factory.mktemp("runs") / "swin", "model=swin_mini", "model.width=24")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in ("a.png", "deep/a.png", "b.png"):
        Image.fromarray(random.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(folder / name)
    return folder


def visualize(run: Path, output: Path, *words: str) -> int:
    return main(["visualize", f"checkpoint={run}", f"output={output}", "dpi=40", *words])


def test_visualize_writes_a_sheet_and_a_caption_for_each_image(
    run: Path, photos: Path, tmp_path: Path
) -> None:
    assert visualize(run, tmp_path / "out", str(photos), "classes=2") == 0
    found = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*.png")}
    assert found == {"a.sheet.png", "deep/a.sheet.png", "b.sheet.png"}
    text = (tmp_path / "out/b.sheet.txt").read_text().replace("\n  ", " ")
    for part in ("Image: ", "Checkpoint: ", "Command: vision visualize", "Scale: ", "Rollout"):
        assert part in text
    assert str(photos / "b.png") in text


def test_visualize_again_keeps_what_is_there_and_draws_what_changed(
    run: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    visualize(run, out, str(photos), "classes=1")
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*.png")}
    (out / "b.sheet.png").unlink()  # killed in between
    Image.new("RGB", (30, 30)).save(photos / "a.png")  # another image under the same name
    capsys.readouterr()
    assert visualize(run, out, str(photos), "classes=1") == 0
    assert "2 figures are in" in (said := capsys.readouterr().out)
    assert "1 were there already" in said
    same = [p for p in before if p.stat().st_mtime_ns == before[p]]
    assert same == [out / "deep/a.sheet.png"]
    visualize(run, out, str(photos), "classes=2")
    assert "3 figures are in" in capsys.readouterr().out


def test_visualize_draws_every_figure_in_the_formats_asked_for(
    swin: Path, photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    kinds = ["sheet", "heads", "queries", "microscope", "filmstrip", "comparison"]
    words = [f"figures=[{','.join(kinds)},diagnostics,page]", "formats=[svg,npz]"]
    assert visualize(swin, out, f"images={photos / 'a.png'}", "classes=1", *words) == 0
    for kind in kinds:
        for suffix in ("svg", "npz", "txt"):
            assert (out / f"a.{kind}.{suffix}").stat().st_size > 0
    assert (out / "a.page.html").read_text().lstrip().lower().startswith("<!doctype html>")
    assert (out / "diagnostics.svg").is_file()


def test_visualize_two_checkpoints_puts_them_on_one_sheet(
    run: Path, swin: Path, photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = [f"checkpoint=[{run},{swin}]", f"output={out}", "dpi=40", "formats=[npz]"]
    assert main(["visualize", *words, f"images={photos / 'b.png'}", "figures=[sheet,heads]"]) == 0
    stored = np.load(out / "b.sheet.npz")
    assert {"model0_rollout", "model1_rollout"} <= set(stored)
    assert (out / "b.heads-vit.npz").is_file() and (out / "b.heads-swin.npz").is_file()


def test_visualize_with_a_file_that_is_no_image_draws_the_rest_and_exits_1(
    run: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "bad.png").write_text("not an image")
    assert visualize(run, tmp_path / "out", str(photos), "classes=1") == 1
    said = capsys.readouterr()
    assert "3 figures are in" in said.out
    assert "bad.png" in said.err and "1 of 4 images could not be read" in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["methods=[attention:layer:9]"], "Layer 9 was not captured"),
        (["methods=[attention:head:8]"], "head 8"),
        (["methods=[cam]"], "cam is not available for ViT: it needs the mean"),
        (["methods=[rolout]"], "Did you mean 'rollout'"),
        (["classes=[cot]"], "'cot'. Did you mean 'cat'"),
        (["figures=[microscope]"], "needs windows"),
        (["figures=[heads]", "query=register 1"], "token 'register 1'"),
        (["figures=[queries]", "query=[99,0]"], "outside the grid"),
        (["style=paper", "width=3"], "width"),
        (["width=3furlongs"], "not a width; write 3.3in"),
        (["masks=there"], "add score=true"),
        (["score=true", "masks=there"], "folder there does not exist"),
    ],
)
def test_visualize_with_a_mistake_says_what_is_wrong(
    run: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    words: list[str], message: str,
) -> None:  # fmt: skip
    assert visualize(run, tmp_path / "out", f"images={photos}", *words) == 2
    assert message in capsys.readouterr().err


def test_visualize_without_images_says_how_to_name_some(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert visualize(run, tmp_path / "out") == 2
    assert "images: which ones?" in capsys.readouterr().err


def test_visualize_of_weights_that_no_model_has_ends_in_one_message(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import timm

    weights = tmp_path / "resnet.pt"
    torch.save(timm.create_model("resnet18", num_classes=3).state_dict(), weights)
    assert visualize(weights, tmp_path / "out", f"images={photos}") in (1, 2)
    said = capsys.readouterr().err
    assert said.count("error:") == 1 and "Traceback" not in said


def test_models_of_a_convolutional_network_say_that_it_has_no_attention(
    run: Path, photos: Path
) -> None:
    import timm

    values, _ = compose("visualize", ["checkpoint=net", f"images={photos}"])
    resnet = timm.create_model("resnet18", num_classes=len(CLASSES)).eval()
    found = load(run)
    loaded = replace(found, opened=replace(found.opened, model=resnet))
    items = items_of_files([photos / "a.png"])
    with pytest.raises(ConfigError, match="checkpoint: vit: No attention was found in ResNet"):
        visualized_models([loaded], parse(VisualizeConfig, values), items[0])


class Counter:
    """Counts the forward passes of a model over a single image, by that image."""

    def __init__(self) -> None:
        self.passes: dict[bytes, int] = {}

    def watch(self, loaded: Any) -> Any:
        loaded.model.register_forward_pre_hook(self._count)
        return loaded

    def _count(self, module: Any, args: tuple[Any, ...]) -> None:
        if len(args[0]) == 1:
            key = args[0].detach().numpy().tobytes()
            self.passes[key] = self.passes.get(key, 0) + 1


@pytest.mark.parametrize("score", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_image_is_captured_once_for_each_kind_of_pass(
    run: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, score: bool
) -> None:
    counter = Counter()
    monkeypatch.setattr(
        "vision.inference.predict.load", lambda *args, **given: counter.watch(load(*args, **given))
    )
    words = ["figures=[sheet,heads,queries,filmstrip,comparison,page]", "classes=3", "batch_size=1"]
    words.append("formats=[npz]")  # drawing takes longer than the passes
    more = [f"score={str(score).lower()}", "steps=2", f"images={photos}"]
    assert visualize(run, tmp_path / "out", *words, *more) == 0
    first, *others = counter.passes.values()
    # Plain and with gradients, for the figures and, over all images first, for the table of scores.
    assert len(others) == 2 and all(count == (4 if score else 2) for count in others)
    assert first == others[0] + 1  # which methods a model has is known from a pass over the first


def test_page_explains_the_classes_that_are_named(run: Path, photos: Path, tmp_path: Path) -> None:
    words = [
        f"images={photos}/b.png",
        "figures=[sheet,page]",
        "classes=[eel,bear]",
        "formats=[npz]",
    ]
    assert visualize(run, tmp_path / "out", *words) == 0
    header = page_header(tmp_path / "out/b.page.html")
    assert [entry["name"] for entry in header["classes"]] == ["eel", "bear"]


def page_header(path: Path) -> dict[str, Any]:
    found = re.search(r'type="application/json" id="header">(.*?)</script>', path.read_text())
    assert found is not None
    header: dict[str, Any] = json.loads(found[1])
    return header


def test_page_of_images_with_masks_has_their_scores(swin: Path, tmp_path: Path) -> None:
    words = ["data=shapes", "count=1", "figures=[]", "page=true"]
    assert visualize(swin, tmp_path / "out", *words) == 0
    header = page_header(tmp_path / "out/val-0000.page.html")
    assert {"random", "centre", "rollout", "cam_rollout", "gradient_rollout"} <= set(
        header["scores"]
    )
    assert set(header["scores"]["rollout"]) == {
        "pointing", "energy", "pixel_accuracy", "map", "miou"
    }  # fmt: skip
    assert "score=true" in header["scores_note"]
    # The same numbers as the table of scores has for this image.
    methods = "methods=[rollout,gradient_rollout:clamp:before:normalize:true]"
    more = [*words, "score=true", "steps=2", methods, "format=json"]
    assert visualize(swin, tmp_path / "all", *more) == 0
    scored = page_header(tmp_path / "all/val-0000.page.html")
    stored = json.loads((tmp_path / "all/scores.json").read_text())["scores"]["swin"]
    assert scored["scores_note"] == ""
    for name, row in (("rollout", "rollout"), ("gradient_rollout", methods[17:-1])):
        for metric, value in scored["scores"][name].items():
            assert value == pytest.approx(stored[row][metric], abs=1e-6)
        assert "insertion" in scored["scores"][name]
        for metric, value in header["scores"][name].items():
            assert value == pytest.approx(stored[row][metric], abs=1e-6)


def test_page_of_images_without_masks_says_why_there_are_no_scores(
    run: Path, photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert visualize(run, out, f"images={photos}/b.png", "figures=[]", "page=true") == 0
    header = page_header(out / "b.page.html")
    assert header["scores"] == {} and "masks=FOLDER" in header["scores_note"]
    # With a mask the page is drawn anew, and the mask may come without score=true.
    (tmp_path / "masks").mkdir()
    mask = np.zeros((30, 40), dtype=np.uint8)
    mask[5:20, 10:30] = 255
    Image.fromarray(mask).save(tmp_path / "masks/b.png")
    words = [f"images={photos}/b.png", "figures=[]", "page=true", f"masks={tmp_path / 'masks'}"]
    assert visualize(run, out, *words) == 0
    assert "pointing" in page_header(out / "b.page.html")["scores"]["rollout"]


def test_masks_that_do_not_match_their_images_are_refused(
    run: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "masks").mkdir()
    words = ["figures=[]", "score=true", "steps=2", f"masks={tmp_path / 'masks'}"]
    words += [f"images={photos}/b.png", "methods=[rollout]"]
    assert visualize(run, tmp_path / "out", *words) == 2
    assert "b.png has no mask; expected" in capsys.readouterr().err
    Image.new("L", (40, 40), 255).save(tmp_path / "masks/b.png")
    assert visualize(run, tmp_path / "out", *words) == 2
    said = capsys.readouterr().err
    assert "is 40 x 40 pixels, but its image" in said and "is 40 x 30" in said
    Image.new("L", (80, 60), 255).save(tmp_path / "masks/b.png")  # finer than the image
    assert visualize(run, tmp_path / "out", *words) == 0
    Image.new("L", (40, 30), 0).save(tmp_path / "masks/b.png")
    assert visualize(run, tmp_path / "out", *words) == 2
    assert "no image is left to score" in capsys.readouterr().err


def test_latest_stands_for_the_run_that_it_names(
    run: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "mine")
    (tmp_path / "latest").symlink_to("mine")
    words = [f"checkpoint={tmp_path / 'latest'}", f"images={photos}/b.png", "figures=[page]"]
    assert main(["visualize", *words]) == 0
    page = tmp_path / "mine/attention/b.page.html"
    assert str(page) in capsys.readouterr().out
    assert page_header(page)["subtitle"] == "mine"


def test_masks_are_found_by_the_folders_of_their_images_or_by_name_alone(tmp_path: Path) -> None:
    images = ["a.jpg", "b.jpg", "deep/a.jpg", "elsewhere/a.jpg"]
    for place in (*images, "masks/a.png", "masks/b.jpg", "masks/deep/a.png"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
    masks = tmp_path / "masks"
    assert mask_file(masks, tmp_path / "a.jpg") == masks / "a.png"
    assert mask_file(masks, tmp_path / "deep/a.jpg") == masks / "deep/a.png"
    assert mask_file(masks, tmp_path / "elsewhere/a.jpg") == masks / "a.png"
    assert mask_file(masks, tmp_path / "b.jpg") == masks / "b.jpg"
    with pytest.raises(ConfigError, match=r"has no mask; expected .*a\.png"):
        mask_file(tmp_path, tmp_path / "a.jpg")  # an image is no mask of itself


def test_score_of_a_folder_with_masks_writes_tables(
    run: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    masks = tmp_path / "masks"
    masks.mkdir()
    for name in ("a", "b"):
        mask = np.zeros((30, 40), dtype=np.uint8)
        mask[5:20, 10:30] = 255
        Image.fromarray(mask).save(masks / f"{name}.png")
    words = ["figures=[]", "score=true", "steps=2", f"masks={masks}", "format=json"]
    out = tmp_path / "out"
    assert visualize(run, out, f"images={photos}", "methods=[rollout]", *words) == 0
    printed = json.loads(capsys.readouterr().out)
    stored = json.loads((out / "scores.json").read_text())
    assert stored["scores"] == printed and stored["images"] == 3
    assert list(printed["vit"]) == ["random", "centre", "rollout"]
    rows = list(csv.DictReader((out / "scores.csv").open()))
    assert float(rows[2]["miou"]) == pytest.approx(printed["vit"]["rollout"]["miou"])


def test_score_with_boxes_equals_score_with_the_same_masks(
    run: Path, photos: Path, tmp_path: Path
) -> None:
    mask = np.zeros((30, 40), dtype=np.uint8)
    mask[5:20, 10:30] = 255
    (tmp_path / "masks").mkdir()
    Image.fromarray(mask).save(tmp_path / "masks/b.png")
    (tmp_path / "boxes.csv").write_text("path,left,top,right,bottom\nphotos/b.png,10,5,30,20\n")
    words = ["figures=[]", "score=true", "steps=2", "methods=[rollout]", f"images={photos}/b.png"]
    visualize(run, tmp_path / "one", *words, f"masks={tmp_path / 'masks'}")
    visualize(run, tmp_path / "two", *words, f"boxes={tmp_path / 'boxes.csv'}")
    one, two = (
        json.loads((tmp_path / name / "scores.json").read_text())["scores"]
        for name in ("one", "two")
    )
    assert one == two and "miou" in one["vit"]["rollout"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,left,top,right\n", "no column bottom"),
        ("path,left,top,right,bottom\nb.png,1,2,x,4\n", "line 2"),
        ("path,left,top,right,bottom\nb.png,9,2,3,4\n", "no area"),
        ("path,left,top,right,bottom\nother.png,1,2,3,4\n", "no box for"),
    ],
)
def test_boxes_that_are_wrong_are_refused(photos: Path, text: str, message: str) -> None:
    table = photos / "boxes.csv"
    table.write_text(text)
    with pytest.raises(ConfigError, match=message):
        items_of_files([photos / "b.png"], boxes=table)


def test_items_of_files_with_one_name_keep_apart(tmp_path: Path) -> None:
    items = items_of_files([tmp_path / "a.png", tmp_path / "a.jpg", tmp_path / "d/a.png"])
    assert [item.key for item in items] == ["a.png", "a.jpg", "d/a"]
    assert [item.key for item in some(items, 2)] == ["a.png", "d/a"]


def test_scores_on_shapes_include_images_with_two_objects(tmp_path: Path) -> None:
    from vision.data.sources.shapes import CLASSES as SHAPES

    run = a_run(tmp_path / "run")
    assert len(load(run).classes) == len(CLASSES)
    words = ["data=shapes", "count=2", "figures=[]", "score=true", "steps=2"]
    assert visualize(run, tmp_path / "out", *words, "methods=[rollout]") == 0
    stored = json.loads((tmp_path / "out/scores.json").read_text())["scores"]
    assert "pointing" in stored["run"]["rollout"]
    # This run knows other classes than those of the shapes, so nothing can be asked of pairs.
    assert "separation" not in stored["run"]["rollout"] and len(SHAPES) == 8


def test_table_of_two_models_names_each() -> None:
    scores: Scores = {m: {"rollout": {"pointing": 50.0}} for m in ("a", "b")}
    assert table(scores).row_count == 4
