"""Groups of a model's modules, and what each group computes and keeps for an image.

The model runs on the `meta` device: its tensors have shapes but no contents, which takes hardly any
memory or time. Operations are those of a CPU; see `as_on.py`.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vision.models.cost.as_on import FUSED_ATTENTION, AsOn
from vision.models.layers import Derived

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Modules of a model that are counted together."""

    name: str
    modules: tuple[str, ...]
    stage: int | None = None
    """Number of the stage, from 1, in a model with stages."""
    blocks: int = 0
    """Number of blocks, if this is a list of them."""


class Matrices(NamedTuple):
    """The attention matrices of one image."""

    windows: int
    heads: int
    queries: int
    keys: int


@dataclass(frozen=True)
class Traced:
    """Figures of a group of modules, for one image."""

    parameters: int
    macs: int
    activation_bytes: int
    input: Shape
    """Shape of the input of its first module, without the batch; empty if it is not a tensor."""
    output: Shape
    """Shape of the output of its last module."""
    attention: Matrices | None
    """Those of the last module that attends."""


def groups_of(model: nn.Module) -> list[Group]:
    """Split a model into groups: every list of blocks and every module between two lists is one.
    The modules before the first list are the embedding, those after the last are norm and head. In
    a model without lists (some of timm's) every module is a group.
    """
    path, children = "", list(model.named_children())
    while len(children) == 1:  # a wrapper, as around a model of timm
        ((name, model),) = children
        path, children = f"{path}{name}.", list(model.named_children())
    groups = list(_children(model, path))
    lists = [i for i, group in enumerate(groups) if group.blocks]
    if not lists:
        return groups
    first, last = lists[0], lists[-1] + 1
    ends = groups[:first], groups[last:]
    before, after = (tuple(name for group in end for name in group.modules) for end in ends)
    return [Group("embedding", before), *groups[first:last], Group("norm and head", after)]


def _children(module: nn.Module, path: str, stage: int | None = None) -> Iterator[Group]:
    for name, child in module.named_children():
        if isinstance(child, Derived):
            continue  # nothing but tables
        if not isinstance(child, nn.ModuleList):
            yield Group(name, (path + name,), stage)
        elif any(isinstance(part, nn.ModuleList) for entry in child for part in entry.children()):
            for i, entry in enumerate(child):
                yield from _children(entry, f"{path}{name}.{i}.", stage=i + 1)
        else:
            blocks = tuple(f"{path}{name}.{i}" for i in range(len(child)))
            yield Group(f"{len(child)} blocks", blocks, stage, blocks=len(child))


def trace(model: nn.Module, groups: list[Group], image: Shape) -> list[Traced]:
    """Figures of each group in a training step on images (channels height width). The model is on
    `meta`. Computations between two groups count with the former one.

    Two batches are run: their difference is due to one image, and the rest is shared by all images
    of a batch.
    """
    # Not batches of one and two: one image needs fewer copies, and batch norm refuses it.
    two, three = (_Step(model.train(), groups, images) for images in (2, 3))
    with torch.enable_grad():
        two.run(image)
        three.run(image)
    parameters = _parameters(model, groups)
    return [
        Traced(
            parameters[i],
            macs=2 * two.macs[i] - three.macs[i],
            activation_bytes=three.kept[i] - two.kept[i],
            input=two.inputs.get(i, ()),
            output=two.outputs.get(i, ()),
            attention=two.attention.get(i),
        )
        for i in range(len(groups))
    ]


def _parameters(model: nn.Module, groups: list[Group]) -> Counter[int]:
    """Parameters of each group; those outside of every group, such as tokens, join the first."""
    home = {name: i for i, group in enumerate(groups) for name in group.modules}
    counts: Counter[int] = Counter()
    for name, parameter in model.named_parameters():
        path = name.split(".")
        modules = (".".join(path[:end]) for end in range(1, len(path)))
        counts[next((home[m] for m in modules if m in home), 0)] += parameter.numel()
    return counts


class _Step(TorchDispatchMode):
    """The forward pass of a training step, and the figures of each group, by its number."""

    def __init__(self, model: nn.Module, groups: list[Group], images: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.groups, self.images = model, groups, images
        self.macs: Counter[int] = Counter()
        self.kept: Counter[int] = Counter()
        """Bytes of storages that autograd keeps, each in the group that keeps it first."""
        self.inputs: dict[int, Shape] = {}
        self.outputs: dict[int, Shape] = {}
        self.attention: dict[int, Matrices] = {}
        self._group, self._inside = 0, False
        self._storages: set[UntypedStorage] = set()
        """All storages that are kept. They stay alive here, so that no two have one address."""
        self._between: list[UntypedStorage] = []
        """Those kept since the last module ended."""

    def run(self, image: Shape) -> None:
        """Run the model on a batch of images of this shape; call it once."""
        handles = []
        for i, group in enumerate(self.groups):
            for module in map(self.model.get_submodule, group.modules):
                handles.append(module.register_forward_pre_hook(partial(self._begin, i)))
                handles.append(module.register_forward_hook(partial(self._end, i)))
        hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        with torch.device("meta"), AsOn("cpu"), self, hooks:
            self.model(torch.empty(self.images, *image))
        self._assign(self._group, ())
        for handle in handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._count(func.overloadpacket, args, result)
        return result

    def _count(self, operation: Any, args: Any, result: Any) -> None:
        """Count the products of an operation, and note the shape of attention matrices."""
        self.macs[self._group] += _macs(operation, args, result)
        if operation is FUSED_ATTENTION:
            q, k = args[:2]
            shape = *q.shape[:3], k.shape[2]
        elif operation in SOFTMAX and result.ndim == 4:
            shape = result.shape
        else:
            return
        windows, heads, queries, keys = shape
        self.attention[self._group] = Matrices(windows // self.images, heads, queries, keys)

    def _begin(self, group: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._assign(group, {x.untyped_storage() for x in args if isinstance(x, Tensor)})
        self._group, self._inside = group, True
        self.inputs.setdefault(group, _shape(args[0]) if args else ())

    def _end(self, group: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._inside = False
        self.outputs[group] = _shape(output)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage not in self._storages:
            self._storages.add(storage)
            if self._inside:
                self.kept[self._group] += storage.nbytes()
            else:
                self._between.append(storage)
        return tensor

    def _assign(self, following: int, inputs: Collection[UntypedStorage]) -> None:
        """Count the storages kept between two modules: with the former one, except the input of the
        following one, which is kept to run that module again.
        """
        for storage in self._between:
            self.kept[following if storage in inputs else self._group] += storage.nbytes()
        self._between.clear()


SOFTMAX = (torch.ops.aten._softmax, torch.ops.aten._safe_softmax)


def _macs(operation: Any, args: Any, result: Any) -> int:
    """Multiply-adds of an operation if it is a matrix product, else 0."""
    aten = torch.ops.aten
    if operation in (aten.mm, aten.bmm):
        return result.numel() * args[0].shape[-1]
    if operation in (aten.addmm, aten.baddbmm):
        return result.numel() * args[1].shape[-1]
    if operation is FUSED_ATTENTION:
        q, k, v = args[:3]
        return q.shape[:3].numel() * k.shape[2] * (q.shape[3] + v.shape[3])
    if operation is aten.convolution:
        images, weight, *_ = args
        transposed = args[6]
        # A kernel is applied for every pixel of the result; transposed, for every input pixel.
        return (images if transposed else result).numel() * weight.shape[1:].numel()
    return 0


def _shape(x: Any) -> Shape:
    return tuple(x.shape[1:]) if isinstance(x, Tensor) else ()
