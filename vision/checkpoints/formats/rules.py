"""Tables of names: how another project calls the tensors that this project calls so.

A table is a tuple of rules, each with our name and theirs, to be read beside the other project's
code. In a name

    {i}, {s-1}, {2s+1}    stand for numbers: a letter has the same value in both names of a rule
    *                     stands for weight or bias, the same in both
    {q|k|v}               in their name: several tensors that are one here, joined along axis 0

Tables work in both directions. A rule may also change a tensor on its way; such a `Change` has its
inverse, where there is one.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from vision.checkpoints.errors import CheckpointError


class Change(NamedTuple):
    """How a tensor is laid out here and there."""

    to_ours: Callable[[Tensor], Tensor]
    from_ours: Callable[[Tensor], Tensor]


class Rule(NamedTuple):
    """One line of a table."""

    ours: str
    theirs: str
    change: Change | None = None


class Ignored(NamedTuple):
    """Tensors that no model here has a use for (a pattern of the whole name), and why."""

    pattern: str
    reason: str


@dataclass
class Converted:
    """Weights under this project's names, and what became of the rest of a file."""

    tensors: dict[str, Tensor]
    ignored: dict[str, str] = field(default_factory=dict)
    """Names in the file that are left out, and why."""
    changed: dict[str, str] = field(default_factory=dict)
    """Our names of tensors that are not simply renamed, and what was done."""
    unknown: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that no rule knows, by the file's names."""
    facts: dict[str, object] = field(default_factory=dict)
    """Settings of a model that only the other layout tells, such as the heads of a kernel."""


BUFFERS = (
    Ignored(r".*relative_position_index", "follows from the window; computed here"),
    Ignored(r".*relative_coords_table", "follows from the window; computed here"),
    Ignored(r".*attn_mask", "follows from the grid; computed here"),
    Ignored(r".*attn\.k_bias", "always zero"),
)
"""What Swin implementations store although it follows from the geometry."""


def to_ours(
    rules: Sequence[Rule], ignored: Iterable[Ignored], tensors: Mapping[str, Tensor]
) -> Converted:
    """Tensors under our names, by the first rule that knows a name."""
    result = Converted({})
    groups: dict[str, dict[int, Tensor]] = {}
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        reason = next((i.reason for i in ignored if re.fullmatch(i.pattern, name)), None)
        if reason is not None:
            result.ignored[name] = reason
            continue
        found = _first(rules, name)
        if found is None:
            result.unknown[name] = tensor
            continue
        rule, ours, part = found
        if rule.change is not None:
            tensor = rule.change.to_ours(tensor)
            result.changed[ours] = "laid out anew"
        count = len(_parts(rule.theirs))
        if count == 1:
            _put(result.tensors, ours, tensor, name)
        else:
            groups.setdefault(ours, {})[part] = tensor
            sizes[ours] = count
    for ours, parts in groups.items():
        if len(parts) != sizes[ours]:
            raise CheckpointError(
                f"'{ours}' is made of {sizes[ours]} tensors, of which the file has {len(parts)}. "
                f"The file is not complete."
            )
        result.tensors[ours] = torch.cat([parts[index] for index in sorted(parts)])
        result.changed[ours] = f"{len(parts)} tensors joined"
    return result


def from_ours(rules: Sequence[Rule], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under the other project's names. Every tensor must have a rule."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for rule in rules:
            values = _match(rule.ours, name)
            if values is None:
                continue
            spellings = _parts(rule.theirs)
            names = [_fill(spelling, values) for spelling in spellings]
            for theirs, part in zip(names, tensor.chunk(len(names)), strict=True):
                result[theirs] = part if rule.change is None else rule.change.from_ours(part)
            break
        else:
            raise CheckpointError(f"The layout has no name for '{name}'.")
    return result


def _put(tensors: dict[str, Tensor], ours: str, tensor: Tensor, name: str) -> None:
    if ours in tensors:
        raise CheckpointError(f"The file has '{ours}' twice: '{name}' is the second of them.")
    tensors[ours] = tensor


def _first(rules: Sequence[Rule], name: str) -> tuple[Rule, str, int] | None:
    """The first rule for a name, our name, and which part of our tensor it is."""
    for rule in rules:
        for part, spelling in enumerate(_parts(rule.theirs)):
            values = _match(spelling, name)
            if values is not None:
                return rule, _fill(rule.ours, values), part
    return None


_NUMBER = re.compile(r"\{(\d*)([a-z])([+-]\d+)?\}")
_CHOICE = re.compile(r"\{([^{}]*\|[^{}]*)\}")
_PLACE = re.compile(r"(\{[^{}]*\}|\*)")


@cache
def _parts(name: str) -> tuple[str, ...]:
    """The names of all parts of a tensor, in order: one, unless the name has a choice."""
    choice = _CHOICE.search(name)
    if choice is None:
        return (name,)
    return tuple(name.replace(choice[0], word) for word in choice[1].split("|"))


@cache
def _compiled(name: str) -> tuple[re.Pattern[str], tuple[tuple[str, int, int], ...]]:
    """A pattern for a name, and letter, factor and offset of each of its numbers."""
    numbers = tuple(
        (letter, int(factor or 1), int(offset or 0))
        for factor, letter, offset in _NUMBER.findall(name)
    )
    pieces = [
        "(weight|bias)" if p == "*" else "([0-9]{1,6})" if p[:1] == "{" else re.escape(p)
        for p in _PLACE.split(name)
    ]
    return re.compile("".join(pieces)), numbers


def _match(name: str, found: str) -> dict[str, int | str] | None:
    """The values of letters and star with which a name of a table is the one that was found."""
    pattern, numbers = _compiled(name)
    match = pattern.fullmatch(found)
    if match is None:
        return None
    values: dict[str, int | str] = {}
    for (letter, factor, offset), digits in zip(numbers, match.groups(), strict=False):
        value, rest = divmod(int(digits) - offset, factor)
        if rest or value < 0 or values.setdefault(letter, value) != value:
            return None
    if "*" in name:
        values["*"] = match.groups()[-1]
    return values


def _fill(name: str, values: Mapping[str, int | str]) -> str:
    """A name of a table with its letters and star replaced."""

    def number(match: re.Match[str]) -> str:
        return str(int(match[1] or 1) * int(values[match[2]]) + int(match[3] or 0))

    return _NUMBER.sub(number, name).replace("*", str(values.get("*", "")))
