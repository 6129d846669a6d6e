"""Masked pretraining, from its masks to a classifier that starts from it."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from finetune_runs import stop_after
from PIL import Image
from small_runs import assert_same_bits, last_tensors, metrics, small_config, status, words
from started_runs import torchrun

import vision
from vision.checkpoints.convert import convert
from vision.checkpoints.open import open_model
from vision.cli.app import main
from vision.data.batches import Batch
from vision.training.loop import train
from vision.training.run.run_folder import PREEMPTED
from vision.training.tasks.masked import Masked

TASK = [
    "task=masked",
    *("task.decoder.width=16", "task.decoder.depth=1", "task.decoder.heads=2"),
    *("data.image_size=32", "duration=2epochs"),
]
STILL = ["optimizer.learning_rate=1e-12", "schedule.warmup_from=0", "schedule.end_at=0"]
SQUARES = "task.mask_size=8"
RICH = [*TASK, "augment=inception", "augment.repeats=2", "ema=0.9", "model.drop_path=0.2"]
METHODS = {
    "mae": ("vit_mini", []),
    "simmim": ("vit_mini", ["task.method=simmim", SQUARES]),
    "swin": ("swin_mini", [SQUARES]),
    "swinv2": ("swinv2_mini", [SQUARES]),
}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of MAE."""
    folder = tmp_path_factory.mktemp("pretrained")
    assert train(small_config(folder, *TASK)) == 0
    return folder


@pytest.mark.parametrize(
    "method", [m if m == "mae" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS]
)
def test_stopped_run_ends_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    model, more = METHODS[method]
    settings = [*RICH, *more, "max_batch_per_device=4", "optimizer.learning_rate=0.01"]
    assert train(small_config(tmp_path / "whole", *settings, model=model)) == 0
    stop_after(monkeypatch, [3, 8])
    config = small_config(tmp_path / "stopped", *settings, model=model)
    assert [train(config) for _ in range(3)] == [PREEMPTED, PREEMPTED, 0]
    assert_same_bits(last_tensors(tmp_path / "whole"), last_tensors(tmp_path / "stopped"))
    losses = [event["loss"] for event in metrics(tmp_path / "whole", "val_ema")]
    assert status(tmp_path / "whole")["best"] == min(losses)
    sheets = {path.name for path in (tmp_path / "stopped/run/reconstructions").iterdir()}
    assert sheets == {f"{split}_{n:08d}.png" for split in ("val", "val_ema") for n in (7, 10)}


class Noted(Masked):
    """A task that notes the mask of each use of an image."""

    noted: dict[tuple[int, int, int], bytes]

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        images, masks = super().inputs(batch)
        uses = zip(batch.ids.tolist(), batch.occurrences.tolist(), strict=True)
        for (index, use), mask in zip(uses, masks, strict=True):
            self.noted[batch.epoch, index, use] = mask.numpy().tobytes()
        return images, masks


def test_masks_do_not_depend_on_parts_or_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for number, more in enumerate((["loader.workers=0"], ["loader.workers=1"])):
        parts = ["max_batch_per_device=2"] if number else []
        Noted.noted = {}
        monkeypatch.setattr("vision.training.tasks.masked.Masked", Noted)
        settings = [*TASK, "augment.repeats=2", *parts, *more]
        assert train(small_config(tmp_path / str(number), *settings)) == 0
        found.append(Noted.noted)
        monkeypatch.undo()
    assert found[0] == found[1]
    assert len(set(found[0].values())) > 70  # two epochs of 40 images, nearly all different
    first, second = ([event["loss"] for event in metrics(tmp_path / n)] for n in ("0", "1"))
    assert np.allclose(first, second, rtol=1e-4)


def test_evaluation_hides_the_same_of_each_image_whatever_the_seed_and_the_batch(
    tmp_path: Path, pretrained: Path
) -> None:
    before = metrics(pretrained, "val")[-1]["loss"]
    settings = [*TASK, f"init={pretrained / 'run'}", "init_weights=raw", "seed=3"]
    assert train(small_config(tmp_path, *settings, *STILL, "max_batch_per_device=1")) == 0
    assert metrics(tmp_path, "val")[-1]["loss"] == pytest.approx(before, rel=1e-5)


def test_fine_tuning_has_a_new_head_and_says_what_became_of_the_decoder(
    tmp_path: Path, pretrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = pretrained / "run"
    settings = words(
        tmp_path, "recipe=finetune", "model=auto", f"init={run}", "schedule.warmup=1steps"
    )
    settings = [word for word in settings if not word.startswith("model.")]
    assert main(["train", *settings, "data.image_size=32", "duration=2steps"]) == 0
    output = capsys.readouterr().out
    assert "new       head.weight, head.bias: the weights have no head" in output
    assert "ignored   mask_token, embed.weight" in output
    assert "decoder of masked pretraining" in output
    assert last_tensors(tmp_path)["model.head.weight"].shape == (8, 16)


def test_run_opens_as_features_and_converts_like_a_model_without_a_head(
    tmp_path: Path, pretrained: Path
) -> None:
    run = pretrained / "run"
    loaded = vision.load(str(run))
    picture = Image.new("RGB", (32, 32), (10, 200, 30))
    features = loaded.features([picture])
    assert features.shape == (1, 16)
    opened = open_model(run)
    assert opened.classes == 0 and opened.class_names is None
    assert "decoder.0.attn.qkv.weight" in opened.report.ignored
    result = convert(run, "timm", tmp_path / "timm")
    assert any("decoder" in note for note in result.notes)
    other = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(other(images), opened.model(images), atol=1e-5, rtol=1e-5)


def test_weights_in_the_layout_of_the_official_mae_go_out_and_continue(
    tmp_path: Path, pretrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mae.pth"
    convert(pretrained / "run", "mae", file)
    stored = torch.load(file, weights_only=True)["model"]
    assert stored["decoder_pos_embed"].shape == (1, 17, 16)
    assert {"mask_token", "decoder_blocks.0.attn.qkv.weight", "decoder_pred.bias"} <= stored.keys()
    given = ["model=auto", "model.heads=2", f"init={file}", "preprocess.crop_ratio=1.0"]
    more = [*TASK, *given, *STILL]
    settings = [w for w in words(tmp_path / "again") if not w.startswith("model")]
    assert main(["train", *settings, *more]) == 0
    output = capsys.readouterr().out
    assert "ignored" not in output and "new  " not in output
    loss = metrics(tmp_path / "again", "val")[-1]["loss"]
    assert loss == pytest.approx(metrics(pretrained, "val")[-1]["loss"], rel=1e-5)


def test_decoder_of_another_size_is_new(
    tmp_path: Path, pretrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [*TASK, f"init={pretrained / 'run'}", "task.decoder.width=32"]
    assert main(["train", *words(tmp_path, *more)]) == 0
    assert "the decoder of the weights is of another method or size" in capsys.readouterr().out


def test_one_folder_of_images_is_enough(tmp_path: Path) -> None:
    folder = tmp_path / "images" / "all"
    folder.mkdir(parents=True)
    for number in range(20):
        Image.new("RGB", (40, 36), (12 * number, 90, 255 - 12 * number)).save(
            folder / f"{number}.png"
        )
    data = ["data=folder", f"data.root={folder.parent}", "data.val_fraction=0.2", "batch_size=4"]
    assert main(["train", *words(tmp_path, *TASK, *data, shapes=False)]) == 0
    assert vision.load(str(tmp_path / "run")).classes == ()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_learn_what_one_learns(tmp_path: Path, method: str, parallel: str) -> None:
    model, more = METHODS[method]
    settings = [*TASK, *more, "augment=inception", "augment.repeats=2"]
    settings += ["optimizer.name=sgd", "optimizer.betas=null"]
    assert train(small_config(tmp_path / "one", *settings, model=model)) == 0
    process = torchrun(tmp_path / "two", *settings, f"parallel={parallel}", model=model)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    first, second = last_tensors(tmp_path / "one"), last_tensors(tmp_path / "two")
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=1e-4, rtol=1e-3)
    for split in ("train", "val"):
        one, two = ([e["loss"] for e in metrics(tmp_path / n, split)] for n in ("one", "two"))
        assert np.allclose(one, two, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "more",
    [
        ["precision=bf16", "optimizer.name=muon", "channels_last=true"],
        ["model.checkpoint_activations=true", "model.dropout=0.1"],
    ],
)
def test_precision_optimiser_and_recomputation(
    tmp_path: Path, method: str, more: list[str]
) -> None:
    model, settings = METHODS[method]
    rates = ["optimizer.learning_rate=1e-2", "max_batch_per_device=auto", "duration=4epochs"]
    assert train(small_config(tmp_path, *TASK, *settings, *rates, *more, model=model)) == 0
    losses = [event["loss"] for event in metrics(tmp_path)]
    assert np.mean(losses[-4:]) < losses[0]
