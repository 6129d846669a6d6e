"""Groups and figures of models that this project does not know, against torch's own counters."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from measuring import kept_by, macs_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vision.models.cost.tracing import Group, Matrices, groups_of, trace

WIDTH, IMAGE = 8, (3, 12, 20)
CELLS = 6 * 10


class Block(nn.Module):
    """Attention with a talking head and a gated MLP, as no model of this project has them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.talk = nn.Parameter(torch.randn(2, 2))
        self.gate = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1)).softmax(dim=-1)
        weights = torch.einsum("bhnm,hg->bgnm", weights, self.talk)
        x = x + (weights @ v).transpose(1, 2).flatten(2)
        gate, hidden = self.gate(x).chunk(2, dim=-1)
        return x + F.dropout(self.down(F.silu(gate) * hidden), self.dropout, self.training)


class Unknown(nn.Module):
    """An overlapping stem with batch norm, positions made on the way, blocks, two kinds of head."""

    def __init__(self, recompute: bool, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, stride=2, padding=1)
        self.depthwise = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.up = nn.ConvTranspose1d(WIDTH, 4, 3, stride=2)
        self.head = nn.Linear(4, 5)
        self.recompute = recompute

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.depthwise(self.stem(images))).relu_().flatten(2).transpose(1, 2)
        steps = torch.arange(x.shape[1], device=x.device).float()
        x = x + torch.outer(steps, torch.ones(WIDTH)).sin()
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        x = F.dropout(x, 0.1, self.training)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.up(x.transpose(1, 2)).mean(dim=2))


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_unknown_model_has_the_figures_that_torch_measures(recompute: bool, dropout: float) -> None:
    model = Unknown(recompute, dropout)
    fake = on_meta(lambda: Unknown(recompute, dropout))
    groups = groups_of(fake)
    assert [group.name for group in groups] == ["embedding", "3 blocks", "norm and head"]
    traced = trace(fake, groups, IMAGE)
    assert sum(row.parameters for row in traced) == sum(p.numel() for p in model.parameters())
    assert sum(row.macs for row in traced) == macs_of(model, IMAGE)
    model = Unknown(recompute, dropout)
    assert sum(row.activation_bytes for row in traced) == kept_by(model, IMAGE)


def test_figures_of_an_unknown_model_are_found_group_by_group() -> None:
    model = on_meta(lambda: Unknown(recompute=True, dropout=0.0))
    embedding, blocks, head = trace(model, groups_of(model), IMAGE)
    n = CELLS + 1
    assert embedding.parameters == sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if name.split(".")[0] in ("stem", "depthwise", "norm", "token")
    )
    assert embedding.macs == CELLS * WIDTH * (3 * 9 + 9)
    # Two products of attention, one of talking heads, and four linear layers.
    assert blocks.macs == 3 * (2 * n * n * WIDTH + 4 * n * n + n * (3 + 4 + 2) * WIDTH**2)
    assert blocks.activation_bytes == 3 * 4 * n * WIDTH  # the inputs, to compute the rest again
    assert blocks.attention == Matrices(windows=1, heads=2, queries=n, keys=n)
    assert head.macs == n * WIDTH * 4 * 3 + 4 * 5
    assert (blocks.input, blocks.output, head.output) == ((n, WIDTH), (n, WIDTH), (5,))


class Attending(nn.Module):
    """Fused attention wherever a CPU has it."""

    def __init__(self, dropout: float, mask: str) -> None:
        super().__init__()
        self.proj = nn.Linear(3 * 12, 4)
        masks = {"boolean": torch.ones(20, 20, dtype=torch.bool), "additive": torch.zeros(20, 20)}
        self.mask: Tensor | None
        if mask == "learned":
            self.mask = nn.Parameter(masks["additive"])
        else:
            self.register_buffer("mask", masks.get(mask))
        self.dropout = dropout

    def forward(self, images: Tensor) -> Tensor:
        x = self.proj(images.permute(0, 3, 1, 2).flatten(2))[:, None]
        return F.scaled_dot_product_attention(x, x, x, self.mask, dropout_p=self.dropout)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mask", ["none", "boolean", "additive", "learned"])
def test_attention_keeps_what_the_kernel_of_a_cpu_keeps(dropout: float, mask: str) -> None:
    model = on_meta(lambda: Attending(dropout, mask))
    (proj,) = trace(model, [Group("proj", ("proj",))], IMAGE)
    assert proj.activation_bytes == kept_by(Attending(dropout, mask), IMAGE)
    assert proj.macs == macs_of(Attending(0.0, mask), IMAGE)
    assert proj.attention == Matrices(windows=1, heads=1, queries=20, keys=20)


def test_groups_of_nested_lists_are_stages_and_a_wrapper_is_looked_into() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Linear(1, 1)
            self.blocks = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(1, 1)
            self.stages = nn.ModuleList([Stage(), Stage()])
            self.norm = nn.Linear(1, 1)
            self.head = nn.Linear(1, 1)

    expected = [
        Group("embedding", ("0.stem", "0.stages.0.down")),
        Group("2 blocks", ("0.stages.0.blocks.0", "0.stages.0.blocks.1"), stage=1, blocks=2),
        Group("down", ("0.stages.1.down",), stage=2),
        Group("2 blocks", ("0.stages.1.blocks.0", "0.stages.1.blocks.1"), stage=2, blocks=2),
        Group("norm and head", ("0.norm", "0.head")),
    ]
    assert groups_of(nn.Sequential(Model())) == expected


def test_groups_of_a_model_without_lists_are_its_modules() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    assert groups_of(model) == [Group("0", ("0",)), Group("1", ("1",))]
