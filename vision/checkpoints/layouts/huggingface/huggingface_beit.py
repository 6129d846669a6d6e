"""Hugging Face's layout of BEiT and of Data2Vec's image models, which share their architecture.

Keys have no bias. A last norm that follows the mean of the patches belongs to the pooler.
"""

from collections.abc import Mapping

from torch import Tensor

from vision.checkpoints.layouts import rules
from vision.checkpoints.layouts.huggingface.huggingface_dino import (
    BLOCK,
    BLOCK_IN_MEMORY,
    EMBEDDING,
    HEAD,
)
from vision.checkpoints.layouts.rules import BUFFERS, Converted, Ignored, Rule, Usual, within

_TABLE = "relative_position_bias.relative_position_bias_table"
_LAYER = "encoder.layer.{i}"
POOLED = Rule("norm.*", "pooler.layernorm.*")
SCALES = {"ls1.gamma": "lambda_1", "ls2.gamma": "lambda_2"}
BEIT = (
    *EMBEDDING,
    Rule("relative.table", f"encoder.{_TABLE}"),
    *within("blocks.{i}", _LAYER, BLOCK | SCALES),
    *within(
        "blocks.{i}.attn",
        f"{_LAYER}.attention.attention",
        {
            "qkv.weight": "{query|key|value}.weight",
            "q_bias": "query.bias",
            "v_bias": "value.bias",
        },
    ),
    Rule("blocks.{i}.relative.table", f"{_LAYER}.attention.attention.{_TABLE}"),
    *HEAD,
)
IN_MEMORY = (
    Rule("relative.table", "shared_position_bias.relative_position_bias_table"),
    *within("blocks.{i}", "layers.{i}", BLOCK_IN_MEMORY | SCALES),
    *within(
        "blocks.{i}.attn",
        "layers.{i}.attention",
        {
            "qkv.weight": "{q_proj|k_proj|v_proj}.weight",
            "q_bias": "q_proj.bias",
            "v_bias": "v_proj.bias",
        },
    ),
    Rule("blocks.{i}.relative.table", f"layers.{{i}}.{_TABLE}"),
)
IGNORED = (
    Ignored(r"embeddings\.mask_token", "stands for hidden patches in pretraining"),
    Ignored(r"lm_head\..*", "the head of pretraining"),
    *BUFFERS,
)


def is_beit(tensors: Mapping[str, Tensor]) -> bool:
    """Whether queries have a bias and keys have none."""
    names = "\n".join(tensors)
    return any(
        f".{query}.bias" in names and f".{key}.bias" not in names
        for query, key in (("query", "key"), ("q_proj", "k_proj"))
    )


def to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A BEiT or Data2Vec without its type in front of the names."""
    result = rules.to_ours((*BEIT, *IN_MEMORY, POOLED), IGNORED, tensors)
    result.usual["norm_eps"] = Usual(1e-12, "the default of transformers")
    if "pooler.layernorm.weight" in tensors:
        result.facts |= {"pool": "mean", "pool_norm": "after"}
    elif "lm_head.weight" in tensors:
        result.usual["pool"] = Usual("mean", "pretraining has no pooling; BEiT fine-tunes with it")
    _add_shared(result)
    return result


def _add_shared(result: Converted) -> None:
    """Of a model with a table in every block and one for all of them, both are added to the scores:
    here every block has the sum.
    """
    own = result.tensors
    if "relative.table" not in own or "blocks.0.relative.table" not in own:
        return
    shared = own.pop("relative.table")
    for name in [name for name in own if name.endswith(".relative.table")]:
        own[name] = own[name] + shared
        result.changed[name] = "the table that all blocks share was added"


def from_ours(tensors: Mapping[str, Tensor], norm_after_pool: bool) -> dict[str, Tensor]:
    """Our ViT with the names of files of BEiT, without the model's type in front."""
    return rules.from_ours((POOLED, *BEIT) if norm_after_pool else BEIT, tensors)
