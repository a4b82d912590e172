"""The tables of experiments/learning follow from its raw data, and its policies are the model."""

# pyright: basic
# The experiments are no modules that the checker finds.
from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXPERIMENT = ROOT / "experiments" / "learning"
EXAMPLE = ROOT / "examples" / "grpo"


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folders of the experiment and of the example, whose modules are forgotten afterwards."""
    for folder in (EXAMPLE, EXPERIMENT):
        monkeypatch.syspath_prepend(str(folder))
    known = set(sys.modules)
    yield
    for name in {"analysis", "tables", "campaign", "ages", "train", "countdown"} - known:
        sys.modules.pop(name, None)


def test_the_committed_tables_follow_from_the_raw_data():
    import analysis  # pyright: ignore[reportMissingImports]

    found = analysis.result()
    assert found == json.loads((EXPERIMENT / "result.json").read_text())
    readme = (EXPERIMENT / "README.md").read_text()
    for table in analysis.markdown(found).split("\n\n"):
        assert table in readme
    assert found["wrong"] == []


def test_the_tables_of_larger_policies_follow_from_their_raw_data(
    monkeypatch: pytest.MonkeyPatch,
):
    folder = ROOT / "experiments" / "learning_moe"
    monkeypatch.syspath_prepend(str(folder))
    import tables  # pyright: ignore[reportMissingImports]

    found = tables.result()
    assert found == json.loads((folder / "result.json").read_text())
    readme = (folder / "README.md").read_text()
    for table in tables.markdown(found).split("\n\n"):
        assert table in readme
    assert found["wrong"] == []


def test_a_server_that_reports_versions_is_asked_for_them():
    pytest.importorskip("transformers")
    import campaign  # pyright: ignore[reportMissingImports]

    fleet = campaign.SpansFleet(["http://127.0.0.1:1"], stream_interval=16)
    (engine,) = fleet.engines
    assert isinstance(engine, campaign.SpansEngine)


def test_a_target_is_reached_where_the_rising_curve_is():
    import analysis  # pyright: ignore[reportMissingImports]

    assert analysis.rising([0.1, 0.5, 0.3, 0.9]) == [0.1, 0.4, 0.4, 0.9]
    assert analysis.reached([0.1, 0.5, 0.3, 0.9], [0, 1, 2, 3], 0.65) == pytest.approx(2.5)
    assert analysis.reached([0.1, 0.2], [0, 1], 0.65) == float("inf")
    assert analysis.reached([0.7, 0.8], [0, 1], 0.65) == 0


def test_wrong_runs_are_found():
    import analysis  # pyright: ignore[reportMissingImports]

    (cell, *_) = analysis.cells()
    assert analysis.checks([cell]) == []
    cell["summary"]["rollouts"]["lost"] = 2
    cell["updates"][0]["inexact"] = 1
    cell["opened"] += 1
    assert [line.split(": ")[1] for line in analysis.checks([cell])] == [
        "1 rollouts without exact versions",
        "2 lost rollouts",
        "1 restarts that were not ours",
    ]


def test_policies_that_are_trained_together_compute_what_the_model_does():
    torch: Any = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    import ages  # pyright: ignore[reportMissingImports]

    model = transformers.AutoModelForCausalLM.from_pretrained(ages.POLICY, dtype=torch.float32)
    weights = ages.first_weights(2, "cpu")
    tokens = torch.randint(0, 256, (2, 3, 20), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(20).expand(2, 3, 20)
    with torch.no_grad():
        wanted = torch.stack([model(input_ids=rows).logits for rows in tokens])
        whole = ages.logits_of(weights, tokens, positions)
        cache = ages.Cache(2, 3, 24, "cpu")
        ages.logits_of(weights, tokens[..., :12], positions[..., :12], cache=cache)
        for at in range(12, 20):
            one = (each[..., at : at + 1] for each in (tokens, positions))
            last = ages.logits_of(weights, *one, cache=cache, upto=24)
    torch.testing.assert_close(whole, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(last[:, :, 0], wanted[:, :, -1], atol=1e-4, rtol=1e-4)
