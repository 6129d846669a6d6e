"""Text, tables and progress bars on a terminal."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress
    from rich.text import Text

T = TypeVar("T")

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that move the cursor, clear the screen or cannot be printed; a newline is allowed."""


def plain(text: str, style: str = "") -> "Text":
    """Return text that rich prints verbatim.

    For every name from a user or a file: in a plain string rich interprets [red] as a colour, fails
    at [/b] without a [b] and replaces :cat: by an emoji. Control characters are printed as their
    codes, so that a file cannot control the terminal.
    """
    from rich.text import Text

    return Text(_CONTROL.sub(lambda found: ascii(found[0])[1:-1], text), style)


def print_wide(result: "RenderableType", file: TextIO | None = None) -> None:
    """Print with rich at full width: a table must not lose digits in a narrow terminal."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(file=file)
    needed = Measurement.get(console, console.options.update(max_width=1000), result).maximum
    Console(file=file, width=max(console.width, needed)).print(result)


def print_result(result: Any) -> None:
    """Print a mapping as JSON, anything else with rich."""
    if isinstance(result, dict):
        print(json.dumps(result, indent=1))
    else:
        print_wide(result)


def progress_bar() -> "Progress":
    """A progress bar on standard error that disappears at the end; none if standard error is not a
    terminal. Titles are printed verbatim.
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


def tracked(items: Iterable[T], title: str, total: int, completed: int = 0) -> Iterator[T]:
    """Yield the items of a long task, with a progress bar."""
    with progress_bar() as progress:
        task = progress.add_task(title, total=total, completed=completed)
        for item in items:
            yield item
            progress.advance(task)


def percent(share: float, digits: int = 2) -> str:
    """Return a share for reading, such as `93.48 %`."""
    return f"{100 * share:.{digits}f} %"


def elapsed(seconds: float) -> str:
    """Return a duration for reading, such as `2 min 5 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
