"""Tests reports of the trainer's log-probabilities: from the call to the log and the summary."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aprilsched import (
    Batch,
    LongTailWorkload,
    Prompt,
    RolloutScheduler,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
)
from aprilsched.errors import ConfigError, SchedulerClosed
from aprilsched.fronts import blocking
from aprilsched.kernel.shell import logprob_comparison
from aprilsched.observe.figures.run_figures import AlignmentFigures, RunSummary
from aprilsched.observe.figures.summary import Summary
from aprilsched.observe.log import EventLog
from aprilsched.observe.log.reading import replay
from aprilsched.simulation.engine import run_virtual
from aprilsched.simulation.results import remainder

pytestmark = pytest.mark.virtual_time

CONFIG = SchedulerConfig(batch_groups=2, group_size=2, over_provision=2.0)
OFF = 0.25
"""Difference of the second engine's log-probabilities from the trainer's."""


def workload() -> LongTailWorkload:
    return LongTailWorkload(median=30, sigma=0.8, cap=200, group_size=2, seed=2)


def trained(batch: Batch) -> list[NDArray[Any]]:
    """Return a trainer's log-probabilities if one engine had a mismatch and each version moved by
    0.5."""
    rows: list[NDArray[Any]] = []
    for rollout in batch.rollouts:
        row = rollout.logprobs + 0.5 * (batch.version - rollout.versions)
        for segment in rollout.segments:
            row[segment.start : segment.end] += OFF * (segment.engine == "sim-1")
        rows.append(row)
    return rows


async def summed(scheduler: RolloutScheduler, summary: Summary) -> RunSummary:
    return summary.result(remainder(scheduler.state), clock="virtual")


async def run(
    path: Path, batches: int = 4
) -> tuple[list[Batch], list[AlignmentFigures], RunSummary]:
    summary, log = Summary(), EventLog(path)
    log.start()
    taken: list[Batch] = []
    reported: list[AlignmentFigures] = []
    scheduler = RolloutScheduler(SimFleet(2), workload(), config=CONFIG, listeners=[summary, log])
    async with scheduler as rollouts:
        for _ in range(batches):
            batch = await rollouts.next_batch()
            taken.append(batch)
            reported.append(await rollouts.report_logprobs(batch, trained(batch)))
            await rollouts.update_weights(SimPublisher())
        found = await summed(scheduler, summary)
    log.close()
    return taken, reported, found


def test_a_mismatch_is_distinguished_from_staleness(tmp_path: Path):
    batches, reported, summary = run_virtual(run(tmp_path / "events.jsonl"))
    found = summary.alignment
    assert found is not None
    segments = [(b, r, s) for b in batches for r in b.rollouts for s in r.segments]
    fresh = [(s.engine, s.end - s.start) for b, _, s in segments if s.version == b.version]
    stale = sum(s.end - s.start for b, _, s in segments if s.version == b.version - 1)
    assert found.whole.tokens == sum(n for _, n in fresh)
    assert set(found.by_engine) == {"sim-0", "sim-1"}
    for name, off in (("sim-0", 0.0), ("sim-1", OFF)):
        each = found.by_engine[name]
        assert each.tokens == sum(n for engine, n in fresh if engine == name)
        assert each.mean == pytest.approx(off, abs=1e-6)
        assert each.k3 == pytest.approx(np.exp(off) - 1 - off, abs=1e-6)
        assert each.beyond_share == (1 if off else 0)
    assert found.by_staleness[1].tokens == stale > 0
    assert found.by_staleness[1].mean == pytest.approx(0.5, abs=OFF)
    assert sum(each.tokens for each in found.by_position) == found.whole.tokens
    assert list(found.by_batch) == [batch.index for batch in batches]
    assert [each.whole for each in reported] == list(found.by_batch.values())


def test_the_log_agrees_with_the_summary(tmp_path: Path):
    *_, summary = run_virtual(run(tmp_path / "events.jsonl"))
    again = Summary()
    replay(tmp_path / "events.jsonl", [again])
    assert again._alignment.figures() == summary.alignment  # pyright: ignore[reportPrivateUsage]


def test_a_run_without_a_report_is_an_error():
    async def silent() -> RunSummary:
        summary = Summary()
        scheduler = RolloutScheduler(SimFleet(1), workload(), config=CONFIG, listeners=[summary])
        async with scheduler as rollouts:
            await rollouts.next_batch()
            return await summed(scheduler, summary)

    assert run_virtual(silent()).alignment is None


async def test_a_value_that_is_not_a_training_batch_is_refused():
    async with RolloutScheduler(SimFleet(1), workload(), config=CONFIG) as rollouts:
        batch = await rollouts.next_batch()
        evaluated = await rollouts.evaluate([Prompt(input_ids=np.arange(3, dtype=np.int32))])
        with pytest.raises(ConfigError, match="training batches only"):
            await rollouts.report_logprobs(evaluated, trained(evaluated))
        with pytest.raises(ConfigError, match="have shape"):
            await rollouts.report_logprobs(batch, np.zeros((1, 1)))
    with pytest.raises(SchedulerClosed):
        await rollouts.report_logprobs(batch, trained(batch))


def test_a_report_that_is_cancelled_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logprob_comparison, "_TOKENS_AT_ONCE", 1)

    async def cancelled() -> RunSummary:
        summary = Summary()
        scheduler = RolloutScheduler(SimFleet(1), workload(), config=CONFIG, listeners=[summary])
        async with scheduler as rollouts:
            batch = await rollouts.next_batch()
            task = asyncio.ensure_future(rollouts.report_logprobs(batch, trained(batch)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await summed(scheduler, summary)

    assert run_virtual(cancelled()).alignment is None


def test_the_blocking_scheduler_reports_too():
    summary = Summary()
    fleet = SimFleet(2, time_scale=0.001)
    scheduler = blocking.RolloutScheduler(fleet, workload(), config=CONFIG, listeners=[summary])
    with scheduler as rollouts:
        batch = rollouts.next_batch()
        figures = rollouts.report_logprobs(batch, trained(batch))
        found = summary.result(remainder(rollouts.state), clock="wall").alignment
    assert figures == found
    assert figures.whole.tokens == batch.tokens
