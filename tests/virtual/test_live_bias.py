"""Tests what a running scheduler reports about its own bias."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from aprilsched import RolloutScheduler, SchedulerConfig, SimFleet, SimPublisher
from aprilsched.config import Staleness
from aprilsched.fronts.blocking import RolloutScheduler as BlockingScheduler
from aprilsched.kernel.shell import BiasNow
from aprilsched.simulation.engine import run_virtual
from tests.support import small

WORKLOAD = small.workload(seed=5)


def bias(batches: int, **changes: Any) -> tuple[BiasNow, float]:
    """The report after `batches` batches, and the mean length of all delivered rollouts."""
    config = small.config(**{"batch_groups": 16, **changes})

    async def main() -> tuple[BiasNow, float]:
        lengths: list[int] = []
        async with RolloutScheduler(SimFleet(), WORKLOAD, config=config) as rollouts:
            for _ in range(batches):
                batch = await rollouts.next_batch()
                lengths += [len(rollout) for rollout in batch.rollouts]
                await rollouts.update_weights(SimPublisher())
            return rollouts.bias(), sum(lengths) / len(lengths)

    return run_virtual(main())


def test_before_anything_has_ended_nothing_is_claimed():
    now, _ = run_virtual(_unused())
    assert now == BiasNow(
        delivered_mean=None,
        launched_mean=None,
        length_bias=None,
        transient=None,
        dropped_tokens={},
        warning=None,
    )


async def _unused() -> tuple[BiasNow, None]:
    async with RolloutScheduler(SimFleet(), WORKLOAD) as rollouts:
        return rollouts.bias(), None


def test_the_first_batch_is_short_and_that_is_said_to_go_away():
    now, delivered = bias(1)
    assert now.launched_mean is not None
    assert now.length_bias is not None
    assert now.transient is not None
    assert now.delivered_mean == pytest.approx(delivered)
    assert now.length_bias == pytest.approx(delivered / now.launched_mean - 1)
    assert now.length_bias < -0.2
    assert now.transient == pytest.approx(now.length_bias, abs=0.1)
    assert now.warning is None


def test_after_many_batches_little_is_left():
    now, _ = bias(40)
    assert now.length_bias is not None
    assert abs(now.length_bias) < 0.06
    assert now.launched_mean == pytest.approx(WORKLOAD.mean_length(), rel=0.12)


def test_a_policy_that_censors_is_named_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, logger="aprilsched"):
        now, _ = bias(20, max_staleness=Staleness(1, rule="evict"))
    assert now.warning is not None
    assert "stale" in now.warning
    assert "responses at least" in now.warning
    assert now.dropped_tokens["stale"] > 0
    text = [r for r in caplog.records if "rollouts were dropped" in r.getMessage()]
    assert len(text) == 1


def test_the_blocking_twin_says_the_same():
    config = SchedulerConfig(batch_groups=4, group_size=4)
    with BlockingScheduler(SimFleet(time_scale=0.001), WORKLOAD, config=config) as rollouts:
        rollouts.next_batch()
        now = rollouts.bias()
    assert now.launched_mean is not None
    assert now.length_bias is not None
