"""The cells of experiments/h200 in small: simulated, and what is said of them."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "h200"


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("schedules", "predict", "analysis")
    for name in names:  # Other experiments have modules of these names.
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("schedules")
    for name in names:
        sys.modules.pop(name, None)


def test_a_cell_is_simulated_with_its_own_batches_and_trainer(schedules: Any) -> None:
    waiting = schedules.simulated(schedules.Cell.of("waiting:0:0.02"))
    trained = schedules.simulated(schedules.Cell.of("waiting:10:0.02"))
    assert trained["step_s"] == pytest.approx(waiting["step_s"] + 0.2, rel=1e-6)
    assert waiting["off_policy"] == 0
    carried = schedules.simulated(schedules.Cell.of("april:0:0.02"))
    assert carried["tokens_s"] > 1.2 * waiting["tokens_s"]
    assert carried["off_policy"] > 0.5


def test_the_committed_table_follows_from_the_raw_data(schedules: Any) -> None:
    analysis = importlib.import_module("analysis")
    found = analysis.result()
    assert found == json.loads((FOLDER / "result.json").read_text())
    text = (FOLDER / "README.md").read_text()
    assert analysis.alike(found) in text
    assert analysis.markdown(found) in text
    assert analysis.splits(found) in text
    assert analysis.sixth(found) in text


def test_analysis_takes_the_longest_run_of_a_cell_and_says_which_are_missing(
    schedules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    analysis = importlib.import_module("analysis")
    monkeypatch.setattr(analysis, "HERE", tmp_path)
    (tmp_path / "raw").mkdir()
    batch = {"step_s": 2.0, "bound_s": 1.0, "tokens": 100, "off_policy": 0.5, "age": 1.0,
             "oldest": 3, "distance": None}  # fmt: skip
    chosen: list[Any] = [
        {"batch": 0, "schedule": "old", "forecast": {}},
        {"batch": 12, "schedule": "new", "forecast": {"step_seconds": 1.9, "efficiency": 0.6,
                                                      "off_policy_share": 0.4}},
    ]  # fmt: skip
    lines: list[Any] = [
        {"kind": "boot", "seconds": 3.0},
        {"kind": "cell", "cell": "april:0:0.25", "error": "", "batches": [batch] * 12,
         "chosen": []},
        {"kind": "cell", "cell": "auto:0:1", "error": "", "batches": [batch] * 30,
         "chosen": chosen},
        {"kind": "cell", "cell": "auto:0:1", "error": "the time ended", "batches": [batch] * 20,
         "chosen": []},
        {"kind": "cell", "cell": "areal:0:1", "error": "RunGivenUp", "batches": [batch] * 20,
         "chosen": []},
    ]  # fmt: skip
    (tmp_path / "raw" / "cells.jsonl").write_text("\n".join(map(json.dumps, lines)))
    predicted = [{"cell": "auto:0:1", "step_s": 1.8, "efficiency": 0.55, "off_policy": 0.4}]
    (tmp_path / "predictions.json").write_text(json.dumps(predicted))
    found = analysis.result()
    (row,) = found["cells"]
    assert (row["cell"], row["counted"], row["step_s"], row["efficiency"]) == (
        "auto:0:1", 20, 2.0, 0.5
    )  # fmt: skip
    assert row["step_interval"] == [2.0, 2.0]
    assert row["forecast"]["step_seconds"] == 1.9
    assert row["predicted_step_s"] == 1.8
    assert {"april:0:0.25", "areal:0:1"} <= set(found["missing"])
    assert "auto (17), recompute, trainer 0 s, full size | 20 | 2.00" in analysis.markdown(found)
