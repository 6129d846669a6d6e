"""Strict parsing: what is wrong is said, where, and what may have been meant."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pytest
from pydantic import Field, model_validator

from vision.cli.app import COMMANDS
from vision.cli.composition import compose
from vision.config import Config, ConfigError, Size, field_paths, pair, parse, suggest
from vision.training.configs import TrainConfig


class Cat(Config):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(Config):
    kind: Literal["dog"]
    tricks: tuple[str, ...]
    bark: Literal["loud", "soft"]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.tricks and self.bark == "loud":
            raise ValueError("bark=loud needs tricks; use bark=soft or tricks=[sit].")
        return self


class Home(Config):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    rooms: int
    address: Path
    garden: Size
    rent: float | None


def home(**changes: Any) -> dict[str, Any]:
    return {
        "pet": {"kind": "cat", "lives": 9},
        "rooms": 3,
        "address": "a/b",
        "garden": [2, 3],
        "rent": None,
    } | changes


def message(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(Home, home(**changes))
    return str(caught.value)


def test_parse_valid_values_gives_typed_frozen_config() -> None:
    config = parse(Home, home(rent=2))
    assert config.pet == Cat(kind="cat", lives=9)
    assert (config.address, config.garden, config.rent) == (Path("a/b"), (2, 3), 2.0)
    with pytest.raises(ValueError, match="frozen"):
        config.rooms = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"romms": 1}, "romms: unknown setting. Did you mean 'rooms'?"),
        ({"lives": 1}, "lives: unknown setting. Did you mean 'pet.lives'?"),
        ({"pet": {"kind": "cat", "lves": 9}}, "Did you mean 'pet.lives'?"),
        ({"pet": {"kind": "cat", "lves": 9}}, "pet.lives: this setting is missing."),
        (
            {"pet": {"kind": "cat", "lives": 9, "tricks": []}},
            "pet.tricks: unknown setting. This kind of pet has: lives.",
        ),
        ({"pet": {"kind": "cta", "lives": 9}}, "pet: unknown kind 'cta'. Did you mean 'cat'?"),
        ({"pet": {"lives": 9}}, "pet: the setting 'kind' is missing"),
        ({"rooms": "three"}, 'rooms: should be a valid integer, found "three".'),
        ({"rooms": "3"}, 'rooms: should be a valid integer, found "3".'),
        ({"rooms": True}, "rooms: should be a valid integer, found true."),
        ({"rooms": 2.5}, "rooms: should be a valid integer, found 2.5."),
        ({"pet": {"kind": "cat", "lives": 10}}, "pet.lives: should be less than or equal to 9"),
        (
            {"pet": {"kind": "dog", "tricks": ["sit", 3], "bark": "lud"}},
            "pet.bark: should be 'loud' or 'soft', found \"lud\".",
        ),
        (
            {"pet": {"kind": "dog", "tricks": ["sit", 3], "bark": "loud"}},
            "pet.tricks.1: should be a valid string, found 3.",
        ),
        (
            {"pet": {"kind": "dog", "tricks": [], "bark": "loud"}},
            "pet.bark=loud needs tricks; use pet.bark=soft or pet.tricks=[sit].",
        ),
        ({"garden": [0, 2]}, "garden.0: should be greater than or equal to 1, found 0."),
        ({"rent": "high"}, 'rent: should be a valid number, found "high".'),
    ],
)
def test_parse_mistake_names_path_value_and_what_is_expected(
    changes: dict[str, Any], expected: str
) -> None:
    assert expected in message(**changes)


def test_parse_several_mistakes_lists_each_on_a_line_of_its_own() -> None:
    lines = message(rooms="x", romms=1, garden=[1, 2, 3]).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["rooms", "garden", "romms"]


def test_parse_pair_with_bad_entry_does_not_also_complain_that_it_is_no_integer() -> None:
    assert message(garden=[0, 2]).count("\n") == 0


def test_pair_of_number_and_of_pair() -> None:
    assert pair(3) == (3, 3)
    assert pair((3, 4)) == (3, 4)


def test_suggest_near_word_names_it_and_far_word_lists_all() -> None:
    assert suggest("vit_tinny", ["vit_tiny", "swin"]) == "Did you mean 'vit_tiny'?"
    assert suggest("zzz", ["b", "a"]) == "Known: a, b."


def test_field_paths_of_union_has_the_fields_of_all_members() -> None:
    assert {"pet", "pet.lives", "pet.bark"} < set(field_paths(Home))


def unbounded(schema: Any, path: str = "") -> Iterator[str]:
    """Paths of integers in a JSON schema that may have any size."""
    if isinstance(schema, list):
        for number, inner in enumerate(schema):
            yield from unbounded(inner, f"{path}[{number}]")
    elif isinstance(schema, dict):
        fixed = {"maximum", "exclusiveMaximum", "const", "enum"} & schema.keys()
        if schema.get("type") == "integer" and not fixed:
            yield path
        for name, inner in schema.items():
            if name not in ("additionalProperties", "default"):  # arguments of other libraries
                yield from unbounded(inner, f"{path}.{name}")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_integer_of_a_command_has_a_bound(command: str) -> None:
    assert list(unbounded(COMMANDS[command].config.model_json_schema())) == []


@pytest.mark.parametrize(
    "word",
    [
        *("model.depth=9223372036854775808", "model.width=100000", "model.heads=99999999"),
        *("data.image_size=100000", "data.image_size=[64,100000]", "data.train_samples=1e13"),
        *("data.train_samples=10000000000000", "seed=18446744073709551616", "data.seed=1e40"),
        *("batch_size=10000000000", "loader.workers=100000", "model.patch_size=99999"),
    ],
)
def test_number_beyond_its_bound_is_refused_with_the_bound(word: str) -> None:
    values, _ = compose("train", [word])
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        parse(TrainConfig, values)
