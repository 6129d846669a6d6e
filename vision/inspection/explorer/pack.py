"""The numbers of a page in few bytes, on the first rung of a ladder that fits into its size.

All numbers go into one stream; the header describes them and their positions. A weight a of a row
with maximum m becomes round(levels · √(a / m)): small weights, of which there are many, keep their
proportions. It is read as scale · (code / levels)², with a scale near m that keeps the sum of the
row. Weights whose error exceeds the tolerance are listed with their exact value. With 4 bits so are
the few that are far above their row (a register, an outlier), beside which others would vanish.
"""

import zlib
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from einops import rearrange, reduce
from torch import Tensor

from vision.inspection.capture.captured import Captured, Fusion, LayerAttention, fuse
from vision.inspection.capture.token_layout import Layout
from vision.inspection.explain import LEAST_LIMIT, ClassProbability
from vision.inspection.methods.layer_maps import norm_outliers

FORMAT = 1
Reference = dict[str, Any]
"""Position of numbers in the stream: their first byte, count and type."""
Numbers = npt.NDArray[Any]
ROW_PER_TOWER = 128
"""At most one weight in this number is listed because it is far above its row."""
TOWERING = 4
"""The ratio to the other weights from which a weight counts as far above them."""
_FUSED: tuple[Fusion, ...] = ("mean", "max", "min")


@dataclass
class RowEncoder:
    """Numbers one after another, deflated as they are added."""

    limit: int | None
    largest_error: float = 0.0
    _chunks: list[bytes] = field(default_factory=list)
    _size: int = 0
    _raw: int = 0
    # Level 9 takes three times as long for a hundredth less.
    _deflate: Any = field(default_factory=lambda: zlib.compressobj(6))

    @property
    def full(self) -> bool:
        """Whether the limit is exceeded."""
        return self.limit is not None and self._size > self.limit

    def add(self, numbers: Numbers) -> Reference:
        """Add numbers and return their position."""
        kind = {"u1": "u8", "i4": "i32", "f4": "f32"}[numbers.dtype.str[1:]]
        reference = {"at": self._raw, "count": int(numbers.size), "type": kind}
        content = np.ascontiguousarray(numbers).tobytes()
        content += bytes(-len(content) % 4)  # typed views in the browser begin at whole words
        self._raw += len(content)
        if not self.full:
            self._keep(self._deflate.compress(content))
        return reference

    def add_floats(self, values: Tensor) -> Reference:
        """Add a tensor in single precision."""
        return self.add(as_array(values).ravel())

    def add_rows(self, values: Numbers, bits: int, tolerance: float | None) -> dict[str, Any]:
        """Add rows (r s) of numbers from 0, companded; None: without corrections."""
        levels = 2**bits - 1
        maxima = values.max(axis=1, keepdims=True)
        if bits == 4 and tolerance is not None:
            maxima = _without_towers(values, maxima)
        towers = values > maxima
        shares = np.minimum(values / np.where(maxima > 0, maxima, 1), 1)
        codes = np.rint(np.sqrt(shares) * levels).astype(np.uint8)
        shape = np.square(codes / np.float32(levels), dtype=np.float32)
        limit = np.inf if tolerance is None else tolerance
        wrong = towers | (np.abs(shape * maxima - values) > limit)
        # The rest of a row is scaled to keep the row's sum: rounding must not change its mass.
        have, want = (np.where(wrong, 0, v).sum(axis=1, keepdims=True) for v in (shape, values))
        scales = np.where(have > 0, want / np.where(have > 0, have, 1), maxima).astype(np.float32)
        off = np.abs(shape * scales - values)
        wrong |= off > limit
        rows: dict[str, Any] = {
            "rows": values.shape[0],
            "length": values.shape[1],
            "bits": bits,
            "codes": self.add(_nibbles(codes) if bits == 4 else codes),
            "scales": self.add(scales),
        }
        if tolerance is not None:
            places = np.flatnonzero(wrong)
            # Differences are small numbers, which deflate better than positions.
            rows["corrected"] = self.add(np.diff(places, prepend=0).astype(np.int32))
            rows["corrections"] = self.add(values.ravel()[places].astype(np.float32))
            self.largest_error = max(self.largest_error, float(np.where(wrong, 0, off).max()))
        return rows

    def finish(self) -> bytes:
        """The whole stream."""
        self._keep(self._deflate.flush())
        return b"".join(self._chunks)

    def _keep(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)


def _without_towers(values: Numbers, maxima: Numbers) -> Numbers:
    """The maximum of each row without the few weights that are far above the others."""
    few = values.shape[1] // ROW_PER_TOWER
    if few == 0:
        return maxima
    rest = np.partition(values, -few - 1, axis=1)[:, -few - 1, None]
    return np.where(maxima > TOWERING * rest, rest, maxima)


def _nibbles(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    flat = codes.ravel()
    flat = np.pad(flat, (0, flat.size % 2))
    return (flat[0::2] | (flat[1::2] << 4)).astype(np.uint8)


def as_array(values: Tensor) -> Numbers:
    """On the CPU, floating-point numbers in single precision."""
    values = values.detach().cpu()
    return (values.float() if values.is_floating_point() else values).numpy()


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
    pool: dict[str, Any] | None
    """What the model pools, as shares of prefix tokens and of all cells together, so that it is a
    query that fits every layer. None: unknown."""
    classes: list[PageClass]
    norms: Tensor | None
    """Lengths of the last tokens before the final norm, by cell: (y x)."""


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
            return Packed(header, data, rung)
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
        key = layer.layout.identity()
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
    return {
        "format": FORMAT,
        "model": captured.model,
        "image_size": list(captured.layout.image_size),
        "layouts": layouts,
        "layers": layers,
        "pool": content.pool,
        "classes": classes,
        "maps": maps,
        "rung": {"number": rung.number, "of": len(LADDER), "says": rung.says},
        "least_limit": LEAST_LIMIT,
        "fusions": list(rung.planes or _FUSED),
        "largest_error": encoder.largest_error,
    }


def _layout(layout: Layout, encoder: RowEncoder) -> dict[str, Any]:
    place: dict[str, Any] = {
        "prefix": list(layout.prefix),
        "grid": list(layout.grid),
        "stride": list(layout.stride),
        "margins": list(layout.margins),
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


def _pooled(planes: Numbers, layout: Layout) -> Numbers:
    """Keys (… n) of which 2 × 2 cells are summed, prefix tokens left as they are."""
    prefix, (rows, columns) = len(layout.prefix), layout.grid
    cells = planes[..., prefix:].reshape(*planes.shape[:-1], rows, columns)
    cells = np.pad(cells, [(0, 0)] * (cells.ndim - 2) + [(0, rows % 2), (0, columns % 2)])
    sums = reduce(cells, "... (y p) (x q) -> ... (y x)", "sum", p=2, q=2)
    return np.concatenate([planes[..., :prefix], sums], axis=-1)
