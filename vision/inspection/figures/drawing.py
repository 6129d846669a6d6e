"""A figure with its numbers and its caption, written together."""

import hashlib
import io
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vision.files import replacing, write_all, write_text
from vision.inspection.explain import LEAST_LIMIT, Heatmap
from vision.inspection.methods.spec import MethodChoice, parse_method

Array = NDArray[Any]
Kind = Literal["png", "svg", "pdf", "npz"]
TEXT = "#1f2328"
FAINT = "#6a737d"
ACCENT = "#1b6ca8"
MARK = "#d1495b"
_RECORD = "Record"
"""Name of the last line of a caption."""


@dataclass(frozen=True)
class Style:
    """The appearance of a figure."""

    paper: bool = False
    """No titles, small type, text as text in SVG and PDF files."""
    width: float | None = None
    """Inches; None: as wide as the figure needs."""
    dpi: int = 150
    percentile: float = 99.5
    """Colours end at this percentile of all values that share a scale; 100: at the largest."""
    interpolation: Literal["bilinear", "nearest"] = "bilinear"
    """Between the cells of a map."""

    @property
    def size(self) -> float:
        """Font size in points."""
        return 6.5 if self.paper else 9.0

    def settings(self) -> Any:
        """For matplotlib."""
        ticks = {
            "labelsize": self.size * 0.85,
            "color": FAINT,
            "labelcolor": TEXT,
            "major.width": 0.6,
            "major.size": 2.5,
        }
        return {f"{axis}tick.{name}": value for axis in "xy" for name, value in ticks.items()} | {
            "font.family": "DejaVu Sans",
            "font.size": self.size,
            "axes.titlesize": self.size,
            "axes.labelsize": self.size * 0.9,
            "axes.edgecolor": FAINT,
            "axes.labelcolor": TEXT,
            "axes.linewidth": 0.6,
            "text.color": TEXT,
            "hatch.linewidth": 0.5,
            "svg.fonttype": "none",
            "svg.hashsalt": "vision",
            "pdf.fonttype": 42,
            "figure.facecolor": "white",
        }


SCREEN = Style()


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


@dataclass(frozen=True, eq=False)
class Drawing:
    """One figure with its numbers and its caption."""

    figure: Figure
    style: Style
    caption: Caption
    numbers: Mapping[str, Array] = field(default_factory=dict, repr=False)

    def with_facts(self, *facts: tuple[str, str]) -> "Drawing":
        """The same drawing with more facts in its caption."""
        caption = replace(self.caption, facts=(*self.caption.facts, *facts))
        return replace(self, caption=caption)

    def encoded(self, kind: Kind) -> bytes:
        """The figure as a file of this kind; npz: its numbers."""
        stream = io.BytesIO()
        if kind == "npz":
            np.savez_compressed(stream, **dict(self.numbers))  # type: ignore[arg-type]
            return stream.getvalue()
        # No dates or versions, so that equal figures are equal files.
        dates = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
        with matplotlib.rc_context(self.style.settings()):
            self.figure.savefig(stream, format=kind, dpi=self.style.dpi, metadata=dates[kind])
        return stream.getvalue()

    def save(
        self, stem: str | Path, kinds: Sequence[Kind] | None = None, record: str = ""
    ) -> list[Path]:
        """Write the files and, last, the caption; each file is replaced as a whole.

        kinds: by default the one that the name ends in, as in "figure.svg", or else png.
        """
        stem = Path(stem)
        if kinds is None:
            named = [kind for kind in get_args(Kind) if stem.suffix == f".{kind}"]
            stem = stem.with_suffix("") if named else stem
            kinds = named or ["png"]
        stem.parent.mkdir(parents=True, exist_ok=True)
        written = []
        for kind in kinds:
            path = stem.with_name(f"{stem.name}.{kind}")
            with replacing(path) as file:
                write_all(file, self.encoded(kind))
            written.append(path)
        caption = caption_file(stem)
        write_text(caption, self.caption.text(record))
        return [*written, caption]

    def _repr_png_(self) -> bytes:
        """For notebooks."""
        return self.encoded("png")


def caption_file(stem: Path) -> Path:
    """The path of a figure's caption."""
    return stem.with_name(f"{stem.name}.txt")


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


@contextmanager
def new_figure(style: Style, width: float, height: float, apart: float = 0.03) -> Iterator[Figure]:
    """A figure of this size in inches, or of the style's width in the same proportions.

    apart: inches above and below each part.
    """
    factor = 1.0 if style.width is None else style.width / width
    with matplotlib.rc_context(style.settings()):
        figure = Figure(figsize=(width * factor, height * factor), layout="constrained")
        pads = {"w_pad": 0.03, "h_pad": apart, "wspace": 0.02, "hspace": 0.02}
        figure.get_layout_engine().set(**pads)  # type: ignore[union-attr]
        yield figure


def colour_limit(values: Iterable[Array], percentile: float) -> tuple[float, bool]:
    """The end of the colour scale that values share, and whether some lie beyond it."""
    flat = np.concatenate([np.ravel(v) for v in values])
    largest = float(flat.max(initial=0.0))
    limit = float(np.percentile(flat, percentile)) if percentile < 100 else largest
    limit = max(limit, LEAST_LIMIT)
    return limit, largest > limit * 1.0001
