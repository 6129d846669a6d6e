"""Rules that rename tensors: what they do, in what order, and what is wrong with them."""

from typing import Any

import pytest
import torch

from vision.checkpoints.configs import Renaming
from vision.checkpoints.files.renaming import rename
from vision.config import Config, ConfigError, parse

TENSORS = {name: torch.tensor(float(i)) for i, name in enumerate(["a.0.w", "a.1.w", "b.w", "c"])}


class Settings(Config):
    """A command that renames."""

    rename: Renaming


def test_rules_are_applied_in_order_with_groups() -> None:
    found, lines = rename(TENSORS, [(r"^a\.(\d+)\.", r"blocks.\1."), (r"w$", "weight")])
    assert list(found) == ["blocks.0.weight", "blocks.1.weight", "b.weight", "c"]
    assert [float(found[name]) for name in found] == [0, 1, 2, 3]
    assert "'a.0.w' → 'blocks.0.w' and 1 more" in lines[0]
    swapped, _ = rename(TENSORS, [("^b", "x"), ("^c$", "b"), ("^x", "c")])
    assert list(swapped) == ["a.0.w", "a.1.w", "c.w", "b"]


def test_tensor_with_an_empty_name_is_left_out() -> None:
    found, lines = rename(TENSORS, [(r"a\..*", "")])
    assert list(found) == ["b.w", "c"]
    assert "left out" in lines[0]


@pytest.mark.parametrize(
    ("rule", "parts"),
    [
        (("a.(0", "x"), ["a.(0", "re.sub"]),
        (("a", r"\2"), ["\\2", "re.sub"]),
        (("a.2.w", "x"), ["'a.2.w'", "none of the 4", "'a.1.w'"]),
        ((r"\d\.", ""), ["'a.w'", "'a.0.w'", "'a.1.w'"]),
    ],
)
def test_rule_that_cannot_be_followed_is_named(rule: tuple[str, str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        rename(TENSORS, [rule])
    assert all(part in str(error.value) for part in parts)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([], ()),
        ([["^a", "b"], ["c", ""]], (("^a", "b"), ("c", ""))),
        (["^a -> b", r"x\.(\d) ->  y.\1 "], (("^a", "b"), (r"x\.(\d)", r"y.\1"))),
        (["loss.* -> "], (("loss.*", ""),)),
    ],
)
def test_rules_of_a_yaml_file_are_pairs_or_strings(value: Any, expected: Any) -> None:
    assert parse(Settings, {"rename": value}).rename == expected


@pytest.mark.parametrize("value", ["a -> b", ["a = b"], [["a"]], [["a", "b", "c"]], [[1, 2]], [3]])
def test_rules_of_another_form_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="rename"):
        parse(Settings, {"rename": value})
