"""The heads of a model and its knowledge of positions in one figure.

The first row follows figure 7 of the ViT paper (Dosovitskiy et al., ICLR 2021).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from torch import Tensor, nn

from vision.inspection.capture.captured import Captured
from vision.inspection.figures.drawing import (
    ACCENT,
    MARK,
    SCREEN,
    Array,
    Caption,
    Drawing,
    Style,
    new_figure,
)
from vision.inspection.figures.parts import bare, evenly_spread, mosaic, set_title
from vision.inspection.trust.head_statistics import (
    head_statistics,
    patch_filters,
    position_similarity,
    positionality,
    relative_biases,
)

LABELS = {
    "distance": "attention distance, pixels",
    "entropy": "entropy, nats",
    "prefix_mass": "share on prefix tokens",
    "self_mass": "share on the patch itself",
    "padding_mass": "share on padding",
    "wrapped_mass": "share across the image's edge",
    "content": "dependence on content, nats",
}


@dataclass(frozen=True, eq=False)
class Heads:
    """The statistics of every head, means over images."""

    layers: tuple[str, ...]
    values: dict[str, list[Array]]
    """By name of the statistic and layer: (h)."""
    images: int

    @property
    def numbers(self) -> dict[str, Array]:
        """The values by statistic and layer, for files."""
        return {
            f"{key}_layer{i}": values
            for key, layers in self.values.items()
            for i, values in enumerate(layers)
        }

    def table(self) -> list[dict[str, float | int | str]]:
        """A row for each head."""
        rows: list[dict[str, float | int | str]] = []
        for i, layer in enumerate(self.layers):
            for h in range(len(self.values["distance"][i])):
                numbers = {name: float(values[i][h]) for name, values in self.values.items()}
                rows.append({"layer": layer, "head": h, **numbers})
        return rows


def gather_heads(model: nn.Module, captures: Iterable[Captured]) -> Heads:
    """The statistics of heads over several captures of a model."""
    sums: list[dict[str, Tensor]] = []
    content: list[Array] = []
    layers: tuple[str, ...] = ()
    count = 0
    for captured in captures:
        found = [head_statistics(layer) for layer in captured.layers]
        if not content and (captured.batch > 1 or relative_biases(model)):
            content = [p.double().mean(0).cpu().numpy() for p in positionality(captured, model)]
        layers = tuple(layer.name for layer in captured.layers)
        sums = sums or [{} for _ in found]
        for total, layer in zip(sums, found, strict=True):
            for name, values in layer._asdict().items():
                total[name] = total.get(name, 0) + values.double().sum(0).cpu()
        count += captured.batch
    if count == 0:
        raise ValueError("No images to compute statistics from.")
    means = {name: [(total[name] / count).numpy() for total in sums] for name in sums[0]}
    return Heads(layers, means | ({"content": content} if content else {}), count)


def diagnostics(model: nn.Module, heads: Heads, *, name: str, style: Style = SCREEN) -> Drawing:
    """Filters, positions and distances above; entropy, prefix and self mass below."""
    numbers: dict[str, Array] = {}
    with new_figure(style, 9.6, 6.2) as figure:
        grid = figure.subplots(2, 3)
        what = [
            _filters(grid[0, 0], model, numbers),
            _positions(grid[0, 1], model, numbers),
        ]
        below = _below(heads)
        for axes, key in zip([grid[0, 2], *grid[1]], ["distance", *below], strict=True):
            _scatter(axes, heads, key)
        set_title(figure, f"The heads of {name} (images: {heads.images})", style)
    caption = Caption(
        shows=f"Above: {what[0]}; {what[1]}; and how far every head looks on average. Below: "
        f"{'; '.join(LABELS[key] for key in below)}. One dot for each head, a line for the means.",
        facts=(
            ("Images", str(heads.images)),
            ("Layers", ", ".join(heads.layers)),
            ("Distance", "between the centres of patches; weights over patches made to sum to 1"),
            (
                "Content",
                "KL divergence of attention from what positions alone would give (softmax of the "
                "bias; without one, the mean over the images of the first batch); 0 is a head "
                "that depends on positions only",
            ),
        ),
        methods=("Figure 7 of Dosovitskiy et al., ICLR 2021; Swin's bias: Liu et al., ICCV 2021.",),
    )
    return Drawing(figure, style, caption, numbers | heads.numbers)


def _below(heads: Heads) -> list[str]:
    """The statistics of the lower row: entropy, and the two most informative for this model."""
    mass = ["prefix_mass", "padding_mass", "wrapped_mass"]
    some = [key for key in mass if max(float(v.max()) for v in heads.values[key]) > 1e-3]
    rest = [*some, *(["content"] if "content" in heads.values else []), "self_mass", "padding_mass"]
    return ["entropy", *list(dict.fromkeys(rest))[:2]]


def heads_figure(heads: Heads, *, name: str, style: Style = SCREEN) -> Drawing:
    """What changes while a model learns: distance, entropy, share on the patch itself."""
    with new_figure(style, 9.6, 3.1) as figure:
        shown = ("distance", "entropy", "self_mass")
        for axes, key in zip(figure.subplots(1, 3), shown, strict=True):
            _scatter(axes, heads, key)
        set_title(figure, name, style)
    caption = Caption(
        shows="How far every head looks, how spread its attention is, and how much stays on the "
        "asking patch. One dot for each head.",
        facts=(("Images", str(heads.images)), ("Layers", ", ".join(heads.layers))),
    )
    return Drawing(figure, style, caption, heads.numbers)


def _scatter(axes: Axes, heads: Heads, what: str) -> None:
    """A dot for each head over its layer, and a line through the means."""
    values = heads.values[what]
    for i, layer in enumerate(values):
        spread = np.linspace(-0.18, 0.18, len(layer)) if len(layer) > 1 else np.zeros(1)
        axes.scatter(i + spread, layer, s=12, color=ACCENT, alpha=0.75, linewidths=0)
    means = [float(layer.mean()) for layer in values]
    axes.plot(range(len(values)), means, color=MARK, linewidth=1, zorder=0)
    axes.set_xlabel("layer")
    axes.set_ylabel(LABELS[what])
    axes.set_ylim(0, 1.08 * max(float(v.max()) for v in values) or 1.0)
    axes.locator_params(axis="x", integer=True, nbins=12)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _filters(axes: Axes, model: nn.Module, numbers: dict[str, Array]) -> str:
    """Principal components of the filters that embed patches, as tiles."""
    filters = patch_filters(model, 28).cpu().numpy()
    most = len(filters)
    numbers["filters"] = filters
    low = filters.min(axis=(1, 2, 3), keepdims=True)
    high = filters.max(axis=(1, 2, 3), keepdims=True)
    tiles = ((filters - low) / np.maximum(high - low, 1e-12)).transpose(0, 2, 3, 1)
    tiles = np.repeat(tiles, 3, axis=3) if tiles.shape[3] == 1 else tiles[..., :3]
    axes.imshow(mosaic(tiles, 7, _gap(tiles)), interpolation="nearest")
    bare(axes)
    axes.set_title(f"patch filters, {most} components")
    return f"the first {most} principal components of the filters that embed patches"


def _positions(axes: Axes, model: nn.Module, numbers: dict[str, Array]) -> str:
    """Similarity of position embeddings, or the bias by relative position, or nothing."""
    bare(axes)
    biases = relative_biases(model)
    if biases:
        tables = [table.float().cpu().numpy() for table in biases.values()]
        numbers |= {f"bias_{name}": t for name, t in zip(biases, tables, strict=True)}
        alike = [t for t in tables if t.shape[1:] == tables[0].shape[1:]]  # of the same window
        shown = alike[0] if len(alike) == 1 else np.concatenate([alike[0], alike[-1]])
        shown = shown[:36]
        size = float(np.abs(shown).max()) or 1.0
        across = max(3, int(np.ceil(len(shown) ** 0.5)))
        image = mosaic(shown[..., None], across, _gap(shown))[..., 0]
        drawn = axes.imshow(image, cmap="PuOr_r", vmin=-size, vmax=size, interpolation="nearest")
        axes.figure.colorbar(drawn, ax=axes, shrink=0.8, aspect=20)
        axes.set_title("bias by relative position")
        return (
            "the bias by relative position (query minus key) of every head of the first block and "
            "of the last one with the same window"
        )
    similar = position_similarity(model)
    if similar is None:
        axes.set_title("no table of positions")
        return "(the model adds no position embedding)"
    values = similar.cpu().numpy()
    numbers["position_similarity"] = values
    rows, columns = (evenly_spread(size, 7) for size in values.shape[:2])
    tiles = values[np.ix_(rows, columns)].reshape(-1, *values.shape[2:], 1)
    image = mosaic(tiles, len(columns), _gap(tiles))[..., 0]
    drawn = axes.imshow(image, cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
    axes.figure.colorbar(drawn, ax=axes, shrink=0.8, aspect=20)
    axes.set_title("similarity of positions")
    return "the cosine similarity of each position embedding with all others"


def _gap(tiles: Array) -> int:
    return max(1, int(tiles.shape[2]) // 12)
