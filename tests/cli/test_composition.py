"""Words of the command line: what they expand to in a sweep, and how paths are typed."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from vision.cli.app import main
from vision.cli.composition import Jobs, compose, composer, expand
from vision.cli.listing import CONFIGS
from vision.config import ConfigError


def jobs_of(*words: str, folders: Sequence[Path] = (CONFIGS,)) -> Jobs:
    with composer("train", folders=folders) as yaml:
        return expand(yaml.read(words)[0], all_points=True)


def values(jobs: Jobs) -> list[dict[str, Any]]:
    """The values of the swept settings in each job, as Hydra reads them."""
    parser = OverridesParser.create()
    read = [parser.parse_overrides(words) for words in jobs.words]
    return [
        {o.key_or_group: o.value() for o in job if o.key_or_group in jobs.swept} for job in read
    ]


EXPANSIONS = {
    "seed=0,1,2": [{"seed": 0}, {"seed": 1}, {"seed": 2}],
    "seed=range(0,5,2)": [{"seed": 0}, {"seed": 2}, {"seed": 4}],
    "seed=choice(7,8)": [{"seed": 7}, {"seed": 8}],
    "model=glob(vit_t*)": [{"model": "vit_tiny"}],
    "model.depths=[2,2],[2,6]": [{"model.depths": [2, 2]}, {"model.depths": [2, 6]}],
    "++ema=0.9,null": [{"ema": 0.9}, {"ema": None}],
}


@pytest.mark.parametrize("word", EXPANSIONS)
def test_word_with_several_values_expands_as_hydra_documents_it(word: str) -> None:
    jobs = jobs_of("duration=3epochs", word)
    assert jobs.fixed == {"duration": "duration=3epochs"}
    assert values(jobs) == EXPANSIONS[word]
    assert all(words[0] == "duration=3epochs" for words in jobs.words)


def test_two_words_with_several_values_expand_to_their_product() -> None:
    jobs = jobs_of("seed=0,1", "batch_size=8", "model=vit_mini,swin_mini")
    found = [(job["seed"], job["model"]) for job in values(jobs)]
    assert found == list(itertools.product([0, 1], ["vit_mini", "swin_mini"]))


def test_last_of_two_words_for_one_setting_counts() -> None:
    assert values(jobs_of("seed=5", "seed=0,1")) == [{"seed": 0}, {"seed": 1}]
    assert jobs_of("seed=0,1", "seed=5").words == [["seed=5"]]


def test_glob_finds_choices_in_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "train.yaml").write_text("model: null\n")
    (tmp_path / "model" / "own_a.yaml").write_text("# mine\n")
    jobs = jobs_of("model=glob(own_*)", folders=[tmp_path, CONFIGS])
    assert values(jobs) == [{"model": "own_a"}]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model=glob(nothing*)", "nothing that this stands for"),
        ("seed=interval(0,1)", "give the values"),
    ],
)
def test_word_that_cannot_be_swept_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        jobs_of(word)


def test_choice_in_a_folder_below_a_group_is_found_and_misspelt_ones_are_answered() -> None:
    nested = sorted((CONFIGS / "experiment" / "lecture").glob("*.yaml"))[0].stem
    compose("train", [f"experiment=lecture/{nested}"])
    with pytest.raises(ConfigError, match=f"lecture/{nested}"):
        compose("train", [f"experiment=lecture/{nested}x"])


def test_folder_of_a_run_can_be_given_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    place = "out/s/optimizer.learning_rate=0.001,seed=0"
    Path(place).mkdir(parents=True)
    assert main(["eval", f"checkpoint={place}", "--cfg", "job", "-p", "checkpoint"]) == 0
    assert capsys.readouterr().out == f"{place}\n"
    assert main(["compare", place, "runs=more", "--cfg", "job", "-p", "runs"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["- more", f"- {place}"]
    assert main(["eval", "checkpoint=out/s/seed=1"]) == 2  # not there
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "images"),
    [
        (["a.png"], ["a.png"]),
        (["a.png", "b/c=1.png"], ["a.png", "b/c=1.png"]),
        (["images=a.png"], "a.png"),
        (["images=a.png", "b.png"], ["a.png", "b.png"]),
        (["b.png", "images=[a.png,c.png]"], ["a.png", "c.png", "b.png"]),
        (["hydra/job_logging=none", "a.png"], ["a.png"]),
    ],
)
def test_words_without_a_name_are_paths(
    words: list[str], images: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "checkpoint=x", *words, "--cfg", "job"]) == 0
    assert OmegaConf.create(capsys.readouterr().out).images == images
