"""Weights, shifts and focal loss in whole runs: the same for any division of a batch."""

from pathlib import Path

import numpy as np
import pytest
from finetune_runs import base_run, tuned_config
from PIL import Image
from small_runs import SMALL, SMALL_MODELS, metrics

from vision.cli.composition import compose
from vision.config import ConfigError, parse
from vision.training.configs import TrainConfig
from vision.training.loop import train

CHOICES = {
    "weights": ["loss.class_weights=balanced"],
    "effective": ["loss.class_weights=effective", "loss.effective_beta=0.9"],
    "adjustment": ["loss.logit_adjustment=1", "augment.label_smoothing=0.1"],
    "focal": ["loss.kind=focal", "loss.class_weights=[1,5]"],
    "bce": ["loss.kind=bce", "loss.class_weights=balanced"],
}


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 28 and 4 training images of two classes that can be told apart."""
    root = tmp_path_factory.mktemp("unequal")
    random = np.random.default_rng(0)
    for split, counts in (("train", (28, 4)), ("val", (6, 2))):
        for label, (name, count) in enumerate(zip(("many", "few"), counts, strict=True)):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 120, (16, 16, 3)) + 110 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return root


def config(folder: Path, images: Path, *more: str) -> TrainConfig:
    data = ["data=folder", f"data.root={images}"]
    given = ["model=vit_mini", *SMALL_MODELS["vit_mini"], *data, *SMALL, "duration=8steps"]
    values, _ = compose("train", [*given, f"output={folder}", "name=run", *more])
    return parse(TrainConfig, values)


@pytest.mark.parametrize("choice", CHOICES)
def test_parts_of_a_batch_learn_what_the_whole_learns(
    choice: str, unequal: Path, tmp_path: Path
) -> None:
    more = CHOICES[choice]
    assert train(config(tmp_path / "whole", unequal, *more)) == 0
    parts = config(tmp_path / "parts", unequal, *more, "max_batch_per_device=2")
    assert train(parts) == 0
    losses = [[e["loss"] for e in metrics(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    plain = config(tmp_path / "plain", unequal, f"loss.kind={parts.loss.kind}")
    assert train(plain) == 0
    assert losses[0] != pytest.approx([e["loss"] for e in metrics(tmp_path / "plain")], abs=1e-3)


def test_a_run_says_how_unequal_its_classes_are(
    unequal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(config(tmp_path / "plain", unequal)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "unequal, 7 : 1" in said
    assert "loss.class_weights=balanced" in said
    assert "balanced 50.00 %" in said  # at evaluations and at the end: not the accuracy of 75 %
    weights = ["loss.class_weights=[1,5]", "loss.logit_adjustment=0.5"]
    assert train(config(tmp_path / "chosen", unequal, *weights)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "this run has loss.class_weights=[1, 5] and loss.logit_adjustment=0.5" in said


def test_a_probe_has_the_loss_of_a_run_on_images(unequal: Path, tmp_path: Path) -> None:
    base = base_run(tmp_path / "base")
    data = ["data=folder", f"data.root={unequal}", "tune=head", "augment=none"]
    more = [*data, "loss.class_weights=balanced", "loss.kind=focal", "loss.logit_adjustment=1"]
    for name, cache in (("cached", "true"), ("images", "false")):
        given = (*more, f"tune.cache={cache}")
        assert train(tuned_config(tmp_path / name, base, *given, data=False)) == 0
    losses = [[e["loss"] for e in metrics(tmp_path / name)] for name in ("cached", "images")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_weights_for_other_classes_end_a_run_before_it_starts(
    unequal: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="class_weights has 3 numbers, but the data has 2"):
        train(config(tmp_path, unequal, "loss.class_weights=[1,2,3]"))
    assert not (tmp_path / "run" / "checkpoints").exists()
