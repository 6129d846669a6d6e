"""Checkpoints of this project with correct checksums and records that no run writes."""

import copy
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from model_settings import small_model
from run_records import stored
from torch import Tensor

from vision.checkpoints.native.header import Entry, encode_header, stamp
from vision.checkpoints.open import open_model
from vision.models.build import build_model
from vision.models.configs import TimmConfig

EXTREME_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 10**9, 2**40, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e9),
    *(
        1e308,
        float("nan"),
        float("inf"),
        "",
        "x",
        "auto",
        "lora",
        "\ud800",
        "\0",
        "../..",
        "9" * 5000,
    ),
    *([], {}, [None], [1], [[1, 2], 3], [0] * 5000, ["x"] * 5000, [10**9] * 4, {"kind": "vit"}),
    *(
        {"kind": "timm", "name": "resnet10t"},
        {"kind": "timm", "name": "vit_giant_patch14_224"},
        {"a": {"b": []}},
        {str(n): n for n in range(3000)},
    ),
]
"""What a field of a record may hold instead."""


EVERY_PART: dict[str, Any] = {
    "positions": "learned_rotary",
    "rotary": "mixed",
    "pool": "attention",
    "pool_mlp_ratio": 2.0,
    "representation": 24,
    "projection": 16,
    "mlp": "gated",
    "mlp_norm": True,
    "qk_norm": True,
    "layer_scale": 0.1,
}
"""Settings of a ViT with tensors whose sizes only the record decides."""


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of plain data with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def mutate(value: Any, source: random.Random) -> None:
    """Change plain data in one to three places: another value, a lost, a new or a moved one."""
    for _ in range(source.choice([1, 1, 2, 3])):
        found = list(places(value))
        if not found:
            return
        container, key = source.choice(found)
        match source.randrange(6):
            case 0 if isinstance(container, dict):
                del container[key]
            case 1:
                other, other_key = source.choice(found)
                container[key] = copy.deepcopy(other[other_key])
            case 2 if isinstance(container[key], int | float):
                container[key] = container[key] * source.choice([-1, 0, 2, 10, 10**6, 1.5])
            case 3 if isinstance(container, dict):
                container[source.choice(["x", "kind", "model", "mean"])] = container[key]
            case 4 if source.random() < 0.1:
                container[key] = nested(source.choice([20, 200]))
            case _:
                container[key] = copy.deepcopy(source.choice(EXTREME_VALUES))


Run = tuple[dict[str, Any], dict[str, Tensor]]


def runs() -> list[Run]:
    """The record and the tensors of a small run of every kind."""
    found = []
    for name, changes in (
        *(("vit_base", {}), ("vit_base", {"positions": "sincos2d", "registers": 2})),
        ("vit_base", EVERY_PART),
        *(("swin_tiny", {}), ("swinv2_tiny", {})),
    ):
        model = small_model(name, (32, 32), **changes)
        record, _ = stored(model)
        found.append((record, dict(model.state_dict())))
    record, tensors = copy.deepcopy(found[0][0]), dict(found[0][1])
    record["config"]["tune"] = {"kind": "lora", "alpha": 8.0, "targets": ["q", "v"]}
    tensors["blocks.0.attn.qkv.lora_a"] = torch.randn(2, 4, 48)
    tensors["blocks.0.attn.qkv.lora_b"] = torch.randn(2, 48, 4)
    found.append((record, tensors))
    record = copy.deepcopy(found[0][0])
    baseline = TimmConfig(
        kind="timm", name="test_vit", drop_path=None, checkpoint_activations=False
    )
    model = build_model(baseline, (32, 32), classes=len(record["classes"]))
    record["model"] = record["config"]["model"] = baseline.model_dump(mode="json")
    found.append((record, dict(model.state_dict())))
    return found


def own_file(run: Run, source: random.Random) -> bytes:
    """A checkpoint with correct checksums whose record, or whose description of the tensors, is
    not what any run writes.
    """
    record, tensors = copy.deepcopy(run[0]), {f"model.{n}": t for n, t in run[1].items()}
    record = stamp(record)
    part = source.random()
    if part < 0.05:
        record["format"] = 1
    if part < 0.8:
        mutate(record, source)
    data = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    shapes: dict[str, list[Any]] = {name: list(t.shape) for name, t in tensors.items()}
    aliases: dict[str, Any] = {"model.tied": "model.norm.weight"} if source.random() < 0.1 else {}
    orders: dict[str, Any] = {}
    name = source.choice(list(tensors))
    if part > 0.75:
        match source.randrange(4):
            case 0:
                mutate(shapes, source)
            case 1:
                shapes[name] = [0, source.choice([1, 2**31, 2**40, 2**62, 2**64 - 1, 2**70])]
                data[name] = b""
            case 2:
                orders[name] = source.choice([[0], [1, 0], [0, 0], [2**70], [None], ["a"], []])
            case 3:
                aliases["model.other"] = source.choice([name, "nothing", "model.other"])
    entries, end = {}, 0
    for key, shape in shapes.items():
        bytes_of = data.get(key, b"")
        described = tuple(shape) if isinstance(shape, list) else (shape,)
        entries[key] = Entry("F32", described, end, end + len(bytes_of))
        end += len(bytes_of)
    checksums = [zlib.crc32(data.get(key, b"")) for key in entries]
    header = encode_header(entries, aliases, orders, record, checksums)
    return header + b"".join(data.get(key, b"") for key in entries)


def open_own(path: Path) -> None:
    """Open the model of a checkpoint of this project, as every command does."""
    open_model(path)
