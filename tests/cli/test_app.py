"""The command line as a user meets it: the real commands, in processes of their own."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_answers import answers

from vision.cli.app import COMMANDS, main

ROOT = Path(__file__).parents[2]
PROBE = (
    "import sys; from vision.cli.app import main; code = main(sys.argv[1:]);"
    "print('LOADED', [m for m in ('torch', 'torchvision', 'timm') if m in sys.modules]);"
    "sys.exit(code)"
)


def vision(*words: str, folder: Path = ROOT) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `vision <words>`."""
    result = subprocess.run(
        [sys.executable, "-c", PROBE, *words], cwd=folder, capture_output=True, text=True
    )
    return result.returncode, result.stdout, result.stderr


MISTAKES = {
    "model.dpeth=6": "model.dpeth: unknown setting. Did you mean 'model.depth'?",
    "+model.dpeth=6": "model.dpeth: unknown setting. Did you mean 'model.depth'?",
    "++model.dpeth=6": "model.dpeth: unknown setting. Did you mean 'model.depth'?",
    "modle=vit_tiny": "modle: unknown setting. Did you mean 'model'?",
    "model.depth=twelve": 'model.depth: should be a valid integer, found "twelve".',
    "model.depth=-1": "model.depth: should be greater than or equal to 1, found -1.",
    "model=vit_tinny": "model=vit_tinny: unknown choice. Did you mean 'vit_tiny'?",
    "model=null": "model=null: unknown choice.",
    "model.pool=men": "pool: should be 'class_token', 'mean'",
    "model.heads=5": "model.heads = 5 does not divide model.width = 768.",
    "model.window=7": "model.window: unknown setting. This kind of model has:",
    "model=swin_tiny model.depths=[2,2,6]": "model.depths = [2, 2, 6] has 3: one for each stage",
    "model.class_token=false": "model.pool=class_token needs model.class_token=true",
    "model=swin_tiny model.registers=4": "model.registers: unknown setting.",
    "model": "'model': a setting is given as name=value.",
    "model.depth=[": "'model.depth=[' cannot be read",
    "model.depth=1,2": "model.depth=1,2: a run takes one value; --multirun is for several.",
    "hydra.verbos=true": "hydra.verbos=true: unknown setting. Did you mean 'verbose'?",
    "hydra/launcher=bsic": "hydra/launcher=bsic: unknown choice. Did you mean 'basic'?",
    "hydra/sweeper=optuna": "pip install",
    "data=folder": "data.root: this setting must be given: data.root=…",
    "--cgf": "unknown option '--cgf'. Did you mean '--cfg'?",
    "--cfg": "--cfg",
    "--cfg job -m": "hydra/launcher=plan",
    "--resolve": "--cfg",
    "--config-dir nowhere": "--config-dir: the folder 'nowhere' does not exist.",
    "--config-path nowhere": "--config-path: the folder",
    "--config-name nothing": "nothing",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_command_with_mistake_exits_2_with_one_message_and_without_torch(words: str) -> None:
    lines = [f"info {mistake}" for mistake in MISTAKES]
    code, output, error, loaded = answers(ROOT, *lines)[f"info {words}"]
    assert code == 2
    assert MISTAKES[words] in error
    assert "Traceback" not in error
    assert (output, loaded) == ("", [])


def test_several_mistakes_are_reported_together_before_hydra_makes_a_folder(
    tmp_path: Path,
) -> None:
    words = "model=vit_tinny epochs=5 seed=x batch_size=0 hydra.verbos=true"
    code, output, error = vision("train", *words.split(), folder=tmp_path)
    assert code == 2
    for name in ("vit_tinny", "duration=5epochs", "seed:", "batch_size:", "hydra.verbos"):
        assert name in error
    assert output.strip() == "LOADED []"
    assert list(tmp_path.iterdir()) == []


def test_setting_below_one_that_is_null_needs_no_plus_sign() -> None:
    words = ("probe_first.duration=2epochs", "probe_first.learning_rate=0.1")
    code, output, _ = vision("train", *words, "--cfg", "job", "--package", "probe_first")
    assert code == 0
    assert "duration: 2epochs" in output and "learning_rate: 0.1" in output


def test_command_with_unknown_choice_of_an_optional_group_exits_2() -> None:
    code, output, error = vision("train", "experiment=deit_tinny")
    assert code == 2
    assert "experiment=deit_tinny: unknown choice. Did you mean 'deit_tiny'?" in error
    assert output.strip() == "LOADED []"


def test_command_with_typo_in_yaml_file_names_it_like_one_on_the_command_line(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "mine" / "model"
    folder.mkdir(parents=True)
    folder.joinpath("own.yaml").write_text("defaults: [vit_tiny, _self_]\ndpeth: 6\n")
    code, output, error = vision("info", "--config-dir", str(tmp_path / "mine"), "model=own")
    assert code == 2
    assert "model.dpeth: unknown setting. Did you mean 'model.depth'?" in error
    assert output.strip() == "LOADED []"


def test_config_dir_with_own_yaml_is_used_and_listed_in_help(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    folder.joinpath("own.yaml").write_text("# mine\ndefaults: [vit_tiny, _self_]\ndepth: 3\n")
    code, output, _ = vision("info", f"--config-dir={tmp_path}", "model=own", "--cfg", "job")
    assert code == 0
    assert "depth: 3" in output and "width: 192" in output
    code, output, _ = vision("info", f"--config-dir={tmp_path}", "model=own", "--help")
    assert code == 0
    assert "own" in output and "model.depth=3" in output


SHOWN = (
    *("--help", "info --help", "list --help", "list pretrained --help"),
    *("list models", "list data", "list recipes", "list experiments"),
)


@pytest.mark.parametrize("words", SHOWN)
def test_help_and_listings_answer_without_torch(words: str) -> None:
    code, output, error, loaded = answers(ROOT, *SHOWN)[words]
    assert (code, error, loaded) == (0, "", [])
    assert len(output.splitlines()) > 1


def test_list_models_has_one_line_with_a_description_for_every_yaml_file() -> None:
    _, output, _ = vision("list", "models")
    _, *lines, _ = output.splitlines()
    files = sorted(f.stem for f in (ROOT / "configs" / "model").glob("*.yaml"))
    assert [line.split()[0] for line in lines] == files
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize(("word", "meant"), [("model", "models"), ("weights", "pretrained")])
def test_list_unknown_subject_suggests_the_right_one(word: str, meant: str) -> None:
    code, output, error = vision("list", word)
    assert code == 2
    assert f"Did you mean '{meant}'?" in error
    assert output.strip() == "LOADED []"


def test_list_help_names_every_listing() -> None:
    _, output, _ = vision("list", "--help")
    names = set(re.findall(r"\w+", output))
    assert {"models", "data", "augmentations", "recipes", "experiments", "pretrained"} <= names


@pytest.mark.parametrize("words", ["recipes swin deit", "pretrained vit.png swin.png"])
def test_list_with_too_many_words_says_which(words: str) -> None:
    code, _, error = vision("list", *words.split())
    assert code == 2
    assert words.split(maxsplit=1)[1] in error and "usage:" in error


def test_unknown_command_suggests_the_right_one() -> None:
    code, _, error = vision("inof")
    assert code == 2
    assert "unknown command 'inof'. Did you mean 'info'?" in error


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_no_empty_heading(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    headings = [i for i, line in enumerate(lines) if line.endswith(":") and line[0] != " "]
    assert headings and all(lines[i + 1].startswith("  ") for i in headings)


def test_help_of_train_lists_recipes_and_experiments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "recipe: bitfit, deit" in text and "experiment: cifar10_" in text
    assert "loss.kind=cross_entropy" in text and "(cross_entropy | bce | focal)" in text


def test_help_shows_every_setting_with_value_meaning_and_choices() -> None:
    _, output, _ = vision("info", "--help", "model=swin_tiny")
    text = " ".join(output.split())
    assert "model.window=7 Tokens along a window." in text
    assert "model.positions=relative" in text and "(relative | absolute | none)" in text
    assert "data.image_size=auto" in text


def test_info_as_json_has_the_parameters_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "model=vit_tiny", "format=json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 5_717_416


def test_info_from_another_folder_finds_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["info", "model=swin_tiny", "data.image_size=256"]) == 0
    assert "28,288,354" in capsys.readouterr().out
