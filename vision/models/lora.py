"""Low-rank additions to linear layers (LoRA, Hu et al., ICLR 2022): W x + alpha / rank · B A x.

A layer keeps its weight and bias under their own names; `lora_a` and `lora_b` are added beside
them, so a checkpoint is that of the plain model with additional tensors. Queries, keys and values
are one layer here, but each has an addition of its own: a single matrix A for all three would make
them share a subspace.

Axes: p parts of a layer that have an addition · r rank · c inputs · o outputs of a part.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vision.config import ConfigError

QKV = ("q", "k", "v")
"""The parts of the layer `qkv`, in their order."""


class LoraLinear(nn.Linear):
    """A linear layer with a trainable low-rank addition to some of its parts."""

    def __init__(
        self,
        base: nn.Linear,
        parts: tuple[int, ...],
        of: int,
        rank: int,
        alpha: float,
        dropout: float,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.parts, self.of = parts, of
        self.scale, self.dropout = alpha / rank, dropout
        self.weight, self.bias = base.weight, base.bias
        self.lora_a = nn.Parameter(base.weight.new_empty(len(parts), rank, base.in_features))
        outputs = base.out_features // of
        self.lora_b = nn.Parameter(base.weight.new_zeros(len(parts), outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        """(… c) → (… o)"""
        return F.linear(x, self.weight, self.bias) + self.added(x)

    def added(self, x: Tensor) -> Tensor:
        """(… c) → (… o): the addition alone.

        Never by the sum of both matrices, which would need a gradient as large as the weight.
        """
        x = F.dropout(x, self.dropout, self.training)
        inner = F.linear(x, rearrange(self.lora_a, "p r c -> (p r) c"))
        return F.linear(inner, self.scale * _outer(self.lora_b, self.parts, self.of))

    def merged(self) -> nn.Linear:
        """A plain layer that computes the same."""
        plain = nn.Linear(
            self.in_features, self.out_features, bias=self.bias is not None, device="meta"
        )
        low_rank = addition(self.lora_a, self.lora_b, self.parts, self.of, self.scale)
        weight = (self.weight + low_rank).detach()
        plain.weight = nn.Parameter(weight, requires_grad=self.weight.requires_grad)
        if self.bias is not None:
            plain.bias = self.bias
        return plain.train(self.training)


def linear_with_bias(layer: nn.Linear, x: Tensor, bias: Tensor) -> Tensor:
    """(… c) → (… o): a layer without a bias of its own, applied with this one."""
    out = F.linear(x, layer.weight, bias)
    return out + layer.added(x) if isinstance(layer, LoraLinear) else out


def add_lora(
    model: nn.Module,
    *,
    rank: int,
    alpha: float,
    targets: Collection[str],
    dropout: float = 0.0,
    seed: int = 0,
) -> list[str]:
    """Add low-rank matrices to the layers of every block that `targets` names, and return the names
    of those layers.

    Targets: q, k, v, proj, fc1, fc2. The caller decides which other parameters are trained.
    """
    found = list(_layers(model, targets))
    if not found:
        raise ConfigError(
            f"tune.targets: the model has no linear layer for {', '.join(targets)}; LoRA is for "
            "the ViT and Swin models of this project."
        )
    generator = torch.Generator().manual_seed(seed)
    for name, layer, parts, of in found:
        if rank > min(layer.in_features, layer.out_features // of):
            raise ConfigError(
                f"tune.rank = {rank} is larger than {name}, which is "
                f"{layer.in_features} → {layer.out_features // of}; choose a smaller one."
            )
        low_rank = LoraLinear(layer, parts, of, rank, alpha, dropout)
        # A is drawn as torch draws a linear layer, on the CPU: the same on every device. B stays
        # zero, so the addition starts at zero.
        drawn, bound = torch.empty(low_rank.lora_a.shape), 1 / math.sqrt(layer.in_features)
        with torch.no_grad():
            low_rank.lora_a.copy_(nn.init.uniform_(drawn, -bound, bound, generator=generator))
        model.set_submodule(name, low_rank)
    return [name for name, *_ in found]


def merge_lora(model: nn.Module) -> int:
    """Fold every addition into the weight of its layer, and return the number of additions. The
    model is then a plain one.
    """
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, LoraLinear)]
    for name, layer in found:
        model.set_submodule(name, layer.merged())
    return len(found)


def merge_tensors(
    tensors: Mapping[str, Tensor], alpha: float, targets: Collection[str]
) -> dict[str, Tensor]:
    """The tensors of a checkpoint with every addition folded into its weight."""
    plain = {k: t for k, t in tensors.items() if not k.endswith((".lora_a", ".lora_b"))}
    for key in [k for k in tensors if k.endswith(".lora_a")]:
        name = key.removesuffix(".lora_a")
        a, b = tensors[key], tensors[f"{name}.lora_b"]
        parts, of = _parts(name, targets)
        plain[f"{name}.weight"] = plain[f"{name}.weight"] + addition(
            a, b, parts, of, alpha / a.shape[1]
        )
    return plain


def unmergeable(shapes: Mapping[str, Sequence[int]], targets: Collection[str]) -> str | None:
    """The first layer whose additions do not fit its weight and the targets, by the shapes of a
    checkpoint: A (p r c) and B (p o r) for a weight (of·o c). None where all can be merged.
    """
    for name in [name.removesuffix(".lora_a") for name in shapes if name.endswith(".lora_a")]:
        parts, of = _parts(name, targets)
        match [tuple(shapes.get(f"{name}.{leaf}", ())) for leaf in ("lora_a", "lora_b", "weight")]:
            case [(p, r, c), (q, o, s), (rows, columns)] if (
                p == q == len(parts) > 0 and r == s > 0 and c == columns and rows == of * o
            ):
                continue
        return name
    return None


def addition(a: Tensor, b: Tensor, parts: tuple[int, ...], of: int, scale: float) -> Tensor:
    """The product that is added to a weight: A (p r c) and B (p o r) → (of·o c), zero in parts
    without an addition.
    """
    return scale * (_outer(b, parts, of) @ rearrange(a, "p r c -> (p r) c"))


def _outer(b: Tensor, parts: tuple[int, ...], of: int) -> Tensor:
    """B (p o r) as one block matrix (of·o p·r), in which every part sees its own share of A x."""
    if of == 1:
        return b[0]
    outer = b.new_zeros(of, b.shape[1], len(parts), b.shape[2])
    for i, part in enumerate(parts):
        outer[part, :, i] = b[i]
    return rearrange(outer, "of o p r -> (of o) (p r)")


def _layers(
    model: nn.Module, targets: Collection[str]
) -> Iterator[tuple[str, nn.Linear, tuple[int, ...], int]]:
    """Name, layer, targeted parts and number of parts of every targeted layer of a block."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "blocks" in name.split("."):
            parts, of = _parts(name, targets)
            if parts:
                yield name, module, parts, of


def _parts(name: str, targets: Collection[str]) -> tuple[tuple[int, ...], int]:
    """The targeted parts of a layer, and the number of its parts."""
    last = name.rpartition(".")[2]
    if last == "qkv":
        return tuple(i for i, part in enumerate(QKV) if part in targets), len(QKV)
    return ((0,) if last in targets and last not in QKV else ()), 1
