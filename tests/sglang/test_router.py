"""Tests the real router with two real servers: pins, pauses, refits, joining and leaving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from aprilsched import DiskPublisher, RolloutScheduler, SchedulerConfig, SGLangFleet
from aprilsched.engines.base import FleetChange, WatchesMembership
from aprilsched.engines.sglang import SGLangEngine
from aprilsched.engines.sglang.router import SGLangRouterFleet
from aprilsched.errors import (
    ConfigError,
    EngineProtocolError,
    EngineRejected,
    EngineUnreachable,
)
from aprilsched.testing.contract import (
    ALL_CHECKS,
    ENDLESS,
    WAIT_SECONDS,
    Check,
    Stream,
    Subject,
    greedy,
    until,
    whole,
)
from aprilsched.types import VersionSpan
from tests.sglang.conftest import ADMIN_KEY
from tests.sglang.helpers import running, settled
from tests.sglang.recorded import Recorder, long_tail
from tests.sglang.router import SGLangRouter
from tests.sglang.server import CpuServer

Pair = tuple[CpuServer, CpuServer]
POLL = 0.1


@pytest.fixture(scope="module")
def router_process(
    sglang_pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangRouter]:
    """The router before both servers, one of which has an admin key."""
    log = tmp_path_factory.mktemp("router") / "log.txt"
    yield from _serve(SGLangRouter([server.url for server in sglang_pair], log))


@pytest.fixture
def router(router_process: SGLangRouter, clean_pair: Pair) -> Iterator[SGLangRouter]:
    """The router with both servers, before and after the test."""
    urls = [server.url for server in clean_pair]
    yield router_process
    for url in set(urls) - {worker["url"] for worker in router_process.workers()}:
        router_process.add(url)
    router_process.wait_listed(urls)


@pytest.fixture
async def fleet(router: SGLangRouter) -> AsyncIterator[SGLangRouterFleet]:
    """Both servers behind the router, open."""
    opened = SGLangRouterFleet(router.url, admin_key=ADMIN_KEY, poll_s=POLL)
    await opened.open()
    yield opened
    await opened.close()


@pytest.mark.long
@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__)
async def test_a_routed_engine_keeps_the_contract(
    fleet: SGLangRouterFleet, clean_pair: Pair, models: tuple[Path, Path], check: Check
) -> None:
    """An engine behind the router passes the checks that every engine must pass."""
    url = clean_pair[0].url
    await check(Subject(engine=_by_url(fleet)[url], weights=models, busy=lambda: running(url)))


async def test_each_worker_is_an_engine_and_gets_its_own_requests(
    fleet: SGLangRouterFleet, clean_pair: Pair
) -> None:
    """The server that was addressed works on the request, and the other one does not."""
    engines = _by_url(fleet)
    assert engines.keys() == {server.url for server in clean_pair}
    for server, other in (clean_pair, clean_pair[::-1]):
        streams = [Stream(engines[server.url], greedy(ENDLESS)).start() for _ in range(3)]
        for stream in streams:
            await stream.reach(17)

        async def busy(url: str = server.url) -> bool:
            return await running(url) == 3

        await until(busy)
        assert await running(other.url) == 0
        for stream in streams:
            await stream.cut()
        await settled(server.url)


@pytest.mark.long
async def test_a_routed_response_equals_the_direct_one(
    fleet: SGLangRouterFleet, clean_pair: Pair
) -> None:
    """They have the same tokens, logprobs and versions, and the routed one arrives in several
    pieces."""
    direct = SGLangFleet([server.url for server in clean_pair], admin_key=ADMIN_KEY)
    await direct.open()
    reference = await whole(direct.engines[0], greedy(100))
    for engine in fleet.engines:
        routed = await whole(engine, greedy(100))
        assert routed.ids == reference.ids
        assert routed.logprobs.tolist() == pytest.approx(reference.logprobs.tolist(), abs=1e-4)
        assert routed.last.spans == (VersionSpan(version=0, start=0, end=100),)
        # Eight, of which a busy server sends several in one event.
        assert len(routed.chunks) > 1
    await direct.close()


async def test_an_abort_ends_a_routed_request(fleet: SGLangRouterFleet) -> None:
    """An abort ends a routed request, and so does leaving its stream."""
    for engine in fleet.engines:
        stream = await Stream(engine, greedy(ENDLESS)).start().reach(17)
        await engine.abort(stream.request.request_id)
        await stream.end()
        assert stream.last.finish == "abort"
        left = await Stream(engine, greedy(ENDLESS)).start().reach(17)
        assert left.task is not None
        left.task.cancel()
        await asyncio.wait([left.task])
        await settled(_url(engine))


@pytest.mark.long
async def test_routed_streams_outlive_a_pause_and_a_refit(
    fleet: SGLangRouterFleet, models: tuple[Path, Path]
) -> None:
    """Both workers are paused, get the same weights as version 1, and continue."""
    reference = await whole(fleet.engines[0], greedy(900))
    streams = [await Stream(e, greedy(ENDLESS)).start().reach(17) for e in fleet.engines]
    for engine in fleet.engines:
        await engine.pause("retract")
        await engine.flush()
    publisher = DiskPublisher(models[0])
    await publisher.prepare(1)
    outcome = await publisher.publish(1, fleet.engines)
    assert outcome == {engine.name: None for engine in fleet.engines}
    for engine in fleet.engines:
        await engine.resume()
    for stream in streams:
        await stream.cut(max(900, len(stream) + 100))
        assert stream.ids[:900] == reference.ids
        assert stream.last.spans is not None
        assert [span.version for span in stream.last.spans] == [0, 1]


async def test_what_the_router_would_leave_out_is_refused(fleet: SGLangRouterFleet) -> None:
    """The router does not pass a logit bias on, so the response would be sampled from another
    policy."""
    request = greedy(4)
    biased = replace(request.sampling, extra={"logit_bias": {"5": 1.0}})
    with pytest.raises(EngineRejected, match="does not pass on") as caught:
        await whole(fleet.engines[0], msgspec.structs.replace(request, sampling=biased))
    assert caught.value.status == 400
    passed = replace(request.sampling, extra={"repetition_penalty": 1.3})
    assert (
        len(await whole(fleet.engines[0], msgspec.structs.replace(request, sampling=passed))) == 4
    )


@pytest.mark.long
async def test_workers_that_leave_and_join_are_seen(
    fleet: SGLangRouterFleet, router: SGLangRouter, clean_pair: Pair
) -> None:
    """A worker that left stays open until the scheduler has handled this, and comes back as a new
    engine."""
    assert isinstance(fleet, WatchesMembership)
    url = clean_pair[1].url
    old = _by_url(fleet)[url]
    async with aclosing(fleet.watch()) as changes:
        router.remove(url)
        change = await _next(changes)
        assert (change.left, change.joined) == ((old.name,), ())
        assert [engine.name for engine in fleet.engines] == [_by_url(fleet)[clean_pair[0].url].name]
        assert await old.version() == 0
        with pytest.raises(EngineUnreachable, match="no such healthy worker"):
            await whole(old, greedy(4))
        assert len(await whole(fleet.engines[0], greedy(20))) == 20
        router.add(url)
        change = await _next(changes)
        (joined,) = change.joined
        assert (joined.name, change.left) == (old.name, ())
        assert joined is not old
        assert len(await whole(joined, greedy(20))) == 20


@pytest.mark.long
async def test_a_request_that_may_have_gone_astray_fails_and_decodes_nowhere(
    fleet: SGLangRouterFleet,
    router: SGLangRouter,
    clean_pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker leaves the router after its list was read and before the request is sent."""
    first, second = (worker["url"] for worker in router.workers())
    engine = _by_url(fleet)[first]
    roster = fleet._roster
    look = roster.position

    async def look_and_lose_it(url: str) -> int | None:
        found = await look(url)
        router.remove(first)
        router.wait_listed([second])
        monkeypatch.undo()
        return found

    monkeypatch.setattr(roster, "position", look_and_lose_it)
    with pytest.raises(Exception, match="changed while request"):
        await whole(engine, greedy(ENDLESS))
    for server in clean_pair:
        await settled(server.url)


@pytest.mark.long
async def test_a_fleet_takes_in_a_server_and_lets_it_go(clean_pair: Pair) -> None:
    """Engines join and leave a fleet without a router too."""
    urls = [server.url for server in clean_pair]
    fleet = SGLangFleet(urls[:1], admin_key=ADMIN_KEY)
    assert isinstance(fleet, WatchesMembership)
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


async def test_batches_through_the_router_with_a_refit_between(
    fleet: SGLangRouterFleet, models: tuple[Path, Path], clean_pair: Pair
) -> None:
    """Two batches run on both workers, and very different weights are loaded between them."""
    await fleet.close()
    recorder = Recorder()
    scheduler = RolloutScheduler(
        fleet,
        long_tail(18, longest=300),
        config=SchedulerConfig(batch_groups=4, group_size=4, over_provision=2.0),
        listeners=[recorder],
    )
    async with scheduler as rollouts:
        first = await anext(rollouts)
        await rollouts.update_weights(DiskPublisher(models[1]))
        second = await anext(rollouts)
    assert [first.version, second.version] == [0, 1]
    done = [*first.rollouts, *second.rollouts]
    assert len({rollout.rollout_id for rollout in done}) == 32
    assert {segment.engine for r in done for segment in r.segments} == {
        engine.name for engine in fleet.engines
    }
    for rollout in done:
        assert rollout.versions_exact
        assert rollout.versions.tolist() == recorder.reported(rollout)
    for server in clean_pair:
        await settled(server.url)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["round_robin", "cache_aware", "manual"])
async def test_a_router_that_pins_nothing_is_refused(
    clean_pair: Pair, tmp_path: Path, policy: str
) -> None:
    """The policy of such a router would send a request to a worker of another version."""
    log = tmp_path / "log.txt"
    for router in _serve(SGLangRouter([clean_pair[0].url], log, policy=policy)):
        with pytest.raises(ConfigError, match="policy consistent_hashing"):
            await SGLangRouterFleet(router.url, admin_key=ADMIN_KEY).open()


async def test_what_is_no_router_is_refused(clean_server: CpuServer) -> None:
    """A server's own URL and one without a listener are refused."""
    with pytest.raises(EngineProtocolError, match="GET /workers"):
        await SGLangRouterFleet(clean_server.url).open()
    with pytest.raises(EngineUnreachable, match="is the server up at"):
        await SGLangRouterFleet("http://127.0.0.1:9").open()


def _serve(router: SGLangRouter) -> Iterator[SGLangRouter]:
    try:
        router.start()
        yield router
    finally:
        router.stop()


def _url(engine: SGLangEngine) -> str:
    return f"http://{engine.name}"


def _by_url(fleet: SGLangRouterFleet) -> dict[str, SGLangEngine]:
    return {_url(engine): engine for engine in fleet.engines}


async def _next(changes: AsyncIterator[FleetChange]) -> FleetChange:
    return await asyncio.wait_for(anext(changes), WAIT_SECONDS)
