"""Hugging Face's layout of the image towers of CLIP and SigLIP, alone or beside their text towers.

The classifiers of both average the patches. That of CLIP does so before the last norm, which then
remains unused; that of SigLIP does not use the attention pooling of pretraining.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.layouts import rules
from vision.checkpoints.layouts.rules import Change, Converted, Ignored, Rule, Usual, within

TOKEN = Change(lambda tensor: tensor.view(1, 1, -1), lambda tensor: tensor.view(-1))
TABLE = Change(lambda tensor: tensor[None], lambda tensor: tensor[0])
BLOCK = {
    "norm1.*": "layer_norm1.*",
    "attn.qkv.*": "self_attn.{q_proj|k_proj|v_proj}.*",
    "attn.proj.*": "self_attn.out_proj.*",
    "norm2.*": "layer_norm2.*",
    "mlp.fc1.*": "mlp.fc1.*",
    "mlp.fc2.*": "mlp.fc2.*",
}
TOWER = (
    Rule("patch_embed.proj.*", "embeddings.patch_embedding.*"),
    Rule("positions.table", "embeddings.position_embedding.weight", TABLE),
    *within("blocks.{i}", "encoder.layers.{i}", BLOCK),
    Rule("norm.*", "post_layernorm.*"),
    Rule("head.*", "classifier.*"),
)
CLIP = (
    Rule("cls_token", "embeddings.class_embedding", TOKEN),
    Rule("norm_pre.*", "pre_layrnorm.*"),
    Rule("projection.weight", "visual_projection.weight"),
    *TOWER,
)
SIGLIP = (
    Rule("pooling.latent", "head.probe"),
    # Queries, keys and values are one tensor in the file: see `_split`.
    *within("pooling", "head.attention", {"q.*": "q.*", "kv.*": "kv.*", "proj.*": "out_proj.*"}),
    *within("pooling.mlp", "head.mlp", ("fc1.*", "fc2.*")),
    Rule("pooling.norm.*", "head.layernorm.*"),
    *TOWER,
)
IGNORED = (
    Ignored(r"text_model\..*|text_projection\..*", "belongs to the text tower"),
    Ignored(r"logit_scale|logit_bias", "compares images with texts"),
    Ignored(r".*position_ids", "counts positions"),
)
_UNUSED_NORM = Ignored(
    r"post_layernorm\..*", "CLIPForImageClassification averages patches before this norm"
)
_UNUSED_POOLING = Ignored(
    r"head\..*", "SiglipForImageClassification averages patches and does not use this pooling"
)


def to_ours(tensors: Mapping[str, Tensor]) -> Converted:
    """A tower of either, without `vision_model` in front of its names."""
    if tensors["embeddings.patch_embedding.weight"].ndim == 2:
        raise CheckpointError(
            "The weights are those of a SigLIP 2 of the NaFlex kind, whose images have any aspect "
            "ratio and whose patches come as vectors. Open one with a fixed size, such as "
            "hf:google/siglip2-base-patch16-224, or this one with transformers."
        )
    classifies = "classifier.weight" in tensors
    if "embeddings.class_embedding" in tensors:
        result = rules.to_ours(CLIP, (*IGNORED, *[_UNUSED_NORM] * classifies), tensors)
        result.usual |= _defaults("CLIPVisionConfig", "quick_gelu", 1e-5)
    else:
        ignored = (*IGNORED, *[_UNUSED_POOLING] * classifies)
        result = rules.to_ours(SIGLIP, ignored, _split(tensors))
        result.usual |= _defaults("SiglipVisionConfig", "gelu_tanh", 1e-6)
        if not classifies and "pooling.latent" not in result.tensors:
            result.usual["pool"] = Usual("mean", "the file has neither attention pooling nor head")
    if classifies:
        result.facts["pool"] = "mean"
    return result


def _defaults(config: str, activation: str, norm_eps: float) -> dict[str, Usual]:
    reason = f"the default of transformers' {config}"
    return {"activation": Usual(activation, reason), "norm_eps": Usual(norm_eps, reason)}


def _split(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Queries of the attention pooling beside its keys and values, which are one tensor there."""
    found = dict(tensors)
    for kind in ("weight", "bias"):
        joined = found.pop(f"head.attention.in_proj_{kind}", None)
        if joined is not None:
            query, *rest = joined.chunk(3)
            found[f"head.attention.q.{kind}"] = query
            found[f"head.attention.kv.{kind}"] = torch.cat(rest)
    return found


def from_ours(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our ViT with the names of files of either tower, as of version 4."""
    names = rules.from_ours(CLIP if "cls_token" in tensors else SIGLIP, tensors)
    for kind in ("weight", "bias"):
        query = names.pop(f"head.attention.q.{kind}", None)
        if query is not None:
            rest = names.pop(f"head.attention.kv.{kind}")
            names[f"head.attention.in_proj_{kind}"] = torch.cat([query, rest])
    outside = ("classifier.", "visual_projection.")
    return {n if n.startswith(outside) else f"vision_model.{n}": t for n, t in names.items()}
