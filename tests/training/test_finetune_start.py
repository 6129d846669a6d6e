"""Where a run starts: files of others, baselines, a probe before it; and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from finetune_runs import base_run, explicit_model, stop_after, tuned_config, weights_of
from model_settings import model_names, redraw
from safetensors.torch import save_file
from small_runs import assert_same_bits, folder_of_images, last_tensors, metrics, status

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.native.checkpoint import read_checkpoint
from vision.checkpoints.native.checkpoint_folder import latest
from vision.checkpoints.native.header import read_record
from vision.checkpoints.open import open_model
from vision.cli.composition import compose
from vision.config import ConfigError
from vision.training import loop
from vision.training.loop import train
from vision.training.run.run_folder import PREEMPTED, Run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ViT, trained on images from −1 to 1."""
    return base_run(tmp_path_factory.mktemp("vit"), "preprocess=inception")


def record_of(folder: Path) -> dict[str, Any]:
    return read_record(latest(folder / "run" / "checkpoints")[0])


def test_file_of_timm_is_the_start_with_its_model_and_a_new_head(tmp_path: Path) -> None:
    theirs: Any = redraw(
        timm.create_model(
            "vit_tiny_patch16_224",
            img_size=32,
            patch_size=8,
            embed_dim=24,
            depth=2,
            num_heads=3,
            num_classes=5,
        )
    )
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    more = ["model.heads=3", "data.image_size=32", "tune=head"]
    config = tuned_config(tmp_path, tmp_path / "model.safetensors", *more)
    assert train(config) == 0
    report = json.loads((tmp_path / "run" / "load_report.json").read_text())
    assert report["layout"] == "timm ViT"
    assert sorted(report["new"]) == ["head.bias", "head.weight"]
    stored = open_model(tmp_path / "run", weights="raw")
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        ours = stored.model.pool(stored.model.forward_features(images))
        expected = theirs.eval().forward_head(theirs.forward_features(images), pre_logits=True)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_preprocessing_comes_from_the_weights_and_what_is_given_wins_with_a_warning(
    tmp_path: Path, pretrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tuned_config(tmp_path / "auto", pretrained, "duration=2steps")) == 0
    printed = capsys.readouterr().out
    found = record_of(tmp_path / "auto")["preprocess"]
    assert found["mean"] == [0.5, 0.5, 0.5]
    assert str(pretrained) in found["origin"]["mean"]
    assert "warning" not in printed and "mean 0.5, 0.5, 0.5" in printed
    more = ["duration=2steps", "preprocess.mean=[0.4,0.4,0.4]"]
    assert train(tuned_config(tmp_path / "given", pretrained, *more)) == 0
    found = record_of(tmp_path / "given")["preprocess"]
    assert (found["mean"], found["std"]) == ([0.4, 0.4, 0.4], [0.5, 0.5, 0.5])
    assert found["origin"]["mean"] == "the config"
    printed = " ".join(capsys.readouterr().out.split())
    assert "preprocess.mean = [0.4, 0.4, 0.4], but the weights were trained with [0.5" in printed


@pytest.mark.parametrize("model", ["auto", "named"])
@pytest.mark.parametrize("source", ["own run", "file of timm"])
def test_size_of_the_images_comes_from_the_weights_unless_it_is_given(
    tmp_path: Path, pretrained: Path, model: str, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own, place = source == "own run", pretrained
    if not own:
        theirs = timm.create_model(
            "vit_tiny_patch16_224", img_size=24, patch_size=8, embed_dim=24, depth=1, num_heads=3
        )
        place = tmp_path / "model.safetensors"
        save_file(theirs.state_dict(), place)
    more = ["data=folder", f"data.root={folder_of_images(tmp_path / 'images', 8)}"]
    more += ["data.val_fraction=0.25", "duration=2steps"]
    if model == "named":
        more += explicit_model("vit_mini")
    if not own:
        size = ["model.patch_size=8", "model.width=24", "model.depth=1"]
        more += ["model.heads=3", *(size if model == "named" else [])]
    asked = [*more, "data.image_size=auto"]
    assert train(tuned_config(tmp_path / "auto", place, *asked, data=False)) == 0
    found = record_of(tmp_path / "auto")["preprocess"]
    side = 16 if own else 24
    assert found["image_size"] == [side, side]
    assert found["origin"]["image_size"] == "the weights"
    printed = " ".join(capsys.readouterr().out.split())
    assert f"image size {side} × {side} (from the weights)" in printed
    given = [*more, "data.image_size=32"]
    assert train(tuned_config(tmp_path / "given", place, *given, data=False)) == 0
    assert record_of(tmp_path / "given")["preprocess"]["image_size"] == [32, 32]
    printed = " ".join(capsys.readouterr().out.split())
    assert f"size trained on {side} × {side} pixels; this run has 32 × 32" in printed


def test_run_with_as_many_other_classes_gets_a_new_head(tmp_path: Path, pretrained: Path) -> None:
    """Two classes, then the same two, then two others."""
    images = folder_of_images(tmp_path / "images", 12)
    others = folder_of_images(tmp_path / "other images", 12)
    for name in ("dark", "light"):
        (others / name).rename(others / f"very {name}")
    short = ["duration=1steps", "schedule.warmup=0steps", "data=folder", "data.val_fraction=0.25"]
    init, new = pretrained, []
    for name, root in (("first", images), ("same", images), ("others", others)):
        config = tuned_config(tmp_path / name, init, *short, f"data.root={root}", data=False)
        assert train(config) == 0
        new.append(sorted(record_of(tmp_path / name)["load_report"]["new"]))
        init = tmp_path / name / "run"
    assert new == [["head.bias", "head.weight"], [], ["head.bias", "head.weight"]]


def test_probe_comes_first_and_its_head_is_what_fine_tuning_starts_with(
    tmp_path: Path, pretrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["recipe=probe_then_finetune", "probe_first.duration=10steps", "augment=deit"]
    config = tuned_config(tmp_path / "whole", pretrained, *more)
    assert train(config) == 0
    whole = tmp_path / "whole" / "run"
    assert Run(whole / "probe").status()["status"] == "finished"
    assert len(list((tmp_path / "whole" / ".features").glob("train-*.npy"))) == 1
    report = record_of(tmp_path / "whole")["load_report"]
    assert report["source"].startswith(str(whole / "probe")) and not report["new"]
    settings = json.loads((whole / "config.json").read_text())
    assert settings["init"] == str(pretrained)  # as it was read
    probe, before = weights_of(whole / "probe"), weights_of(pretrained)
    assert not probe["model.head.weight"].equal(before["model.head.weight"])
    assert probe["model.norm.weight"].equal(before["model.norm.weight"])
    # Stopped in the probe and in the run after it, both go on.
    stop_after(monkeypatch, [4, 9, 5])
    config = tuned_config(tmp_path / "stopped", pretrained, *more)
    assert [train(config) for _ in range(4)] == [PREEMPTED, PREEMPTED, PREEMPTED, 0]
    for name, tensor in last_tensors(tmp_path / "whole").items():
        assert last_tensors(tmp_path / "stopped")[name].equal(tensor), name
    assert train(config) == 0  # finished: neither is trained again
    assert status(tmp_path / "stopped")["status"] == "finished"


def test_run_killed_before_its_first_checkpoint_starts_from_the_probe_again(
    tmp_path: Path, pretrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["recipe=probe_then_finetune", "probe_first.duration=4steps", "duration=2steps"]
    assert train(tuned_config(tmp_path / "whole", pretrained, *more)) == 0
    config = tuned_config(tmp_path / "killed", pretrained, *more)
    original = loop.forward_backward

    def killed(*arguments: Any) -> Any:
        if arguments[0].config.probe_first is not None:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(loop, "forward_backward", killed)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    monkeypatch.undo()
    assert train(config) == 0
    assert_same_bits(last_tensors(tmp_path / "whole"), last_tensors(tmp_path / "killed"))


@pytest.mark.parametrize("kind", ["head", "bitfit"])
def test_baseline_is_tuned_from_a_run_with_its_statistics_kept(tmp_path: Path, kind: str) -> None:
    baseline = ["model=timm", "model.name=resnet10t", "data.image_size=32"]
    config = tuned_config(tmp_path / "base", "nowhere", *baseline, "init=null", "duration=3steps")
    assert train(config) == 0
    source = tmp_path / "base" / "run"
    config = tuned_config(tmp_path / "tuned", source, *baseline, f"tune={kind}", "duration=4steps")
    assert train(config) == 0
    before, after = weights_of(source), last_tensors(tmp_path / "tuned")
    changed = {k for k in before if not after[k].equal(before[k])}
    if kind == "head":
        assert changed == {"model.model.fc.weight", "model.model.fc.bias"}
    else:
        parameters = {k for k in changed if "running" not in k and "batches" not in k}
        assert parameters and all(k.endswith("bias") or ".fc." in k for k in parameters)


def test_baseline_from_a_file_of_timm_gets_a_new_head(tmp_path: Path) -> None:
    theirs = timm.create_model("resnet10t", num_classes=5)
    torch.save({"state_dict": theirs.state_dict(), "arch": "resnet10t"}, tmp_path / "model.pth")
    more = ["model=timm", "model.name=resnet10t", "data.image_size=32", "tune=head"]
    config = tuned_config(tmp_path, tmp_path / "model.pth", *more, "duration=2steps")
    assert train(config) == 0
    report = record_of(tmp_path)["load_report"]
    assert sorted(report["new"]) == ["model.fc.bias", "model.fc.weight"]
    assert report["integrity"] == "checksums match"
    tensors = last_tensors(tmp_path)
    assert tensors["model.model.conv1.0.weight"].equal(theirs.state_dict()["conv1.0.weight"])
    other = ["model=timm", "model.name=resnet18"]
    config = tuned_config(tmp_path / "other", tmp_path / "model.pth", *other)
    with pytest.raises(ConfigError, match="do not fit the model"):
        train(config)


def test_parts_are_trained_by_their_names(tmp_path: Path, pretrained: Path) -> None:
    more = ["tune=partial", "tune.blocks=0", "tune.parts=[blocks.*.attn,patch_embed]"]
    assert train(tuned_config(tmp_path, pretrained, *more, "duration=3steps")) == 0
    before, after = weights_of(pretrained), last_tensors(tmp_path)
    changed = {k.removeprefix("model.") for k in before if not after[k].equal(before[k])}
    named = ("head.", "patch_embed.", "blocks.0.attn.", "blocks.1.attn.")
    assert changed == {k.removeprefix("model.") for k in before if k[6:].startswith(named)}


WRONG = {
    "init=nowhere/model.pth": "init: nowhere/model.pth does not exist",
    "init=timm:no_such_model": "init: timm has no weights",
    "init=pretrained model=vit_mini": "no published weights are known for this model",
    "init=null": "model=auto takes the model from the weights",
    "tune=partial tune.parts=[bloks.1]": "'bloks.1' matches no part of the model",
    "tune=partial tune.blocks=9": "tune.blocks = 9: the model has 2 blocks",
    "tune=lora tune.rank=99": "tune.rank = 99 is larger than",
    "tune=lora tune.targets=[q,q]": "name each one once",
    "tune=lora tune.targets=[x]": "tune.targets",
    "tune=head augment=swin": "use augment=none or tune.cache=false",
    "tune=head flip_test=true": "use flip_test=false or tune.cache=false",
    "tune=head augment.flip=alternate": "augment.flip=alternate changes images",
    "tune=head recipe=probe_then_finetune augment=none tune=head": "is a probe already",
    "tune=lora model=timm model.name=resnet10t init=null": "tune=lora is for the ViT and Swin",
    "model.window=7": "only a Swin has windows",
}


@pytest.mark.parametrize("words", list(WRONG))
def test_start_that_cannot_be_is_refused_with_what_to_do(
    tmp_path: Path, pretrained: Path, words: str
) -> None:
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        train(tuned_config(tmp_path, pretrained, *words.split()))
    assert WRONG[words] in str(caught.value)
    assert not (tmp_path / "run" / "status.json").exists()


def test_weights_of_another_model_are_refused_with_the_names(
    tmp_path: Path, pretrained: Path
) -> None:
    config = tuned_config(tmp_path, pretrained, *explicit_model("vit_mini"), "model.depth=3")
    with pytest.raises(ConfigError, match=r"blocks\.2"):
        train(config)


def test_models_name_weights_that_timm_has() -> None:
    known = set(timm.list_pretrained())
    named = 0
    for name in model_names():
        values = compose("train", [f"model={name}"])[0]["model"]
        if values["pretrained"] is None:
            continue
        named += 1
        assert values["pretrained"].startswith("timm:")
        assert values["pretrained"].removeprefix("timm:") in known | {"resnet50"}, name
    assert named >= 14


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "words",
    [
        ["tune=lora", "tune.rank=2", "tune.targets=[q,v,fc1]"],
        ["tune=head"],
        ["tune=partial", "tune.blocks=1"],
    ],
    ids=["lora", "cached head", "partial"],
)
@pytest.mark.parametrize("model", ["vit_mini", "swinv2_mini"])
def test_two_processes_tune_as_one_does(
    tmp_path: Path, parallel: str, words: list[str], model: str
) -> None:
    import sys

    from small_runs import SMALL, SMALL_SHAPES
    from started_runs import start

    source = base_run(tmp_path / "base", model=model)
    more = [*words, f"parallel={parallel}", "ema=0.9", "duration=8steps"]
    assert train(tuned_config(tmp_path / "one", source, *more)) == 0
    settings = ["model=auto", f"init={source}", *SMALL_SHAPES, *SMALL, "name=run", *more]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "train.py"]
    process = start(sys.executable, *launch, *settings, f"output={tmp_path / 'two'}")
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    one, two = last_tensors(tmp_path / "one"), last_tensors(tmp_path / "two")
    assert one.keys() == two.keys()
    for name in one:
        assert two[name].float().allclose(one[name].float(), rtol=1e-3, atol=1e-5), name
    losses = [[e["loss"] for e in metrics(tmp_path / n, "val")] for n in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    frozen = "model.patch_embed.proj.weight"
    checkpoint = read_checkpoint(latest(source / "checkpoints")[0])
    assert two[frozen].equal(checkpoint.tensors[frozen])
