"""The report of loading weights: what became of every tensor and of every parameter."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vision.config import shorten

_SHOWN = 3
"""Names that are listed for a group of tensors of one kind."""


@dataclass(frozen=True)
class LoadReport:
    """The outcome of loading weights. Names are this project's, but in `ignored` the file's."""

    source: str
    layout: str
    """The project whose names the file has."""
    path_taken: tuple[str, ...] = ()
    """What was unwrapped on the way to the weights, from the outside in."""
    integrity: str = ""
    """Whether the file's bytes are known to be those that were written, as `Raw` has it; empty for
    tensors in memory.
    """
    loaded: tuple[str, ...] = ()
    """Parameters whose numbers are those of the file."""
    converted: Mapping[str, str] = field(default_factory=dict)
    """Parameters whose numbers are laid out or joined otherwise in the file, and how."""
    resized: Mapping[str, str] = field(default_factory=dict)
    """Parameters that were fitted to another geometry: from → to."""
    new: Mapping[str, str] = field(default_factory=dict)
    """Parameters that keep the values they started with, and why."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Tensors of the file that the model does not use, and why."""
    left: Mapping[str, int] = field(default_factory=dict)
    """Other parts of the file, which were not read, and the number of tensors in each."""
    assumed: tuple[str, ...] = ()
    """Settings that the file does not show and that were taken from known models, and why."""
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain mappings and lists, for JSON."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    def lines(self) -> list[str]:
        """The report as lines of text, each a word and a sentence."""
        inside = f", inside {' → '.join(self.path_taken)}" if self.path_taken else ""
        count = len(self.loaded)
        rows = [
            ("file", self.source),
            ("layout", f"{self.layout}{inside}"),
            *([("integrity", self.integrity)] if self.integrity else []),
            ("loaded", f"{count} tensor{'' if count == 1 else 's'} as they are"),
        ]
        for word in ("converted", "resized", "new", "ignored"):
            rows += [(word, line) for line in _grouped(getattr(self, word))]
        rows += [("left", f"{name}: {number} tensors") for name, number in self.left.items()]
        rows += [("assumed", line) for line in self.assumed]
        rows += [("warning", line) for line in self.warnings]
        return [f"{word:<10}{sentence}" for word, sentence in rows]


def _grouped(tensors: Mapping[str, str]) -> list[str]:
    """One line for all tensors with the same note."""
    groups: dict[str, list[str]] = {}
    for name, what in tensors.items():
        groups.setdefault(what, []).append(name)
    return [f"{shorten(names, _SHOWN)}: {what}" for what, names in groups.items()]
