"""Response times of the explorer page in a browser: until it is ready, and per hovered patch.

    python benchmarks/page.py                        # ViT-B/16 and Swin-B at 224, about a minute
    python benchmarks/page.py --models vit_small     # other models

Needs Chromium and Playwright (`make browser`). Pages of models with random weights are opened from
disk at 1280 x 900. A hover is everything from the event to the last call that draws: all layers
and heads, or a rollout, redrawn for another query. Times are wall times of the page's own clock.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vision.cli.composition import compose
from vision.config import parse
from vision.inspection.explorer.page import write_page
from vision.models.build import build_model
from vision.models.configs import ModelConfig

READY_BAR_MS, HOVER_BAR_MS = 3000, 16
METHODS = ("attention", "rollout")
SIZE = 224


def make_page(name: str, folder: Path) -> Path:
    """The page of a model with random weights."""
    values, _ = compose("info", [f"model={name}", f"data.image_size={SIZE}"])
    config: ModelConfig = parse(ModelConfig, values["model"])  # type: ignore[arg-type]
    model = build_model(config, (SIZE, SIZE), channels=3, classes=1000, seed=0).eval()
    image = torch.randn(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    pixels = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    path = folder / f"{name}.html"
    write_page(model, image, Image.fromarray(pixels), path)
    return path


def measure(browser: object, path: Path, hovers: int) -> tuple[float, dict[str, list[float]]]:
    """Milliseconds until the page is ready, and of every hover by method."""
    view = browser.new_page(viewport={"width": 1280, "height": 900})  # type: ignore[attr-defined]
    view.goto(path.as_uri())
    view.wait_for_selector("html[data-ready]")
    ready = float(view.evaluate("api.startTime"))
    times = {}
    for method in METHODS:
        view.evaluate("method => api.set({method, pinned: false})", method)
        times[method] = [float(t) for t in view.evaluate(f"api.hoverTimes({hovers})")]
    view.close()
    return ready, times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["vit_base", "swin_base"])
    parser.add_argument("--hovers", type=int, default=300)
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("error: there is no Chromium on this machine: make browser.")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("error: Playwright is missing: pip install playwright.")
    head = f"hover: median, 90 % (bar {HOVER_BAR_MS} ms), first"
    print(f"| model | ready (bar {READY_BAR_MS} ms) | method | {head} |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in arguments.models:
            ready, times = measure(browser, make_page(name, Path(folder)), arguments.hovers)
            for method, found in times.items():
                most = statistics.quantiles(found, n=10)[-1]
                print(
                    f"| {name} | {ready:.0f} ms | {method} | "
                    f"{statistics.median(found):.1f}, {most:.1f}, {found[0]:.1f} ms |"
                )
        browser.close()


if __name__ == "__main__":
    main()
