"""Tests what a router may list, and what is refused before anything is sent to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from aprilsched.engines.http import HttpLimits
from aprilsched.engines.sglang.router import Roster, SGLangRouterFleet
from aprilsched.errors import ConfigError, EngineError, EngineProtocolError, EngineUnreachable
from aprilsched.testing.contract import until


def worker(url: Any = "http://10.0.0.1:30000", **fields: Any) -> dict[str, Any]:
    return {"url": url, "is_healthy": True, "worker_type": "regular", **fields}


@asynccontextmanager
async def listing(answer: Any, asked: list[float] | None = None) -> AsyncGenerator[str]:
    """A router that lists `answer`, and refuses every generation, as a router that pins does."""

    async def workers(request: web.Request) -> web.Response:
        if asked is not None:
            asked.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.05)
        if isinstance(answer, str):
            return web.Response(text=answer)
        return web.json_response(answer)

    async def generate(request: web.Request) -> web.Response:
        return web.json_response({"error": {"code": "no_available_workers"}}, status=503)

    app = web.Application()
    app.router.add_get("/workers", workers)
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("<html>", "does not answer /workers"),
        ({"workers": None}, "does not answer /workers"),
        ({"workers": [worker(7)]}, "does not answer /workers"),
        ({"workers": [{"url": "http://10.0.0.1:30000"}]}, "does not answer /workers"),
        ({"workers": [worker("grpc://10.0.0.1:30000")]}, "not a plain http"),
        ({"workers": [worker("file:///etc/passwd")]}, "not a plain http"),
        ({"workers": [worker("http://user:secret@10.0.0.1:1")]}, "not a plain http"),
        ({"workers": [worker("http://10.0.0.1:30000@1")]}, "without --dp-aware"),
        ({"workers": [worker(worker_type="prefill")]}, "disaggregation"),
        ({"workers": [worker()] * 5000}, "at most 4096"),
        ({"workers": [worker("http://10.0.0.1:1?" + "x" * 2**20)] * 3}, "max_answer_bytes"),
    ],
)
async def test_a_list_that_makes_no_sense_is_refused(answer: Any, message: str) -> None:
    limits = HttpLimits(max_answer_bytes=2**20)
    async with listing(answer) as url:
        with pytest.raises(EngineProtocolError, match=message) as caught:
            await SGLangRouterFleet(url, limits=limits).open()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("workers", [[], [worker(is_healthy=False)]])
async def test_a_router_without_a_healthy_worker_is_no_fleet_yet(workers: list[Any]) -> None:
    async with listing({"workers": workers}) as url:
        with pytest.raises(EngineUnreachable, match="wait until it has found them"):
            await SGLangRouterFleet(url).open()


async def test_a_position_counts_the_healthy_workers_only() -> None:
    urls = [f"http://10.0.0.{i}:30000" for i in range(4)]
    workers = [worker(url, is_healthy=i != 1) for i, url in enumerate(urls)]
    async with listing({"workers": workers}) as url, opened(url) as roster:
        assert [await roster.position(each) for each in urls] == [0, None, 1, 2]
        assert await roster.position("http://10.0.0.9:30000") is None


async def test_looks_at_the_list_are_shared_and_never_older_than_the_question() -> None:
    """Several lookups at the same time are one call. A lookup that comes during the call waits for
    the next call."""
    asked: list[float] = []
    async with listing({"workers": [worker()]}, asked) as url, opened(url) as roster:
        await asyncio.gather(*(roster.workers() for _ in range(50)))
        assert len(asked) == 1
        first = asyncio.create_task(roster.workers())
        await until(lambda: len(asked) == 2)
        await asyncio.gather(*(roster.workers() for _ in range(50)))
        await first
        assert len(asked) == 3


async def test_closing_ends_a_look_with_an_error() -> None:
    asked: list[float] = []
    async with listing({"workers": [worker()]}, asked) as url, opened(url) as roster:
        look = asyncio.create_task(roster.workers())
        await until(lambda: bool(asked))
        await roster.close()
        with pytest.raises(EngineError, match="was closed"):
            await look


def test_settings_are_checked_at_once() -> None:
    with pytest.raises(ConfigError, match="poll_s"):
        SGLangRouterFleet("http://10.0.0.1:30000", poll_s=0)
    with pytest.raises(ConfigError, match="not a server's URL"):
        SGLangRouterFleet("grpc://10.0.0.1:30000")
    assert "secret" not in repr(SGLangRouterFleet("http://10.0.0.1:1", admin_key="secret"))


@asynccontextmanager
async def opened(url: str) -> AsyncGenerator[Roster]:
    roster = Roster(url, api_key=None, limits=HttpLimits())
    await roster.open()
    try:
        yield roster
    finally:
        await roster.close()
