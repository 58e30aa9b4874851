"""Notebooks run from top to bottom as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit notebooks without outputs"
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs), "each shows a picture"
    if path.stem == "reading_a_trace":
        told = "".join(output.get("text", "") for output in outputs)
        assert "waits for its data" in told
        assert "Straggler(rank=1, " in told
        assert "cause='data_loading'" in told
        assert "before exit code 1 fail_on: dataloader_pct is " in told
