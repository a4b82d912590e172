"""Tests servers that send too much or wrong data: they are cut off early, with one sentence."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from aprilsched.errors import EngineError, EngineProtocolError, EngineRejected
from aprilsched.kernel.engines.base import Chunk
from aprilsched.kernel.engines.http import HttpLimits
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.testing.contract import greedy, until
from tests.support.hostile import CHUNKED, Answer, Hostile, chunked, event, hostile

MIB = 2**20
SENT = 400 * MIB
TAKEN = 64 * MIB
"""Bound on the bytes taken: far above the limits here and what two sockets buffer, and far below
what is sent."""
LIMITS = HttpLimits(max_answer_bytes=4 * MIB, control_timeout=20.0)
TOKENS = 8
KEY = "a-key-that-must-stay-secret"

OK = b"HTTP/1.1 200 OK\r\n"
LAST = chunked(event(0, TOKENS, finish="length"))


def endless(head: bytes, piece: bytes) -> Answer:
    """`head`, and then `piece` again and again."""

    def pieces() -> Iterator[bytes]:
        yield head
        block = piece * max(1, 65536 // len(piece))
        for _ in range(SENT // len(block)):
            yield block

    return pieces


def whole(content: bytes) -> Answer:
    """An answer of just these bytes."""
    return lambda: [content]


def body(content: bytes, head: bytes = b"") -> bytes:
    """An answer of 200 with its length."""
    return OK + head + b"Content-Length: %d\r\n\r\n" % len(content) + content


@asynccontextmanager
async def opened(
    limits: HttpLimits = LIMITS, key: str | None = None
) -> AsyncGenerator[tuple[Hostile, SGLangEngine]]:
    """An engine on a server that still behaves."""
    async with hostile() as server:
        engine = SGLangEngine(server.url, limits=limits, admin_key=key, api_key=key)
        await engine.open()
        try:
            yield server, engine
        finally:
            await engine.close()


async def generated(engine: SGLangEngine) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(greedy(TOKENS))]


UNPAID = "beyond what its tokens account for"
PASSED_OVER = "sends endless data outside of the body"
NO_HTTP = "does not speak HTTP"

STREAMS = {
    "a line": (endless(CHUNKED, chunked(b"x" * 65536)), UNPAID),
    "comments": (endless(CHUNKED, chunked(b": still here\n\n")), UNPAID),
    "blank lines": (endless(CHUNKED, chunked(b"\n" * 65536)), UNPAID),
    "empty events": (endless(CHUNKED, chunked(event(0, 0))), UNPAID),
    "the same event": (endless(CHUNKED, chunked(event(0, 1))), UNPAID),
    "done": (endless(CHUNKED, chunked(b"data: [DONE]\n\n")), UNPAID),
    "tokens": (whole(CHUNKED + chunked(*(event(n, n + 1) for n in range(99)))), "8 were asked"),
    "headers": (endless(OK, b"X-Header: value\r\n"), NO_HTTP),
    "a header": (endless(OK + b"X-Header: ", b"x"), NO_HTTP),
    "a status": (endless(b"HTTP/1.1 200 ", b"x"), NO_HTTP),
    "no HTTP": (endless(b"", b"\x00\xff"), NO_HTTP),
    "a negative length": (whole(OK + b"Content-Length: -5\r\n\r\nabc"), NO_HTTP),
    "interim answers": (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), PASSED_OVER),
    "a chunk's extension": (endless(CHUNKED + b"5;", b"x"), PASSED_OVER),
    "a chunk's length": (endless(CHUNKED, b"0"), PASSED_OVER),
    "an answer behind it": (endless(CHUNKED + LAST + b"0\r\n\r\n", b"x" * 65536), NO_HTTP),
    "trailers": (endless(CHUNKED + b"0\r\n", b"X-Trailer: value\r\n"), NO_HTTP),
}


async def test_an_endless_answer_is_cut_off() -> None:
    for way, (answer, why) in STREAMS.items():
        async with opened() as (server, engine):
            server.answers["/generate"] = answer
            with pytest.raises(EngineProtocolError, match=why) as caught:
                await generated(engine)
            assert caught.value.engine == engine.name, way
            assert str(caught.value).isprintable(), way
            assert len(str(caught.value)) < 500, way
            assert server.written < TAKEN, way


async def test_what_follows_the_last_chunk_is_not_read_for_long() -> None:
    """The response is complete, so it counts, whatever the server sends afterwards."""
    async with opened() as (server, engine):
        server.answers["/generate"] = endless(CHUNKED + LAST, chunked(b"x" * 65536))
        assert [len(chunk.token_ids) for chunk in await generated(engine)] == [TOKENS]
        assert server.written < TAKEN


@pytest.mark.parametrize("status", [b"500 Error", b"302 Found"])
async def test_an_endless_explanation_of_an_error_is_cut_off(status: bytes) -> None:
    async with opened() as (server, engine):
        head = CHUNKED.replace(b"200 OK", status)
        server.answers["/generate"] = endless(head, chunked(b"no \x1b[2J\xff\n" * 999))
        with pytest.raises(EngineError, match=f"answered {int(status[:3])}") as caught:
            await generated(engine)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 500
        assert server.written < TAKEN


async def test_an_error_that_is_never_explained_is_one_all_the_same() -> None:
    async with opened(HttpLimits(control_timeout=0.2)) as (server, engine):
        server.answers["/generate"] = whole(CHUNKED.replace(b"200 OK", b"500 Error"))
        server.closes = False
        with pytest.raises(EngineRejected, match=r"answered 500 \(no message\)"):
            await generated(engine)


async def test_a_packed_answer_is_not_unpacked() -> None:
    """A compressed answer of a kilobyte could become a megabyte."""
    async with opened() as (server, engine):
        bomb = gzip.compress(b"data: " + b"x" * (100 * MIB), compresslevel=9)
        server.answers["/generate"] = whole(body(bomb, b"Content-Encoding: gzip\r\n"))
        with pytest.raises(EngineError, match="ended after 0 tokens"):
            await generated(engine)


async def test_a_long_answer_continues_while_its_tokens_arrive() -> None:
    """The whole answer exceeds every limit, but no part of it does."""
    tokens = 4000
    parts = [chunked(event(0, n)) for n in range(4, tokens, 4)]
    parts.append(chunked(event(0, tokens, finish="length")) + b"0\r\n\r\n")
    async with opened(HttpLimits(max_answer_bytes=MIB)) as (server, engine):
        server.answers["/generate"] = lambda: [CHUNKED, *parts]
        chunks = [chunk async for chunk in engine.generate(greedy(tokens))]
        assert sum(len(chunk.token_ids) for chunk in chunks) == tokens
        assert server.written > 32 * MIB


async def test_what_was_on_its_way_when_the_server_hung_up_is_read() -> None:
    """A busy reader takes the end of an answer long after the connection was closed."""
    async with opened(HttpLimits()) as (server, engine):

        def pieces() -> Iterator[bytes]:
            yield CHUNKED + chunked(event(0, 1))
            while server.unsent == 0:
                yield chunked(b": as much as the machine takes" * 100 + b"\n\n")
            yield LAST + b"0\r\n\r\n"

        server.answers["/generate"] = pieces
        chunks: list[Chunk] = []
        async for chunk in engine.generate(greedy(TOKENS)):
            chunks.append(chunk)
            await until(lambda: server.closed > 0)
        assert sum(len(chunk.token_ids) for chunk in chunks) == TOKENS


async def test_many_streams_do_not_hold_what_one_may() -> None:
    """Each stream holds a tenth of its own limit; together they would hold four times the server's
    limit."""
    streams, piece = 200, 2**17
    # A bound on connections keeps requests of one turn from sharing one.
    limits = HttpLimits(max_unfinished_bytes=streams * piece // 4, max_connections=streams)
    async with opened(limits) as (server, engine):
        server.answers["/generate"] = whole(CHUNKED + chunked(b"x" * piece))
        server.closes = False
        tasks = [asyncio.create_task(generated(engine)) for _ in range(streams)]
        try:
            await until(lambda: server.written >= streams * piece)
            await until(lambda: sum(task.done() for task in tasks) >= streams * 3 // 4)
            unfinished = engine._unfinished  # pyright: ignore[reportPrivateUsage]
            assert 0 < unfinished.size <= limits.max_unfinished_bytes
            for task in tasks:
                if task.done():
                    with pytest.raises(EngineProtocolError, match="raise max_unfinished_bytes"):
                        task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert unfinished.size == 0


NESTED = b'{"model_path": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"
PROBES = ("model_info", "server_info", "openapi.json", "ready", "abort_request")


ENDLESS = {
    "body": endless(CHUNKED, chunked(b"x" * 65536)),
    "headers": endless(OK, b"X-Header: value\r\n"),
    "error": endless(CHUNKED.replace(b"200 OK", b"500 Error"), chunked(b"x" * 65536)),
    "interim": endless(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    "extension": endless(CHUNKED + b"5;", b"x"),
}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *((path, "body") for path in PROBES),
        *(("model_info", name) for name in ENDLESS if name not in ("body", "interim")),
        # Interim answers are cut off late, and test_an_endless_answer_is_cut_off has one.
        pytest.param("model_info", "interim", marks=pytest.mark.long),
    ],
)
async def test_an_endless_control_answer_is_cut_off(path: str, name: str) -> None:
    answer = ENDLESS[name]
    async with hostile() as server:
        server.answers[f"/{path}"] = answer
        engine = SGLangEngine(server.url, limits=LIMITS)
        try:
            await engine.open()
        except EngineError as error:
            assert str(error).isprintable()  # noqa: PT017
            assert len(str(error)) < 500  # noqa: PT017
        else:
            # A server without a schema is accepted.
            assert path == "openapi.json"
            await engine.close()
        assert server.written < 3 * TAKEN  # a broken connection is tried three times


UNREADABLE = [
    NESTED,
    NESTED.replace(b"model_path", b"unknown"),
    b"\xff\xfe",
    b'{"model_path": "\xff", "version": "\xff", "paths": {"\xff": 1}}',
    b'{"model_path": 1, "version": 1, "paths": 1}',
    b'{"model_path": "m", "weight_version": {}, "dp_size": -1, "components": []}',
    b"[]",
    b"9" * 5000,
    b"",
]


@pytest.mark.parametrize("path", ["model_info", "server_info", "openapi.json"])
async def test_a_control_answer_that_cannot_be_read_is_refused(path: str) -> None:
    for content in UNREADABLE:
        async with hostile() as server:
            server.answers[f"/{path}"] = whole(body(content))
            engine = SGLangEngine(server.url, limits=LIMITS)
            with pytest.raises(EngineProtocolError, match=f"does not answer /{path} like SGLang"):
                await engine.open()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("generate", b"307 Temporary"),
        ("generate", b"308 Permanent"),
        ("model_info", b"301 Moved"),
        ("pause_generation", b"302 Found"),
    ],
)
async def test_a_redirect_is_not_followed(path: str, status: bytes) -> None:
    """A redirect would send the prompt and the key to an address that the server chooses."""
    async with hostile() as elsewhere, opened(key=KEY) as (server, engine):
        there = f"{elsewhere.url}/{path}".encode()
        head = b"HTTP/1.1 %b\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n" % (status, there)
        server.answers[f"/{path}"] = whole(head)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "generate": lambda: generated(engine),
            "model_info": engine.version,
            "pause_generation": lambda: engine.pause("retract"),
        }
        with pytest.raises(EngineRejected, match=f"answered {int(status[:3])}"):
            await calls[path]()
        assert elsewhere.connections == 0


async def test_cookies_are_not_kept() -> None:
    async with opened() as (server, engine):
        content = b'{"model_path": "m", "weight_version": "3"}'
        server.answers["/model_info"] = whole(body(content, b"Set-Cookie: who=you; Path=/\r\n"))
        server.closes = False
        assert [await engine.version() for _ in range(3)] == [3, 3, 3]
        assert not any(b"cookie" in head.lower() for head in server.headers)


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would see the keys and delay the streams."""
    async with hostile() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        async with opened(key=KEY) as (server, engine):
            server.answers["/generate"] = whole(CHUNKED + LAST + b"0\r\n\r\n")
            await generated(engine)
            await engine.pause("retract")
        assert proxy.connections == 0
        assert any(KEY.encode() in head for head in server.headers)


@pytest.mark.long
async def test_the_key_is_in_no_error_nor_in_its_causes() -> None:
    """aiohttp's own error of a broken answer shows the headers of the request."""
    async with opened(key=KEY) as (server, engine):
        for answer, _ in (*STREAMS.values(), (whole(b""), ""), (whole(OK), "")):
            server.answers["/generate"] = server.answers["/pause_generation"] = answer
            with pytest.raises(EngineError) as generation:
                await generated(engine)
            with pytest.raises(EngineError) as pause:
                await engine.pause("retract")
            for caught in (generation, pause):
                error: BaseException | None = caught.value
                while error is not None:
                    assert KEY not in f"{error} {error!r} {error.args!r} {vars(error)!r}"
                    error = error.__cause__ or error.__context__


FIRST = event(0, TOKENS, finish="length")
SECOND = event(0, TOKENS, finish="length", index=1)
TOO_MANY = b'data: {"error": {"message": "too long", "code": 400}}\n\n'
WHOLE = ("length", "length")
REFUSED = b"HTTP/1.1 %d No\r\nContent-Length: 2\r\n\r\n{}"

SHARED: dict[str, tuple[bytes, tuple[object, ...], int]] = {
    "both end": (CHUNKED + chunked(SECOND, FIRST), WHOLE, 1),
    "the stream ends in between": (
        CHUNKED + chunked(FIRST) + b"0\r\n\r\n",
        ("length", EngineError),
        1,
    ),
    "an error in between": (CHUNKED + chunked(SECOND, TOO_MANY), (EngineError, "length"), 1),
    "wrong tokens of one": (
        CHUNKED + chunked(event(0, TOKENS + 1, index=1), FIRST),
        ("length", EngineProtocolError),
        1,
    ),
    "an unknown index": (
        CHUNKED + chunked(event(0, 1, index=2)),
        (EngineProtocolError, EngineProtocolError),
        1,
    ),
    "a key is missing": (REFUSED % 401, (EngineRejected, EngineRejected), 1),
    "the server fails": (REFUSED % 500, (EngineRejected, EngineRejected), 1),
    "refused": (REFUSED % 400, (EngineRejected, EngineRejected), 3),
    "refused in the stream": (CHUNKED + chunked(TOO_MANY), (EngineRejected, EngineRejected), 3),
    "nothing": (CHUNKED + b"0\r\n\r\n", (EngineError, EngineError), 3),
}
"""What is answered to two requests that share a body, how each of them ends, and the number of
bodies: each is sent alone where an answer may be the fault of one of them."""


async def test_requests_that_share_a_body_fail_each_by_itself() -> None:
    for way, (answer, ends, bodies) in SHARED.items():
        async with opened() as (server, engine):
            server.answers["/generate"] = whole(answer)
            calls = (generated(engine), generated(engine))
            found = await asyncio.gather(*calls, return_exceptions=True)
        assert len(server.bodies) == bodies, way
        kinds = [type(one) if isinstance(one, BaseException) else one[-1].finish for one in found]
        assert tuple(kinds) == ends, way
