"""The example notebook runs from top to bottom, and is stored with what it shows."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs/notebooks/attention.ipynb"
SHORTER = {
    '"duration=2epochs"': '"duration=4steps", "schedule.warmup=1steps", "device=cpu"',
    '"log.every=10steps"': '"log.every=1steps", "loader.workers=0"',
    '"train", 1500': '"train", 256',
    '"val", 200': '"val", 24',
}
"""Settings of the notebook, and what a test puts there."""


def code_cells() -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def shortened(source: str) -> str:
    for long, short in SHORTER.items():
        source = source.replace(long, short)
    return source


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell in this process; the value of its last line, which a notebook would show."""
    *body, last = ast.parse(source).body
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    exec(compile(ast.Module([last], []), "cell", "exec"), names)
    return None


def check_shown(images: list[bytes], printed: str) -> None:
    """An example image, the curves and the attention; the caption, and the mistakes."""
    assert len(images) == 3 and all(image.startswith(b"\x89PNG") for image in images)
    assert "Abnar & Zuidema" in printed
    assert "Did you mean 'model.depth'?" in printed and "Write duration=10epochs" in printed


def test_cells_of_the_notebook_run_and_show_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    sources = ["".join(cell["source"]) for cell in code_cells()]
    assert all(any(long in source for source in sources) for long in SHORTER)
    shown = [run_cell(shortened(source), names) for source in sources]
    images = [value._repr_png_() for value in shown if hasattr(value, "_repr_png_")]
    check_shown(images, capsys.readouterr().out)
    assert names["result"].folder.parent == Path("outputs")


def test_notebook_is_stored_with_its_outputs() -> None:
    """Of one run from top to bottom, without an error or a path of the machine."""
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    text = json.dumps(
        [{**output, "data": {**output.get("data", {}), "image/png": ""}} for output in outputs]
    )
    assert "/tmp" not in text and "/home" not in text and "/root" not in text
    assert len(NOTEBOOK.read_bytes()) < 1_000_000


@pytest.mark.slow
def test_notebook_runs_in_a_kernel_and_shows_a_figure(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs the extra `notebook`")
    nbclient = pytest.importorskip("nbclient", reason="needs the extra `notebook`")
    pytest.importorskip("ipykernel", reason="needs the extra `notebook`")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = shortened(cell.source)
    nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": tmp_path}}
    ).execute()
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    images = [o for o in outputs if "image/png" in o.get("data", {})]
    printed = "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")
    assert len(images) == 3
    check_shown([b"\x89PNG"] * 3, printed)
