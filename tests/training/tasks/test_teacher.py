"""A teacher answers as the model of its files does, or is refused before the first step."""

from pathlib import Path

import pytest
import timm
import torch
import yaml
from finetune_runs import stop_after
from model_settings import CONFIGS
from PIL import Image
from safetensors.torch import save_file
from small_runs import small_config
from small_tasks import a_teacher
from torchvision.transforms.v2 import functional as TF
from untrained_runs import a_run

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.fingerprint import digest_weights
from vision.checkpoints.native.checkpoint import read_checkpoint, write_checkpoint
from vision.config import ConfigError, parse
from vision.data.preprocess import Preprocess
from vision.training.loop import train
from vision.training.run.distributed import World
from vision.training.run.run_folder import PREEMPTED
from vision.training.tasks.configs import DistillConfig
from vision.training.tasks.distillation import ImageConversion, Teacher

WORLD = World(0, 1, torch.device("cpu"))
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def student(size: int = 32, channels: int = 3) -> Preprocess:
    return Preprocess((size, size), channels, MEAN[:channels], STD[:channels], "bicubic", 1.0, {})


def teacher_of(
    place: Path, classes: tuple[str, ...], size: int = 32, **settings: object
) -> Teacher:
    values = yaml.safe_load((CONFIGS / "task" / "distill.yaml").read_text())["task"]
    config = parse(DistillConfig, values | {"teacher": str(place)} | settings)
    return Teacher(config, classes, student(size), WORLD, channels_last=False)


def test_teacher_from_a_file_of_timm_gives_the_logits_of_timms_model(tmp_path: Path) -> None:
    theirs = timm.create_model("test_resnet", num_classes=8).eval()
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    teacher = teacher_of(
        tmp_path / "weights.safetensors",
        tuple("abcdefgh"),
        teacher_model="test_resnet",
        teacher_image_size=32,
    )
    pixels = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    config = timm.data.resolve_data_config(model=theirs)
    with torch.no_grad():
        expected = theirs(TF.normalize(pixels, list(config["mean"]), list(config["std"])))
    found = teacher(TF.normalize(pixels, list(MEAN), list(STD)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert any("without names" in note for note in teacher.notes)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_images_are_converted_to_the_size_and_numbers_of_the_teacher(interpolation: str) -> None:
    wanted = Preprocess((20, 20), 3, (0.5, 0.4, 0.3), (0.1, 0.2, 0.3), interpolation, 1.0, {})  # type: ignore[arg-type]
    convert = ImageConversion(student(), wanted, torch.device("cpu"), "x")
    pixels = torch.rand(2, 3, 32, 32)
    resized = TF.resize(
        pixels, [20, 20], interpolation=TF.InterpolationMode(interpolation), antialias=True
    )
    expected = TF.normalize(resized.clamp(0, 1), list(wanted.mean), list(wanted.std))
    found = convert(TF.normalize(pixels, list(MEAN), list(STD)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_images_of_a_teacher_with_the_same_numbers_are_untouched_and_grey_ones_repeated() -> None:
    images = torch.randn(2, 3, 32, 32)
    assert ImageConversion(student(), student(), torch.device("cpu"), "x")(images) is images
    grey = torch.rand(2, 1, 32, 32)
    convert = ImageConversion(student(channels=1), student(), torch.device("cpu"), "x")
    found = convert((grey - MEAN[0]) / STD[0])
    expected = TF.normalize(grey.expand(-1, 3, -1, -1), list(MEAN), list(STD))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(
        ConfigError, match=r"1 channels, but the data has 3; choose a teacher for 3"
    ):
        ImageConversion(student(), student(channels=1), torch.device("cpu"), "x")


def test_classes_in_another_order_are_matched_by_name(tmp_path: Path) -> None:
    run, images = a_run(tmp_path / "run"), torch.randn(2, 3, 24, 24)
    usual = teacher_of(run, ("bear", "cat", "dog", "eel"), size=24)(images)
    other = teacher_of(run, ("eel", "bear", "cat", "dog"), size=24)(images)
    assert other.equal(usual[:, [3, 0, 1, 2]])
    renamed = teacher_of(run, tuple("abcd"), size=24, teacher_classes="in_order")
    assert renamed(images).equal(usual)


def headless(folder: Path) -> Path:
    """A file of a ViT of timm without a head."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, depth=2, img_size=32)
    save_file(model.state_dict(), folder / "headless.safetensors")
    return folder / "headless.safetensors"


def test_teacher_that_cannot_teach_these_classes_is_refused(tmp_path: Path) -> None:
    few, data = a_run(tmp_path / "few"), ("a", "b", "c", "d")
    refused = {
        few: r"few has 4 classes: bear, .*the data has 4: a, .*teacher_classes=in_order",
        tmp_path / "missing.pth": r"task\.teacher: .*missing\.pth does not exist",
        headless(tmp_path): r"headless\.safetensors has no head.*4 classes.*recipe=finetune",
    }
    for place, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            teacher_of(place, data)
    with pytest.raises(ConfigError, match=r"4 classes: bear, .*the data has 3.*recipe=finetune"):
        teacher_of(few, data[:3])
    several = a_run(
        tmp_path / "several", "model=vit_mini", "task=multi_label", "data=shapes_two", classes=data
    )
    with pytest.raises(ConfigError, match=r"several was trained with task=multi_label.* one class"):
        teacher_of(several, data)
    Image.new("RGB", (4, 4)).save(tmp_path / "photo.png")
    with pytest.raises(CheckpointError, match=r"task\.teacher: .*photo\.png is of an unknown kind"):
        teacher_of(tmp_path / "photo.png", data)
    save_file(timm.create_model("test_resnet").state_dict(), tmp_path / "resnet.safetensors")
    with pytest.raises(CheckpointError, match=r"resnet\.safetensors.* task\.teacher_model="):
        teacher_of(tmp_path / "resnet.safetensors", data)


def test_refusal_of_a_teacher_comes_before_any_step(tmp_path: Path) -> None:
    few = a_run(tmp_path / "few")
    with pytest.raises(ConfigError, match=r"few has 4 classes.*the data has 8"):
        train(small_config(tmp_path, "task=distill", f"task.teacher={few}"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("words", [["tune=head"], ["recipe=probe_then_finetune", "init=x"]])
def test_distillation_of_stored_features_is_refused(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"task=distill shows every image to a teacher.* use "):
        small_config(tmp_path, "task=distill", "task.teacher=x", *words)


def test_resume_with_another_teacher_is_refused_unless_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = a_teacher(tmp_path)
    words = ["task=distill", f"task.teacher={teacher}", "duration=8steps"]
    stop_after(monkeypatch, [2])
    assert train(small_config(tmp_path, *words)) == PREEMPTED
    file = teacher / "checkpoints" / "best.safetensors"
    stored = read_checkpoint(file)
    write_checkpoint(file, {n: 2 * t for n, t in stored.tensors.items()}, stored.record)
    with pytest.raises(ConfigError, match=r"(?s)best\.safetensors has other weights.*another name"):
        train(small_config(tmp_path, *words))
    write_checkpoint(file, stored.tensors, stored.record)  # the old weights in a new file
    stop_after(monkeypatch, [4])
    assert train(small_config(tmp_path, *words)) == PREEMPTED
    write_checkpoint(file, {n: 2 * t for n, t in stored.tensors.items()}, stored.record)
    capsys.readouterr()
    assert train(small_config(tmp_path, *words, "allow_changes=true")) == 0
    assert "resumed with the new ones" in capsys.readouterr().out


def test_digest_tells_weights_apart() -> None:
    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    assert digest_weights(first) != digest_weights(second)
    second.load_state_dict(first.state_dict())
    assert digest_weights(first) == digest_weights(second)
    with torch.no_grad():
        second.bias[0] += 1
    assert digest_weights(first) != digest_weights(second)
    assert digest_weights(first, excluded={"bias"}) == digest_weights(second, excluded={"bias"})
