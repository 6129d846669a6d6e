"""Naming images: from Python, and with `vision predict`."""

import csv
import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torchvision import transforms
from untrained_runs import a_run

import vision
from vision.checkpoints.convert import convert
from vision.checkpoints.native.checkpoint import read_checkpoint, write_checkpoint
from vision.cli.app import main
from vision.config import ConfigError
from vision.data.images.decode import UnreadableImageError
from vision.inference.predict import Prediction, find_images
from vision.inference.predicted_files import PredictedFile, write_csv


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    path = tmp_path_factory.mktemp("photos") / "photo.png"
    Image.fromarray(pixels).save(path)
    return path


def test_load_of_a_run_predicts_what_its_model_says(run: Path, photo: Path) -> None:
    loaded = vision.load(run)
    torchvision = transforms.Compose(
        [
            transforms.Resize(27, transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(24),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    expected = torchvision(Image.open(photo))
    assert (loaded.transform(photo) - expected).abs().max() < 0.05  # two levels of 255
    with torch.no_grad():
        probabilities = loaded.model(loaded.transform(photo)[None]).softmax(dim=1)[0]
    prediction = loaded.predict(photo, top=3)
    best = probabilities.argsort(descending=True)[:3].tolist()
    assert [label for label, _ in prediction.top] == [loaded.classes[i] for i in best]
    assert prediction.label == loaded.classes[best[0]]
    assert prediction.probability == pytest.approx(probabilities.max().item(), rel=1e-5)
    assert loaded.classes == ("bear", "cat", "dog", "eel")
    assert not loaded.model.training


def test_predict_takes_every_kind_of_image_alike(run: Path, photo: Path) -> None:
    loaded = vision.load(run)
    image = Image.open(photo)
    array = np.asarray(image)
    kinds = [
        photo,
        str(photo),
        photo.read_bytes(),
        image,
        array,
        torch.from_numpy(array.copy()).permute(2, 0, 1),
    ]
    answers = loaded.predict(kinds, batch_size=4)
    assert len(answers) == len(kinds)
    for answer in answers:
        assert answer.label == answers[0].label
        assert answer.probability == pytest.approx(answers[0].probability, rel=1e-5)


def test_features_are_what_the_head_takes(run: Path, photo: Path) -> None:
    loaded = vision.load(run)
    features = loaded.features([photo, photo])
    assert features.shape[0] == 2
    logits = loaded.model.head(loaded.features(photo))
    assert torch.allclose(logits, loaded.model(loaded.transform(photo)[None])[0], atol=1e-5)


def test_load_of_a_run_of_a_timm_model_predicts_too(tmp_path: Path, photo: Path) -> None:
    run = a_run(tmp_path, "model=timm", "model.name=test_resnet.r160_in1k")
    loaded = vision.load(run)
    probabilities = loaded.model(loaded.transform(photo)[None]).softmax(dim=1)[0]
    assert loaded.predict(photo).probability == pytest.approx(probabilities.max().item(), rel=1e-5)


@pytest.mark.parametrize("command", ["predict", "visualize", "export"])
def test_commands_take_what_a_file_does_not_tell(
    command: str, tmp_path: Path, photo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=4, **settings).eval()
    torch.save(model.state_dict(), tmp_path / "vit.pth")
    words = [command, f"checkpoint={tmp_path / 'vit.pth'}", f"output={tmp_path / 'out'}"]
    words += {
        "predict": [f"images={photo}", "format=jsonl"],
        "visualize": [f"images={photo}"],
        "export": ["format=safetensors"],
    }[command]
    assert main(words) == 2
    assert "model.heads=" in capsys.readouterr().err
    assert main([*words, "model.heads=2"]) == 0
    if command == "predict":
        image = vision.load(tmp_path / "vit.pth", heads=2).transform(photo)
        with torch.no_grad():
            expected = model(image[None]).softmax(1).max().item()
        answer = json.loads((tmp_path / "out").read_text())
        assert answer["probability"] == pytest.approx(expected, abs=1e-5)


def test_predict_of_an_unreadable_file_names_it(run: Path, tmp_path: Path) -> None:
    tmp_path.joinpath("bad.jpg").write_bytes(b"no image")
    with pytest.raises(UnreadableImageError, match=r"bad\.jpg"):
        vision.load(run).predict(tmp_path / "bad.jpg")


def test_predict_command_in_a_pipe_writes_json_lines(
    run: Path, photo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", f"checkpoint={run}", f"images={photo}", "top=2"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    answer = json.loads(line)
    expected = vision.load(run).predict(photo, top=2)
    assert answer["image"] == str(photo)
    assert answer["label"] == expected.label
    assert [(t["label"], pytest.approx(t["probability"])) for t in answer["top"]] == list(
        expected.top
    )


def test_predict_command_with_bad_files_does_the_rest_and_exits_1(
    run: Path, photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.open(photo).save(tmp_path / "a.png")
    tmp_path.joinpath("b.png").write_bytes(b"")
    Image.open(photo).save(tmp_path / "c.jpg")
    tmp_path.joinpath("notes.txt").write_text("no image, and not named like one")
    output = tmp_path / "out.csv"
    code = main(["predict", f"checkpoint={run}", str(tmp_path), f"output={output}", "batch_size=2"])
    assert code == 1
    error = capsys.readouterr().err
    assert "b.png: the file is empty (0 bytes)." in error
    assert "1 of 3 images could not be read." in error
    rows = list(csv.DictReader(output.open()))
    assert [Path(row["image"]).name for row in rows] == ["a.png", "b.png", "c.jpg"]
    assert rows[0]["label_1"] and not rows[1]["label_1"] and "empty" in rows[1]["error"]
    assert float(rows[0]["probability_1"]) >= float(rows[0]["probability_2"])


def test_predict_command_as_a_table_shows_names_and_bars(
    run: Path, photo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", f"checkpoint={run}", f"images={photo}", "format=table"]) == 0
    output = capsys.readouterr().out
    assert "photo.png" in output and "%" in output and "█" in output


def test_predict_command_as_a_table_shows_names_that_look_like_markup_as_they_are(
    tmp_path: Path, photo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["[/b]", "[red]x[/red]", ":cat:", "\x1b[2J"]
    best = a_run(tmp_path / "run") / "checkpoints" / "best.safetensors"
    tensors, record = read_checkpoint(best)
    record = {key: value for key, value in record.items() if key not in ("format", "version")}
    write_checkpoint(best, tensors, record | {"classes": names})
    image = tmp_path / "[/i]" / "x.png"
    image.parent.mkdir(parents=True)
    shutil.copy(photo, image)
    words = ["predict", "device=cpu", "format=table", "top=4", f"checkpoint={tmp_path / 'run'}"]
    assert main([*words, f"images={tmp_path}"]) == 0
    text = capsys.readouterr().out
    assert all(f" {name} " in text for name in (*names[:3], r"\x1b[2J")) and str(image) in text


@pytest.mark.parametrize("to_file", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "table"])
def test_names_that_cannot_be_printed_are_escaped_not_a_traceback(
    kind: str, to_file: bool, tmp_path: Path, photo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["[/b]", "\x1b[2J\x00\x7f", "half \ud800", "line\nbreak"]
    place = tmp_path / "timm"
    convert(a_run(tmp_path / "run"), "timm", place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"label_names": names}))
    words = ["predict", "device=cpu", f"format={kind}", "top=4", f"checkpoint={place}"]
    words += [f"output={tmp_path / 'out'}"] if to_file else []
    assert main([*words, f"images={photo}"]) == 0
    text = (tmp_path / "out").read_text("utf-8") if to_file else capsys.readouterr().out
    if kind == "jsonl":
        found = json.loads(text)
        assert sorted(entry["label"] for entry in found["top"]) == sorted(names)
    assert "[/b]" in text and r"half \ud800" in text


def test_predict_command_with_attention_saves_a_image_beside_each_image(
    run: Path, photo: Path, tmp_path: Path
) -> None:
    Image.open(photo).save(tmp_path / "a.png")
    words = [f"checkpoint={run}", f"images={tmp_path}", "attention=true"]
    for _ in range(2):  # again: what was written before is no image to be named
        assert main(["predict", *words]) == 0
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["a.png", "a_attention.png", "a_attention.txt"]
    with Image.open(tmp_path / "a_attention.png") as drawn:
        assert drawn.width > 200


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["images=[]"], "images=photo.jpg"),
        (["images=nowhere/*.jpg"], "images: no images found in 'nowhere/*.jpg'."),
    ],
)
def test_predict_command_without_images_exits_2(
    run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", f"checkpoint={run}", *words]) == 2
    assert message in capsys.readouterr().err


def test_predict_command_with_missing_file_names_it_and_exits_1(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", f"checkpoint={run}", "images=nowhere.jpg"]) == 1
    assert "nowhere.jpg: No such file or directory" in capsys.readouterr().err


def test_find_images_takes_folders_patterns_and_lists_each_file_once(tmp_path: Path) -> None:
    names = ["b.jpg", "a.PNG", "deep/c.webp"]
    for name in [*names, "deep/readme.md"]:
        tmp_path.joinpath(name).parent.mkdir(exist_ok=True)
        tmp_path.joinpath(name).touch()
    everything = [tmp_path / name for name in ("a.PNG", "b.jpg", "deep/c.webp")]
    assert find_images([str(tmp_path)]) == everything
    assert find_images([f"{tmp_path}/*.jpg", str(tmp_path)]) == [
        everything[1], everything[0], everything[2],
    ]  # fmt: skip
    listed = io.StringIO(f"{tmp_path / 'b.jpg'}\n\n{tmp_path / 'odd name'}\n")
    assert find_images(["-"], listed) == [tmp_path / "b.jpg", tmp_path / "odd name"]
    tmp_path.joinpath("empty").mkdir()
    with pytest.raises(ConfigError, match="no images found in"):
        find_images([str(tmp_path / "empty")])


def test_find_images_reads_a_list_from_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("x.jpg\n"))
    assert find_images(["-"]) == [Path("x.jpg")]


def test_csv_of_predictions_is_exact_for_programs() -> None:
    stream = io.StringIO(newline="")
    prediction = Prediction("=1+1", 1.0, (("=1+1", 1.0),))
    write_csv([PredictedFile(Path("-photo.jpg"), prediction, None)], stream, top=1)
    stream.seek(0)
    (row,) = csv.DictReader(stream)
    assert (row["image"], row["label_1"]) == ("-photo.jpg", "=1+1")
