"""Images of the attention while a model is trained."""

import json
from pathlib import Path

import pytest
from PIL import Image
from small_runs import SMALL, SMALL_SHAPES, assert_same_bits, last_tensors, small_config

from vision.cli.composition import compose
from vision.config import ConfigError, parse
from vision.training.configs import TrainConfig
from vision.training.loop import train

EVERY = ["duration=8steps", "evaluate_every=2steps", "attention_every=4steps"]


@pytest.mark.parametrize("model", ["vit_mini", pytest.param("swin_mini", marks=pytest.mark.slow)])
def test_run_that_draws_attention_leaves_images_and_the_same_weights(
    tmp_path: Path, model: str
) -> None:
    assert train(small_config(tmp_path / "plain", *EVERY[:2], model=model)) == 0
    assert train(small_config(tmp_path / "drawn", *EVERY, model=model)) == 0
    assert_same_bits(last_tensors(tmp_path / "plain"), last_tensors(tmp_path / "drawn"))
    folder = tmp_path / "drawn" / "run" / "attention"
    names = {path.name for path in folder.glob("*.png")}
    assert {f"{kind}_{step:08d}.png" for kind in ("step", "heads") for step in (4, 8)} <= names
    with Image.open(folder / "step_00000008.png") as image:
        assert min(image.size) > 50
    lines = [json.loads(line) for line in (folder / "heads.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {4, 8}


def test_run_that_draws_between_evaluations_is_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path, "evaluate_every=4steps", "attention_every=6steps")
    with pytest.raises(ConfigError, match="multiple of evaluate_every"):
        train(config)


def test_run_of_a_model_without_attention_is_refused_before_it_starts(tmp_path: Path) -> None:
    resnet = ["model=timm", "model.name=test_resnet.r160_in1k", *SMALL_SHAPES, *SMALL, *EVERY]
    values, _ = compose("train", [*resnet, f"output={tmp_path}", "name=run"])
    with pytest.raises(ConfigError, match="attention_every"):
        train(parse(TrainConfig, values))
