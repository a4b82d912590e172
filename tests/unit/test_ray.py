"""Tests a fleet whose servers are owned by Ray actors, with real Ray and the SGLang-compatible test
server in each actor."""

# pyright: basic
# Ray has no complete types.
from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from aprilsched import Batch, Prompt, RolloutScheduler, SamplingParams, SchedulerConfig
from aprilsched.errors import EngineUnreachable
from aprilsched.fronts.ray import RayFleet
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.testing.contract import WAIT_SECONDS, until
from aprilsched.testing.server import SimServer
from aprilsched.testing.threaded import ThreadedServer
from tests.support.ray_cluster import local_cluster

ray = pytest.importorskip("ray")

POLL_S = 0.1


class Server:
    """An actor that owns a server, as those of slime do."""

    def __init__(self) -> None:
        self._server = ThreadedServer(SimServer(SimConfig(stream_at_pause=False), time_scale=0.05))
        self._server.start()

    def get_url(self) -> str:
        return self._server.url

    def pid(self) -> int:
        return os.getpid()

    def work(self, seconds: float) -> None:
        time.sleep(seconds)


class Addressed(Server):
    """An actor that returns host and port, as verl's actors do."""

    get_url = None  # type: ignore[assignment]

    def get_server_address(self) -> tuple[str, int]:
        host, port = self._server.url.removeprefix("http://").split(":")
        return host, int(port)


class Received:
    """An actor that returns its last `tell`: at first None, as an actor on a further node of a
    multi-node server does."""

    answer: Any = None

    def tell(self, answer: Any) -> None:
        self.answer = answer

    def get_url(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Mute:
    """An actor that has no way to tell an address."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_cluster():
        yield


@pytest.fixture(scope="module")
def servers(cluster: None) -> list[Any]:
    """Two servers, each of which Ray starts again in a new process. Starting an actor takes
    seconds, so the tests of this file share them."""
    return [start(Server, max_restarts=-1, name=f"engine-{number}") for number in range(2)]


@pytest.fixture(scope="module")
def received(cluster: None) -> Any:
    return start(Received)


def start(kind: type[Any], **options: Any) -> Any:
    return ray.remote(kind).options(num_cpus=0, **options).remote()


async def url_of(actor: Any) -> str:
    return await actor.get_url.remote()


def address_of(engine: SGLangEngine) -> str:
    return engine.address.rstrip("/")


def has_moved(fleet: RayFleet, address: str) -> bool:
    """Whether the fleet is whole, with no server at `address`."""
    addresses = [address_of(engine) for engine in fleet.engines]
    return len(addresses) == 2 and address not in addresses


@asynccontextmanager
async def opened(fleet: RayFleet) -> AsyncGenerator[RayFleet]:
    await fleet.open()
    try:
        yield fleet
    finally:
        await fleet.close()


async def generating(rollouts: RolloutScheduler, batches: list[Batch]) -> asyncio.Task[Batch]:
    """A wait for a batch that has requests in flight; batches that were complete before it go to
    `batches`."""
    while True:
        asked = asyncio.create_task(rollouts.next_batch())
        await until(lambda: asked.done() or bool(rollouts.state.in_flight.open_attempts))  # noqa: B023
        if not asked.done():
            return asked
        batches.append(await asked)


def prompts(tokens: int) -> Iterator[Prompt]:
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    for key in itertools.count():
        ids = np.array([key % 1000 + 1, 7], dtype=np.int32)
        yield Prompt(input_ids=ids, key=key, sampling=sampling)


async def test_actors_are_asked_for_their_addresses_in_the_ways_that_they_have(
    servers: list[Any], received: Any
):
    slime, named = servers
    verl = start(Addressed)
    await received.tell.remote(None)
    async with opened(RayFleet([slime, verl, received, "engine-1"])) as fleet:
        addresses = [address_of(engine) for engine in fleet.engines]
        host, port = await verl.get_server_address.remote()
        assert addresses == [await url_of(slime), f"http://{host}:{port}", await url_of(named)]
    async with opened(RayFleet([slime], address=lambda actor: actor.get_url.remote())) as fleet:
        assert len(fleet.engines) == 1


async def test_actors_without_an_address_are_refused(received: Any):
    await received.tell.remote(None)
    with pytest.raises(EngineUnreachable, match="start the servers first"):
        await RayFleet([received, "missing"]).open()
    with pytest.raises(AttributeError, match="get_server_address"):
        await RayFleet([start(Mute)]).open()


async def test_an_actor_that_has_no_server_yet_is_asked_again(servers: list[Any], received: Any):
    early, late = servers[0], received
    await late.tell.remote(RuntimeError("no port yet"))
    with pytest.raises(RuntimeError, match="no port yet"):
        await RayFleet([late]).open()
    addresses = {"early": early}
    fleet = RayFleet(
        [early, late],
        address=lambda actor: (
            actor.get_url.remote() if actor in addresses.values() else ray.put(None)
        ),
        poll_s=POLL_S,
    )
    async with opened(fleet):
        assert len(fleet.engines) == 1
        addresses["late"] = late
        await fleet._look()
        assert len(fleet.engines) == 1
        await late.tell.remote(await url_of(servers[1]))
        await fleet._look()
        assert len(fleet.engines) == 2


async def test_an_actor_is_killed_and_restarted_in_mid_generation_and_nothing_is_lost(
    servers: list[Any],
):
    """Ray restarts the actor in a new process, whose server has another address."""
    before = [await url_of(server) for server in servers]
    config = SchedulerConfig(batch_groups=4, group_size=2, over_provision=2.0, straggler="abort")
    fleet = RayFleet(servers, poll_s=POLL_S)
    async with (
        asyncio.timeout(WAIT_SECONDS),
        RolloutScheduler(fleet, prompts(400), config=config) as rollouts,
    ):
        batches = [await rollouts.next_batch()]
        for number in range(2):
            asked = await generating(rollouts, batches)
            os.kill(await servers[number].pid.remote(), signal.SIGKILL)
            batches.append(await asked)
            await until(lambda number=number: has_moved(fleet, before[number]))
            await until(lambda: len(rollouts.state.fleet.control.engines) == 2)
        batches += [await rollouts.next_batch() for _ in range(2)]
        after = {address_of(engine) for engine in fleet.engines}
        assert after == {await url_of(server) for server in servers}
        assert not set(before) & after
        counters, in_flight = rollouts.state.in_flight.counters, rollouts.state.in_flight
        assert in_flight.ledger.total == 0
        delivered = [rollout for batch in batches for rollout in batch.rollouts]
        assert counters.launched == len(delivered) + len(in_flight.rollouts)
        assert all(len(rollout) == 400 for rollout in delivered)


async def test_a_busy_actor_keeps_its_server_in_the_fleet(
    servers: list[Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("aprilsched.fronts.ray.fleet.ANSWER_S", 0.2)
    busy, free = start(Server), servers[0]
    async with opened(RayFleet([busy, free], poll_s=POLL_S)) as fleet:
        names = [engine.name for engine in fleet.engines]
        work = busy.work.remote(60.0)
        for _ in range(4):
            await fleet._look()
        assert [engine.name for engine in fleet.engines] == names
        ray.kill(busy)
        with pytest.raises(ray.exceptions.RayActorError):
            await work
        for _ in range(2):
            await fleet._look()
        assert [engine.name for engine in fleet.engines] == names[1:]
