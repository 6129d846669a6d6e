"""The rules of docs/ARCHITECTURE.md: who may import whom, and that every setting is read."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import vision
from vision.cli import COMMANDS, CONFIGS, compose
from vision.config import Config, config_classes, parse
from vision.models.configs import ModelConfig

PACKAGE = Path(vision.__file__).parent
STATIONS = ["config", "data", "models", "checkpoints", "inspection", "evaluation", "training"]
"""The line, from left to right; what is not named here (cli, help) stands at its right end."""
STRANGERS = {("data", "models"), ("models", "data")}
DOORS = {"hydra": {"cli.py"}, "omegaconf": {"cli.py"}, "wandb": {"training/log.py"}}


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
        assert (own, other) not in STRANGERS, f"{own} imports {name}"


@pytest.mark.parametrize("file", modules(), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_outside_framework_enters_through_its_one_door(file: Path) -> None:
    relative = file.relative_to(PACKAGE).as_posix()
    for name in imports(file):
        framework = name.split(".")[0]
        if framework in DOORS:
            assert relative in DOORS[framework], f"{relative} imports {name}"


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("configs.py")), ids=lambda f: f.parent.name)
def test_config_module_is_free_of_torch(file: Path) -> None:
    allowed = ("vision.config", "vision.data.policy", "pydantic", "typing", "pathlib")
    assert all(name.startswith((*allowed, "vision.")) for name in imports(file))
    assert not any("torch" in name or "timm" in name for name in imports(file))


def yaml_files() -> list[Path]:
    files = sorted(CONFIGS.rglob("*.yaml"))
    assert len(files) >= 30
    return files


@pytest.mark.parametrize("file", yaml_files(), ids=lambda f: str(f.relative_to(CONFIGS)))
def test_yaml_file_composes_and_parses(file: Path) -> None:
    """A root file is a command; a file in a group is a choice of some command (or of a config
    class).
    """
    group = file.parent.relative_to(CONFIGS).as_posix()
    if group == ".":
        values = compose(file.stem, [f"{key}=given" for key in missing(file.stem)])
        parse(COMMANDS[file.stem].config, values)
        return
    users = [name for name, c in COMMANDS.items() if group in c.config.model_fields]
    assert users, f"no command has a setting '{group}'"
    for command in users:
        choice = f"{group}={file.stem}"
        given = [f"{key}=given" for key in missing(command, choice)]
        parse(COMMANDS[command].config, compose(command, [choice, *given]))


def missing(command: str, *overrides: str) -> set[str]:
    return OmegaConf.missing_keys(OmegaConf.create(compose(command, overrides, complete=False)))


@pytest.mark.parametrize("file", yaml_files(), ids=lambda f: str(f.relative_to(CONFIGS)))
def test_yaml_file_says_in_its_first_line_what_it_is(file: Path) -> None:
    first = file.read_text().splitlines()[0]
    assert first.startswith("# ") and len(first) > 20


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
