"""Printing for people."""

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType


def print_wide(result: "RenderableType", file: TextIO | None = None) -> None:
    """As rich draws it, as wide as it needs: a table in a narrow window must not lose digits."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(file=file)
    needed = Measurement.get(console, console.options.update(max_width=1000), result).maximum
    Console(file=file, width=max(console.width, needed)).print(result)


def elapsed(seconds: float) -> str:
    """A time as a person would say it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
