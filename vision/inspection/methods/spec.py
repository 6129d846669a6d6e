"""What is told of each method, and the options that it has."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Method:
    """What is told of a method."""

    formula: str
    reference: str
    gradients: bool
    """Whether it asks for the gradient of a class."""
    for_class: bool
    """Whether its map is of one class."""
    distribution: bool
    """Whether its values, prefix tokens included, are shares that sum to 1."""
    options: Mapping[str, Any]
    """With the values that they have when not given."""


METHODS: dict[str, Method] = {
    "attention": Method(
        "row of A for the query, of one head or with heads fused",
        "Vaswani et al., NeurIPS 2017",
        False, False, True,
        {"layer": -1, "head": "mean"},
    ),
    "rollout": Method(
        "r ← r · rownorm(a A + (1 - a) I), from the last layer to the first",
        "Abnar & Zuidema, ACL 2020",
        False, False, True,
        {"fusion": "mean", "residual": 0.5, "discard": 0.0, "start_layer": 0, "end_layer": -1},
    ),
    "gradient_rollout": Method(
        "rollout with A replaced by the positive part of mean_h(A ⊙ ∂y/∂A)",
        "Gildenblat, vit-explain, 2020; layers paired with their own gradients",
        True, True, True,
        {"clamp": "after", "residual": 0.5, "normalize": False, "start_layer": 0},
    ),
    "chefer": Method(
        "R ← R + mean_h (A ⊙ ∂y/∂A)⁺ R, without the identity path",
        "Chefer, Gur & Wolf, ICCV 2021",
        True, True, False,
        {"normalize": False, "start_layer": 0},
    ),
    "attention_gradcam": Method(
        "ReLU(mean_h ḡ_h A_h) for the query, ḡ_h the mean of ∂y/∂A_h over cells",
        "Chefer, Gur & Wolf, CVPR 2021 (baseline)",
        True, True, False,
        {"layer": -1},
    ),
    "token_gradcam": Method(
        "ReLU(Σ_c w_c x_c) on the input of a layer's attention, w the mean gradient over cells",
        "Selvaraju et al., ICCV 2017",
        True, True, False,
        {"layer": -1},
    ),
    "cam": Method(
        "each cell's part of the logit: w · norm(x_j) / n, minus the mean over classes",
        "Zhou et al., CVPR 2016",
        False, True, False,
        {"centred": True},
    ),
    "cam_rollout": Method(
        "rollout from the positive parts of the logit (CAM) instead of the pooled query",
        "Zhou et al., CVPR 2016, with Abnar & Zuidema, ACL 2020",
        False, True, True,
        {"fusion": "mean", "residual": 0.5, "discard": 0.0, "start_layer": 0},
    ),
    "norm": Method(
        "‖x_j‖ of the last tokens before the final norm",
        "Darcet et al., ICLR 2024",
        False, False, False,
        {},
    ),
    "pca": Method(
        "a principal component of the last tokens, joint over the batch",
        "Oquab et al., TMLR 2024",
        False, False, False,
        {"component": 0},
    ),
}  # fmt: skip
QUERIED = ("attention", "rollout", "gradient_rollout", "chefer", "attention_gradcam")
"""Methods that start from a query."""
