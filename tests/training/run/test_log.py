"""wandb offline gets what metrics.jsonl has, and images, without an account or a network."""

import json
import os
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from small_runs import RICH, assert_same_bits, last_tensors, metrics, small_config, status
from started_runs import start_training, wait_for_step

from vision.config import ConfigError
from vision.training.configs import TrainConfig
from vision.training.loop import train

BLOCK, HEADER = 32768, 7


@pytest.fixture(autouse=True)
def no_account_and_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may be logged in; a proxy that does not exist catches every call."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "none"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


def records(file: Path) -> Iterator[Any]:
    """What wandb stored: messages in LevelDB's log format, after seven bytes that name the kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, message = file.read_bytes(), HEADER, b""
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:  # too little is left of this block for a header
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + HEADER])
        message += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (1, 4):  # a whole message, or the last part of one
            record = Record()
            record.ParseFromString(message)
            message = b""
            yield record


def offline_files(folder: Path) -> list[Path]:
    return sorted((folder / "run" / "wandb").glob("offline-run-*/*.wandb"))


def history(file: Path) -> list[dict[str, Any]]:
    """Every row that wandb was given; a mapping in it, such as an image, is one value."""
    # A process of wandb's own writes the file, and may be a little behind on a busy machine.
    patience = time.monotonic() + 60
    while not any(r.HasField("exit") for r in records(file)) and time.monotonic() < patience:
        time.sleep(0.2)
    rows = []
    for record in records(file):
        if not record.HasField("history"):
            continue
        row: dict[str, Any] = {}
        for item in record.history.item:
            name, *inner = item.nested_key or [item.key]
            value = json.loads(item.value_json)
            if inner:
                row.setdefault(name, {})["/".join(inner)] = value
            else:
                row[name] = value
        rows.append(row)
    return rows


def numbers(rows: list[dict[str, Any]], split: str) -> list[dict[str, Any]]:
    """The rows of a split as metrics.jsonl would have them."""
    found = []
    for row in rows:
        own = {k.removeprefix(f"{split}/"): v for k, v in row.items() if k.startswith(f"{split}/")}
        if own and "images" not in own:
            found.append({"step": row["step"], "split": split, **own})
    return found


def images(file: Path, rows: list[dict[str, Any]]) -> dict[tuple[str, int], Image.Image]:
    """The images of a run, by name and step."""
    return {
        (name, row["step"]): Image.open(file.parent / "files" / value["path"])
        for row in rows
        for name, value in row.items()
        if isinstance(value, dict) and value["_type"] == "image-file"
    }


def config_of(folder: Path, *more: str) -> TrainConfig:
    return small_config(folder, *RICH, "duration=14steps", *more)


def test_offline_run_holds_the_numbers_the_config_and_images_and_learns_the_same(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path / "logged", "log.wandb=offline", "log.project=some")
    assert train(config) == 0
    (file,) = offline_files(tmp_path / "logged")
    rows = history(file)
    for split, count in (("train", 14), ("val", 2), ("val_ema", 2)):
        assert len(metrics(tmp_path / "logged", split)) == count
        assert numbers(rows, split) == metrics(tmp_path / "logged", split)
    (run,) = (record.run for record in records(file) if record.HasField("run"))
    assert (run.project, run.display_name) == ("some", "run")
    stored = {item.key: json.loads(item.value_json) for item in run.config.update}
    settings = config.model_dump(mode="json")
    assert {key: stored[key] for key in settings} == settings
    shown = images(file, rows)
    assert shown.keys() == {("train/images", 0)} | {
        (f"{split}/images", step) for split in ("val", "val_ema") for step in (7, 14)
    }
    for image in shown.values():  # images over text, not an empty sheet
        assert len(image.convert("L").getcolors() or []) > 20
    # Eight training images in one row, eight of validation in rows of four.
    assert shown["train/images", 0].width > shown["val/images", 7].width * 1.5
    assert train(config_of(tmp_path / "plain")) == 0
    assert_same_bits(last_tensors(tmp_path / "plain"), last_tensors(tmp_path / "logged"))


def test_run_stopped_and_resumed_keeps_its_id_and_misses_no_number(tmp_path: Path) -> None:
    settings = [*RICH, "duration=200steps", "evaluate_every=200steps", "checkpoint.every=200steps"]
    settings.append("log.wandb=offline")
    process = start_training(tmp_path, *settings)
    wait_for_step(tmp_path, 4, process)
    os.killpg(process.pid, signal.SIGTERM)  # as a scheduler does: to wandb's own process as well
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert status(tmp_path)["status"] == "preempted"
    assert train(small_config(tmp_path, *settings)) == 0
    first, second = offline_files(tmp_path)
    ids = {r.run.run_id for file in (first, second) for r in records(file) if r.HasField("run")}
    assert len(ids) == 1
    rows = [*history(first), *history(second)]
    for split in ("train", "val", "val_ema"):
        assert numbers(rows, split) == metrics(tmp_path, split)
    assert [row["step"] for row in rows if "train/images" in row] == [0]


def test_online_without_an_account_says_what_to_do_and_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"log\.wandb=online: .*log\.wandb=offline"):
        train(small_config(tmp_path, "log.wandb=online"))
    assert not (tmp_path / "run" / "status.json").exists()
