"""One door to all methods: from a model or a capture to one map per image."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision.config import suggest
from vision.inspection.capture.anatomy import facts_of, has_head
from vision.inspection.capture.capture import Targets, capture, chosen_classes
from vision.inspection.capture.layout import Layout, Place
from vision.inspection.capture.recording import Captured, Ending, LayerAttention
from vision.inspection.methods.gradients import (
    attention_gradcam,
    chefer,
    gradient_rollout,
    token_gradcam,
)
from vision.inspection.methods.maps import Maps
from vision.inspection.methods.rollout import carried, fused, rollout, seed_of, without_padding
from vision.inspection.methods.spec import METHODS, QUERIED, Method
from vision.inspection.methods.token_maps import (
    cam_seed,
    feature_components,
    last_tokens,
    logit_parts,
)


def attribute(
    source: Captured | nn.Module,
    images: Tensor | None = None,
    method: str = "rollout",
    *,
    target: Targets | None = None,
    query: Place | Literal["pool", "cam"] | None = None,
    **options: Any,
) -> Maps:
    """A map per image by one of `METHODS`, from a model and images or from a capture.

    target: the class of a map that is of a class; the predicted one if not given. query: a prefix
    token, a cell, "pool" (what the head sees; the default) or "cam" (cells that speak for the
    target, for models that pool the mean).
    """
    about, settings = _settings(method, options)
    if query is not None and method not in QUERIED:
        raise ValueError(f"The method {method} has no query; methods with one: {QUERIED}.")
    captured = source if isinstance(source, Captured) else _captured(
        source, images, about, target, query, settings
    )  # fmt: skip
    reason = unavailable(captured.ending, captured.logits is not None, method)
    if reason:
        raise ValueError(f"{captured.model} cannot have {method}: {reason}")
    targets = _targets(captured, about, target, query)
    values, layout, layer = _values(captured, method, targets, query or "pool", settings)
    cells = layout.to_grid(values)
    return Maps(
        cells,
        method,
        about.formula,
        about.reference,
        layout,
        None if layer is None else layer.name,
        str(query or "pool") if method in QUERIED else None,
        targets,
        layout.prefix_values(values),
        _uniform(about, layer, layout, query),
        settings,
    )


def methods_of(source: Captured | nn.Module) -> dict[str, str | None]:
    """Every method, with None where the model can have it and else the reason why not."""
    if isinstance(source, Captured):
        ending, head = source.ending, source.logits is not None
    else:
        ending = facts_of(source).ending
        head = has_head(source)  # some models tell only by what they return
    return {method: unavailable(ending, head, method) for method in METHODS}


def unavailable(ending: Ending, has_logits: bool, method: str) -> str | None:
    """Why a model that ends like this cannot have a method; None if it can."""
    about = METHODS[method]
    if about.for_class and not has_logits:
        return "it returns no logits, so there is no class to explain."
    if method in ("cam", "cam_rollout"):
        if ending.pool != "mean":
            return f"a class activation map needs the mean of the tokens; it pools {ending.pool}."
        if ending.head is None or ending.norm is None:
            return "a class activation map needs a linear head after a norm."
    return None


def _settings(method: str, options: dict[str, Any]) -> tuple[Method, dict[str, Any]]:
    if method not in METHODS:
        raise ValueError(f"There is no method '{method}'. {suggest(method, METHODS)}")
    about = METHODS[method]
    for name in options:
        if name not in about.options:
            raise ValueError(
                f"The method {method} has no option '{name}'. {suggest(name, about.options)}"
            )
    return about, {**about.options, **options}


def _captured(
    model: nn.Module,
    images: Tensor | None,
    about: Method,
    target: Targets | None,
    query: Any,
    settings: dict[str, Any],
) -> Captured:
    """A capture that holds no more than the method needs."""
    if images is None:
        raise ValueError("A model needs images: attribute(model, images, method).")
    fusion = settings.get("fusion")
    layer = settings.get("layer")
    return capture(
        model,
        images,
        targets=target if about.gradients else None,
        gradients=about.gradients,
        layers=None if layer is None else [layer],
        reduce=None if about.gradients else fusion,
    )


def _targets(
    captured: Captured, about: Method, target: Targets | None, query: Any
) -> Tensor | None:
    if not about.for_class and query != "cam":
        return None
    if captured.logits is None:
        raise ValueError(f"{captured.model} returns no logits, so there is no class to explain.")
    if not about.gradients:
        return chosen_classes(captured.logits, captured.targets if target is None else target)
    if captured.targets is None or captured.layers[0].gradient is None:
        raise ValueError("This method needs gradients: capture(..., gradients=True).")
    if target is not None:
        asked = chosen_classes(captured.logits, target)
        if not torch.equal(asked, captured.targets):
            raise ValueError(
                f"The capture has gradients of classes {captured.targets.tolist()}, not of "
                f"{asked.tolist()}: capture again with these targets."
            )
    return captured.targets


def _values(
    captured: Captured, method: str, targets: Tensor | None, query: Any, settings: dict[str, Any]
) -> tuple[Tensor, Layout, LayerAttention | None]:
    """Values by token (b n), where they lie, and the one layer that was looked at."""
    settings = dict(settings)
    layer = captured.layer(settings.pop("layer")) if "layer" in settings else None
    first = captured.layers[0].layout
    if "start_layer" in settings and captured.layers:
        first = captured.layer(settings["start_layer"]).layout

    def seed(end: int | str = -1) -> Tensor:
        if query == "cam":
            assert targets is not None
            return cam_seed(captured, targets)
        return seed_of(captured, query, layer=end)

    match method:
        case "attention":
            assert layer is not None
            matrix = _matrix(layer, settings["head"])
            rows = carried(seed(layer.number), matrix, layer.layout)
            return rows[:, 0], layer.layout, layer
        case "rollout":
            return rollout(captured, seed(settings["end_layer"]), **settings)[:, 0], first, None
        case "cam_rollout":
            assert targets is not None
            return rollout(captured, cam_seed(captured, targets), **settings)[:, 0], first, None
        case "gradient_rollout":
            return gradient_rollout(captured, seed(), **settings)[:, 0], first, None
        case "chefer":
            return chefer(captured, seed(), **settings)[:, 0], first, None
        case "attention_gradcam":
            assert layer is not None
            return attention_gradcam(layer, seed(layer.number))[:, 0], layer.layout, layer
        case "token_gradcam":
            assert layer is not None
            return token_gradcam(layer), layer.layout, layer
        case _:
            return _of_tokens(captured, method, targets, settings), captured.layout, None


def _of_tokens(
    captured: Captured, method: str, targets: Tensor | None, settings: dict[str, Any]
) -> Tensor:
    """Methods on the last tokens: (b n); prefix tokens have no part of a pooled logit."""
    match method:
        case "cam":
            assert targets is not None
            cells = logit_parts(captured, targets, centred=settings["centred"])
        case "norm":
            return last_tokens(captured).float().norm(dim=-1)
        case "pca":
            component = int(settings["component"])
            cells = feature_components(captured, component + 1)[..., component].flatten(1)
        case _:
            raise AssertionError(method)
    return F.pad(cells, (len(captured.layout.prefix), 0))


def _matrix(layer: LayerAttention, head: int | str) -> Tensor:
    """One head of a layer, by its number in the model, or all of them fused."""
    if isinstance(head, str):
        return fused(layer, head)  # type: ignore[arg-type]
    whole = layer.heads == tuple(range(len(layer.heads)))
    number = head + len(layer.heads) if head < 0 and whole else head  # from the end, where known
    if number not in layer.heads:
        raise ValueError(f"There is no captured head {head} in {layer.name}: {list(layer.heads)}.")
    dim = 1 if layer.layout.index is None else 2
    matrix = layer.weights.select(dim, layer.heads.index(number))
    return without_padding(matrix, layer.layout)


def _uniform(
    about: Method, layer: LayerAttention | None, layout: Layout, query: Any
) -> float | None:
    if not about.distribution:
        return None
    if layer is not None and query not in (None, "pool", "cam"):
        return 1 / layer.layout.keys(query)
    return 1 / layout.tokens
