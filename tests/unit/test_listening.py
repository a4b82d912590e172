"""A server that stops leaves nothing open, whoever connects or does not read at that moment."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import socket
import sys
import zlib
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import aiohttp
import pytest
from aiohttp import web

from aprilsched.serving import (
    BODIES,
    Bodies,
    Listener,
    answer_refusals,
    as_json,
    body_of,
    expect_later,
    key_middleware,
)
from aprilsched.testing import SimServer
from aprilsched.testing.server import ThreadedServer


@contextmanager
def nothing_left() -> Generator[None]:
    """Fails if something that was opened in the block is left for the garbage collector."""
    with pytest.MonkeyPatch.context() as patch:
        left: list[object] = []

        def note(unraisable: sys.UnraisableHookArgs) -> None:
            left.append(unraisable.exc_value)

        patch.setattr("sys.unraisablehook", note)
        yield
        gc.collect()
    assert left == []


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect((host, int(port)))
    return client


def test_a_client_that_does_not_read_leaves_nothing_open():
    body = {"input_ids": [1, 2, 3], "stream": True, "return_logprob": True}
    body |= {"sampling_params": {"max_new_tokens": 100_000, "ignore_eos": True}}
    content = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: here\r\nContent-Length: {len(content)}\r\n\r\n"
    with (
        nothing_left(),
        ExitStack() as clients,
        ThreadedServer(SimServer(time_scale=0.0001)) as server,
    ):
        client = clients.enter_context(connected(server.url))
        client.sendall(head.encode() + content)
        # What the client takes is less than what two buffers hold, so the server is kept waiting
        # with the rest.
        assert client.recv(1024).startswith(b"HTTP/1.1 200")


def test_clients_that_connect_while_the_server_stops_leave_nothing_open():
    with nothing_left():
        for _ in range(30):
            with ExitStack() as clients, ThreadedServer() as server:
                for _ in range(20):
                    clients.enter_context(connected(server.url))


# --- bodies --------------------------------------------------------------------------------------


@contextmanager
def at_once(connections: int, url: str) -> Generator[None]:
    """So many open connections, made while the loop of the server does nothing."""
    with ExitStack() as clients:
        for _ in range(connections):
            client = clients.enter_context(connected_within(url, seconds=20))
            client.setblocking(False)
        yield


def connected_within(url: str, *, seconds: float) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=seconds)


async def length(request: web.Request) -> web.Response:
    return as_json(len(await body_of(request, str)))


@asynccontextmanager
async def reading(key: str | None = None) -> AsyncGenerator[str]:
    """A server that reads bodies of up to 1,000 bytes, and of 1,500 together."""
    keys = key_middleware(api_key=key, admin_key=None, control=())
    app = web.Application(middlewares=[answer_refusals, keys])
    app[BODIES] = Bodies(largest=1000, together=1500)
    app.router.add_route("POST", "/", length, expect_handler=expect_later)
    listener = Listener("127.0.0.1", 0)
    await listener.open(app)
    try:
        yield listener.url
    finally:
        await listener.close()


def test_a_burst_of_clients_is_accepted_while_the_loop_is_busy():
    async def burst() -> None:
        async with reading() as url:
            with at_once(1000, url):
                pass

    asyncio.run(burst())


@pytest.mark.parametrize(
    ("body", "coding", "status"),
    [
        pytest.param(json.dumps("x" * 900).encode(), "", 200, id="plain"),
        pytest.param(json.dumps("x" * 1000).encode(), "", 413, id="plain and too large"),
        pytest.param(gzip.compress(json.dumps("x" * 900).encode()), "gzip", 200, id="gzip"),
        pytest.param(zlib.compress(json.dumps("x" * 900).encode()), "deflate", 200, id="deflate"),
        pytest.param(gzip.compress(bytes(2**24)), "gzip", 413, id="bomb"),
        pytest.param(gzip.compress(b'"xyz"')[:-9], "gzip", 400, id="cut"),
        pytest.param(b'"xyz"', "gzip", 400, id="no gzip"),
        pytest.param(b'"xyz"', "br", 400, id="unknown coding"),
        pytest.param(b"", "gzip", 400, id="empty gzip"),
        pytest.param(b"", "", 400, id="empty"),
    ],
)
def test_a_body_is_bounded_also_where_it_is_compressed(body: bytes, coding: str, status: int):
    async def sent() -> int:
        async with reading() as url, aiohttp.ClientSession() as session:
            headers = {"Content-Encoding": coding} if coding else {}
            async with session.post(url, data=body, headers=headers) as answer:
                return answer.status

    assert asyncio.run(sent()) == status


def test_all_bodies_together_are_bounded_while_they_are_sent():
    async def sent() -> tuple[int, int, int]:
        go_on, begun = asyncio.Event(), asyncio.Event()

        async def slowly() -> AsyncGenerator[bytes]:
            yield b'"' + b"x" * 900
            begun.set()
            await go_on.wait()
            yield b'"'

        async with reading() as url, aiohttp.ClientSession() as session:

            async def post(data: object) -> int:
                async with session.post(url, data=data) as answer:
                    return answer.status

            first = asyncio.create_task(post(slowly()))
            await begun.wait()
            much = json.dumps("x" * 900).encode()
            while (second := await post(much)) == 200:
                pass  # The first part has not arrived yet.
            go_on.set()
            return await first, second, await post(much)

    assert asyncio.run(asyncio.wait_for(sent(), 60)) == (200, 503, 200)


def test_a_body_is_not_asked_for_before_the_key_is_checked():
    head = "POST / HTTP/1.1\r\nHost: here\r\nExpect: 100-continue\r\nContent-Length: 5\r\n"

    async def asked(key: str) -> str:
        async with reading("secret") as url:
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"{head}Authorization: Bearer {key}\r\n\r\n".encode())
            line = await reader.readline()
            if b"100" in line:
                await reader.readline()
                writer.write(b'"xyz"')
                line = await reader.readline()
            writer.close()
            return line.decode()

    assert "401" in asyncio.run(asked("other"))
    assert "200" in asyncio.run(asked("secret"))
