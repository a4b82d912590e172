"""Tests a fleet that follows the list of SGLang's real router, with two real servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from aprilsched import (
    DiskPublisher,
    SGLangFleet,
    SGLangListedFleet,
    workers_of_router,
)
from aprilsched.errors import ConfigError, EngineRejected, EngineUnreachable
from aprilsched.kernel.engines.base import FleetChange
from aprilsched.testing.contract import WAIT_SECONDS, greedy, whole
from tests.sglang.conftest import ADMIN_KEY
from tests.sglang.helpers import settled
from tests.sglang.recorded import Recorder, long_tail, scheduled
from tests.sglang.router import SGLangRouter
from tests.sglang.server import CpuServer

Pair = tuple[CpuServer, CpuServer]
POLL = 0.1


@pytest.fixture
def router(clean_pair: Pair, tmp_path: Path) -> Iterator[SGLangRouter]:
    """The router with both servers."""
    started = SGLangRouter([server.url for server in clean_pair], tmp_path / "log.txt")
    try:
        started.start()
        yield started
    finally:
        started.stop()


async def test_batches_of_listed_workers_with_a_refit_between(
    router: SGLangRouter, clean_pair: Pair, models: tuple[Path, Path]
) -> None:
    """Very different weights are loaded between two batches, which run on both workers."""
    recorder = Recorder()
    fleet = SGLangListedFleet(workers_of_router(router.url), admin_key=ADMIN_KEY, poll_s=POLL)
    prompts = long_tail(18, longest=300)
    async with scheduled([], recorder, prompts=prompts, fleet=fleet) as rollouts:
        first = await anext(rollouts)
        await rollouts.update_weights(DiskPublisher(models[1]))
        second = await anext(rollouts)
    assert [first.version, second.version] == [0, 1]
    done = [*first.rollouts, *second.rollouts]
    # What was delivered may come from one worker alone if the other one is slow.
    assert {f"http://{send.engine}" for send in recorder.sends.values()} == {
        server.url for server in clean_pair
    }
    for rollout in done:
        assert rollout.versions_exact
        assert rollout.versions.tolist() == recorder.reported(rollout)
    for server in clean_pair:
        await settled(server.url)


async def test_workers_leave_and_join_with_the_routers_list(
    router: SGLangRouter, clean_pair: Pair
) -> None:
    url = clean_pair[1].url
    fleet = SGLangListedFleet(workers_of_router(router.url), admin_key=ADMIN_KEY, poll_s=POLL)
    await fleet.open()
    async with aclosing(fleet.watch()) as changes:
        router.remove(url)
        (left,) = (await _next(changes)).left
        assert url == f"http://{left}"
        router.add(url)
        (joined,) = (await _next(changes)).joined
        assert joined.name == left
        assert len(await whole(joined, greedy(20))) == 20
    await fleet.close()


@pytest.mark.long
async def test_a_fleet_takes_in_a_server_and_lets_it_go(clean_pair: Pair) -> None:
    """Engines join and leave a fleet without a router too."""
    urls = [server.url for server in clean_pair]
    fleet = SGLangFleet(urls[:1], admin_key=ADMIN_KEY)
    await fleet.open()
    async with aclosing(fleet.watch()) as changes:
        await fleet.add(urls[1])
        (joined,) = (await _next(changes)).joined
        assert len(await whole(joined, greedy(20))) == 20
        with pytest.raises(ConfigError, match="in the fleet already"):
            await fleet.add(urls[1])
        await fleet.remove(urls[0])
        assert len((await _next(changes)).left) == 1
        with pytest.raises(ConfigError, match="last server"):
            await fleet.remove(urls[1])
        with pytest.raises(ConfigError, match="not in the fleet"):
            await fleet.remove(urls[0])
        assert list(fleet.engines) == [joined]
    await fleet.close()


async def test_an_address_without_a_router_is_refused(clean_server: CpuServer) -> None:
    """A server's own URL and one without a listener are refused."""
    with pytest.raises(EngineRejected, match="/workers"):
        await SGLangListedFleet(workers_of_router(clean_server.url)).open()
    with pytest.raises(EngineUnreachable, match="is the server up at"):
        await SGLangListedFleet(workers_of_router("http://127.0.0.1:9")).open()
    with pytest.raises(ConfigError):
        workers_of_router("router")


async def _next(changes: AsyncIterator[FleetChange]) -> FleetChange:
    return await asyncio.wait_for(anext(changes), WAIT_SECONDS)
