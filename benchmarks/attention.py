"""Time and memory of attention: training, capture, rollout, Grad-CAM, the explorer page.

    python benchmarks/attention.py --quick                 # small models: does everything run?
    python benchmarks/attention.py --output FILE.json      # ViT-B/16 and Swin-T, some minutes

One thread, batch 1, 224 pixels, random weights. Contenders take turns within a round; the table
shows medians of CPU time over rounds. `plain` is the forward pass as evaluation runs it, inside
`static_bias`. Memory is what the attention of all layers takes. A second table compares both paths
of attention in training: forward and backward of one layer, on a CPU (see `explicit_on_cpu`).
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vision.cli.composition import compose
from vision.config import parse
from vision.inspection.capture.capture import capture
from vision.inspection.explorer.page import write_page
from vision.inspection.methods.layer_maps import token_gradcam
from vision.inspection.methods.rollout import rollout, seed_of
from vision.models.attention import attention
from vision.models.build import build_model
from vision.models.configs import ModelConfig
from vision.models.layers import static_bias

CAPTURE_BAR, ROLLOUT_BAR_MS, PAGE_BAR_MB = 1.5, 10.0, 10.0
MODELS = {"full": ("vit_base", "swin_tiny"), "quick": ("vit_mini", "swin_mini")}
SHAPES = {
    "full": ((128, 4, 64, 32), (32, 3, 65, 64), (16, 6, 197, 64), (4, 12, 577, 64)),
    "quick": ((2, 2, 16, 8),),
}
"""Batch, heads, tokens and width of a head."""
Action = Callable[[], Any]


def main() -> None:
    arguments = read_arguments()
    torch.set_num_threads(1)
    names = MODELS["quick" if arguments.quick else "full"]
    size = 48 if arguments.quick else 224
    rounds = 2 if arguments.quick else arguments.rounds
    report: dict[str, Any] = {"machine": machine(), "rounds": rounds, "size": size, "results": {}}
    for name in names:
        report["results"][name] = measure(name, size, rounds)
    print_table(report)
    report["training"] = {
        f"{shape} {str(dtype)[6:]}": paths(shape, dtype, rounds)
        for shape in SHAPES["quick" if arguments.quick else "full"]
        for dtype in (torch.float32, torch.bfloat16)
    }
    print_paths(report["training"])
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="small models, two rounds")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: at least one round is needed.")
    return arguments


def measure(name: str, size: int, rounds: int) -> dict[str, Any]:
    """All figures of one model."""
    values, _ = compose("info", [f"model={name}", f"data.image_size={size}"])
    config: ModelConfig = parse(ModelConfig, values["model"])  # type: ignore[arg-type]
    model = build_model(config, (size, size), channels=3, classes=1000, seed=0).eval()
    image = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    captured = capture(model, image)
    seed = seed_of(captured)

    def plain() -> Tensor:
        with torch.inference_mode(), static_bias(model):
            return model(image)

    def gradcam() -> Tensor:
        found = capture(model, image, targets=0, gradients=True, layers=[-1])
        return token_gradcam(found.layers[-1])

    actions: dict[str, Action] = {
        "plain": plain,
        "plain_again": plain,
        "capture": lambda: capture(model, image),
        "capture_mean": lambda: capture(model, image, reduce="mean"),
        "rollout": lambda: rollout(captured, seed),
        "capture_and_rollout": lambda: rollout(capture(model, image, reduce="mean"), seed),
        "gradcam": gradcam,
        "gradcam_peer": peer_gradcam(model, image, captured.layout.grid, captured.layout.prefix),
    }
    seconds = timed({k: a for k, a in actions.items() if a is not None}, rounds)
    held = sum(layer.weights.nbytes for layer in captured.layers)
    return {
        "seconds": seconds,
        "capture_ratio": seconds["capture"] / seconds["plain"],
        "rollout_ms": 1000 * seconds["rollout"],
        "attention_mb": held / 1e6,
        "page": page(model, image, size),
    }


def peer_gradcam(model: Any, image: Tensor, grid: tuple[int, int], prefix: tuple[str, ...]) -> Any:
    """Grad-CAM of pytorch-grad-cam on the same layer, or None where it is not installed."""
    try:
        from pytorch_grad_cam import GradCAM
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
    except ImportError:
        return None
    blocks = model.blocks if hasattr(model, "blocks") else model.layers[-1].blocks

    def reshaped(tokens: Tensor) -> Tensor:
        cells = tokens.flatten(1, -2)[:, len(prefix) :]
        return cells.movedim(1, 2).unflatten(2, grid)

    tool = GradCAM(model, [blocks[-1].norm1], reshape_transform=reshaped)
    return lambda: tool(input_tensor=image, targets=[ClassifierOutputTarget(0)])


def timed(actions: dict[str, Action], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each; a first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            begin = time.process_time()
            action()
            if number:
                found[name].append(time.process_time() - begin)
    return {name: statistics.median(values) for name, values in found.items()}


def paths(shape: tuple[int, int, int, int], dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """CPU seconds of a layer's attention, forward and backward, by path."""
    batch, heads, tokens, width = shape
    made = (torch.randn(batch, tokens, heads, width, dtype=dtype) for _ in range(3))
    q, k, v = (tensor.transpose(1, 2).requires_grad_() for tensor in made)

    def fused() -> None:
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    def explicit() -> None:
        attention(q, k, v, scale=width**-0.5, observer=lambda weights: weights).sum().backward()

    return timed({"fused": fused, "explicit": explicit}, rounds)


def page(model: Any, image: Tensor, size: int) -> dict[str, float]:
    """Size and build time of the explorer page."""
    pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        page = Path(folder) / "page.html"
        write_page(model, image, Image.fromarray(pixels), page)
        return {"mb": page.stat().st_size / 1e6, "seconds": time.perf_counter() - begin}


def machine() -> dict[str, str]:
    return {"processor": platform.machine(), "python": platform.python_version(),
            "torch": torch.__version__}  # fmt: skip


def print_table(report: dict[str, Any]) -> None:
    print("| | " + " | ".join(report["results"]) + " |")
    print("|---|" + "---|" * len(report["results"]))
    keys = list(next(iter(report["results"].values()))["seconds"])
    for key in keys:
        row = (f"{1000 * r['seconds'][key]:.1f} ms" for r in report["results"].values())
        print(f"| {key.replace('_', ' ')} | {' | '.join(row)} |")
    figures = {
        f"capture ÷ plain (bar {CAPTURE_BAR})": "{0[capture_ratio]:.2f}",
        f"rollout, one query (bar {ROLLOUT_BAR_MS:g} ms, Swin)": "{0[rollout_ms]:.1f} ms",
        "attention of all layers": "{0[attention_mb]:.1f} MB",
        f"page (bar {PAGE_BAR_MB:g} MB)": "{0[page][mb]:.2f} MB in {0[page][seconds]:.1f} s",
    }
    for title, form in figures.items():
        print(f"| {title} | {' | '.join(form.format(r) for r in report['results'].values())} |")


def print_paths(training: dict[str, dict[str, float]]) -> None:
    print(
        "\n| batch, heads, tokens, width of a head | fused | explicit | ratio |\n|---|---|---|---|"
    )
    for name, seconds in training.items():
        fused, explicit = 1000 * seconds["fused"], 1000 * seconds["explicit"]
        print(f"| {name} | {fused:.1f} ms | {explicit:.1f} ms | {fused / explicit:.1f} |")


if __name__ == "__main__":
    main()
