"""Tests engines that hang, slow down, die and come back, with the real coordinator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from aprilsched import (
    Batch,
    LongTailWorkload,
    Prompt,
    RolloutScheduler,
    SamplingParams,
    SimFleet,
    SimPublisher,
)
from aprilsched.config import Health, Timeouts
from aprilsched.errors import EngineError, FleetLost, RefitError
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.engines.base import Chunk, GenerationRequest
from aprilsched.kernel.shell.listener import ProtocolListener
from aprilsched.simulation.engine import SimEngine, run_virtual
from tests.support import small
from tests.support.publishers import Once
from tests.support.table import each_row

pytestmark = pytest.mark.virtual_time


def workload() -> LongTailWorkload:
    """Prompts whose responses take minutes at about 100 tokens/s per request."""
    return LongTailWorkload(median=4_000, sigma=0.7, cap=20_000, group_size=4, seed=3)


config = partial(small.config, pace="asynchronous", health=Health(stall_s=20.0))


class Server(SimEngine):
    """An embedded engine whose process can be killed and started again."""

    down = False

    async def open(self) -> None:
        if self.down:
            raise EngineError(self.name, "is not there.")
        await super().open()

    def kill(self) -> None:
        self.down = True
        self.crash()

    async def start_again(self) -> None:
        """Start the server again, with the weights of version 0."""
        self.down = False
        await self.restart()


class Spoilt(Server):
    """A Server with the fault that `fault` names, or none if it is empty."""

    fault = ""

    async def generate(
        self, request: GenerationRequest, *, length: int | None = None
    ) -> AsyncGenerator[Chunk, None]:
        async for chunk in super().generate(request, length=length):
            ids, logprobs, finish = chunk.token_ids, chunk.logprobs, chunk.finish
            if self.fault == "nan":
                logprobs = np.full(len(ids), np.nan, dtype=np.float32)
            elif self.fault == "short" and finish == "length":
                ids, logprobs = ids[1:], logprobs[1:]
            yield Chunk(token_ids=ids, logprobs=logprobs, finish=finish, spans=chunk.spans)

    async def abort(self, request_id: str) -> None:
        if self.fault != "deaf":
            await super().abort(request_id)

    async def resume(self) -> None:
        if self.fault == "stuck":
            raise EngineError(self.name, "does not continue.")
        await super().resume()


class Servers(SimFleet):
    """A fleet of such servers; the last one can have a fault."""

    def __init__(self, count: int, *, refit_seconds: float = 0.0) -> None:
        super().__init__(count)
        kinds = [Server] * (count - 1) + [Spoilt]
        self.engines = tuple(
            kind(f"sim-{index}", self.config, refit_seconds=refit_seconds)
            for index, kind in enumerate(kinds)
        )

    @property
    def servers(self) -> list[Server]:
        return [engine for engine in self.engines if isinstance(engine, Server)]

    @property
    def spoilt(self) -> Spoilt:
        (spoilt,) = (engine for engine in self.engines if isinstance(engine, Spoilt))
        return spoilt


class Losses(ProtocolListener):
    """A listener that records losses and returns of engines with their times, and all events."""

    def __init__(self) -> None:
        self.events: set[type] = set()
        self.lost: list[tuple[str, str]] = []
        self.lost_at: list[float] = []
        self.back_at: list[float] = []

    def on_event(self, event: ev.Event, now: float) -> None:
        self.events.add(type(event))
        if isinstance(event, ev.EngineJoined):
            self.back_at.append(now)

    def on_command(self, command: do.Command, now: float) -> None:
        if isinstance(command, facts.EngineLost):
            self.lost.append((command.engine, command.cause))
            self.lost_at.append(now)


@asynccontextmanager
async def running(
    fleet: SimFleet, losses: Losses | None = None, **changes: object
) -> AsyncGenerator[RolloutScheduler]:
    """Open a scheduler; yields it some seconds after the start of its first batch."""
    listeners = [losses] if losses is not None else []
    async with RolloutScheduler(
        fleet, workload(), config=config(**changes), listeners=listeners
    ) as rollouts:
        await asyncio.sleep(5)
        yield rollouts


def check_whole(rollouts: RolloutScheduler, batches: Sequence[Batch]) -> None:
    """Check that nothing is lost and nothing is doubled."""
    in_flight = rollouts.state.in_flight
    delivered = [r.rollout_id for batch in batches for r in batch.rollouts]
    assert len(set(delivered)) == len(delivered)
    assert in_flight.ledger.total == 0
    assert in_flight.counters.launched == len(delivered) + len(in_flight.rollouts)
    for batch in batches:
        for rollout in batch.rollouts:
            assert len(rollout.token_ids) == len(rollout.logprobs) == len(rollout.versions)


def used(batch: Batch) -> set[str | None]:
    return {segment.engine for r in batch.rollouts for segment in r.segments}


# --- one of several ------------------------------------------------------------------------------


async def test_a_hanging_engine_is_lost_until_it_answers():
    fleet, losses = Servers(2), Losses()
    async with running(fleet, losses) as rollouts:
        held = rollouts.state.in_flight.open["sim-1"]
        fleet.engines[1].decode_at(0)
        batches = [await rollouts.next_batch()]
        assert losses.lost[0][0] == "sim-1"
        assert losses.lost[0][1].endswith(f"from {held} open requests")
        assert losses.lost[0][1].startswith("no token for 2")
        assert set(rollouts.state.weights.versions.engines) == {"sim-0"}
        moved = [r for r in batches[0].rollouts if len(r.segments) > 1]
        assert any([s.engine for s in r.segments] == ["sim-1", "sim-0"] for r in moved)
        fleet.engines[1].decode_at(1)
        await asyncio.sleep(400)
        assert set(rollouts.state.weights.versions.engines) == {"sim-0", "sim-1"}
        for _ in range(4):
            batches.append(await rollouts.next_batch())
            await rollouts.update_weights(SimPublisher())
        assert "sim-1" in used(batches[-1])
        check_whole(rollouts, batches)
        assert len(losses.lost) == 1
    assert ev.Finished in losses.events
    assert ev.Tick not in losses.events


async def test_healthy_engines_survive_refits_and_long_tails():
    losses = Losses()
    async with running(Servers(3, refit_seconds=90.0), losses) as rollouts:
        batches: list[Batch] = []
        for _ in range(8):
            batches.append(await rollouts.next_batch())
            await rollouts.update_weights(SimPublisher())
            await asyncio.sleep(100)
        check_whole(rollouts, batches)
    assert not losses.lost


async def test_repeated_losses_of_an_engine_double_its_wait():
    fleet, losses = Servers(2), Losses()
    async with running(fleet, losses) as rollouts:
        trainer = asyncio.create_task(train(rollouts))
        for _ in range(6):
            fleet.servers[1].kill()
            await until(lambda: "sim-1" not in rollouts.state.weights.versions.engines)
            await fleet.servers[1].start_again()
            await until(lambda: "sim-1" in rollouts.state.weights.versions.engines)
            await until(lambda: rollouts.state.in_flight.open["sim-1"] > 0)
        trainer.cancel()
    waits = [back - lost for lost, back in zip(losses.lost_at, losses.back_at, strict=True)]
    assert all(1.6 < later / earlier < 2.4 for earlier, later in pairwise(waits)), waits


async def train(rollouts: RolloutScheduler) -> None:
    while True:
        await rollouts.next_batch()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5_000):
        while True:
            await asyncio.sleep(0.1)
            if condition():
                return


# --- half open: the quick checks -----------------------------------------------------------------


@each_row("fault", ["nan", "short", "stuck", "hung", "deaf"])
async def test_an_engine_that_only_answers_stays_out(fault: str):
    fleet = Servers(2)

    async with running(fleet, timeouts=Timeouts(control_s=15.0)) as rollouts:
        rollouts._feed(ev.EngineLost(engine="sim-1", cause="unplugged"))
        fleet.spoilt.fault = fault
        if fault == "hung":
            fleet.spoilt.decode_at(0)
        # At 0.25 s per token, a response that cannot be aborted does not end soon.
        fleet.spoilt.decode_at(0.02) if fault == "deaf" else None
        await asyncio.sleep(200)
        assert set(rollouts.state.weights.versions.engines) == {"sim-0"}
        fleet.spoilt.fault = ""
        fleet.spoilt.decode_at(1)
        await asyncio.sleep(200)
        assert set(rollouts.state.weights.versions.engines) == {"sim-0", "sim-1"}


# --- all of them ---------------------------------------------------------------------------------


def test_the_only_engine_dies_and_is_restarted_in_time(caplog: pytest.LogCaptureFixture):
    fleet = Servers(1)

    async def main() -> None:
        async with running(fleet) as rollouts:
            waiting = asyncio.create_task(rollouts.next_batch())
            fleet.servers[0].kill()
            await asyncio.sleep(100)
            assert not rollouts.state.fleet.control.engines
            await fleet.servers[0].start_again()
            batches = [await waiting, await rollouts.next_batch()]
            check_whole(rollouts, batches)
            assert rollouts.state.in_flight.counters.tokens_reprefilled > 0

    with caplog.at_level(logging.ERROR, "aprilsched"):
        run_virtual(main())
    text = [r.getMessage() for r in caplog.records]
    assert text[0].startswith("engine sim-0 is out of use: ")
    assert "the connection broke" in text[0]
    assert "verify failed" in text[0]
    assert len(text) == 4, "probes after 1, 3, 7 … 127 s; one log line per minute of waiting"
    assert all(
        "no engine is left since" in line and "the connection broke" in line for line in text[1:]
    )


async def test_a_fleet_lost_for_good_ends_every_call():
    fleet = Servers(2)

    async with running(fleet, health=Health(stall_s=20.0, fleet_wait_s=300.0)) as rollouts:
        calls: list[asyncio.Task[object]] = [
            asyncio.create_task(rollouts.next_batch()),
            asyncio.create_task(rollouts.evaluate(prompts())),
        ]
        for server in fleet.servers:
            server.kill()
        await asyncio.sleep(100)
        calls.append(asyncio.create_task(rollouts.update_weights(SimPublisher())))
        await asyncio.sleep(150)
        assert not any(call.done() for call in calls)
        started_at = asyncio.get_running_loop().time()
        for call in calls:
            with pytest.raises(FleetLost, match=r"none came back within 30\d s .*sim-0: .*sim-1"):
                await call
        assert asyncio.get_running_loop().time() - started_at < 100
        with pytest.raises(FleetLost):
            await rollouts.next_batch()


def prompts() -> list[Prompt]:
    sampling = SamplingParams(max_new_tokens=3_000)
    return [Prompt(input_ids=np.array([i], dtype=np.int32), sampling=sampling) for i in range(3)]


async def test_engines_back_without_weights_need_a_new_update():
    fleet = Servers(2)

    async with running(fleet) as rollouts:
        await rollouts.update_weights(Once())
        waiting = asyncio.create_task(rollouts.next_batch())
        evaluation = asyncio.create_task(rollouts.evaluate(prompts()))
        await asyncio.sleep(5)
        for server in fleet.servers:
            server.kill()
        await asyncio.sleep(5)
        for server in fleet.servers:
            await server.start_again()
        for call in (waiting, evaluation):
            with pytest.raises(RefitError, match=r"wait for them\); call update_weights"):
                await call
        assert rollouts.state.in_flight.ledger.rollouts == {"abandoned": 3}
        with pytest.raises(RefitError):
            await rollouts.next_batch()
        await rollouts.update_weights(Once())
        batch = await rollouts.next_batch()
        assert set(rollouts.state.weights.versions.engines) == {"sim-0", "sim-1"}
        assert {0, 2} <= {s.version for r in batch.rollouts for s in r.segments}
