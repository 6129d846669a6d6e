"""Tables of names: they map another project's tensor names to ours, and ours to theirs.

A table is a tuple of rules, each with our name and theirs, to be read beside the other project's
code. In a name

    {i}, {s-1}, {2s+1}    stand for numbers: a letter has the same value in both names of a rule
    *                     stands for weight or bias, the same in both
    {q|k|v}               in their name: several tensors that are one here, joined along axis 0

Tables work in both directions. A rule may also change a tensor on its way; such a `Change` has its
inverse, where files are written in the layout.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from vision.checkpoints.errors import CheckpointError
from vision.models.layers import Grid


class Change(NamedTuple):
    """How a tensor is laid out here and there."""

    to_ours: Callable[[Tensor], Tensor]
    from_ours: Callable[[Tensor], Tensor] | None = None
    """The inverse; None: no file is written in this layout."""


class Rule(NamedTuple):
    """One line of a table."""

    ours: str
    theirs: str
    change: Change | None = None


def same(*names: str) -> tuple[Rule, ...]:
    """Rules for tensors that have the same name in both projects."""
    return tuple(Rule(name, name) for name in names)


def within(ours: str, theirs: str, names: Mapping[str, str] | Sequence[str]) -> tuple[Rule, ...]:
    """Rules for the parts of a module by its name here and there; of each part our name and theirs,
    or the one that it has in both.
    """
    pairs = names.items() if isinstance(names, Mapping) else zip(names, names, strict=True)
    return tuple(Rule(f"{ours}.{own}", f"{theirs}.{other}") for own, other in pairs)


def split_qkv(
    theirs: str, names: Sequence[str], key_bias: bool, ours: str = "blocks.{i}.attn"
) -> tuple[Rule, ...]:
    """Rules for queries, keys and values that are three layers there, by their `names`. Without a
    bias of keys, those of queries and values are tensors of their own here.
    """
    joined = f"{theirs}.{{{'|'.join(names)}}}"
    if key_bias:
        return (Rule(f"{ours}.qkv.*", f"{joined}.*"),)
    return (
        Rule(f"{ours}.qkv.weight", f"{joined}.weight"),
        Rule(f"{ours}.q_bias", f"{theirs}.{names[0]}.bias"),
        Rule(f"{ours}.v_bias", f"{theirs}.{names[2]}.bias"),
    )


class Ignored(NamedTuple):
    """Tensors that no model here has a use for (a pattern of the whole name), and why."""

    pattern: str
    reason: str


class Usual(NamedTuple):
    """A setting that most models of a layout have."""

    value: object
    reason: str
    """Why it is assumed, and what to give where it is wrong."""
    allowed: tuple[object, ...] = ()
    """The only values with which a model here computes the same, where not all do."""


class Asked(NamedTuple):
    """A setting that a layout leaves open and that must be given."""

    reason: str
    """What is open, and which values to give."""
    allowed: tuple[object, ...] = ()


IMAGENET: dict[str, object] = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
"""Preprocessing of most published models."""


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
    """Settings of a model that only the other layout shows, such as the heads of a kernel."""
    usual: dict[str, Usual] = field(default_factory=dict)
    """Settings to assume, and to list as such, where nothing else says them."""
    asked: dict[str, Asked] = field(default_factory=dict)
    """Settings that neither the tensors nor the layout show."""
    decoder: dict[str, Tensor] = field(default_factory=dict)
    """What masked pretraining has beside the encoder, by the names of `models/reconstruction.py`:
    ignored, unless such pretraining is continued.
    """
    preprocess: dict[str, object] = field(default_factory=dict)
    """How the images of published models of this layout were prepared, where all were alike."""


DECODER = "the decoder of masked pretraining"
"""Why its tensors are ignored."""
MASK_TOKEN = Ignored(r"(embeddings\.)?mask_token", "stands for hidden patches in pretraining")
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
    groups: dict[str, list[Tensor | None]] = {}
    index = _by_digits(rules)
    for name, tensor in tensors.items():
        reason = next((i.reason for i in ignored if re.fullmatch(i.pattern, name)), None)
        known = index.get(_DIGITS.sub("0", name), ()) if reason is None else ()
        found = _first(known, name)
        if reason is not None:
            result.ignored[name] = reason
        elif found is None:
            result.unknown[name] = tensor
        else:
            rule, ours, part = found
            parts = groups.setdefault(ours, [None] * len(_parts(rule.theirs)))
            if part >= len(parts) or parts[part] is not None:
                raise CheckpointError(
                    f"The file has '{ours}' twice: '{name}' is the second of them."
                )
            parts[part] = tensor if rule.change is None else rule.change.to_ours(tensor)
            if rule.change is not None:
                result.changed[ours] = "laid out anew"
    for ours, parts in groups.items():
        whole = [part for part in parts if part is not None]
        if len(whole) != len(parts):
            raise CheckpointError(
                f"'{ours}' is made of {len(parts)} tensors, of which the file has {len(whole)}. "
                f"The file is not complete."
            )
        result.tensors[ours] = torch.cat(whole) if len(whole) > 1 else whole[0]
        if len(whole) > 1:
            result.changed[ours] = f"{len(whole)} tensors joined"
    return result


def from_ours(rules: Sequence[Rule], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under the other project's names. Every tensor must have a rule."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for rule in rules:
            values = _match(rule.ours, name)
            if values is None:
                continue
            names = [_fill(spelling, values) for spelling in _parts(rule.theirs)]
            for theirs, part in zip(names, tensor.chunk(len(names)), strict=True):
                if rule.change is not None:
                    assert rule.change.from_ours is not None
                    part = rule.change.from_ours(part)
                result[theirs] = part
            break
        else:
            raise CheckpointError(f"The layout has no name for '{name}'.")
    return result


class NameTable(NamedTuple):
    """A layout whose tensors need no more than other names."""

    rules: tuple[Rule, ...]
    ignored: tuple[Ignored, ...] = ()
    preprocess: Mapping[str, object] = MappingProxyType({})
    """How the images of published models were prepared."""

    def __call__(self, tensors: Mapping[str, Tensor]) -> Converted:
        """Tensors of the layout under our names."""
        result = to_ours(self.rules, self.ignored, tensors)
        result.preprocess |= self.preprocess
        return result


def _by_digits(rules: Iterable[Rule]) -> dict[str, list[tuple[Rule, int, str]]]:
    """Rules by their names with all numbers alike: rule, part of our tensor, name."""
    index: dict[str, list[tuple[Rule, int, str]]] = {}
    for rule in rules:
        for part, spelling in enumerate(_parts(rule.theirs)):
            key = _DIGITS.sub("0", _NUMBER.sub("0", spelling))
            for kind in ("weight", "bias") if "*" in key else ("",):
                index.setdefault(key.replace("*", kind), []).append((rule, part, spelling))
    return index


def _first(known: Iterable[tuple[Rule, int, str]], name: str) -> tuple[Rule, str, int] | None:
    """The first rule for a name, our name, and which part of our tensor it is."""
    for rule, part, spelling in known:
        values = _match(spelling, name)
        if values is not None:
            return rule, _fill(rule.ours, values), part
    return None


_DIGITS = re.compile(r"[0-9]+")
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


def need(tensors: Mapping[str, Tensor], name: str, axes: int) -> Tensor:
    """A tensor with this number of axes, or an error."""
    tensor = tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"the weights are not complete: '{name}' is missing.")
    if tensor.ndim != axes or 0 in tensor.shape:
        raise CheckpointError(
            f"'{name}' has the shape {tuple(tensor.shape)}; expected {axes} axes, none of length 0."
        )
    return tensor


class StemShape(NamedTuple):
    """What the tensors of a stem show."""

    kind: str
    """As in `model.stem`."""
    width: int
    channels: int
    patch: Grid


def stem_shape(tensors: Mapping[str, Tensor]) -> StemShape:
    """The stem that weights under our names belong to."""
    halvings = count(tensors, r"patch_embed\.norms\.(\d+)\.weight")
    if halvings > 10:
        raise CheckpointError(f"the stem has {halvings} norms; stems have at most 10.")
    if halvings:
        kind = "conv_whitened" if "patch_embed.whitening.weight" in tensors else "conv"
        first = "whitening" if kind == "conv_whitened" else "convs.0"
        width = need(tensors, f"patch_embed.norms.{halvings - 1}.weight", 1).shape[0]
        channels = need(tensors, f"patch_embed.{first}.weight", 4).shape[1]
        return StemShape(kind, width, channels, (2**halvings, 2**halvings))
    kind = "patch" if "patch_embed.proj.bias" in tensors else "patch_no_bias"
    kind = "patch_normed" if "patch_embed.norm_before.weight" in tensors else kind
    width, channels, *patch = need(tensors, "patch_embed.proj.weight", 4).shape
    return StemShape(kind, width, channels, (patch[0], patch[1]))


def gated_mlp(tensors: Mapping[str, Tensor]) -> bool:
    """Whether the MLPs of a ViT are gated: they have twice the channels before their gate."""
    before, after = (need(tensors, f"blocks.0.mlp.{layer}.weight", 2) for layer in ("fc1", "fc2"))
    return before.shape[0] == 2 * after.shape[1]


def count(tensors: Mapping[str, Tensor], pattern: str) -> int:
    """The number of blocks or stages, counted from 0 without a gap in their names."""
    found = {int(match[1]) for name in tensors if (match := re.fullmatch(pattern, name))}
    if found != set(range(len(found))):
        gap = min(set(range(max(found))) - found)
        raise CheckpointError(f"block or stage {gap} is missing among the weights.")
    return len(found)


def mlp_ratio(hidden: int, width: int) -> float:
    """A ratio that gives back this number of channels when it is multiplied and rounded down."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)
