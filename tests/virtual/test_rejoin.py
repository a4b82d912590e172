"""Tests the real coordinator when engines are lost, come back, join and leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from aprilsched import (
    DiskPublisher,
    LongTailWorkload,
    RolloutScheduler,
    SchedulerConfig,
    SGLangFleet,
    SimFleet,
    SimPublisher,
    SqliteStore,
)
from aprilsched.errors import ConfigError, EngineError
from aprilsched.kernel.core.messages.events import EngineLost
from aprilsched.kernel.core.policies.straggler import StragglerRule
from aprilsched.kernel.engines.base import Chunk, Engine, FleetChange, GenerationRequest
from aprilsched.kernel.engines.self_check import check
from aprilsched.simulation.engine import SimEngine, run_virtual
from tests.support.publishers import Once
from tests.support.sim_http import Raw, served, two_weights
from tests.support.small import workload
from tests.support.table import each_row

pytestmark = pytest.mark.virtual_time


CONFIG = SchedulerConfig(batch_groups=4, group_size=4, over_provision=2.0)


def lose(rollouts: RolloutScheduler, name: str) -> None:
    rollouts._session.feed(EngineLost(engine=name, cause="its machine burnt"))


async def test_a_resumed_run_accepts_a_server_restarted_since(tmp_path: Path):
    """The restarted server once was refused, because the servers do not have the same weights."""
    lengths = LongTailWorkload(median=20, cap=60, group_size=4, seed=3, vocab_size=400)
    store, (weights, newer) = tmp_path / "rollouts.store", two_weights(tmp_path)
    async with served() as first, served() as second:

        def scheduler(kept: Path | None) -> RolloutScheduler:
            fleet = SGLangFleet([first.url, second.url])
            return RolloutScheduler(
                fleet, lengths, config=CONFIG, store=None if kept is None else SqliteStore(kept)
            )

        async with scheduler(store) as rollouts:
            await rollouts.next_batch()
            await rollouts.update_weights(DiskPublisher(weights))
        async with Raw(second.url) as raw:
            body = {"new_version": "default", "abort_all_requests": False}
            assert (await raw.post("/update_weight_version", body))[0] == 200
        with pytest.raises(ConfigError, match="different policy versions"):
            async with scheduler(None):
                pass
        async with scheduler(store) as rollouts:
            control = rollouts.state.fleet.control
            assert len(control.engines) == len(control.standby) == 1
            assert rollouts.version == 1
            await rollouts.next_batch()
            await rollouts.update_weights(DiskPublisher(newer))
            assert set(rollouts.state.weights.versions.engines.values()) == {2}
            assert len(control.engines) == 2
            await rollouts.next_batch()


def test_a_lost_engine_is_back_at_the_fleets_version(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        async with RolloutScheduler(SimFleet(2), workload(), config=CONFIG) as rollouts:
            await rollouts.next_batch()
            lose(rollouts, "sim-1")
            await rollouts.update_weights(Once())
            assert rollouts.state.weights.versions.engines == {"sim-0": 1}
            await asyncio.sleep(5)
            assert set(rollouts.state.fleet.control.standby) == {"sim-1"}
            await rollouts.update_weights(Once())
            assert rollouts.state.weights.versions.engines == {"sim-0": 2, "sim-1": 2}
            await rollouts.next_batch()

    with caplog.at_level(logging.WARNING, "aprilsched"):
        run_virtual(main())
    text = [record.getMessage() for record in caplog.records]
    assert text == [
        "engine sim-1 is out of use: its machine burnt",
        "engine sim-1 has version 0 and is on standby, without requests, until the next update",
        "engine sim-1 takes part again, at version 2",
    ]


async def test_an_engine_catches_up_from_a_publisher_with_the_version():
    async with RolloutScheduler(SimFleet(2), workload(), config=CONFIG) as rollouts:
        await rollouts.next_batch()
        lose(rollouts, "sim-1")
        await rollouts.update_weights(SimPublisher())
        await asyncio.sleep(5)
        assert rollouts.state.weights.versions.engines == {"sim-0": 1, "sim-1": 1}


class Late(Once):
    """A publisher so slow to prepare that an engine returns before it publishes."""

    async def prepare(self, version: int) -> None:
        await asyncio.sleep(60)

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        raise AssertionError("there is nothing to publish")


async def test_a_version_that_returns_in_prepare_is_not_published():
    async with RolloutScheduler(SimFleet(2), workload(), config=CONFIG) as rollouts:
        await rollouts.next_batch()
        lose(rollouts, "sim-1")
        await rollouts.update_weights(Once())
        lose(rollouts, "sim-0")
        assert not rollouts.state.fleet.control.engines
        report = await rollouts.update_weights(Late(), version=1)
        assert (report.version, report.quarantined) == (1, {})
        assert rollouts.state.weights.versions.engines == {"sim-0": 1}
        await rollouts.next_batch()


async def test_one_that_keeps_failing_is_asked_ever_more_rarely(monkeypatch: pytest.MonkeyPatch):
    fleet = SimFleet(2)
    asked: list[float] = []

    async def refuse() -> None:
        asked.append(asyncio.get_running_loop().time())
        raise EngineError("sim-1", "is still on fire.")

    async with RolloutScheduler(fleet, workload(), config=CONFIG) as rollouts:
        monkeypatch.setattr(fleet.engines[1], "open", refuse)
        lose(rollouts, "sim-1")
        await asyncio.sleep(1_000)
    waits = [later - earlier for earlier, later in pairwise(asked)]
    assert waits[:5] == pytest.approx([2, 4, 8, 16, 32], abs=0.1)
    assert waits[6:] == pytest.approx([60.0] * len(waits[6:]))


class Changing(SimFleet):
    """A fleet of which one engine leaves and another joins."""

    def __init__(self) -> None:
        super().__init__(2)
        self.changes: asyncio.Queue[FleetChange] = asyncio.Queue()

    async def watch(self) -> AsyncGenerator[FleetChange, None]:
        while True:
            yield await self.changes.get()


async def test_engines_join_and_leave_while_it_runs():
    fleet, other = Changing(), SimFleet(3)
    await other.open()
    joining = other.engines[2]
    async with RolloutScheduler(fleet, workload(), config=CONFIG) as rollouts:
        await rollouts.next_batch()
        fleet.changes.put_nowait(FleetChange(left=("sim-0",), joined=(joining,)))
        await asyncio.sleep(100)
        assert set(rollouts.state.weights.versions.engines) == {"sim-1", "sim-2"}
        batch = await rollouts.next_batch()
        await rollouts.update_weights(SimPublisher())
        await rollouts.next_batch()
        engines = {segment.engine for r in batch.rollouts for segment in r.segments}
        assert "sim-2" in engines


class Noting(SimEngine):
    """An engine that records flushes and the requests of a run, but not those of a check."""

    def __init__(self, name: str = "sim-0") -> None:
        super().__init__(name)
        self.noted: list[str] = []

    async def flush(self) -> None:
        await super().flush()
        self.noted.append("flush")

    def generate(
        self, request: GenerationRequest, *, length: int | None = None
    ) -> AsyncGenerator[Chunk, None]:
        self.noted.append("check" if len(request.input_ids) == 1 else "request")
        return super().generate(request, length=length)


class Noted(Changing):
    """A fleet of recording engines."""

    def __init__(self, *engines: Noting) -> None:
        super().__init__()
        self.engines = engines


@each_row(("straggler", "flushes"), [("retract", True), ("abort", True), ("in_place", False)])
async def test_an_engine_is_flushed_first_if_old_keys_are_forbidden(
    straggler: StragglerRule, flushes: bool
):
    """Another client may have left prefixes of other weights in the cache, and the check of the
    engine adds its own."""
    config = replace(CONFIG, straggler=straggler)

    def begins_clean(noted: list[str]) -> bool:
        before = noted[: noted.index("request")]
        return (before[-1:] == ["flush"]) is flushes

    first, second, third = (Noting(f"sim-{index}") for index in range(3))
    fleet = Noted(first, second)
    await third.open()
    async with RolloutScheduler(fleet, workload(), config=config) as rollouts:
        await rollouts.next_batch()
        assert begins_clean(first.noted)
        assert begins_clean(second.noted)

        second.noted.clear()
        lose(rollouts, "sim-1")
        await asyncio.sleep(100)
        fleet.changes.put_nowait(FleetChange(joined=(third,)))
        await asyncio.sleep(100)
        assert len(rollouts.state.fleet.control.engines) == 3
        await rollouts.next_batch()
        assert second.noted.count("check") == third.noted.count("check") == 2
        assert begins_clean(second.noted)
        assert begins_clean(third.noted)


class Stuck(Noting):
    """An engine that cannot be flushed."""

    async def flush(self) -> None:
        raise EngineError(self.name, "has its cache in use.")


async def test_a_failed_flush_ends_opening_and_resumes_all_engines():
    stuck, other = Stuck("sim-0"), Noting("sim-1")
    with pytest.raises(EngineError, match="sim-0: has its cache in use"):
        async with RolloutScheduler(Noted(stuck, other), workload(), config=CONFIG):
            pass
    assert other.noted == ["flush"]
    for engine in (stuck, other):
        assert engine.batcher.paused is None


async def test_opening_cancelled_in_a_flush_leaves_engines_running():
    fleet = SimFleet(pause_seconds=1.0)
    (engine,) = fleet.engines
    scheduler = RolloutScheduler(fleet, workload(), config=CONFIG)
    opening = asyncio.create_task(scheduler.__aenter__())
    while engine.batcher.paused is None:  # noqa: ASYNC110 - a pause sets no event
        await asyncio.sleep(0.01)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert engine.batcher.paused is None


async def test_an_engine_leaving_during_its_check_is_not_paused():
    engine = SimEngine(pause_seconds=1.0)
    await engine.open()
    examining = asyncio.create_task(check(engine))
    while engine.batcher.paused is None:  # noqa: ASYNC110 - a pause sets no event
        await asyncio.sleep(0.01)
    examining.cancel()
    await asyncio.wait([examining])
    await asyncio.sleep(10)
    assert engine.batcher.paused is None
    assert not engine.batcher.running
    await engine.close()
