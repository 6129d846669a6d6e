"""Which layout a file has, told by the names of its tensors alone, and the way from it to ours."""

import re
from collections.abc import Collection, Mapping
from typing import Literal

from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.formats import (
    deit,
    dino,
    google,
    huggingface,
    mae,
    mmpretrain,
    official,
    timm,
    torchvision,
)
from vision.checkpoints.formats.rules import Converted

Layout = Literal[
    "vision",
    "timm ViT",
    "timm Swin",
    "official Swin",
    "DeiT",
    "DINO",
    "MAE",
    "torchvision ViT",
    "torchvision Swin",
    "Hugging Face",
    "Google npz",
    "mmpretrain",
]

_REFUSED = (
    # Before CLIP: a ResNet has a conv1.weight too.
    (r"encoder\.block\.0\..*|conv_stem\..*|layer1\.0\.conv1\.weight", "a convolutional network"),
    (
        r"(.*\.)?transformer\.layers\.0\.0\.(fn\.)?to_qkv\.weight",
        "a ViT of vit-pytorch (lucidrains). It norms patches before and after their projection and "
        "has no biases for queries, keys and values; no ViT of this project computes the same",
    ),
    (
        r"stages\.0\.blocks\.0\.attn\.meta_mlp\..*",
        "timm's swinv2_cr, another network than Swin V2 in spite of its name. "
        "Use it as a baseline: model=timm model.name=swinv2_cr_tiny_224",
    ),
    (r"(visual\.)?(class_embedding|conv1\.weight|ln_pre\..*)", "a CLIP model"),
    (r"attn_pool\..*|.*MAPHead_0/.*", "a model with attention pooling, such as SigLIP"),
    (r"conv_root/.*|patch_embed\.backbone\..*", "a hybrid of a ResNet and a ViT"),
    (r"blocks\.0\.attn\.relative_position_bias_table|rel_pos_bias\..*", "a BEiT"),
)
"""What is told from a ViT or Swin to say what it is."""


def recognise(names: Collection[str]) -> Layout:
    """The layout of a file with these tensors, or an error that says what the file is."""
    lines = "\n".join(names)  # one search is quicker than one for every name

    def named(pattern: str) -> str | None:
        found = re.search(f"^(?:{pattern})$", lines, re.MULTILINE)
        return None if found is None else found[0]

    def has(pattern: str) -> bool:
        return named(pattern) is not None

    for pattern, what in _REFUSED:
        if (name := named(pattern)) is not None:
            raise CheckpointError(f"The weights are those of {what} (tensor '{name}').")

    if has(r"(.*/)?embedding/kernel"):
        return "Google npz"
    if has(r"features\.1\.0\.attn\.qkv\.weight"):
        return "torchvision Swin"
    if has(r"encoder\.layers\.encoder_layer_0\..*"):
        return "torchvision ViT"
    if has(r"(\w+\.)?embeddings\.patch_embeddings\.projection\.weight"):
        return "Hugging Face"
    if has(r"(backbone\.)?(layers\.0\.ln1\.weight|stages\.0\.blocks\.0\.attn\.w_msa\..*)"):
        return "mmpretrain"
    if has(r"layers\.0\.blocks\.0\.attn\.qkv\.weight"):
        return _swin(has(r"patch_norm\..*"), has(r"layers\.0\.downsample\..*"), names)
    if has(r"blocks\.0\.attn\.qkv\.weight"):
        return _vit(names)
    some = ", ".join(f"'{name}'" for name in sorted(names)[:5])
    raise CheckpointError(
        f"The weights are of no known ViT or Swin: none of the {len(names)} tensors has a name "
        f"that tells the layout (the first ones: {some})."
    )


def _swin(ours: bool, merging_at_the_end: bool, names: Collection[str]) -> Layout:
    if ours:
        return "vision"
    # Not by the head's name: a file without head, or one of timm 0.9 with buffers, would be wrong.
    several_stages = any(name.startswith("layers.1.") for name in names)
    if merging_at_the_end or (not several_stages and "head.fc.weight" not in names):
        return "official Swin"
    return "timm Swin"


def _vit(names: Collection[str]) -> Layout:
    if any(name.startswith("positions.") for name in names):
        return "vision"
    if "blocks.0.gamma_1" in names:
        return "DeiT"
    if any(name.startswith("decoder_") for name in names):
        return "MAE"
    if any(
        name in ("mask_token", "register_tokens", "linear_head.weight")
        or re.fullmatch(r"blocks\.0\.mlp\.w12\.weight|head\.(mlp|last_layer)\..*", name)
        for name in names
    ):
        return "DINO"
    return "timm ViT"


def convert_names(layout: Layout, tensors: Mapping[str, Tensor]) -> Converted:
    """Tensors of a layout under this project's names."""
    match layout:
        case "vision":
            return Converted(dict(tensors))
        case "timm ViT":
            return timm.vit_to_ours(tensors)
        case "timm Swin":
            return timm.swin_to_ours(tensors)
        case "official Swin":
            return official.to_ours(tensors)
        case "DeiT":
            return deit.to_ours(tensors)
        case "DINO":
            return dino.to_ours(tensors)
        case "MAE":
            return mae.to_ours(tensors)
        case "torchvision ViT":
            return torchvision.vit_to_ours(tensors)
        case "torchvision Swin":
            return torchvision.swin_to_ours(tensors)
        case "Hugging Face":
            return huggingface.to_ours(tensors)
        case "Google npz":
            return google.to_ours(tensors)
        case "mmpretrain":
            return mmpretrain.to_ours(tensors)
