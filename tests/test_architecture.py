"""The rules of docs/ARCHITECTURE.md: who may import whom, and that every setting is read."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import vision
from vision.cli.commands import COMMANDS
from vision.cli.composition import compose
from vision.cli.listing import CONFIGS
from vision.config import Config, config_classes, parse
from vision.models.configs import ModelConfig

PACKAGE = Path(vision.__file__).parent
STATIONS = [
    *(
        "config",
        "files",
        "terminal",
        "randomness",
        "data",
        "models",
        "checkpoints",
        "inspection",
        "evaluation",
    ),
    *("inspection", "evaluation", "training", "sweeps", "inference", "cli"),
]
"""The line, from left to right. Neither of two strangers imports the other."""
STRANGERS = {frozenset(pair) for pair in (("data", "models"), ("training", "inference"))}
DOORS = {
    "hydra": {"cli/composition.py"},
    "omegaconf": {"cli/composition.py"},
    "wandb": {"training/run/log.py"},
    "submitit": {"sweeps/cluster.py"},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(file.read_text())):
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
    """A root file is a command's; a file in a group is a choice of the commands that have it."""
    group, _, choice = file.relative_to(CONFIGS).with_suffix("").as_posix().partition("/")
    if not choice:
        check(group)
        return
    users = ["train"] if group in WHOLE_RUNS else users_of(group)
    assert users, f"no command has a setting '{group}'"
    for command in users:
        check(command, f"{group}={choice}")


WHOLE_RUNS = ("recipe", "experiment")
"""Groups that set many settings of a run at once and are none themselves."""


def users_of(group: str) -> list[str]:
    return [name for name, command in COMMANDS.items() if group in command.config.model_fields]


def check(command: str, *overrides: str) -> None:
    incomplete, _ = compose(command, overrides, complete=False)
    missing = OmegaConf.missing_keys(OmegaConf.create(incomplete))
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


def read_attributes() -> set[str]:
    """Every attribute name that is read anywhere outside the modules that declare configs."""
    names = set()
    for file in modules():
        if file.name != "configs.py":
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    names.add(node.attr)
    return names


@pytest.mark.parametrize("config", all_config_classes(), ids=lambda c: c.__name__)
def test_every_setting_is_read_somewhere(config: type[Config]) -> None:
    unread = set(config.model_fields) - read_attributes() - {"kind"}
    assert not unread, f"{config.__name__}: nothing reads {sorted(unread)}"
