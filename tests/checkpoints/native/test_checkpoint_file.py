"""What goes into a checkpoint file comes out again, bit for bit, here and in other programs."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from vision import __version__
from vision.checkpoints.errors import CheckpointError, NewerFormatError
from vision.checkpoints.files.mapped import DTYPE_NAMES
from vision.checkpoints.native import header as record_module
from vision.checkpoints.native.checkpoint import (
    read_checkpoint,
    write_checkpoint,
)
from vision.checkpoints.native.header import read_record
from vision.cli.composition import compose

BESIDE = {"format": record_module.FORMAT, "version": __version__}
"""What the writer adds to every record."""


def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bits at all, so also not-a-numbers of every kind, infinities and negative zeros."""
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    size = torch.empty((), dtype=dtype).element_size()
    data = torch.randint(0, 256, (math.prod(shape) * size,), dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def same_bits(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    one, two = (t.contiguous().reshape(-1).view(torch.uint8) for t in (first, second))
    return torch.equal(one, two)


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7, 5)], ids=str)
def test_tensor_of_any_type_and_shape_comes_back_bit_for_bit(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"one": random_bits(dtype, *shape), "two": random_bits(dtype, *shape)}
    write_checkpoint(path, tensors, {})
    found = read_checkpoint(path).tensors
    assert list(found) == ["one", "two"]
    assert all(same_bits(found[name], tensors[name]) for name in tensors)


def test_tensors_of_mixed_types_are_read_by_the_safetensors_library(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {str(dtype): random_bits(dtype, 3, 3) for dtype in DTYPE_NAMES}
    tensors["empty"] = torch.empty(0, 4)
    tensors["scalar"] = torch.tensor(3, dtype=torch.int64)
    write_checkpoint(path, tensors, {"step": 7, "classes": ["Hund", "고양이"]})
    found = load_file(path)
    assert set(found) == set(tensors)
    assert all(same_bits(found[name], tensors[name]) for name in tensors)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    stored = json.loads(metadata["record"])
    assert stored == {"step": 7, "classes": ["Hund", "고양이"], **BESIDE}


def test_order_of_names_is_kept_whatever_the_order_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {
        "z": torch.zeros(1, dtype=torch.bool),
        "a": torch.ones(1),
        "m": torch.zeros(1).half(),
    }
    write_checkpoint(path, tensors, {})
    assert list(read_checkpoint(path).tensors) == ["z", "a", "m"]


def test_views_that_are_not_contiguous_are_stored_as_they_look(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "transposed": base.T,
        "column": base[:, 2],
        "every second": base[::2, 1::2],
        "one of every second": base[1, 2::3][:1],
        "expanded": torch.tensor([[5.0]]).expand(3, 4),
        "conjugate": torch.tensor([1 + 2j]).to(torch.complex64).conj(),
        "negative": torch.tensor([1 + 2j]).to(torch.complex64).conj().imag,
        "parameter": nn.Parameter(torch.ones(2)),
    }
    write_checkpoint(path, tensors, {})
    found = read_checkpoint(path).tensors
    library = load_file(path)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
        assert torch.equal(library[name], tensor), name
        assert not found[name].requires_grad


def test_order_of_axes_in_memory_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    weights = torch.randn(8, 3, 4, 4).to(memory_format=torch.channels_last)
    tensors = {
        "last": weights,
        "part": weights[1:5],
        "usual": torch.randn(2, 3),
        "t": torch.randn(2, 3).T,
    }
    write_checkpoint(path, tensors, {})
    found = read_checkpoint(path).tensors
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
        assert found[name].stride() == tensor.clone().stride(), name


def test_tied_tensors_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    tied, copied = tmp_path / "tied.safetensors", tmp_path / "copied.safetensors"
    weight = torch.randn(256, 256)
    write_checkpoint(tied, {"a": weight, "b": weight, "row": weight[0]}, {})
    write_checkpoint(copied, {"a": weight, "b": weight.clone(), "row": weight[0]}, {})
    assert copied.stat().st_size - tied.stat().st_size > 0.9 * weight.nbytes
    found = read_checkpoint(tied).tensors
    assert all(
        torch.equal(found[n], t) for n, t in {"a": weight, "b": weight, "row": weight[0]}.items()
    )
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert found["row"].data_ptr() != found["a"].data_ptr()
    assert torch.equal(read_checkpoint(tied, prefix="b").tensors["b"], weight)
    separate = read_checkpoint(copied).tensors
    assert separate["a"].data_ptr() != separate["b"].data_ptr()


def test_read_tensors_can_be_changed_without_changing_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_checkpoint(path, {"a": torch.ones(4)}, {})
    read_checkpoint(path).tensors["a"].add_(1)
    assert torch.equal(read_checkpoint(path).tensors["a"], torch.ones(4))


def test_prefix_reads_only_the_tensors_below_it(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_checkpoint(path, {"model/a": torch.ones(4), "optimizer/a": torch.ones(4)}, {"step": 3})
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # the last tensor's: must not matter to who does not read it
    path.write_bytes(content)
    found = read_checkpoint(path, prefix="model/")
    assert list(found.tensors) == ["model/a"] and found.record["step"] == 3
    with pytest.raises(CheckpointError, match="'optimizer/a'"):
        read_checkpoint(path)


def test_checkpoint_without_tensors_holds_its_record(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_checkpoint(path, {}, {"step": 0})
    assert read_checkpoint(path) == ({}, {"step": 0, **BESIDE})
    assert load_file(path) == {}


def test_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for path in (first, second):
        write_checkpoint(path, {"a": torch.arange(5), "b": torch.arange(5.0).half()}, {"step": 1})
    assert first.read_bytes() == second.read_bytes()


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.dictionaries(st.text().filter(lambda key: key not in BESIDE), PLAIN))
def test_any_plain_record_comes_back_as_it_was(tmp_path: Path, record: dict[str, Any]) -> None:
    path = tmp_path / "a.safetensors"
    write_checkpoint(path, {}, record)
    found = read_record(path)
    assert repr(found) == repr({**record, **BESIDE})  # repr: -0.0 is not 0.0, True is not 1


def test_metric_that_is_not_a_number_does_not_stop_the_saving(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_checkpoint(path, {}, {"loss": math.nan, "best": -math.inf})
    found = read_record(path)
    assert math.isnan(found["loss"]) and found["best"] == -math.inf


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"metrics": {"top1": torch.tensor(1.0)}}, r"record\.metrics\.top1: a Tensor"),
        ({"size": [1, (2, 3)]}, r"record\.size\[1\]: a tuple"),
        ({"path": Path("a")}, r"record\.path: a \w*Path"),
        ({"counts": {3: 1}}, r"record\.counts: the key 3 is not a string"),
    ],
)
def test_record_that_json_cannot_hold_is_refused_by_place(
    record: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=message):
        write_checkpoint(tmp_path / "a.safetensors", {}, record)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": torch.ones(2, 2).to_sparse()}, "'w' is sparse"),
        ({"w": torch.ones(2, device="meta")}, "'w' is .* without data"),
        ({"w": torch.ones(2, dtype=torch.complex128)}, "'w' has type torch.complex128"),
        ({"__metadata__": torch.ones(2)}, "__metadata__"),
    ],
)
def test_tensor_that_the_format_cannot_hold_is_refused_by_name(
    tensors: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        write_checkpoint(tmp_path / "a.safetensors", tensors, {})
    assert list(tmp_path.iterdir()) == []


def test_share_of_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        share = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(ValueError, match="'w' is spread over processes"):
            write_checkpoint(tmp_path / "a.safetensors", {"w": share}, {})
    finally:
        distributed.destroy_process_group()


def test_record_is_read_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_checkpoint(path, {"a": torch.ones(1)}, {"step": 12})
    program = (
        "import sys; from pathlib import Path; "
        "from vision.checkpoints.native.header import read_record; "
        "import vision.checkpoints.native.checkpoint_folder; "
        f"print(read_record(Path({str(path)!r}))['step'], 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["12", "False"]


def test_record_of_an_older_format_is_upgraded_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    with monkeypatch.context() as earlier:
        earlier.setattr(record_module, "FORMAT", 1)
        write_checkpoint(path, {"a": torch.ones(1)}, {"iteration": 5})
    monkeypatch.setattr(record_module, "FORMAT", 3)
    upgrades = {
        1: lambda record: {"step": record["iteration"]},
        2: lambda record: {"steps_done": record["step"]},
    }
    monkeypatch.setattr(record_module, "UPGRADES", upgrades)
    expected = {"steps_done": 5, "format": 3}
    assert read_record(path) == expected
    assert read_checkpoint(path).record == expected
    write_checkpoint(path, {}, expected)
    assert read_record(path) == {**expected, "version": __version__}


def test_every_older_format_has_an_upgrade() -> None:
    assert set(record_module.UPGRADES) == set(range(1, record_module.FORMAT))


def test_vit_of_the_first_format_is_still_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = compose("info", ["model=vit_tiny"])[0]["model"]
    older = {k: v for k, v in today.items() if k not in ("distillation_token", "mlp")}
    path = tmp_path / "a.safetensors"
    with monkeypatch.context() as earlier:
        earlier.setattr(record_module, "FORMAT", 1)
        write_checkpoint(path, {}, {"config": {"model": older, "seed": 3}})
    assert read_record(path)["config"] == {"model": today, "seed": 3}


@pytest.mark.parametrize("name", ["swin_tiny", "swinv2_tiny"])
def test_swin_of_the_second_format_masks_padding(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = compose("info", [f"model={name}"])[0]["model"]
    assert today["padding"] == "mask"
    older = {k: v for k, v in today.items() if k != "padding"}
    path = tmp_path / "a.safetensors"
    auto = {"kind": "auto", "heads": None}
    with monkeypatch.context() as earlier:
        earlier.setattr(record_module, "FORMAT", 2)
        write_checkpoint(path, {}, {"config": {"model": auto, "seed": 3}, "model": older})
    found = read_record(path)
    # The model that ran is stored beside what was asked for.
    assert (found["config"], found["model"]) == ({"model": auto, "seed": 3}, today)


def test_format_of_the_future_names_the_version_that_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    with monkeypatch.context() as later:
        later.setattr(record_module, "FORMAT", 99)
        later.setattr(record_module, "__version__", "9.8.7")
        write_checkpoint(path, {"a": torch.ones(1)}, {})
    for read in (read_record, read_checkpoint):
        with pytest.raises(NewerFormatError, match=r"a\.safetensors is of format 99.*9\.8\.7"):
            read(path)


def test_record_of_another_format_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format 7"):
        write_checkpoint(tmp_path / "a.safetensors", {}, {"format": 7})


def test_file_of_the_safetensors_library_is_told_from_our_own(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(3)}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"a\.safetensors is a safetensors file, but not"):
        read_record(path)
