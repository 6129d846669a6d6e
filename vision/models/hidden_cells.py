"""Cells of a token grid that are hidden in pretraining: a learned token stands in their place."""

from typing import NamedTuple

import torch
from torch import Tensor

from vision.models.layers import Grid, pad_to_multiple
from vision.models.windows import partition


class HiddenCells(NamedTuple):
    """What SimMIM hides of an image (Xie et al., CVPR 2022)."""

    mask: Tensor
    """bool (b y x): true where a cell is hidden."""
    token: Tensor
    """(c,)"""

    def replace(self, tokens: Tensor, window: Grid | None = None) -> Tensor:
        """Tokens (b n c) with the hidden ones replaced; row by row, or in plain window order with
        the grid padded to whole windows.
        """
        mask = self.mask[:, None]
        if window is None:
            hidden = mask.flatten(2).transpose(1, 2)
        else:
            hidden = partition(pad_to_multiple(mask, window), window)
        return torch.where(hidden, self.token.to(tokens.dtype), tokens)
