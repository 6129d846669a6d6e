"""Files that are not regular (a FIFO, a device, a link to itself): one line names them. Cells of
spreadsheets.
"""

import os
from collections.abc import Callable
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


@pytest.mark.parametrize("make", KINDS)
def test_data_set_with_such_a_file_is_reported_in_one_line(
    make: Callable[[Path], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(3):
            Image.new("RGB", (8, 8)).save(tmp_path / name / f"{number}.png")
    make(tmp_path / "a" / "x.jpg")
    words = ["data=folder", f"data.root={tmp_path}", "data.val_fraction=0.3", "loader.workers=0"]
    assert main(["data", *words, "check=true"]) == 1
    output = capfd.readouterr()
    assert "x.jpg" in output.out + output.err
    assert "Traceback" not in output.err


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
