"""Changes to the fast recipe that are not settings of this project, for `race.py --ablations`.

Each takes the number of steps of the run and changes classes or functions of this process.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision.models.stems import ConvStem
from vision.models.vit import ViT
from vision.training import loop


def use_batch_norm(_: int) -> None:
    """Give stems batch norm, which depends on the micro-batch."""

    class LastAxisBatchNorm(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:  # (b y x c)
            return super().forward(x.flatten(0, 2)).view_as(x)

    original, draw_weights = ConvStem.__init__, ConvStem.init_weights

    def build(stem: Any, *given: Any) -> None:
        original(stem, *given)
        widths = [norm.normalized_shape[0] for norm in stem.norms]
        stem.norms = nn.ModuleList(map(LastAxisBatchNorm, widths))

    def init_weights(stem: Any, *given: Any) -> None:
        draw_weights(stem, *given)
        for norm in stem.norms:
            norm.reset_parameters()

    ConvStem.__init__, ConvStem.init_weights = build, init_weights  # type: ignore[method-assign]


def drop_tokens(_: int) -> None:
    """Train on a random three quarters of the patches of each image (PatchDropout, Liu et al.,
    WACV 2023).
    """
    encode = ViT._encode

    def some(vit: ViT, x: Tensor, grid: Any, kept: Tensor | None = None) -> Tensor:
        if vit.training:
            chosen = torch.rand(x.shape[:2]).argsort(dim=1)[:, : x.shape[1] * 3 // 4]
            x = x.gather(1, chosen[..., None].expand(-1, -1, x.shape[2]))
        return encode(vit, x, grid, kept)

    ViT._encode = some  # type: ignore[method-assign]


def grow_images(steps: int) -> None:
    """Train on images of 24 pixels during the first half of the run (Touvron et al., 2019)."""
    whole, step = ViT.forward_features, 0

    def resized(vit: ViT, images: Tensor, *given: Any) -> Tensor:
        nonlocal step
        if vit.training:
            step += 1
            if step <= steps // 2:
                images = F.interpolate(images, size=24, mode="bilinear", antialias=True)
        return whole(vit, images, *given)

    ViT.forward_features = resized  # type: ignore[method-assign]


def look_ahead(steps: int) -> None:
    """Every fifth step and after the last one, go half of the way that the weights went since the
    fifth step before it (Lookahead, Zhang et al., NeurIPS 2019).
    """
    update, step, slow = loop.update, 0, list[Tensor]()

    def updated(state: Any, config: Any) -> None:
        nonlocal step
        weights = list(state.model.parameters())
        if not slow:
            slow.extend(weight.detach().clone() for weight in weights)
        update(state, config)
        step += 1
        if step % 5 == 0 or step == steps:
            with torch.no_grad():
                torch._foreach_lerp_(slow, weights, 0.5)
                torch._foreach_copy_(weights, slow)

    loop.update = updated


CHANGES: dict[str, Callable[[int], None]] = {
    "batch norm in the stem": use_batch_norm,
    "three quarters of the tokens": drop_tokens,
    "24 pixels in the first half": grow_images,
    "lookahead (5 steps, 0.5)": look_ahead,
}
