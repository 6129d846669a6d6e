"""What there is to choose from: the groups of YAML files, and the texts that name them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vision.config import ConfigError, suggest

PACKAGE = Path(__file__).parent.parent
_IN_WHEEL = PACKAGE / "_configs"
CONFIGS = _IN_WHEEL if _IN_WHEEL.is_dir() else PACKAGE.parent / "configs"
"""A wheel carries the YAML beside the code; a checkout has it at the root."""

LISTINGS = {
    "models": "model",
    "data": "data",
    "augmentations": "augment",
    "recipes": "recipe",
    "experiments": "experiment",
}
"""What `vision list` lists, and the group of YAML files that each is."""

USAGE = f"""\
usage: vision list {"|".join(LISTINGS)}
       vision list pretrained [PATTERN]"""

HELP = f"""{USAGE}

The first form prints one line on each choice of a group of settings.
The second lists published weights that init= takes, by family, with image size and licence. A
PATTERN such as '*dino*' (in quotes, or the shell may replace it) selects names from all models of
timm; for few of them parameters are counted. Nothing is downloaded."""


def choices(folders: Sequence[Path] = ()) -> dict[str, dict[str, str]]:
    """Every group of YAML files, with its choices and the line that describes each."""
    found: dict[str, dict[str, str]] = {}
    for folder in (CONFIGS, *folders):
        for file in sorted(folder.glob("*/**/*.yaml")):
            group, _, choice = file.relative_to(folder).with_suffix("").as_posix().partition("/")
            found.setdefault(group, {})[choice] = _first_comment(file)
    return found


def unknown_choice(file: str, folders: Sequence[Path]) -> str:
    """What to say of `group/choice` where there is no such file."""
    group, _, choice = file.removesuffix(".yaml").partition("/")
    known = choices(folders).get(group)
    if not known:
        return f"there is no group of settings '{group}'. {suggest(group, choices(folders))}"
    near = suggest(choice, known)
    listed = "" if near.startswith("Known") else f" Known: {', '.join(sorted(known))}."
    return f"{group}={choice}: there is no such choice. {near}{listed}"


def listing(words: Sequence[str]) -> str:
    """The text that `vision list <words>` prints."""
    if {"-h", "--help"} & set(words):
        return HELP
    what, *rest = words or [""]
    if what == "pretrained" and len(rest) <= 1:
        from vision.checkpoints.pretrained import pretrained_table

        return pretrained_table(rest[0] if rest else None, _pretrained())
    if what not in LISTINGS or rest:
        raise ConfigError(f"{_mistake(what, rest)}\n{USAGE}".strip())
    found = choices().get(LISTINGS[what], {})
    if not found:
        return f"There are no {what} yet."
    width = max(map(len, found))
    return "\n".join(f"{name:{width}}  {line}" for name, line in sorted(found.items()))


def _mistake(what: str, rest: Sequence[str]) -> str:
    """What is wrong with the words, and what was probably meant."""
    known = [*LISTINGS, "pretrained"]
    if what not in known:
        # The old name of this listing, however it is spelt.
        meant = "pretrained" if suggest(what, ["weights"]).startswith("Did") else what
        return f"there is no list '{what}'. {suggest(meant, known)}" if what else ""
    expected = "one PATTERN, in quotes" if what == "pretrained" else "nothing more"
    return f"'{what}' takes {expected}; found {' '.join(rest)}."


def _pretrained() -> dict[str, str]:
    """Names of the weights that `init=pretrained` takes, with the models that they are for."""
    found = {}
    for file in sorted(CONFIGS.glob("model/*.yaml")):
        for line in file.read_text(encoding="utf-8").splitlines():
            key, _, source = line.partition(": ")
            if key == "pretrained" and source.startswith("timm:") and "$" not in source:
                found[source.removeprefix("timm:")] = file.stem
    return found


def overview(summaries: Mapping[str, str]) -> str:
    """What `vision --help` prints, given a line on each command."""
    rows = {
        **summaries,
        "list": "choices of every group, and published weights: vision list --help",
    }
    width = max(map(len, rows))
    lines = [f"  {name:{width}}  {summary}" for name, summary in sorted(rows.items())]
    return "\n".join(
        [
            "usage: vision <command> [setting=value ...] [--help] [--cfg] [--config-dir FOLDER]",
            "       vision train --multirun setting=value,value [setting=value ...]",
            "",
            "Commands:",
            *lines,
            "",
            "vision <command> --help shows every setting of a command with its value and meaning;",
            "--cfg prints the settings as they would be used; --config-dir adds your own YAML.",
        ]
    )


def _first_comment(file: Path) -> str:
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ").rstrip(".")
    return ""
