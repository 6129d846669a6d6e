"""The YAML choices: complete, valid, and introduced by one line."""

from pathlib import Path

import pytest
import yaml
from source_settings import YAML

from vision.config import ConfigError, parse
from vision.data.configs import DataConfig, EvalDataConfig

CHOICES = sorted(YAML.glob("*.yaml"))


@pytest.mark.parametrize("path", CHOICES, ids=lambda path: path.stem)
def test_data_yaml_has_every_field_and_one_line_that_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert len(text.splitlines()[0]) <= 110
    values = yaml.safe_load(text)
    # What a user must give has no value; all else is there, or parsing would say so.
    given = {key: "given" if value == "???" else value for key, value in values.items()}
    config = parse(EvalDataConfig, given)
    assert set(given) == set(type(config).model_fields)


def test_data_yaml_choices_are_those_promised() -> None:
    assert {path.stem for path in CHOICES} >= {
        *("shapes", "fashion_mnist", "cifar10", "cifar100", "imagenet"),
        *("torchvision", "folder", "webdataset", "huggingface"),
    }


@pytest.mark.parametrize(
    ("choice", "change", "message"),
    [
        ("shapes", {"train_fraction": 0.0}, "train_fraction"),
        ("shapes", {"train_fraction": 1.5}, "train_fraction"),
        ("shapes", {"sampling": "ballanced"}, "'uniform' or 'balanced'"),
        ("shapes", {"samples_per_clas": 3}, "samples_per_class"),
        ("folder", {"root": "x", "val_fraction": 1.0}, "val_fraction"),
        ("folder", {"root": "x", "val_fraction": 0.6, "test_fraction": 0.4}, "leave nothing"),
        ("webdataset", {"root": "x", "channels": 4}, "channels"),
    ],
)
def test_data_config_with_a_mistake_names_the_setting(
    choice: str, change: dict[str, object], message: str
) -> None:
    values = yaml.safe_load((YAML / f"{choice}.yaml").read_text(encoding="utf-8"))
    with pytest.raises(ConfigError, match=message):
        parse(DataConfig, values | change)
