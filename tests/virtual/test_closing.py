"""Tests closing in any state: afterwards no engine is paused or decodes, whatever engines do.

Other tests of closing are in test_coordinator.py (any moment of a run) and test_faulty_fleet.py
(aborts that fail). Here the engines are slow, hang, or hold hundreds of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from aprilsched import LongTailWorkload, RolloutScheduler, SGLangFleet
from aprilsched.config import Dispatch
from aprilsched.errors import SchedulerClosed
from aprilsched.kernel.engines.base import Chunk, GenerationRequest, PauseMode
from aprilsched.kernel.engines.failures import Answer
from aprilsched.kernel.engines.generations import despite_cancellation
from aprilsched.kernel.engines.transport import Transport
from aprilsched.simulation.engine import SimConfig, SimEngine, run_virtual
from aprilsched.testing import SimServer
from aprilsched.testing.contract import until
from tests.support import small
from tests.support.sim_http import CONFIG, INTERVAL
from tests.support.small import config
from tests.support.table import each_row

pytestmark = pytest.mark.virtual_time


workload = partial(small.workload, vocab_size=512)


class Slow(SimEngine):
    """An engine that outlives its scheduler, and answers some calls slowly."""

    def __init__(self, name: str, *, abort_s: float = 0.0, **seconds: float) -> None:
        super().__init__(name, SimConfig(stream_interval=INTERVAL, vocab_size=512))
        self.abort_s = abort_s
        self.seconds = seconds

    async def close(self) -> None: ...

    async def abort(self, request_id: str) -> None:
        await asyncio.sleep(self.abort_s)
        await super().abort(request_id)

    async def resume(self) -> None:
        await asyncio.sleep(self.seconds.get("resume", 0.0))
        await super().resume()

    async def pause(self, mode: PauseMode) -> None:
        await asyncio.sleep(self.seconds.get("pause", 0.0))
        await super().pause(mode)

    async def release(self, tags: Sequence[str]) -> None:
        # The server carries it out even if no client waits for its answer.
        await super().release(tags)
        await asyncio.sleep(self.seconds.get("release", 0.0))

    async def wake(self, tags: Sequence[str]) -> None:
        await super().wake(tags)
        await asyncio.sleep(self.seconds.get("wake", 0.0))


class Fleet:
    """A fleet of any engines."""

    def __init__(self, *engines: SimEngine, open_s: float = 0.0) -> None:
        self.engines: Sequence[SimEngine] = engines
        self.open_s = open_s

    async def open(self) -> None:
        await asyncio.sleep(self.open_s)
        for engine in self.engines:
            await engine.open()

    async def close(self) -> None: ...


async def left_as_they_were(engines: Sequence[SimEngine]) -> None:
    await asyncio.sleep(0.1)
    for engine in engines:
        assert engine.batcher.paused is None
        assert engine.batcher.running + engine.batcher.waiting == 0
        await SimEngine.close(engine)


HANG = float("inf")


@each_row("abort_s", [0.0, 0.5, HANG])
@each_row("resume_s", [0.6, 5.0])
async def test_a_slow_continue_is_waited_for_whatever_the_aborts_do(
    abort_s: float, resume_s: float
):
    engines = [Slow("slow", abort_s=abort_s), Slow("other")]
    settings = config(pace="synchronous")
    async with RolloutScheduler(Fleet(*engines), workload(), config=settings) as rollouts:
        await rollouts.next_batch()
        await until(lambda: all(engine.batcher.paused for engine in engines))
        engines[0].seconds["resume"] = resume_s
    await left_as_they_were(engines)


async def test_an_engine_that_hangs_is_named_and_holds_up_no_other(
    caplog: pytest.LogCaptureFixture,
):
    loop = asyncio.get_running_loop()
    engines = [Slow("hangs"), Slow("other")]
    settings = config(pace="synchronous")
    async with RolloutScheduler(Fleet(*engines), workload(), config=settings) as rollouts:
        await rollouts.next_batch()
        await until(lambda: all(engine.batcher.paused for engine in engines))
        engines[0].seconds["resume"] = HANG
        started_at = loop.time()
        closing = asyncio.create_task(rollouts.close())
        await until(lambda: engines[1].batcher.paused is None)
        assert loop.time() - started_at <= 1.1
        await closing
        assert loop.time() - started_at <= 15.0
    await left_as_they_were(engines[1:])
    await SimEngine.close(engines[0])
    text = [record.getMessage() for record in caplog.records if "left paused" in record.message]
    assert text == [
        "the engine may be left paused, since it could not be continued: hangs did not answer "
        "within 10 s"
    ]
    assert any("hangs has not answered the last continue for 2 s" in m for m in caplog.messages)


@each_row("when", ["closing", "pausing"])
@each_row("times", [1, 2, 3])
async def test_a_cancellation_does_not_cut_the_release_short(when: str, times: int):
    """The second Ctrl-C cancels every task."""
    engines = [Slow("a", pause=0.3), Slow("b")]
    scheduler = RolloutScheduler(Fleet(*engines), workload(), config=config())

    async def train() -> None:
        async with scheduler as rollouts:
            await rollouts.next_batch()
            if when == "closing":
                await until(lambda: all(engine.batcher.paused for engine in engines))
            for engine in engines:
                engine.seconds["resume"] = 0.5

    task = asyncio.create_task(train())
    await until(lambda: bool(engines[0].seconds.get("resume")))
    for _ in range(times):
        await asyncio.sleep(0.1)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: len(asyncio.all_tasks()) == 1)
    await left_as_they_were(engines)


async def test_every_task_is_cancelled_while_the_engines_are_released():
    """asyncio.run cancels every task after the second Ctrl-C."""
    engines = [Slow("a"), Slow("b")]

    async def train() -> None:
        async with RolloutScheduler(Fleet(*engines), workload(), config=config()) as rollouts:
            await rollouts.next_batch()
            await until(lambda: all(engine.batcher.paused for engine in engines))
            for engine in engines:
                engine.seconds["resume"] = 0.5

    task = asyncio.create_task(train())
    await until(lambda: bool(engines[0].seconds.get("resume")))
    await asyncio.sleep(0.1)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert task.cancelled()
    await left_as_they_were(engines)


class Interrupted(Slow):
    """An engine in whose call the second Ctrl-C of asyncio.run is raised."""

    def __init__(self, name: str, call: str) -> None:
        super().__init__(name)
        self.call = call
        self.armed = False

    def _meet(self, call: str) -> None:
        if self.armed and call == self.call:
            self.armed = False
            raise KeyboardInterrupt

    async def abort(self, request_id: str) -> None:
        self._meet("abort")
        await super().abort(request_id)

    async def resume(self) -> None:
        self._meet("resume")
        await super().resume()

    async def generate(
        self, request: GenerationRequest, *, length: int | None = None
    ) -> AsyncGenerator[Chunk, None]:
        async with aclosing(super().generate(request, length=length)) as chunks:
            try:
                async for chunk in chunks:
                    yield chunk
            finally:
                self._meet("generate")


@each_row("call", ["abort", "resume", "generate"])
def test_a_keyboard_interrupt_while_the_engines_are_released(call: str):
    interrupted = Interrupted("a", call)
    engines = [interrupted, Slow("b")]

    async def main() -> None:
        async with RolloutScheduler(Fleet(*engines), workload(), config=config()) as rollouts:
            await rollouts.next_batch()
            await until(lambda: all(engine.batcher.paused for engine in engines))
            interrupted.armed = True

    with pytest.raises(KeyboardInterrupt):
        run_virtual(main())
    assert not interrupted.armed
    assert [engine.batcher.paused for engine in engines] == [None, None]


def test_a_keyboard_interrupt_in_a_last_word_is_not_raised_twice():
    async def interrupted() -> None:
        raise KeyboardInterrupt

    loop = asyncio.new_event_loop()
    try:
        waiting = loop.create_task(despite_cancellation(interrupted()))
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(waiting)
        loop.run_until_complete(_end(waiting))
        assert waiting.cancelled()
    finally:
        loop.close()


async def _end(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task])


async def test_close_called_twice_and_at_once():
    engines = [Slow("a", resume=0.2)]
    async with RolloutScheduler(Fleet(*engines), workload(), config=config()) as rollouts:
        await rollouts.next_batch()
        await asyncio.gather(rollouts.close(), rollouts.close())
        await rollouts.close()
        with pytest.raises(SchedulerClosed):
            await rollouts.next_batch()
    await left_as_they_were(engines)


@each_row("how", ["cancelled", "closed"])
@each_row("seconds", [0.0, 0.5, 1.0])
async def test_leaving_while_it_is_opened(how: str, seconds: float):
    engines = [Slow("a", resume=0.5)]
    fleet = Fleet(*engines, open_s=0.5)
    scheduler = RolloutScheduler(fleet, workload(), config=config(pace="asynchronous"))
    opening = asyncio.create_task(scheduler.__aenter__())
    await asyncio.sleep(seconds)
    if how == "cancelled":
        opening.cancel()
        await asyncio.wait([opening])
    else:
        await scheduler.close()
    await asyncio.wait([opening])
    with pytest.raises(SchedulerClosed):
        await scheduler.next_batch()
    await left_as_they_were(engines)
    assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]


@each_row("seconds", [0.0, 0.05, 0.35, 0.8, 3.0])
@each_row("leaves", [True, False])
async def test_memory_on_its_way_out_is_taken_back(seconds: float, leaves: bool):
    """The scheduler is closed while the engine pauses, releases, sleeps, or wakes."""
    engines = [Slow("a", pause=0.1, release=0.5, wake=0.5)]
    async with RolloutScheduler(Fleet(*engines), workload(), config=config()) as rollouts:
        await rollouts.next_batch()
        await until(lambda: engines[0].batcher.paused is not None)

        async def sleep() -> None:
            async with rollouts.asleep():
                await asyncio.sleep(1.0 if leaves else 100.0)

        task = asyncio.create_task(sleep())
        await asyncio.sleep(seconds)
        await rollouts.close()
        await asyncio.wait([task])
    await left_as_they_were(engines)


# --- on a server, over HTTP -------------------------------------------------------------------

REQUESTS = 240


@asynccontextmanager
async def holding(
    count: int,
) -> AsyncGenerator[tuple[RolloutScheduler, SimServer]]:
    """A paused server that holds `count` requests of a scheduler."""
    machine = SimConfig(stream_interval=INTERVAL, vocab_size=512, stream_at_pause=False)
    prompts = LongTailWorkload(median=300, sigma=1.0, cap=2_000, group_size=4, vocab_size=512)
    settings = config(
        batch_groups=count // 12,
        over_provision=3.0,
        pace="synchronous",
        dispatch=Dispatch(rate=100_000),
    )
    async with SimServer(machine) as server:
        fleet = SGLangFleet([server.url], stream_interval=INTERVAL)
        async with RolloutScheduler(fleet, prompts, config=settings) as rollouts:
            await rollouts.next_batch()
            await until(lambda: server.engine.batcher.paused is not None)
            yield rollouts, server


def slow_aborts(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[int]:
    """For each abort call from now on, the number of open abort calls at that time."""
    under_way: set[object] = set()
    counts: list[int] = []
    once = Transport._once

    async def slowly(self: Transport, session: Any, method: str, path: str, *rest: Any) -> Answer:
        if path != "abort_request":
            return await once(self, session, method, path, *rest)
        call = object()
        under_way.add(call)
        counts.append(len(under_way))
        try:
            await asyncio.sleep(seconds)
            return await once(self, session, method, path, *rest)
        finally:
            under_way.discard(call)

    monkeypatch.setattr(Transport, "_once", slowly)
    return counts


async def test_hundreds_of_requests_are_aborted_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    peaks = slow_aborts(monkeypatch, 0.1)
    async with holding(REQUESTS) as (rollouts, server):
        held = rollouts.state.in_flight.open_attempts
        assert held > REQUESTS // 4
        peaks.clear()
        await rollouts.close()
        assert held <= len(peaks) <= 2 * held
        assert max(peaks) <= 16
        batcher = server.engine.batcher
        assert batcher.paused is None
        assert batcher.running + batcher.waiting == 0
    assert not caplog.messages


async def test_a_server_that_ignores_aborts_is_resumed_and_logged(
    caplog: pytest.LogCaptureFixture,
):
    loop = asyncio.get_running_loop()
    async with holding(REQUESTS) as (rollouts, server):
        held = rollouts.state.in_flight.open_attempts
        served = server._served
        assert served is not None

        async def never(rid: str) -> None:
            await asyncio.Event().wait()

        served.abort = never  # type: ignore[method-assign]
        started_at = loop.time()
        await rollouts.close()
        assert loop.time() - started_at <= 15.0
        assert server.engine.batcher.paused is None
        lines = [m for m in caplog.messages if "still decode" in m]
        assert len(lines) == 1
        assert f"of {held} requests that were left early" in lines[0]


async def test_many_requests_are_aborted_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
):
    """An update with straggler="abort" does this too, not only closing."""
    peaks = slow_aborts(monkeypatch, 0.01)

    prompts = LongTailWorkload(median=300, sigma=1.0, cap=2_000, group_size=4, vocab_size=512)
    settings = config(batch_groups=30, straggler="abort", dispatch=Dispatch(rate=100_000))
    async with SimServer(CONFIG) as server:
        fleet = SGLangFleet([server.url], stream_interval=INTERVAL)
        async with RolloutScheduler(fleet, prompts, config=settings) as rollouts:
            await rollouts.next_batch()
            await until(lambda: not rollouts.state.in_flight.open_attempts)
            assert len(peaks) > 30
            assert max(peaks) <= 16
