"""Exact figures of a computation: kernels, bytes that they move, peak of live tensor bytes, and the
matrix products in it. They have no noise: the same program gives the same numbers on any machine.

Use them without `torch.inference_mode`, under which torch hands over composite operations whole.
"""

import math
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"}
"""Matrix products: counted as kernels, but not their bytes."""

UNREAD = {"copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "random_"}
"""Operations in place that do not read what they overwrite."""

FREE = ("empty", "new_empty", "detach", "lift_fresh", "alias")
"""Beginnings of the names of operations that touch no memory."""


class Count(TorchDispatchMode):
    """Counts every operation that reads or writes memory; views and metadata do not.

    An operation reads each of its input tensors once and writes each output once, at the size that
    lies in memory: an axis of stride 0 was never copied. Fused attention is an operation like any
    other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        self.bytes = 0
        """Read and written outside matrix products."""
        self.by_operation: Counter[str] = Counter()
        """Kernels by name."""
        self.bytes_by_operation: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = operation_name(func)
        if func.is_view or name.startswith(FREE):
            return result
        inputs, overwritten = tensors((args, kwargs)), list(_overwritten(func, args, kwargs))
        known = {storage_key(tensor) for tensor in inputs}
        fresh = [tensor for tensor in tensors(result) if storage_key(tensor) not in known]
        if not fresh and not overwritten:
            return result  # a reshape that turned out to be a view, or a question about a shape
        self.kernels += 1
        self.by_operation[name] += 1
        if name not in PRODUCTS:
            read = _read(name, inputs, overwritten, into_given="out" in kwargs)
            moved = sum(map(memory, [*read, *overwritten, *fresh]))
            self.bytes += moved
            self.bytes_by_operation[name] += moved
        return result


class PeakMemory(TorchDispatchMode):
    """The largest sum of bytes of storages alive at once that were made under this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        """Bytes alive now; still updated after the mode has ended."""
        self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {storage_key(tensor) for tensor in tensors((args, kwargs))}
        for tensor in tensors(result):
            if storage_key(tensor) not in known | self._seen:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._seen.add(storage._cdata)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._remove, storage._cdata, size).atexit = False

    def _remove(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


class Product(NamedTuple):
    """A matrix product (batch m k) · (batch k n), and which operand lies in memory transposed."""

    batch: int
    m: int
    k: int
    n: int
    left_transposed: bool
    right_transposed: bool

    @property
    def macs(self) -> int:
        """Its multiply-adds."""
        return self.batch * self.m * self.k * self.n


class Products(TorchDispatchMode):
    """Records the matrix products of a computation, to run them again without all the rest.

    Run the computation with the math kernel of `scaled_dot_product_attention`, so that its products
    are seen. A convolution must be a patch embedding: it steps by its own size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        match operation_name(func), args:
            case "mm" | "bmm", (left, right, *_):
                self._record(left, right)
            case "addmm" | "baddbmm", (_, left, right, *_):
                self._record(left, right)
            case "convolution", (_, weight, _, stride, *_):
                self._patches(result, weight, stride, outputs=1)
            case "convolution_backward", (grad, _, weight, _, stride, *_, mask):
                self._patches(grad, weight, stride, outputs=mask[0] + mask[1])
        return result

    def _record(self, left: Tensor, right: Tensor) -> None:
        batch = left.shape[0] if left.ndim == 3 else 1
        (m, k), n = left.shape[-2:], right.shape[-1]
        self.products.append(Product(batch, m, k, n, _transposed(left), _transposed(right)))

    def _patches(self, output: Tensor, weight: Tensor, stride: list[int], outputs: int) -> None:
        if list(weight.shape[2:]) != list(stride):
            raise ValueError(f"not a patch embedding: kernel {weight.shape}, stride {stride}")
        patches, width = output.numel() // output.shape[1], weight.shape[0]
        product = Product(1, patches, weight[0].numel(), width, False, True)
        self.products += [product] * outputs


class Replay:
    """Recorded products on random operands that lie ready; a call computes them all once."""

    def __init__(self, products: list[Product]) -> None:
        operands: dict[Any, Tensor] = {}

        def operand(batch: int, rows: int, columns: int, transposed: bool, use: str) -> Tensor:
            key = batch, rows, columns, transposed, use
            if key not in operands:
                shape = (batch, columns, rows) if transposed else (batch, rows, columns)
                made = torch.randn(*shape)
                operands[key] = made.transpose(1, 2) if transposed else made
            return operands[key]

        self.calls = []
        for p in products:
            call = (
                operand(p.batch, p.m, p.k, p.left_transposed, "left"),
                operand(p.batch, p.k, p.n, p.right_transposed, "right"),
                operand(p.batch, p.m, p.n, False, "out"),
            )
            self.calls.append(call if p.batch > 1 else tuple(t[0] for t in call))

    @torch.no_grad()
    def __call__(self) -> None:
        """Compute every product."""
        for left, right, out in self.calls:
            (torch.mm if left.ndim == 2 else torch.bmm)(left, right, out=out)


def operation_name(func: Any) -> str:
    """Name of an operation without its overload: `add`, `_softmax`."""
    return func._schema.name.removeprefix("aten::")


def tensors(tree: Any) -> list[Tensor]:
    """All tensors in nested arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage_key(tensor: Tensor) -> int:
    """The same for tensors that share memory, while they live."""
    return tensor.untyped_storage()._cdata


def memory(tensor: Tensor) -> int:
    """Bytes of a tensor as it lies in memory."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size if stride else 1 for size, stride in axes) * tensor.element_size()


def _overwritten(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The arguments that the operation writes to, by its schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from tensors(given)


def _read(
    name: str, inputs: list[Tensor], overwritten: list[Tensor], into_given: bool
) -> list[Tensor]:
    """The inputs whose contents an operation needs, each piece of memory once."""
    if name.endswith("_like") or name.startswith("new_"):
        return []  # only the shape and type of the input are used
    if name in UNREAD or into_given:
        inputs = [tensor for tensor in inputs if not any(tensor is o for o in overwritten)]
    return list({_place(tensor): tensor for tensor in inputs}.values())


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for two tensors on the same piece of memory."""
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


def _transposed(matrix: Tensor) -> bool:
    return matrix.stride(-2) < matrix.stride(-1)
