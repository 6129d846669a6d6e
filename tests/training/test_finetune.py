"""Fine-tuning: what is trained and what is not, where weights come from, that nothing is lost."""

import json
from pathlib import Path

import pytest
import torch
from finetune_runs import TUNED, base_run, explicit_model, stop_after, tuned_config, weights_of
from small_runs import RICH, assert_same_bits, last_tensors, metrics, status

import vision
from vision.checkpoints.native.checkpoint import read_checkpoint
from vision.checkpoints.native.checkpoint_folder import latest
from vision.checkpoints.open import open_model
from vision.models.build import build_model
from vision.models.lora import add_lora
from vision.training.loop import train
from vision.training.run.run_folder import PREEMPTED

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained small ViT."""
    return base_run(tmp_path_factory.mktemp("vit"))


@pytest.fixture(scope="module")
def pretrained_swin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained small Swin V2."""
    return base_run(tmp_path_factory.mktemp("swin"), model="swinv2_mini")


def is_trained(kind: str, name: str) -> bool:
    """What each way trains, by the names of a small ViT or Swin V2 with two blocks or stages."""
    if name.startswith("head."):
        return True
    match kind:
        case "partial":
            return name.startswith(("norm.", "blocks.1.", "layers.1.blocks.1."))
        case "lora":
            return "lora_" in name
        case "bitfit":
            return name.endswith((".bias", ".q_bias", ".v_bias"))
        case _:
            return False


@pytest.mark.parametrize("family", ["pretrained", "pretrained_swin"])
@pytest.mark.parametrize("kind", list(TUNED))
def test_frozen_parameters_keep_every_bit_and_have_no_optimiser_state(
    tmp_path: Path, kind: str, family: str, request: pytest.FixtureRequest
) -> None:
    source: Path = request.getfixturevalue(family)
    more = ["model.drop_path=0.2", "model.dropout=0.1", *TUNED[kind]]
    assert train(tuned_config(tmp_path, source, *more)) == 0
    before, after = weights_of(source), last_tensors(tmp_path)
    names = {k.removeprefix("model.") for k in after if k.startswith("model.")}
    assert names >= {k.removeprefix("model.") for k in before}
    frozen = {name for name in names if not is_trained(kind, name)}
    assert frozen and frozen != names
    for name in frozen:
        assert after[f"model.{name}"].equal(before[f"model.{name}"]), name
    moved = [n for n in names - frozen if not after[f"model.{n}"].equal(_start(before, n, after))]
    # The bias of keys moves all scores of a query alike, so that its gradient is zero, or nearly.
    assert set(moved) == names - frozen
    moments = {k.split("/")[1] for k in after if k.startswith("optimizer.state/")}
    assert moments == names - frozen


def _start(
    before: dict[str, torch.Tensor], name: str, after: dict[str, torch.Tensor]
) -> torch.Tensor:
    """What a trained parameter started from; LoRA's B from zero, and A from whatever."""
    zero = torch.zeros_like(after[f"model.{name}"])
    return before.get(f"model.{name}", zero)


@pytest.mark.parametrize("kind", ["head", "partial", "lora"])
def test_tuning_stopped_twice_ends_in_the_same_bits(
    tmp_path: Path, pretrained: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rich = [] if kind == "head" else RICH[:3]
    more = [*rich, "ema=0.9", *TUNED[kind]]
    assert train(tuned_config(tmp_path / "whole", pretrained, *more)) == 0
    stop_after(monkeypatch, [3, 8])
    config = tuned_config(tmp_path / "stopped", pretrained, *more)
    assert [train(config) for _ in range(3)] == [PREEMPTED, PREEMPTED, 0]
    assert_same_bits(last_tensors(tmp_path / "whole"), last_tensors(tmp_path / "stopped"))
    for split in ("train", "val", "val_ema"):
        whole, stopped = (metrics(tmp_path / name, split) for name in ("whole", "stopped"))
        for event in (*whole, *stopped):
            event.pop("images_per_second", None)
        assert whole == stopped


def test_resumed_run_does_not_need_the_weights_that_it_started_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = base_run(tmp_path / "source")
    config = tuned_config(tmp_path, source, "tune=partial", "tune.blocks=1")
    stop_after(monkeypatch, [4])
    assert train(config) == PREEMPTED
    source.rename(tmp_path / "elsewhere")
    assert train(config) == 0
    record = read_checkpoint(latest(tmp_path / "run" / "checkpoints")[0]).record
    assert record["load_report"]["source"].startswith(str(source))


def test_run_from_weights_stores_and_prints_the_model_and_the_report(
    tmp_path: Path, pretrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tuned_config(tmp_path, pretrained, "model.drop_path=0.25", *TUNED["lora"])
    assert train(config) == 0
    printed = capsys.readouterr().out
    record = read_checkpoint(latest(tmp_path / "run" / "checkpoints")[0]).record
    assert record["config"]["model"]["kind"] == "auto"  # what was asked
    assert (record["model"]["kind"], record["model"]["width"]) == ("vit", 16)
    assert record["model"]["drop_path"] == 0.25  # what a file is told beside its own
    report = json.loads((tmp_path / "run" / "load_report.json").read_text())
    assert report == record["load_report"]
    assert len(report["loaded"]) == len(weights_of(pretrained)) and not report["new"]
    trained, total = record["trained_parameters"], record["parameters"]
    assert f"{total:,} parameters, {trained:,} of them trained (lora)" in printed
    assert report["source"] in printed
    # Two blocks, rank 2: for q, k, v, proj 16 + 16 each, for both layers of the MLP 16 + 64.
    assert trained == 2 * 2 * (4 * 32 + 2 * 80) + 16 * 8 + 8
    assert status(tmp_path)["parameters"] == total


def test_stored_lora_run_opens_as_a_plain_model_with_the_same_logits(
    tmp_path: Path, pretrained: Path
) -> None:
    config = tuned_config(
        tmp_path, pretrained, *TUNED["lora"], "optimizer.learning_rate=0.05", "ema=0.5"
    )
    assert train(config) == 0
    images = torch.randn(4, 3, 16, 16)
    for weights, prefix in (("raw", "model."), ("ema", "ema.")):
        stored = open_model(tmp_path / "run", weights=weights)  # type: ignore[arg-type]
        checkpoint = read_checkpoint(stored.path, prefix=prefix)
        plain = build_model(stored.model.config, (16, 16), classes=8)  # type: ignore[arg-type]
        assert stored.model.state_dict().keys() == plain.state_dict().keys()
        add_lora(plain, rank=2, alpha=16.0, targets=("q", "k", "v", "proj", "fc1", "fc2"))
        tensors = {k.removeprefix(prefix): t for k, t in checkpoint.tensors.items()}
        plain.load_state_dict(tensors)
        difference = (
            tensors["blocks.0.attn.qkv.weight"]
            - stored.model.state_dict()["blocks.0.attn.qkv.weight"]
        )
        assert difference.abs().max() > 1e-3
        with torch.no_grad():
            expected = plain.eval()(images)
            torch.testing.assert_close(stored.model(images), expected, rtol=1e-4, atol=1e-5)
            opened = vision.load(tmp_path / "run", weights=weights).model  # type: ignore[arg-type]
            torch.testing.assert_close(opened(images), expected, rtol=1e-4, atol=1e-5)


def test_run_at_a_larger_size_starts_from_a_lora_run(tmp_path: Path, pretrained: Path) -> None:
    assert train(tuned_config(tmp_path / "first", pretrained, *TUNED["lora"])) == 0
    more = ["recipe=higher_resolution", "data.image_size=24", "schedule.warmup=1steps"]
    config = tuned_config(tmp_path / "second", tmp_path / "first" / "run", *more)
    assert train(config) == 0
    report = json.loads((tmp_path / "second" / "run" / "load_report.json").read_text())
    assert list(report["resized"]) == ["positions.table"]
    assert weights_of(tmp_path / "second" / "run")["model.positions.table"].shape[1] == 1 + 9


def test_new_classes_get_a_new_head_and_keep_the_rest(tmp_path: Path, pretrained: Path) -> None:
    from PIL import Image

    for label, color in (("dark", 20), ("light", 220), ("red", 120)):
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(8):
            file = tmp_path / "images" / label / f"{number}.png"
            Image.new("RGB", (20, 20), (color, color, number)).save(file)
    more = ["data=folder", f"data.root={tmp_path / 'images'}", "data.val_fraction=0.25"]
    config = tuned_config(tmp_path, pretrained, *more, *TUNED["head"], data=False)
    assert train(config) == 0
    report = json.loads((tmp_path / "run" / "load_report.json").read_text())
    assert sorted(report["new"]) == ["head.bias", "head.weight"]
    assert open_model(tmp_path / "run").class_names == ("dark", "light", "red")
    assert weights_of(tmp_path / "run")["model.head.weight"].shape == (3, 16)


def test_named_model_takes_the_weights_of_a_run(tmp_path: Path, pretrained: Path) -> None:
    more = [*explicit_model("vit_mini"), *TUNED["bitfit"]]
    assert train(tuned_config(tmp_path, pretrained, *more)) == 0
    name = "model.blocks.0.attn.qkv.weight"
    assert last_tensors(tmp_path)[name].equal(weights_of(pretrained)[name])
