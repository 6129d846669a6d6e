"""Which layout a file has, recognised by the names of its tensors alone, and the way to ours."""

import re
from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Literal

from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.layouts.rules import Converted

Layout = Literal[
    "vision",
    "timm ViT",
    "timm Swin",
    "official Swin",
    "DeiT",
    "DINO",
    "DINOv3",
    "MAE",
    "torchvision ViT",
    "torchvision Swin",
    "Hugging Face",
    "Google npz",
    "mmpretrain",
    "BEiT",
    "CLIP",
    "CLIP with timm's tower",
    "vit-pytorch",
    "PyTorch ViT",
]

CONVERTERS: dict[Layout, str] = {
    "timm ViT": "timm.timm_names.vit_to_ours",
    "timm Swin": "timm.timm_names.swin_to_ours",
    "official Swin": "official.to_ours",
    "DeiT": "deit.to_ours",
    "DINO": "dino.to_ours",
    "DINOv3": "dinov3.to_ours",
    "MAE": "mae.to_ours",
    "torchvision ViT": "torchvision.vit_to_ours",
    "torchvision Swin": "torchvision.swin_to_ours",
    "Hugging Face": "huggingface.huggingface_names.to_ours",
    "Google npz": "google.to_ours",
    "mmpretrain": "mmpretrain.to_ours",
    "BEiT": "beit.to_ours",
    "CLIP": "openclip.to_ours",
    "vit-pytorch": "vit_pytorch.to_ours",
    "PyTorch ViT": "students.to_ours",
}
"""The function of each layout; its module is imported when a file has that layout."""
HEADS: dict[Layout, str] = {
    "timm ViT": "head",
    "DeiT": "head",
    "DINO": "head",
    "MAE": "head",
    "vision": "head",
    "official Swin": "head",
    "timm Swin": "head.fc",
}
"""Names of the classifier in layouts whose networks give what it takes: pooled, normed features."""

STUDENT = r"(?:\w+\.)*?(\d+)\.(?:\w+\.)*in_proj_weight"
"""A tensor that every ViT around torch's own modules has."""
TYPES = "(vit|deit|dinov2|dinov2_with_registers|swin|swinv2|beit|data2vec_vision|vision_model)"
"""What stands in front of the names of a model of Hugging Face that has a head."""
_REFUSED = (
    # Before CLIP: a ResNet has a conv1.weight too.
    (
        r"visual\.(trunk\.)?layer1\.0\.conv1\.weight",
        "a CLIP whose image tower is a ResNet. Open one with a ViT, such as ViT-B-32",
    ),
    (r"encoder\.block\.0\..*|conv_stem\..*|layer1\.0\.conv1\.weight", "a convolutional network"),
    (
        r"stages\.0\.blocks\.0\.attn\.meta_mlp\..*",
        "timm's swinv2_cr, another network than Swin V2 in spite of its name, such as "
        "model=timm model.name=swinv2_cr_tiny_224",
    ),
    (r"conv_root/.*|patch_embed\.backbone\..*", "a hybrid of a convolutional network and a ViT"),
    (r"blocks\.0\.(in_proj|attns\.0)\..*", "a ViT with parallel branches"),
    (
        r"blocks\.0\.attn\.(gate|rel_pos_h|rel_pos)(\..*)?|shared_rel_pos\..*",
        "a ViT with another kind of attention",
    ),
    (r"embeds\.pos_embed_[xy]", "a NaFlexVit whose rows and columns have tables of their own"),
)
"""Networks that are recognised in order to say what they are."""
_REMEDY = "A model that timm has runs as a baseline: model=timm model.name=… (timm's name for it)."


def recognise(names: Collection[str]) -> Layout:
    """The layout of a file with these tensors, or an error that says what the file is."""
    lines = "\n".join(names)  # one search is quicker than one for every name

    def named(pattern: str) -> str | None:
        found = re.search(f"^(?:{pattern})$", lines, re.MULTILINE)
        return None if found is None else found[0]

    def has(pattern: str) -> bool:
        return named(pattern) is not None

    if has(r"blocks\.0\.attn\.q_bias") and has(r"mask_token|lm_head\.weight"):
        return "BEiT"
    for pattern, what in _REFUSED:
        if (name := named(pattern)) is not None:
            raise CheckpointError(f"The weights are those of {what} (tensor '{name}'). {_REMEDY}")

    if has(r"(.*/)?embedding/kernel"):
        return "Google npz"
    if has(r"features\.1\.0\.attn\.qkv\.weight"):
        return "torchvision Swin"
    if has(r"encoder\.layers\.encoder_layer_0\..*"):
        return "torchvision ViT"
    if has(rf"({TYPES}\.)?embeddings\.patch_embedding(s|s\.projection)?\.weight"):
        return "Hugging Face"
    if has(r"(visual\.)?transformer\.resblocks\.0\.attn\.in_proj_weight") and has(
        r"(visual\.)?class_embedding"
    ):
        return "CLIP"
    if has(r"visual\.trunk\.patch_embed\.proj\.weight"):
        return "CLIP with timm's tower"
    if has(r"transformer\.layers\.0\.0\.(fn\.){0,2}to_qkv\.weight"):
        return "vit-pytorch"
    if has(r"(backbone\.)?(layers\.0\.ln1\.weight|stages\.0\.blocks\.0\.attn\.w_msa\..*)"):
        return "mmpretrain"
    if has(r"layers\.0\.blocks\.0\.attn\.qkv\.weight"):
        return _swin(has(r"patch_norm\..*"), has(r"layers\.0\.downsample\..*"), names)
    if has(r"blocks\.0\.attn\.(qkv|q_proj)\.weight"):
        return _vit(names)
    if has(STUDENT):
        return "PyTorch ViT"
    some = ", ".join(f"'{name}'" for name in sorted(names)[:5])
    raise CheckpointError(
        f"The weights are not those of a known ViT or Swin: none of the {len(names)} tensors has a "
        f"name that shows the layout (the first ones: {some}). {_REMEDY}"
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
    def has(*wanted: str) -> bool:
        return any(name in names for name in wanted)

    if any(name.startswith("positions.") for name in names):
        return "vision"
    if has("storage_tokens", "rope_embed.periods"):
        return "DINOv3"
    if has("blocks.0.gamma_1") and has("blocks.0.attn.qkv.bias") and has("pos_embed"):
        others = ("reg_token", "norm_pre.weight", "rope.freqs", "blocks.0.mlp.norm.weight")
        return "timm ViT" if has(*others) else "DeiT"
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
    if layout == "vision":
        return Converted(dict(tensors))
    if layout == "CLIP with timm's tower":
        from vision.checkpoints.layouts import openclip

        trunk = openclip.trunk(tensors)
        return openclip.add_projection(convert_names(recognise(trunk), trunk), tensors)
    module, _, function = CONVERTERS[layout].rpartition(".")
    convert = getattr(import_module(f"vision.checkpoints.layouts.{module}"), function)
    converted: Converted = convert(tensors)
    return converted
