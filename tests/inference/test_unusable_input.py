"""What eval, predict and export say of input that is no good: one message, and the exit code."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from untrained_runs import a_run

from vision.checkpoints.native.checkpoint import read_checkpoint, write_checkpoint
from vision.cli.app import main

Capture = pytest.CaptureFixture[str]
COMMANDS = ("eval", "eval_foreign", "predict", "export")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    Image.fromarray(np.full((30, 30, 3), 90, dtype=np.uint8)).save(path)
    return path


def call(command: str, checkpoint: Path, photo: Path, output: Path) -> int:
    """A command on a checkpoint, with everything else as it should be."""
    words = {
        "eval": ["eval", "device=cpu", "loader.workers=0", f"output={output}"],
        "eval_foreign": ["eval", "device=cpu", "data=shapes", f"output={output}"],
        "predict": ["predict", "device=cpu", f"images={photo}", f"output={output / 'x.csv'}"],
        "export": ["export", "format=safetensors", f"output={output}"],
    }[command]
    return main([*words, f"checkpoint={checkpoint}"])


def best(run: Path) -> Path:
    return run / "checkpoints" / "best.safetensors"


def cut_short(run: Path, path: Path) -> None:
    path.write_bytes(best(run).read_bytes()[:-1])


def cut_to_its_header(run: Path, path: Path) -> None:
    path.write_bytes(best(run).read_bytes()[:100])


def damaged(run: Path, path: Path) -> None:
    content = bytearray(best(run).read_bytes())
    content[-100] ^= 255
    path.write_bytes(content)


def of_the_future(run: Path, path: Path) -> None:
    tensors, record = read_checkpoint(best(run))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vision.checkpoints.native.header.FORMAT", 99)
        write_checkpoint(path, tensors, {**record, "format": 99})


def cut_torch_file(run: Path, path: Path) -> None:
    torch.save({"head.weight": torch.zeros(4, 1000)}, path)
    path.write_bytes(path.read_bytes()[:9000])


def an_image(run: Path, path: Path) -> None:
    Image.fromarray(np.zeros((9, 9, 3), dtype=np.uint8)).save(path, format="png")


BAD: dict[Callable[[Path, Path], object], tuple[int, str]] = {
    lambda run, path: None: (2, "does not exist"),
    lambda run, path: path.write_bytes(b""): (1, "is empty (0 bytes)"),
    lambda run, path: path.write_text("my notes\n" * 90): (1, "is a text that starts with"),
    lambda run, path: path.write_text("<html>404</html>"): (1, "is a web page"),
    an_image: (1, "Readable are safetensors"),
    cut_short: (1, "is not complete"),
    cut_to_its_header: (1, "is not complete"),
    damaged: (1, "is damaged"),
    cut_torch_file: (1, "perhaps not copied completely"),
    of_the_future: (1, "is of format 99"),
}
NAMES = ["missing", "0_bytes", "text", "web_page", "image", "cut_short", "cut_to_its_header",
         "damaged", "cut_torch_file", "of_the_future"]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("spoil", BAD, ids=NAMES)
def test_checkpoint_that_is_no_good_is_named_in_one_message(
    run: Path,
    photo: Path,
    tmp_path: Path,
    capsys: Capture,
    command: str,
    spoil: Callable[[Path, Path], object],
) -> None:
    place = tmp_path / "model.safetensors"
    spoil(run, place)
    code, said = BAD[spoil]
    assert call(command, place, photo, tmp_path / "out") == code
    output, text = capsys.readouterr()
    assert text.startswith("error: ") and text.count("\n") == 1
    assert str(place) in text and said in text and "init" not in text
    assert output == "" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_folder_without_a_checkpoint_is_named(
    photo: Path, tmp_path: Path, capsys: Capture, command: str
) -> None:
    place = tmp_path / "run"
    place.mkdir()
    assert call(command, place, photo, tmp_path / "out") in (1, 2)
    text = capsys.readouterr().err
    assert text.startswith(("error: checkpoint: ", f"error: {place}")) and text.count("\n") == 1
    assert f"{place} has no checkpoint" in text


@pytest.mark.parametrize("command", ["predict", "export"])
def test_output_that_cannot_be_written_is_named(
    run: Path, photo: Path, tmp_path: Path, capsys: Capture, command: str
) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    assert call(command, run, photo, file / "below") == 2
    text = capsys.readouterr().err
    assert text.startswith(f"error: output: {file}") and text.count("\n") == 1


@pytest.mark.parametrize(("opset", "said"), [(17, "greater than or equal to 18"), (99, "99")])
def test_opset_that_torch_cannot_write_is_refused(
    run: Path, tmp_path: Path, capsys: Capture, opset: int, said: str
) -> None:
    pytest.importorskip("onnxruntime")
    words = ["export", f"checkpoint={run}", "format=onnx", f"output={tmp_path / 'out'}"]
    assert main([*words, f"opset={opset}"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: opset: ") and said in text and text.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_folder_without_images_is_named(run: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["predict", f"checkpoint={run}", f"images={tmp_path}"]) == 2
    assert capsys.readouterr().err == f"error: images: no images found in '{tmp_path}'.\n"
