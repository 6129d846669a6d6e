"""The example notebook runs from top to bottom."""

import os
from pathlib import Path

import pytest
from untrained_runs import a_run

nbformat = pytest.importorskip("nbformat", reason="needs the extra `notebook`")
nbclient = pytest.importorskip("nbclient", reason="needs the extra `notebook`")
pytest.importorskip("ipykernel", reason="needs the extra `notebook`")
NOTEBOOK = Path(__file__).parents[2] / "docs/notebooks/attention.ipynb"


def test_notebook_of_attention_runs_and_shows_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISION_CHECKPOINT", str(a_run(tmp_path / "run")))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": tmp_path}}
    ).execute()
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    images = [o for o in outputs if "image/png" in o.get("data", {})]
    printed = "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")
    assert len(images) == 1 and "Abnar & Zuidema" in printed
    assert os.environ["VISION_CHECKPOINT"]
