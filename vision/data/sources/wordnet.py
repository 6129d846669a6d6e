"""Readable names of WordNet synsets, ImageNet's names of class folders (n01440764: tench).

The lists are part of timm. They are read as files, since importing timm would load torch, which
`vision info` does without.
"""

import re
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_SYNSET = re.compile(r"n\d{8}")


def readable_names(classes: tuple[str, ...]) -> tuple[str, ...]:
    """Return readable names if all classes are known synsets, otherwise the classes unchanged."""
    if not classes or not all(_SYNSET.fullmatch(name) for name in classes):
        return classes
    lemmas = _lemmas()
    if not all(name in lemmas for name in classes):
        return classes
    names = [lemmas[name] for name in classes]
    # Two classes are called crane; only the synset distinguishes them.
    often = Counter(names)
    return tuple(
        f"{name} ({synset})" if often[name] > 1 else name
        for name, synset in zip(names, classes, strict=True)
    )


@cache
def imagenet_synsets() -> tuple[str, ...]:
    """Return the 1,000 synsets of ILSVRC 2012 in the order of their labels."""
    return tuple(_read("imagenet_synsets.txt").split())


@cache
def _lemmas() -> dict[str, str]:
    lines = _read("imagenet_synset_to_lemma.txt").splitlines()
    return dict(line.split("\t", 1) for line in lines)


def _read(name: str) -> str:
    spec = find_spec("timm")
    assert spec is not None
    assert spec.origin is not None  # a dependency of this package
    return (Path(spec.origin).parent / "data" / "_info" / name).read_text(encoding="utf-8")
