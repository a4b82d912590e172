"""Tests the bias analysis: conservation, distributions, the transient, censoring, draining."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from aprilsched.kernel.core.state.ledger import Entry, Ledger, Reason
from aprilsched.observe.figures.bias_collector import running_bias, transient_by_batch, warning_now
from tests.support.transients import live_transient, realised_transient

Ints = NDArray[np.int64]


def drawn(n: int, seed: int) -> Ints:
    rng = np.random.default_rng(seed)
    return np.clip(np.rint(60 * np.exp(0.9 * rng.standard_normal(n))), 1, 600).astype(np.int64)


def first_come(lengths: Ints, *, batch: int, pool: int) -> tuple[Ints, Ints]:
    """For each response, the batch that delivers it and the batch in which it is launched.

    All responses decode together, one token in each step. A batch is the next `batch` responses
    that finish; after it, the same number is launched.
    """
    launched = np.full(len(lengths), len(lengths))
    delivered = np.full(len(lengths), len(lengths))
    left = lengths.copy()
    queue = list(range(len(lengths)))
    running: list[int] = []
    for index in range(len(lengths) // batch):
        while len(running) < pool and queue:
            running.append(queue.pop(0))
            launched[running[-1]] = index
        running.sort(key=lambda i: int(left[i]))
        steps = left[running[batch - 1]]
        delivered[running[:batch]] = index
        running = running[batch:]
        left[running] -= steps
    return delivered, launched


LENGTHS = drawn(2048, 6)
DELIVERED, LAUNCHED = first_come(LENGTHS, batch=64, pool=128)


@pytest.mark.parametrize("batches", [1, 2, 5, 20])
def test_the_identity_holds_exactly_in_a_drained_run(batches: int):
    both = realised_transient(LENGTHS, DELIVERED, LAUNCHED, batches=batches)
    assert both.in_flight == 64
    assert both.predicted == pytest.approx(both.measured, rel=1e-9)
    assert both.predicted < 0


def test_the_transient_by_batch_is_that_of_each_batch():
    order = [np.flatnonzero(np.equal(DELIVERED, k)) for k in range(20)]
    open_ = np.flatnonzero((LAUNCHED < 20) & (DELIVERED >= 20))
    mean = float(LENGTHS.mean())
    found = transient_by_batch(
        lengths=[LENGTHS[ids] for ids in order],
        groups=order,
        newest=[int(np.flatnonzero(np.less_equal(LAUNCHED, k)).max()) for k in range(20)],
        open_lengths=LENGTHS[open_].astype(np.float64),
        open_groups=open_,
        mean=mean,
    )
    expected = [
        realised_transient(LENGTHS, DELIVERED, LAUNCHED, batches=k + 1, mean=mean)
        for k in range(20)
    ]
    assert found == pytest.approx([both.predicted for both in expected])
    measured = running_bias([LENGTHS[ids] for ids in order], mean)
    assert measured == pytest.approx([both.measured for both in expected])


def test_the_live_transient_is_self_consistent():
    both = live_transient(LENGTHS[:300], np.array([50, 100, 80]), np.array([False, False, True]))
    assert both.in_flight == 3
    assert both.predicted == pytest.approx(both.measured)


def entry(rollout_id: int, tokens: int, reason: Reason = Reason.STALE) -> Entry:
    return Entry(rollout_id=rollout_id, group_id=0, reason=reason, cause="", tokens=tokens, at=0.0)


def ledger_of(*entries: Entry) -> Ledger:
    ledger = Ledger()
    for one in entries:
        ledger.add(one)
    return ledger


def test_a_warning_has_the_size_when_long_ones_are_dropped():
    warning = warning_now(ledger_of(*(entry(i, 150) for i in range(10))), 100, 100 * 50)
    # 110 of mean 59.1 were drawn, and 100 of 50 are left.
    assert warning is not None
    assert "at least 15.4%" in warning
    assert "stale" in warning


@pytest.mark.parametrize(
    "entries",
    [
        [entry(i, 150) for i in range(3)],
        [entry(i, 50) for i in range(10)],
        [entry(i, 20) for i in range(10)],
        [entry(i, 150, Reason.REJECTED) for i in range(10)],
    ],
    ids=["few", "as long", "short", "chosen by the user"],
)
def test_no_warning(entries: list[Entry]):
    assert warning_now(ledger_of(*entries), 100, 100 * 50) is None
