"""Every command of README and docs: its settings compose and parse, its files and targets exist.
What can run here in a moment runs, in a folder with a run, as a reader would have it.
"""

import re
import shutil
import tomllib
from pathlib import Path

import pytest
from page_commands import NEEDS, ROOT, PageCommand, page_commands
from served_runs import noise

from vision.cli.app import COMMANDS, main
from vision.cli.composition import composer, expand, plain
from vision.cli.listing import LISTINGS, PLUGINS, listing
from vision.config import ConfigError, parse

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/start.md")),
    *(ROOT / name for name in ("examples/README.md", "benchmarks/README.md")),
    *sorted(path for path in ROOT.glob("docs/**/*.md") if path.name != "start.md"),
]
QUICK = 4
"""Pages that are checked in every run of the tests."""
SHOWN = {"--help", "-h", "-sc", "--shell-completion", "--hydra-help", "--version", "--info"}
"""Options with which no settings are composed."""


def check(command: PageCommand) -> None:
    """Refuse a command that cannot be meant as it is written."""
    words = command.words
    if command.own is not None:
        check_settings(*command.own)
    elif words[:2] == ["vision", "list"]:
        assert words[2] in {*LISTINGS, "pretrained"}
        assert words[2] == "pretrained" or listing(words[2:])
    elif words[0] == "vision":
        assert words[1] in SHOWN
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets)
    elif words[0] == "pip" or words[1:3] == ["-m", "pip"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = set(project["optional-dependencies"])
        assert {
            e for w in words for g in re.findall(r"\[(.*)\]", w) for e in g.split(",")
        } <= extras
    elif words[1:2] != ["-m"]:
        files = [word for word in words[1:] if word.endswith((".py", ".sh", ".sbatch"))]
        assert all((ROOT / name).is_file() for name in files), files
        assert files


def check_settings(name: str, words: list[str]) -> None:
    """Compose and parse the settings of a command, of a sweep those of its first job."""
    command = COMMANDS[name]
    if SHOWN & set(words):
        return
    settings = [word for word in words if "=" in word and not word.startswith("-")]
    plugins = [word for word in settings if word in PLUGINS]  # in environments of their own
    settings = [word for word in settings if word not in plugins and "hydra.launcher." not in word]
    if "hydra/sweeper=search" in plugins:
        settings = [word for word in settings if not re.search(r"hydra\.sweeper|interval\(", word)]
    with composer(name) as yaml:
        settings = [*command.implied(settings), *settings]
        lenient, _, mistakes = yaml.compose_usable(settings)
        assert not mistakes, mistakes
        job = expand(yaml.read(lenient)[0], False).words[0]
        values, _ = plain(yaml.compose(job), complete=False)
    given = {key: "given" if value == "???" else value for key, value in values.items()}
    parse(command.config, given)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.slow] * (i >= QUICK))
        for i, page in enumerate(PAGES)
    ],
)
def test_commands_of_a_page_can_be_meant_as_they_are_written(page: Path) -> None:
    for command in page_commands(page):
        if command.refused:
            with pytest.raises((ConfigError, AssertionError)):
                check(command)
            continue
        try:
            check(command)
        except (ConfigError, AssertionError) as error:
            raise AssertionError(f"{command.text}\n{error}") from error


def test_commands_are_found_and_what_they_need_is_known(tmp_path: Path) -> None:
    found = [command for page in PAGES[:QUICK] for command in page_commands(page)]
    assert len(found) >= 30
    assert {what for command in found for what in command.needs} <= set(NEEDS)
    text = "    OMP_NUM_THREADS=1 torchrun --nproc-per-node=8 train.py a=1 \\\n        b=2  # c\n"
    page = tmp_path / "page.md"
    page.write_text(f"A\n\n{text}\n    vision/  the package\n")
    (command,) = page_commands(page)
    assert command.own == ("train", ["a=1", "b=2"])
    assert PageCommand("a", "python train.py init=timm:vit", False).needs == ["download"]


@pytest.mark.parametrize(
    "text", ["python train.py model=vit_mimi", "vision predict chekpoint=a", "make trian"]
)
def test_wrong_command_is_noticed(text: str) -> None:
    with pytest.raises((ConfigError, AssertionError)):
        check(PageCommand("a", text, False))


RUN = re.compile(
    r"vision (?:list|info model|predict|visualize|compare|average|convert|data|prepare)|"
    r"python eval\.py checkpoint=outputs/latest"
)
"""Commands of README and docs/start.md that take seconds once there is a run."""


TINY = [
    *("model.width=32", "model.depth=1", "model.heads=2", "duration=1epochs", "batch_size=16"),
    *("data.train_samples=64", "data.val_samples=16", "loader.workers=0", "device=cpu"),
]


@pytest.mark.slow
def test_commands_of_readme_and_start_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        assert main(["train", f"name={name}", *TINY]) == 0
    for first, folder in enumerate(("photos/cat", "photos/dog", "new_photos")):
        for number in range(8):
            path = tmp_path / folder / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(noise(seed=8 * first + number, height=40))
    shutil.copytree(tmp_path / "photos", tmp_path / "images")
    ran = []
    for page in (ROOT / "README.md", ROOT / "docs/start.md"):
        for command in page_commands(page):
            words = command.words
            if RUN.match(" ".join(words)) and not command.needs and not command.refused:
                small = ["device=cpu"] if words[1] in ("predict", "visualize", "average") else []
                globbed = [path for word in words[1:] for path in spread(word)]
                if "eval.py" in globbed:
                    globbed[0] = "eval"
                assert main([*globbed, *small]) == 0, words
                ran.append(" ".join(words[:2]))
    assert {"vision compare", "vision convert", "vision data", "python eval.py"} <= set(ran)


def spread(word: str) -> list[str]:
    """What a shell makes of `outputs/*`: the runs."""
    if word != "outputs/*":
        return [word]
    return [str(path) for path in sorted(Path("outputs").iterdir()) if not path.is_symlink()]
