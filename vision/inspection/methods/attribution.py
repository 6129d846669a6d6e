"""Maps by every attention method, from a model or from a capture.

Axes: b batch · n tokens · y, x rows and columns of cells.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision.inspection.capture.anatomy import anatomy_of, has_head
from vision.inspection.capture.capture import Targets, capture, chosen_classes
from vision.inspection.capture.captured import Captured, LayerAttention
from vision.inspection.capture.token_layout import Layout
from vision.inspection.methods.layer_maps import (
    attention_gradcam,
    cam_seed,
    feature_components,
    logit_parts,
    token_gradcam,
    token_norms,
)
from vision.inspection.methods.rollout import (
    Query,
    carried,
    chefer,
    fused,
    gradient_rollout,
    rollout,
    seed_of,
    without_padding,
)
from vision.inspection.methods.spec import METHODS, MethodChoice, choose_method


@dataclass(frozen=True, eq=False)
class Maps:
    """One map per image, in cells."""

    values: Tensor
    """(b y x)"""
    choice: MethodChoice
    layout: Layout
    """Of the cells."""
    layer: str | None
    """The layer of methods that use a single one."""
    query: str | None
    targets: Tensor | None
    """The class of each map: (b)."""
    prefix: dict[str, Tensor] = field(default_factory=dict)
    """The values of prefix tokens: (b) each."""
    uniform: float | None = None
    """The value of every token in a uniform map; None where values are not shares."""

    @property
    def unit(self) -> Tensor | float:
        """The value of a uniform map (b 1 1): where values are not shares, their positive mean."""
        if self.uniform is not None:
            return self.uniform
        mean = self.values.clamp_min(0).mean(dim=(1, 2), keepdim=True)
        return mean.masked_fill(mean == 0, 1)

    def times_uniform(self) -> Tensor:
        """Values as multiples of a uniform map's: (b y x)."""
        return self.values / self.unit

    def to_pixels(self, mode: Literal["nearest", "bilinear"] = "bilinear") -> Tensor:
        """The map at the image's size: (b height width). `nearest` keeps the cells visible, unless
        they overlap.
        """
        (rows, columns), (y, x) = self.layout.grid, self.layout.stride
        if any(self.layout.margins):
            return self._over_fields()
        smooth = {"align_corners": False} if mode == "bilinear" else {}
        size = (rows * y, columns * x)
        pixels = F.interpolate(self.values[:, None], size=size, mode=mode, **smooth)[:, 0]
        height, width = self.layout.image_size
        # A last row or column of pixels that no whole patch covers belongs to no cell.
        missing = max(0, height - size[0]), max(0, width - size[1])
        return F.pad(pixels[:, :height, :width], (0, missing[1], 0, missing[0]))

    def _over_fields(self) -> Tensor:
        """The mean of the cells that see a pixel, where their fields overlap: (b height width)."""
        above, left, below, right = self.layout.margins
        sees_rows = self._sees(0, above, below)
        sees_columns = self._sees(1, left, right)
        return torch.einsum("py,byx,qx->bpq", sees_rows, self.values, sees_columns)

    def _sees(self, axis: int, before: int, after: int) -> Tensor:
        """The share of each cell in the pixels of an axis: (pixels cells)."""
        layout, device = self.layout, self.values.device
        first = torch.arange(layout.grid[axis], device=device) * layout.stride[axis]
        pixels = torch.arange(layout.image_size[axis], device=device)[:, None]
        sees = (pixels >= first - before) & (pixels < first + layout.stride[axis] + after)
        return (sees / sees.sum(dim=1, keepdim=True)).to(self.values.dtype)


@dataclass(frozen=True, eq=False)
class _Question:
    """What a method is computed from."""

    captured: Captured
    targets: Any
    """The class of each map (b), for methods that explain one."""
    query: Query
    options: dict[str, Any]
    """Of the method, without `layer`."""
    layer: Any
    """The LayerAttention of methods with the option `layer`."""

    def seed(self, layer: int | str = -1) -> Tensor:
        """The query as shares of a layer's tokens: (b 1 n)."""
        if self.query == "cam":
            return cam_seed(self.captured, self.targets)
        return seed_of(self.captured, self.query, layer=layer)

    def padded(self, cells: Tensor) -> Tensor:
        """Values by cell (b y·x) as values by token, zero for prefix tokens."""
        return F.pad(cells, (len(self.captured.layout.prefix), 0))


COMPUTE: dict[str, Callable[[_Question], Tensor]] = {
    "attention": lambda q: carried(
        q.seed(q.layer.number), _matrix(q.layer, q.options["head"]), q.layer.layout
    )[:, 0],
    "rollout": lambda q: rollout(q.captured, q.seed(q.options["end_layer"]), **q.options)[:, 0],
    "gradient_rollout": lambda q: gradient_rollout(q.captured, q.seed(), **q.options)[:, 0],
    "chefer": lambda q: chefer(q.captured, q.seed(), **q.options)[:, 0],
    "attention_gradcam": lambda q: attention_gradcam(q.layer, q.seed(q.layer.number))[:, 0],
    "token_gradcam": lambda q: token_gradcam(q.layer),
    "cam": lambda q: q.padded(logit_parts(q.captured, q.targets, **q.options)),
    "cam_rollout": lambda q: rollout(q.captured, cam_seed(q.captured, q.targets), **q.options)[
        :, 0
    ],
    "norm": lambda q: token_norms(q.captured),
    "pca": lambda q: q.padded(
        feature_components(q.captured, q.options["component"] + 1)[..., -1].flatten(1)
    ),
}
"""Values by token (b n), by the name of the method in `METHODS`."""


def attribute(
    source: Captured | nn.Module,
    images: Tensor | None = None,
    method: str = "rollout",
    *,
    target: Targets | None = None,
    query: Query | None = None,
    **options: Any,
) -> Maps:
    """One map per image by a method of `METHODS`, from a model and images or from a capture.

    target: the class that a map of a class explains; by default the predicted one. query: a prefix
    token, a cell, "pool" (what the head sees; the default) or "cam" (cells that speak for the
    target, for models that pool the mean).
    """
    choice = choose_method(method, options)
    spec, settings = choice.spec, choice.settings
    if query is not None and not spec.query:
        queried = ", ".join(name for name, known in METHODS.items() if known.query)
        raise ValueError(f"The method {method} has no query; methods with one: {queried}.")
    if isinstance(source, Captured):
        captured = source
    elif images is None:
        raise ValueError("A model needs images: attribute(model, images, method).")
    else:  # capture no more than the method needs
        captured = capture(
            source,
            images,
            targets=target if spec.gradients else None,
            gradients=spec.gradients,
            layers=[settings["layer"]] if "layer" in settings else None,
            reduce=None if spec.gradients else settings.get("fusion"),
        )
    reason = methods_of(captured)[method]
    if reason:
        raise ValueError(f"{method} is not available for {captured.model}: {reason}")
    targets = _targets(captured, choice, target, query)
    layer = captured.layer(settings.pop("layer")) if "layer" in settings else None
    layout = captured.layout if layer is None else layer.layout
    if "start_layer" in settings:
        layout = captured.layer(settings["start_layer"]).layout
    values = COMPUTE[method](_Question(captured, targets, query or "pool", settings, layer))
    return Maps(
        layout.to_grid(values),
        choice,
        layout,
        None if layer is None else layer.name,
        str(query or "pool") if spec.query else None,
        targets,
        layout.prefix_values(values),
        _uniform(choice, layer, layout, query),
    )


def methods_of(source: Captured | nn.Module) -> dict[str, str | None]:
    """Every method, with None where it is available for a model and else the reason why not."""
    if isinstance(source, Captured):
        anatomy, logits = source.anatomy, source.logits is not None
    else:
        anatomy, logits = anatomy_of(source), has_head(source)
    reasons: dict[str, str | None] = {}
    for name, spec in METHODS.items():
        reasons[name] = None
        if spec.for_class and not logits:
            reasons[name] = "the model returns no logits, so there is no class to explain."
        elif spec.mean_pool and anatomy.pool != "mean":
            reasons[name] = f"it needs the mean of the tokens, but the model pools: {anatomy.pool}."
        elif spec.mean_pool and (anatomy.head is None or anatomy.norm is None):
            reasons[name] = "it needs a linear head after a norm."
    return reasons


def _targets(
    captured: Captured, choice: MethodChoice, target: Targets | None, query: Query | None
) -> Tensor | None:
    if not choice.spec.for_class and query != "cam":
        return None
    if captured.logits is None:
        raise ValueError(f"{captured.model} returns no logits, so there is no class to explain.")
    if not choice.spec.gradients:
        return chosen_classes(captured.logits, captured.targets if target is None else target)
    if captured.targets is None or captured.layers[0].gradient is None:
        raise ValueError(f"{choice.name} needs gradients: capture(..., gradients=True).")
    if target is not None:
        asked = chosen_classes(captured.logits, target)
        if not torch.equal(asked, captured.targets):
            raise ValueError(
                f"The capture has gradients of classes {captured.targets.tolist()}, not of "
                f"{asked.tolist()}: capture again with these targets."
            )
    return captured.targets


def _matrix(layer: LayerAttention, head: Any) -> Tensor:
    """One head of a layer, by its number, or all of them fused."""
    if isinstance(head, str):
        return fused(layer, head)  # type: ignore[arg-type]
    heads = 0 if layer.reduced else layer.weights.shape[layer.head_axis]
    if not -heads <= head < heads:
        raise ValueError(f"Unknown head {head}: {layer.name} has {heads} captured heads, from 0.")
    return without_padding(layer.weights.select(layer.head_axis, head), layer.layout)


def _uniform(
    choice: MethodChoice, layer: LayerAttention | None, layout: Layout, query: Query | None
) -> float | None:
    if not choice.spec.distribution:
        return None
    if layer is not None and query not in (None, "pool", "cam"):
        return 1 / layer.layout.keys(query)
    return 1 / layout.tokens
