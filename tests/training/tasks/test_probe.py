"""A probe on stored features is the probe on images, and computes them once."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from finetune_runs import base_run, stop_after, tuned_config
from model_settings import small_model
from PIL import Image
from small_runs import folder_of_images, last_tensors, metrics

from vision.checkpoints.open import open_model
from vision.data.batches import Loader, Pipeline, evaluation_batches
from vision.data.preprocess import normalizer
from vision.data.sources.build_source import build_source
from vision.training.loop import train
from vision.training.optim import parameter_groups
from vision.training.run.run_folder import PREEMPTED
from vision.training.tasks import probe

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained small ViT."""
    return base_run(tmp_path_factory.mktemp("vit"))


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory, pretrained: Path) -> Path:
    """A finished probe on stored features."""
    folder = tmp_path_factory.mktemp("probe")
    assert train(tuned_config(folder, pretrained, "tune=head", "ema=0.9")) == 0
    return folder


def cached(folder: Path, split: str) -> Path:
    """The features of a split, which the runs in a folder have computed once."""
    (file,) = (folder / ".features").glob(f"{split}-*.npy")
    return file


def test_cached_probe_has_the_losses_of_a_frozen_model(
    tmp_path: Path, pretrained: Path, computed: Path
) -> None:
    more = ["tune=head", "tune.cache=false", "ema=0.9"]
    dropping = ["model.drop_path=0.3", "model.dropout=0.3"]  # a frozen model drops nothing
    assert train(tuned_config(tmp_path, pretrained, *more, *dropping)) == 0
    for split in ("train", "val", "val_ema"):
        losses = [[e["loss"] for e in metrics(folder, split)] for folder in (tmp_path, computed)]
        assert len(losses[0]) == len(losses[1]) >= 2
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    stored, plain = last_tensors(computed), last_tensors(tmp_path)
    assert stored.keys() == plain.keys()  # the whole model, ready for anything
    for name in stored:
        torch.testing.assert_close(stored[name], plain[name], rtol=1e-4, atol=1e-6)


def test_stored_features_are_what_the_head_of_the_model_is_given(computed: Path) -> None:
    stored = open_model(computed / "run", weights="raw")
    assert stored.record is not None and stored.record.config.data is not None
    source = build_source(stored.record.config.data, "train")
    pipeline = Pipeline(source, stored.preprocess, None, 0, 10**6, "raise")
    config = tuned_config(computed, "nowhere").loader
    batches = list(evaluation_batches(Loader(pipeline, config, 0), 7))
    seen: list[torch.Tensor] = []
    stored.model.head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        for batch in batches:
            stored.model(normalizer(stored.preprocess, CPU)(batch.images))
    found = np.load(cached(computed, "train"))
    assert found.shape == (40, 16)
    torch.testing.assert_close(torch.from_numpy(found), torch.cat(seen), rtol=1e-4, atol=1e-5)


def test_features_are_computed_once_and_again_when_they_do_not_fit(
    tmp_path: Path, pretrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    compute = probe._compute
    monkeypatch.setattr(
        probe,
        "_compute",
        lambda *given: calls.append(given[2].name.partition("-")[0]) or compute(*given),
    )
    config = tuned_config(tmp_path, pretrained, "tune=head")
    stop_after(monkeypatch, [3, 5, 7])
    assert train(config) == PREEMPTED
    assert calls == ["train", "val"]
    assert train(config) == PREEMPTED
    assert len(calls) == 2  # found beside the run
    cached(tmp_path, "val").with_suffix(".json").write_text("[1")  # damaged
    cached(tmp_path, "train").unlink()
    assert train(config) == PREEMPTED
    assert calls[2:] == ["train", "val"]
    assert train(config) == 0
    assert len(calls) == 4


def test_features_are_shared_by_runs_of_the_same_weights_and_data(
    tmp_path: Path, pretrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is learned on them; also by the probe before a fine-tuning. Other files under the
    same names are other images.
    """
    calls = []
    compute = probe._compute
    monkeypatch.setattr(
        probe, "_compute", lambda *given: calls.append(given[2].parent) or compute(*given)
    )
    root = folder_of_images(tmp_path / "images", 8)
    data = ["data=folder", f"data.root={root}", "data.val_fraction=0.25", "duration=2steps"]
    settings = [
        ["tune=head", "name=a"],
        ["tune=head", "name=b", "optimizer.learning_rate=0.1", "data.sampling=balanced", "seed=3"],
        ["recipe=probe_then_finetune", "name=c", "probe_first.duration=2steps"],
    ]
    for more in settings:
        config = tuned_config(tmp_path / "runs", pretrained, *data, *more, data=False)
        assert train(config) == 0
    assert calls == [tmp_path / "runs" / ".features"] * 2
    file = next(root.rglob("*.png"))
    Image.new("RGB", (20, 24), (9, 9, 9)).save(file)
    os.utime(file, ns=(0, 0))
    config = tuned_config(tmp_path / "runs", pretrained, *data, "tune=head", "name=d", data=False)
    assert train(config) == 0
    assert len(calls) == 3  # of the split that the file is in


def test_probe_on_stored_features_draws_the_attention_of_images(
    tmp_path: Path, pretrained: Path
) -> None:
    often = ["duration=2steps", "evaluate_every=2steps", "attention_every=2steps"]
    assert train(tuned_config(tmp_path, pretrained, "tune=head", *often)) == 0
    assert (tmp_path / "run" / "attention" / "step_00000002.png").exists()


def test_fingerprint_tells_weights_images_and_preprocessing_apart(
    tmp_path: Path, pretrained: Path, computed: Path
) -> None:
    def fingerprints(folder: Path) -> dict[str, str]:
        return {split: cached(folder, split).name for split in ("train", "val")}

    seen = [fingerprints(computed)]
    other = base_run(tmp_path / "other", "seed=1")
    changes = {
        "weights": (other, []),
        "images": (pretrained, ["data.seed=1"]),
        "preprocess": (pretrained, ["preprocess=inception"]),
        "rate": (pretrained, ["optimizer.learning_rate=0.1"]),
    }
    for name, (source, more) in changes.items():
        config = tuned_config(tmp_path / name, source, "tune=head", "duration=2steps", *more)
        assert train(config) == 0
        seen.append(fingerprints(tmp_path / name))
    assert seen[4] == seen[0]
    for split in ("train", "val"):
        assert len({entries[split] for entries in seen}) == 4


def test_unreadable_images_are_skipped_as_without_stored_features(
    tmp_path: Path, pretrained: Path
) -> None:
    random = np.random.default_rng(0)
    for label in ("a", "b"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(16):
            pixels = random.integers(0, 256, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / label / f"{number}.png")
    (tmp_path / "images" / "a" / "3.png").write_bytes(b"")
    (tmp_path / "images" / "b" / "5.png").write_bytes(b"")
    more = ["data=folder", f"data.root={tmp_path / 'images'}", "data.val_fraction=0.25"]
    more += ["data.on_error=skip", "data.max_error_share=0.5", "tune=head"]
    losses = []
    for cache in ("true", "false"):
        config = tuned_config(
            tmp_path / cache, pretrained, *more, f"tune.cache={cache}", data=False
        )
        assert train(config) == 0
        losses.append([e["loss"] for e in metrics(tmp_path / cache)])
        listed = (tmp_path / cache / "run" / "skipped-0.jsonl").read_text().splitlines()
        assert {Path(json.loads(x)["image"]).name for x in listed} == {"3.png", "5.png"}
        samples = [e["samples"] for e in metrics(tmp_path / cache, "val")]
        assert len(set(samples)) == 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_probe_before_a_run_with_muon_has_a_rate_of_its_own(tmp_path: Path) -> None:
    """Muon leaves the head to AdamW, whose settings in the run are not those of the probe."""
    more = ["recipe=probe_then_finetune", "probe_first.learning_rate=0.003"]
    muon = ["name=muon", "learning_rate=0.02", "rest_learning_rate=1e-4", "rest_weight_decay=0.1"]
    config = tuned_config(tmp_path, "x", *more, *(f"optimizer.{word}" for word in muon))
    settings = probe.probe_config(config, tmp_path).optimizer
    model = small_model("vit_tiny", (32, 32))
    head = next(g for g in parameter_groups(model, settings) if "head.weight" in g["names"])
    assert settings.learning_rate * head["lr_scale"] == 0.003
    assert head["weight_decay"] == 0
