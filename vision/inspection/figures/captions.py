"""The text beside a figure: its content, how it was computed, and the command that drew it."""

import hashlib
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vision.inspection.explain import Heatmap
from vision.inspection.methods.spec import MethodChoice, parse_method

_RECORD = "Record"


@dataclass(frozen=True)
class Caption:
    """What a reader must know to understand and repeat a figure."""

    shows: str
    """In a sentence or two."""
    facts: tuple[tuple[str, str], ...] = ()
    """Image, model, layer, query, scale and so on, by name."""
    methods: tuple[str, ...] = ()
    """Each with its formula, options and reference."""

    def text(self, record: str = "") -> str:
        """The content of the file; `record` stands for everything that the figure depends on."""
        lines = [*textwrap.wrap(self.shows, 100), ""]
        for name, value in self.facts:
            lines += textwrap.wrap(f"{name}: {value}", 100, subsequent_indent="  ")
        if self.methods:
            lines += ["", "Methods:"]
            for method in self.methods:
                lines += textwrap.wrap(method, 100, initial_indent="- ", subsequent_indent="  ")
        if record:
            lines += ["", f"{_RECORD}: {record}"]
        return "\n".join(lines) + "\n"


def method_lines(heatmaps: Iterable[Heatmap]) -> tuple[str, ...]:
    """A line on every method among the maps, each once."""
    lines: dict[str, str] = {}
    for heatmap in heatmaps:
        line = method_line(heatmap.choice, layer=heatmap.layer, query=heatmap.query)
        lines.setdefault(str(heatmap.choice), line)
    return tuple(lines.values())


def method_line(choice: MethodChoice | str, **settings: Any) -> str:
    """Title, formula, settings and reference of a method. None: not applicable."""
    choice = parse_method(choice) if isinstance(choice, str) else choice
    given = choice.settings | {name: value for name, value in settings.items() if value is not None}
    parts = [f"{choice.title}: {choice.spec.formula}"]
    parts += [f"{name.replace('_', ' ')} {value}" for name, value in given.items()]
    return f"{'; '.join(parts)}. {choice.spec.reference}."


def record_of(settings: Mapping[str, Any], files: Sequence[Path]) -> str:
    """A short code that changes with the settings and with the files that a figure depends on."""
    stamps = []
    for file in files:
        found = file.stat() if file.exists() else None
        stamps.append([str(file.resolve()), found and [found.st_size, found.st_mtime_ns]])
    content = json.dumps([settings, stamps], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def stored_record(file: Path) -> str | None:
    """The code in a caption that was written before; None if there is none."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    last = lines[-1] if lines else ""
    name, _, code = last.partition(": ")
    return code if name == _RECORD else None
