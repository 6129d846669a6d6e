"""Tensors that have shapes but no contents and pass for tensors on a CPU.

Every operation goes the way that it would go there, such as attention to the CPU's fused kernel;
shapes and storages are those of tensors on `meta`.

torch's own (FakeTensorMode) are private, two to four times as slow, and do not mix with the tables
that a model on `meta` derives from its geometry.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage


class Fakes:
    """Fake tensors that belong together. `see` is shown every operation on them, with its arguments
    and its result, all on `meta`.
    """

    def __init__(self, see: Callable[[Any, Any, Any], None]) -> None:
        self.see = see
        self._results: dict[Hashable, Any] = {}
        """New tensors that operations made, for operations that will make the same."""

    def wrap(self, tensor: Tensor) -> Tensor:
        """A fake tensor in place of one on `meta`."""
        return _Fake(tensor.detach(), self).requires_grad_(tensor.requires_grad)

    def do(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do an operation on `meta`. One that makes new tensors is done once for inputs of a kind:
        finding out shapes is what takes torch most of the time.
        """
        key = func, _described(args), _described(tuple(kwargs.items()))
        if key in self._results:
            result = _map(_like, self._results[key])
        else:
            result = func(*args, **kwargs)
            if _are_new(list(_leaves(result)), list(_leaves((args, tuple(kwargs.values()))))):
                self._results[key] = result
        self.see(func.overloadpacket, args, result)
        return result


class _Fake(Tensor):
    meta: Tensor
    fakes: Fakes

    @staticmethod
    def __new__(cls, meta: Tensor, fakes: Fakes) -> "_Fake":
        fake: _Fake = Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=torch.device("cpu"),
        )
        fake.meta, fake.fakes = meta, fakes
        return fake

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given: dict[int, _Fake] = {}

        def on_meta(x: Any) -> Any:
            if isinstance(x, _Fake):
                given[id(x.meta)] = x
                return x.meta
            if isinstance(x, torch.device):
                return torch.device("meta")
            return x.to("meta") if isinstance(x, Tensor) else x

        def fake(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return given[id(x)] if id(x) in given else _Fake(x, fakes)  # given: done in place

        values = _map(on_meta, args)
        named = {name: _map(on_meta, x) for name, x in (kwargs or {}).items()}
        fakes = next(iter(given.values())).fakes
        return _map(fake, fakes.do(func, values, named))


def storage_of(tensor: Tensor) -> UntypedStorage:
    """The storage of a tensor, fake or not: the same object for all tensors that share it."""
    return (tensor.meta if isinstance(tensor, _Fake) else tensor).untyped_storage()


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, tuple | list):
        return type(tree)(_map(function, x) for x in tree)
    return function(tree)


def _leaves(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for x in tree:
            yield from _leaves(x)


def _described(tree: Any) -> Hashable:
    """What of the arguments of an operation decides on the shapes of its results."""
    match tree:
        case Tensor():
            return tree.shape, tree.stride(), tree.dtype
        case tuple() | list():
            return tuple(map(_described, tree))
    return type(tree), tree


def _like(x: Any) -> Any:
    """A new tensor like this one; anything else as it is."""
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _are_new(results: list[Tensor], inputs: list[Tensor]) -> bool:
    """Whether every result has a storage of its own, as large as itself: what `_like` makes."""
    storages = [x.untyped_storage() for x in results]
    sizes = [_like(x).untyped_storage().nbytes() for x in results]
    return (
        {x.untyped_storage() for x in inputs}.isdisjoint(storages)
        and len(set(storages)) == len(storages)
        and [storage.nbytes() for storage in storages] == sizes
    )
