"""What a pickle holds as plain data: nothing here is callable, imported or built.

The calls that torch, numpy and Python write into a pickle become descriptions.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from vision.checkpoints.errors import MalformedError
from vision.checkpoints.files.safetensors_file import shown

STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}
_WRAPPERS = {
    *("_rebuild_parameter", "_rebuild_parameter_with_state", "_rebuild_xla_tensor"),
    *("_rebuild_device_tensor_from_cpu_tensor", "_rebuild_device_tensor_from_numpy"),
}
"""Functions of torch whose first argument is the tensor."""
_UNREADABLE = {
    "_rebuild_sparse_tensor": "is sparse; store it with .to_dense()",
    "_rebuild_sparse_csr_tensor": "is sparse; store it with .to_dense()",
    "_rebuild_qtensor": "is quantised; store the model as it was before the quantisation",
    "_rebuild_meta_tensor_no_storage": "has no data (it was stored from the device meta)",
    "_rebuild_nested_tensor": "is a nested tensor; store it padded",
    "_rebuild_wrapper_subclass": "is of a class of its own; store the plain tensor inside",
}
"""Functions of torch for tensors of a kind that no model of this project has."""
_NUMBERS = re.compile(r"[<>=|]?([?bB]|b1|[iu][1248]|f[248]|c8|c16)")
_ATTACKS = {
    *("os", "posix", "nt", "subprocess", "sys", "shutil", "socket", "pty", "runpy", "importlib"),
    *("ctypes", "code", "codeop", "webbrowser", "multiprocessing", "asyncio", "http", "urllib"),
    *("pip", "pdb", "bdb", "timeit", "marshal", "commands", "signal", "tempfile", "requests"),
}
_ATTACKING_BUILTINS = {"eval", "exec", "compile", "open", "__import__", "execfile", "input"}


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function that a pickle names. It is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Inert:
    """An object of a class that is not rebuilt: what the pickle would have given to the class."""

    kind: str
    arguments: tuple[Any, ...] = ()
    state: Any = None
    mapping: dict[Any, Any] = field(default_factory=dict)
    sequence: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class StoredBytes:
    """A storage of torch: numbers in a row, somewhere else in the file."""

    key: str
    dtype: str
    count: int
    view: tuple[int, int] | None = None
    """In files before torch 1.6: first item and number of items, of a part of the storage."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor of torch: how to look at a storage."""

    storage: StoredBytes
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conjugate: bool = False
    negative: bool = False


@dataclass(slots=True, eq=False)
class StoredType:
    """A dtype of numpy."""

    code: str


@dataclass(slots=True, eq=False)
class StoredArray:
    """An array of numpy, with its bytes in the pickle. Empty until its state was read."""

    dtype: str = "|u1"
    shape: tuple[int, ...] = (0,)
    column_major: bool = False
    data: bytes | list[Any] = b""


@dataclass(frozen=True, slots=True, eq=False)
class Unreadable:
    """A tensor of a kind that no model of this project has."""

    reason: str


def call(function: Any, arguments: tuple[Any, ...], inert: dict[str, None]) -> Any:
    """The meaning of a call in a pickle. Nothing is called; an unknown call becomes `Inert`."""
    if not isinstance(function, Name):
        called = function.kind if isinstance(function, Inert) else type(function).__name__
        return _inert(f"{called}()", arguments, inert)
    match function.module, function.name, arguments:
        case "torch._utils", name, _ if name.startswith("_rebuild_"):
            return _torch(name, arguments)
        case "torch._tensor" | "torch.tensor", name, (Name() as inner, Name() as kind, tuple(), *_):
            if name not in ("_rebuild_from_type", "_rebuild_from_type_v2"):
                return _inert(str(function), arguments, inert)
            if str(kind) not in ("torch.Tensor", "torch._tensor.Tensor"):
                inert[str(kind)] = None
            return call(inner, arguments[2], inert)
        case "torch", "Size", (tuple() | list(),):
            return tuple(arguments[0])
        case "torch", "device", _:
            return ":".join(str(part) for part in arguments if isinstance(part, str | int))
        case "torch.nn.parameter", "Parameter", (StoredTensor(), *_):
            return arguments[0]
        case "collections" | "builtins" | "_codecs" | "copyreg", _, _:
            return _python(function, arguments, inert)
        case module, _, _ if module == "numpy" or module.startswith(
            ("numpy.core.", "numpy._core.")
        ):
            return _numpy(function, arguments, inert)
        case _:
            return _inert(str(function), arguments, inert)


def build(target: Any, state: Any) -> None:
    """Give an object the state that a pickle has for it."""
    match target:
        case Inert():
            target.state = state
        case StoredArray():
            _fill(target, state)
        case StoredType():
            if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "=", "|"):
                target.code = state[1] + target.code.lstrip("<>=|")
        case dict() | StoredTensor() | Unreadable():
            pass  # attributes of a mapping or a tensor, such as a state dict's versions
        case _:
            raise MalformedError(f"its pickle gives a state to a {type(target).__name__}")


def storage(identifier: Any) -> Any:
    """What an identifier in a file of torch stands for: a storage, or a class with its source."""
    match identifier:
        case ("storage", Name(_, kind), str(key), str(), int(count), *views):
            if count < 0:
                raise MalformedError(f"its storage {key} has {count} items")
            match views:
                case [] | [None]:
                    view = None
                case [(str(), int(first), int(items))] if first >= 0 and items >= 0:
                    view = (first, items)
                case _:
                    raise MalformedError(f"its storage {key} is a view that is invalid")
            return StoredBytes(key, STORAGES.get(kind, kind), count, view)
        case ("module", Name(), *_):
            return identifier[1]
        case _:
            raise MalformedError("it refers to something that is not a storage")


def _inert(kind: str, arguments: tuple[Any, ...], inert: dict[str, None]) -> Inert:
    module, _, name = kind.rpartition(".")
    if module.split(".")[0] in _ATTACKS or (module == "builtins" and name in _ATTACKING_BUILTINS):
        raise MalformedError(
            f"it would call {kind} as soon as pickle opened it, as attacks do; nothing was called"
        )
    inert[kind] = None
    return Inert(kind, arguments)


def _torch(name: str, arguments: tuple[Any, ...]) -> Any:
    """A tensor, from the arguments of one of torch's functions."""
    match name, arguments:
        case "_rebuild_tensor" | "_rebuild_tensor_v2", (StoredBytes() as data, *place):
            return _tensor(data, data.dtype, place, arguments[6:7])
        case "_rebuild_tensor_v3", (StoredBytes() as data, *place) if len(arguments) > 6:
            dtype = arguments[6]
            if not isinstance(dtype, Name) or dtype.module != "torch":
                raise MalformedError("it has a tensor without a type")
            return _tensor(data, dtype.name, place, arguments[7:8])
        case _, (data, *_) if name in _WRAPPERS:
            return data
        case _ if name in _UNREADABLE:
            return Unreadable(_UNREADABLE[name])
        case _:
            raise MalformedError(f"it has a tensor that this version cannot describe ({name})")


def _tensor(data: StoredBytes, dtype: str, place: list[Any], flags: tuple[Any, ...]) -> Any:
    match place:
        case [int(offset), tuple(shape) | list(shape), tuple(strides) | list(strides), *_]:
            metadata = flags[0] if flags and isinstance(flags[0], dict) else {}
            numbers = [offset, *shape, *strides]
            if not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
                raise MalformedError(f"it has a tensor of shape {shown(shape)} that cannot be")
            if len(shape) != len(strides) or len(shape) > 64:
                raise MalformedError(
                    f"it has a tensor with {len(shape)} axes, {len(strides)} strides"
                )
            marks = (metadata.get("conj") is True, metadata.get("neg") is True)
            return StoredTensor(data, dtype, offset, tuple(shape), tuple(strides), *marks)
        case _:
            raise MalformedError("it has a tensor without shape, strides and offset")


def _python(function: Name, arguments: tuple[Any, ...], inert: dict[str, None]) -> Any:
    """A container of Python. A dict stands for all its relatives."""
    match function.module, function.name, arguments:
        case "collections", "OrderedDict" | "defaultdict" | "Counter", ():
            return {}
        case "collections", "defaultdict", (_,):
            return {}
        case "collections", "OrderedDict" | "Counter", (dict(items),):
            return items
        case "collections", "OrderedDict", (list(pairs),):
            if not all(isinstance(p, tuple | list) and len(p) == 2 for p in pairs):
                raise MalformedError("its pickle has an OrderedDict without pairs")
            if not all(isinstance(key, str | int) for key, _ in pairs):
                raise MalformedError("its pickle has an OrderedDict without names")
            return dict(pairs)
        case "builtins", "set" | "frozenset" | "list" | "tuple" | "dict", ():
            return {} if function.name == "dict" else []
        case "builtins", "set" | "frozenset" | "list" | "tuple", (list() | tuple(),):
            return list(arguments[0])
        case "builtins", "bytes" | "bytearray", (bytes(data),):
            return data
        case "_codecs", "encode", (str(text), str()):
            return text.encode("latin-1")
        case "copyreg", "_reconstructor" | "__newobj__", (Name() as kind, *rest):
            record = _inert(str(kind), (), inert)
            if len(rest) > 1 and isinstance(rest[1], dict):
                record.mapping = rest[1]
            return record
        case _:
            return _inert(str(function), arguments, inert)


def _numpy(function: Name, arguments: tuple[Any, ...], inert: dict[str, None]) -> Any:
    """A dtype, number or array of numpy."""
    match function.name, arguments:
        case "dtype", (str(code), *_):
            return StoredType(code)
        case "scalar", (StoredType(code), bytes() | str() as data):
            return StoredArray(code, (), False, _bytes(data))
        case "_reconstruct", _:
            return StoredArray()
        case "_frombuffer", (bytes(data), StoredType(code), tuple(shape), str(order)):
            array = StoredArray()
            _fill(array, (1, shape, StoredType(code), order == "F", data))
            return array
        case _:
            return _inert(str(function), arguments, inert)


def _fill(array: StoredArray, state: Any) -> None:
    match state:
        case (_, tuple(shape), StoredType(code), int(turned), bytes() | str() | list() as data):
            array.dtype, array.shape, array.column_major = code, shape, bool(turned)
            array.data = data if isinstance(data, list) else _bytes(data)
        case _:
            raise MalformedError("its pickle has an array that is invalid")
    if not all(type(n) is int and 0 <= n < 2**63 for n in array.shape) or len(array.shape) > 32:
        raise MalformedError("its pickle has an array of an impossible shape")


def _bytes(data: bytes | str) -> bytes:
    """Python 2 wrote rows of bytes as text."""
    return data.encode("latin-1") if isinstance(data, str) else data


def is_number(code: str) -> bool:
    """Whether a dtype of numpy is one of plain numbers, which torch has too."""
    return _NUMBERS.fullmatch(code) is not None
