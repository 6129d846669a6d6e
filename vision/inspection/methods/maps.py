"""The result of a method: one map per image."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from vision.inspection.capture.layout import Layout


@dataclass(frozen=True, eq=False)
class Maps:
    """One map per image, in cells."""

    values: Tensor
    """(b y x)"""
    method: str
    formula: str
    reference: str
    layout: Layout
    """Of the cells."""
    layer: str | None
    """For methods that look at one layer."""
    query: str | None
    targets: Tensor | None
    """The class of each map: (b)."""
    prefix: dict[str, Tensor] = field(default_factory=dict)
    """What prefix tokens got: (b) each."""
    uniform: float | None = None
    """The value of every token if the map were uniform; None where values are no shares."""
    options: dict[str, Any] = field(default_factory=dict)

    def times_uniform(self) -> Tensor:
        """Values as multiples of a uniform map's: (b y x).

        Values that are no shares are divided by the mean of their positive part.
        """
        if self.uniform is not None:
            return self.values / self.uniform
        mean = self.values.clamp_min(0).mean(dim=(1, 2), keepdim=True)
        return self.values / mean.masked_fill(mean == 0, 1)

    def to_pixels(self, mode: Literal["nearest", "bilinear"] = "bilinear") -> Tensor:
        """The map at the image's size: (b height width). `nearest` shows cells as they are."""
        (rows, columns), (y, x) = self.layout.grid, self.layout.stride
        smooth = {"align_corners": False} if mode == "bilinear" else {}
        size = (rows * y, columns * x)
        pixels = F.interpolate(self.values[:, None], size=size, mode=mode, **smooth)[:, 0]
        height, width = self.layout.image_size
        # A last row or column of pixels that no whole patch covers belongs to no cell.
        missing = max(0, height - size[0]), max(0, width - size[1])
        return F.pad(pixels[:, :height, :width], (0, missing[1], 0, missing[0]))
