"""A figure with its numbers and its caption, and how all three are written."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vision.files import replacing, write_all
from vision.inspection.figures.captions import Caption

Array = NDArray[Any]
Kind = Literal["png", "svg", "pdf", "npz"]
TEXT = "#1f2328"
FAINT = "#6a737d"
ACCENT = "#1b6ca8"
LEAST_LIMIT = 2.0
"""In multiples of uniform: a map that is nearly uniform must not look as if it said something."""


@dataclass(frozen=True)
class Style:
    """For whom a figure is drawn."""

    paper: bool = False
    """No titles, small type, text as text in SVG and PDF files."""
    width: float | None = None
    """Inches; None: as wide as the figure needs."""
    dpi: int = 150

    @property
    def size(self) -> float:
        """Of the type, in points."""
        return 6.5 if self.paper else 9.0

    def settings(self) -> Any:
        """For matplotlib."""
        return {
            "font.family": "DejaVu Sans",
            "font.size": self.size,
            "axes.titlesize": self.size,
            "axes.labelsize": self.size * 0.9,
            "xtick.labelsize": self.size * 0.85,
            "ytick.labelsize": self.size * 0.85,
            "axes.edgecolor": FAINT,
            "axes.labelcolor": TEXT,
            "axes.linewidth": 0.6,
            "xtick.color": FAINT,
            "ytick.color": FAINT,
            "xtick.labelcolor": TEXT,
            "ytick.labelcolor": TEXT,
            "xtick.major.width": 0.6,
            "ytick.major.width": 0.6,
            "xtick.major.size": 2.5,
            "ytick.major.size": 2.5,
            "text.color": TEXT,
            "hatch.linewidth": 0.5,
            "svg.fonttype": "none",
            "svg.hashsalt": "vision",
            "pdf.fonttype": 42,
            "figure.facecolor": "white",
        }


@dataclass(frozen=True, eq=False)
class Drawing:
    """One figure: what is seen, the numbers in it, and what is to be said of it."""

    figure: Figure
    style: Style
    caption: Caption
    numbers: Mapping[str, Array] = field(default_factory=dict)

    def with_facts(self, *facts: tuple[str, str]) -> "Drawing":
        """The same with more facts in its caption."""
        return replace(self, caption=self.caption.with_facts(*facts))

    def encoded(self, kind: Kind) -> bytes:
        """The figure as a file of this kind; npz: its numbers."""
        stream = io.BytesIO()
        if kind == "npz":
            np.savez_compressed(stream, **dict(self.numbers))  # type: ignore[arg-type]
            return stream.getvalue()
        # Nothing that changes from one writing to the next.
        dates = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
        with matplotlib.rc_context(self.style.settings()):
            self.figure.savefig(stream, format=kind, dpi=self.style.dpi, metadata=dates[kind])
        return stream.getvalue()

    def save(
        self, stem: str | Path, kinds: Sequence[Kind] = ("png",), record: str = ""
    ) -> list[Path]:
        """Write the files and, last of all, the caption; each appears whole or not at all."""
        stem = Path(stem)
        stem.parent.mkdir(parents=True, exist_ok=True)
        written = []
        for kind in kinds:
            path = stem.with_name(f"{stem.name}.{kind}")
            write_whole(path, self.encoded(kind))
            written.append(path)
        caption = caption_file(stem)
        write_whole(caption, self.caption.text(record).encode())
        return [*written, caption]

    def _repr_png_(self) -> bytes:
        """For notebooks."""
        return self.encoded("png")


def caption_file(stem: Path) -> Path:
    """Where the caption of a figure lies."""
    return stem.with_name(f"{stem.name}.txt")


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file at once."""
    with replacing(path) as file:
        write_all(file, content)


@contextmanager
def new_figure(style: Style, width: float, height: float, apart: float = 0.03) -> Iterator[Figure]:
    """A figure of so many inches, or as wide as the style says in the same proportions.

    apart: inches above and below each part.
    """
    factor = 1.0 if style.width is None else style.width / width
    with matplotlib.rc_context(style.settings()):
        figure = Figure(figsize=(width * factor, height * factor), layout="constrained")
        pads = {"w_pad": 0.03, "h_pad": apart, "wspace": 0.02, "hspace": 0.02}
        figure.get_layout_engine().set(**pads)  # type: ignore[union-attr]
        yield figure


def colour_limit(values: Iterable[Array], percentile: float) -> tuple[float, bool]:
    """Where colours end for values that share a scale, and whether some lie beyond."""
    flat = np.concatenate([np.ravel(v) for v in values])
    largest = float(flat.max(initial=0.0))
    limit = float(np.percentile(flat, percentile)) if percentile < 100 else largest
    limit = max(limit, LEAST_LIMIT)
    return limit, largest > limit * 1.0001
