"""Tests that a server that stops leaves nothing open, even if clients connect or do not read."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import logging
import os
import resource
import socket
import sys
import zlib
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from aprilsched.agents.serving import listener
from aprilsched.agents.serving.bodies import BODIES, Bodies, body_of, decode, expect_later
from aprilsched.agents.serving.keys import key_middleware
from aprilsched.agents.serving.listener import Listener
from aprilsched.agents.serving.refusals import Malformed, answer_refusals, as_json
from aprilsched.errors import ConfigError
from aprilsched.kernel.engines.http import HttpLimits
from aprilsched.kernel.engines.transport import Transport
from aprilsched.testing import SimServer
from aprilsched.testing.contract import until
from aprilsched.testing.threaded import ThreadedServer
from tests.support.table import each_row


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


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def connected(url: str) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(address(url))
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
    """Open `connections` connections while the loop of the server is idle."""
    with ExitStack() as clients:
        for _ in range(connections):
            client = socket.create_connection(address(url), timeout=20)
            clients.enter_context(client).setblocking(False)
        yield


async def length(request: web.Request) -> web.Response:
    return as_json(len(await body_of(request, str)))


async def fails(_: web.Request) -> web.Response:
    raise ValueError


@asynccontextmanager
async def reading(key: str | None = None) -> AsyncGenerator[str]:
    """A server that reads bodies of up to 1,000 bytes, and of 1,500 together."""
    keys = key_middleware(api_key=key, admin_key=None, control=())
    app = web.Application(middlewares=[answer_refusals, keys])
    app[BODIES] = Bodies(largest=1000, together=1500)
    app.router.add_route("POST", "/", length, expect_handler=expect_later)
    app.router.add_route("POST", "/fails/{name}", fails)
    listener = Listener("127.0.0.1", 0)
    await listener.open(app)
    try:
        yield listener.url
    finally:
        await listener.close()


async def test_a_burst_of_clients_is_accepted_while_the_loop_is_busy():
    async with reading() as url:
        with at_once(1000, url):
            pass


async def post(
    session: aiohttp.ClientSession, url: str, data: object, headers: dict[str, str] | None = None
) -> int:
    async with session.post(url, data=data, headers=headers) as answer:
        return answer.status


TEXT = json.dumps("x" * 900).encode()


@each_row(
    ("body", "coding", "status"),
    [
        (TEXT, "", 200),
        (json.dumps("x" * 1000).encode(), "", 413),
        (gzip.compress(TEXT), "gzip", 200),
        (zlib.compress(TEXT), "deflate", 200),
        (gzip.compress(bytes(2**24)), "gzip", 413),  # a bomb
        (gzip.compress(b'"xyz"')[:-9], "gzip", 400),
        (b'"xyz"', "gzip", 400),
        (b'"xyz"', "br", 400),
        (b"", "gzip", 400),
        (b"", "", 400),
    ],
)
async def test_a_body_is_bounded_also_where_it_is_compressed(body: bytes, coding: str, status: int):
    async with reading() as url, aiohttp.ClientSession() as session:
        headers = {"Content-Encoding": coding} if coding else {}
        assert await post(session, url, body, headers) == status


async def test_all_bodies_together_are_bounded_while_they_are_sent():
    go_on, started = asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncGenerator[bytes]:
        yield b'"' + b"x" * 900
        started.set()
        await go_on.wait()
        yield b'"'

    async with reading() as url, aiohttp.ClientSession() as session:
        first = asyncio.create_task(post(session, url, slowly()))
        await started.wait()
        while (second := await post(session, url, TEXT)) == 200:
            pass  # The first part has not arrived yet.
        assert second == 503
        go_on.set()
        assert (await first, await post(session, url, TEXT)) == (200, 200)


@each_row(("key", "status"), [("other", b"401"), ("secret", b"200")])
async def test_a_body_is_not_asked_for_before_the_key_is_checked(key: str, status: bytes):
    head = "POST / HTTP/1.1\r\nHost: here\r\nExpect: 100-continue\r\nContent-Length: 5\r\n"
    async with reading("secret") as url:
        reader, writer = await asyncio.open_connection(*address(url))
        writer.write(f"{head}Authorization: Bearer {key}\r\n\r\n".encode())
        line = await reader.readline()
        if b"100" in line:
            await reader.readline()
            writer.write(b'"xyz"')
            line = await reader.readline()
        writer.close()
    assert status in line


@each_row("piece", [b"[],", b"{},", b'"",', b"1,1,"])
def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(piece: bytes):
    body = b"[" + piece * (2**21 + 1) + b"0]"
    with pytest.raises(Malformed, match="quotes and opening brackets"):
        decode(body, list[object])
    assert len(decode(b"[" + b"1," * 2**21 + b"0]", list[int])) == 2**21 + 1


# --- keys ----------------------------------------------------------------------------------------

KEY = "THE-SECRET-KEY"
HEAD = f"POST / HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {KEY}"


@each_row(
    "sent",
    [
        *[f"{HEAD}{end}\r\n\r\n" for end in ("\0", "\x01", "\r", "\n", "\n folded", "\x7f", "é")],
        f"{HEAD}{'a' * 10_000}\r\n\r\n",
        f"{HEAD.replace(':', ' :')}\r\n\r\n",
        f"{HEAD}\r\nContent-Length: {KEY}\r\n\r\n",
        f"{HEAD}\r\nTransfer-Encoding: chunked\r\n\r\n{KEY}\r\n",
        f"{HEAD}\r\nContent-Length: 2\r\n\r\n{{}}{KEY} / HTTP/1.1\r\n\r\n",
        f"POST /x.{KEY} y HTTP/1.1\r\nHost: here\r\n\r\n",
        f"POST /x.{KEY}\0 HTTP/1.1\r\nHost: here\r\n\r\n",
        f"POST /x.{KEY}/{'a' * 20_000} HTTP/1.1\r\nHost: here\r\n\r\n",
        f"POST /x.{KEY} HTTP/9.9\r\nHost: here\r\n\r\n",
        f"POST http://here:99999/x.{KEY} HTTP/1.1\r\nHost: here\r\n\r\n",
        f"{KEY} / HTTP/1.1\r\nHost: here\r\n\r\n",
        f"POST /fails/x.{KEY} HTTP/1.1\r\nHost: here\r\n\r\n",
    ],
)
async def test_no_log_line_and_no_answer_repeats_what_a_request_has(
    sent: str, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.DEBUG):
        async with reading() as url:
            reader, writer = await asyncio.open_connection(*address(url))
            writer.write(sent.encode())
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length:")[2].split()[0])
            answer = head + await reader.readexactly(size)
            writer.close()
    assert answer.startswith(b"HTTP/1.")
    assert KEY.encode() not in answer
    assert KEY not in caplog.text


@each_row("key", ["", "abc\n", "a b", "é"])
@each_row("which", ["api_key", "admin_key"])
def test_a_key_that_no_client_can_send_is_refused(which: str, key: str):
    keys = {"api_key": None, "admin_key": None, which: key}
    with pytest.raises(ConfigError, match=f"`{which}` must be printable ASCII") as refused:
        key_middleware(api_key=keys["api_key"], admin_key=keys["admin_key"], control=())
    assert not key or repr(key) not in str(refused.value)


# --- connections ---------------------------------------------------------------------------------


@contextmanager
def descriptors(more: int) -> Generator[None]:
    """Let the process open `more` file descriptors at most."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def logged(caplog: pytest.LogCaptureFixture, words: str) -> None:
    await until(lambda: words in caplog.text)


async def test_idle_connections_give_way_to_new_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def forty(_: int) -> tuple[int, int]:
        return 40, 40

    monkeypatch.setattr(listener.resource, "getrlimit", forty)
    async with reading() as url, aiohttp.ClientSession() as session:
        idle = [await asyncio.open_connection(*address(url)) for _ in range(12)]
        for _, writer in idle[::2]:
            writer.write(b"POST / HT")
        found = await asyncio.gather(*(post(session, url, b'"x"') for _ in range(12)))
        for _, writer in idle:
            writer.close()
    assert found == [200] * 12
    assert caplog.text.count("raise `ulimit -n`") == 1


async def test_a_server_without_file_descriptors_warns_once_and_serves_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(listener, "_RETRY_S", 0.01)
    async with reading() as url:
        with connected(url) as client:
            client.setblocking(False)
            with descriptors(0):
                await asyncio.sleep(0)
                await logged(caplog, "Too many open files")
                for _ in range(20):
                    await asyncio.sleep(0.01)
            client.sendall(b'POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 3\r\n\r\n"x"')
            answer = await asyncio.get_running_loop().sock_recv(client, 100)
    assert answer.startswith(b"HTTP/1.1 200")
    assert len(caplog.records) == 1


async def test_calls_wait_for_file_descriptors_and_leave_the_last_to_control_calls(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("aprilsched.kernel.engines.sockets._DESCRIPTORS_RETRY_S", 0.01)
    monkeypatch.setattr("aprilsched.kernel.engines.sockets.Connector._warned", float("-inf"))
    async with reading() as url:
        server = Transport("it", URL(url), admin_key=None, api_key=None, limits=HttpLimits())
        await server.open()

        async def generate() -> int:
            async with server.stream("", {}) as answer:
                return answer.status

        with descriptors(0):
            control = asyncio.create_task(server.call("POST", "", "x", timeout=60))
            await logged(caplog, "requests wait for free file descriptors")
        assert (await control).body == b"1"
        with descriptors(12):
            generation = asyncio.create_task(generate())
            assert (await server.call("POST", "", "x", timeout=60)).body == b"1"
            assert not generation.done()
        assert await generation == 400
        await server.close()
