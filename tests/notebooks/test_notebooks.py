"""Tests that each notebook equals its script, and was executed from top to bottom.

pytest also runs notebooks/*.ipynb (by nbmake). Each notebook compares the sentences of its answer
with figures by assertions.
"""

# jupytext and nbformat have no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest

from aprilsched.observe.log.run import read_run
from aprilsched.observe.log.usage import usage_of

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
PAIRS = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.py"))
MOST_BYTES = 400_000
MOST_BYTES_OF_RUNS = 2_000_000

each = pytest.mark.parametrize("script", PAIRS, ids=lambda path: path.stem)


def notebook(script: Path) -> Any:
    return nbformat.read(script.with_suffix(".ipynb"), as_version=4)


def test_there_are_seven_pairs_and_nothing_else():
    assert [path.stem[:2] for path in PAIRS] == ["01", "02", "03", "04", "05", "06", "07"]
    notebooks = sorted(NOTEBOOKS.glob("*.ipynb"))
    assert notebooks == [path.with_suffix(".ipynb") for path in PAIRS]


@each
def test_script_and_notebook_are_in_sync(script: Path):
    written = [(cell.cell_type, cell.source) for cell in jupytext.read(script).cells]
    executed = [(cell.cell_type, cell.source) for cell in notebook(script).cells]
    assert executed == written, "run make notebooks"


@each
def test_it_was_executed_from_top_to_bottom(script: Path):
    cells = [cell for cell in notebook(script).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)


@each
def test_it_begins_with_its_question_and_ends_with_its_answer(script: Path):
    *before, computed, answer = notebook(script).cells
    assert re.match(r"# \d\. .+\n\n\*\*Question\.\*\* ", before[0].source)
    assert answer.source.startswith("**Answer.** ")
    # The figures in words come from this cell, which checks the sentences of the answer.
    assert "print(" in computed.source
    assert "# What the answer below reports" in computed.source
    assert computed.source.rsplit("\n", 1)[1].lstrip().startswith("assert ")
    assert computed.outputs[0].text.strip()


@each
def test_it_is_small(script: Path):
    assert script.with_suffix(".ipynb").stat().st_size < MOST_BYTES


def test_the_runs_are_small_and_can_be_read():
    folders = [path for path in (NOTEBOOKS / "data").iterdir() if (path / "config.toml").exists()]
    files = [file for folder in folders for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) < MOST_BYTES_OF_RUNS
    assert sorted(folder.name for folder in folders) == ["april", "sync"]
    for folder in folders:
        assert read_run(folder).summary.rollouts.lost == 0
        assert len(usage_of(folder).engines) == 8
