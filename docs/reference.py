"""Pages with every setting of every command, from the config classes and the YAML files.

    python docs/reference.py FOLDER      # as Markdown files; `make docs` shows them on the site

A setting's value is from the YAML file, its type and meaning from the class that parses it, as in
`vision <command> --help`. The four groups with a class for each kind have pages of their own.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from omegaconf import OmegaConf
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from vision.cli.app import COMMANDS
from vision.cli.composition import compose
from vision.cli.listing import CONFIGS, Setting, choices, settings
from vision.config import config_classes, shown

KINDS = {"model": "train", "data": "train", "tune": "train", "task": "train"}
"""Groups whose choices have different settings, with a command that has each."""
WORDS = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false"}
COLUMNS = "| setting | value | type | meaning |\n|---|---|---|---|"
TABLE, END = '<div class="settings" markdown>\n', "\n</div>"
"""Around a table of settings, whose rows site.css stacks on narrow screens."""


def pages() -> dict[str, str]:
    """Markdown by the name of its file."""
    return {
        "index.md": index_page(),
        **{f"{name}.md": command_page(name) for name in COMMANDS},
        **{f"{group_file(group)}.md": group_page(group) for group in KINDS},
        "choices.md": choices_page(),
    }


def pages_in_order() -> list[str]:
    """Names of the pages, without making them."""
    groups = [f"{group_file(group)}.md" for group in KINDS]
    return ["index.md", *(f"{name}.md" for name in COMMANDS), *groups, "choices.md"]


def index_page() -> str:
    """All commands and groups."""
    commands = [
        f"| [`{command_line(name)}`]({name}.md) | {command.summary} |"
        for name, command in COMMANDS.items()
    ]
    groups = []
    for group in KINDS:
        listed = ", ".join(f"`{choice}`" for choice in choices()[group])
        groups.append(f"| [`{group}=`]({group_file(group)}.md) | {listed} |")
    return "\n".join(
        [
            "# Reference",
            "",
            "Every setting, from the classes that parse it, as `--help` shows it for each command.",
            "A setting is written `name=value` on the command line; `null` and lists such as",
            "`[a,b]` as in YAML. What weights, data or the machine decide has the value `auto`.",
            "",
            "| command | |",
            "|---|---|",
            *commands,
            "",
            "| group | choices |",
            "|---|---|",
            *groups,
            "",
            "The choices of the other groups, recipes and experiments: [choices](choices.md).",
            "",
        ]
    )


def command_line(name: str) -> str:
    """How a command is called."""
    return {"train": "python train.py", "eval": "python eval.py"}.get(name, f"vision {name}")


def command_page(name: str) -> str:
    """The settings of a command."""
    command = COMMANDS[name]
    values, chosen = composed(name)
    rows = []
    for group in KINDS:
        if isinstance(values.get(group), Mapping) and len(kinds_of(command.config, group)) > 1:
            link = f"see [{group}]({group_file(group)}.md)"
            rows.append(f"| `{group}` | `{chosen.get(group, '')}` | a choice | {link} |")
    for setting in settings(command.config, values):
        if setting.path.split(".")[0] not in KINDS or "." not in setting.path:
            rows += rows_of(setting)
    alias = f" `vision {name}` is the same command." if name in ("train", "eval") else ""
    groups = sorted(set(chosen) & set(choices()) - set(KINDS))
    more = [
        f"Groups: {', '.join(f'[`{g}=`](choices.md#{g})' for g in groups)}.",
        "",
    ]
    return "\n".join(
        [
            f"# {command_line(name)}",
            "",
            f"{sentence(command.summary)}{alias}",
            "",
            *(more if groups else []),
            TABLE,
            COLUMNS,
            *rows,
            END,
            "",
        ]
    )


def group_page(group: str) -> str:
    """The choices of a group, then the settings of each kind."""
    command = KINDS[group]
    lines = [f"# {group}=", "", "| choice | |", "|---|---|"]
    lines += [f"| `{choice}` | {cell(text)} |" for choice, text in choices()[group].items()]
    for kind in kinds_of(COMMANDS[command].config, group):
        words = get_args(kind.model_fields["kind"].annotation)
        choice, values = example_of(command, group, words)
        lines += [
            "",
            f"## {group}.kind={' or '.join(words)}",
            "",
            sentence((kind.__doc__ or "").split("\n\n")[0]),
            f"The values are those of `{group}={choice}`.",
            "",
            TABLE,
            COLUMNS,
            *(line for s in settings(kind, values[group], f"{group}.") for line in rows_of(s)),
            END,
        ]
    return "\n".join([*lines, ""])


def choices_page() -> str:
    """One line for every choice of the groups that have no page of their own."""
    lines = ["# Choices", "", "The first line of each YAML file below `configs/`."]
    for group, found in choices().items():
        if group not in KINDS and not group.startswith("hydra"):
            lines += ["", f"## {group}", "", f"| `{group}=` | |", "|---|---|"]
            lines += [f"| `{choice}` | {cell(text)} |" for choice, text in found.items()]
    return "\n".join([*lines, ""])


def kinds_of(config: Any, group: str) -> list[Any]:
    """The classes of a group."""
    field = config.model_fields.get(group)
    return [] if field is None else config_classes(field.annotation)


def example_of(command: str, group: str, kinds: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The first choice of a kind, and the settings of its command with it."""
    for choice in choices()[group]:
        text = (CONFIGS / group / f"{choice}.yaml").read_text()
        if any(f"kind: {kind}" in map(str.strip, text.splitlines()) for kind in kinds):
            return choice, composed(command, f"{group}={choice}")[0]
    raise ValueError(f"no file of configs/{group} is of {kinds}")


def composed(command: str, *overrides: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings and choices; what the user must give is `???`, as in the YAML file."""
    values, chosen = compose(command, overrides, complete=False)
    return OmegaConf.to_container(OmegaConf.create(values)), chosen  # type: ignore[return-value]


def group_file(group: str) -> str:
    """The page of a group; `data` is also a command."""
    return f"group_{group}"


def rows_of(setting: Setting) -> Iterator[str]:
    """The lines of a setting; those of a group that is null by default are below it."""
    value = "*required*" if setting.value == "???" else f"`{shown(setting.value)}`"
    meaning = cell(setting.meaning)
    yield f"| `{setting.path}` | {value} | {cell(type_text(setting.field))} | {meaning} |"
    for group in config_classes(setting.field.annotation):
        for inner in settings(group, {}, f"{setting.path}."):
            about = cell(inner.meaning)
            yield f"| `{inner.path}` | | {cell(type_text(inner.field))} | {about} |"


def type_text(field: FieldInfo) -> str:
    """What a value may be, in words."""
    kind: Any = field.annotation
    for mark in field.metadata:
        kind = Annotated[kind, mark]
    schema = TypeAdapter(kind).json_schema()
    return " or ".join(dict.fromkeys(parts(schema, schema.get("$defs", {}))))


def parts(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> Iterator[str]:
    """The alternatives of a JSON schema."""
    if "$ref" in schema:
        yield from parts(defs[schema["$ref"].rpartition("/")[2]], defs)
    elif "anyOf" in schema or "oneOf" in schema:
        for one in schema.get("anyOf") or schema["oneOf"]:
            yield from parts(one, defs)
    elif "const" in schema or "enum" in schema:
        yield from (str(word) for word in schema.get("enum", [schema.get("const")]))
    elif schema.get("type") == "null":
        yield "null"
    elif schema.get("type") == "array":
        inner: Iterable[Mapping[str, Any]] = schema.get("prefixItems") or [schema.get("items", {})]
        words = dict.fromkeys(" or ".join(dict.fromkeys(parts(one, defs))) for one in inner)
        yield f"list of {' and '.join(words) or 'values'}"
    elif schema.get("type") == "object":
        yield "group of settings"
    else:
        word = (
            "path" if schema.get("format") == "path" else WORDS.get(schema.get("type", ""), "any")
        )
        yield " ".join([word, *bounds(schema)]).strip()


def bounds(schema: Mapping[str, Any]) -> Iterator[str]:
    """The limits of a number that are worth reading."""
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = {
        sign: schema[key] for key, sign in signs.items() if abs(schema.get(key, 2**31)) < 2**31
    }
    if {"≥", "≤"} == found.keys():
        yield f"from {found['≥']:,} to {found['≤']:,}"
    else:
        yield " and ".join(f"{sign} {value:,}" for sign, value in found.items())


def cell(text: str) -> str:
    """Text inside a table."""
    for letter, instead in (("|", r"\|"), ("<", "&lt;"), ("*", r"\*"), ("[", r"\[")):
        text = text.replace(letter, instead)
    return text


def sentence(text: str) -> str:
    """A summary with a capital letter and a full stop."""
    plain = " ".join(text.split())
    return f"{plain[:1].upper()}{plain[1:].rstrip('.')}."


def main() -> None:
    """Write the pages into a folder."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
