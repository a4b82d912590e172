"""Tests that the committed tables of experiments follow from their raw data."""

# pyright: basic
# The experiments are no modules that the checker finds.
from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.table import each_row

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "learning": ("experiments/learning", "examples/grpo"),
    "learning_moe": ("experiments/learning_moe", "experiments/learning", "examples/grpo"),
    "h200": ("experiments/h200",),
}
"""The folders whose modules an experiment imports, its own first."""


@each_row(("name", "module"), [("learning", "analysis"), ("learning_moe", "tables")])
def test_the_tables_of_a_training_follow_from_its_raw_data(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
):
    analysis, folder = imported(name, module, monkeypatch)
    found = analysis.result()
    assert found == json.loads((folder / "result.json").read_text())
    readme = (folder / "README.md").read_text()
    assert [each for each in analysis.markdown(found).split("\n\n") if each not in readme] == []
    assert found["wrong"] == []


def test_the_tables_of_the_h200_follow_from_their_raw_data(monkeypatch: pytest.MonkeyPatch):
    analysis, folder = imported("h200", "analysis", monkeypatch)
    found = analysis.result()
    assert found == json.loads((folder / "result.json").read_text())
    readme = (folder / "README.md").read_text()
    for text in (analysis.alike, analysis.markdown, analysis.splits, analysis.sixth):
        assert text(found) in readme


def imported(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path]:
    """Import a module of an experiment; experiments have modules of the same names."""
    folders = [ROOT / each for each in FOLDERS[name]]
    for folder in reversed(folders):
        monkeypatch.syspath_prepend(str(folder))
    for known, loaded in list(sys.modules.items()):
        file = getattr(loaded, "__file__", None)
        if file and "." not in known and Path(file).is_relative_to(ROOT / "experiments"):
            monkeypatch.delitem(sys.modules, known)
    found = importlib.import_module(module)
    assert Path(found.__file__).parent == folders[0]
    return found, folders[0]
