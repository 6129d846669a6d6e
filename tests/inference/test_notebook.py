"""The example notebook runs from top to bottom."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from untrained_runs import a_run

NOTEBOOK = Path(__file__).parents[2] / "docs/notebooks/attention.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell in this process; the value of its last line, which a notebook would show."""
    *body, last = ast.parse(source).body
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    exec(compile(ast.Module([last], []), "cell", "exec"), names)
    return None


def test_cells_of_the_notebook_run_and_show_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VISION_CHECKPOINT", str(a_run(tmp_path / "run")))
    names: dict[str, Any] = {}
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    shown = [run_cell(source, names) for source in code]
    figures = [value for value in shown if hasattr(value, "_repr_png_")]
    assert len(figures) == 1 and figures[0]._repr_png_().startswith(b"\x89PNG")
    assert "Abnar & Zuidema" in capsys.readouterr().out


@pytest.mark.slow
def test_notebook_runs_in_a_kernel_and_shows_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs the extra `notebook`")
    nbclient = pytest.importorskip("nbclient", reason="needs the extra `notebook`")
    pytest.importorskip("ipykernel", reason="needs the extra `notebook`")
    monkeypatch.setenv("VISION_CHECKPOINT", str(a_run(tmp_path / "run")))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": tmp_path}}
    ).execute()
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    images = [o for o in outputs if "image/png" in o.get("data", {})]
    printed = "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")
    assert len(images) == 1 and "Abnar & Zuidema" in printed
