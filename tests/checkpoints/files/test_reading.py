"""Files that the real libraries wrote are opened bit for bit, whatever else is in them."""

import argparse
import json
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.files.reading import nonfinite, read_raw
from vision.checkpoints.native.checkpoint import write_checkpoint

FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


class Node(dict[str, Any]):
    """Like the config nodes of yacs: a dict of its own class, with attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.frozen = True


class Settings:
    """Of a program that is not installed where the file is opened."""

    def __init__(self) -> None:
        self.rate = 0.1
        self.scale = torch.tensor([3.0])


def same_bits(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    plain = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (first, second))
    return torch.equal(*plain)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2, bias=False))


def save(value: Any, path: Path, zipped: bool) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    return path


@FORMATS
def test_torch_file_with_objects_gives_every_tensor_and_plain_data(
    tmp_path: Path, zipped: bool
) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    content = {
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1, tags=["a", "b"]),
        "config": Node(DATA=Node(SIZE=224)),
        "settings": Settings(),
        "best": np.float64(81.25),
        "history": np.arange(6, dtype=np.int32).reshape(2, 3),
        "counts": Counter("abb"),
        "lists": defaultdict(list, {"x": [1]}),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "shape": torch.Size([2, 3]),
        "ordered": OrderedDict(a=None),
        "names": {"cat"},
        "raw": b"\x00\xff",
    }
    raw = read_raw(save(content, tmp_path / "last.pth.tar", zipped))

    assert not raw.own
    for name, tensor in model.state_dict().items():
        assert same_bits(raw.tensors[f"state_dict.{name}"], tensor)
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert same_bits(raw.tensors[f"optimizer.state.{index}.{key}"], value)
    assert same_bits(raw.tensors["settings.scale"], torch.tensor([3.0]))
    assert same_bits(raw.tensors["history"], torch.from_numpy(content["history"]))
    assert raw.extra["optimizer"]["param_groups"][0]["betas"] == [0.9, 0.999]
    assert raw.extra["epoch"] == 3 and raw.extra["best"] == 81.25
    assert raw.extra["args"] == {"lr": 0.1, "tags": ["a", "b"]}
    assert raw.extra["config"] == {"DATA": {"SIZE": 224}}
    assert raw.extra["settings"] == {"rate": 0.1}
    assert raw.extra["counts"] == {"a": 1, "b": 2} and raw.extra["lists"] == {"x": [1]}
    assert raw.extra["dtype"] == "torch.float16" and raw.extra["device"] == "cpu"
    assert raw.extra["shape"] == [2, 3] and raw.extra["names"] == ["cat"]
    assert raw.extra["raw"] == b"\x00\xff" and raw.extra["ordered"] == {"a": None}
    module = Node.__module__
    assert set(raw.inert) == {"argparse.Namespace", f"{module}.Node", f"{module}.Settings"}
    assert "state_dict" in raw.parts and "epoch" not in raw.parts


@FORMATS
def test_torch_file_with_every_layout_of_memory_keeps_values_and_strides(
    tmp_path: Path, zipped: bool
) -> None:
    base = torch.randn(4, 6)
    content = {
        "transposed": base.T,
        "slice": base[1:3, ::2],
        "channels_last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "expanded": torch.randn(3, 1).expand(3, 5),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "half": torch.randn(5).half(),
        "bfloat16": torch.randn(5).bfloat16(),
        "bool": torch.tensor([True, False]),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter": nn.Parameter(torch.randn(2, 2)),
    }
    raw = read_raw(save(content, tmp_path / "model.pt", zipped))
    assert raw.tensors.keys() == content.keys()
    for name, tensor in content.items():
        assert same_bits(raw.tensors[name], tensor.resolve_conj().resolve_neg()), name
    for name in ("transposed", "slice", "channels_last", "expanded", "scalar"):
        assert raw.tensors[name].stride() == content[name].stride()
    shared = {raw.tensors[n].untyped_storage().data_ptr() for n in ("transposed", "slice")}
    assert len(shared) == 1


def test_torch_file_with_unsigned_and_small_floats_is_read(tmp_path: Path) -> None:
    content = {
        "unsigned": torch.tensor([1, 65535]).to(torch.uint16),
        "small": torch.randn(4).to(torch.float8_e4m3fn),
    }
    torch.save(content, tmp_path / "model.pth")
    raw = read_raw(tmp_path / "model.pth")
    assert all(same_bits(raw.tensors[name], tensor) for name, tensor in content.items())


@FORMATS
def test_torch_file_saved_from_a_gpu_opens_on_the_cpu(
    tmp_path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(3)
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:3")
    path = save({"weight": weight}, tmp_path / "model.pth", zipped)
    raw = read_raw(path)
    assert raw.tensors["weight"].device.type == "cpu" and same_bits(raw.tensors["weight"], weight)


@FORMATS
def test_whole_model_as_an_object_gives_its_state_dict_and_a_warning(
    tmp_path: Path, zipped: bool
) -> None:
    model = small_model()
    model[0].register_buffer("passing", torch.ones(2), persistent=False)
    raw = read_raw(save(model, tmp_path / "model.pth", zipped))
    assert raw.tensors.keys() == model.state_dict().keys()
    assert all(same_bits(raw.tensors[n], t) for n, t in model.state_dict().items())
    assert "holds a whole model (torch.nn.modules.container.Sequential)" in raw.warnings[0]


def test_tensors_of_a_mapped_file_can_be_changed_without_changing_the_file(tmp_path: Path) -> None:
    weight = torch.randn(5)
    torch.save({"weight": weight}, tmp_path / "model.pth")
    safetensors.torch.save_file({"weight": weight}, tmp_path / "model.safetensors")
    for path in (tmp_path / "model.pth", tmp_path / "model.safetensors"):
        read_raw(path).tensors["weight"].zero_()
        assert same_bits(read_raw(path).tensors["weight"], weight)


def test_tensor_of_a_mapped_file_stored_again_takes_only_its_own_space(tmp_path: Path) -> None:
    tensors = {"small": torch.randn(2), "large": torch.randn(100_000)}
    torch.save(tensors, tmp_path / "model.pth")
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    for path in (tmp_path / "model.pth", tmp_path / "model.safetensors"):
        torch.save(read_raw(path).tensors["small"], tmp_path / "small.pth")
        assert (tmp_path / "small.pth").stat().st_size < 5000


def test_safetensors_file_of_every_type_is_read(tmp_path: Path) -> None:
    numbers = torch.randint(0, 2, (3, 5))
    types = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32]
    types += [torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
    types += [torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]
    tensors = {str(kind): numbers.to(kind) for kind in types} | {"empty": torch.empty(0, 2)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    raw = read_raw(tmp_path / "x.safetensors")
    assert raw.extra == {"metadata": {"format": "pt"}}
    assert raw.tensors.keys() == tensors.keys()
    assert all(same_bits(raw.tensors[name], tensor) for name, tensor in tensors.items())


def test_safetensors_file_with_unaligned_tensors_is_read(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * ((1 - len(header)) % 8)  # the data start one byte behind a multiple of 8
    weight = torch.randn(2)
    content = len(header).to_bytes(8, "little") + header + weight.numpy().tobytes()
    (tmp_path / "x.safetensors").write_bytes(content)
    read = read_raw(tmp_path / "x.safetensors").tensors["w"]
    assert same_bits(read, weight) and read.data_ptr() % 4 == 0


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_npz_file_is_read_with_names_kept(tmp_path: Path, write: Any) -> None:
    arrays = {
        "Transformer/encoder_norm/scale": np.random.randn(3, 4).astype(np.float32),
        "columns": np.asfortranarray(np.random.randn(3, 4)),
        "other_end": np.arange(5).astype(">i4"),
        "half": np.random.randn(5).astype(np.float16),
        "number": np.array(7),
        "empty": np.zeros((0, 3), np.float32),
    }
    write(tmp_path / "vit.npz", **arrays)
    raw = read_raw(tmp_path / "vit.npz")
    assert raw.tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        expected = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("=")))
        assert same_bits(raw.tensors[name], torch.from_numpy(expected.reshape(array.shape))), name


def test_npz_file_of_jax_gives_bfloat16(tmp_path: Path) -> None:
    weight = torch.randn(3, 4).bfloat16()
    bits = weight.view(torch.int16).numpy().view("V2")
    for write in (np.savez, np.savez_compressed):
        write(tmp_path / "vit.npz", kernel=bits, note="text")
        raw = read_raw(tmp_path / "vit.npz")
        assert same_bits(raw.tensors["kernel"], weight) and raw.extra == {"note": "text"}


def test_hub_folder_in_shards_gives_every_tensor_and_both_configs(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = transformers.ViTForImageClassification(config)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    raw = read_raw(tmp_path)
    expected = {k: v for s in shards for k, v in safetensors.torch.load_file(s).items()}
    assert raw.tensors.keys() == expected.keys()
    assert all(same_bits(raw.tensors[name], tensor) for name, tensor in expected.items())
    assert raw.extra["config"]["hidden_size"] == 32
    assert raw.extra["preprocessor"] == {"image_mean": [0.5, 0.5, 0.5]}
    assert read_raw(tmp_path / "model.safetensors.index.json").tensors.keys() == expected.keys()

    shards[1].unlink()
    with pytest.raises(CheckpointError, match=rf"needs {shards[1].name} in the same folder"):
        read_raw(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"w": "../model.safetensors"}}, "outside its own folder"),
        ({"weight_map": {"w": "/etc/passwd"}}, "outside its own folder"),
        ({"weight_map": {"other": "a.safetensors"}}, "promises 'other'"),
        ({"weight_map": ["w"]}, "no 'weight_map'"),
        ({}, "no 'weight_map'"),
    ],
)
def test_index_of_shards_that_lies_is_refused(
    tmp_path: Path, index: dict[str, Any], message: str
) -> None:
    safetensors.torch.save_file({"w": torch.ones(1)}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        read_raw(tmp_path)


def test_run_folder_gives_the_best_checkpoint_and_else_the_newest(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    record = {"step": 1, "config": {}}
    for step in (1, 2):
        path = folder / f"step_{step:08d}.safetensors"
        write_checkpoint(path, {"model.weight": torch.full((2,), float(step))}, record)
    raw = read_raw(tmp_path)
    assert raw.own and raw.path.name == "step_00000002.safetensors"
    assert raw.extra["config"] == {}
    assert raw.tensors["model.weight"].tolist() == [2.0, 2.0]
    (folder / "step_00000001.safetensors").rename(folder / "best.safetensors")
    assert read_raw(tmp_path).path.name == "best.safetensors"


def test_folder_with_one_file_gives_it_and_with_several_asks(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "dino.pth")
    (tmp_path / "notes.txt").write_text("mine")
    assert read_raw(tmp_path).path.name == "dino.pth"
    torch.save({"w": torch.ones(1)}, tmp_path / "swin.pth")
    with pytest.raises(CheckpointError, match=r"2 files of weights; name one: dino.pth, swin.pth"):
        read_raw(tmp_path)


def test_nonfinite_names_exactly_the_tensors_with_nan_or_infinity() -> None:
    kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
    kinds += [torch.float8_e5m2]
    tensors = {"count": torch.tensor(3), "none": torch.empty(0), "flag": torch.tensor([True])}
    expected = []
    for kind in kinds:
        tensors[f"{kind} fine"] = torch.tensor([1.0, -2.0, 0.0]).to(kind)
        for value in ("nan", "inf", "-inf"):
            tensors[f"{kind} {value}"] = torch.tensor([1.0, float(value), 0.0]).to(kind)
            expected.append(f"{kind} {value}")
    assert nonfinite(tensors) == expected
