"""Names of tensors changed by rules that a user gives, before the layout is recognised."""

import difflib
import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from vision.config import ConfigError

_SHOWN = 3


def rename(
    tensors: Mapping[str, Tensor], rules: Sequence[tuple[str, str]]
) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors under other names, and a line for each rule.

    Each rule is a regular expression and its replacement, as `re.sub` takes them; they are applied
    in order, each to the names that the rules before it made. A tensor whose name becomes empty is
    left out.
    """
    names = {name: name for name in tensors}
    lines = []
    for pattern, replacement in rules:
        changed = _apply(pattern, replacement, list(names.values()))
        if not changed:
            raise ConfigError(
                f"rename: '{pattern}' matches none of the {len(names)} names of tensors; the "
                f"nearest are {_nearest(pattern, list(names.values()))}."
            )
        names = {old: changed.get(new, new) for old, new in names.items()}
        lines.append(_line(pattern, replacement, changed))
        names = {old: new for old, new in names.items() if new}
        _check_unique(names, pattern)
    return {new: tensors[old] for old, new in names.items()}, lines


def _apply(pattern: str, replacement: str, names: list[str]) -> dict[str, str]:
    """The names that a rule matches, and what it makes of them."""
    try:
        compiled = re.compile(pattern)
        return {n: compiled.sub(replacement, n) for n in names if compiled.search(n)}
    except (re.error, IndexError) as error:
        raise ConfigError(
            f"rename: '{pattern} -> {replacement}' is not a valid rule of re.sub: {error}. A dot "
            rf"is written \., a group (…) and, in the replacement, \1."
        ) from error


def _check_unique(names: Mapping[str, str], pattern: str) -> None:
    first: dict[str, str] = {}
    for old, new in names.items():
        if new in first:
            raise ConfigError(
                f"rename: after '{pattern}' two tensors are called '{new}': '{first[new]}' and "
                f"'{old}'. Make the pattern narrower, or leave one out by an empty replacement."
            )
        first[new] = old


def _nearest(pattern: str, names: list[str]) -> str:
    plain = re.sub(r"[\\^$()?*+|\[\]{}]", "", pattern)
    near = difflib.get_close_matches(plain, names, n=_SHOWN, cutoff=0.0)
    return ", ".join(f"'{name}'" for name in near)


def _line(pattern: str, replacement: str, changed: Mapping[str, str]) -> str:
    old, new = next(iter(changed.items()))
    what = f"'{old}' → '{new}'" if new else f"'{old}' left out"
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"rename '{pattern} -> {replacement}': {what}{more}"
