"""Readable names of WordNet synsets, by which ImageNet names its class folders (n01440764: tench,
Tinca tinca).

timm carries the lists. They are read as files: importing timm would load torch, for which `vision
info` need not wait.
"""

import re
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_SYNSET = re.compile(r"n\d{8}")


def readable_names(classes: tuple[str, ...]) -> tuple[str, ...]:
    """The names of synsets if all classes are known ones, otherwise the classes themselves."""
    if not classes or not all(_SYNSET.fullmatch(name) for name in classes):
        return classes
    lemmas = _lemmas()
    if not all(name in lemmas for name in classes):
        return classes
    names = [lemmas[name] for name in classes]
    # Two kinds of crane are two classes: only the synset keeps them apart.
    often = Counter(names)
    return tuple(
        f"{name} ({synset})" if often[name] > 1 else name
        for name, synset in zip(names, classes, strict=True)
    )


@cache
def imagenet_synsets() -> tuple[str, ...]:
    """The 1,000 synsets of ILSVRC 2012 in the order of their labels."""
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
