"""Every ViT and Swin of timm, opened here: does it compute the same?

    python benchmarks/timm_sweep.py                    # all of them: a quarter of an hour
    python benchmarks/timm_sweep.py 'eva02_*' '*_rope_*'

Each architecture is built by timm with two blocks (in each stage), 11 classes and random numbers in
all parameters, and opened twice:

- as the folder that timm's `save_for_hf` writes, with a config.json;
- as a bare state dict, which does not say what it is. Settings that an error asks for are given.

`equal`: outputs differ by at most 1e-4 of their deviation. `asked`: so they do once the settings
are given that the error names. `refused`: an error says how to run it instead. `assumed`: outputs
differ, and every setting that is false is listed as assumed. `wrong`: anything else; there must be
none.
"""

import argparse
import fnmatch
import json
import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from rich.console import Console
from rich.table import Table
from timm.models import save_for_hf
from torch import Tensor, nn

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.layouts.timm.timm_models import describe
from vision.checkpoints.open import open_model
from vision.config import ConfigError

MODULES = (
    "vision_transformer",
    "vision_transformer_hybrid",
    "vision_transformer_relpos",
    "vision_transformer_sam",
    "vitamin",
    "deit",
    "eva",
    "beit",
    "naflexvit",
    "swin_transformer",
    "swin_transformer_v2",
    "swin_transformer_v2_cr",
)
FAMILIES = (
    ("swinv2_cr_", "Swin V2 CR"),
    ("swinv2_", "Swin V2"),
    ("swin_s3_", "Swin S3"),
    ("swin_", "Swin"),
    ("samvit", "SAM"),
    ("vitamin", "ViTamin"),
    ("naflexvit", "NaFlexVit"),
    ("beit3", "BEiT-3"),
    ("beit", "BEiT"),
    ("eva02", "EVA-02"),
    ("eva_", "EVA"),
    ("deit3", "DeiT-III"),
    ("deit", "DeiT"),
    ("aimv2", "AIMv2"),
    ("flexivit", "FlexiViT"),
    (".*_s?relpos_", "ViT, relative positions"),
    (".*_dinov3", "DINOv3"),
    (".*_lingbot", "LingBot"),
    (".*_sapiens2", "Sapiens2"),
    (".*_dinov2|.*_tipsv2", "DINOv2, TIPSv2"),
    (".*_pe_", "Perception Encoder"),
    (".*_rope_", "ViT, rotary"),
    (".*_siglip_", "SigLIP"),
    (".*_clip_", "CLIP"),
    (".*(_r26_|_r50_|_resnet|_r_s16|_mci_)", "hybrid of ResNet and ViT"),
    (".*_(gap|map)_", "ViT, mean or attention pooling"),
    ("", "ViT"),
)
TOLERANCE = 1e-4
CELLS = 6
"""Patches along an image, where the architecture allows any number."""
CLASSES = 11
Given = dict[str, Any]


class Verdict(NamedTuple):
    """What became of an architecture in one form of file."""

    word: str
    detail: str


class Row(NamedTuple):
    """An architecture in both forms."""

    name: str
    family: str
    folder: Verdict
    bare: Verdict


def architectures(patterns: list[str]) -> list[str]:
    """timm's names of ViTs and Swins, of those that a pattern matches."""
    names = sorted({name for module in MODULES for name in timm.list_models(module=module)})
    return [name for name in names if any(fnmatch.fnmatch(name, p) for p in patterns or ["*"])]


def family(name: str) -> str:
    """The row of the table that an architecture belongs to."""
    return next(title for pattern, title in FAMILIES if re.match(pattern, name))


def small(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """timm's model with few blocks on a small grid, and the arguments for it."""
    depth = {"depths": (2, 2, 2, 2)} if "swin" in name else {"depth": 2}
    # Of all blocks, where the architecture has a number for each.
    depth |= {"num_kv_heads": 4} if "sapiens2" in name else {}
    with torch.device("meta"):
        model = _created(name, depth)
    stem = getattr(model, "patch_embed", None)
    patch = getattr(stem, "patch_size", None)
    # These show by the size of their grid which of several models they are.
    native = "swin|siglip|_pe_|vitamin|samvit|relpos|_r[0-9_]|resnet|mci"
    free = patch is not None and not re.search(native, name)
    size = {"img_size": CELLS * patch[0]} if free else {}
    arguments = depth | size
    return _randomised(_created(name, arguments)).eval(), arguments


def _created(name: str, arguments: dict[str, Any]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return timm.create_model(name, num_classes=CLASSES, **arguments)


def _randomised(model: nn.Module) -> nn.Module:
    """Numbers in all parameters that show when one is left out or taken for another."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "gamma" in name or (parameter.ndim == 1 and name.endswith("weight")):
                noise = 1 + 0.3 * noise
            elif name.endswith("logit_scale"):
                noise = 2 + 0.2 * noise
            elif parameter.ndim == 1:
                noise = 0.3 * noise
            elif not re.search("token|pos_embed|table|freqs|latent", name):
                noise = noise / noise[0].numel() ** 0.5
            parameter.copy_(noise)
    return model


def images_of(size: tuple[int, int]) -> Tensor:
    """Two images, always the same."""
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))


def judge(
    source: Path | dict[str, Tensor], peer: nn.Module, settings: Mapping[str, Any] | None
) -> Verdict:
    """Open and compare; `settings` are timm's own, to answer what an error asks."""
    given: Given = {}
    for _ in range(4):
        try:
            opened = open_model(source, **given)
        except (CheckpointError, ConfigError) as error:
            message = str(error)
            answers = _answers(message, settings or {}, given, peer)
            if answers and settings is not None:
                given |= answers
                continue
            # Bare tensors of a network that no model here computes: any error will do.
            advised = "model=timm model.name=" in message or isinstance(source, dict)
            refused = settings is None and advised
            return Verdict(
                "refused" if refused else "wrong", message.rpartition("safetensors: ")[2]
            )
        break
    else:
        return Verdict("wrong", f"asks again after {given}")
    stem = getattr(peer, "patch_embed", None)
    size = getattr(stem, "img_size", None) or opened.image_size
    # timm leaves out what is not a whole patch.
    patch = (1, 1) if stem is None else stem.patch_size
    whole = [side // step * step for side, step in zip(size, patch, strict=True)]
    if tuple(whole) != opened.image_size:  # listed as assumed
        opened = open_model(source, **(given | {"trained_size": whole}))
    images = images_of(size)
    with torch.no_grad():
        expected, found = peer(images), opened.model(images[..., : whole[0], : whole[1]])
    same_shape = expected.shape == found.shape
    deviation = float((found - expected).abs().max() / expected.std()) if same_shape else 1.0
    if deviation <= TOLERANCE:
        listed = ", ".join(f"{key}={value}" for key, value in given.items())
        return Verdict("asked" if given else "equal", f"{deviation:.0e} {listed}")
    own = opened.config.model_dump(mode="json")
    false = [k for k, v in (settings or {}).items() if k in own and own[k] != v]
    false = [k for k in false if k not in ("layer_scale", "pool_heads", "pool_mlp_ratio")]
    listed = bool(false) and all(
        any(f"{k}=" in line for line in opened.report.assumed) for k in false
    )
    detail = ", ".join(f"{k}={own[k]}, not {(settings or {})[k]}" for k in false)
    return Verdict("assumed" if listed else "wrong", f"{deviation:.0e} {detail}")


def _answers(message: str, settings: Mapping[str, Any], given: Given, peer: nn.Module) -> Given:
    """Values for the settings that an error names."""
    names = re.findall(r"\w+(?==)|pretrained_window", message)
    stem = getattr(peer, "patch_embed", None)
    known = dict(settings) | {"trained_size": list(getattr(stem, "img_size", None) or ())}
    return {n: known[n] for n in names if n in known and n not in given and known[n]}


def sweep(patterns: list[str]) -> Iterator[Row]:
    """Judge architectures one by one."""
    for name in architectures(patterns):
        try:
            peer, arguments = small(name)
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            unjudged = Verdict("wrong", f"timm does not build it small: {error}")
            yield Row(name, family(name), unjudged, unjudged)
            continue
        try:
            described = describe(name, arguments, {})
            settings = None if described is None else described.settings
        except CheckpointError:
            settings = None
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save_for_hf(peer, folder, model_args=arguments, safe_serialization=True)
            whole = judge(Path(folder), peer, None)
        bare = judge({n: t.clone() for n, t in peer.state_dict().items()}, peer, settings)
        yield Row(name, family(name), whole, bare)


def table(rows: list[Row]) -> Table:
    """Counts by family."""
    result = Table(title="timm's ViTs and Swins, opened here")
    words = [("folder", w) for w in ("equal", "refused", "wrong")]
    words += [("bare", w) for w in ("equal", "asked", "assumed", "refused", "wrong")]
    result.add_column("family")
    for form, word in words:
        result.add_column(f"{form}\n{word}", justify="right")
    families = dict.fromkeys(row.family for row in rows)
    for title in [*families, "all"]:
        own = [row for row in rows if title in (row.family, "all")]
        counts = Counter(("folder", row.folder.word) for row in own)
        counts += Counter(("bare", row.bare.word) for row in own)
        cells = [str(counts[word]) if counts[word] else "" for word in words]
        result.add_row(title, *cells)
    return result


def main() -> None:
    """Print a line for each architecture, then the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("patterns", nargs="*", help="timm's names, with * and ?; none: all")
    parser.add_argument("--output", type=Path, help="where the verdicts go as JSON")
    arguments = parser.parse_args()
    console, start, rows = Console(width=160), time.perf_counter(), []
    for row in sweep(arguments.patterns):
        rows.append(row)
        folder, bare = row.folder, row.bare
        console.print(f"{row.name}: {folder.word} ({folder.detail}) · {bare.word} ({bare.detail})")
    console.print(table(rows))
    console.print(f"{len(rows)} architectures, {time.perf_counter() - start:.0f} s")
    if arguments.output:
        arguments.output.write_text(json.dumps([row._asdict() for row in rows], indent=1))


if __name__ == "__main__":
    main()
