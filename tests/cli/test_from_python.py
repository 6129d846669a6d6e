"""vision.train: the run of the command line, also on images that a program gives."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import (
    SMALL,
    SMALL_MODELS,
    assert_same_run,
    folder_of_images,
    small_config,
    words,
)
from torch.utils.data import ConcatDataset, Dataset, Subset

import vision
from vision.cli.app import main
from vision.cli.from_python import RunPreemptedError
from vision.data.configs import Split
from vision.data.sources.build_source import build_source
from vision.data.sources.source import Source

Labelled = list[tuple[Any, int]]


def given_words(folder: Path, *more: str) -> list[str]:
    """A small run of images that are given."""
    return ["model=vit_mini", *SMALL_MODELS["vit_mini"], *SMALL, f"output={folder}", *more]


def shapes(folder: Path, split: Split) -> Source:
    return build_source(small_config(folder).data, split)


def listed(source: Source) -> Labelled:
    return [(source.read(i), int(source.labels[i])) for i in range(len(source))]


def noise(number: int) -> Labelled:
    random = np.random.default_rng(0)
    return [(random.integers(0, 256, (20, 24, 3), np.uint8), i % 3) for i in range(number)]


class Own(Dataset[tuple[Any, int]]):
    """A data set as users write it: images are read by index alone."""

    def __init__(self, samples: Sequence[tuple[Any, int]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = self.samples[index]
        return Image.fromarray(image), label


def test_run_on_given_arrays_equals_the_command_line_to_the_bit(tmp_path: Path) -> None:
    """Everything random included: augmentation, mixing, dropout; images by a data set or a list."""
    rich = ["augment=deit", "ema=0.9", "model.dropout=0.1"]
    assert main(["train", *words(tmp_path / "shell", *rich)]) == 0
    train, val = shapes(tmp_path, "train"), shapes(tmp_path, "val")
    result = vision.train(
        given_words(tmp_path / "python", "name=run", *rich),
        Own(listed(train)),
        validation=listed(val),
        classes=train.classes,
    )
    assert_same_run(tmp_path / "shell", tmp_path / "python")
    assert result.folder == tmp_path / "python" / "run"
    best = [e for e in result.history if e["split"] == "val_ema"]
    assert result.metrics["top1"] == max(event["top1"] for event in best)
    assert result.model.classes == train.classes


def test_files_of_a_folder_given_as_a_list_make_the_same_run(tmp_path: Path) -> None:
    """With validation images taken from the training images, by the same seed."""
    root = folder_of_images(tmp_path / "images", 12)
    files = sorted(root.rglob("*.png"))
    small = ["name=run", "data.val_fraction=0.25", "augment=deit"]
    data = ["data=folder", f"data.root={root}"]
    assert main(["train", *given_words(tmp_path / "shell", *data, *small)]) == 0
    images = [(file, int(file.parent.name == "light")) for file in files]
    vision.train(given_words(tmp_path / "python", *small), images, classes=["dark", "light"])
    assert_same_run(tmp_path / "shell", tmp_path / "python")


def test_settings_as_mapping_words_or_config_name_the_run_of_the_command_line(
    tmp_path: Path,
) -> None:
    small = [word for word in words(tmp_path) if word != "name=run"]
    assert main(["train", *small, "duration=1epochs"]) == 0
    (folder,) = (path for path in tmp_path.iterdir() if path.name != "latest")
    before = (folder / "metrics.jsonl").read_text()
    mapping = dict(word.split("=", 1) for word in small)
    settings: list[Any] = [[*small, "duration=1epochs"], mapping | {"duration": "1epochs"}]
    settings[1] |= {"data.train_samples": 40, "data": {"val_samples": 24}, "device": "cpu"}
    del settings[1]["data.val_samples"]
    settings[1] = {k: _typed(v) for k, v in settings[1].items()}
    for given in settings:
        result = vision.train(given)
        assert result.folder == folder and 0 <= result.metrics["top1"] <= 1
    again = vision.train(result.config)
    assert again.folder == folder and again.metrics == result.metrics
    assert (folder / "metrics.jsonl").read_text() == before  # it was finished


def _typed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value.startswith("["):
        return [int(v) for v in value[1:-1].split(",")]
    words = {"true": True, "false": False, "null": None}
    return words.get(value, int(value) if value.isdecimal() else value)


def test_stopped_run_is_resumed_by_the_same_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after Ctrl-C; also in a thread, which gets no signals."""
    from vision.training import loop

    images = noise(24)
    small = ["data.val_fraction=0.25", "name=run"]
    vision.train(given_words(tmp_path / "whole", *small), images)
    real = loop.update

    def interrupted(state: Any, config: Any) -> None:
        real(state, config)
        if state.step == 3:
            import signal

            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(loop, "update", interrupted)
    with pytest.raises(RunPreemptedError, match="the same call resumes"):
        vision.train(given_words(tmp_path / "halved", *small), images)
    monkeypatch.setattr(loop, "update", real)
    found: list[vision.TrainResult] = []
    thread = threading.Thread(
        target=lambda: found.append(vision.train(given_words(tmp_path / "halved", *small), images))
    )
    thread.start()
    thread.join()
    assert found
    assert_same_run(tmp_path / "whole", tmp_path / "halved")


def test_other_images_make_another_run_and_do_not_resume_one_by_name(tmp_path: Path) -> None:
    more = ["data.val_fraction=0.25", "duration=1epochs"]
    images = noise(24)
    first = vision.train(given_words(tmp_path, *more), images)
    assert "-images-" in first.folder.name
    changed = [(255 - image, label) for image, label in images]
    second = vision.train(given_words(tmp_path, *more), changed)
    assert second.folder != first.folder
    with pytest.raises(vision.ConfigError, match=r"data\.fingerprint: .* → "):
        vision.train(given_words(tmp_path, *more, f"name={first.folder.name}"), changed)
    with pytest.raises(vision.ConfigError, match="are others than those of these settings"):
        vision.train(first.config, changed)


def test_eval_of_a_run_on_given_images_asks_for_the_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = folder_of_images(tmp_path / "images", 8)
    images = [(file, int(file.parent.name == "light")) for file in sorted(root.rglob("*.png"))]
    result = vision.train(
        given_words(tmp_path / "runs", "data.val_fraction=0.25"),
        Own([(np.asarray(Image.open(file)), label) for file, label in images]),
        classes=["dark", "light"],
    )
    assert "data=folder data.root=" in (result.folder / "README.md").read_text()
    capsys.readouterr()
    assert main(["eval", f"checkpoint={result.folder}"]) == 2
    error = capsys.readouterr().err
    assert "(Own)" in error and "data=folder data.root=" in error
    given = [f"checkpoint={result.folder}", "data=folder", f"data.root={root}"]
    assert main(["eval", *given, "data.val_fraction=0.5", "device=cpu"]) == 0


def test_names_and_labels_come_from_the_data_set(tmp_path: Path) -> None:
    """Through subsets and concatenations, without reading an image for its label."""

    class Named(Own):
        classes = ("red", "green", "blue")
        reads = 0

        @property
        def targets(self) -> list[int]:
            return [label for _, label in self.samples]

        def __getitem__(self, index: int) -> tuple[Any, int]:
            Named.reads += 1
            return super().__getitem__(index)

    from vision.data.given import given_images

    whole = Named(noise(600))
    both: Any = ConcatDataset([Subset(whole, range(5, 500)), Subset(whole, range(5))])
    given = given_images(both, None, None, 3)
    source = given.splits["train"]
    assert source.classes == ("red", "green", "blue") and Named.reads < 200
    assert source.labels.tolist() == [i % 3 for i in (*range(5, 500), *range(5))]
    pixels = source.read(497)
    assert isinstance(pixels, np.ndarray) and (pixels == whole.samples[2][0]).all()


@pytest.mark.parametrize(
    "form", ["array", "tensor", "channels_first", "pillow", "grey", "bytes", "path", "alpha"]
)
def test_every_form_of_an_image_gives_its_pixels(tmp_path: Path, form: str) -> None:
    from vision.data.given import given_images
    from vision.data.images.decode import decode

    (pixels, _), *_ = noise(1)
    file = tmp_path / "image.png"
    Image.fromarray(pixels).save(file)
    image: Any = {
        "array": pixels,
        "tensor": torch.from_numpy(pixels),
        "channels_first": torch.from_numpy(pixels).permute(2, 0, 1),
        "pillow": Image.open(file),
        "grey": pixels[:, :, 0],
        "bytes": file.read_bytes(),
        "path": str(file),
        "alpha": np.dstack([pixels, np.full((20, 24), 255, np.uint8)]),
    }[form]
    source = given_images([(image, 0), (image, 1)], None, None, 3).splits["train"]
    found = decode(source.read(1), 3, source.name(1))
    expected = np.repeat(pixels[:, :, :1], 3, axis=2) if form == "grey" else pixels
    assert (found == expected).all()


GOOD = noise(6)
ABC = {"classes": ["a", "b", "c"]}
ONE = [(image, 0) for image, _ in GOOD]
FLOATS = torch.rand(3, 20, 24)


@pytest.mark.parametrize(
    ("dataset", "more", "message"),
    [
        ([(FLOATS, 0)], ABC, r"dataset\[0\] is a tensor of float32 \(3, 20, 24\); expected uint8"),
        (
            [(np.zeros((5, 6, 7), np.uint8), 0)],
            ABC,
            r"dataset\[0\] is an array \(5, 6, 7\); expected",
        ),
        ([*GOOD, (None, 1)], {}, r"dataset\[6\] has a NoneType as its image"),
        ([*GOOD, (GOOD[0][0], "cat")], {}, r"dataset\[6\] has the label 'cat' \(str\).*classes="),
        ([*GOOD, (GOOD[0][0], 1.0)], {}, r"dataset\[6\] has the label 1.0 \(float\)"),
        ([*GOOD, (GOOD[0][0], -1)], {}, r"dataset\[6\] has the label -1; expected from 0"),
        ([*GOOD, (GOOD[0][0], 4)], {}, r"no image of `dataset` has the label 3"),
        (GOOD, {"classes": ["a", "b"]}, r"has the label 2; expected 0 to 1 for 2 classes"),
        (GOOD, {"classes": ["a", "b", "a"]}, "classes: a occurs more than once"),
        (GOOD, {"classes": "abc"}, "is not a list of names"),
        ([], {}, "dataset: it has no images"),
        ([GOOD[0][0]], {}, r"dataset\[0\] is a ndarray; expected \(image, label\)"),
        ([{"image": 1, "label": 2}], {}, r"dataset\[0\] is a dict with image, label; expected"),
        (iter(GOOD), {}, "a list_iterator is not a data set"),
        (["/nowhere/a.png"], {}, r"dataset\[0\] is a str; expected \(image, label\)"),
        ([("/nowhere/a.png", 0)], ABC, "/nowhere/a.png cannot be read: No such file"),
        (ONE, {"classes": ["only"], "validation": ONE}, "a single class"),
        (GOOD, {"validation": None}, r"validation: no images.*data\.val_fraction"),
    ],
)
def test_unusable_data_is_refused_by_its_place(
    tmp_path: Path, dataset: Any, more: dict[str, Any], message: str
) -> None:
    options = {"validation": GOOD, **more}
    with pytest.raises(vision.ConfigError, match=message):
        vision.train(given_words(tmp_path / "runs"), dataset, **options)
    assert not list((tmp_path / "runs").glob("*"))  # a failed start leaves nothing behind


def test_random_transformation_and_changed_labels_are_refused(tmp_path: Path) -> None:
    class Augmented(Own):
        def __getitem__(self, index: int) -> tuple[Any, int]:
            return np.random.default_rng().integers(0, 256, (8, 8, 3), np.uint8), 0

    class Shifted(Own):
        targets = tuple(label for _, label in GOOD)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            image, label = super().__getitem__(index)
            return image, label + 1

    with pytest.raises(vision.ConfigError, match=r"another image each time.*augment="):
        vision.train(given_words(tmp_path), Augmented(GOOD), validation=GOOD, **ABC)
    with pytest.raises(vision.ConfigError, match="its `targets` say 0"):
        vision.train(given_words(tmp_path), Shifted(GOOD), validation=GOOD)


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (["model.dpeth=6"], {}, "Did you mean 'model.depth'"),
        ({"model": {"dpeth": 6}}, {}, "Did you mean 'model.depth'"),
        ({"epochs": 5}, {}, r"epochs: unknown setting\. Write duration=5epochs"),
        (["seed=0,1"], {}, "a run takes one value; call vision.train for each"),
        (["hydra/launcher=local"], {}, "settings of Hydra are for the command line"),
        (["model=vit_minni", "batch_size=x"], {}, r"(?s)vit_mini.*batch_size"),
        ([3], {}, "3: settings are words"),
        (["data=shapes"], {"dataset": GOOD}, "the images are given as dataset=…; leave out one"),
        (["data=python"], {}, r"data=python: the images are those of a Python program"),
        ([], {"validation": GOOD}, "validation: only for images that are given"),
        ([], {"classes": ["a"]}, "classes: only for images that are given"),
    ],
)
def test_mistakes_in_settings_are_those_of_the_command_line(
    tmp_path: Path, settings: Any, options: dict[str, Any], message: str
) -> None:
    place = f"output={tmp_path / 'runs'}"
    if isinstance(settings, list):
        settings = [*settings, place]
    else:
        settings |= {"output": str(tmp_path / "runs")}
    with pytest.raises(vision.ConfigError, match=message):
        vision.train(settings, **options)
    assert not list((tmp_path / "runs").glob("*"))


def test_the_callers_random_numbers_stay_as_they_are(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    vision.train([*words(tmp_path), "duration=2steps"])
    assert torch.rand(3).equal(expected)
