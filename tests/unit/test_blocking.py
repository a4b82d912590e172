"""The blocking facade: the same names for trainers without asyncio."""

from __future__ import annotations

import threading

import pytest

import aprilsched
from aprilsched import LongTailWorkload, SchedulerConfig, SimFleet, SimPublisher, blocking
from aprilsched.errors import ConfigError, SchedulerClosed


def make(count: int | None = None) -> blocking.RolloutScheduler:
    workload = LongTailWorkload(median=20, cap=100, group_size=2, count=count, seed=1)
    config = SchedulerConfig(batch_groups=2, group_size=2, over_provision=1.5)
    return blocking.RolloutScheduler(SimFleet(1, time_scale=0.01), workload, config=config)


def test_batches_updates_and_evaluation_without_await():
    with make(count=6) as rollouts:
        versions = []
        for batch in rollouts:
            versions.append(batch.version)
            rollouts.update_weights(SimPublisher())
        result = rollouts.evaluate(list(LongTailWorkload(median=9, group_size=1, count=2)))
    assert versions == [0, 1, 2]
    assert len(result.groups) == 2
    assert not [t for t in threading.enumerate() if t.name == "aprilsched-loop"]


def test_errors_arrive_in_the_calling_thread():
    with make() as rollouts, pytest.raises(ConfigError, match="at least one"):
        rollouts.evaluate([])
    with pytest.raises(SchedulerClosed):
        rollouts.next_batch()


def test_it_has_every_public_name_of_the_other():
    def public(cls: type) -> set[str]:
        return {name for name in dir(cls) if not name.startswith("_")}

    assert public(aprilsched.RolloutScheduler) <= public(blocking.RolloutScheduler)
