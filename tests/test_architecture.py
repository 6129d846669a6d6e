"""The rules of docs/ARCHITECTURE.md: imports, names, sizes, words, and that settings are read."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from read_settings import Reads

import vision
from vision.cli.app import COMMANDS
from vision.cli.composition import compose
from vision.cli.listing import CONFIGS
from vision.config import Config, config_classes, parse
from vision.models.configs import AutoModelConfig, ModelConfig

PACKAGE = Path(vision.__file__).parent
ROOT = PACKAGE.parent

FOLDERS_WITHOUT_TWIN = {"benchmarks", "docs", "helpers"}
"""Of tests/: these test no folder of vision/."""

STATIONS = [
    *("config", "files", "terminal", "randomness", "data", "models", "checkpoints"),
    *("inspection", "evaluation", "training", "sweeps", "inference", "cli"),
]
"""The line, from left to right. Neither of two strangers imports the other."""
STRANGERS = {frozenset(pair) for pair in (("data", "models"), ("training", "inference"))}
HYDRA = {"cli/application.py", "cli/sweep_checks.py", "cli/composition.py"}
DOORS = {
    "hydra": HYDRA,
    "omegaconf": HYDRA,
    "wandb": {"training/run/log.py"},
    "submitit": {"sweeps/cluster.py"},
    "optuna": {"sweeps/search_study.py"},
    "fastapi": {"inference/serve/http_api.py"},
    "uvicorn": {"inference/serve/serve.py"},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text())))


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, also inside functions."""
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def station(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", modules(), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_module_imports_only_stations_to_its_left(file: Path) -> None:
    own = station(file)
    if own not in STATIONS:
        return
    for name in imports(file):
        if not name.startswith("vision."):
            continue
        other = name.split(".")[1]
        assert other in STATIONS[: STATIONS.index(own) + 1], f"{own} imports {name}"
        assert {own, other} not in STRANGERS, f"{own} imports {name}"


@pytest.mark.parametrize("file", modules(), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_outside_framework_enters_through_its_one_door(file: Path) -> None:
    relative = file.relative_to(PACKAGE).as_posix()
    for name in imports(file):
        framework = name.split(".")[0]
        if framework in DOORS:
            assert relative in DOORS[framework], f"{relative} imports {name}"


def test_config_modules_load_nothing_heavy() -> None:
    files = sorted(PACKAGE.rglob("configs.py"))
    assert len(files) >= 4
    names = [".".join(("vision", *f.relative_to(PACKAGE).with_suffix("").parts)) for f in files]
    probe = f"import sys, {', '.join(names)}; print({HEAVY!r} & sys.modules.keys())"
    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert (loaded.stdout.strip(), loaded.stderr) == ("set()", "")


HEAVY = {"torch", "torchvision", "timm", "numpy", "PIL", "hydra", "wandb"}


def yaml_files() -> list[Path]:
    files = sorted(CONFIGS.rglob("*.yaml"))
    assert len(files) >= 30
    return files


@pytest.mark.parametrize("file", yaml_files(), ids=lambda f: str(f.relative_to(CONFIGS)))
def test_yaml_file_composes_and_parses(file: Path) -> None:
    """A root file is a command's; a file in a group is a choice of a command that has it."""
    group, _, choice = file.relative_to(CONFIGS).with_suffix("").as_posix().partition("/")
    if group == "hydra":  # a choice of one of Hydra's own groups, such as hydra/job_logging
        group, _, choice = f"hydra/{choice}".rpartition("/")
        compose("train", [f"{group}={choice}"])
        return
    if not choice:
        check(group)
        return
    users = ["train"] if group in WHOLE_RUNS else users_of(group)
    users = FOR_ONE_COMMAND.get(f"{group}={choice}", users)
    assert users, f"no command has a setting '{group}'"
    check(users[0], f"{group}={choice}")


@pytest.mark.parametrize("command", COMMANDS)
def test_command_takes_a_choice_of_every_group_that_it_has(command: str) -> None:
    for group in COMMANDS[command].config.model_fields:
        if choices := sorted((CONFIGS / group).glob("*.yaml")):
            check(command, f"{group}={choices[0].stem}")


WHOLE_RUNS = ("recipe", "experiment", "search")
"""Groups that set many settings of a run at once and are none themselves."""


FOR_ONE_COMMAND = {"data=imagenet_family": ["eval"]}
"""Choices that only some of the commands with their group take."""


def users_of(group: str) -> list[str]:
    return [name for name, command in COMMANDS.items() if group in command.config.model_fields]


def check(command: str, *overrides: str) -> None:
    values, _ = compose(command, overrides, complete=False)
    if missing := OmegaConf.missing_keys(OmegaConf.create(values)):
        values, _ = compose(command, [*overrides, *(f"{key}=given" for key in missing)])
    parse(COMMANDS[command].config, values)


@pytest.mark.parametrize("file", yaml_files(), ids=lambda f: str(f.relative_to(CONFIGS)))
def test_yaml_file_says_in_its_first_line_what_it_is(file: Path) -> None:
    lines = [line for line in file.read_text().splitlines() if not line.startswith("# @package")]
    assert lines[0].startswith("# ") and len(lines[0]) > 20


def all_config_classes() -> list[type[Config]]:
    found: dict[type[Config], None] = {}

    def visit(annotation: object) -> None:
        for config in config_classes(annotation):
            if config not in found:
                found[config] = None
                for field in config.model_fields.values():
                    visit(field.annotation)

    visit(ModelConfig)
    for command in COMMANDS.values():
        visit(command.config)
    return list(found)


NOT_INFERRED = {
    **{f"{kind}.pretrained": "training/job.py" for kind in ("ViTConfig", "SwinConfig")},
    **{f"{kind}.pretrained": "training/job.py" for kind in ("SwinV2Config", "LRNetConfig")},
    "TimmConfig.pretrained": "training/job.py",
    **{f"PreprocessConfig.{n}": "data/preprocess.py" for n in ("std", "interpolation")},
    "PreprocessConfig.crop_ratio": "data/preprocess.py",
    **{f"AutoModelConfig.{n}": "models/configs.py: given()" for n in AutoModelConfig.model_fields},
}
"""Settings that are read by a name computed at run time, or from an object without a type."""


def test_every_setting_is_read_from_its_own_class() -> None:
    """That another class has an attribute of this name, and someone reads it, does not count."""
    names = [m.name for m in pkgutil.walk_packages(vision.__path__, "vision.")]
    reads = Reads(importlib.import_module(n) for n in names if not n.endswith("__main__"))
    unread = {
        f"{config.__name__}.{field}"
        for config in all_config_classes()
        for field in config.model_fields
        if field != "kind" and not reads.covers(config, field)
    }
    assert unread <= set(NOT_INFERRED), "nothing reads these settings"


PLANTED = """
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from vision.config import Config

T = TypeVar("T")

class Inner(Config):
    name: str
    seed: int

class Outer(Config):
    inner: Inner | None
    name: str
    seed: int
    size: int

@dataclass
class Holder(Generic[T]):
    outer: Outer
    value: T

def use(holder: Holder[Any], size: int) -> str:
    inner = holder.outer.inner
    if not isinstance(inner, Inner):
        return str(size)
    return f"{inner.name} {holder.outer.seed}"
"""


def test_unread_setting_with_a_common_name_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("planted.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    planted = importlib.import_module("planted")
    reads = Reads([planted])
    classes = {"Inner": planted.Inner, "Outer": planted.Outer}
    fields = [(c, field) for c in classes for field in classes[c].model_fields]
    unread = {f"{c}.{field}" for c, field in fields if not reads.covers(classes[c], field)}
    assert unread == {"Inner.seed", "Outer.name", "Outer.size"}


def repeated(names: list[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def test_every_basename_occurs_once() -> None:
    names = [file.name for file in modules() if file.name not in ("__init__.py", "configs.py")]
    assert repeated(names) == set()


def test_every_class_name_occurs_once() -> None:
    found = [n.name for file in modules() for n in nodes(file) if isinstance(n, ast.ClassDef)]
    assert repeated(found) == set()


def test_no_file_has_more_than_350_lines() -> None:
    long = {str(f.relative_to(PACKAGE)) for f in modules() if len(f.read_text().splitlines()) > 350}
    assert long == set()


def test_no_folder_has_more_than_16_files() -> None:
    count = Counter(str(f.parent.relative_to(PACKAGE)) for f in modules())
    assert {folder for folder, files in count.items() if files > 16} == set()


AVOID = {
    "picture": r"\bpictures?\b",
    "is no": r"(?<![Tt]here )(?<!and )\b(?:is|are|was|were) no [a-z]",
    "told": r"(?<!\.)(?<!def )\b(?:un)?(?:told|tells?)\b",
    "so many": r"\b[Ss]o many\b",
    "go on": r"\b(?:go|goes|went) on\b",
    "What … can be": r"\bWhat [^.\n]{0,60} can be\b",
}
A_FORMER_NAME = 'pictures": ("count={}"'


@pytest.mark.parametrize("word", AVOID)
def test_text_avoids_words_that_read_as_translated(word: str) -> None:
    files = [*modules(), *ROOT.glob("docs/**/*.md"), *CONFIGS.rglob("*.yaml"), ROOT / "README.md"]
    places = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in sorted(files)
        for line in file.read_text().splitlines()
        if re.search(AVOID[word], line) and A_FORMER_NAME not in line
    ]
    assert not places, "\n".join(places)


def test_folders_of_tests_are_those_of_the_package() -> None:
    tests = ROOT / "tests"
    folders = {f.parent.relative_to(tests).as_posix() for f in tests.rglob("test_*.py")} - {"."}
    packages = {f.parent.relative_to(PACKAGE).as_posix() for f in modules()}
    assert folders - FOLDERS_WITHOUT_TWIN <= packages


def test_architecture_page_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    named = {Path(name).name for name in re.findall(r"[\w/]+\.py\b", text)}
    there = {file.name for file in (*modules(), *ROOT.glob("*.py"), *ROOT.glob("tests/*.py"))}
    assert named - there == set()
