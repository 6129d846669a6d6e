"""Pages in one file that a browser shows without a network."""

import json
from collections.abc import Sequence
from typing import Any


def self_contained(html: str, style: str, scripts: Sequence[str], data: Any) -> str:
    """HTML with its style, scripts and data in the places of their marks."""
    # Within a script element a browser interprets only "</script" and "<!--".
    payload = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    # The data comes last, because names of classes may look like a mark.
    parts = {"/*STYLE*/": style, "/*SCRIPT*/": "\n".join(scripts), "/*DATA*/": payload}
    for mark, part in parts.items():
        html = html.replace(mark, part, 1)
    return html
