"""open_clip_config.json: from the fields of OpenCLIP to the settings of a model here."""

from collections.abc import Mapping
from typing import Any

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.layouts.config_fields import Field, Settings, choice, follow, only

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
POOLS = {"token": "class_token", "avg": "mean", "map": "attention"}
"""`timm_pool` of towers of timm that OpenCLIP projects itself."""
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
