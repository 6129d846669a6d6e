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
SOURCES = """\
top-1: % of ImageNet-1k's validation images, as published by github.com/facebookresearch/deit,
github.com/microsoft/Swin-Transformer and, for ViT, timm (results/results-imagenet.csv).
Weights without a number may have a published one that is not recorded here."""

TOP1 = {
    # README_deit.md and README_revenge.md
    "deit_tiny_patch16_224.fb_in1k": 72.2,
    "deit_small_patch16_224.fb_in1k": 79.9,
    "deit_base_patch16_224.fb_in1k": 81.8,
    "deit_tiny_distilled_patch16_224.fb_in1k": 74.5,
    "deit_small_distilled_patch16_224.fb_in1k": 81.2,
    "deit_base_distilled_patch16_224.fb_in1k": 83.4,
    "deit3_small_patch16_224.fb_in1k": 81.4,
    "deit3_medium_patch16_224.fb_in1k": 83.0,
    "deit3_base_patch16_224.fb_in1k": 83.8,
    "deit3_large_patch16_224.fb_in1k": 84.9,
    "deit3_huge_patch14_224.fb_in1k": 85.2,
    "deit3_small_patch16_224.fb_in22k_ft_in1k": 83.1,
    "deit3_medium_patch16_224.fb_in22k_ft_in1k": 84.5,
    "deit3_base_patch16_224.fb_in22k_ft_in1k": 85.7,
    "deit3_large_patch16_224.fb_in22k_ft_in1k": 87.0,
    "deit3_huge_patch14_224.fb_in22k_ft_in1k": 87.2,
    # MODELHUB.md
    "swin_tiny_patch4_window7_224.ms_in1k": 81.2,
    "swin_small_patch4_window7_224.ms_in1k": 83.2,
    "swin_base_patch4_window7_224.ms_in1k": 83.5,
    "swin_base_patch4_window7_224.ms_in22k_ft_in1k": 85.2,
    "swin_base_patch4_window12_384.ms_in22k_ft_in1k": 86.4,
    "swin_large_patch4_window7_224.ms_in22k_ft_in1k": 86.3,
    "swin_large_patch4_window12_384.ms_in22k_ft_in1k": 87.3,
    "swinv2_tiny_window8_256.ms_in1k": 81.8,
    "swinv2_small_window8_256.ms_in1k": 83.7,
    "swinv2_base_window8_256.ms_in1k": 84.2,
    "swinv2_tiny_window16_256.ms_in1k": 82.8,
    "swinv2_small_window16_256.ms_in1k": 84.1,
    "swinv2_base_window16_256.ms_in1k": 84.6,
    "swinv2_base_window12to16_192to256.ms_in22k_ft_in1k": 86.2,
    "swinv2_base_window12to24_192to384.ms_in22k_ft_in1k": 87.1,
    "swinv2_large_window12to16_192to256.ms_in22k_ft_in1k": 86.9,
    "swinv2_large_window12to24_192to384.ms_in22k_ft_in1k": 87.6,
    # timm's own evaluation
    "vit_tiny_patch16_224.augreg_in21k_ft_in1k": 75.452,
    "vit_small_patch16_224.augreg_in21k_ft_in1k": 81.402,
    "vit_base_patch16_224.augreg_in21k_ft_in1k": 84.534,
    "vit_base_patch16_224.augreg2_in21k_ft_in1k": 85.108,
    "vit_large_patch16_224.augreg_in21k_ft_in1k": 85.856,
    "vit_base_patch16_384.augreg_in21k_ft_in1k": 86.010,
    "vit_large_patch16_384.augreg_in21k_ft_in1k": 87.096,
    "vit_small_patch16_224.augreg_in1k": 78.842,
    "vit_base_patch16_224.augreg_in1k": 79.154,
}
"""Published top-1 accuracies on ImageNet-1k, by timm's names of the weights."""


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
