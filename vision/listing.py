"""What there is to choose from: the groups of YAML files, and the texts that name them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vision.config import ConfigError, suggest

PACKAGE = Path(__file__).parent
CONFIGS = next(p for p in (PACKAGE / "_configs", PACKAGE.parent / "configs") if p.is_dir())
"""A wheel carries the YAML beside the code; a checkout has it at the root."""

LISTINGS = {
    "models": "model",
    "data": "data",
    "augmentations": "augment",
    "recipes": "recipe",
    "experiments": "experiment",
    "weights": "model",
}
"""What `vision list` can list, and the folder of YAML files that it is."""


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
    """What `vision list <words>` prints."""
    what = words[0] if words else ""
    if what not in LISTINGS or len(words) > 1:
        usage = f"usage: vision list {'|'.join(LISTINGS)}"
        raise ConfigError(f"{suggest(what, LISTINGS)} {usage}".strip())
    found = _weights() if what == "weights" else choices().get(LISTINGS[what], {})
    if not found:
        return f"There are no {what} yet."
    width = max(map(len, found))
    return "\n".join(f"{name:{width}}  {line}" for name, line in sorted(found.items()))


def _weights() -> dict[str, str]:
    """The published weights that `init=pretrained` takes, by model."""
    found = {}
    for file in sorted(CONFIGS.glob("model/*.yaml")):
        names = (line.removeprefix("pretrained: ") for line in file.read_text().splitlines())
        named = [name for name in names if name.startswith(("timm:", "hf:")) and "$" not in name]
        found.update(dict.fromkeys([file.stem] if named else [], *named))
    return found


def overview(summaries: Mapping[str, str]) -> str:
    """What `vision --help` prints, given a line on each command."""
    rows = {**summaries, "list": f"one line on each choice: vision list {'|'.join(LISTINGS)}"}
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
