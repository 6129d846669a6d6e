"""The live page: one HTML file with its style and script, which asks this server only."""

from importlib.resources import files

from vision.inspection.explorer.self_contained import self_contained

SCRIPTS = ("ask.js", "camera.js", "whatif.js", "steps.js", "live.js")
"""In the order in which the page runs them."""
POLICY = (
    "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; frame-src blob:; media-src blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing is loaded from anywhere, and nothing is sent anywhere but to this server."""


def live_page() -> str:
    """The page; its colours and controls are those of the explorer."""
    static = files("vision.inference.serve") / "static"
    explorer = files("vision.inspection.explorer") / "static"
    html, own, *scripts = (
        (static / name).read_text("utf-8") for name in ("live.html", "live.css", *SCRIPTS)
    )
    shared = (explorer / "page.css").read_text("utf-8")
    elements = (explorer / "elements.js").read_text("utf-8")
    script = ["(() => {\n'use strict';", elements, *scripts, "})();"]
    return self_contained(html, f"{shared}\n{own}", script, {})
