"""config.json of Hugging Face: fields of its configs and settings of a model here.

For each `model_type`, fields either have a meaning here (`READ`), are visible in the tensors
(`SHAPES`), or do not change what a model computes (`UNUSED`). A field that is in none of these is
refused: a later version of transformers may have given it a meaning.
"""

from collections.abc import Mapping
from typing import Any

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.layouts.config_fields import Field, Settings, choice, follow, only, setting

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Names of activations there and here."""


def _transformer(heads: int = 12, eps: float = 1e-12, activation: str = "gelu") -> dict[str, Field]:
    activations = {theirs: {"activation": ours} for theirs, ours in ACTIVATIONS.items()}
    return {
        "num_attention_heads": setting("heads", heads),
        "layer_norm_eps": setting("norm_eps", eps, float),
        "hidden_act": choice(activation, activations),
    }


_QKV_BIAS = {"qkv_bias": choice(True, {False: {"qkv_bias": "none"}, True: {}})}
_DINOV2 = {
    **_transformer(eps=1e-6),
    **_QKV_BIAS,
    "apply_layernorm": only(True),
    # The gate of its SwiGLU is a silu, whatever hidden_act says.
    "use_swiglu_ffn": choice(False, {True: {"mlp": "gated", "activation": "silu"}, False: {}}),
}
_DINOV3 = {
    **_transformer(heads=6, eps=1e-5),
    "rope_theta": only(100.0),
    "use_gated_mlp": choice(False, {False: {"mlp": "plain"}, True: {"mlp": "gated"}}),
}
_SWIN = {
    "hidden_act": only("gelu"),
    "layer_norm_eps": setting("norm_eps", 1e-5, float),
    "num_heads": setting("heads", (3, 6, 12, 24), list, list),
    "window_size": setting("window", 7),
    "qkv_bias": only(True),
    "use_absolute_embeddings": only(False),
    "path_norm": only(True),
    "patch_norm": only(True),
}
_SWIN_V2 = _SWIN | {
    "pretrained_window_sizes": Field(
        (0, 0, 0, 0),
        lambda value: {"pretrained_window": list(value)} if any(value) else {},
        lambda config: list(config.pretrained_window or [0] * len(config.depths)),
    )
}
_BEIT = {
    **_transformer(),
    "use_mean_pooling": choice(True, {True: {"pool": "mean"}, False: {"pool": "class_token"}}),
    "use_absolute_position_embeddings": Field(
        False,
        lambda value: {"positions": {True: "learned", False: "none"}[value]},
        lambda config: config.positions != "none",
    ),
    "layer_scale_init_value": setting(
        "layer_scale", 0.1, lambda value: value or None, lambda value: value or 0.0
    ),
}
READ: dict[str, dict[str, Field]] = {
    "vit": _transformer() | _QKV_BIAS,
    "vit_mae": _transformer() | _QKV_BIAS,
    "deit": _transformer() | _QKV_BIAS,
    "dinov2": _DINOV2,
    "dinov2_with_registers": _DINOV2,
    "dinov3_vit": _DINOV3,
    "clip_vision_model": _transformer(eps=1e-5, activation="quick_gelu"),
    "siglip_vision_model": _transformer(eps=1e-6, activation="gelu_pytorch_tanh"),
    "beit": _BEIT,
    "data2vec-vision": _BEIT,
    "swin": _SWIN,
    "swinv2": _SWIN_V2,
}
"""Fields that change what a model of each type computes."""
TOWERS = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}
"""Types of models of images and texts, and of their image towers, which `vision_config` is for."""
SHAPES = {
    *("hidden_size", "intermediate_size", "mlp_ratio", "num_hidden_layers", "num_channels"),
    *("patch_size", "num_register_tokens", "projection_dim", "vision_use_head"),
    *("query_bias", "key_bias", "value_bias", "proj_bias", "mlp_bias"),
    *("use_relative_position_bias", "use_shared_relative_position_bias", "use_mask_token"),
    *("embed_dim", "depths", "num_layers", "num_stages", "head_dim"),
}
"""Fields whose value the tensors show."""
UNUSED = {
    # What the images and the classes are is read on its own.
    *("image_size", "id2label", "label2id", "num_labels", "problem_type"),
    # Training, initialisation and pretraining.
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "dropout"),
    *("drop_path_rate", "initializer_range", "initializer_factor", "layerscale_value"),
    *("logit_scale_init_value", "encoder_stride", "vocab_size", "mask_ratio", "norm_pix_loss"),
    *("decoder_num_attention_heads", "decoder_hidden_size", "decoder_num_hidden_layers"),
    *("decoder_intermediate_size", "gradient_checkpointing"),
    *("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"),
    # Parts that a classifier does not have: pooler, feature maps, segmentation, text tower.
    *("pooler_output_size", "pooler_act", "reshape_hidden_states", "out_features", "out_indices"),
    *("stage_names", "apply_layernorm", "return_class_token", "pool_scales", "use_auxiliary_head"),
    *("auxiliary_loss_weight", "auxiliary_channels", "auxiliary_num_convs", "add_fpn"),
    *("auxiliary_concat_input", "semantic_loss_ignore_index"),
    *("text_config", "text_config_dict", "vision_config", "vision_config_dict"),
    # What every config of transformers has, or had.
    *("model_type", "architectures", "transformers_version", "dtype", "torch_dtype"),
    *("return_dict", "output_hidden_states", "output_attentions", "use_cache", "torchscript"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "add_cross_attention"),
    *("cross_attention_hidden_size", "tie_word_embeddings", "tie_encoder_decoder", "prefix"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
    *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
    *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
    *("num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id"),
    *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"),
    *("suppress_tokens", "begin_suppress_tokens", "finetuning_task", "task_specific_params"),
    *("tokenizer_class", "tf_legacy_loss", "use_bfloat16", "attn_implementation", "auto_map"),
}
"""Fields that do not change what the model computes in evaluation."""


def model_settings(config: Mapping[str, Any]) -> Settings:
    """The settings of the model that a config.json describes, or an error that names the field."""
    kind, values = tower_config(config)
    if kind not in READ:
        known = ", ".join(sorted({*READ, *TOWERS}))
        raise CheckpointError(
            f"The config.json beside it has model_type={kind}, which is not known here (known: "
            f"{known}). Open it with transformers."
        )
    place, others = (f"config.json ({kind})", "transformers"), {*SHAPES, *UNUSED}
    follow(config, {}, {*READ[kind], *others}, *place)  # what is around a tower
    return follow(values, READ[kind], others, *place) | _together(kind, values)


def tower_config(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The type of the image model that a config.json describes, and its fields."""
    kind = str(config["model_type"])
    if kind not in TOWERS:
        return kind, config
    tower = config.get("vision_config") or {}
    # Old files may have the fields twice; transformers lets these win.
    return TOWERS[kind], dict(tower) | dict(config.get("vision_config_dict") or {})


def _together(kind: str, values: Mapping[str, Any]) -> Settings:
    """Settings that several fields decide."""
    if kind == "dinov3_vit":
        shift, stretch = (values.get(f"pos_embed_{name}") for name in ("shift", "jitter"))
        rescale = values.get("pos_embed_rescale", 2.0)
        return {"rotary_jitter": [shift or 0.0, stretch or 1.0, rescale or 1.0]}
    if kind in ("beit", "data2vec-vision"):
        own = values.get("use_relative_position_bias", False)
        shared = values.get("use_shared_relative_position_bias", False)
        # With both, the shared table is part of those of the blocks: see huggingface_names.py.
        return {"relative_bias": "block" if own else "shared" if shared else "none"}
    return {}
