"""Tests a fleet of two real servers, one of them with an admin key, and refits from disk."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from aprilsched import LongTailWorkload, RolloutScheduler
from aprilsched.errors import (
    ConfigError,
    EngineError,
    EngineProtocolError,
    EngineRejected,
    EngineUnreachable,
)
from aprilsched.kernel.engines.refit import RefitFromDisk
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.kernel.engines.sglang.http_engine import SGLangFleet
from aprilsched.kernel.weights.disk import DiskPublisher
from aprilsched.testing.contract import ENDLESS, Stream, greedy, whole
from tests.sglang.conftest import ADMIN_KEY
from tests.sglang.server import CpuServer

Pair = tuple[CpuServer, CpuServer]
UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture
async def fleet(clean_pair: Pair) -> AsyncIterator[SGLangFleet]:
    """Both servers, open."""
    opened = SGLangFleet([server.url for server in clean_pair], admin_key=ADMIN_KEY)
    await opened.open()
    yield opened
    await opened.close()


async def test_a_fleet_generates_on_every_server(fleet: SGLangFleet) -> None:
    """Both servers have the same weights, so a greedy request has the same tokens on both."""
    first, second = fleet.engines
    assert first.name != second.name
    assert isinstance(first, RefitFromDisk)
    assert (await whole(first, greedy(20))).ids == (await whole(second, greedy(20))).ids


async def test_a_wrong_or_missing_admin_key_shows_when_opening(clean_pair: Pair) -> None:
    """A wrong key is detected when the fleet opens and not at the first pause. No message contains
    a key."""
    for key in (None, "a-wrong-key"):
        engine = SGLangEngine(clean_pair[1].url, admin_key=key)
        with pytest.raises(EngineRejected, match="as admin_key") as caught:
            await engine.open()
        assert caught.value.status == 401
        assert "wrong-key" not in f"{caught.value} {engine!r}"
    fleet = SGLangFleet([clean_pair[1].url], admin_key=ADMIN_KEY)
    assert ADMIN_KEY not in repr(fleet) + repr(fleet.engines) + str(vars(fleet.engines[0]))


async def test_a_fleet_opens_all_or_none(clean_pair: Pair) -> None:
    """One server is not there, so the connections to the other one are closed again."""
    fleet = SGLangFleet([clean_pair[0].url, UNREACHABLE])
    with pytest.raises(EngineUnreachable, match="is the server up at"):
        await fleet.open()
    with pytest.raises(EngineError, match="is not open"):
        await fleet.engines[0].version()


async def test_servers_of_different_versions_are_refused(
    clean_pair: Pair, models: tuple[Path, Path]
) -> None:
    """The error names both servers and the versions that they report."""
    first = SGLangEngine(clean_pair[0].url)
    await first.open()
    await first.pause("retract")
    await first.update_from_disk(models[0], 3)
    await first.resume()
    fleet = SGLangFleet([server.url for server in clean_pair], admin_key=ADMIN_KEY)
    with pytest.raises(ConfigError, match="different policy versions") as caught:
        async with RolloutScheduler(fleet, LongTailWorkload()):
            pass
    for server in clean_pair:
        assert f"127.0.0.1:{server.port}" in str(caught.value)
    await first.close()


async def test_a_server_of_another_model_is_refused(clean_pair: Pair) -> None:
    """The path that the user expects is compared with the one that is served."""
    fleet = SGLangFleet([clean_pair[0].url], model_path="/another/model")
    with pytest.raises(ConfigError, match="/another/model"):
        await fleet.open()


@pytest.mark.parametrize("body", ["<html>Welcome</html>", '{"status": "ok"}', None])
async def test_what_is_no_sglang_is_refused_in_one_sentence(body: str | None) -> None:
    """Another web server answers on that port."""

    async def answer(request: web.Request) -> web.Response:
        if body is None:
            raise web.HTTPFound("/elsewhere")
        return web.Response(text=body)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fleet = SGLangFleet([f"http://127.0.0.1:{runner.addresses[0][1]}"])
    with pytest.raises(EngineProtocolError, match="does not answer /model_info like SGLang"):
        await fleet.open()
    await runner.cleanup()


@pytest.mark.shows("weights from disk", engine="SGLang")
async def test_the_disk_publisher_refits_every_engine_and_keeps_few_versions(
    fleet: SGLangFleet, models: tuple[Path, Path], tmp_path: Path
) -> None:
    """The trainer writes a version, the paused engines load it, and old versions are removed."""

    def save(path: Path) -> None:
        shutil.copytree(models[1], path, dirs_exist_ok=True)

    publisher = DiskPublisher(tmp_path, save, keep=2)
    streams = [await Stream(engine, greedy(ENDLESS)).start().reach(1) for engine in fleet.engines]
    for version in (1, 2, 3):
        await publisher.prepare(version)
        for engine in fleet.engines:
            await engine.pause("retract")
            await engine.flush()
        outcome = await publisher.publish(version, fleet.engines)
        assert outcome == {engine.name: None for engine in fleet.engines}
        for engine in fleet.engines:
            await engine.resume()
            assert await engine.version() == version
    assert _names(tmp_path) == ["version-00000002", "version-00000003"]
    for stream in streams:
        await stream.cut(len(stream) + 100)
        assert stream.last.spans is not None
        assert stream.last.spans[-1].version == 3


async def test_the_disk_publisher_reports_each_engine(
    fleet: SGLangFleet, models: tuple[Path, Path]
) -> None:
    """A checkpoint that exists already is published to two engines, one of which is gone."""
    gone = SGLangEngine(UNREACHABLE)
    publisher = DiskPublisher(models[1])
    await publisher.prepare(1)
    await fleet.engines[0].pause("retract")
    outcome = await publisher.publish(1, [fleet.engines[0], gone])
    await fleet.engines[0].resume()
    assert outcome[fleet.engines[0].name] is None
    assert isinstance(outcome[gone.name], EngineError)


def _names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())
