"""The model that a file tells, what is assumed about it, and what is asked back."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from model_settings import model_config, small_model
from safetensors.torch import save_file
from timm.models import save_for_hf

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.open import open_model
from vision.config import ConfigError

PUBLISHED = [
    ("vit_base", "vit_base_patch16_224", 224, {}),
    ("vit_small", "deit_small_patch16_224", 224, {}),
    ("swin_tiny", "swin_tiny_patch4_window7_224", 224, {}),
    ("swinv2_tiny", "swinv2_tiny_window8_256", 256, {"window": 8}),
]


@pytest.mark.parametrize(("ours", "theirs", "size", "given"), PUBLISHED)
def test_published_model_is_inferred_as_its_yaml_describes_it(
    ours: str, theirs: str, size: int, given: dict[str, Any]
) -> None:
    with torch.device("meta"):
        tensors = timm.create_model(theirs).state_dict()
    found = open_model(tensors, **given)
    expected = model_config(ours).model_dump() | {"pretrained": None}
    assert found.config.model_dump() | {"pretrained": None} == expected
    assert (found.image_size, found.channels, found.classes) == ((size, size), 3, 1000)


def test_folder_of_timm_tells_window_size_images_and_classes(tmp_path: Path) -> None:
    model = timm.create_model(
        "swinv2_base_window12to16_192to256.ms_in22k_ft_in1k",
        embed_dim=16,
        num_heads=(1, 2, 4, 8),
        depths=(1, 1, 1, 1),
        num_classes=3,
    )
    save_for_hf(model, tmp_path, model_config={"label_names": ["a", "b", "c"]})
    found = open_model(tmp_path)
    assert (found.config.window, found.config.pretrained_window) == (16, (12, 12, 12, 6))  # type: ignore
    assert found.image_size == (256, 256)
    assert found.class_names == ("a", "b", "c")
    assert found.preprocess.interpolation == "bicubic"
    assert found.preprocess.origin["interpolation"] == "config.json (timm)"


def test_heads_that_nothing_tells_are_asked_for(tmp_path: Path) -> None:
    tensors = small_model("vit_base", (32, 32)).state_dict()
    with pytest.raises(ConfigError, match="heads=") as error:
        open_model(tensors)
    assert "width 48" in str(error.value)
    assert open_model(tensors, heads=3).config.heads == 3  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="does not divide"):
        open_model(tensors, heads=5)
    with pytest.raises(ConfigError, match="Did you mean 'heads'"):
        open_model(tensors, head=3)


def test_window_of_swin_v2_that_nothing_tells_is_asked_for() -> None:
    tensors = small_model("swinv2_tiny", (32, 32)).state_dict()
    with pytest.raises(ConfigError, match="window=8"):
        open_model(tensors)


def test_swin_whose_last_window_shrank_tells_its_image_size() -> None:
    tensors = small_model("swin_tiny", (24, 24), window=6).state_dict()
    found = open_model(tensors)
    assert (found.image_size, found.config.window) == ((24, 24), 6)  # type: ignore[union-attr]
    assert not any("pixels" in line for line in found.report.assumed)


def test_preprocessing_of_hugging_face_is_read_with_its_origin(tmp_path: Path) -> None:
    import transformers

    config = transformers.SwinConfig(
        embed_dim=16, depths=[2], num_heads=[2], image_size=32, patch_size=4, window_size=4
    )
    transformers.SwinForImageClassification(config).save_pretrained(tmp_path)
    processor = {
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4, 0.5, 0.6],
        "resample": 2,
        "do_center_crop": True,
        "size": {"shortest_edge": 40},
        "crop_size": {"height": 32, "width": 32},
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    found = open_model(tmp_path)
    assert found.as_dict()["preprocess"] == {
        "mean": [0.1, 0.2, 0.3],
        "std": [0.4, 0.5, 0.6],
        "interpolation": "bilinear",
        "crop_ratio": 0.8,
    }
    assert found.preprocess.origin["mean"] == "preprocessor_config.json"
    assert found.class_names is None  # LABEL_0 and LABEL_1 are no names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_embed.proj.weight": torch.ones(48, 192)}, "expected 4 axes"),
        ({"positions.table": torch.ones(1, 21, 48)}, "trained_size"),
        ({"patch_embed.proj.weight": None}, "'patch_embed.proj.weight' is missing"),
        ({"blocks.1.": None}, "block or stage 1 is missing"),
    ],
)
def test_weights_that_make_no_model_are_refused_with_the_reason(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tensors = small_model("vit_base", (32, 32)).state_dict()
    for name, tensor in changes.items():
        tensors = {n: t for n, t in tensors.items() if not n.startswith(name)}
        tensors |= {} if tensor is None else {name: tensor}
    save_file(tensors, tmp_path / "weights.safetensors")
    with pytest.raises((CheckpointError, ConfigError), match=message) as error:
        open_model(tmp_path / "weights.safetensors", heads=3)
    assert "weights.safetensors" in str(error.value)


def test_what_was_inferred_is_plain_data() -> None:
    found = open_model(small_model("swin_tiny", (32, 32)).state_dict())
    assert json.loads(json.dumps(found.as_dict())) == found.as_dict()
