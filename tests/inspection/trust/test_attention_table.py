"""The script that makes the table of docs/attention.md."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vision.inspection.methods.spec import METHODS

SCRIPT = Path(__file__).parents[3] / "docs/attention_table.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attention_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_docs_have_the_methods_as_their_specs_describe_them(script: ModuleType) -> None:
    text = (SCRIPT.parent / "attention.md").read_text()
    assert script.methods_table() in text, "run: python docs/attention_table.py methods"
    for name, spec in METHODS.items():
        (row,) = [
            line for line in text.splitlines() if line.startswith(f"| `{name}` | {spec.title}")
        ]
        assert spec.formula in row and spec.reference in row
        assert all(f"`{option}`" in row for option in spec.options)


def write(folder: Path, energy: float, **changes: Any) -> str:
    scores = {"run": {"random": {"energy": 20.0}, "rollout": {"energy": energy, "miou": 50.0}}}
    folder.mkdir()
    content = {"images": 96, "steps": 10, "seed": 0, "scores": scores} | changes
    (folder / "scores.json").write_text(json.dumps(content))
    return str(folder)


def test_attention_table_of_three_runs_has_mean_and_deviation(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = [write(tmp_path / str(e), e) for e in (40.0, 43.0, 49.0)]  # mean 44, deviation √21
    words = ["attention_table.py", f"ViT={','.join(folders)}", f"Swin={folders[0]}"]
    monkeypatch.setattr("sys.argv", words)
    script.main()
    vit, swin = capsys.readouterr().out.strip().split("\n\n**Swin")
    assert vit.startswith("**ViT**, 3 runs, mean ± standard deviation, 96 images:")
    assert "| method | energy ↑ | mIoU ↑ |" in vit
    assert "| `random` | 20.0 ± 0.0 | – |" in vit
    assert "| `rollout` | 44.0 ± 4.6 | 50.0 ± 0.0 |" in vit
    assert "| `rollout` | 40.0 | 50.0 |" in swin


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": 8}, r"images differ: \[96, 8\]"),
        ({"scores": {"run": {"random": {"energy": 1.0}}}}, "only 1 of"),
        ({"scores": {"a": {}, "b": {}}}, "scores of 2 models"),
    ],
)
def test_attention_table_of_runs_that_do_not_fit_is_refused(
    script: ModuleType, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folders = [write(tmp_path / "a", 40.0), write(tmp_path / "b", 41.0, **changes)]
    with pytest.raises(SystemExit, match=message):
        script.table("ViT", folders)


def test_attention_table_of_a_folder_without_scores_says_how_to_make_them(
    script: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="score=true"):
        script.table("ViT", [str(tmp_path)])
