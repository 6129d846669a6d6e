"""Looking at every image once: counts, sizes, unreadable files, duplicates."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from source_settings import data_config, image_bytes, make_folder

from vision.data.tools.check import check_data


@pytest.fixture
def flawed(tmp_path: Path) -> Path:
    make_folder(tmp_path / "train", {"cat": 23, "dog": 2})
    make_folder(tmp_path / "val", {"cat": 2, "dog": 2}, first=500)
    (tmp_path / "train" / "cat" / "empty.jpg").write_bytes(b"")
    (tmp_path / "train" / "cat" / "text.png").write_text("not an image")
    (tmp_path / "train" / "dog" / "wide.png").write_bytes(image_bytes(900, (50, 4)))
    (tmp_path / "val" / "dog" / "leak.png").write_bytes(image_bytes(3))  # a training cat
    (tmp_path / "val" / "cat" / "again.png").write_bytes(image_bytes(500))
    return tmp_path


@pytest.mark.parametrize("workers", [0, 2])
def test_check_flawed_folder_finds_every_flaw(flawed: Path, workers: int) -> None:
    result = check_data(data_config("folder", root=str(flawed)), workers)
    train, val = result.splits["train"], result.splits["val"]
    assert train.per_class == {"cat": 25, "dog": 3}
    assert val.per_class == {"cat": 3, "dog": 3}
    assert train.sizes == {(6, 8): 25, (4, 50): 1}
    assert len(train.unreadable) == 2
    assert str(flawed / "train" / "cat" / "empty.jpg") in train.unreadable[0]
    assert str(flawed / "train" / "cat" / "text.png") in train.unreadable[1]
    leak = (str(flawed / "train/cat/0003.png"), str(flawed / "val/dog/leak.png"))
    assert result.across == [leak]
    assert result.conflicts == [leak]
    assert result.within == [(str(flawed / "val/cat/0000.png"), str(flawed / "val/cat/again.png"))]
    assert not result.clean


def test_check_report_for_people_and_programs_says_the_same(flawed: Path) -> None:
    (flawed / "train" / "dog" / "0000.png").unlink()
    (flawed / "train" / "dog" / "0001.png").unlink()
    (flawed / "train" / "dog" / "film.mp4").touch()
    result = check_data(data_config("folder", root=str(flawed)))
    text = "\n".join(result.lines())
    assert "train: 26 images, 8 × 4 … 8 × 6 … 50 × 6 pixels" in text
    assert "25 : 1" in text
    assert "1 file in data.root ignored: 1 suffix '.mp4'" in text
    assert "train: unreadable: 2" in text
    assert "images in several splits: 1" in text
    console = Console(record=True, width=100, quiet=True)
    console.print(result.table())
    found = json.loads(result.to_json())
    assert found["splits"]["train"]["sizes"] == [[4, 50, 1], [6, 8, 23]]
    assert found["ignored"] == {"suffix '.mp4'": 1}


def test_check_clean_set_is_clean(tmp_path: Path) -> None:
    result = check_data(data_config("shapes", train_samples=24, val_samples=8, test_samples=8))
    assert result.clean
    assert result.splits["train"].extent() == "48 × 48"
    assert [sum(s.per_class.values()) for s in result.splits.values()] == [24, 8, 8]
