"""Seeded wrong overrides of every command, and a process that tries them without any work.

    python wrong_words.py COMMAND SEED NUMBER

runs the command line with each of them in the working directory, and prints what came of it as
JSON. The function of the command is replaced: words that happen to be right are counted, not run.
"""

import contextlib
import io
import json
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

BASE = {
    "train": (),
    "eval": ("checkpoint=run",),
    "predict": ("checkpoint=run", "images=photo.jpg"),
    "visualize": ("checkpoint=run", "images=photo.jpg"),
    "export": ("checkpoint=run",),
    "publish": ("checkpoint=run",),
    "convert": ("source=run", "output=new"),
    "info": (),
    "data": (),
    "prepare": ("data.root=photos", "output=new"),
    "compare": ("runs=[run]",),
    "average": ("runs=[run]", "output=new.safetensors"),
    "serve": ("checkpoint=run",),
}
"""Every command with words that are right."""

Settings = dict[str, Any]
"""Values by the path of their setting, as YAML has them."""


@dataclass(frozen=True)
class Wrong:
    """Words with one mistake."""

    kind: str
    words: tuple[str, ...]
    named: str
    """Part of the message: the setting, or the word."""
    sure: bool = True
    """Whether the words are wrong whatever the types of the settings."""


@dataclass(frozen=True)
class Tried:
    """What came of wrong words."""

    wrong: Wrong
    code: int | None
    """Exit code; None after an exception."""
    message: str
    """Standard error, or the traceback."""
    torch: bool
    """Whether torch was loaded."""
    ran: bool
    """Whether the command would have run."""


def wrong_words(command: str, seed: int, number: int) -> Iterator[Wrong]:
    """A number of mistakes for a command."""
    rng = random.Random(f"{command} {seed}")
    settings, groups = settings_of(command)
    for _ in range(number):
        kind = rng.choice(KINDS)
        key = rng.choice(list(settings))
        group = rng.choice(groups) if groups else key
        yield kind(rng, key, group, settings)


def settings_of(command: str) -> tuple[Settings, list[str]]:
    """The settings of a command and its groups of YAML files."""
    from vision.cli.composition import compose

    values, chosen = compose(command, BASE[command])
    found: Settings = {}

    def add(prefix: str, values: Settings) -> None:
        for name, value in values.items():
            if isinstance(value, dict) and value:
                add(f"{prefix}{name}.", value)
            elif name != "kind":
                found[f"{prefix}{name}"] = value

    add("", values)
    return found, [g for g in chosen if not g.startswith("hydra/")]


def misspelt(rng: random.Random, word: str, known: set[str]) -> str:
    """A word with one character too many, too few, exchanged or replaced."""
    while True:
        at = rng.randrange(len(word))
        letter = rng.choice("abcdefghijklmnopqrstuvwxyz_")
        changed = rng.choice(
            [
                word[:at] + letter + word[at:],
                word[:at] + word[at + 1 :],
                word[:at] + letter + word[at + 1 :],
                word[:at] + word[at + 1 : at + 2] + word[at : at + 1] + word[at + 2 :],
            ]
        )
        if changed and changed not in known and not changed.startswith("_"):
            return changed


def _key(rng: random.Random, key: str, group: str, settings: Settings) -> Wrong:
    parent, dot, name = key.rpartition(".")
    known = {k.removeprefix(parent + dot).partition(".")[0] for k in settings} | {group}
    word = f"{parent}{dot}{misspelt(rng, name, known)}"
    value = rng.choice(["1", "true", "word", "[1,2]", "{a: 1}", "", "null"])
    return Wrong("misspelt key", (f"{rng.choice(['', '+', '++'])}{word}={value}",), word)


def wrong_types(value: Any) -> list[str]:
    """Values of other types than that of a setting with this value."""
    wrong = ["{a: 1}", "{a: {b: {c: [1, 2]}}}", "[{a: 1}]", "[[[[1]]]]", "[null]"]
    if isinstance(value, bool):
        wrong += ["5", "null", "[true]", "tru", "''", "1.0", "wahr"]
    elif isinstance(value, int | float):
        wrong += ["twelve", "''", "[1,2,3]", "-1", "nan", "-inf", "1e400", "12px", "0x10g", "true"]
        wrong += ["-9223372036854775809", "1" * 400] if isinstance(value, int) else []
    elif value is None or isinstance(value, str):
        wrong = wrong[:2]
    return wrong


def has_one_type(value: Any) -> bool:
    """Whether values of other types than that of this one are wrong in any case."""
    return value not in ([], {}) and not isinstance(value, list)


def _type(rng: random.Random, key: str, group: str, settings: Settings) -> Wrong:
    value = settings[key]
    word = f"{key}={rng.choice(wrong_types(value))}"
    return Wrong("type", (word,), key, has_one_type(value))


def odd_values() -> list[str]:
    """Values that may be right for some settings."""
    values = ["null", "", "2024", "0", "-1", "0.5", "true", "word", "[]", "[a,b]", "{}", "nan"]
    values += ["18446744073709551616", "9223372036854775808", "1e13", "1e400", "-inf", "x" * 300]
    values += ["é" * 2000, "日本", "'a b'", "\\'", "a\\ b", "~", "/", ".", "..", "~nobody/x", "*"]
    values += ["9" * 5000, f"[{','.join(f'photo-{n:04}.jpg' for n in range(40))}]", "a/" * 2000]
    values += ["'\\x00'", "\x00", "\ud800", "1_000", "0o7", "1e3", "2024-01-01", "12:30:00", "no"]
    return values


def _any(rng: random.Random, key: str, group: str, settings: Settings) -> Wrong:
    return Wrong("any value", (f"{key}={rng.choice(odd_values())}",), key, sure=False)


def _below(rng: random.Random, key: str, group: str, settings: Settings) -> Wrong:
    word = rng.choice(["x", "0", "x.y.z", "kind", "1.2", "-1", "é"])
    prefix = rng.choice(["", "+", "++"])
    return Wrong("below a value", (f"{prefix}{key}.{word}=0.8",), key, settings[key] != {})


def _no_equals(rng: random.Random, key: str, group: str, settings: Settings) -> Wrong:
    word = rng.choice([key, f"{key}:1", "photo", "=", "=1", "a b", "+", "~", "++", key + "==", ""])
    return Wrong("no value", (word,), word.strip("+~"), sure=False)


def _interpolation(rng: random.Random, key: str, group: str, settings: Settings) -> Wrong:
    names = [
        *("nothing.here", key, "oc.env:NO_SUCH_VARIABLE", "no_resolver:1", ".", "..", "...."),
        *("", " ", "a", "oc.decode:'['", "oc.create:1", "hydra:nothing", "point_name:1", "${", "["),
        *("oc.select:", "hydra:run.dirr", ".nothing", "..nothing.x", f"{key}.x", f"{key}[0]"),
    ]
    value = "${" + rng.choice(names) + "}"
    forms = [value, value, f"a{value}b", f"'{value}'", f"[{value}]", value[:-1], "$" + value]
    return Wrong("interpolation", (f"{key}={rng.choice(forms)}",), key, sure=False)


def _cycle(rng: random.Random, key: str, group: str, settings: Settings) -> Wrong:
    other = rng.choice([k for k in settings if k != key])
    words = (f"{key}=${{{other}}}", f"{other}=${{{key}}}")
    return Wrong("cycle", words, min(key, other, key=list(settings).index))


def _unbalanced(rng: random.Random, key: str, group: str, settings: Settings) -> Wrong:
    values = ["[1", "{a:1", "{a", "'abc", '"abc', "a]", "}", "(", "[1,2}", "f(", "f(x)", "a:b"]
    values += ["[" * 3, "{" * 20, "'\"'", "[,]", "{,}", "[1,,2]", "{a:}", "a=b", "==", "a,,b", ","]
    values += [
        "range(",
        "range()",
        "choice()",
        "interval(1)",
        "sort()",
        "glob(",
        "glob()",
        "tag(x)",
    ]
    values += ["a,", "][", "[" * 100 + "]" * 100, "{a:" * 300 + "1" + "}" * 300]
    return Wrong("unbalanced", (f"{key}={rng.choice(values)}",), key, sure=False)


def _deleted(rng: random.Random, key: str, group: str, settings: Settings) -> Wrong:
    parent = key.rpartition(".")[0] or key
    word = rng.choice([key, key, f"{key}.x", f"{key}=nothing_like_it", parent, "nothing", "hydra"])
    sure = word not in ("nothing", "hydra", "data")  # the first two may be images; data may be null
    return Wrong("deletion", (f"~{word}",), word.partition("=")[0], sure)


def _added(rng: random.Random, key: str, group: str, settings: Settings) -> Wrong:
    words = ["nothing", "a.b.c", "x" * 300, "数", "a-b", "a/b", "a@b", "0", "_x", "hydra.x"]
    word, value = rng.choice(words), rng.choice(["1", "", "null", "[1]"])
    added = f"{rng.choice(['+', '++'])}{word}={value}"
    return Wrong("addition", (added,), word.partition(".")[0][:200], sure=False)


def _choice(rng: random.Random, key: str, group: str, settings: Settings) -> Wrong:
    values = ["nothing", "null_", "vit_tinny", "''", "[vit_tiny,swin_tiny]", "../train", "/", "1"]
    values += ["é", "x" * 300, "{a: 1}", "vit_tiny.yml", ".", "..", "a b", "-1", "true", "[]"]
    at = rng.choice(["", "", "", "", "@x", "@x.y", "@", ":a", "/x", "@model.x", "@_global_"])
    prefix = rng.choice(["", "", "+", "++"])
    return Wrong("choice", (f"{prefix}{group}{at}={rng.choice(values)}",), group, sure=False)


def _option(rng: random.Random, key: str, group: str, settings: Settings) -> Wrong:
    options = [
        *(("--config-dir",), ("--config-dir=",), ("--config-dir", "nowhere"), ("-cd", "photo.jpg")),
        *(("--config-name",), ("--config-name=",), ("-cn", "nothing"), ("--config-path",)),
        *(("--config-path", "photo.jpg"), ("--cfg", "x"), ("--cfg",), ("-x",), ("--seed", "1")),
        *(("--info", "nothing"), ("--package", "no.x"), ("--experimental-rerun", "nowhere")),
        *(("--resolve",), ("--run", "--multirun"), ("--",)),
        *(("-m", f"{key}=a,b,{{c: 1}}"), ("-m", f"{key}=range(0)"), ("-m", f"{key}=range(a,b)")),
        *(("-m", f"{key}=interval(0,1)"), ("-m", f"{key}=glob(x)"), ("-m", f"{key}=choice({{}})")),
    ]
    words = rng.choice(options)
    return Wrong("option", words, key if words[0] == "-m" else "", sure=False)


def _of_hydra(rng: random.Random, key: str, group: str, settings: Settings) -> Wrong:
    words = [
        *("run.dir=photo.jpg/x", "sweep.dir=${x}", "mode=x", "job=1"),
        *("verbose=x", "searchpath=x", "searchpath=[nowhere]", "searchpath=[pkg://nothing]"),
        *("job_logging.root=5", "job_logging=x", "job.chdir=x"),
        *("launcher=x", "sweeper.params=1", "sweeper=null", "runtime.cwd=x", "nothing=1", "run=1"),
    ]
    word = rng.choice([*(f"hydra.{word}" for word in words), "hydra=x", "hydra/launcher=x"])
    return Wrong("Hydra's own", (word,), "", sure=False)  # Hydra words some of these messages


KINDS: list[Callable[[random.Random, str, str, Settings], Wrong]] = [
    *(_key, _type, _type, _any, _any, _any, _below, _no_equals, _interpolation, _interpolation),
    *(_cycle, _unbalanced, _deleted, _added, _choice, _option, _of_hydra),
]


def attempt(command: str, wrong: Wrong) -> Tried:
    """Run the command line in this process."""
    from vision.cli.app import COMMANDS, main

    reached = []

    def run(config: Any) -> int:
        reached.append(config)
        return 1

    COMMANDS[command] = replace(COMMANDS[command], run=run)
    error = io.StringIO()
    code: int | None = None
    try:
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            code = main([command, *BASE[command], *wrong.words])
    except BaseException:
        error.write(traceback.format_exc())
    return Tried(wrong, code, error.getvalue(), "torch" in sys.modules, bool(reached))


if __name__ == "__main__":
    command, seed, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    results = [attempt(command, wrong) for wrong in wrong_words(command, seed, number)]
    json.dump([asdict(result) for result in results], sys.stdout)
