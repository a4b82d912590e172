"""Runs that are over in seconds of virtual time: their settings, their prompts, and the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aprilsched import (
    Batch,
    LongTailWorkload,
    Prompt,
    Rollout,
    RolloutScheduler,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
)
from aprilsched.kernel.shell.listener import AnyListener
from aprilsched.simulation.engine import run_virtual


def config(**changes: Any) -> SchedulerConfig:
    """Batches of four groups of four, over-provisioned by a factor of two."""
    values: dict[str, Any] = {"batch_groups": 4, "group_size": 4, "over_provision": 2.0}
    return SchedulerConfig(**{**values, **changes})


def workload(count: int | None = None, **changes: Any) -> LongTailWorkload:
    """Groups of four responses of some 60 tokens, and of at most 600."""
    values: dict[str, Any] = {"median": 60, "sigma": 0.9, "cap": 600, "group_size": 4, "seed": 3}
    return LongTailWorkload(**{**values, **changes}, count=count)


async def by_length(rollout: Rollout, prompt: Prompt) -> float:
    """A reward that two runs agree on."""
    return len(rollout) / 100


def driven(
    listeners: Sequence[AnyListener], *, fleet: SimFleet | None = None, **changes: Any
) -> list[Batch]:
    """Four batches of a run, with an update of the weights after each."""

    async def run() -> list[Batch]:
        batches: list[Batch] = []
        async with RolloutScheduler(
            fleet or SimFleet(1), workload(), config=config(**changes), listeners=listeners
        ) as rollouts:
            for _ in range(4):
                batches.append(await rollouts.next_batch())
                await rollouts.update_weights(SimPublisher())
        return batches

    return run_virtual(run())
