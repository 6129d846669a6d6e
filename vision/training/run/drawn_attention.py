"""Where a model looks during training: figures of fixed validation images in the run's folder."""

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor

from vision.config import ConfigError
from vision.data.preprocess import Preprocess, normalizer
from vision.files import write_text
from vision.inspection.capture.capture import Passes, capture
from vision.inspection.capture.captured import CaptureError
from vision.inspection.explain import explain
from vision.inspection.figures.diagnostics import Heads, gather_heads, heads_figure
from vision.inspection.figures.drawing import Drawing
from vision.inspection.figures.sheet import overlay_sheet
from vision.models.layers import Classifier

IMAGES = 8
"""Number of validation images that are drawn and that head statistics are taken over."""


@dataclass
class _Trained:
    """The model of a run, as a subject of figures."""

    model: Classifier
    classes: Sequence[str]
    preprocess: Preprocess


def check_attention(model: Classifier, preprocess: Preprocess) -> None:
    """Raise a ConfigError before training starts if a model has no attention to draw."""
    device = next(model.parameters()).device
    images = torch.zeros(1, preprocess.channels, *preprocess.image_size, device=device)
    try:
        capture(model, images, reduce="mean")
    except (CaptureError, ValueError) as error:
        raise ConfigError(f"attention_every: {error} Use attention_every=null.") from error


def draw_attention(
    model: Classifier,
    images: Tensor,
    classes: Sequence[str],
    preprocess: Preprocess,
    folder: Path,
    step: int,
    *,
    write: bool = True,
) -> dict[str, Image.Image]:
    """Draw where the model looks in the first of some uint8 images (b channels height width).

    Writes attention/step_<step>.png with overlays, attention/heads_<step>.png, and a line for every
    head in attention/heads.jsonl, and returns the two images by name for a tracker. Where weights
    are sharded, all processes of a run must call this together; one of them writes.
    """
    subject = _Trained(model, classes, preprocess)
    shown = images[:IMAGES].cpu()
    pixels = [np.ascontiguousarray(p) for p in rearrange(shown, "b c h w -> b h w c").numpy()]
    device = next(model.parameters()).device
    with _uncompiled(model):
        passes = Passes(model, normalizer(preprocess, device)(shown.to(device)))
        explanations = explain(subject, pixels, classes=1, name=f"step {step}", passes=passes)
        heads = gather_heads(model, [passes.plain])
    drawings = {
        "overlays": overlay_sheet(explanations, title=f"Step {step}", bars=False),
        "heads": heads_figure(heads, name=f"Heads after step {step}"),
    }
    if write:
        _write(drawings, heads, folder / "attention", step)
    return {name: _image(drawing) for name, drawing in drawings.items()}


@contextmanager
def _uncompiled(model: Classifier) -> Iterator[None]:
    """Run a model that was compiled in place without its graph, which hides attention."""
    compiled = {m: m._compiled_call_impl for m in model.modules() if m._compiled_call_impl}
    try:
        for module in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, implementation in compiled.items():
            module._compiled_call_impl = implementation


def _write(drawings: dict[str, Drawing], heads: Heads, folder: Path, step: int) -> None:
    drawings["overlays"].save(folder / f"step_{step:08d}")
    drawings["heads"].save(folder / f"heads_{step:08d}")
    path = folder / "heads.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    # A resumed run repeats some steps: their new lines replace the old ones.
    kept = [line for line in lines if json.loads(line)["step"] < step]
    new = [json.dumps({"step": step, **row}) for row in heads.table()]
    write_text(path, "\n".join([*kept, *new]) + "\n")


def _image(drawing: Drawing) -> Image.Image:
    return Image.open(io.BytesIO(drawing.encoded("png"))).convert("RGB")
