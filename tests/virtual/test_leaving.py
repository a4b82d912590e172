"""Tests that an engine that leaves the fleet is handed back running and with its memory.

It uses the real scheduler and the real adapters with served embedded engines. The sockets are real
and the clock is virtual.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from aprilsched import LongTailWorkload, RolloutScheduler, SGLangFleet
from aprilsched.errors import EngineRejected, SchedulerClosed
from aprilsched.kernel.core.messages.events import EngineLost
from aprilsched.kernel.core.state.engine_control import Mode
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.engines.refit import RefitFromDisk
from aprilsched.testing import SimServer
from aprilsched.testing.contract import until
from tests.support import small
from tests.support.sim_http import CONFIG, INTERVAL, two_weights
from tests.support.table import each_row

pytestmark = pytest.mark.virtual_time

TAGS = ("kv_cache", "weights")


config = partial(small.config, group_size=2)


class Setting:
    """A scheduler on two servers, the first of which leaves."""

    def __init__(
        self, rollouts: RolloutScheduler, fleet: SGLangFleet, servers: Sequence[SimServer]
    ) -> None:
        self.rollouts = rollouts
        self.fleet = fleet
        self.servers = servers
        self.engine = servers[0].engine
        self.name = fleet.engines[0].name

    def released(self) -> frozenset[str]:
        return self.engine._released

    async def leaves(self) -> None:
        before = self.rollouts.state.fleet.control.of(self.name)
        assert before is not None
        await self.fleet.remove(self.servers[0].url)
        await until(lambda: self.rollouts.state.fleet.control.of(self.name) is None)

    async def comes_back(self) -> None:
        await self.fleet.add(self.servers[0].url)

    def is_as_it_was(self) -> bool:
        inside = self.engine.batcher
        idle = inside.running + inside.waiting == 0
        return inside.paused is None and not self.released() and idle

    async def is_handed_back(self) -> None:
        await until(self.is_as_it_was, 30.0)


@asynccontextmanager
async def setting(**changes: Any) -> AsyncGenerator[Setting]:
    prompts = LongTailWorkload(median=80, sigma=0.5, cap=400, group_size=2, vocab_size=512, seed=3)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(SimServer(CONFIG)) for _ in range(2)]
        fleet = SGLangFleet([server.url for server in servers], stream_interval=INTERVAL)
        rollouts = await stack.enter_async_context(
            RolloutScheduler(fleet, prompts, config=config(**changes))
        )
        await rollouts.next_batch()
        yield Setting(rollouts, fleet, servers)


EXPECTED = ("it left the fleet", "takes part again", "has not answered the refit", "who knows")


def text(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log messages, except those about engines that leave or return."""
    own = [r.getMessage() for r in caplog.get_records("call") if r.name.startswith("aprilsched")]
    return [message for message in own if not any(words in message for words in EXPECTED)]


@pytest.fixture(autouse=True)
def nothing_else_is_said(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    caplog.set_level(logging.WARNING, "aprilsched")
    yield
    if request.function is not test_an_engine_that_cannot_be_released_is_logged_once:
        assert text(caplog) == []


@each_row("straggler", ["retract", "in_place", "abort"])
async def test_an_engine_leaving_asleep_stays_asleep_until_the_end(straggler: str):
    async with setting(straggler=straggler, pace="asynchronous") as there:
        async with there.rollouts.asleep(tags=TAGS):
            await there.leaves()
            await asyncio.sleep(100)
            assert there.released() == frozenset(TAGS), "the memory belongs to the trainer"
            assert there.engine.batcher.paused == "retract"
        await there.is_handed_back()
        await there.rollouts.next_batch()


async def test_an_engine_leaving_asleep_is_released_by_closing():
    async with setting() as there:
        await there.rollouts.asleep(tags=TAGS).__aenter__()
        await there.leaves()
        await asyncio.sleep(100)
        await there.rollouts.close()
        assert there.is_as_it_was()


@each_row("closes", [False, True])
async def test_an_engine_rejoining_asleep_works_after_the_sleep(closes: bool):
    async with setting(pace="asynchronous") as there:
        asleep = there.rollouts.asleep(tags=TAGS)
        await asleep.__aenter__()
        for _ in range(2):
            await there.fleet.remove(there.servers[0].url)
            await there.comes_back()
            await asyncio.sleep(100)
            assert there.released() == frozenset(TAGS), "the memory belongs to the trainer"
        if closes:
            await there.rollouts.close()
            assert there.is_as_it_was()
            with pytest.raises(SchedulerClosed):
                await asleep.__aexit__(None, None, None)
            return
        await asleep.__aexit__(None, None, None)
        await until(lambda: there.name in there.rollouts.state.fleet.control.engines, 30.0)
        await there.rollouts.next_batch()


async def test_one_that_is_lost_asleep_comes_back_after_the_sleep():
    async with setting(pace="asynchronous") as there:
        async with there.rollouts.asleep(tags=TAGS):
            there.rollouts._session.feed(EngineLost(engine=there.name, cause="who knows"))
            await asyncio.sleep(1000)
            assert there.released() == frozenset(TAGS), "the memory belongs to the trainer"
        await until(lambda: there.name in there.rollouts.state.fleet.control.engines, 120.0)


async def test_one_that_is_restarted_asleep_and_leaves_is_not_woken():
    """A real server crashes if it wakes memory that it has not released."""

    async with setting() as there:
        async with there.rollouts.asleep(tags=TAGS):
            await there.leaves()
            await there.servers[0].crash()
            await there.servers[0].restart(keeps_weights=True)
        await there.is_handed_back()


@each_row("mode", [Mode.PAUSING, Mode.FLUSHING, Mode.RELEASING, Mode.WAKING])
async def test_one_that_leaves_on_its_way_into_or_out_of_sleep(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
):
    """The call takes effect after the engine has left."""
    call = {"pausing": "pause", "flushing": "flush", "releasing": "release", "waking": "wake"}[mode]

    async with setting() as there:
        proceed = asyncio.Event()
        original = getattr(there.engine, call)

        async def delayed(*arguments: Any) -> None:
            await proceed.wait()
            await original(*arguments)

        monkeypatch.setattr(there.engine, call, delayed)

        async def sleep() -> None:
            async with there.rollouts.asleep(tags=TAGS):
                await asyncio.sleep(10)

        sleeping = asyncio.create_task(sleep())
        control = there.rollouts.state.fleet.control.engines[there.name]
        await until(lambda: control.mode is mode)
        await asyncio.sleep(1)
        await there.leaves()
        await asyncio.sleep(1)
        proceed.set()
        await sleeping
        await there.is_handed_back()


async def test_an_engine_leaving_paused_runs_without_its_requests():
    async with setting(straggler="retract", pace="synchronous") as there:
        await until(lambda: there.engine.batcher.paused is not None)
        await there.leaves()
        await there.is_handed_back()


async def test_one_that_leaves_while_it_is_asked_for_its_version(monkeypatch: pytest.MonkeyPatch):
    async with setting(straggler="abort", pace="synchronous") as there:
        control = there.rollouts.state.fleet.control.engines[there.name]
        engine = there.fleet.engines[0]

        async def hang() -> int:
            await asyncio.Event().wait()
            return 0

        monkeypatch.setattr(engine, "verify", hang)
        await asyncio.sleep(60)
        waiting = asyncio.create_task(there.rollouts.next_batch())
        await until(lambda: control.mode is Mode.VERIFYING)
        await there.leaves()
        await waiting
        await there.is_handed_back()


class SlowPublisher:
    """A publisher that waits before each engine, and then needs the engine's connection."""

    def __init__(self, path: Any) -> None:
        self._path = path
        self.started = asyncio.Event()
        self.done: list[str] = []

    async def prepare(self, version: int) -> None: ...

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        self.started.set()
        await asyncio.sleep(20)
        for engine in engines:
            assert isinstance(engine, RefitFromDisk)
            await engine.update_from_disk(self._path, version)
            self.done.append(engine.name)
        return {engine.name: None for engine in engines}


@each_row("asleep", [False, True])
async def test_an_engine_leaving_in_a_refit_runs_after_it(asleep: bool, tmp_path: Any):
    """The connection stays open for the publisher, and the engine stays paused while its weights
    are inconsistent."""

    async def update(there: Setting) -> None:
        publisher = SlowPublisher(two_weights(tmp_path)[1])
        updating = asyncio.create_task(there.rollouts.update_weights(publisher))
        await publisher.started.wait()
        await there.leaves()
        await asyncio.sleep(10)
        assert there.engine.batcher.paused == "retract"
        report = await updating
        assert report.version == 1
        assert there.name in publisher.done
        await asyncio.sleep(100)
        assert there.released() == (frozenset({"kv_cache"}) if asleep else frozenset())

    async with setting() as there:
        if asleep:
            async with there.rollouts.asleep(tags=TAGS):
                await update(there)
        else:
            await update(there)
        await there.is_handed_back()
        await there.rollouts.next_batch()


async def test_an_engine_that_cannot_be_released_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async with setting() as there:

        async def refuse(_: object) -> None:
            raise EngineRejected("it", "has no memory left.", status=400)

        async with there.rollouts.asleep(tags=TAGS):
            await there.leaves()
            monkeypatch.setattr(there.engine, "wake", refuse)
        await asyncio.sleep(100)
    (line,) = text(caplog)
    assert "may be left paused" in line
