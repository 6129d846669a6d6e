"""Every attention method: its name, formula, reference, needs and options, described once.

Captions, figures, the settings of `vision visualize`, the table of docs/attention.md and the
explorer page read these specs; `attribution.py` computes the maps. Free of torch, so that a
misspelt method or option is reported at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vision.config import suggest


@dataclass(frozen=True)
class Option:
    """An option of a method."""

    default: bool | int | float | str
    expects: str
    """The valid values in words."""
    accepts: Callable[[Any], bool]


@dataclass(frozen=True)
class MethodSpec:
    """One attention method."""

    title: str
    formula: str
    reference: str
    notes: str
    """What the map means and where it misleads, for the explorer page."""
    options: Mapping[str, Option] = field(default_factory=dict)
    gradients: bool = False
    """Needs the gradient of a class."""
    query: bool = False
    """Starts from a query: a token, a cell, or what the model pools."""
    distribution: bool = False
    """Its values, prefix tokens included, are shares that sum to 1."""
    last_tokens: bool = False
    """Needs the last tokens before the final norm."""
    mean_pool: bool = False
    """Needs a linear head on the mean of the tokens."""

    @property
    def for_class(self) -> bool:
        """Whether its map explains one class."""
        return self.gradients or self.mean_pool


FUSIONS = ("mean", "max", "min")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


_LAYER = Option(-1, "number or name of a layer", lambda v: type(v) in (int, str))
_START_LAYER = Option(0, "number of a layer", lambda v: type(v) is int)
_END_LAYER = replace(_START_LAYER, default=-1)
_OFF = Option(False, "true or false", lambda v: type(v) is bool)
_ON = replace(_OFF, default=True)
_HEAD = Option(
    "mean", "number of a head, mean, max or min", lambda v: type(v) is int or v in FUSIONS
)
_FUSION = Option("mean", "mean, max or min", lambda v: v in FUSIONS)
_RESIDUAL = Option(
    0.5, "0 to 1, or measured", lambda v: v == "measured" or (_is_number(v) and 0 <= v <= 1)
)
_DISCARD = Option(0.0, "at least 0 and below 1", lambda v: _is_number(v) and 0 <= v < 1)
_CLAMP = Option("after", "before or after", lambda v: v in ("before", "after"))
_COMPONENT = Option(0, "number of a component, from 0", lambda v: type(v) is int and v >= 0)
_ROLLOUT = {
    "fusion": _FUSION,
    "residual": _RESIDUAL,
    "discard": _DISCARD,
    "start_layer": _START_LAYER,
}

METHODS: dict[str, MethodSpec] = {
    "attention": MethodSpec(
        "Attention",
        "A = softmax(q kᵀ / √d), the row of the query; one head, or heads fused",
        "Vaswani et al., NeurIPS 2017",
        "The weights with which one head of one layer mixes the values of other tokens into the "
        "query, exactly as the forward pass used them. It shows a single step: a token of a late "
        "layer has been mixed many times before, so a bright cell does not show that the image "
        "mattered there. Large weights on prefix tokens or on the same far cell in every head "
        "often carry little information.",
        {"layer": _LAYER, "head": _HEAD},
        query=True,
        distribution=True,
    ),
    "rollout": MethodSpec(
        "Rollout",
        "r ← r · rownorm(a A + (1 - a) I), from the last layer to the first",
        "Abnar & Zuidema, ACL 2020",
        "Follows the attention of all layers and the residual path from the query down to the "
        "patches; in Swin also through shifted windows and merged cells. It is independent of the "
        "class: two objects in an image share one map. Values, MLPs and signs are ignored, so it "
        "shows where information can have come from and not what it did.",
        {**_ROLLOUT, "end_layer": _END_LAYER},
        query=True,
        distribution=True,
    ),
    "gradient_rollout": MethodSpec(
        "Gradient rollout",
        "rollout with A replaced by the positive part of mean_h(A ⊙ ∂y/∂A)",
        "Gildenblat, vit-explain, 2020; layers paired with their own gradients",
        "A rollout in which each weight counts by how much the logit of the class would change "
        "with it, positive parts only. Heads that do not matter for the class lose their "
        "influence. Gradients are local: where the model is confident they are small, and with "
        "normalize rows of almost nothing are scaled up like all others.",
        {
            "clamp": _CLAMP,
            "residual": _RESIDUAL,
            "normalize": _OFF,
            "start_layer": _START_LAYER,
        },
        gradients=True,
        query=True,
        distribution=True,
    ),
    "chefer": MethodSpec(
        "Chefer attribution",
        "R ← R + mean_h (A ⊙ ∂y/∂A)⁺ R, without the identity path",
        "Chefer, Gur & Wolf, ICCV 2021",
        "Adds up, layer by layer, the positive products of attention and gradient on all paths "
        "from the query to a patch. It needs no residual weight and separates classes. Published "
        "rankings against rollout change with the model, and without a class token it is weaker: "
        "compare the scores.",
        {"normalize": _OFF, "start_layer": _START_LAYER},
        gradients=True,
        query=True,
    ),
    "attention_gradcam": MethodSpec(
        "Attention Grad-CAM",
        "ReLU(mean_h ḡ_h A_h) for the query, ḡ_h the mean of ∂y/∂A_h over cells",
        "Chefer, Gur & Wolf, CVPR 2021 (baseline)",
        "The heads of one layer, weighted by their mean gradient for the class and summed. It "
        "uses one layer only, and in published tests it is among the weakest. Where all heads "
        "have a negative mean gradient it is empty.",
        {"layer": _LAYER},
        gradients=True,
        query=True,
    ),
    "token_gradcam": MethodSpec(
        "Token Grad-CAM",
        "ReLU(Σ_c w_c x_c) on the input of a layer's attention, w the mean gradient over cells",
        "Selvaraju et al., ICCV 2017",
        "Channels of the input of one attention layer, weighted by their mean gradient over the "
        "cells and summed. The choice of the layer changes the map more than in convolutional "
        "networks. The mean over cells lets the gradients of different places cancel.",
        {"layer": _LAYER},
        gradients=True,
    ),
    "cam": MethodSpec(
        "CAM",
        "each cell's part of the logit: w · norm(x_j) / n, minus the mean over classes",
        "Zhou et al., CVPR 2016",
        "The part of the class's logit that each last token contributes, relative to the mean "
        "over classes; the parts add up to the logit exactly. It is as coarse as the last layer. "
        "A last token has seen the whole image, so its place can differ from the place of the "
        "evidence.",
        {"centred": _ON},
        last_tokens=True,
        mean_pool=True,
    ),
    "cam_rollout": MethodSpec(
        "CAM-seeded rollout",
        "rollout from the positive parts of the logit (CAM) instead of the pooled query",
        "Zhou et al., CVPR 2016, with Abnar & Zuidema, ACL 2020",
        "The logit of a head on mean-pooled tokens is a sum over cells; the cells that speak for "
        "the class start a rollout down to the first patches. It separates classes and is as fine "
        "as the first layer. Below the last layer it has the limits of rollout, and evidence "
        "against the class is left out.",
        _ROLLOUT,
        distribution=True,
        last_tokens=True,
        mean_pool=True,
    ),
    "norm": MethodSpec(
        "Token norm",
        "‖x_j‖ of the last tokens before the final norm",
        "Darcet et al., ICLR 2024",
        "The length of each cell's last token before the final norm. Cells far above the rest "
        "(median + 6 deviations; their number is shown) often store information on the whole "
        "image instead of their patch, and attention to them says little about their place. "
        "Models with registers have fewer of them.",
        last_tokens=True,
    ),
    "pca": MethodSpec(
        "Feature PCA",
        "a principal component of the last tokens, joint over the batch",
        "Oquab et al., TMLR 2024",
        "Cells of similar features have similar values; the sign has no meaning.",
        {"component": _COMPONENT},
        last_tokens=True,
    ),
}


@dataclass(frozen=True)
class MethodChoice:
    """A method with the options chosen for it."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> MethodSpec:
        """The method."""
        return METHODS[self.name]

    @property
    def settings(self) -> dict[str, Any]:
        """Every option of the method, chosen or default."""
        defaults = {name: option.default for name, option in self.spec.options.items()}
        return defaults | dict(self.options)

    @property
    def title(self) -> str:
        """For figures and tables."""
        words = []
        for name, value in self.options.items():
            spoken = name.replace("_", " ")
            negated = spoken if value else f"no {spoken}"
            words.append(negated if isinstance(value, bool) else f"{spoken} {value}")
        return f"{self.spec.title} ({', '.join(words)})" if words else self.spec.title

    def __str__(self) -> str:
        """As written in settings: `rollout:fusion:max`."""
        values = (str(v).lower() if isinstance(v, bool) else str(v) for v in self.options.values())
        pairs = (f"{name}:{value}" for name, value in zip(self.options, values, strict=True))
        return ":".join([self.name, *pairs])


def choose_method(name: str, options: Mapping[str, Any]) -> MethodChoice:
    """A method with options, or a ValueError with the names or values that exist."""
    if name not in METHODS:
        raise ValueError(f"Unknown method '{name}'. {suggest(name, METHODS)}")
    known = METHODS[name].options
    for option, value in options.items():
        if option not in known:
            raise ValueError(f"{name}: unknown option '{option}'. {suggest(option, known)}")
        if not known[option].accepts(value):
            raise ValueError(f"{name}: {option} must be {known[option].expects}, found '{value}'.")
    return MethodChoice(name, options)


def parse_method(text: str) -> MethodChoice:
    """`method` or `method:option:value:option:value`."""
    name, *parts = text.strip().split(":")
    if len(parts) % 2:
        raise ValueError(f"'{text}': option '{parts[-1]}' has no value; write {name}:option:value.")
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return choose_method(name, {option: _value(value) for option, value in pairs})


def parse_methods(texts: Sequence[str]) -> tuple[MethodChoice, ...]:
    """Several methods, each once."""
    choices = [parse_method(text) for text in texts]
    return tuple({str(choice): choice for choice in choices}.values())


def _value(text: str) -> bool | int | float | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
