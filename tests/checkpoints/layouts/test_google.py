"""SigLIP in big_vision's files, against the same weights in transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from foreign_models import assert_equal_function, drawn
from torch import Tensor

TINY: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": 8,
}


def as_big_vision(tensors: dict[str, Tensor], heads: int, prefix: str) -> dict[str, Tensor]:
    """A SigLIP of transformers by big_vision's names, in JAX's axes."""
    found: dict[str, Tensor] = {}

    def norm(ours: str, theirs: str) -> None:
        found[f"{theirs}/scale"] = tensors[f"{ours}.weight"]
        found[f"{theirs}/bias"] = tensors[f"{ours}.bias"]

    def dense(ours: str, theirs: str) -> None:
        found[f"{theirs}/kernel"] = tensors[f"{ours}.weight"].T
        found[f"{theirs}/bias"] = tensors[f"{ours}.bias"]

    def attention(theirs: str, parts: list[tuple[Tensor, Tensor]], out: str) -> None:
        for name, (weight, bias) in zip(("query", "key", "value"), parts, strict=True):
            found[f"{theirs}/{name}/kernel"] = weight.T.reshape(len(weight), heads, -1)
            found[f"{theirs}/{name}/bias"] = bias.reshape(heads, -1)
        weight = tensors[f"{out}.weight"]
        found[f"{theirs}/out/kernel"] = weight.T.reshape(heads, -1, len(weight))
        found[f"{theirs}/out/bias"] = tensors[f"{out}.bias"]

    patches = tensors["embeddings.patch_embedding.weight"]
    found["embedding/kernel"] = patches.permute(2, 3, 1, 0)
    found["embedding/bias"] = tensors["embeddings.patch_embedding.bias"]
    found["pos_embedding"] = tensors["embeddings.position_embedding.weight"][None]
    norm("post_layernorm", "Transformer/encoder_norm")
    for i in range(TINY["num_hidden_layers"]):
        ours, theirs = f"encoder.layers.{i}", f"Transformer/encoderblock_{i}"
        norm(f"{ours}.layer_norm1", f"{theirs}/LayerNorm_0")
        norm(f"{ours}.layer_norm2", f"{theirs}/LayerNorm_1")
        names = [f"{ours}.self_attn.{part}_proj" for part in "qkv"]
        parts = [(tensors[f"{n}.weight"], tensors[f"{n}.bias"]) for n in names]
        out = f"{ours}.self_attn.out_proj"
        attention(f"{theirs}/MultiHeadDotProductAttention_0", parts, out)
        for j in (0, 1):
            dense(f"{ours}.mlp.fc{j + 1}", f"{theirs}/MlpBlock_0/Dense_{j}")
    joined = [tensors[f"head.attention.in_proj_{kind}"].chunk(3) for kind in ("weight", "bias")]
    pairs = list(zip(*joined, strict=True))
    attention("MAPHead_0/MultiHeadDotProductAttention_0", pairs, "head.attention.out_proj")
    found["MAPHead_0/probe"] = tensors["head.probe"]
    norm("head.layernorm", "MAPHead_0/LayerNorm_0")
    for j in (0, 1):
        dense(f"head.mlp.fc{j + 1}", f"MAPHead_0/MlpBlock_0/Dense_{j}")
    return {f"{prefix}{name}": tensor for name, tensor in found.items()}


@pytest.mark.parametrize("prefix", ["params/img/", "img/"])
def test_siglip_of_big_vision_computes_the_same(prefix: str, tmp_path: Path) -> None:
    peer = drawn(transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**TINY)))

    def pooled(images: Tensor) -> Tensor:
        return peer(images, interpolate_pos_encoding=True).pooler_output

    def stored() -> dict[str, Tensor]:
        tower = as_big_vision(peer.state_dict(), 3, prefix)
        return tower | {prefix.replace("img/", "txt/x"): torch.ones(2)}

    path = tmp_path / "weights.npz"
    np.savez(path, **{name: tensor.detach().numpy() for name, tensor in stored().items()})
    report = assert_equal_function(path, pooled, peer, (32, 32), (48, 40), tensors=stored)
    assert report.layout == "Google npz"
    assert "image tower" in report.ignored[prefix.replace("img/", "txt/x")]
