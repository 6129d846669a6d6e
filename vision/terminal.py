"""Printing for people."""

import re
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress
    from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that move the cursor, clear the screen or cannot be printed; but not a new line."""


def plain(text: str, style: str = "") -> "Text":
    """Text that rich shows exactly as it is.

    For everything that a user or a file has named: in a plain string rich takes [red] for a colour,
    fails at [/b] without a [b], and draws :cat: as one. Control characters are shown by their
    codes, so that a file cannot control the terminal.
    """
    from rich.text import Text

    return Text(_CONTROL.sub(lambda found: ascii(found[0])[1:-1], text), style)


def print_wide(result: "RenderableType", file: TextIO | None = None) -> None:
    """As rich draws it, as wide as it needs: a table in a narrow window must not lose digits."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(file=file)
    needed = Measurement.get(console, console.options.update(max_width=1000), result).maximum
    Console(file=file, width=max(console.width, needed)).print(result)


def progress_bar() -> "Progress":
    """A bar of progress on standard error that disappears when it is done, where a person is
    looking; titles are shown as they are.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def elapsed(seconds: float) -> str:
    """A time as a person would say it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
