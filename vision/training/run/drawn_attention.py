"""Attention maps of a model in training: figures of fixed validation images in the run's folder."""

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor

from vision.config import ConfigError
from vision.data.preprocess import Preprocess, normalizer
from vision.files import write_text
from vision.inspection.capture.capture import capture
from vision.inspection.capture.captured import CaptureError
from vision.inspection.explain import look_at
from vision.inspection.figures.diagnosis import Heads, gather_heads, heads_figure
from vision.inspection.figures.drawing import Drawing
from vision.inspection.figures.gallery import gallery
from vision.models.layers import Classifier

IMAGES = 8
"""Largest number of validation images that are drawn; statistics of heads are over the same ones.
"""


class _Subject(NamedTuple):
    """The model of a run, as `look_at` takes it."""

    model: Classifier
    classes: Sequence[str]
    preprocess: Preprocess


def check_attention(model: Classifier, preprocess: Preprocess) -> None:
    """Refuse a model without attention maps before the training starts."""
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
    """Draw attention maps for the first of some uint8 images (b channels height width).

    Writes attention/step_<step>.png with overlays, attention/heads_<step>.png, and a line for every
    head in attention/heads.jsonl, and returns the two images by name for a tracker. All processes
    must call this together where weights are sharded; one of them writes.
    """
    subject = _Subject(model, classes, preprocess)
    shown = images[:IMAGES].cpu()
    pixels = [np.ascontiguousarray(p) for p in rearrange(shown, "b c h w -> b h w c").numpy()]
    device = next(model.parameters()).device
    with _uncompiled(model):
        looks = look_at(subject, pixels, classes=1, name=f"step {step}")
        heads = gather_heads(model, [normalizer(preprocess, device)(shown.to(device))])
    drawings = {
        "overlays": gallery(looks, title=f"Step {step}"),
        "heads": heads_figure(heads, name=f"Heads after step {step}"),
    }
    if write:
        _write(drawings, heads, folder / "attention", step)
    return {name: _image(drawing) for name, drawing in drawings.items()}


@contextmanager
def _uncompiled(model: Classifier) -> Iterator[None]:
    """Within, a model that was compiled in place runs eagerly: `capture` refuses compiled ones."""
    compiled = [
        (module, module._compiled_call_impl)
        for module in model.modules()
        if module._compiled_call_impl is not None
    ]
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, implementation in compiled:
            module._compiled_call_impl = implementation


def _write(drawings: dict[str, Drawing], heads: Heads, folder: Path, step: int) -> None:
    drawings["overlays"].save(folder / f"step_{step:08d}")
    drawings["heads"].save(folder / f"heads_{step:08d}")
    path = folder / "heads.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    # A resumed run repeats some steps; the newer lines count.
    kept = [line for line in lines if json.loads(line)["step"] < step]
    new = [json.dumps({"step": step, **row}) for row in heads.table()]
    write_text(path, "\n".join([*kept, *new]) + "\n")


def _image(drawing: Drawing) -> Image.Image:
    return Image.open(io.BytesIO(drawing.encoded("png"))).convert("RGB")
