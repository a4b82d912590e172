"""The HTTP address of all sessions: calls of harnesses and launchers, each with their keys.

A session is at ``/sessions/ID`` and answers OpenAI's, Anthropic's and SGLang's calls there. For a
client that sends no key it is at ``/sessions/ID.KEY``. A launcher in another process or on another
host takes sessions at ``/launcher/next`` and reports how they ended, with a separate key.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from aprilsched.agents.dialects.anthropic import Messages
from aprilsched.agents.dialects.openai import Chats, Completions
from aprilsched.agents.dialects.sglang import Generate
from aprilsched.agents.dialects.values import Asked, Dialect
from aprilsched.agents.serving.bodies import Bodies, decode, expect_later
from aprilsched.agents.serving.refusals import (
    Refusal,
    Refused,
    Unauthorized,
    Unavailable,
    answer_refusals,
    as_json,
)
from aprilsched.agents.serving.streams import PING_S, STREAM_HEADERS
from aprilsched.agents.sessions.asking import ask, render_events, render_whole
from aprilsched.errors import AprilschedError, ConfigError, EpisodeError, TurnRefused
from aprilsched.types import Score

if TYPE_CHECKING:
    from aprilsched.agents.sessions.harness import Reply, Session, Sessions

T = TypeVar("T")

_LARGEST_BODY = 2**26
_ALL_BODIES = 2**28
_LONGEST_WAIT_S = 60.0
_GONE = 410
_RETRY_S = 5
"""Seconds for Retry-After with a 503; OpenAI's client obeys it."""
_BROKEN_S = 5.0
"""Seconds in which a connection reset means that a launcher has not read its answer."""
_NOT_OPEN = "the scheduler is not open, and may go on with this session; ask again later."


class _Ended(Refusal):
    """The session has ended."""

    status = _GONE


class Keys:
    """The keys derived from a secret: one per session, and one for launchers."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.launcher = self._made("launcher", "")

    def of(self, session_id: str) -> str:
        """Return the key of a session."""
        return self._made("session", session_id)

    def _made(self, kind: str, name: str) -> str:
        return hmac.new(self._secret, f"{kind} {name}".encode(), "sha256").hexdigest()


def _has_key(request: web.Request, key: str, given: str = "") -> bool:
    """Return whether a request has this key.

    The key is `given`, or sent in the header that OpenAI's or Anthropic's clients use.
    """
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    given = given or request.headers.get("x-api-key") or bearer
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode())


def make_session_app(sessions: Sessions, keys: Keys) -> web.Application:
    """Return the web application of all sessions."""
    app = web.Application(middlewares=[_say_when, answer_refusals])
    bodies = Bodies(largest=_LARGEST_BODY, together=_ALL_BODIES)

    def add(method: str, path: str, handler: Handler) -> None:
        app.router.add_route(method, path, handler, expect_handler=expect_later)

    for dialect, path in (
        (Chats, "chat/completions"),
        (Completions, "completions"),
        (Messages, "messages"),
        (Generate, "generate"),
    ):
        handler = _call(sessions, keys, bodies, dialect)
        # OpenAI's clients have the v1 in their base URL; Anthropic's add it.
        add("POST", "/sessions/{id}/" + path, handler)
        add("POST", "/sessions/{id}/v1/" + path, handler)
    for path in ("/sessions/{id}/models", "/sessions/{id}/v1/models"):
        add("GET", path, _models)
    launcher = _Launcher(sessions, keys, bodies)
    add("POST", "/launcher/next", launcher.next)
    add("POST", "/launcher/sessions/{id}/{what:done|failed|lost|score}", launcher.report)
    return app


@web.middleware
async def _say_when(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Add Retry-After to a 503."""
    answer = await handler(request)
    if answer.status == Unavailable.status and not answer.prepared:
        answer.headers["Retry-After"] = str(_RETRY_S)
    return answer


async def _models(_: web.Request) -> web.Response:
    return as_json({"object": "list", "data": [{"id": "policy", "object": "model"}]})


def _call(sessions: Sessions, keys: Keys, bodies: Bodies, dialect: type[Dialect]) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        name, _, key = request.match_info["id"].partition(".")
        # Only a client with the session's key may learn whether it exists.
        if not _has_key(request, keys.of(name), key):
            return as_json(dialect.error("this is not the key of this session.", 401), 401)
        try:
            session = _session(sessions, name)
            async with bodies.read(request) as content:
                body = decode(content, dialect.body)
            asked = dialect.parse(body)
            answer = ask(dialect, session, asked)
            if not asked.stream:
                return as_json(render_whole(dialect, asked, await answer))
        except Exception as error:
            status, message = _explained(error, sessions)
            return as_json(dialect.error(message, status), status)
        return await _stream(request, sessions, dialect, asked, answer)

    return handle


def _session(sessions: Sessions, name: str) -> Session:
    """Return an open session.

    Raises:
        Unavailable: if it may continue later.
        _Ended: if it has ended.
    """
    session = sessions.get(name) if sessions.ready else None
    if session is not None:
        return session
    if sessions.awaits(name):
        raise Unavailable(_NOT_OPEN)
    raise _Ended("the session has ended, and no other one answers at its address.")


def _explained(error: Exception, sessions: Sessions) -> tuple[int, str]:
    """Return the status and the message of an error.

    Raises:
        Exception: the error itself, if it is a bug.
    """
    match error:
        case TurnRefused():
            return Refused.status, str(error)
        case EpisodeError() if not sessions.ready:
            return Unavailable.status, _NOT_OPEN
        case Refusal():
            return error.status, str(error)
        case EpisodeError():
            return _GONE, str(error)
        case ConfigError():
            return 400, str(error)
        case RecursionError():
            return 400, "the body is nested too deeply; send fewer levels."
        case AprilschedError():
            return Unavailable.status, str(error)
        case web.HTTPRequestEntityTooLarge():
            return error.status, error.reason
        case _:
            raise error


async def _stream(
    request: web.Request,
    sessions: Sessions,
    dialect: type[Dialect],
    asked: Asked,
    answer: Awaitable[Reply],
) -> web.StreamResponse:
    """Answer with a stream whose events are sent when the answer is complete.

    Only then is it known which tokens are in the answer. Pings, which clients do not see as events,
    keep the stream open until then. An error before the first ping is sent as a plain answer with
    its own status, which clients handle better.
    """
    stream = web.StreamResponse(headers=STREAM_HEADERS)
    asking = asyncio.ensure_future(answer)
    try:
        while not asking.done():
            await asyncio.wait([asking], timeout=PING_S)
            if not asking.done():
                await stream.prepare(request)
                await stream.write(dialect.ping)
        try:
            events = render_events(dialect, asked, asking.result())
        except Exception as error:
            status, message = _explained(error, sessions)
            if not stream.prepared:
                return as_json(dialect.error(message, status), status)
            events = [dialect.frame(dialect.stream_error(message, status)), dialect.done]
        await stream.prepare(request)
        for event in events:
            await stream.write(event)
    except ConnectionResetError:  # The client is gone.
        pass
    finally:
        # Withdraw its turn: the client has seen none of its tokens.
        asking.cancel()
        await asyncio.wait([asking])
    return stream


class _Next(msgspec.Struct, frozen=True):
    """POST /launcher/next: seconds to wait for a session."""

    wait_s: float = 30.0


class _Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A launcher's report of how a session ended."""

    score: float | None = None
    parts: dict[str, float] = {}
    info: dict[str, Any] = {}
    later: bool = False
    why: str = ""

    def given(self) -> Score | None:
        """The score, if the report has any part of one."""
        if self.score is None and not self.parts and not self.info:
            return None
        return Score(reward=self.score, parts=self.parts, info=self.info)


class _Delivery(asyncio.Protocol):
    """Calls `broken` if a connection is reset soon after an answer.

    A client that closes its end before it has read the answer resets the connection. One that has
    read it sends another request, or closes in order.
    """

    def __init__(self, transport: asyncio.Transport, broken: Callable[[], None]) -> None:
        self._transport = transport
        self._protocol = cast("asyncio.Protocol", transport.get_protocol())
        self._broken: Callable[[], None] | None = broken
        transport.set_protocol(self)
        asyncio.get_running_loop().call_later(_BROKEN_S, self._end)

    def _end(self) -> None:
        self._broken = None
        if self._transport.get_protocol() is self:
            self._transport.set_protocol(self._protocol)

    def data_received(self, data: bytes) -> None:
        self._end()
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and self._broken is not None:
            self._broken()
        self._end()
        self._protocol.connection_lost(exc)


class _Launcher:
    """Answers the HTTP requests of launchers, the programs that start agents: for the next session,
    and about the end and the score of one."""

    def __init__(self, sessions: Sessions, keys: Keys, bodies: Bodies) -> None:
        self._sessions, self._keys, self._bodies = sessions, keys, bodies

    async def next(self, request: web.Request) -> web.StreamResponse:
        """Return a session that waits for a launcher; 204 if none comes in time.

        If its launcher does not receive the answer, the session is offered to the next one.
        """
        body = await self._body(request, _Next)
        wait = max(0.0, min(body.wait_s, _LONGEST_WAIT_S))
        # Let a disconnect of the client arrive before a session is taken.
        await asyncio.sleep(0)
        try:
            session = await self._sessions.next(wait)
        except TimeoutError:
            if not self._sessions.ready:
                raise Unavailable("the scheduler is not open; ask again later.") from None
            return web.Response(status=204)
        prompt = session.prompt
        fields = {
            "id": session.id,
            "url": session.url,
            "key": session.key,
            "index": session.index,
            "prompt": {"key": prompt.key, "metadata": dict(prompt.metadata)},
        }
        answer = web.Response(
            body=msgspec.json.encode(fields, enc_hook=str), content_type="application/json"
        )
        transport = request.transport
        try:
            await answer.prepare(request)
            await answer.write_eof()
        except (ConnectionResetError, asyncio.CancelledError):
            self._sessions.offer_again(session)
            raise
        if transport is None or transport.is_closing():
            self._sessions.offer_again(session)
        else:
            _Delivery(transport, lambda: self._sessions.offer_again(session))
        return answer

    async def report(self, request: web.Request) -> web.StreamResponse:
        """Take a report; 410 if the session has ended for any reason."""
        body = await self._body(request, _Report)
        session = _session(self._sessions, request.match_info["id"])
        score = body.given()
        match request.match_info["what"]:
            case "done":
                session.done(score, later=body.later)
            case "failed":
                session.failed(body.why or "its launcher reports that it has failed")
            case "lost":
                session.lost(body.why or "its launcher reports that it is lost")
            case _:
                if score is None:
                    raise Refused("there is no score; give one, or parts of one.")
                session.score(score)
        # Otherwise a restart could lose the report and leave a session without a harness.
        if score is not None or not self._sessions.judges:
            await session.recorded()
            if not self._sessions.ready:
                raise Unavailable(_NOT_OPEN)
        return as_json({})

    async def _body(self, request: web.Request, kind: type[T]) -> T:
        """Return the body of a call that has the key."""
        if not _has_key(request, self._keys.launcher):
            raise Unauthorized("The launchers' key is missing or wrong.")
        async with self._bodies.read(request) as content:
            return decode(content or b"{}", kind)
