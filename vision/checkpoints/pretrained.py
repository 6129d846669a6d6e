"""The published weights that `init=timm:NAME` takes, as `vision list pretrained` prints them.

Everything comes from the installed timm: nothing is downloaded.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import timm
import torch

from vision.checkpoints.published import SOURCES, TOP1
from vision.config import ConfigError

COUNTED = 40
"""Parameters are counted on models that timm builds, a tenth of a second each: for short lists."""

FAMILIES = (
    ("CLIP", "vision_transformer", "*_clip_*"),
    ("SigLIP", "vision_transformer", "*_siglip_*"),
    ("Perception Encoder", "eva", "vit_pe_*"),
    ("EVA", "eva", "eva_*"),
    ("EVA-02", "eva", "eva02_*"),
    ("BEiT", "beit", "*"),
    ("BEiT", "vision_transformer", "beit3_*"),
    ("NaFlexViT", "naflexvit", "*"),
    ("FlexiViT", "vision_transformer", "flexivit_*"),
    ("ViT with rotary positions", "eva", "*_rope_*"),
    ("DINO", "vision_transformer", "*.dino"),
    ("DINOv2", "vision_transformer", "*_dinov2.*"),
    ("DINOv3", "eva", "*_dinov3*"),
    ("DeiT", "deit", "*"),
    ("ViT", "vision_transformer", "vit_*"),
    ("Swin", "swin_transformer", "*"),
    ("Swin V2", "swin_transformer_v2", "*"),
)
"""Title, module of timm, and pattern of the names; a name belongs to the first that fits."""
OTHERS = "Other models of timm"


class Row(NamedTuple):
    """The columns of one line, in their order. An empty cell says that nothing is known."""

    name: str
    params: str
    image: str
    top1: str
    licence: str
    model: str


def pretrained_table(pattern: str | None, pretrained: Mapping[str, str]) -> str:
    """The names that match a pattern, by default those of ViTs and Swins, grouped by family.

    `pretrained` maps names to the choice of `model=` that takes them with `init=pretrained`.
    """
    families = _families()
    names = list(families) if pattern is None else _matching(pattern)
    count = _parameters if len(names) <= COUNTED else None
    groups: dict[str, list[Row]] = {}
    for title in (*dict.fromkeys(title for title, _, _ in FAMILIES), OTHERS):
        members = [name for name in names if families.get(name, OTHERS) == title]
        model = "timm" if title == OTHERS else ""
        rows = [_row(name, pretrained.get(name, model), count) for name in members]
        groups |= {title: rows} if rows else {}
    tables = [_aligned(title, rows) for title, rows in groups.items()]
    return "\n\n".join([*tables, "\n".join(_footnotes(groups, count is not None))])


def _families() -> dict[str, str]:
    """Family of every name that belongs to one."""
    found: dict[str, str] = {}
    for title, module, glob in FAMILIES:
        for name in timm.list_models(module=module, pretrained=True):
            if fnmatchcase(name, glob):
                found.setdefault(name, title)
    return found


def _matching(pattern: str) -> list[str]:
    """The names, or the architectures without their tags, that a pattern matches; a pattern
    without wildcards matches anywhere in a name.
    """
    known: list[str] = timm.list_pretrained()
    word = pattern.removeprefix("timm:")
    glob = word if re.search(r"[*?[]", word) else f"*{word}*"
    names = [n for n in known if fnmatchcase(n, glob) or fnmatchcase(n.partition(".")[0], glob)]
    if names:
        return names
    parts = {part for name in known for part in re.split(r"[._]", name)}
    near = difflib.get_close_matches(re.sub(r"[*?\[\]]", "", word), {*known, *parts}, 5, 0.5)
    nearest = f"The nearest: {', '.join(near)}." if near else "No name is near."
    raise ConfigError(
        f"'{pattern}' matches none of the {len(known):,} names of timm {timm.__version__}. "
        f"{nearest} Without a pattern, vision list pretrained lists the ViTs and Swins."
    )


def _row(name: str, model: str, count: Callable[[str], int] | None) -> Row:
    config: Any = timm.get_pretrained_cfg(name)
    height, width = config.input_size[1:]
    return Row(
        name=name,
        params=f"{count(name) / 1e6:,.1f} M" if count else "",
        image=str(height) if height == width else f"{height}×{width}",
        top1=f"{TOP1[name]:.1f}" if name in TOP1 else "",
        licence=config.license or "",
        model=model,
    )


def _parameters(name: str) -> int:
    """Parameters of the model that timm builds for these weights, its head included."""
    with torch.device("meta"):
        model = timm.create_model(name)
    return sum(parameter.numel() for parameter in model.parameters())


def _aligned(title: str, rows: Sequence[Row]) -> str:
    """A family as columns below its title; a column without any entry is left out."""
    header = Row(f"{title} ({len(rows)})", "params", "image", "top-1", "licence", "model")
    columns = [
        _column(head, cells, numbers=index in (1, 2, 3))
        for index, (head, *cells) in enumerate(zip(header, *rows, strict=True))
        if any(cells)
    ]
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _column(head: str, cells: Iterable[str], numbers: bool) -> list[str]:
    column = [head, *cells]
    width = max(map(len, column))
    return [cell.rjust(width) if numbers else cell.ljust(width) for cell in column]


def _footnotes(groups: Mapping[str, Sequence[Row]], counted: bool) -> list[str]:
    """How to use the names, and what each column says or lacks."""
    rows = [row for group in groups.values() for row in group]
    lines = [
        "init=timm:NAME model=auto takes these weights. Models that this project does not have",
        "itself run as timm's: model=timm model.name=NAME init=pretrained.",
    ]
    if any(row.model not in ("", "timm") for row in rows):
        lines.append("model: init=pretrained takes these weights for this choice of model=.")
    if not counted:
        lines.append(f"Parameters are counted where a pattern leaves at most {COUNTED} names.")
    if any(row.top1 for row in rows):
        lines.append(SOURCES)
    return lines
