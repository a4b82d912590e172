"""Tests two schedulers on one engine: refused in one process, logged across processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from aprilsched import (
    DiskPublisher,
    LongTailWorkload,
    RolloutScheduler,
    SchedulerConfig,
    SGLangFleet,
    SimFleet,
)
from aprilsched.errors import ConfigError, EngineTaken
from aprilsched.kernel.engines.base import Engine, Fleet
from aprilsched.kernel.shell import controls
from aprilsched.kernel.shell.sharing import Claim
from aprilsched.simulation.engine import run_virtual
from aprilsched.testing import SimServer
from aprilsched.testing.contract import greedy, until
from tests.support.sim_http import CONFIG, INTERVAL

pytestmark = pytest.mark.virtual_time


def scheduler(fleet: Fleet, run_id: str) -> RolloutScheduler:
    return RolloutScheduler(
        fleet,
        LongTailWorkload(median=60, sigma=0.9, cap=600, group_size=4, vocab_size=512, seed=3),
        config=SchedulerConfig(batch_groups=4, group_size=4, over_provision=2.0),
        run_id=run_id,
    )


async def test_a_second_scheduler_on_a_fleet_is_refused_harmlessly():
    fleet = SimFleet(2)
    async with scheduler(fleet, "first") as first:
        await first.next_batch()
        with pytest.raises(ConfigError, match="in use by the open scheduler of run first"):
            async with scheduler(fleet, "second"):
                pass
        await first.next_batch()
    async with scheduler(fleet, "third") as third:
        await third.next_batch()


async def test_a_second_fleet_object_for_the_same_server_is_refused():
    async with SimServer(CONFIG) as server:
        async with scheduler(SGLangFleet([server.url]), "first") as first:
            with pytest.raises(ConfigError, match="in use by the open scheduler of run first"):
                async with scheduler(SGLangFleet([server.url]), "second"):
                    pass
            await first.next_batch()
        async with scheduler(SGLangFleet([server.url]), "third") as third:
            await third.next_batch()


async def test_a_scheduler_that_could_not_be_opened_holds_no_engine():
    fleet = SimFleet(1)
    opening = asyncio.create_task(scheduler(fleet, "first").__aenter__())
    await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait([opening])
    async with scheduler(fleet, "second") as second:
        await second.next_batch()


def test_a_scheduler_whose_loop_was_closed_frees_its_engines():
    engines = SimFleet(1).engines
    left, other = Claim("left"), Claim("other")

    async def take(claim: Claim) -> None:
        claim.take(engines)

    run_virtual(take(left))
    run_virtual(take(other))
    left.give_back()
    with pytest.raises(ConfigError, match="run other"):
        asyncio.run(_both(other, Claim("third"), engines))


async def _both(first: Claim, second: Claim, engines: Sequence[Engine]) -> None:
    first.take(engines)
    second.take(engines)


async def test_requests_of_another_client_are_logged(caplog: pytest.LogCaptureFixture):
    async with SimServer(CONFIG) as server:
        fleet = SGLangFleet([server.url], stream_interval=INTERVAL)
        other = server.engine.generate(greedy(100_000, request_id="x" * 20))
        reading = asyncio.create_task(anext(other))
        await until(lambda: server.engine.batcher.running > 0)
        async with scheduler(fleet, "run") as rollouts:
            await rollouts.next_batch()
        reading.cancel()
        await asyncio.wait([reading])
        await other.aclose()
    text = [m for m in caplog.messages if "of another client" in m]
    assert len(text) == 1
    assert "has requests of another client (1 of them)" in text[0]


async def test_a_quiet_engine_is_not_spoken_of(caplog: pytest.LogCaptureFixture):
    async with (
        SimServer(CONFIG) as server,
        scheduler(SGLangFleet([server.url]), "run") as rollouts,
    ):
        await rollouts.next_batch()
    assert not caplog.messages


async def test_foreign_aborts_are_logged_once(caplog: pytest.LogCaptureFixture):
    async with (
        SimServer(CONFIG) as server,
        scheduler(SGLangFleet([server.url]), "run") as rollouts,
    ):
        waiting = asyncio.create_task(rollouts.next_batch())
        await until(lambda: server.engine.batcher.running > 8)
        served = server._served
        assert served is not None
        await served.abort_all()
        await waiting
    assert len([m for m in caplog.messages if "did not ask for it" in m]) == 1


async def take_batches(rollouts: RolloutScheduler) -> None:
    while True:
        await rollouts.next_batch()


async def test_a_scheduler_whose_claim_is_lost_stops():
    async with SimServer(CONFIG) as server:
        fleet = SGLangFleet([server.url])
        async with scheduler(fleet, "run") as rollouts:
            await rollouts.next_batch()
            (engine,) = fleet.engines

            async def claim() -> bool:
                return False

            engine.claim = claim  # as if another process held both sessions
            with pytest.raises(EngineTaken, match="is claimed by another scheduler"):
                await take_batches(rollouts)


async def test_an_engine_resumed_between_flush_attempts_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A server with a hierarchical cache copies KV only while it runs."""
    monkeypatch.setattr(controls, "_WATCH_S", 0.01)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    async with SimServer(CONFIG) as server:
        fleet = SGLangFleet([server.url])
        async with scheduler(fleet, "retract") as rollouts:
            (engine,) = fleet.engines
            flush = engine.flush

            async def in_two_attempts() -> None:
                await engine.resume()
                await asyncio.sleep(0.2)
                await engine.pause("retract")
                await flush()

            engine.flush = in_two_attempts
            for version in (1, 2):
                await rollouts.next_batch()
                await rollouts.update_weights(DiskPublisher(tmp_path))
                assert rollouts.version == version
