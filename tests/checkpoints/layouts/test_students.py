"""ViTs written with torch's own modules, and vit-pytorch, which is not installed: both are written
down here as their authors describe them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from foreign_models import CLASSES, assert_equal_function, drawn
from torch import Tensor, nn

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.open import open_model
from vision.config import ConfigError

SIZE, OTHER = (32, 32), (48, 40)
WIDTH, PATCH, HEADS, CELLS = 48, 8, 3, 16


def with_positions(x: Tensor, table: Tensor, grid: tuple[int, int], rows: int) -> Tensor:
    """Tokens with a learned table, resized to another grid as most people do."""
    first, cells = table[:, :rows], table[:, rows:]
    if grid != (4, 4):
        image = rearrange(cells, "1 (y x) c -> 1 c y x", y=4)
        cells = F.interpolate(image, grid, mode="bicubic").flatten(2).transpose(1, 2)
    return x + torch.cat([first, cells], dim=1)


class HandWritten(nn.Module):
    """A ViT of someone's own; names as they are often chosen."""

    def __init__(self, names: dict[str, str], last: int, **options: Any) -> None:
        super().__init__()
        self.names, self.token = names, options.pop("token", True)
        bias = options.pop("bias", True)
        self.cls_token = nn.Parameter(torch.empty(1, 1, WIDTH)) if self.token else None
        self.pos_embed = nn.Parameter(torch.empty(1, CELLS + self.token, WIDTH))
        self.patch_embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            mlp: dict[int, nn.Module] = {0: nn.Linear(WIDTH, 80), 1: nn.GELU()}
            mlp |= {index: nn.Dropout(0.1) for index in range(2, last)}
            mlp[last] = nn.Linear(80, WIDTH)
            attention = nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True)
            parts = {"norm1": nn.LayerNorm(WIDTH), "norm2": nn.LayerNorm(WIDTH), "attn": attention}
            self.blocks.append(nn.ModuleDict(parts | {"mlp": nn.Sequential(*mlp.values())}))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)
        grid = (x.shape[-2], x.shape[-1])
        x = x.flatten(2).transpose(1, 2)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        x = with_positions(x, self.pos_embed, grid, int(self.token))
        for block in self.blocks:
            y = block["norm1"](x)  # type: ignore[index]
            x = x + block["attn"](y, y, y, need_weights=False)[0]  # type: ignore[index]
            x = x + block["mlp"](block["norm2"](x))  # type: ignore[index]
        x = self.norm(x)
        return self.head(x[:, 0] if self.token else x.mean(dim=1))

    def stored(self) -> dict[str, Tensor]:
        """Tensors by the names of the variant."""
        found = {}
        for name, tensor in self.state_dict().items():
            for old, new in self.names.items():
                name = name.replace(old, new)
            found[name] = tensor
        return found


HAND_WRITTEN: dict[str, Callable[[], HandWritten]] = {
    "timm's words": lambda: HandWritten({"mlp.0": "mlp.fc1", "mlp.3": "mlp.fc2"}, 3),
    "mlp.0 and mlp.2": lambda: HandWritten(
        {"norm1": "ln_1", "norm2": "ln_2", "blocks": "layers"}, 2
    ),
    "mlp.0 and mlp.3, mean": lambda: HandWritten(
        {"blocks": "transformer.layers", "patch_embed": "patch_embed.proj", "head": "mlp_head"},
        3,
        token=False,
    ),
    "paper replicated": lambda: HandWritten(
        {
            "cls_token": "class_embedding",
            "pos_embed": "position_embedding",
            "patch_embed": "patch_embedding.patcher",
            "blocks": "transformer_encoder",
            "norm1": "msa_block.layer_norm",
            "attn": "msa_block.multihead_attn",
            "norm2": "mlp_block.layer_norm",
            ".mlp.": ".mlp_block.mlp.",
            "head": "classifier.1",
            "norm.": "classifier.0.",
            "msa_block.layer_classifier.0.": "msa_block.layer_norm.",
            "mlp_block.layer_classifier.0.": "mlp_block.layer_norm.",
        },
        3,
    ),
    "no biases": lambda: HandWritten({"attn": "self_attention", ".mlp": ".ffn"}, 3, bias=False),
}


@pytest.mark.parametrize("variant", HAND_WRITTEN)
def test_vit_around_multihead_attention_computes_the_same(variant: str, tmp_path: Path) -> None:
    peer = drawn(HAND_WRITTEN[variant]())
    torch.save({"model": peer.stored(), "epoch": 3}, tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match=r"model\.heads"):
        open_model(tmp_path / "weights.pt")
    report = assert_equal_function(
        tmp_path / "weights.pt", peer, peer, SIZE, OTHER, tensors=peer.stored, heads=HEADS
    )
    assert report.layout == "PyTorch ViT"
    assumed = "\n".join(report.assumed)
    assert "block_norm=before" in assumed and "activation=gelu" in assumed
    with pytest.raises(ConfigError, match="block_norm=after"):
        open_model(tmp_path / "weights.pt", heads=HEADS, block_norm="after")


class Encoder(nn.Module):
    """A ViT around torch's encoder."""

    def __init__(self, activation: str, normed: bool, first: bool) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.empty(1, 1, WIDTH))
        self.pos_embedding = nn.Parameter(torch.empty(1, CELLS + 1, WIDTH))
        self.conv_proj = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 80, activation=activation, batch_first=True, norm_first=first
        )
        norm = nn.LayerNorm(WIDTH) if normed else None
        self.encoder = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        self.fc = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv_proj(images)
        grid = (x.shape[-2], x.shape[-1])
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)
        return self.fc(self.encoder(with_positions(x, self.pos_embedding, grid, 1))[:, 0])


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("normed", [False, True])
def test_pre_norm_encoder_computes_the_same(activation: str, normed: bool, tmp_path: Path) -> None:
    peer = drawn(Encoder(activation, normed, first=True))
    torch.save(peer.state_dict(), tmp_path / "weights.pt")
    given: dict[str, Any] = {"heads": HEADS, "block_norm": "before", "activation": activation}
    assert_equal_function(tmp_path / "weights.pt", peer, peer, SIZE, OTHER, **given)


def test_encoder_whose_norm_is_unknown_is_refused_until_it_is_given(tmp_path: Path) -> None:
    """PyTorch's default is the post-norm encoder, which has the same tensors."""
    torch.save(Encoder("relu", True, first=False).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ConfigError) as error:
        open_model(tmp_path / "weights.pt", heads=HEADS)
    for part in ("model.block_norm=before", "norm_first=False", "post-norm", "model.activation"):
        assert part in str(error.value)
    with pytest.raises(ConfigError, match=r"block_norm=after is not possible.*post-norm"):
        open_model(tmp_path / "weights.pt", heads=HEADS, block_norm="after", activation="relu")


def test_patches_as_vectors_are_refused_with_the_way_out(tmp_path: Path) -> None:
    tensors = Encoder("relu", True, first=True).state_dict()
    tensors["conv_proj.weight"] = tensors["conv_proj.weight"].flatten(1)
    torch.save(tensors, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="192 numbers") as error:
        open_model(tmp_path / "weights.pt")
    assert "reshape" in str(error.value)


def test_layers_that_are_not_known_are_refused_by_name(tmp_path: Path) -> None:
    tensors = Encoder("relu", True, first=True).state_dict()
    tensors["extra.gate"] = torch.ones(3)
    torch.save(tensors, tmp_path / "weights.pt")
    given: dict[str, Any] = {"heads": HEADS, "block_norm": "before", "activation": "relu"}
    with pytest.raises(CheckpointError, match=r"extra\.gate"):
        open_model(tmp_path / "weights.pt", **given)


class Attention(nn.Module):
    """As in vit-pytorch; `fn` of older versions is a name alone."""

    def __init__(self, heads: int, head_width: int, bias: bool = True) -> None:
        super().__init__()
        inner = heads * head_width
        self.heads = heads
        self.norm = nn.LayerNorm(WIDTH)
        self.to_qkv = nn.Linear(WIDTH, 3 * inner, bias=False)
        projects = not (heads == 1 and head_width == WIDTH)
        out = nn.Linear(inner, WIDTH, bias=bias)
        self.to_out = nn.Sequential(out, nn.Dropout(0.1)) if projects else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in qkv)
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(dim=-1)
        return self.to_out(rearrange(weights @ v, "b h n d -> b n (h d)"))


class LucidrainsViT(nn.Module):
    """`ViT` of vit-pytorch, and `SimpleViT`, which adds sines and has no class token."""

    def __init__(
        self,
        heads: int = HEADS,
        head_width: int = 64,
        *,
        channels: int = 3,
        simple: bool = False,
        normed: bool = True,
        last_norm: bool = True,
    ) -> None:
        super().__init__()
        self.simple, self.last_norm = simple, last_norm
        vector = channels * PATCH * PATCH
        norms = (nn.LayerNorm(vector), nn.LayerNorm(WIDTH)) if normed else (None, None)
        layers = [nn.Identity(), norms[0], nn.Linear(vector, WIDTH), norms[1]]
        self.to_patch_embedding = nn.Sequential(*(layer for layer in layers if layer is not None))
        if not simple:
            self.pos_embedding = nn.Parameter(torch.empty(1, CELLS + 1, WIDTH))
            self.cls_token = nn.Parameter(torch.empty(1, 1, WIDTH))
        self.transformer = nn.Module()
        self.transformer.layers = nn.ModuleList()
        for _ in range(2):
            attention = Attention(heads, head_width, bias=not simple)
            first = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 80), nn.GELU()]
            drop = [] if simple else [nn.Dropout(0.1)]
            mlp = nn.Module()
            mlp.net = nn.Sequential(*first, *drop, nn.Linear(80, WIDTH))
            self.transformer.layers.append(nn.ModuleList([attention, mlp]))
        norm, head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        if last_norm:
            self.transformer.norm = norm
        name = "linear_head" if simple else "mlp_head"
        setattr(self, name, head if last_norm else nn.Sequential(norm, head))

    def forward(self, images: Tensor) -> Tensor:
        pixels = rearrange(images, "b c (y p) (x q) -> b y x (p q c)", p=PATCH, q=PATCH)
        grid = (pixels.shape[1], pixels.shape[2])
        x = self.to_patch_embedding(pixels).flatten(1, 2)
        if self.simple:
            x = x + sines(grid).to(x)
        else:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
            x = with_positions(x, self.pos_embedding, grid, 1)
        for attention, mlp in self.transformer.layers:  # type: ignore[union-attr, misc]
            x = x + attention(x)
            x = x + mlp.net(x)
        x = self.transformer.norm(x) if self.last_norm else x  # type: ignore[operator]
        return self.linear_head(x.mean(dim=1)) if self.simple else self.mlp_head(x[:, 0])


def sines(grid: tuple[int, int]) -> Tensor:
    y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float32) for n in grid), indexing="ij")
    omega = 1 / 10_000 ** (torch.arange(WIDTH // 4) / (WIDTH // 4 - 1))
    y, x = y.flatten()[:, None] * omega, x.flatten()[:, None] * omega
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)[None]


def same(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors


def without_axes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Token and table as the latest versions store them."""
    flat = {"pos_embedding", "cls_token"}
    return {name: t[0] if name in flat else t for name, t in tensors.items()}


def wrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of versions that put norms around attention and MLP (PreNorm)."""
    result = {}
    for name, tensor in tensors.items():
        for old, new in (("to_qkv", "fn.to_qkv"), ("to_out", "fn.to_out"), ("net.0", "norm")):
            name = name.replace(old, new)
        name = name.replace("net.1", "fn.net.0").replace("net.4", "fn.net.3")
        result[name] = tensor
    return result


def one_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of SimpleViT, whose projection is a layer of its own."""
    return {name.replace("to_out.0", "to_out"): tensor for name, tensor in tensors.items()}


Translate = Callable[[dict[str, Tensor]], dict[str, Tensor]]
LUCIDRAINS: dict[str, tuple[dict[str, Any], Translate, dict[str, Any]]] = {
    "current": ({}, same, {}),
    "latest": ({}, without_axes, {}),
    "heads of another width": ({"head_width": 8}, same, {"heads": HEADS}),
    "a single head": ({"heads": 1, "head_width": WIDTH}, same, {}),
    "one channel": ({"channels": 1}, same, {}),
    "norm in the head": ({"last_norm": False}, same, {}),
    "wrapped, patches without norms": ({"normed": False, "last_norm": False}, wrapped, {}),
    "SimpleViT": ({"simple": True}, one_layer, {"trained_size": 32}),
    "older SimpleViT": (
        {"simple": True, "last_norm": False, "normed": False},
        one_layer,
        {"trained_size": 32},
    ),
}


@pytest.mark.parametrize("variant", LUCIDRAINS)
def test_vit_pytorch_computes_the_same(variant: str, tmp_path: Path) -> None:
    options, translate, given = LUCIDRAINS[variant]
    peer = drawn(LucidrainsViT(**options))

    def stored() -> dict[str, Tensor]:
        return translate(dict(peer.state_dict()))

    torch.save(stored(), tmp_path / "weights.pt")
    # Sines are computed in 32 bits on both sides, in another order.
    double = 1e-5 if options.get("simple") else 1e-9
    report = assert_equal_function(
        tmp_path / "weights.pt", peer, peer, SIZE, OTHER, tensors=stored, double=double, **given
    )
    assert report.layout == "vit-pytorch"
    assumed = "\n".join(report.assumed)
    assert ("dim_head is 64" in assumed) == (
        variant not in ("heads of another width", "a single head")
    )
    assert "patch_size=8" in assumed


def test_mean_of_vit_pytorch_is_refused(tmp_path: Path) -> None:
    """It averages the class token as well."""
    torch.save(drawn(LucidrainsViT()).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match="pool=mean is not possible"):
        open_model(tmp_path / "weights.pt", pool="mean")
