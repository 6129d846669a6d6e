"""big_vision's attention pooling (MAP head), as in its files of SigLIP.

The rest of the image tower is that of google.py, which has these rules among its own.
"""

from einops import rearrange

from vision.checkpoints.layouts.rules import Change, Rule


def change(pattern: str) -> Change:
    """A rearrangement of axes; the result has a memory of its own, in the usual order."""
    return Change(lambda tensor: rearrange(tensor, pattern).contiguous())


DENSE = change("i o -> o i")
TO_HEADS = change("i h d -> (h d) i")
FROM_HEADS = change("h d o -> o (h d)")
FLAT = change("h d -> (h d)")
"""JAX's axes: the output of a kernel is the last one, and heads have an axis of their own."""

_ATTENTION = "MAPHead_0/MultiHeadDotProductAttention_0"
MAP_HEAD = (
    Rule("pooling.latent", "MAPHead_0/probe"),
    Rule("pooling.q.weight", f"{_ATTENTION}/query/kernel", TO_HEADS),
    Rule("pooling.q.bias", f"{_ATTENTION}/query/bias", FLAT),
    Rule("pooling.kv.weight", f"{_ATTENTION}/{{key|value}}/kernel", TO_HEADS),
    Rule("pooling.kv.bias", f"{_ATTENTION}/{{key|value}}/bias", FLAT),
    Rule("pooling.proj.weight", f"{_ATTENTION}/out/kernel", FROM_HEADS),
    Rule("pooling.proj.bias", f"{_ATTENTION}/out/bias"),
    Rule("pooling.norm.weight", "MAPHead_0/LayerNorm_0/scale"),
    Rule("pooling.norm.bias", "MAPHead_0/LayerNorm_0/bias"),
    Rule("pooling.mlp.fc1.weight", "MAPHead_0/MlpBlock_0/Dense_0/kernel", DENSE),
    Rule("pooling.mlp.fc1.bias", "MAPHead_0/MlpBlock_0/Dense_0/bias"),
    Rule("pooling.mlp.fc2.weight", "MAPHead_0/MlpBlock_0/Dense_1/kernel", DENSE),
    Rule("pooling.mlp.fc2.bias", "MAPHead_0/MlpBlock_0/Dense_1/bias"),
)
FACTS = {"pool": "attention", "activation": "gelu_tanh", "norm_eps": 1e-6}
"""Settings of models with this head: flax approximates gelu."""
