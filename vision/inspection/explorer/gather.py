"""The content of a page: attention, and for some classes the evidence for them.

Axes: see `vision/inspection/capture/layout.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vision.inspection.capture.capture import Passes
from vision.inspection.capture.captured import Captured
from vision.inspection.explain import (
    ClassProbability,
    available_methods,
    class_probability,
    explained_classes,
)
from vision.inspection.methods.attribution import attribute
from vision.inspection.methods.layer_maps import cam_seed, token_norms
from vision.inspection.methods.rollout import gradient_weighted, seed_of

FINISHED = ("attention_gradcam", "token_gradcam", "cam")
"""Methods for a class whose maps are stored; the page computes the others itself."""


@dataclass(frozen=True, eq=False)
class PageClass:
    """The evidence for one class."""

    about: ClassProbability
    matrices: list[Tensor]
    """Positive part of attention × gradient, mean over heads, of every layer: (n n) or (w t s)."""
    seed: Tensor | None
    """The cells that speak for the class, as shares: (n). None: no linear head on a mean."""
    maps: dict[str, Tensor]
    """Finished maps by method, each (y x) of the last layer."""


@dataclass(frozen=True, eq=False)
class PageContent:
    """Everything that one page is made from."""

    captured: Captured
    pool: Tensor | None
    """What the model pools, as shares of the last tokens: (n). None: unknown."""
    classes: list[PageClass]
    norms: Tensor | None
    """Lengths of the last tokens before the final norm, by cell: (y x)."""


def gather(
    passes: Passes, *, names: Sequence[str] | None, classes: int | Sequence[int]
) -> PageContent:
    """The content of the page of a single image.

    names: of all classes. classes: the number of most probable classes to explain, or numbers.
    """
    captured = passes.plain
    tokens = None if captured.tokens is None else token_norms(captured)
    return PageContent(
        captured=captured,
        pool=None if captured.anatomy.pool == "other" else seed_of(captured)[0, 0],
        classes=_classes(passes, names, classes),
        norms=None if tokens is None else captured.layout.to_grid(tokens[0]),
    )


def _classes(
    passes: Passes, names: Sequence[str] | None, classes: int | Sequence[int]
) -> list[PageClass]:
    if isinstance(classes, int) and classes < 0:
        raise ValueError(f"The number of classes must be 0 or more, found {classes}.")
    logits = passes.plain.logits
    if logits is not None and names is not None and len(names) != logits.shape[1]:
        raise ValueError(
            f"The model has {logits.shape[1]} classes, but {len(names)} names were given: pass "
            "one name for each class in the model's order, or none."
        )
    targets = explained_classes(passes.plain, classes)
    found = []
    for captured in passes.gradients(targets):
        assert captured.targets is not None
        available = {choice.name for choice in available_methods(FINISHED, captured)}
        if captured.layers[-1].inputs is None:
            available -= {"token_gradcam"}
        maps = {name: attribute(captured, method=name).values[0] for name in available}
        found.append(
            PageClass(
                about=class_probability(captured, 0, int(captured.targets[0]), names or ()),
                matrices=[gradient_weighted(layer, "before")[0] for layer in captured.layers],
                seed=cam_seed(captured, captured.targets)[0, 0] if "cam" in maps else None,
                maps={name: values.clamp_min(0) for name, values in maps.items()},
            )
        )
    return found
