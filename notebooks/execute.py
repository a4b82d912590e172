"""Executes the notebooks from their scripts: ``python notebooks/execute.py [NAME…]``.

People edit the script (.py) of a pair, and its notebook (.ipynb) is the script with outputs. The
same outputs give the same bytes: the notebook has no times and no random cell ids.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
SECONDS = 900


def scripts() -> list[Path]:
    """The scripts of all notebooks, in their order."""
    return sorted(HERE.glob("[0-9][0-9]_*.py"))


def execute(script: Path) -> None:
    """Execute `script` and write its notebook into the same folder.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails.
    """
    notebook = jupytext.read(script)
    for place, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{place:02}"
    resources = {"metadata": {"path": str(HERE)}}
    NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources=resources, record_timing=False
    ).execute()
    # The version of Python is that of whoever executed it last.
    notebook.metadata.pop("language_info", None)
    nbformat.write(notebook, script.with_suffix(".ipynb"))


if __name__ == "__main__":
    for path in scripts():
        if len(sys.argv) == 1 or path.stem in sys.argv[1:]:
            print(path.stem, flush=True)
            execute(path)
