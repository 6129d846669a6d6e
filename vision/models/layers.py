"""The parts that ViT and Swin share."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, Literal, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Grid = tuple[int, int]
"""Rows and columns of a token grid, or height and width of an image."""

Activation = Literal["softmax", "sigmoid"]
"""From logits to probabilities. softmax: an image has one of the classes; sigmoid: any number of
them (multi-label)."""


def probabilities(logits: Tensor, activation: Activation) -> Tensor:
    """Probabilities of logits (…, classes)."""
    return logits.softmax(-1) if activation == "softmax" else logits.sigmoid()


class Classifier(nn.Module):
    """Base of every model: features, then a head, and the facts that an optimiser needs."""

    head: nn.Module
    activation: Activation = "softmax"
    """sigmoid for a model that was trained on several labels."""

    def forward_features(self, images: Tensor) -> Tensor:
        """Images (b channels height width) → features (b …), the input of `forward_head`."""
        raise NotImplementedError

    def forward_head(self, features: Tensor) -> Tensor:
        """Features → logits (b classes)."""
        return self.classify(self.pool(features))

    def pool(self, features: Tensor) -> Tensor:
        """Features → one vector per image (b c), the input of the head."""
        raise NotImplementedError

    def classify(self, pooled: Tensor) -> Tensor:
        """Pooled features (b c) → logits (b classes)."""
        return self.head(pooled)

    def forward_heads(self, features: Tensor) -> Tensor:
        """Features → logits of each head by itself (heads b classes)."""
        return self.forward_head(features)[None]

    def forward(self, images: Tensor, apart: bool = False) -> Tensor:
        """Images (b channels height width) → logits (b classes); `apart`: of each head by itself
        (heads b classes), for a loss that teaches them differently.
        """
        features = self.forward_features(images)
        return self.forward_heads(features) if apart else self.forward_head(features)

    def heads(self) -> list[nn.Module]:
        """The classifying layer, or both of a distilled model."""
        return [self.head]

    def head_parameters(self) -> list[nn.Parameter]:
        """The parameters of the classifying layers."""
        return [parameter for head in self.heads() for parameter in head.parameters()]

    def head_names(self) -> set[str]:
        """Names of the parameters of the classifying layers."""
        own = set(map(id, self.head_parameters()))
        return {name for name, parameter in self.named_parameters() if id(parameter) in own}

    def layer_of(self, parameter: str) -> int:
        """Depth of a parameter for layer-wise decay: 0 the embedding, `depth + 1` the head."""
        raise NotImplementedError

    def no_weight_decay(self) -> frozenset[str]:
        """Names of the parameters without weight decay: biases, norms, scales, tokens, position
        tables.

        All but the last two kinds have one axis; the others are named by `undecayed`.
        """
        return frozenset(
            name
            for name, parameter in self.named_parameters()
            if parameter.ndim <= 1 or any(part in self.undecayed for part in name.split("."))
        )

    undecayed: frozenset[str] = frozenset()
    """Parts of names of parameters with several axes that take no weight decay."""

    def hidden_matrices(self) -> dict[str, int]:
        """Number of matrices stacked in each weight between two hidden layers, by its name.

        The embedding, the head and whatever takes no weight decay have none. Queries, keys and
        values are three, gate and values of a perceptron two, groups of a convolution one each;
        LoRA's are as many as the parts of the layer that have an addition.
        """
        modules = dict(self.named_modules())
        layers = {name: self.layer_of(name) for name, _ in self.named_parameters()}
        # Of a convolutional stem, only the first layer with weights to train reads pixels.
        first = "" if "patch_embed.whitening" in modules else "patch_embed.convs.0.weight"
        embedding = {
            name
            for name, layer in layers.items()
            if layer == 0 and (name == first or not name.startswith("patch_embed.convs."))
        }
        if max(layers.values(), default=0) == 0:
            embedding = set()  # layers are unknown
        others = self.head_names() | self.no_weight_decay() | embedding
        return {
            f"{name}.{key}": _stacked(name, key, weight, modules)
            for name, module in modules.items()
            if isinstance(module, nn.Linear | nn.Conv2d)
            for key, weight in module.named_parameters(recurse=False)
            if f"{name}.{key}" not in others
            # A filter of one channel is a vector.
            and not (isinstance(module, nn.Conv2d) and weight.shape[1] == 1)
        }

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw all parameters anew; the same generator state gives the same weights."""
        raise NotImplementedError


def _stacked(name: str, key: str, weight: Tensor, modules: Mapping[str, nn.Module]) -> int:
    """Number of matrices in the weight `key` of the layer `name`."""
    if key in ("lora_a", "lora_b"):
        return weight.shape[0]
    layer, (parent, _, last) = modules[name], name.rpartition(".")
    if isinstance(layer, nn.Conv2d):
        return layer.groups
    # Parts of a fused layer are as wide as the input of the layer that follows them.
    following = {"qkv": "proj", "kv": "proj", "fc1": "fc2"}.get(last)
    after = modules.get(f"{parent}.{following}")
    if not isinstance(after, nn.Linear):
        return 1
    number, remainder = divmod(weight.shape[0], after.in_features)
    return number if number and not remainder else 1


G = TypeVar("G")


class Derived(nn.Module, Generic[G]):
    """Tensors that follow from a geometry alone: neither parameters nor buffers, never stored.

    They are kept for the configured geometry and computed in the forward pass for any other. When
    the module moves they are computed again, so they are right even after the `meta` device, from
    which a buffer would return with arbitrary contents.
    """

    def __init__(
        self, compute: Callable[[G, torch.device], tuple[Tensor | None, ...]], geometry: G
    ) -> None:
        super().__init__()
        self.compute, self.geometry = compute, geometry
        self._keep(torch.empty(0))

    def _keep(self, like: Tensor) -> None:
        self.device, self.dtype = like.device, like.dtype
        self.tensors = self._computed(self.geometry)

    def _computed(self, geometry: G) -> tuple[Any, ...]:
        tensors = self.compute(geometry, self.device)
        return tuple(
            t.to(self.dtype) if t is not None and t.is_floating_point() else t for t in tensors
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._keep(fn(torch.empty(0, device="cpu", dtype=self.dtype)))
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def forward(self, geometry: G) -> tuple[Any, ...]:
        """The tensors for a geometry, in the order in which they are computed."""
        return self.tensors if geometry == self.geometry else self._computed(geometry)


def quick_gelu(x: Tensor) -> Tensor:
    """OpenAI's approximation of GELU, used by its CLIP models."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
}


class Mlp(nn.Module):
    """The two-layer perceptron of a block; with `norm_eps` its hidden layer has a LayerNorm."""

    def __init__(
        self,
        width: int,
        hidden: int,
        dropout: float,
        activation: str = "gelu",
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, self.before(hidden))
        self.norm = nn.Identity() if norm_eps is None else nn.LayerNorm(hidden, eps=norm_eps)
        self.fc2 = nn.Linear(hidden, width)
        self.dropout, self.activation = dropout, ACTIVATIONS[activation]

    def before(self, hidden: int) -> int:
        """Number of outputs of the first layer."""
        return hidden

    def hidden(self, x: Tensor) -> Tensor:
        """Outputs of the first layer → hidden layer"""
        return self.activation(x)

    def forward(self, x: Tensor) -> Tensor:
        """(b n c) → (b n c)"""
        x = F.dropout(self.hidden(self.fc1(x)), self.dropout, self.training)
        return F.dropout(self.fc2(self.norm(x)), self.dropout, self.training)


class GatedMlp(Mlp):
    """A perceptron whose hidden layer is gated (Shazeer, 2020): with silu a SwiGLU."""

    def before(self, hidden: int) -> int:
        """The gate, then the values that it multiplies."""
        return 2 * hidden

    def hidden(self, x: Tensor) -> Tensor:
        """Outputs of the first layer → hidden layer"""
        gate, x = x.chunk(2, dim=-1)
        return self.activation(gate) * x


class DropPath(nn.Module):
    """Stochastic depth (Huang et al., ECCV 2016): drop a residual branch for whole samples, and
    scale up the others to keep the expectation.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """(b …) → (b …)"""
        if not self.training or self.rate == 0:
            return x
        keep = 1 - self.rate
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        return x * (x.new_empty(shape).bernoulli_(keep) / keep)


def drop_path_rates(rate: float, schedule: str, depth: int) -> list[float]:
    """Rate of every block: rising from 0 to `rate`, or `rate` throughout."""
    if schedule == "uniform":
        return [rate] * depth
    return [rate * i / max(depth - 1, 1) for i in range(depth)]


def run_block(block: nn.Module, *inputs: Any, recompute: bool) -> Tensor:
    """The output of a block; with `recompute` its activations are recomputed in the backward pass
    instead of stored.
    """
    if recompute and torch.is_grad_enabled():
        return checkpoint(block, *inputs, use_reentrant=False)
    return block(*inputs)


def pad_to_multiple(images: Tensor, step: Grid) -> Tensor:
    """Pad with zeros on the right and below, up to the next multiple of `step`."""
    height, width = images.shape[-2:]
    below, right = -height % step[0], -width % step[1]
    return F.pad(images, (0, right, 0, below)) if below or right else images


def full_precision(x: Tensor) -> Tensor:
    """A tensor in at least 32 bits, for computations that need them."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def ceil_div(number: int, divisor: int) -> int:
    """`number / divisor`, rounded up."""
    return -(-number // divisor)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module has its former mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def static_bias(model: nn.Module) -> Iterator[None]:
    """Compute position biases once, for as long as the context lasts.

    For evaluation: within it the weights must not change, and the biases get no gradient. Models
    without such biases are left as they are.
    """
    holders: list[Any] = [module for module in model.modules() if hasattr(module, "hold_biases")]
    try:
        with torch.no_grad():
            for module in holders:
                module.hold_biases()
        yield
    finally:
        for module in holders:
            module.drop_biases()


def trunc_normal(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    """Draw from a normal distribution, cut at ±2 in absolute terms as DeiT and Swin do."""
    nn.init.trunc_normal_(tensor, std=std, generator=generator)


def init_norms(module: nn.Module) -> None:
    """Set every LayerNorm to the identity."""
    for m in module.modules():
        if isinstance(m, nn.LayerNorm):
            nn.init.ones_(m.weight)
            nn.init.zeros_(m.bias)


def zero_branches(model: nn.Module) -> None:
    """Set the last layer of every residual branch to zero: each block starts as the identity."""
    for block in model.modules():
        if isinstance(attention := getattr(block, "attn", None), nn.Module):
            assert isinstance(block.mlp, Mlp)
            for layer in (attention.proj, block.mlp.fc2):
                assert isinstance(layer, nn.Linear)
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)
