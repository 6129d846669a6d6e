"""Files that are not regular (a FIFO, a device, a link to itself): one line names them. Cells of
spreadsheets.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image
from untrained_runs import a_run

from vision.cli.app import main
from vision.files import files_below, open_file, read_file, spreadsheet_cell


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


KINDS = [fifo, device, loop]


@pytest.mark.parametrize("make", KINDS)
def test_opening_what_is_not_a_regular_file_is_an_error_with_its_name(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "x.jpg")
    with pytest.raises(OSError, match=r"x\.jpg"):
        open_file(tmp_path / "x.jpg")


def test_regular_file_and_link_to_it_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "b").symlink_to("a")
    assert read_file(tmp_path / "a") == read_file(str(tmp_path / "b")) == b"content"


def test_files_below_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").touch()
    assert files_below(tmp_path) == [tmp_path / "a" / "x"]
    with pytest.raises(OSError, match="nowhere"):
        files_below(tmp_path / "nowhere")


def data_set(folder: Path) -> list[str]:
    """Words for a data set of two classes that is made in a folder."""
    for name in ("a", "b"):
        (folder / name).mkdir()
        for number in range(3):
            color = (60 * number, 0, 200 * (name == "b"))
            Image.new("RGB", (8, 8), color).save(folder / name / f"{number}.png")
    return ["data=folder", f"data.root={folder}", "data.val_fraction=0.3", "loader.workers=0"]


@pytest.mark.parametrize("make", KINDS)
def test_data_set_with_such_a_file_is_reported_in_one_line(
    make: Callable[[Path], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = data_set(tmp_path)
    make(tmp_path / "a" / "x.jpg")
    assert main(["data", *words, "check=true"]) == 1
    output = capfd.readouterr()
    assert "x.jpg" in output.out + output.err
    assert "Traceback" not in output.err


@pytest.mark.parametrize("name", ["train.csv", "train-000000.tar"])
@pytest.mark.parametrize("make", KINDS)
def test_table_or_shard_that_is_such_a_file_is_named_in_one_line(
    make: Callable[[Path], None], name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    words = [*data_set(tmp_path / "data"), f"data.table={tmp_path}"]
    if name.endswith(".tar"):
        words = ["data=webdataset", f"data.root={tmp_path}", "data.train=train-*.tar"]
    make(tmp_path / name)
    assert main(["data", *words, f"output={tmp_path / 'x.png'}"]) in (1, 2)
    output = capfd.readouterr()
    assert name in output.err and "Traceback" not in output.err


@pytest.mark.parametrize("make", KINDS)
def test_training_on_such_a_file_ends_with_its_name(
    make: Callable[[Path], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    words = data_set(tmp_path / "data")
    for name in ("a", "b"):
        make(tmp_path / "data" / name / "x.jpg")
    words += ["data.image_size=8", "batch_size=4", "duration=4steps", "model.patch_size=4"]
    assert main(["train", *words, f"output={tmp_path}", "name=run"]) == 1
    output = capfd.readouterr()
    assert "x.jpg" in output.err and "Traceback" not in output.err


@pytest.fixture
def readable_by_all() -> Iterator[Path]:
    """A folder that every user may enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_folder_of_a_data_set_that_cannot_be_read_is_named(
    readable_by_all: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (readable_by_all / "data").mkdir()
    words, locked = data_set(readable_by_all / "data"), readable_by_all / "data" / "b"
    assert main(["data", *words, "check=true"]) == 0
    locked.chmod(0)
    readable_by_all.chmod(0o777)
    user = os.geteuid()
    try:
        if user == 0:  # who may read everything
            os.seteuid(65534)
        assert main(["data", *words, "check=true"]) in (1, 2)
        assert str(locked) in capfd.readouterr().err
        assert main(["train", *words, f"output={readable_by_all}"]) in (1, 2)
    finally:
        os.seteuid(user)
    output = capfd.readouterr().err
    assert str(locked) in output and "Traceback" not in output


@pytest.mark.parametrize("make", KINDS)
def test_checkpoint_that_is_such_a_file_is_refused(
    make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "x.pth")
    assert main(["info", f"init={tmp_path / 'x.pth'}"]) in (1, 2)
    assert "x.pth" in capsys.readouterr().err


def test_predict_names_each_of_them_and_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "run")
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "good.png")
    for make in KINDS:
        make(tmp_path / "photos" / f"{make.__name__}.jpg")
    words = [f"checkpoint={run}", f"images={tmp_path / 'photos'}", "format=jsonl"]
    assert main(["predict", *words]) == 1
    output = capsys.readouterr()
    for make in KINDS:
        assert f"{make.__name__}.jpg" in output.err
    assert "3 of 4 images could not be read" in output.err


@pytest.mark.parametrize("text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "-"])
def test_formula_gets_an_apostrophe_in_a_spreadsheet(text: str) -> None:
    assert spreadsheet_cell(text) == f"'{text}"


@pytest.mark.parametrize("value", ["dog", "-1", "+0.5", "-1e-5", "a=b", "", 3, -0.5, None, True])
def test_other_cells_stay_as_they_are(value: object) -> None:
    assert spreadsheet_cell(value) is value
