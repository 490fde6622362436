"""Every notebook runs from top to bottom, and is stored without its output."""

import base64
import json

import paths
import pytest

NOTEBOOKS = sorted((paths.ROOT / "notebooks").glob("*.ipynb"))


def test_sweep_and_cost_are_among_the_notebooks():
    assert {"cost.ipynb", "sweep.ipynb"} <= {path.name for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_draws(path, monkeypatch):
    import nbclient  # not above: every worker would import both
    import nbformat

    monkeypatch.setenv("JAXFLOW_NOTEBOOK_SMALL", "1")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.setenv("PYTHONPATH", str(paths.ROOT))  # an environment from an older lock file lacks `search`
    notebook = nbformat.read(path, as_version=4)
    pictures = sum(".draw(" in cell.source for cell in notebook.cells)
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    drawn = [
        out.data["image/png"]
        for cell in notebook.cells
        for out in cell.get("outputs", [])
        if "image/png" in out.get("data", {})
    ]
    assert len(drawn) == pictures > 0
    assert all(base64.b64decode(png).startswith(b"\x89PNG") for png in drawn)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_outputs(path):
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        assert not cell.get("outputs") and not cell.get("execution_count")
