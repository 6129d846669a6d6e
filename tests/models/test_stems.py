"""Stems: their grids, what a token sees, and convolutions against a plain stack of layers."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_settings import SMALL_SWIN, SMALL_VIT, model_config, random_images, small_model
from torch import Tensor, nn

from vision.config import ConfigError
from vision.models.build import build_model
from vision.models.cost.count import cost
from vision.models.layers import Grid
from vision.models.stems import ConvStem

STEMS = ["conv", "conv_whitened"]


def stem(kind: str, patch: Any, width: int = 32, channels: int = 3) -> ConvStem:
    changes = {"patch_size": patch, "stem": kind, "width": width, "heads": 2}
    model = small_model("vit_base", (32, 32), channels=channels, **changes)
    return model.patch_embed  # type: ignore[no-any-return]


class PlainStem(nn.Module):
    """The stem of patch 4 layer by layer, as a user of torch would write it."""

    def __init__(self, ours: ConvStem, width: int) -> None:
        super().__init__()
        weights = [conv.weight for conv in ours.convs]
        if ours.whitening is not None:
            self.first = nn.Conv2d(3, 24, 2)
            self.first.weight, self.first.bias = ours.whitening.weight, ours.whitening.bias
            self.pad: nn.Module = nn.ReplicationPad2d((0, 1, 0, 1))
        else:
            self.first = nn.Conv2d(3, 24, 3, bias=False)
            self.first.weight = weights.pop(0)
            self.pad = nn.ZeroPad2d(1)
        self.second = nn.Conv2d(24, width // 2, 3, padding=1, bias=False)
        self.third = nn.Conv2d(width // 2, width, 3, padding=1, bias=False)
        self.second.weight, self.third.weight = weights  # type: ignore[assignment]
        self.norms = ours.norms

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip((self.second, self.third), self.norms, strict=True):
            x = self.first(self.pad(x)) if conv is self.second else x
            x = F.max_pool2d(conv(F.gelu(x)), 2)
            x = norm(x.movedim(1, -1)).movedim(-1, 1)
        return F.gelu(x)


@pytest.mark.parametrize("kind", STEMS)
def test_conv_stem_equals_its_layers_one_by_one(kind: str) -> None:
    ours = stem(kind, 4)
    images = random_images(2, 3, 32, 24)
    torch.testing.assert_close(ours(images), PlainStem(ours, 32)(images))


@pytest.mark.parametrize("kind", STEMS)
@pytest.mark.parametrize(
    ("patch", "size", "grid"),
    [(2, (8, 6), (4, 3)), (4, (32, 30), (8, 8)), (16, (64, 48), (4, 3)), ((2, 8), (8, 16), (4, 2))],
)
def test_grid_is_image_by_patch(kind: str, patch: Any, size: Grid, grid: Grid) -> None:
    ours = stem(kind, list(patch) if isinstance(patch, tuple) else patch)
    assert ours.grid(size) == grid
    assert ours(random_images(1, 3, *size)).shape == (1, 32, *grid)


@pytest.mark.parametrize("kind", STEMS)
@pytest.mark.parametrize("patch", [2, 4, [2, 4], 8])
def test_token_sees_its_patch_and_the_margins(kind: str, patch: Any) -> None:
    ours = stem(kind, patch, channels=1)
    size = 8 * ours.patch[0], 8 * ours.patch[1]
    seen = torch.zeros(size, dtype=torch.bool)
    for seed in range(8):  # a maximum passes on one gradient alone
        images = random_images(1, 1, *size, seed=seed).requires_grad_()
        token = ours(images)[0, :, 4, 4] @ random_images(32, seed=seed)
        seen |= torch.autograd.grad(token, images)[0][0, 0] != 0
    rows, columns = seen.any(1).nonzero(), seen.any(0).nonzero()
    above, left, below, right = ours.margins
    (high, wide) = ours.patch
    assert int(rows.min()) >= 4 * high - above and int(rows.max()) < 5 * high + below
    assert int(columns.min()) >= 4 * wide - left and int(columns.max()) < 5 * wide + right
    # Not wider than needed: the corners are seen by some maximum.
    assert int(rows.max() - rows.min()) + 1 == above + high + below
    assert int(columns.max() - columns.min()) + 1 == left + wide + right


def test_whitening_makes_pixels_of_patches_uncorrelated() -> None:
    ours = stem("conv_whitened", 4)
    assert ours.whitening is not None
    mixing = torch.randn(3, 3, generator=torch.Generator().manual_seed(2))
    images = torch.einsum("ij,bjhw->bihw", mixing, F.avg_pool2d(random_images(64, 3, 17, 17), 2, 1))
    ours.whitening.fit(images.split(16))
    nn.init.zeros_(ours.whitening.bias)
    found = ours.whitening(images)[:, :, :-1, :-1]  # without the padding
    components = found[:, :12].movedim(1, -1).reshape(-1, 12)
    covariance = components.T @ components / len(components)
    # 5e-4 is added to every variance: components with less of it stay smaller.
    assert covariance.diag().max() <= 1 and covariance.diag().min() > 0.9
    assert (covariance - covariance.diag().diag()).abs().max() < 1e-3
    torch.testing.assert_close(found[:, 12:], -found[:, :12])


def test_whitening_does_not_depend_on_the_size_of_batches() -> None:
    images, filters = random_images(32, 3, 8, 8), []
    for size in (4, 32):
        ours = stem("conv_whitened", 4)
        assert ours.whitening is not None
        ours.whitening.fit(images.split(size))
        filters.append(ours.whitening.weight.detach().clone())
    torch.testing.assert_close(filters[0], filters[1])


@pytest.mark.parametrize("name", ["swin_tiny", "swinv2_tiny"])
def test_padding_to_windows_does_not_reach_the_image(name: str) -> None:
    """At 28 pixels the grid of 14 is padded to windows of 4; without padding it is 14 as well."""
    padded = small_model(name, (28, 28), stem="conv", window=4)
    images = random_images(1, 3, 28, 28)
    tokens = padded.patch_embed(images, multiple=(4, 4))
    assert tokens.shape[-2:] == (16, 16)
    torch.testing.assert_close(tokens[:, :, :14, :14], padded.patch_embed(images))
    assert not tokens[:, :, 14:].any() and not tokens[:, :, :, 14:].any()


@pytest.mark.parametrize("kind", STEMS)
@pytest.mark.parametrize("name", ["vit_base", "swin_tiny", "swinv2_tiny"])
def test_models_with_conv_stems_learn_and_are_counted(name: str, kind: str) -> None:
    model = small_model(name, (32, 32), stem=kind)
    model(random_images(2, 3, 32, 32)).sum().backward()
    fixed = [n for n, p in model.named_parameters() if p.grad is None]
    assert fixed == (["patch_embed.whitening.weight"] if kind == "conv_whitened" else [])
    assert all(model.layer_of(n) == 0 for n, _ in model.named_parameters() if "patch_embed" in n)
    small = SMALL_VIT if name == "vit_base" else SMALL_SWIN
    config = model_config(name, **small, stem=kind)
    counted = cost(config, (32, 32), channels=3, classes=7)
    assert counted.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["vit_base", "swin_tiny"])
def test_residual_branches_that_start_at_zero_leave_tokens_as_they_are(name: str) -> None:
    small = SMALL_VIT if name == "vit_base" else SMALL_SWIN
    model: Any = build_model(
        model_config(name, **small, initialization="zero_residual"), (32, 32), classes=7
    )
    layers = model.blocks if name == "vit_base" else model.layers[0].blocks
    seen: list[Tensor] = []
    for block in layers:
        block.register_forward_hook(lambda _, inputs, output: seen.extend((inputs[0], output)))
    model(random_images(2, 3, 32, 32))
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("vit_base", {"stem": "conv", "patch_size": 14}, "14"),
        ("swin_tiny", {"stem": "conv_whitened", "patch_size": 1}, "power of 2"),
        ("vit_base", {"stem": "convolution"}, "conv_whitened"),
        ("vit_base", {"initialization": "zero_residual", "block_norm": "after"}, "block_norm"),
        ("swinv2_tiny", {"initialization": "zero_residual"}, "trunc_normal"),
    ],
)
def test_impossible_stems_are_refused(name: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model_config(name, **changes)
