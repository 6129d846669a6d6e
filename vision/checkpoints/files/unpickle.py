"""A reader of pickles that runs nothing.

A pickle is a program for a small stack machine, and two of its instructions call whatever the
pickle names. This machine has no such calls: a name stays a name, the calls that torch and numpy
write for a tensor become a description of the tensor (`rebuild.py`), and every other call becomes
an `Inert` record of what was to be called with what. So there is nothing to trust and no switch.

The standard library decodes the instructions (`pickletools.genops`, which executes nothing); what
they do is done here. Its number of instructions is bounded: a few bytes must not fill the memory.
"""

import pickletools
from collections.abc import Callable
from typing import Any, Protocol

from vision.checkpoints.errors import MalformedError
from vision.checkpoints.files.rebuild import Inert, Name, StoredArray, StoredType, build, call

LIMIT = 2_000_000
"""Instructions in one pickle. A training checkpoint of a large model has about 100 000."""
_NEWEST_PROTOCOL = 5
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_KEYS = (str, int, float, bytes, type(None))


class PickleStream(Protocol):
    """The methods of a file that are used. `read` must not reserve more memory than there is."""

    def read(self, size: int, /) -> bytes: ...
    def readline(self) -> bytes: ...
    def tell(self) -> int: ...


def unpickle(
    stream: PickleStream,
    persistent: Callable[[Any], Any],
    inert: dict[str, None],
    limit: int = LIMIT,
) -> Any:
    """The content of the next pickle of a stream, as plain data and the records of `rebuild.py`.

    `persistent` says what an identifier of something outside the pickle stands for. The names of
    the classes of all inert records are added to `inert`. Raises MalformedError.
    """
    machine = _Machine(persistent, inert)
    try:
        for count, (code, argument, _) in enumerate(pickletools.genops(stream)):  # type: ignore[arg-type]
            if count >= limit:
                raise MalformedError(f"its pickle has more than {limit} instructions")
            machine.step(code.name, argument)
        return machine.result()
    except MalformedError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise MalformedError(f"its pickle is invalid ({error})") from error


class _Machine:
    """The stack and the memo of one pickle."""

    def __init__(self, persistent: Callable[[Any], Any], inert: dict[str, None]) -> None:
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.persistent = persistent
        self.inert = inert

    def result(self) -> Any:
        if self.marked or len(self.stack) != 1:
            raise MalformedError("its pickle ends in the middle")
        return self.stack[0]

    def step(self, code: str, argument: Any) -> None:
        """Do one instruction. The frequent ones come first."""
        stack = self.stack
        match code:
            case "BINPUT" | "LONG_BINPUT" | "PUT":
                self.memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET" | "GET":
                stack.append(self.memo[argument])
            case "BININT" | "BININT1" | "BININT2" | "BINUNICODE" | "SHORT_BINUNICODE" | "BINFLOAT":
                stack.append(argument)
            case "MARK":
                self.marked.append(stack)
                self.stack = []
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "TUPLE":
                self._push(tuple(self._marked()))
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self._push(tuple(self._pop(int(code[-1]))))
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append(_CONSTANTS[code])
            case "REDUCE" | "NEWOBJ" | "NEWOBJ_EX":
                # Keywords are given to classes only, of which none is rebuilt.
                function, *arguments = self._pop(3 if code == "NEWOBJ_EX" else 2)
                if not isinstance(arguments[0], tuple):
                    raise MalformedError("its pickle calls something without arguments")
                self._push(call(function, arguments[0], self.inert))
            case "BINPERSID" | "PERSID":
                self._push(self.persistent(argument if code == "PERSID" else stack.pop()))
            case "GLOBAL" | "STACK_GLOBAL":
                words = self._pop(2) if code == "STACK_GLOBAL" else argument.split(" ", 1)
                self._push(_name(*words))
            case "STOP" | "PROTO" | "FRAME":
                if code == "PROTO" and argument > _NEWEST_PROTOCOL:
                    raise MalformedError(f"its pickle has protocol {argument}, of the future")
            case _:
                self._collect(code, argument)

    def _collect(self, code: str, argument: Any) -> None:
        """Do one of the instructions that fill something, or of the rare ones."""
        stack = self.stack
        match code:
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST" | "EMPTY_SET":  # a set is plain data like a list
                stack.append([])
            case "SETITEM":
                self._update(self._pop(2))
            case "SETITEMS":
                self._update(self._marked())
            case "APPEND":
                self._extend(self._pop(1))
            case "APPENDS" | "ADDITEMS":
                self._extend(self._marked())
            case "BUILD":
                (state,) = self._pop(1)
                build(self.stack[-1], state)
            case "DICT":
                items = self._marked()
                self._push({})
                self._update(items)
            case "LIST" | "FROZENSET":
                self._push(self._marked())
            case "INST" | "OBJ":
                items = self._marked()
                function = _name(*argument.split(" ", 1)) if code == "INST" else items.pop(0)
                self._push(call(function, tuple(items), self.inert))
            case "POP":
                self._pop(1) if stack else self._marked()
            case "POP_MARK":
                self._marked()
            case "DUP":
                stack.append(stack[-1])
            case _ if argument is not None and not code.startswith("EXT"):
                stack.append(argument)  # every other number, string and row of bytes
            case _:
                raise MalformedError(
                    f"its pickle has the instruction {code}, which no checkpoint needs"
                )

    def _push(self, value: Any) -> None:
        self.stack.append(value)

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise MalformedError("its pickle takes more than there is")
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def _marked(self) -> list[Any]:
        """Everything above the last mark."""
        values = self.stack
        self.stack = self.marked.pop()
        return values

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        mapping = target.mapping if isinstance(target, Inert) else target
        if not isinstance(mapping, dict) or len(items) % 2:
            raise MalformedError("its pickle puts items into something that is not a mapping")
        for key, value in zip(items[::2], items[1::2], strict=True):
            mapping[_key(key)] = value

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        sequence = target.sequence if isinstance(target, Inert) else target
        if not isinstance(sequence, list):
            raise MalformedError("its pickle adds items to something that is not a list")
        sequence.extend(items)


def _name(module: Any, name: Any) -> Name:
    if not isinstance(module, str) or not isinstance(name, str):
        raise MalformedError("its pickle names a class without a name")
    return Name(_OLD_MODULES.get(module, module), name)


def _key(key: Any) -> Any:
    """A key as plain data. Only what is hashed in a moment may be one: tuples in tuples, the same
    one many times over, would never end.
    """
    if isinstance(key, int) and not -(2**63) <= key < 2**64:
        raise MalformedError("its pickle has a key that no checkpoint has")
    if isinstance(key, _KEYS):
        return key
    if isinstance(key, tuple) and all(isinstance(part, _KEYS) for part in key):
        return key
    match key:
        case Name():
            return str(key)
        case Inert():
            return f"{key.kind} {id(key)}"
        case StoredArray() | StoredType():
            raise MalformedError("its pickle has an array as a key")
        case _:
            raise MalformedError(f"its pickle has a key of type {type(key).__name__}")
