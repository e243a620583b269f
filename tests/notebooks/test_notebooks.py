"""Every notebook runs from top to bottom in a kernel of its own, and shows what it promises."""

from pathlib import Path

import jupytext
import nbclient
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.py"))


def run(path: Path, folder: Path):
    """The notebook with its outputs; raises where a cell fails. `folder` is where the kernel starts."""
    notebook = jupytext.read(path)
    resources = {"metadata": {"path": str(folder)}}
    return nbclient.NotebookClient(notebook, timeout=240, resources=resources).execute()


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path, tmp_path):
    outputs = [o for cell in run(path, tmp_path).cells if cell.cell_type == "code" for o in cell.outputs]
    printed = "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(pictures) == 2
    for words in ("random weights", "KV pages", "hit rate", "blocks fetched per step"):
        assert words in printed
    assert printed.count("equal tokens and logits: True") == 3
