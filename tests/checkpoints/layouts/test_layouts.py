"""Layouts of projects that are not installed: timm's tensors, renamed by mappings written here."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from foreign_models import CLASSES, assert_opens, drawn
from timm.layers import SwiGLUPacked
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.open import open_model

Tensors = dict[str, Tensor]
Arrays = dict[str, np.ndarray[Any, Any]]
HEADS = 3


def vit(**options: Any) -> VisionTransformer:
    small: dict[str, Any] = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 48,
        "depth": 3,
        "num_heads": HEADS,
        "num_classes": CLASSES,
    }
    return drawn(VisionTransformer(**(small | options)))


def swin(second: bool = False, **options: Any) -> nn.Module:
    small: dict[str, Any] = {
        "img_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": (2, 3, 2),
        "num_heads": (2, 2, 4),
        "window_size": 4,
        "num_classes": CLASSES,
    }
    return drawn((SwinTransformerV2 if second else SwinTransformer)(**(small | options)))


def as_google(
    tensors: Tensors, *, old: bool, table: str, prefix: str = "", stacked: bool = False
) -> Arrays:
    """JAX's view of a ViT: kernels with the output last, heads as axes of their own."""
    attention, norm, mlp = (
        ("MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")
        if old
        else ("MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")
    )
    arrays: Arrays = {}

    def put(name: str, tensor: Tensor) -> None:
        arrays[name] = tensor.detach().numpy()

    put("embedding/kernel", tensors["patch_embed.proj.weight"].permute(2, 3, 1, 0))
    put("embedding/bias", tensors["patch_embed.proj.bias"])
    if "cls_token" in tensors:
        put("cls", tensors["cls_token"])
    put(table, tensors["pos_embed"])
    final = "fc_norm" if "fc_norm.weight" in tensors else "norm"
    put("Transformer/encoder_norm/scale", tensors[f"{final}.weight"])
    put("Transformer/encoder_norm/bias", tensors[f"{final}.bias"])
    put("head/kernel", tensors["head.weight"].T)
    put("head/bias", tensors["head.bias"])
    for i in range(3):
        block, theirs = f"blocks.{i}", f"Transformer/encoderblock_{i}"
        for ours, name in (("norm1", "LayerNorm_0"), ("norm2", norm)):
            put(f"{theirs}/{name}/scale", tensors[f"{block}.{ours}.weight"])
            put(f"{theirs}/{name}/bias", tensors[f"{block}.{ours}.bias"])
        width = tensors["pos_embed"].shape[-1]
        for j, part in enumerate(("query", "key", "value")):
            rows = slice(j * width, (j + 1) * width)
            weight = tensors[f"{block}.attn.qkv.weight"][rows].T.reshape(width, HEADS, -1)
            put(f"{theirs}/{attention}/{part}/kernel", weight)
            bias = tensors[f"{block}.attn.qkv.bias"][rows].reshape(HEADS, -1)
            put(f"{theirs}/{attention}/{part}/bias", bias)
        out = tensors[f"{block}.attn.proj.weight"].T.reshape(HEADS, -1, width)
        put(f"{theirs}/{attention}/out/kernel", out)
        put(f"{theirs}/{attention}/out/bias", tensors[f"{block}.attn.proj.bias"])
        for j in (0, 1):
            put(f"{theirs}/{mlp}/Dense_{j}/kernel", tensors[f"{block}.mlp.fc{j + 1}.weight"].T)
            put(f"{theirs}/{mlp}/Dense_{j}/bias", tensors[f"{block}.mlp.fc{j + 1}.bias"])
    if stacked:
        arrays = _stacked(arrays)
    return {f"{prefix}{name}": array for name, array in arrays.items()}


HIDDEN = 48  # as wide as the model: only the tensors say that the layer is there


def hidden_layer() -> nn.Linear:
    return drawn(nn.Linear(48, HIDDEN), seed=5)


def as_torchvision(tensors: Tensors) -> Tensors:
    """timm's names of a plain ViT in torchvision's."""
    return rename(
        tensors,
        (r"^cls_token", "class_token"),
        (r"^pos_embed", "encoder.pos_embedding"),
        (r"^patch_embed\.proj", "conv_proj"),
        (r"^norm\.", "encoder.ln."),
        (r"^blocks\.(\d+)", r"encoder.layers.encoder_layer_\1"),
        (r"\.norm(\d)", r".ln_\1"),
        (r"attn\.qkv\.", "self_attention.in_proj_"),
        (r"attn\.proj", "self_attention.out_proj"),
        (r"mlp\.fc1", "mlp.0"),
        (r"mlp\.fc2", "mlp.3"),
        (r"^head\.", "heads.head."),
    )


def _with(prefix: str, translate: Callable[[Tensors], Tensors]) -> Callable[[Tensors], Any]:
    """A file of tensors with the hidden layer under a name."""

    def named(tensors: Tensors) -> Tensors:
        own = {f"{prefix}.{name}": t for name, t in hidden_layer().state_dict().items()}
        return translate(tensors) | own

    return named


HIDDEN_LAYERS: dict[str, Callable[[Tensors], Any]] = {
    "timm": _with("pre_logits.fc", dict),
    "timm, in the head": _with("head.pre_logits.fc", dict),
    "torchvision": _with("heads.pre_logits", as_torchvision),
    "mmpretrain": _with("head.layers.pre_logits", lambda tensors: mm_vit(tensors)),
}


class WithHidden(nn.Module):
    """A ViT with a hidden layer and tanh between pooling and head (the ViT paper's pretraining)."""

    def __init__(self, peer: Any) -> None:
        super().__init__()
        self.peer, self.hidden = peer, hidden_layer()

    def forward(self, images: Tensor) -> Tensor:
        pooled = self.peer.forward_head(self.peer.forward_features(images), pre_logits=True)
        return self.peer.head(torch.tanh(self.hidden(pooled)))


@pytest.mark.parametrize("project", HIDDEN_LAYERS)
def test_hidden_layer_before_the_head_is_used(project: str, tmp_path: Path) -> None:
    peer = vit()
    torch.save(HIDDEN_LAYERS[project](peer.state_dict()), tmp_path / "weights.pth")
    assert_opens(tmp_path / "weights.pth", WithHidden(peer), (32, 32), heads=HEADS)


def test_hidden_layer_in_an_npz_of_google_is_used(tmp_path: Path) -> None:
    peer, hidden = vit(), hidden_layer()
    arrays = as_google(peer.state_dict(), old=True, table=OLD_TABLE)
    weight, bias = (t.detach().numpy() for t in (hidden.weight, hidden.bias))
    arrays |= {"pre_logits/kernel": weight.T, "pre_logits/bias": bias}
    np.savez(tmp_path / "weights.npz", **arrays)
    assert_opens(tmp_path / "weights.npz", WithHidden(peer), (32, 32))


def _stacked(arrays: Arrays) -> Arrays:
    first = "Transformer/encoderblock_0/"
    result = {n: a for n, a in arrays.items() if "encoderblock_" not in n}
    for name in arrays:
        if name.startswith(first):
            layers = [arrays[name.replace("block_0", f"block_{i}")] for i in range(3)]
            result[name.replace("encoderblock_0", "encoderblock")] = np.stack(layers)
    return result


OLD_TABLE = "Transformer/posembed_input/pos_embedding"
GOOGLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "original": ({}, {"old": True, "table": OLD_TABLE}),
    "big_vision": (
        {"no_embed_class": True},
        {"old": False, "table": "pos_embedding", "prefix": "params/"},
    ),
    "big_vision, mean": (
        {"global_pool": "avg", "class_token": False, "fc_norm": False},
        {"old": False, "table": "pos_embedding", "prefix": "params/img/"},
    ),
    "optimiser's target": (
        {},
        {"old": True, "table": OLD_TABLE, "prefix": "opt/target/"},
    ),
    "stacked": (
        {"no_embed_class": True},
        {"old": False, "table": "pos_embedding", "prefix": "params/", "stacked": True},
    ),
}


@pytest.mark.parametrize("layout", GOOGLE)
def test_npz_of_google_opens_with_the_same_logits(layout: str, tmp_path: Path) -> None:
    options, written = GOOGLE[layout]
    peer = vit(**options)
    arrays = as_google(peer.state_dict(), **written)
    if written.get("prefix") == "params/img/":
        arrays["params/txt/head/kernel"] = np.ones((4, 4), dtype=np.float32)
    np.savez(tmp_path / "weights.npz", **arrays)
    report = assert_opens(tmp_path / "weights.npz", peer, (32, 32))  # the kernels tell the heads
    assert report.layout == "Google npz"
    found = open_model(tmp_path / "weights.npz")
    assert found.preprocess.mean == (0.5, 0.5, 0.5)


def test_npz_without_a_table_is_a_plain_vit_with_sines(tmp_path: Path) -> None:
    tensors = vit(global_pool="avg", class_token=False, fc_norm=False).state_dict()
    arrays = as_google(tensors, old=False, table="pos_embedding", prefix="params/")
    del arrays["params/pos_embedding"]
    np.savez(tmp_path / "weights.npz", **arrays)
    found = open_model(tmp_path / "weights.npz")
    assert (found.config.positions, found.config.pool) == ("sincos2d", "mean")  # type: ignore
    assert any("sincos2d" in line for line in found.report.assumed)


def rename(tensors: Tensors, *rules: tuple[str, str]) -> Tensors:
    """Names changed by regular expressions, one after the other."""
    result = {}
    for name, tensor in tensors.items():
        for pattern, new in rules:
            name = re.sub(pattern, new, name)
        result[name] = tensor
    return result


def deit3(tensors: Tensors) -> Tensors:
    return rename(tensors, (r"ls(\d)\.gamma", r"gamma_\1"))


def dinov2(tensors: Tensors) -> Tensors:
    """Meta's file: a row for the class token, none for registers; a token for masked patches."""
    found = rename(tensors, (r"^reg_token", "register_tokens"), (r"mlp\.fc1", "mlp.w12"))
    found = rename(found, (r"mlp\.fc2", "mlp.w3"))
    row = torch.full_like(found["cls_token"], 0.25)
    found["cls_token"] = found["cls_token"] - row
    found["pos_embed"] = torch.cat([row, found["pos_embed"]], dim=1)
    return found | {"mask_token": torch.ones(1, 48)}


def mae(tensors: Tensors) -> Tensors:
    decoder = {"decoder_embed.weight": torch.ones(8, 48), "decoder_pos_embed": torch.ones(1, 17, 8)}
    return tensors | {"mask_token": torch.ones(1, 1, 8)} | decoder


def mm_vit(tensors: Tensors) -> Tensors:
    return rename(
        tensors,
        (r"patch_embed\.proj", "patch_embed.projection"),
        (r"^blocks", "layers"),
        (r"^norm\.", "ln1."),
        (r"^fc_norm\.", "ln2."),
        (r"\.norm(\d)", r".ln\1"),
        (r"mlp\.fc1", "ffn.layers.0.0"),
        (r"mlp\.fc2", "ffn.layers.1"),
        (r"ls1\.gamma", "attn.gamma1.weight"),
        (r"ls2\.gamma", "ffn.gamma2.weight"),
        (r"^(?!head)", "backbone."),
        (r"^head", "head.layers.head"),
    )


VITS: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], str]] = {
    "DeiT-III": ({"no_embed_class": True, "init_values": 0.1}, deit3, "DeiT"),
    "DINOv2": (
        {
            "reg_tokens": 4,
            "no_embed_class": True,
            "init_values": 0.1,
            "mlp_layer": SwiGLUPacked,
            "act_layer": nn.SiLU,
            "mlp_ratio": 5,
        },
        dinov2,
        "DINO",
    ),
    "MAE": ({}, mae, "MAE"),
    "mmpretrain": ({"init_values": 0.1}, mm_vit, "mmpretrain"),
    "mmpretrain, mean": ({"global_pool": "avg"}, mm_vit, "mmpretrain"),
}


@pytest.mark.parametrize("layout", VITS)
def test_vit_of_another_project_opens_with_the_same_logits(layout: str, tmp_path: Path) -> None:
    options, translate, name = VITS[layout]
    peer = vit(**options)
    torch.save({"state_dict": translate(peer.state_dict())}, tmp_path / "weights.pth")
    report = assert_opens(tmp_path / "weights.pth", peer, (32, 32), heads=HEADS)
    assert report.layout == name


def test_dino_backbone_without_head_gives_the_features_of_timm(tmp_path: Path) -> None:
    peer = vit(num_classes=0)
    tensors = {f"module.backbone.{name}": t for name, t in peer.state_dict().items()}
    tensors |= {"module.head.mlp.0.weight": torch.ones(4, 48)}
    torch.save({"student": tensors, "teacher": tensors, "epoch": 3}, tmp_path / "weights.pth")
    assert_opens(tmp_path / "weights.pth", peer, (32, 32), heads=HEADS)


def official(tensors: Tensors) -> Tensors:
    def stage(match: re.Match[str]) -> str:
        return f"layers.{int(match[1]) - 1}.downsample"

    found = {
        re.sub(r"layers\.(\d+)\.downsample", stage, name).replace("head.fc.", "head."): tensor
        for name, tensor in tensors.items()
    }
    found["layers.0.blocks.1.attn_mask"] = torch.zeros(16, 16, 16)
    for block in range(2):
        index = torch.zeros(16, 16, dtype=torch.int64)
        found[f"layers.0.blocks.{block}.attn.relative_position_index"] = index
    return found


def coordinates(window: int, trained: int) -> Tensor:
    """The official table of log-spaced offsets."""
    axis = torch.arange(-(window - 1), window).float() / (trained - 1) * 8
    table = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), dim=-1)[None]
    return table.sign() * torch.log2(table.abs() + 1) / 3


def mm_swin(tensors: Tensors) -> Tensors:
    second = any("logit_scale" in name for name in tensors)
    result = {}
    for name, tensor in official(tensors).items():
        for old, new in (
            (r"^layers", "stages"),
            (r"patch_embed\.proj", "patch_embed.projection"),
            (r"\.attn\.", ".attn.w_msa."),
            (r"mlp\.fc1", "ffn.layers.0.0"),
            (r"mlp\.fc2", "ffn.layers.1"),
            (r"^norm\.", "norm2."),
        ):
            name = re.sub(old, new, name)
        if "downsample.reduction" in name or ("downsample.norm" in name and not second):
            parts = tensor.reshape(*tensor.shape[:-1], 4, -1)[..., [0, 2, 1, 3], :]
            tensor = parts.transpose(-1, -2).reshape(tensor.shape)
        name = re.sub(r"^head", "head.fc", name) if name.startswith("head") else f"backbone.{name}"
        result[name] = tensor
    return result


@pytest.mark.parametrize("translate", [official, mm_swin])
@pytest.mark.parametrize("second", [False, True])
def test_swin_of_another_project_opens_with_the_same_logits(
    second: bool, translate: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    peer = swin(second)
    torch.save({"model": translate(peer.state_dict())}, tmp_path / "weights.pth")
    given = {"window": 4} if second else {}
    report = assert_opens(tmp_path / "weights.pth", peer, (32, 32), **given)
    assert report.layout == ("official Swin" if translate is official else "mmpretrain")


def test_official_swin_v2_tells_its_windows_by_its_tables(tmp_path: Path) -> None:
    peer = swin(True, window_size=8, pretrained_window_sizes=(6, 6, 3))
    buffers = ("attn_mask", "relative_position_index")  # of windows of 4
    tensors = official(peer.state_dict())
    tensors = {name: t for name, t in tensors.items() if not name.endswith(buffers)}
    for stage, (window, trained) in enumerate([(8, 6), (8, 6), (4, 3)]):
        table = coordinates(window, trained)
        tensors[f"layers.{stage}.blocks.0.attn.relative_coords_table"] = table
    torch.save({"model": tensors}, tmp_path / "weights.pth")
    assert_opens(tmp_path / "weights.pth", peer, (32, 32))
    found = open_model(tmp_path / "weights.pth").config
    assert (found.window, found.pretrained_window) == (8, (6, 6, 3))  # type: ignore[union-attr]


def test_timm_swin_without_head_is_not_taken_for_the_official_layout(tmp_path: Path) -> None:
    peer = swin(num_classes=0)
    tensors = {n: t for n, t in peer.state_dict().items() if not n.startswith("head.")}
    tensors["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(16, 16).long()
    torch.save(tensors, tmp_path / "weights.pth")
    report = assert_opens(tmp_path / "weights.pth", peer, (32, 32))
    assert report.layout == "timm Swin"


@pytest.mark.parametrize("name", ["swinv2_cr_tiny_224", "swinv2_cr_small_ns_224"])
def test_another_network_with_swins_name_is_refused_with_what_works(name: str) -> None:
    with torch.device("meta"):
        tensors = timm.create_model(name).state_dict()
    with pytest.raises(CheckpointError, match="swinv2_cr") as error:
        open_model(tensors)
    assert "model=timm model.name=swinv2_cr_" in str(error.value)


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["stages.0.blocks.0.attn.meta_mlp.fc1.weight"], "swinv2_cr"),
        (["blocks.0.attn.qkv.weight", "blocks.0.attn.gate.weight"], "another kind of attention"),
        (["blocks.0.in_proj.weight"], "parallel branches"),
        (["conv1.weight", "layer1.0.conv1.weight"], "convolutional"),
        (["something.else"], "known ViT or Swin"),
    ],
)
def test_weights_of_another_network_are_refused_by_name(
    names: list[str], what: str, tmp_path: Path
) -> None:
    torch.save({name: torch.ones(2, 2) for name in names}, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=what) as error:
        open_model(tmp_path / "weights.pth")
    assert str(tmp_path / "weights.pth") in str(error.value)
    assert "model=timm model.name=" in str(error.value)
