"""What a page shows, as the model gives it: attention, and for some classes what speaks for them.

Axes: see `vision/inspection/capture/layout.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vision.inspection.capture.capture import capture
from vision.inspection.capture.recording import Captured
from vision.inspection.methods.gradients import attention_gradcam, gradient_weighted, token_gradcam
from vision.inspection.methods.rollout import seed_of
from vision.inspection.methods.token_maps import cam_seed, logit_parts, norm_map


@dataclass(frozen=True, eq=False)
class ClassMaterial:
    """What the page needs to know of one class."""

    number: int
    name: str
    probability: float
    matrices: list[Tensor]
    """Positive part of attention × gradient, mean over heads, of every layer: (n n) or (w t s)."""
    seed: Tensor | None
    """The cells that speak for the class, as shares: (n). None: no linear head on a mean."""
    maps: dict[str, Tensor]
    """Finished maps by name, each (y x) of the last layer."""


@dataclass(frozen=True, eq=False)
class Material:
    """All that one page is made from."""

    captured: Captured
    pool: Tensor | None
    """What the model pools, as shares of the last tokens: (n). None: not known."""
    classes: list[ClassMaterial]
    norms: Tensor | None
    """Lengths of the last tokens before the final norm, by cell: (y x)."""
    outliers: Tensor | None


def gather(model: nn.Module, image: Tensor, *, names: Sequence[str] | None, top: int) -> Material:
    """Run the model: once for its attention and once, with gradients, for each class.

    image: (1 channels height width), preprocessed.
    """
    captured = capture(model, image)
    pool = None if captured.ending.pool == "other" else seed_of(captured)[0, 0]
    norms = norm_map(captured) if captured.tokens is not None else None
    return Material(
        captured=captured,
        pool=pool,
        classes=_classes(model, image, captured, names, top),
        norms=None if norms is None else norms.norms[0],
        outliers=None if norms is None else norms.outliers[0],
    )


def _classes(
    model: nn.Module, image: Tensor, captured: Captured, names: Sequence[str] | None, top: int
) -> list[ClassMaterial]:
    if top < 0:
        raise ValueError(f"top must be 0 or more classes, found {top}.")
    if captured.logits is None or top == 0:
        return []
    number = captured.logits.shape[1]
    if names is not None and len(names) != number:
        raise ValueError(
            f"The model has {number} classes, but {len(names)} names were given: pass one name "
            "for each class in the model's order, or none."
        )
    probabilities = captured.logits[0].float().softmax(dim=0)
    best = probabilities.topk(min(top, number))
    return [
        _class(model, image, c, names[c] if names is not None else f"class {c}", probability)
        for c, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _class(
    model: nn.Module, image: Tensor, number: int, name: str, probability: float
) -> ClassMaterial:
    captured = capture(model, image, targets=number, gradients=True)
    target = torch.tensor([number], device=image.device)
    last = captured.layers[-1]
    maps: dict[str, Tensor] = {}
    if captured.ending.pool != "other":
        row = attention_gradcam(last, seed_of(captured))[0, 0]
        maps["attention_gradcam"] = last.layout.to_grid(row)
    if last.inputs is not None:
        maps["token_gradcam"] = last.layout.to_grid(token_gradcam(last)[0])
    seed = None
    if _splits(captured):
        seed = cam_seed(captured, target)[0, 0]
        parts = logit_parts(captured, target, centred=True)[0].clamp_min(0)
        maps["cam"] = parts.unflatten(0, captured.layout.grid)
    return ClassMaterial(
        number=number,
        name=name,
        probability=probability,
        matrices=[gradient_weighted(layer, "before")[0] for layer in captured.layers],
        seed=seed,
        maps=maps,
    )


def _splits(captured: Captured) -> bool:
    """Whether a class's logit is a sum over cells."""
    ending = captured.ending
    known = ending.head is not None and ending.norm is not None and captured.tokens is not None
    return ending.pool == "mean" and known
