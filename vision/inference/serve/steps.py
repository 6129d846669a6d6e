"""An image on its way through a model, step by step, with the numbers of one patch: patches,
tokens, positions, attention (in windows for Swin), merging, head.

Every number is from the forward pass that gives the logits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vision.data.images.decode import Pixels
from vision.inference.serve.served_model import ServedModel
from vision.inspection.capture.anatomy import own_model
from vision.inspection.capture.capture import capture
from vision.inspection.capture.captured import Captured, LayerAttention
from vision.inspection.capture.recording import removing
from vision.inspection.capture.token_layout import Cell, Layout
from vision.models.swin import Swin
from vision.models.vit import ViT

SHOWN = 8
"""Numbers of a vector that are listed."""
BEST = 5
"""Number of keys or classes that are listed."""


@dataclass(frozen=True)
class StepVector:
    """A vector of the forward pass."""

    name: str
    first: list[float]
    """Its first numbers."""
    width: int
    length: float
    """Euclidean."""


@dataclass(frozen=True)
class StepGrid:
    """Cells over the image."""

    grid: tuple[int, int]
    stride: tuple[float, float]
    """Height and width of a cell, as fractions of the image."""
    chosen: Cell
    groups: list[int] | None = None
    """The window of each cell, row by row."""
    masked: list[int] | None = None
    """Cells of the window that are masked from the chosen one."""
    values: list[float] | None = None
    """Attention to each cell, row by row."""


@dataclass(frozen=True)
class Step:
    """One station."""

    id: str
    title: str
    text: str
    vectors: list[StepVector]
    grid: StepGrid | None = None
    columns: list[str] | None = None
    rows: list[list[str | float]] | None = None


@dataclass(frozen=True)
class ModelSteps:
    """All stations."""

    model: str
    kind: str
    steps: list[Step]


def steps_of(served: ServedModel, pixels: Pixels, at: tuple[float, float]) -> ModelSteps:
    """The steps of an image; at: the patch to follow, as fractions of height and width."""
    model = own_model(served.loaded.model)
    if model is None:
        raise ValueError(
            f"The steps are known for this project's ViT and Swin, not for {served.name}; its "
            "attention is on the explorer."
        )
    images = served.loaded.batch([pixels])
    modules: list[nn.Module] = [model.patch_embed]
    if isinstance(model, Swin):
        modules += [m for name, m in model.named_modules() if name.endswith(".downsample")]
    with torch.no_grad(), outputs_of(modules) as outputs:
        captured = capture(served.loaded.model, images)
    first = captured.layers[0].layout
    height, width = first.image_size
    pixel = min(int(at[0] * height), height - 1), min(int(at[1] * width), width - 1)
    walk = Walk(served, captured, pixels, pixel, outputs[0][0], outputs[1:])
    steps = [walk.patches(), walk.tokens()]
    if isinstance(model, ViT):
        steps += [walk.vit_positions(model), *walk.vit_attention()]
    else:
        steps += [*walk.swin_tokens(model), *walk.swin_layers()]
    steps += walk.head()
    return ModelSteps(served.name, served.loaded.opened.config.kind, steps)


@contextmanager
def outputs_of(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """The outputs of modules, in their order, after the forward pass."""
    found: list[Any] = [None] * len(modules)

    def keep(place: int) -> Any:
        return lambda module, inputs, output: found.__setitem__(place, output.detach())

    with removing([m.register_forward_hook(keep(i)) for i, m in enumerate(modules)]):
        yield found


@dataclass(frozen=True, eq=False)
class Walk:
    """One patch through one forward pass."""

    served: ServedModel
    captured: Captured
    pixels: Pixels
    pixel: tuple[int, int]
    embedded: Tensor
    """The output of the stem: (c y x), maybe padded."""
    merged: Sequence[Tensor]
    """The outputs of Swin's patch mergings, in window order: (b n c)."""

    @property
    def first(self) -> Layout:
        """The layout of the first layer."""
        return self.captured.layers[0].layout

    @property
    def cell(self) -> Cell:
        """The patch that is followed."""
        return self.first.cell_at(self.pixel)

    def patches(self) -> Step:
        """The image as patches."""
        (rows, columns), (tall, wide) = self.first.grid, self.first.stride
        top, left, bottom, right = self.first.box(self.cell)
        patch = self.pixels[top:bottom, left:right]
        colours = ", ".join(f"{c:.0f}" for c in patch.reshape(-1, patch.shape[2]).mean(0))
        size = " × ".join(map(str, self.pixels.shape[:2]))
        text = (
            f"The image of {size} pixels is cut into {rows} × {columns} patches of {tall} × {wide} "
            f"pixels. The chosen one, in row {self.cell[0]} and column {self.cell[1]}, is "
            f"{patch.size} numbers; its mean colour is ({colours})."
        )
        normal = self.served.loaded.batch([self.pixels])[0][:, top:bottom, left:right]
        return Step(
            "patches",
            "Patches",
            text,
            [
                _vector("pixels", torch.from_numpy(patch.copy()).flatten().float()),
                _vector("normalised: (pixel / 255 − mean) / deviation", normal.flatten()),
            ],
            _grid(self.first, self.cell),
        )

    def tokens(self) -> Step:
        """The patch as a vector."""
        y, x = self.cell
        vector = self.embedded[:, y, x]
        text = (
            f"A learned linear map (a convolution whose stride is the patch) makes a token of "
            f"{len(vector)} numbers from each patch."
        )
        return Step("tokens", "Tokens", text, [_vector("token of the patch", vector)])

    def vit_positions(self, model: ViT) -> Step:
        """What says where the patch was."""
        token = self.embedded[:, self.cell[0], self.cell[1]]
        prefix = ", ".join(self.first.prefix)
        prefixed = f" Before them stand the tokens: {prefix}." if prefix else ""
        if model.positions is None:
            how = "turn queries and keys (rotary)" if model.rotary else "are a bias of attention"
            text = f"Nothing is added to the tokens: positions {how}.{prefixed}"
            return Step("positions", "Positions", text, [_vector("token", token)])
        with torch.no_grad():
            table = model.positions(self.first.grid)[0]
        row = table[len(table) - self.first.cells + _number(self.first, self.cell)]
        text = (
            "Attention does not know the order of tokens. A vector for the place of each patch "
            f"({model.config.positions}) is added to its token.{prefixed}"
        )
        vectors = [_vector("token", token), _vector("position", row), _vector("sum", token + row)]
        return Step("positions", "Positions", text, vectors)

    def vit_attention(self) -> list[Step]:
        """The patch's first look at all others, and the last look of what is pooled."""
        last = self.captured.layers[-1]
        steps = [self._attention(self.captured.layers[0], self.cell, "attention", "the patch")]
        if last.layout.prefix:
            name = last.layout.prefix[0]
            steps.append(self._attention(last, name, "pooled", f"the token '{name}'"))
        elif len(self.captured.layers) > 1:
            steps.append(self._attention(last, self.cell, "deep", "the patch"))
        return steps

    def swin_tokens(self, model: Swin) -> list[Step]:
        """The norm of the tokens, and what says where a patch was."""
        token = self.embedded[:, self.cell[0], self.cell[1]]
        with torch.no_grad():
            normed = model.patch_norm(token)
        vectors = [_vector("token", token), _vector("normed", normed)]
        if model.absolute_pos_embed is not None:
            row = model.absolute_pos_embed[0][_number(self.first, self.cell)].detach()
            vectors += [_vector("position", row), _vector("sum", normed + row)]
            text = "The tokens are normed, and a vector for the place of each is added."
        else:
            text = (
                "The tokens are normed. Nothing is added for their place: within a window a "
                "learned bias for each offset between two tokens is added to their score."
            )
        return [Step("positions", "Positions", text, vectors)]

    def swin_layers(self) -> list[Step]:
        """Windows, shifted windows, merging, from stage to stage."""
        steps: list[Step] = []
        stage, grid = 0, self.first.grid
        shown: set[tuple[int, bool]] = set()
        for layer in self.captured.layers:
            if layer.layout.grid != grid:
                steps.append(self._merging(stage, layer))
                stage, grid = stage + 1, layer.layout.grid
            shifted = any(layer.layout.shift or ())
            if (stage, shifted) not in shown:
                shown.add((stage, shifted))
                steps.append(self._window(layer, stage, shifted))
        return steps

    def _window(self, layer: LayerAttention, stage: int, shifted: bool) -> Step:
        cell = layer.layout.cell_at(self.pixel)
        window = " × ".join(map(str, layer.layout.window or ()))
        name = (
            f"Shifted windows of stage {stage + 1}" if shifted else f"Windows of stage {stage + 1}"
        )
        says = (
            f"The windows of {window} tokens are shifted by "
            f"{' and '.join(map(str, layer.layout.shift or ()))}, so that tokens of neighbouring "
            "windows meet. What meets only because the shift wraps around is masked."
            if shifted
            else f"Tokens attend within windows of {window} tokens, not to the whole image."
        )
        kind = "shift" if shifted else "windows"
        step = self._attention(layer, cell, f"{kind}-{stage + 1}", "the patch")
        return replace(step, title=name, text=says)

    def _merging(self, stage: int, after: LayerAttention) -> Step:
        layout, output = after.layout, self.merged[stage][0]
        cell = layout.cell_at(self.pixel)
        vector = output[int(layout.slots[_number(layout, cell)])]
        rows, columns = layout.grid
        text = (
            f"2 × 2 neighbouring tokens are put side by side and mapped to one of {len(vector)} "
            f"numbers: {rows} × {columns} tokens are left, each of twice the width. The patch is "
            f"now part of the token in row {cell[0]} and column {cell[1]}."
        )
        name = f"Merging before stage {stage + 2}"
        grid = _grid(layout, cell)
        return Step(f"merging-{stage + 1}", name, text, [_vector("merged token", vector)], grid)

    def _attention(self, layer: LayerAttention, place: str | Cell, id: str, who: str) -> Step:
        """Where a token looks: mean over heads, and the keys of the largest weights."""
        layout = layer.layout
        heads = layer.row(place)[0]
        mean, prefix = heads.mean(0), len(layout.prefix)
        best = mean.topk(min(BEST, len(mean)))
        columns = ["key", "mean of heads", *(f"head {h}" for h in range(len(heads)))]
        rows: list[list[str | float]] = [
            [_place_name(layout, int(token)), *_rounded([value, *heads[:, token]])]
            for token, value in zip(best.indices, best.values, strict=True)
        ]
        text = (
            f"In layer {layer.number} {who} asks with its query; every key answers with a score "
            "q · k / √d, and softmax makes weights of them that sum to 1. These are the largest."
        )
        cell = layout.cell_at(self.pixel)
        grid = _grid(layout, cell, values=_rounded(mean[prefix:]))
        return Step(id, f"Attention in layer {layer.number}", text, [], grid, columns, rows)

    def head(self) -> list[Step]:
        """From the pooled tokens to probabilities."""
        logits, temperature = self.captured.logits, self.served.temperature
        model = self.served.loaded.model
        if logits is None:
            return []
        with torch.no_grad():
            images = self.served.loaded.batch([self.pixels])
            pooled = model.pool(model.forward_features(images))[0]
        names = self.served.loaded.classes
        scaled = logits[0].double() / temperature.value
        chances = scaled.softmax(0)
        best = chances.topk(min(BEST, len(names))).indices.tolist()
        rows: list[list[str | float]] = [
            [names[i], *_rounded([logits[0, i], scaled[i].exp(), chances[i]])] for i in best
        ]
        over = "" if temperature.value == 1 else f" / {temperature.value:.4g}"
        text = (
            f"What the model pools is one vector of {len(pooled)} numbers. A linear head makes a "
            f"logit of it for each of {len(names)} classes; e to the logit{over}, divided by the "
            "sum over all classes, is the probability."
        )
        columns = ["class", "logit", "e^logit", "probability"]
        vectors = [_vector("pooled", pooled)]
        return [Step("head", "Head", text, vectors, columns=columns, rows=rows)]


def _grid(layout: Layout, cell: Cell, values: list[float] | None = None) -> StepGrid:
    height, width = layout.image_size
    stride = layout.stride[0] / height, layout.stride[1] / width
    if layout.index is None:
        return StepGrid(layout.grid, stride, cell, values=values)
    size = layout.index.shape[1]
    groups = [int(slot) // size for slot in layout.slots]
    masked = None
    if layout.allowed is not None:
        window, slot = layout.slot(_number(layout, cell))
        kept = layout.allowed[window if len(layout.allowed) > 1 else 0, slot]
        cells = layout.index[window][~kept].tolist()
        masked = sorted(number for number in cells if number >= 0)
    return StepGrid(layout.grid, stride, cell, groups, masked, values)


def _number(layout: Layout, cell: Cell) -> int:
    return cell[0] * layout.grid[1] + cell[1]


def _place_name(layout: Layout, token: int) -> str:
    place = layout.place(token)
    return place if isinstance(place, str) else f"row {place[0]}, column {place[1]}"


def _rounded(values: Any) -> list[float]:
    return [float(f"{float(value):.6g}") for value in values]


def _vector(name: str, values: Tensor) -> StepVector:
    values = values.detach().float().cpu()
    return StepVector(name, _rounded(values[:SHOWN]), len(values), float(values.norm()))
