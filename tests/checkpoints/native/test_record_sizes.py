"""A record that its tensors contradict is refused from shapes alone, before a model is built."""

import re
from typing import Any

import pytest
from model_settings import small_model
from run_records import PATH, changed, stored, vit_record

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.native.run_record import check_sizes, run_record


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("vit_base", {"depth": 10**9}, "depth"),
        ("vit_base", {"depth": 2}, "depth"),
        ("vit_base", {"width": 10**9, "heads": 10**9}, "width"),
        ("vit_base", {"mlp_ratio": 1e300}, "mlp_ratio"),
        ("vit_base", {"mlp_ratio": float("inf")}, "mlp_ratio"),
        ("vit_base", {"patch_size": 10**9}, "patch_size"),
        ("vit_base", {"patch_size": [8, 10**9]}, "patch_size"),
        ("vit_base", {"registers": 10**9}, "registers"),
        ("swin_tiny", {"depths": [2, 10**9, 2]}, "depths"),
        ("swin_tiny", {"depths": [2, 3], "heads": [2, 2]}, "depths"),
        ("swin_tiny", {"width": 10**9}, "width"),
        ("swin_tiny", {"mlp_ratio": 1e18}, "mlp_ratio"),
        ("swinv2_tiny", {"depths": [2, 3, 2, 1], "heads": [2, 2, 4, 4]}, "depths"),
    ],
)
def test_absurd_model_is_refused_before_it_is_built(
    name: str, changes: dict[str, Any], named: str
) -> None:
    values, shapes = stored(small_model(name, (32, 32)))
    check_sizes(run_record(values, PATH), shapes, PATH)
    with pytest.raises(CheckpointError, match=rf"best\.safetensors.*{named}"):
        check_sizes(run_record(values | {"model": values["model"] | changes}, PATH), shapes, PATH)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vit_base", {}),
        ("vit_base", {"positions": "sincos2d"}),
        ("vit_base", {"positions": "none"}),
        ("swin_tiny", {}),
        ("swin_tiny", {"positions": "absolute"}),
        ("swinv2_tiny", {}),
    ],
)
def test_absurd_size_of_the_images_is_refused(name: str, changes: dict[str, Any]) -> None:
    values, shapes = stored(small_model(name, (32, 32), **changes))
    check_sizes(run_record(values, PATH), shapes, PATH)
    record = changed(values, "preprocess.image_size", [2**20, 2**20])
    with pytest.raises(CheckpointError, match=r"best\.safetensors"):
        check_sizes(run_record(record, PATH), shapes, PATH)


def test_window_as_large_as_large_images_is_refused() -> None:
    """Swin V2 has no table that would tell the window."""
    values, shapes = stored(small_model("swinv2_tiny", (32, 32)))
    record = changed(values, "preprocess.image_size", [2048, 2048])
    check_sizes(run_record(record, PATH), shapes, PATH)
    with pytest.raises(CheckpointError, match="2048"):
        check_sizes(run_record(changed(record, "model.window", 16_384), PATH), shapes, PATH)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blocks.0.attn.qkv.lora_a", (2, 4, 48)),  # three targets
        ("blocks.0.attn.qkv.lora_a", (3, 5, 48)),
        ("blocks.0.attn.qkv.lora_a", (3, 4, 47)),
        ("blocks.0.attn.qkv.lora_a", (12, 48)),
        ("blocks.0.attn.qkv.lora_b", (3, 47, 4)),
        ("blocks.0.attn.qkv.lora_b", None),
        ("blocks.0.attn.qkv.weight", None),
        ("blocks.0.mlp.fc1.lora_a", (1, 4, 48)),  # not a target
    ],
)
def test_additions_that_cannot_be_merged_are_refused(
    name: str, shape: tuple[int, ...] | None
) -> None:
    values, shapes = vit_record()
    values["config"]["tune"] = {"kind": "lora", "alpha": 8.0, "targets": ["q", "k", "v"]}
    record = run_record(values, PATH)
    with pytest.raises(CheckpointError, match="lora"):
        check_sizes(record, shapes, PATH)
    shapes |= {"blocks.0.attn.qkv.lora_a": (3, 4, 48), "blocks.0.attn.qkv.lora_b": (3, 48, 4)}
    check_sizes(record, shapes, PATH)
    changed_shapes = {n: s for n, s in (shapes | {name: shape}).items() if s is not None}
    with pytest.raises(CheckpointError, match=re.escape(name.rpartition(".")[0])):
        check_sizes(record, changed_shapes, PATH)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model.name": "vit_giant_patch14_224"}, "vit_giant_patch14_224"),
        ({"model.name": "no_such_model"}, "no_such_model"),
        ({"model.name": "levit_128s", "preprocess.image_size": [2**20, 2**20]}, "1048576"),
        ({"model.name": "test_vit", "preprocess.image_size": [2**20, 2**20]}, "test_vit"),
        ({"classes": ["x"] * 10**6}, "test_vit"),
    ],
)
def test_absurd_model_of_timm_is_refused_before_it_takes_memory(
    changes: dict[str, Any], named: str
) -> None:
    values, _ = vit_record()
    values["model"] = {"kind": "timm", "name": "test_vit", "drop_path": None}
    values["model"]["checkpoint_activations"] = False
    shapes = {"model.blocks.0.mlp.fc1.weight": (256, 1500)}
    check_sizes(run_record(values, PATH), shapes, PATH)
    for field, value in changes.items():
        values = changed(values, field, value)
    with pytest.raises(CheckpointError, match=rf"best\.safetensors.*{named}"):
        check_sizes(run_record(values, PATH), shapes, PATH)
