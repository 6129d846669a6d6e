"""Model settings that cannot work are refused with the field, the values and what is expected."""

from typing import Any

import pytest
from model_settings import model_config, model_values

from vision.config import ConfigError, parse
from vision.models.configs import ModelConfig

MISTAKES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "heads that do not divide the width": (
        "vit_base",
        {"heads": 7},
        ["heads = 7", "width = 768"],
    ),
    "heads of a later stage that do not divide its width": (
        "swin_tiny",
        {"heads": [3, 6, 5, 24]},
        ["heads = 5 does not divide width = 96 · 4 = 384"],
    ),
    "fewer heads than stages": (
        "swin_tiny",
        {"heads": [3, 6, 12]},
        ["heads = [3, 6, 12] has 3 entries", "depths = [2, 2, 6, 2] has 4"],
    ),
    "more heads than stages": (
        "swinv2_tiny",
        {"depths": [2, 2]},
        ["heads = [3, 6, 12, 24] has 4 entries", "depths = [2, 2] has 2"],
    ),
    "no stage": ("swin_tiny", {"depths": [], "heads": []}, ["depths", "at least 1 item"]),
    "a stage without blocks": ("swin_tiny", {"depths": [2, 0, 6, 2]}, ["depths.1", "found 0"]),
    "class token to be pooled that is not there": (
        "vit_base",
        {"class_token": False},
        ["pool=class_token", "class_token=true", "pool=mean"],
    ),
    "rotary positions of an odd head": (
        "vit_base",
        {"positions": "rotary", "width": 60, "heads": 6},
        ["positions=rotary", "divisible by 4", "10", "heads = 6"],
    ),
    "sincos2d of an odd width": (
        "vit_base",
        {"positions": "sincos2d", "width": 42, "heads": 6},
        ["positions=sincos2d", "width", "4", "42"],
    ),
    "pretrained windows of the wrong number": (
        "swinv2_tiny",
        {"pretrained_window": [12, 6]},
        ["pretrained_window = [12, 6] has 2 entries", "[2, 2, 6, 2] has 4"],
    ),
    "misspelt setting": ("vit_base", {"dpeth": 6}, ["dpeth", "Did you mean 'depth'?"]),
    "setting of another model": ("vit_base", {"window": 7}, ["window", "unknown setting"]),
    "number in words": ("vit_base", {"depth": "twelve"}, ["depth", '"twelve"', "integer"]),
    "number as text": ("vit_base", {"depth": "12"}, ["depth", '"12"', "integer"]),
    "negative number": ("vit_base", {"depth": -1}, ["depth", "-1", "greater than or equal to 1"]),
    "unknown choice": ("vit_base", {"pool": "men"}, ["pool", '"men"', "'class_token', 'mean'"]),
    "unknown positions": (
        "vit_base",
        {"positions": "relative"},
        ["positions", "'learned'", "'sincos2d'", "'fourier'", "'rotary'", "'none'"],
    ),
    "everything dropped": ("vit_base", {"dropout": 1.0}, ["dropout", "1.0", "less than 1"]),
    "layer scale of zero": ("vit_base", {"layer_scale": 0.0}, ["layer_scale", "greater than 0"]),
    "unknown kind": ("vit_base", {"kind": "vti"}, ["kind", "'vti'", "Did you mean 'vit'?"]),
    "window of three sides": ("swin_tiny", {"window": [7, 7, 7]}, ["window", "[height, width]"]),
    "one side per stage": (
        "swin_tiny",
        {"window": [7, 7, 14, 7]},
        ["window", "[7, 7, 14, 7]", "one [height, width] per stage", "[[7,7],[7,7],[14,14],[7,7]]"],
    ),
    "fewer windows than stages": (
        "swinv2_tiny",
        {"window": [[8, 8], [4, 4]]},
        ["window = [(8, 8), (4, 4)] has 2 entries", "depths = [2, 2, 6, 2] has 4"],
    ),
    "window of no token": ("swin_tiny", {"window": 0}, ["window", "positive", "found 0"]),
    "no window": ("swin_tiny", {"window": []}, ["window", "found []"]),
    "unknown padding": ("swin_tiny", {"padding": "zero"}, ["padding", '"zero"', "'attend'"]),
    "empty timm name": ("timm", {"name": ""}, ["name", "at least 1 character"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_config_with_a_mistake_says_where_and_what(mistake: str) -> None:
    name, changes, words = MISTAKES[mistake]
    with pytest.raises(ConfigError) as caught:
        model_config(name, **changes)
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert "pydantic" not in message


@pytest.mark.parametrize("name", ["vit_base", "swin_tiny", "swinv2_tiny", "timm"])
def test_config_without_a_setting_names_it(name: str) -> None:
    for missing in model_values(name):
        if missing != "kind":
            values = {key: value for key, value in model_values(name).items() if key != missing}
            with pytest.raises(ConfigError, match=rf"^{missing}: this setting is missing"):
                parse(ModelConfig, values)  # type: ignore[arg-type]


def test_config_with_several_mistakes_lists_them_all() -> None:
    with pytest.raises(ConfigError) as caught:
        model_config("vit_base", depth=0, pool="men", dpeth=1)
    assert len(str(caught.value).splitlines()) == 3


def test_config_once_read_cannot_be_changed() -> None:
    config = model_config("vit_base")
    with pytest.raises(ValueError, match="frozen"):
        config.depth = 3  # type: ignore[misc, union-attr]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vit_base", {"patch_size": [8, 16]}),
        ("vit_base", {"class_token": False, "pool": "mean"}),
        ("vit_base", {"positions": "fourier", "width": 42, "heads": 6}),
        ("swin_tiny", {"window": [7, 9], "patch_size": [2, 4]}),
        ("swin_tiny", {"window": [[7, 7], [7, 9], [14, 14], [7, 7]]}),
        ("swinv2_tiny", {"pretrained_window": [12, 12, 12, 6]}),
        ("timm", {"drop_path": 0.1}),
    ],
)
def test_config_that_can_work_is_accepted(name: str, changes: dict[str, Any]) -> None:
    model_config(name, **changes)
