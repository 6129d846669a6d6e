"""The numbers of a page, on the first rung of a ladder that fits into its size.

All numbers go into one stream (`encoding.py`); the header describes them and their positions.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from einops import rearrange
from torch import Tensor

from vision.inspection.capture.captured import Captured, Fusion, LayerAttention, Layout, fuse
from vision.inspection.explorer.encoding import Numbers, RowEncoder, as_array
from vision.inspection.explorer.gather import PageClass, PageContent
from vision.inspection.methods.layer_maps import norm_outliers

FORMAT = 1


_FUSED: tuple[Fusion, ...] = ("mean", "max", "min")


@dataclass(frozen=True)
class Rung:
    """The part of the attention that a page keeps."""

    number: int
    bits: Literal[4, 8]
    planes: tuple[Fusion, ...] = ()
    """Fusions of heads that are kept instead of the heads; empty: the heads themselves."""
    classes: int | None = None
    """Number of classes that keep their matrices; None: all."""
    pooled: bool = False
    """Whether 2 × 2 keys of global layers are one."""

    @property
    def tolerance(self) -> float:
        """Largest error of a weight."""
        return 0.001 if self.bits == 8 else 0.02

    @property
    def says(self) -> str:
        """A description for the page."""
        if not self.planes:
            return f"All layers and heads in {self.bits} bits."
        kept = "Mean" if len(self.planes) == 1 else "Mean, maximum and minimum"
        says = f"{kept} of the heads of every layer in {self.bits} bits"
        says += ", 2 x 2 keys of global layers as one" if self.pooled else ""
        says += "; single heads only for prefix tokens (class, registers) as queries"
        if self.classes is not None:
            only = "gradient methods for the most probable class only"
            says += f"; {only if self.classes else 'no gradient methods'}"
        return f"{says}."


LADDER = (
    Rung(1, 8),
    Rung(2, 4),
    Rung(3, 8, _FUSED),
    Rung(4, 4, _FUSED),
    Rung(5, 4, _FUSED, classes=1),
    Rung(6, 4, _FUSED, classes=0),
    Rung(7, 8, ("mean",), classes=0),
    Rung(8, 4, ("mean",), classes=0),
    Rung(9, 4, ("mean",), classes=0, pooled=True),
)


@dataclass(frozen=True)
class Packed:
    """A page's numbers."""

    header: dict[str, Any]
    stream: bytes
    """Deflated (zlib)."""
    rung: Rung
    largest_error: float
    """Of any stored attention weight."""


def pack(content: PageContent, *, limit: int) -> Packed:
    """The numbers of a page in at most `limit` bytes."""
    smallest = 0
    tried: set[tuple[Any, ...]] = set()
    for rung in LADDER:
        keeps = (rung.bits, rung.planes, rung.pooled)
        if keeps in tried and not content.classes:
            continue  # differs from a rung that was too large only in classes, and there are none
        tried.add(keeps)
        encoder = RowEncoder(limit if rung is not LADDER[-1] else None)
        header = _header(content, rung, encoder)
        if header is None:
            continue
        data = encoder.finish()
        if len(data) <= limit:
            return Packed(header, data, rung, encoder.largest_error)
        smallest = len(data)
    raise ValueError(
        f"The attention of {content.captured.model} takes at least {smallest / 1e6:.1f} MB, but "
        f"the page has room for {max(limit, 0) / 1e6:.1f} MB: raise max_megabytes, or use a "
        "smaller image."
    )


def _header(content: PageContent, rung: Rung, encoder: RowEncoder) -> dict[str, Any] | None:
    """The description of the numbers; None where they do not fit."""
    captured = content.captured
    places: dict[tuple[Any, ...], int] = {}
    layouts: list[dict[str, Any]] = []
    layers = []
    for layer in captured.need_all():
        key = _key(layer.layout)
        if key not in places:
            places[key] = len(layouts)
            layouts.append(_layout(layer.layout, encoder))
        layers.append(_layer(layer, places[key], rung, encoder))
        if encoder.full:
            return None
    classes = [_class(c, i, rung, encoder) for i, c in enumerate(content.classes)]
    maps: dict[str, Any] = {}
    if content.norms is not None:
        maps["norms"] = encoder.add_floats(content.norms)
        maps["outliers"] = norm_outliers(content.norms[None]).flatten().nonzero()[:, 0].tolist()
    header = {
        "format": FORMAT,
        "model": captured.model,
        "image_size": list(captured.image_size),
        "layouts": layouts,
        "layers": layers,
        "pool": _pool(content.pool, captured),
        "classes": classes,
        "maps": maps,
        "rung": {"number": rung.number, "of": len(LADDER), "says": rung.says},
        "fusions": list(rung.planes or _FUSED),
        "largest_error": encoder.largest_error,
    }
    return None if encoder.full else header


def _layout(layout: Layout, encoder: RowEncoder) -> dict[str, Any]:
    place: dict[str, Any] = {
        "prefix": list(layout.prefix),
        "grid": list(layout.grid),
        "stride": list(layout.stride),
        "window": None,
    }
    if layout.index is None:
        return place
    allowed = None
    if layout.allowed is not None:
        allowed = encoder.add(np.packbits(as_array(layout.allowed).ravel(), bitorder="little"))
    return place | {
        "window": list(layout.window or ()),
        "shift": list(layout.shift or ()),
        "windows": layout.index.shape[0],
        "index": encoder.add(as_array(layout.index).astype(np.int32).ravel()),
        "allowed": allowed,
        "outlines": [list(box) for box in layout.outlines()],
    }


def _layer(layer: LayerAttention, layout: int, rung: Rung, encoder: RowEncoder) -> dict[str, Any]:
    weights = layer.weights[0].float()
    windowed = layer.layout.index is not None
    if windowed:
        weights = rearrange(weights, "w h t s -> h w t s")
    packed: dict[str, Any] = {
        "name": layer.name,
        "layout": layout,
        "heads": weights.shape[0],
        "share": None if layer.share is None else encoder.add_floats(layer.share[0]),
        "per_head": not rung.planes,
        "head_rows": None,
        "pooled": rung.pooled and not windowed,
    }
    prefix = len(layer.layout.prefix)
    if not rung.planes:
        planes = as_array(weights)
    else:
        planes = np.stack([as_array(fuse(weights, fusion, 0)) for fusion in rung.planes])
        if prefix:
            rows = as_array(weights[:, :prefix])
            packed["head_rows"] = encoder.add_rows(rows.reshape(-1, rows.shape[-1]), 8, 0.001)
    if packed["pooled"]:
        planes = _pooled(planes, layer.layout)
    rows = planes.reshape(-1, planes.shape[-1])
    packed["values"] = encoder.add_rows(rows, rung.bits, rung.tolerance)
    return packed


def _class(evidence: PageClass, nth: int, rung: Rung, encoder: RowEncoder) -> dict[str, Any]:
    matrices: list[dict[str, Any]] | None = None
    if rung.classes is None or nth < rung.classes:
        matrices = []
        for matrix in evidence.matrices:
            rows = as_array(matrix)
            matrices.append(encoder.add_rows(rows.reshape(-1, rows.shape[-1]), rung.bits, None))
            if encoder.full:
                break
    return {
        **asdict(evidence.about),
        "matrices": matrices,
        "seed": None if evidence.seed is None else encoder.add_floats(evidence.seed),
        "maps": {name: encoder.add_floats(values) for name, values in evidence.maps.items()},
    }


def _pool(shares: Tensor | None, captured: Captured) -> dict[str, Any] | None:
    """The pooled output as a query that fits every layer: prefix tokens, and all cells alike."""
    if shares is None:
        return None
    prefix = len(captured.layout.prefix)
    return {"prefix": shares[:prefix].tolist(), "cells": float(shares[prefix:].sum())}


def _pooled(planes: Numbers, layout: Layout) -> Numbers:
    """Keys (… n) of which 2 × 2 cells are summed, prefix tokens left as they are."""
    prefix, (rows, columns) = len(layout.prefix), layout.grid
    cells = planes[..., prefix:].reshape(*planes.shape[:-1], rows, columns)
    margins: Sequence[tuple[int, int]] = [(0, 0)] * (cells.ndim - 2) + [
        (0, rows % 2),
        (0, columns % 2),
    ]
    cells = np.pad(cells, margins)
    cells = cells.reshape(*cells.shape[:-2], cells.shape[-2] // 2, 2, cells.shape[-1] // 2, 2)
    sums = cells.sum(axis=(-3, -1))
    return np.concatenate([planes[..., :prefix], sums.reshape(*planes.shape[:-1], -1)], axis=-1)


def _key(layout: Layout) -> tuple[Any, ...]:
    """Equal for equal layouts."""
    index = b"" if layout.index is None else as_array(layout.index).tobytes()
    allowed = b"" if layout.allowed is None else as_array(layout.allowed).tobytes()
    return (layout.prefix, layout.grid, layout.stride, layout.window, layout.shift, index, allowed)
