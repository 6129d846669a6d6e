"""The record of a checkpoint as typed data: of every kind of run, and refused where it is wrong."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import timm
import torch
from finetune_runs import TUNED, base_run, tuned_config
from model_settings import redraw, small_model
from run_records import PATH, changed, stored, vit_record
from small_runs import SMALL, SMALL_SHAPES

from vision.checkpoints.convert import convert
from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.native.checkpoint import read_checkpoint
from vision.checkpoints.native.checkpoint_folder import latest
from vision.checkpoints.native.header import encode_header, place, read_record, stamp
from vision.checkpoints.native.run_record import (
    LoraRecord,
    RunRecord,
    TuneRecord,
    check_sizes,
    run_record,
)
from vision.cli.composition import compose
from vision.config import parse
from vision.data.configs import ShapesConfig
from vision.training.configs import TrainConfig
from vision.training.loop import train
from vision.training.tasks.configs import (
    LoraTarget,
    TuneAllConfig,
    TuneBitfitConfig,
    TuneHeadConfig,
    TuneLoraConfig,
    TunePartialConfig,
)


def opened(path: Path) -> tuple[RunRecord, dict[str, tuple[int, ...]]]:
    """The typed record of a file and the shapes of its weights."""
    checkpoint = read_checkpoint(path)
    shapes = {
        name.removeprefix("model."): tuple(tensor.shape)
        for name, tensor in checkpoint.tensors.items()
        if name.startswith("model.")
    }
    record = run_record(checkpoint.record, path)
    check_sizes(record, shapes, path)
    return record, shapes


SLOW = pytest.mark.slow
SHOWN = ("lora", "head")
"""Ways of tuning in the default run: with and without tensors of their own."""


@pytest.mark.parametrize(
    "model", [pytest.param("vit_mini", marks=SLOW), "swin_mini", "swinv2_mini", "timm"]
)
def test_record_of_a_run_of_every_model_is_read(tmp_path: Path, model: str) -> None:
    if model == "timm":
        words = ["model=timm", "model.name=test_resnet", *SMALL_SHAPES, *SMALL, "duration=2steps"]
        values, _ = compose("train", [*words, f"output={tmp_path}", "name=run"])
        config = parse(TrainConfig, values)
        assert train(config) == 0
        run = tmp_path / "run"
    else:
        run = base_run(tmp_path, "duration=2steps", model=model)
    path = latest(run / "checkpoints")[0]
    record, _ = opened(path)
    raw = read_record(path)
    assert record.model.model_dump(mode="json") == raw["config"]["model"]
    assert isinstance(record.config.data, ShapesConfig) and record.config.data.train_samples == 40
    assert record.config.tune == TuneRecord(kind="all")
    assert record.step == 2 and record.preprocess.image_size == (16, 16)
    assert list(record.classes) == raw["classes"] and record.classes
    assert list(record.preprocess.mean) == raw["preprocess"]["mean"]
    assert record.preprocess.origin == raw["preprocess"]["origin"]


@pytest.mark.parametrize(
    "tune", [*SHOWN, *(pytest.param(t, marks=SLOW) for t in TUNED if t not in SHOWN)]
)
def test_record_of_a_run_of_every_way_of_tuning_is_read(tmp_path: Path, tune: str) -> None:
    pretrained = base_run(tmp_path, "duration=2steps")
    config = tuned_config(tmp_path / "tuned", pretrained, *TUNED[tune], "duration=2steps")
    assert train(config) == 0
    record, _ = opened(latest(tmp_path / "tuned" / "run" / "checkpoints")[0])
    assert record.config.tune.kind == config.tune.kind
    assert record.model.kind == "vit"  # of the weights: the config says auto
    assert record.load_report is not None and record.load_report["layout"] == "vision"
    if isinstance(record.config.tune, LoraRecord):
        assert isinstance(config.tune, TuneLoraConfig)
        assert record.config.tune.alpha == config.tune.alpha
        assert record.config.tune.targets == config.tune.targets


def test_ways_of_tuning_in_the_record_are_those_of_training() -> None:
    plain = (TuneAllConfig, TuneHeadConfig, TunePartialConfig, TuneBitfitConfig)
    kinds = [get_args(c.model_fields["kind"].annotation)[0] for c in plain]
    assert set(get_args(TuneRecord.model_fields["kind"].annotation)) == set(kinds)
    (targets, *_) = get_args(LoraRecord.model_fields["targets"].annotation)
    assert set(get_args(targets)) == set(get_args(LoraTarget))


def test_record_of_a_converted_file_is_read(tmp_path: Path) -> None:
    theirs = redraw(
        timm.create_model(
            "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3
        )
    )
    torch.save(theirs.state_dict(), tmp_path / "model.pth")
    convert(tmp_path / "model.pth", "vision", tmp_path / "own.safetensors", heads=3)
    record, _ = opened(tmp_path / "own.safetensors")
    assert (
        record.config.data is None
        and record.config.tune == TuneRecord(kind="all")
        and record.step == 0
    )
    assert record.model.kind == "vit" and len(record.classes) == 1000


def test_record_of_a_converted_model_without_a_head_has_no_classes(tmp_path: Path) -> None:
    theirs = redraw(
        timm.create_model(
            "vit_small_patch14_reg4_dinov2",
            img_size=28,
            embed_dim=24,
            depth=2,
            num_heads=3,
            num_classes=0,
        )
    )
    torch.save(theirs.state_dict(), tmp_path / "model.pth")
    convert(tmp_path / "model.pth", "vision", tmp_path / "own.safetensors", heads=3)
    record, shapes = opened(tmp_path / "own.safetensors")
    assert record.classes == () and "head.weight" not in shapes
    with pytest.raises(CheckpointError, match="classes"):
        check_sizes(record, shapes | {"head.weight": (7, 24)}, PATH)


WRONG = [..., None, "x", -1, [], {}, True, float("nan"), float("inf"), [None], {"a": 1}, [1] * 9]


@pytest.mark.parametrize(
    ("field", "harmless"),
    [
        ("step", []),
        ("config", [{}, {"a": 1}]),  # model and weights are described beside it
        ("config.data", [..., None]),
        ("config.data.kind", []),
        ("config.data.train_samples", []),
        ("config.tune", [...]),
        ("config.tune.kind", []),
        ("model", [...]),  # config.model has it too
        ("model.kind", []),
        ("model.width", []),
        ("model.depth", []),
        ("model.pool", []),
        ("classes", [[]]),  # a model without a head; its tensors decide
        ("channels", []),
        ("preprocess", []),
        ("preprocess.image_size", []),
        ("preprocess.mean", []),
        ("preprocess.std", []),
        ("preprocess.interpolation", []),
        ("preprocess.crop_ratio", []),
        ("preprocess.origin", [..., {}]),
        ("load_report", [..., None, {}, {"a": 1}]),
    ],
)
def test_field_with_a_wrong_value_is_named_with_its_file(field: str, harmless: list[Any]) -> None:
    values, _ = vit_record()
    for value in WRONG:
        record = changed(values, field, value)
        if value in harmless:
            assert run_record(record, PATH).step == 3
            continue
        with pytest.raises(CheckpointError) as caught:
            run_record(record, PATH)
        message = str(caught.value)
        assert str(PATH) in message and field.removesuffix(".kind") in message, value
        assert "copy" in message and len(message) < 2000


def test_record_without_any_model_is_refused() -> None:
    values, _ = vit_record()
    with pytest.raises(CheckpointError, match="model"):
        run_record(changed(changed(values, "model", ...), "config.model", ...), PATH)


@pytest.mark.parametrize(
    ("tune", "named"),
    [
        ({"kind": "lora", "alpha": 16.0}, "targets"),
        ({"kind": "lora", "alpha": 16.0, "targets": []}, "targets"),
        ({"kind": "lora", "alpha": 16.0, "targets": ["q", "x"]}, "targets"),
        ({"kind": "lora", "alpha": float("inf"), "targets": ["q"]}, "alpha"),
        ({"kind": "lora", "alpha": "16", "targets": ["q"]}, "alpha"),
    ],
)
def test_additions_that_are_not_described_are_refused(tune: dict[str, Any], named: str) -> None:
    values, _ = vit_record()
    with pytest.raises(CheckpointError, match=rf"config\.tune.*{named}"):
        run_record(changed(values, "config.tune", tune), PATH)


def test_record_with_numbers_for_other_channels_is_refused() -> None:
    values, _ = vit_record()
    with pytest.raises(CheckpointError, match=r"mean has 1 .*channels = 3"):
        run_record(changed(values, "preprocess.mean", [0.5]), PATH)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("classes", [1] * 1_000_000),
        ("classes", ["a" * 10_000_000, 1]),
        ("preprocess.mean", ["x"] * 1_000_000),
        ("model.depths", ["x"] * 1_000_000),
        ("model", {str(number): 1 for number in range(20_000)}),
        ("config.data", {"kind": "shapes"} | {str(number): 1 for number in range(4000)}),
        ("model.width", 10**4000),
        ("preprocess.image_size", [10**4000, 10**4000]),
    ],
)
def test_enormous_record_is_refused_in_a_short_message(field: str, value: Any) -> None:
    values, shapes = vit_record()
    with pytest.raises(CheckpointError, match=re.escape(str(PATH))) as caught:
        check_sizes(run_record(changed(values, field, value), PATH), shapes, PATH)
    assert len(str(caught.value)) < 2000


def test_list_of_stages_without_an_end_is_refused() -> None:
    """The width of a stage doubles: after a thousand stages it has hundreds of digits."""
    values, _ = stored(small_model("swin_tiny", (32, 32)))
    record = changed(values, "model.depths", [1] * 1000)
    with pytest.raises(CheckpointError, match="depths"):
        run_record(changed(record, "model.heads", [1] * 1000), PATH)


@pytest.mark.parametrize("change", ["config", "config.model", "config.model.kind"])
def test_record_of_an_older_format_without_its_fields_is_refused(
    tmp_path: Path, change: str
) -> None:
    values, _ = vit_record()
    record = changed(values, change, ...) | {"format": 1, "version": "0.0.1"}
    path = tmp_path / "old.safetensors"
    path.write_bytes(encode_header({}, {}, {}, record, []))
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        read_record(path)


@pytest.mark.parametrize("shape", [[0, 2**70], [0, 2**41], [0] * 65])
def test_shape_that_no_tensor_has_is_refused(tmp_path: Path, shape: list[int]) -> None:
    values, _ = vit_record()
    path = tmp_path / "a.safetensors"
    entries = place({"model.w": ("F32", tuple(shape))})
    path.write_bytes(encode_header(entries, {}, {}, stamp(values), [0]))
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        read_checkpoint(path)
