"""The weights are found in what each training program stores."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.files.containers import Weights, unwrap
from vision.checkpoints.files.reading import read_raw

NAMES = ["cls_token", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight"]
NAMES += ["blocks.1.norm1.weight", "norm.weight", "head.weight"]


def weights(value: float, prefix: str = "", names: list[str] = NAMES) -> dict[str, Tensor]:
    return {f"{prefix}{name}": torch.full((2,), value) for name in names}


def unwrapped(tmp_path: Path, content: Any, kind: Any = "auto") -> Weights:
    torch.save(content, tmp_path / "a.pth")
    return unwrap(read_raw(tmp_path / "a.pth"), kind)


def value_of(found: Weights) -> float:
    """The one value that all tensors have."""
    values = {v for tensor in found.tensors.values() for v in tensor.tolist()}
    assert len(values) == 1
    return values.pop()


OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(2), "step": torch.tensor(1.0)}}}
AVERAGED_MODEL = weights(2, "module.") | {"n_averaged": torch.tensor(7)}


@pytest.mark.parametrize(
    ("content", "path_taken", "left"),
    [
        (weights(2), (), {}),
        ({"model": weights(2)}, ("model",), {}),
        (
            {
                "epoch": 3,
                "arch": "vit",
                "state_dict": weights(1),
                "optimizer": OPTIMIZER,
                "version": 2,
                "args": argparse.Namespace(lr=1),
                "state_dict_ema": weights(2),
                "metric": 80.0,
            },
            ("state_dict_ema",),
            {"state_dict": 6, "optimizer": 2},
        ),
        (
            {"model": weights(1), "optimizer": OPTIMIZER, "model_ema": AVERAGED_MODEL},
            ("model_ema", "module."),
            {"model": 6, "optimizer": 2, "n_averaged": 1},
        ),
        ({"model": weights(2), "max_accuracy": torch.tensor(8.0)}, ("model",), {"max_accuracy": 1}),
        (
            {"state_dict": weights(2, "module._orig_mod.")},
            ("state_dict", "_orig_mod.", "module."),
            {},
        ),
        (weights(2, "_orig_mod.module."), ("_orig_mod.", "module."), {}),
        (weights(2, "module.module."), ("module.", "module."), {}),
        ({"my_weights": weights(2), "optimizer": OPTIMIZER}, ("my_weights",), {"optimizer": 2}),
        ({"model": weights(2, "net.")}, ("model", "net."), {}),
    ],
    ids=[
        *("flat", "official", "timm", "torchvision", "loose", "ddp_compile", "compile_ddp"),
        *("ddp_ddp", "one_unknown_part", "attribute"),
    ],
)
def test_container_of_a_program_is_unwrapped(
    tmp_path: Path, content: Any, path_taken: tuple[str, ...], left: dict[str, int]
) -> None:
    found = unwrapped(tmp_path, content)
    assert list(found.tensors) == NAMES and value_of(found) == 2
    assert found.path_taken == path_taken and found.left == left


def test_averaged_or_trained_weights_are_taken_as_asked(tmp_path: Path) -> None:
    content = {"state_dict": weights(1), "state_dict_ema": weights(2)}
    assert value_of(unwrapped(tmp_path, content, "raw")) == 1
    assert value_of(unwrapped(tmp_path, content, "ema")) == 2
    with pytest.raises(CheckpointError, match=r"no averaged weights .* use weights=raw"):
        unwrapped(tmp_path, {"model": weights(1)}, "ema")
    with pytest.raises(CheckpointError, match=r"averaged weights only \(model_ema\)"):
        unwrapped(tmp_path, {"model_ema": weights(1)}, "raw")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: nn.ModuleDict({"_orig_mod": model}),
        pytest.param(torch.compile, marks=pytest.mark.slow),
    ],
    ids=["as compiled", "compiled"],
)
def test_averaged_model_of_torch_is_unwrapped(wrap: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    average = torch.optim.swa_utils.AveragedModel(wrap(model))
    found = unwrapped(tmp_path, {"model_ema": average.state_dict()})
    assert found.tensors.keys() == model.state_dict().keys()
    assert found.left == {"n_averaged": 1}


@pytest.mark.parametrize("prefix", ["backbone.", "module.backbone."])
def test_dino_gives_the_teacher_without_its_projection_head(tmp_path: Path, prefix: str) -> None:
    names = [name for name in NAMES if not name.startswith("head")]
    head = {f"{prefix.removesuffix('backbone.')}head.mlp.0.weight": torch.zeros(2)}
    content = {
        "student": weights(1, prefix, names) | head,
        "teacher": weights(2, prefix, names) | head,
        "dino_loss": {"center": torch.zeros(2)},
    }
    found = unwrapped(tmp_path, content)
    assert list(found.tensors) == names and value_of(found) == 2
    assert found.path_taken[0] == "teacher" and found.path_taken[-1] == "backbone."
    assert found.left == {"student": len(names) + 1, "dino_loss": 1, "head": 1}
    assert value_of(unwrapped(tmp_path, content, "raw")) == 1


def test_dinov2_in_chunks_gives_blocks_by_their_number(tmp_path: Path) -> None:
    content = {
        "teacher": {
            "backbone.cls_token": torch.zeros(1),
            "backbone.blocks.0.0.attn.qkv.weight": torch.tensor([0.0]),
            "backbone.blocks.0.1.attn.qkv.weight": torch.tensor([1.0]),
            "backbone.blocks.1.2.attn.qkv.weight": torch.tensor([2.0]),
            "dino_head.mlp.0.weight": torch.zeros(1),
            "ibot_head.mlp.0.weight": torch.zeros(1),
        }
    }
    found = unwrapped(tmp_path, content)
    expected = ["cls_token", *(f"blocks.{i}.attn.qkv.weight" for i in range(3))]
    assert list(found.tensors) == expected
    assert [found.tensors[f"blocks.{i}.attn.qkv.weight"].item() for i in range(3)] == [0, 1, 2]
    assert found.left == {"dino_head": 1, "ibot_head": 1}


@pytest.mark.parametrize("path", ["encoder.", "timm_model.", "student.net.vit.", "my_model.enc1."])
def test_words_in_front_of_a_known_layout_are_taken_off(tmp_path: Path, path: str) -> None:
    loss = {"criterion.weight": torch.zeros(3), "scale": torch.zeros(1)}
    found = unwrapped(tmp_path, weights(2, path) | loss)
    assert list(found.tensors) == NAMES and found.path_taken[-1] == path
    assert found.left == {"criterion": 1, "scale": 1}


def test_classifier_beside_its_network_belongs_to_it(tmp_path: Path) -> None:
    names = NAMES[:-1]
    content = weights(2, "encoder.", names) | {"classifier.weight": torch.full((2,), 2.0)}
    found = unwrapped(tmp_path, content)
    assert list(found.tensors) == NAMES and not found.left
    assert found.path_taken == ("encoder.", "classifier.weight → head.weight")
    with pytest.raises(CheckpointError, match=r"'encoder\.head\.weight' and 'fc\.weight'"):
        unwrapped(tmp_path, weights(2, "encoder.") | {"fc.weight": torch.zeros(2)})


def test_two_networks_in_one_file_are_refused_until_one_is_left_out(tmp_path: Path) -> None:
    content = weights(1, "encoder_q.") | weights(2, "encoder_k.")
    torch.save(content, tmp_path / "a.pth")
    raw = read_raw(tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=r"encoder_k\., encoder_q\.") as error:
        unwrap(raw)
    assert "rename" in str(error.value)
    found = unwrap(raw, rules=[(r"encoder_k\..*", "")])
    assert list(found.tensors) == NAMES and value_of(found) == 1


def test_stages_are_not_taken_for_words_in_front_of_a_vit(tmp_path: Path) -> None:
    names = [f"stages.{s}.blocks.0.attn.qkv.weight" for s in range(2)]
    assert list(unwrapped(tmp_path, weights(2, "", names)).tensors) == names


def test_mmpretrain_keeps_its_own_names(tmp_path: Path) -> None:
    names = ["backbone.layers.0.ln1.weight", "backbone.cls_token", "head.layers.head.weight"]
    content = {"meta": {"epoch": 3}, "state_dict": weights(2, "", names)}
    assert list(unwrapped(tmp_path, content).tensors) == names


def test_lightning_gives_the_attribute_that_is_the_model(tmp_path: Path) -> None:
    metrics = {"train_accuracy.total": torch.zeros(1), "criterion.weight": torch.zeros(3)}
    content = {
        "pytorch-lightning_version": "2.4.0",
        "state_dict": weights(2, "classifier_network._orig_mod.") | metrics,
        "optimizer_states": [OPTIMIZER],
        "hyper_parameters": {"lr": 0.1},
    }
    found = unwrapped(tmp_path, content)
    assert list(found.tensors) == NAMES
    assert found.path_taken == ("state_dict", "_orig_mod.", "classifier_network.")
    assert found.left["train_accuracy"] == 1 and found.left["criterion"] == 1

    content["state_dict"] = weights(2)  # stored without a prefix
    assert list(unwrapped(tmp_path, content).tensors) == NAMES


def test_hugging_face_names_stay_as_they_are(tmp_path: Path) -> None:
    names = ["vit.embeddings.cls_token", "vit.encoder.layer.0.x", "classifier.weight"]
    safetensors.torch.save_file(weights(2, "", names), tmp_path / "model.safetensors")
    assert set(unwrap(read_raw(tmp_path)).tensors) == set(names)
    safetensors.torch.save_file(weights(2, "", names[:2]), tmp_path / "model.safetensors")
    assert set(unwrap(read_raw(tmp_path)).tensors) == set(names[:2])


def test_file_with_several_unknown_parts_asks_which(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'generator' \(6 tensors\), 'critic' \(6 tensors\)"):
        unwrapped(tmp_path, {"generator": weights(1), "critic": weights(2)})


def test_file_without_tensors_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no tensor"):
        unwrapped(tmp_path, {"epoch": 3})
