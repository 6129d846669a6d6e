"""The image towers of OpenAI's CLIP and of OpenCLIP, alone or beside their text towers: names of
tensors and fields of open_clip_config.json.

Names of the image tower start with `visual`, where there is another. OpenCLIP also takes models of
timm as towers (`visual.trunk`), with a layer of its own after them.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.layouts import rules
from vision.checkpoints.layouts.config_fields import Field, Settings, choice, follow, only
from vision.checkpoints.layouts.huggingface.huggingface_towers import TABLE, TOKEN
from vision.checkpoints.layouts.recognise import convert_names, recognise
from vision.checkpoints.layouts.rules import Change, Converted, Ignored, Rule, Usual
from vision.checkpoints.layouts.timm.timm_names import POOLS

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
FILE = "open_clip_config.json"
MODEL = {
    "quick_gelu": choice(False, {False: {"activation": "gelu"}, True: {"activation": "quick_gelu"}})
}
"""Fields of `model_cfg` that change what the image tower computes."""
TOWER = {
    "pool_type": choice("tok", {"tok": {"pool": "class_token"}, "avg": {"pool": "mean"}}),
    "final_ln_after_pool": choice(
        False, {False: {"pool_norm": "before"}, True: {"pool_norm": "after"}}
    ),
    "norm_kwargs": Field(None, lambda value: {"norm_eps": _only_eps(**(value or {}))}),
    # The table is stored either way.
    "pos_embed_type": choice("learnable", {"learnable": {}, "sin_cos_2d": {}}),
    "attentional_pool": only(False),
}
"""The same of `vision_cfg`, for towers of OpenCLIP itself."""
OTHERS = {
    # Shown by the tensors, or read on their own.
    *("embed_dim", "layers", "width", "head_width", "mlp_ratio", "patch_size", "image_size"),
    *("ls_init_value", "no_ln_pre", "vision_cfg"),
    # Training, text, and the outputs of other programs.
    *("patch_dropout", "output_tokens", "attn_pooler_queries", "attn_pooler_heads"),
    *("timm_model_pretrained", "timm_pool", "timm_proj", "timm_proj_bias", "timm_drop"),
    *("timm_drop_path", "timm_model_name"),
    *("text_cfg", "multimodal_cfg", "custom_text", "init_logit_scale", "init_logit_bias"),
    *("nonscalar_logit_scale", "output_dict", "cast_dtype"),
}
"""Fields that do not decide what the image tower computes, or are visible elsewhere."""


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


def timm_tower_to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A tower that is a model of timm, and the linear map, if any, that OpenCLIP puts after it."""
    trunk, _ = _tower(tensors, "visual.trunk.")
    result = convert_names(recognise(trunk), trunk)
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


def tower_settings(config: Mapping[str, Any]) -> Settings:
    """The settings of the image tower that `model_cfg` describes."""
    tower = config.get("vision_cfg") or {}
    settings = follow(config, MODEL, OTHERS, FILE, "open_clip")
    if tower.get("timm_model_name"):
        follow(tower, {}, OTHERS, FILE, "open_clip")
        return _timm_settings(tower)
    heads = tower.get("width", 768) // tower.get("head_width", 64)
    return settings | follow(tower, TOWER, OTHERS, FILE, "open_clip") | {"heads": heads}


def _only_eps(eps: float = 1e-5) -> float:
    return float(eps)


def _timm_settings(tower: Mapping[str, Any]) -> Settings:
    """The settings of a model of timm with the pooling that OpenCLIP gives it."""
    from vision.checkpoints.layouts.timm.timm_models import describe

    name, pool = str(tower["timm_model_name"]), tower.get("timm_pool", "avg")
    # Without a projection of OpenCLIP, the head of timm's model is one; else the model is built
    # as it is, and its pooling is replaced afterwards, which leaves its norms where they are.
    projected = tower.get("timm_proj", "linear") in ("linear", "mlp")
    described = describe(name, {} if projected else {"global_pool": pool}, {})
    if described is None or pool not in POOLS:
        raise CheckpointError(
            f"The {FILE} beside it has timm_model_name={name!r} and timm_pool={pool!r}, which the "
            f"installed timm does not have. Open it with open_clip."
        )
    return described.settings | {"pool": POOLS[pool]}
