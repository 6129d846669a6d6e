"""The image towers of OpenAI's CLIP and of OpenCLIP, alone or beside their text towers.

Names of the image tower start with `visual`, where there is another. OpenCLIP also takes models of
timm as towers (`visual.trunk`), with a layer of its own after them.
"""

from collections.abc import Mapping

from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.layouts import rules
from vision.checkpoints.layouts.huggingface.huggingface_towers import TABLE, TOKEN
from vision.checkpoints.layouts.rules import Change, Converted, Ignored, Rule, Usual

TRANSPOSED = Change(lambda tensor: tensor.T.contiguous(), lambda tensor: tensor.T.contiguous())
_LAYER = "transformer.resblocks.{i}"
CLIP = (
    Rule("cls_token", "class_embedding", TOKEN),
    Rule("positions.table", "positional_embedding", TABLE),
    Rule("patch_embed.proj.*", "conv1.*"),
    Rule("norm_pre.*", "ln_pre.*"),
    Rule("blocks.{i}.norm1.*", f"{_LAYER}.ln_1.*"),
    Rule("blocks.{i}.attn.qkv.*", f"{_LAYER}.attn.in_proj_*"),
    Rule("blocks.{i}.attn.proj.*", f"{_LAYER}.attn.out_proj.*"),
    Rule("blocks.{i}.ls1.gamma", f"{_LAYER}.ls_1.gamma"),
    Rule("blocks.{i}.norm2.*", f"{_LAYER}.ln_2.*"),
    Rule("blocks.{i}.mlp.fc1.*", f"{_LAYER}.mlp.c_fc.*"),
    Rule("blocks.{i}.mlp.fc2.*", f"{_LAYER}.mlp.c_proj.*"),
    Rule("blocks.{i}.ls2.gamma", f"{_LAYER}.ls_2.gamma"),
    Rule("norm.*", "ln_post.*"),
    Rule("projection.weight", "proj", TRANSPOSED),
)
OPENAI = {"input_resolution", "context_length", "vocab_size"}
"""Numbers that OpenAI stores beside the tensors."""
_OUTSIDE = "belongs to the text tower"
_WIDE = (1280, 1408, 1664)
"""Widths of OpenCLIP's largest towers, whose heads have more than 64 channels."""

PREPROCESS: dict[str, object] = {
    "mean": [0.48145466, 0.4578275, 0.40821073],
    "std": [0.26862954, 0.26130258, 0.27577711],
    "interpolation": "bicubic",
    "crop_ratio": 1.0,
}


def to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """The image tower of either, with or without `visual` in front of its names."""
    plain, outside = _tower(tensors, "visual.")
    if any(name.startswith("attn_pool.") for name in plain):
        raise CheckpointError(
            "The weights are those of a CoCa, whose image tower pools by attention with many "
            "queries. Open a CLIP of OpenCLIP, or this one with open_clip."
        )
    result = rules.to_ours(CLIP, [Ignored(r"attn_mask", "hides later words of a text")], plain)
    result.ignored |= outside
    result.facts["norm_eps"] = 1e-5
    if tensors.keys() >= OPENAI:
        result.facts["activation"] = "quick_gelu"
    else:
        reason = (
            "as in most models of OpenCLIP; weights of OpenAI, and OpenCLIP's with quickgelu in "
            "their name, need model.activation=quick_gelu"
        )
        result.usual["activation"] = Usual("gelu", reason)
    width = plain["conv1.weight"].shape[0]
    if width % 64 == 0 and width not in _WIDE:
        result.usual["heads"] = Usual(width // 64, "64 channels per head, as in OpenAI's code")
    result.preprocess |= PREPROCESS
    return result


def trunk(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model of timm inside a tower of OpenCLIP."""
    return _tower(tensors, "visual.trunk.")[0]


def add_projection(result: Converted, tensors: Mapping[str, Tensor]) -> Converted:
    """Complete a model of timm by what OpenCLIP puts after it: a linear map, or nothing."""
    result.ignored |= _tower(tensors, "visual.")[1]
    head, _ = _tower({n: t for n, t in tensors.items() if ".head." in n}, "visual.head.")
    projection = head.pop("proj.weight", None)
    if projection is not None:
        result.tensors["projection.weight"] = projection
    result.unknown |= {f"visual.head.{name}": tensor for name, tensor in head.items()}
    return result


def _tower(tensors: Mapping[str, Tensor], prefix: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors whose names start with the prefix, without it; and the names of the others."""
    if not any(name.startswith(prefix) for name in tensors):
        return dict(tensors), {}
    inside = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    return inside, {name: _OUTSIDE for name in tensors if not name.startswith(prefix)}
