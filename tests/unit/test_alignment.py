"""Tests the comparison of the trainer's log-probabilities with the engines', by hand."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aprilsched.errors import ConfigError
from aprilsched.kernel.core.messages.events import LogprobComparison, LogprobDifferences
from aprilsched.kernel.core.messages.facts import LogprobsCompared
from aprilsched.kernel.shell.logprob_comparison import BOUND, compared
from aprilsched.observe.figures.alignment import AlignmentLedger, alignment_of
from aprilsched.observe.figures.run_figures import DifferenceFigures
from aprilsched.types import Batch, Group, Prompt, Rollout, Segment
from tests.support.facts import response
from tests.support.table import each_row

PROMPT = Prompt(input_ids=np.array([1, 2], dtype=np.int32))


def rollout(*runs: tuple[int, int, str | None], index: int = 0, **more: Any) -> Rollout:
    """A rollout made of pieces (tokens, version, engine); every log-probability is -1."""
    versions = np.repeat([v for _, v, _ in runs], [n for n, _, _ in runs]).astype(np.int32)
    ends = np.cumsum([n for n, _, _ in runs]).tolist()
    segments = tuple(
        Segment(start=end - n, end=end, version=version, engine=engine)
        for (n, version, engine), end in zip(runs, ends, strict=True)
    )
    logprobs = np.where(versions >= 0, -1, 0).astype(np.float32)
    own = {"rollout_id": index, "group_id": index, "logprobs": logprobs, "segments": segments}
    return response(versions.tolist(), **{**own, **more})


def batch(*rollouts: Rollout, version: int = 4) -> Batch:
    groups = tuple(Group(group_id=i, prompt=PROMPT, rollouts=(r,)) for i, r in enumerate(rollouts))
    return Batch(index=7, version=version, units=groups)


def compare(of: Batch, logprobs: object) -> LogprobComparison:
    return asyncio.run(compared(of, logprobs))


def k3(*differences: float) -> float:
    return sum(math.exp(d) - 1 - d for d in differences)


def near(found: LogprobDifferences, *differences: float) -> None:
    assert found.tokens == len(differences)
    assert found.total == pytest.approx(sum(differences), abs=1e-6)
    assert found.k3 == pytest.approx(k3(*differences), abs=1e-6)
    assert found.largest == pytest.approx(max(map(abs, differences), default=0), abs=1e-6)
    assert found.beyond == sum(abs(d) > BOUND for d in differences)


def test_differences_are_counted_by_engine_position_and_age():
    of = batch(
        rollout((2, 2, "a"), (3, 4, "b")),
        rollout((1, 4, "a"), (2, -1, None), (1, 4, "b"), index=1),
    )
    first = np.array([-1.5, -1.0, -1.01, -0.8, -1.0], dtype=np.float32)
    second = np.array([-1.02, 3.0, 3.0, -1.3], dtype=np.float32)
    found = compare(of, [first, second])
    assert (found.batch, found.version, found.bound) == (7, 4, BOUND)
    assert list(found.by_engine) == ["a", "b"]
    near(found.by_engine["a"], -0.02)
    near(found.by_engine["b"], -0.01, 0.2, 0.0, -0.3)
    # Positions 1, 2 to 3, and 4 to 7.
    near(found.by_position[0], -0.02)
    near(found.by_position[1], -0.01)
    near(found.by_position[2], 0.2, 0.0, -0.3)
    assert len(found.by_position) == 3
    near(found.by_staleness[0], -0.02, -0.01, 0.2, 0.0, -0.3)
    near(found.by_staleness[1])
    near(found.by_staleness[2], -0.5, 0.0)
    assert (found.skipped, found.not_finite) == (0, 0)


@given(st.integers(0, 70), st.integers(1, 70))
def test_each_token_is_at_its_position(before: int, tokens: int):
    of = batch(rollout((before, -1, None), (tokens, 4, "a")))
    found = compare(of, [np.zeros(before + tokens)])
    places = [math.floor(math.log2(p)) for p in range(before + 1, before + tokens + 1)]
    assert [each.tokens for each in found.by_position] == np.bincount(places).tolist()


def test_tokens_that_cannot_be_compared_are_counted():
    of = batch(
        rollout((2, 4, "a"), versions_exact=False),
        rollout((3, 4, "a"), stale_keys=True, index=1),
        rollout((4, 5, "a"), index=2),
        rollout((5, 4, "a"), index=3, loss_mask=np.array([False, True, True, True, True])),
    )
    last = np.array([9.0, -1.0, np.nan, -np.inf, -1.0])
    found = compare(of, [np.zeros(2), np.zeros(3), np.zeros(4), last])
    assert found.skipped == 9
    assert found.not_finite == 2
    near(found.by_engine["a"], 0.0, 0.0)


def test_all_older_tokens_are_in_the_last_class():
    runs = [(1, version, "a") for version in range(11)]
    found = compare(batch(rollout(*runs), version=10), [np.full(11, -1.0)])
    assert [each.tokens for each in found.by_staleness] == [1, 1, 1, 1, 1, 6]


def test_one_wild_token_does_not_hide_the_others():
    of = batch(rollout((2, 4, "a"), logprobs=np.array([-900.0, -1.0], dtype=np.float32)))
    found = compare(of, [np.array([0.0, -1.0])]).by_engine["a"]
    assert math.isfinite(found.k3)
    assert found.largest == 900


SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(SHAPES, st.integers(0, 3))
def test_padded_rows_packed_rows_and_lists_agree(lengths: list[int], padding: int):
    of = batch(*(rollout((n, 4, "a"), index=i) for i, n in enumerate(lengths)))
    rows = [np.linspace(-2, -1, n, dtype=np.float32) for n in lengths]
    whole = [np.concatenate(([99.0, 99.0], row)).astype(np.float32) for row in rows]
    padded = np.full((len(rows), max(lengths) + 2 + padding), 99, dtype=np.float32)
    for target, row in zip(padded, whole, strict=True):
        target[: len(row)] = row
    expected = compare(of, rows)
    assert compare(of, padded) == expected
    assert compare(of, np.concatenate(whole)) == expected


def test_a_tensor_of_any_dtype_is_taken():
    torch = pytest.importorskip("torch")
    of = batch(rollout((3, 4, "a")))
    tensor = torch.full((1, 5), -1.5, dtype=torch.bfloat16, requires_grad=True)
    near(compare(of, tensor).by_engine["a"], -0.5, -0.5, -0.5)
    near(compare(of, [tensor[0, 2:]]).by_engine["a"], -0.5, -0.5, -0.5)


@each_row(
    ("logprobs", "text"),
    [
        (np.zeros((1, 4)), r"have shape \(1, 4\); give \(1, 5\) or more columns"),
        (np.zeros((2, 5)), r"have shape \(2, 5\)"),
        (np.zeros(4), r"have shape \(4,\)"),
        (np.zeros((1, 5, 1)), r"have shape \(1, 5, 1\)"),
        ([np.zeros(2)], "do not have the lengths"),
        ([], "the 0 rows"),
        (None, "of type NoneType"),
        ([[0.0, 0.0, 0.0]], "of type list"),
        (np.zeros((1, 5), dtype=np.int64), "int64 values"),
    ],
)
def test_other_shapes_are_refused(logprobs: object, text: str):
    with pytest.raises(ConfigError, match=text):
        compare(batch(rollout((3, 4, "a"))), logprobs)


# --- the ledger ----------------------------------------------------------------------------------


def mean_of(found: DifferenceFigures, *differences: float) -> None:
    n = len(differences)
    assert found.tokens == n
    assert found.mean == pytest.approx(sum(differences) / n)
    assert found.k3 == pytest.approx(k3(*differences) / n)
    assert found.largest == max(map(abs, differences))
    assert found.beyond_share == sum(abs(d) > BOUND for d in differences) / n


def report(index: int, engine: str, differences: Sequence[float]) -> LogprobComparison:
    row: NDArray[np.float64] = np.array(differences, dtype=np.float64) - 1
    of = batch(rollout((len(row), 4, engine)))
    comparison = compare(of, [row])
    return msgspec.structs.replace(comparison, batch=index)


def test_a_ledger_adds_the_batches_up():
    ledger = AlignmentLedger()
    assert ledger.figures() is None
    reports = [report(3, "b", (0.5, -0.25)), report(1, "a", (0.125,)), report(4, "b", (0.0,))]
    for each in reports:
        ledger.take(LogprobsCompared(comparison=each))
    found = ledger.figures()
    assert found is not None
    mean_of(found.whole, 0.5, -0.25, 0.125, 0.0)
    assert list(found.by_engine) == ["a", "b"]
    mean_of(found.by_engine["a"], 0.125)
    mean_of(found.by_engine["b"], 0.5, -0.25, 0.0)
    assert len(found.by_position) == 2
    mean_of(found.by_position[0], 0.5, 0.125, 0.0)
    mean_of(found.by_position[1], -0.25)
    assert found.by_staleness[0] == found.whole
    assert found.by_staleness[1].mean is None
    assert {batch: each.tokens for batch, each in found.by_batch.items()} == {1: 1, 3: 2, 4: 1}


def test_the_first_report_of_a_batch_counts():
    ledger = AlignmentLedger()
    for differences in ((0.5,), (9.0, 9.0)):
        ledger.take(LogprobsCompared(comparison=report(3, "a", differences)))
    assert ledger.figures() == alignment_of([report(3, "a", (0.5,))])
