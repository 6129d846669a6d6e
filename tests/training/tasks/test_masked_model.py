"""What masked pretraining cannot do is refused before any work, with what works."""

import re
from pathlib import Path

import pytest
from small_runs import small_config

from vision.cli.composition import compose
from vision.config import ConfigError, parse
from vision.training.configs import TrainConfig
from vision.training.loop import train


@pytest.mark.parametrize(
    ("model", "words", "value", "remedy"),
    [
        ("vit_mini", ["task.ratio=0"], "task.ratio = 0", "task.ratio=0.6"),
        ("vit_mini", ["task.ratio=1"], "hides 16 of the 16", "task.ratio=0.6"),
        ("vit_mini", ["task.ratio=0.99"], "hides 16 of the 16", "task.ratio=0.6"),
        ("vit_mini", ["model.stem=conv"], "model.stem=conv", "task.method=simmim"),
        ("vit_mini", ["model.relative_bias=block"], "relative_bias=block", "task.method=simmim"),
        ("vit_mini", ["task.method=simmim"], "task.mask_size = 32", "task.mask_size=16"),
        ("vit_mini", ["task.mask_size=12"], "task.mask_size = 12", "task.mask_size=16"),
        ("vit_mini", ["data.image_size=36"], "36 × 36", "data.image_size"),
        ("swin_mini", ["task.method=mae"], "task.method=mae needs a ViT", "task.method=simmim"),
    ],
)
def test_refused_with_the_remedy(
    tmp_path: Path, model: str, words: list[str], value: str, remedy: str
) -> None:
    config = small_config(tmp_path, "task=masked", "data.image_size=32", *words, model=model)
    with pytest.raises(ConfigError, match=f"{re.escape(value)}.*{re.escape(remedy)}"):
        train(config)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_model_of_timm_is_refused(tmp_path: Path) -> None:
    values, _ = compose("train", ["task=masked", "model=timm", "model.name=test_vit"])
    config = parse(TrainConfig, {**values, "output": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"model of timm.*model=vit_base"):
        train(config)


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["augment=deit"], "augment.mixup=0.0"),
        (["tune=head"], "tune=all"),
        (["flip_test=true"], "flip_test=false"),
        (["attention_every=1epochs"], "attention_every=null"),
        (["data.sampling=balanced"], "data.sampling=uniform"),
        (["checkpoint.best=top1"], "choose one of loss"),
        (["task.decoder.heads=7"], "divisible by task.decoder.heads = 7"),
        (["task.ratio=1.5"], "less than or equal to 1"),
    ],
)
def test_settings_without_meaning_are_refused(
    tmp_path: Path, words: list[str], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        small_config(tmp_path, "task=masked", *words)
