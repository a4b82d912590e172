"""One inference server over HTTP as an :class:`~aprilsched.kernel.engines.base.Engine`, whatever program
it is: what is known of it, its version, its released memory, and generations that end in any case.

- A generation is sent once. When its stream is left before the last chunk, even by a
  cancellation, the server is told in bounded time to abort it.
- Only a failure to connect is reported as :class:`~aprilsched.errors.EngineUnreachable`: after it
  the call can be repeated, because two copies of the request cannot decode.
- Streams have no timeout; control calls always have one. The size of a stream is bounded by what
  was asked for; what follows the last chunk or an error status is bounded to a few KiB and seconds.
- The weights count as *inconsistent* from the first byte of an update until it has succeeded.
- The client remembers what memory was released, because servers do not check the order of such
  calls. A call counts as executed unless the server refused it or could not be reached.

A paused server may hold a request before its scheduler knows of it. SGLang loses an abort of such a
request and remembers that it was aborted: it passes no later abort on, and after continue the
request decodes to its end (0.5.21). While nothing has arrived, closing the connection always works:
the server drops a held request and aborts a queued one. That loses no token, because none was
received or on its way.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast

import aiohttp
import msgspec

from aprilsched.errors import (
    ConfigError,
    ControlTimeout,
    EngineError,
    EngineProtocolError,
    EngineRejected,
    EngineRestarted,
    EngineUnreachable,
    InconsistentWeights,
)
from aprilsched.kernel.engines.base import Capabilities, Chunk, Engine, GenerationRequest, PauseMode
from aprilsched.kernel.engines.http import (
    UNREADABLE,
    Allowance,
    Answer,
    HttpLimits,
    ServerAddress,
    Transport,
    UnfinishedEvents,
    engine_error,
    inflow_of,
    quote,
    rejection,
    retry_after_s,
)
from aprilsched.kernel.engines.stream import (
    ResponseReader,
    empty_chunk,
    read_chunks,
    version_number,
)
from aprilsched.kernel.values.companions import MOST_KEPT, TOP

_log = logging.getLogger(__name__)

T = TypeVar("T")

_BAD_REQUEST = 400
_CONFLICT = 409


def decode(engine: str, what: str, body: bytes, kind: type[T], *, program: str) -> T:
    """Decode `body` as a `kind`, or raise an error that names the call and the server's program."""
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise EngineProtocolError(
            engine, f"does not answer {what} like {program} ({quote(str(error))})."
        ) from error


@dataclass(frozen=True, slots=True)
class Questions:
    """The calls to one server that change nothing; they need no admin key.

    Attributes:
        engine: the server's name, for errors.
        program: the name of the server's program, for errors.
        server: takes the calls.
        timeout: seconds for each call, its retries included.
    """

    engine: str
    program: str
    server: Transport
    timeout: float

    async def ask(
        self,
        path: str,
        body: object = None,
        *,
        accept: tuple[int, ...] = (200,),
        query: Mapping[str, str] | None = None,
        at_most: int | None = None,
    ) -> Answer:
        """GET `path`, or POST `body` there; errors as :meth:`Transport.call`."""
        return await self.server.call(
            "GET" if body is None else "POST",
            path,
            body,
            timeout=self.timeout,
            accept=accept,
            admin=False,
            query=query,
            at_most=at_most,
        )

    async def get(self, path: str, kind: type[T], *, at_most: int | None = None) -> T:
        """GET `path` as a `kind`; errors as :meth:`ask` and :meth:`read`."""
        return self.read(path, await self.ask(path, at_most=at_most), kind)

    def read(self, path: str, answer: Answer, kind: type[T]) -> T:
        """Decode the answer of `path` as a `kind`.

        Raises:
            EngineProtocolError: if it is none.
        """
        return decode(self.engine, f"/{path}", answer.body, kind, program=self.program)


def release(version: str) -> tuple[int, int, int]:
    """The release in a version string: "0.5.18.dev3" is 0.5.18, and no release is (0, 0, 0)."""
    match = re.match(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?", version)
    if match is None:
        return (0, 0, 0)
    major, minor, patch = match.groups("0")
    return (int(major), int(minor), int(patch))


Over: TypeAlias = Literal["sum", "mean"]

_LINE = re.compile(rb"^(\w+):(\w+)(?:\{[^\n]*\})? ([^ \n]{1,32})(?: \d+)?$", re.MULTILINE)


def read_series(page: bytes, wanted: Mapping[str, Over], *, program: str) -> dict[str, float]:
    """The `wanted` series of a page of metrics, without those that are missing or not finite.

    They are named ``PROGRAM:NAME``; `wanted` says how the values of several ranks become one.
    """
    found: dict[str, list[float]] = {}
    for match in _LINE.finditer(page):
        name = match[2].decode()
        if match[1] != program.encode() or name not in wanted:
            continue
        with suppress(ValueError):
            if math.isfinite(value := float(match[3])):
                found.setdefault(name, []).append(value)
    return {
        name: math.fsum(values) / (1 if wanted[name] == "sum" else len(values))
        for name, values in found.items()
    }


# --- control -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a server said about itself when it was opened.

    Attributes:
        model_path: the model that the server was started with, or the folder that it loaded last.
        label: the label of the weights, as the server spells it.
        vocab_size: smallest token id that the server may die of; None where it is not known.
        process: what distinguishes the server's process from a later one at its address.
        context_tokens: tokens of a prompt and its response together; None where it is not known.
    """

    model_path: str
    label: str
    capabilities: Capabilities
    vocab_size: int | None
    process: object
    context_tokens: int | None = None


FactsT = TypeVar("FactsT", bound=Facts)


class Control(Generic[FactsT]):
    """What is known of one server, and the checks around its control calls.

    A subclass says how the program of the server is asked: `pause`, `flush`, `resume`,
    `ask_label`, `_ask_process`, `set_label`, `_release` and `_wake`.
    """

    _program: str
    """The name of the program, as errors have it."""

    def __init__(
        self,
        name: str,
        server: Transport,
        limits: HttpLimits,
        *,
        stream_interval: int,
        first_version: int,
    ) -> None:
        if stream_interval < 1:
            raise ConfigError(f"stream_interval is {stream_interval}; give 1 token or more.")
        self._name = name
        self._server = server
        self._limits = limits
        self._stream_interval = stream_interval
        self._first_version = first_version
        self._questions = Questions(name, self._program, server, limits.control_timeout)
        self._facts: FactsT | None = None
        self._released: frozenset[str] = frozenset()
        self._groups: set[str] = set()
        """The groups of trainers that the server's process is in."""
        self._open_update = ""
        """Names the update that was begun and has not succeeded; empty if there is none."""

    @property
    def name(self) -> str:
        """Host and port; also the path, where several servers share them."""
        return self._name

    @property
    def facts(self) -> FactsT:
        """What the server said about itself when it was opened."""
        if self._facts is None:
            raise EngineUnreachable(self.name, "is not open; call open() before using it.")
        return self._facts

    @property
    def capabilities(self) -> Capabilities:
        """What the server can do; known after it was opened."""
        return self.facts.capabilities

    @property
    def label(self) -> str:
        """The label of the weights that the server had when it was opened."""
        return self.facts.label

    async def version(self) -> int:
        """Ask for the policy version; raise if the weights are inconsistent."""
        # The server is asked in any case: that it is lost matters more than its weights.
        version = version_number(await self.ask_label(), self._first_version)
        if self._open_update:
            raise InconsistentWeights(
                self.name,
                f"{self._open_update} failed, so its weights are a mixture of old and new; it "
                "needs a complete refit.",
            )
        return version

    async def verify(self) -> int:
        """Ask for the policy version; raise if the process is not the one that was opened."""
        await self._check_process()
        return await self.version()

    async def _check_process(self) -> None:
        if await self._ask_process() != self.facts.process:
            raise EngineRestarted(
                self.name,
                "was restarted since it was opened, so it has the weights that it was started "
                "with; it is opened again.",
            )

    def expect_weights(self) -> None:
        """Take the weights for inconsistent, because somebody else may begin to load some."""
        self._open_update = "an update by the trainer"

    async def accept_weights(self, version: int, *, label: bool = False) -> None:
        """Take the weights for `version`; raise if the server does not name them so."""
        await self._check_process()
        if label:
            await self.set_label(self._name_of(version))
        said = await self.ask_label()
        if version_number(said, self._first_version) != version:
            raise EngineRejected(
                self.name,
                f'names its weights "{quote(said)}" and not "{self._name_of(version)}"; let the '
                "trainer label them with the decimal version, or use label=True.",
                status=_CONFLICT,
            )
        self._open_update = ""

    async def release(self, tags: Sequence[str]) -> None:
        """Release memory; the server must be paused with retract."""
        if twice := sorted(self._released.intersection(tags)):
            raise self._conflict(f"{twice[0]} is released already; release each part once.")
        await self._change_memory(self._release(tags), self._released.union(tags))

    async def wake(self, tags: Sequence[str]) -> None:
        """Take released memory back."""
        if awake := sorted(set(tags) - self._released):
            raise self._conflict(f"{awake[0]} was not released; wake only what was.")
        await self._change_memory(self._wake(tags), self._released.difference(tags))

    async def _change_memory(self, call: Awaitable[None], after: frozenset[str]) -> None:
        before, self._released = self._released, after
        try:
            await call
        except (EngineRejected, EngineUnreachable):
            self._released = before
            raise

    def _check_awake(self) -> None:
        """Refuse to continue while any of the server's memory is released."""
        if self._released:
            raise self._conflict(f"its {min(self._released)} is released; wake it first.")

    async def pause(self, mode: PauseMode) -> None:
        """See :meth:`aprilsched.kernel.engines.base.Engine.pause`."""
        raise NotImplementedError

    async def flush(self) -> None:
        """See :meth:`aprilsched.kernel.engines.base.Engine.flush`."""
        raise NotImplementedError

    async def resume(self) -> None:
        """See :meth:`aprilsched.kernel.engines.base.Engine.resume`."""
        raise NotImplementedError

    async def ask_label(self) -> str:
        """Ask for the label of the weights that the server has now."""
        raise NotImplementedError

    async def _ask_process(self) -> object:
        """Ask for what distinguishes the process that answers now from others."""
        raise NotImplementedError

    async def set_label(self, label: str) -> None:
        """Label the weights that the server has."""
        raise NotImplementedError

    async def _release(self, tags: Sequence[str]) -> None:
        raise NotImplementedError

    async def _wake(self, tags: Sequence[str]) -> None:
        raise NotImplementedError

    def _name_of(self, version: int) -> str:
        """The label of a version."""
        return str(version - self._first_version)

    @contextmanager
    def _update(self, what: str) -> Generator[None]:
        """One update; the weights are inconsistent unless it succeeds."""
        self._open_update = what
        yield
        self._open_update = ""

    def _check_request(self, request: GenerationRequest) -> None:
        """Refuse a request that the server must not get.

        Raises:
            EngineRejected: if a token id is beyond the vocabulary: the lookup in the embedding
                fails, and SGLang 0.5.21 and vLLM 0.32 die of it.
        """
        vocab = self.facts.vocab_size
        largest = int(request.input_ids.max(initial=0))
        if vocab is not None and largest >= vocab:
            raise self._refused(
                f"holds token id {largest}, and the model knows {vocab}; tokenize the prompt with "
                "this model's tokenizer.",
            )

    def _refused(self, why: str) -> EngineRejected:
        """The error of a request that the server does not get."""
        return EngineRejected(self.name, f"the request {why}", status=_BAD_REQUEST)

    def _conflict(self, why: str) -> EngineRejected:
        return EngineRejected(self.name, why, status=_CONFLICT)

    async def _control(
        self, path: str, body: object = None, *, accept: tuple[int, ...] = (200,)
    ) -> Answer:
        return await self._server.call(
            "POST", path, body, timeout=self._limits.control_timeout, accept=accept
        )


# --- generations ---------------------------------------------------------------------------------

ABORTS_AT_ONCE = 16
"""Number of abort calls that one server gets at a time. Hundreds of them would block the client's
event loop for seconds, and a continue would wait behind them for a connection."""
_ABORT_EACH_S = 0.02
"""Time allowed for each further abort; a real server on its own machine takes 1.5 to 3 ms."""


class HungUp(Exception):
    """Ends the reading of a stream that was closed before anything had arrived from it."""


class Call:
    """One generation in flight."""

    def __init__(self) -> None:
        self.over = False
        """Whether the server has nothing left of the request that an abort could end."""
        self.aborted = False
        """Whether the server was told to abort the request."""
        self.shared = False
        """Whether other requests are on the same connection."""
        self.unsure = False
        """Whether the server may have the request although it was refused with others."""
        self._response: aiohttp.ClientResponse | None = None
        self._broken_off: Exception | None = None

    def attach(self, response: aiohttp.ClientResponse) -> None:
        """Record that the server took the request and streams its answer into `response`."""
        self._response = response
        if self._broken_off is not None:
            raise self._broken_off

    @property
    def silent(self) -> bool:
        """Whether no byte of the answer has arrived, neither read nor unread."""
        return self._response is None or self._response.content.total_bytes == 0

    def break_off(self, reason: Exception) -> None:
        """Close the connection now; the reader of the stream gets `reason` as its error."""
        self._broken_off = reason
        if self._response is not None:
            # The order matters: after close() first, the reader would wait for ever.
            self._response.content.set_exception(reason)
            self._response.close()


class EarlyAborts:
    """Tells one server to abort the generations that were left early, a few at a time.

    Generations that are left together share a time bound, which grows with their number. When
    ``ABORTS_AT_ONCE`` aborts in a row get no answer, the rest is given up. One log line says how
    many were not aborted.

    Args:
        name: name of the server, for the log.
        timeout: seconds for one abort.
        aborts: semaphore that bounds the server's concurrent abort calls.
    """

    def __init__(self, name: str, timeout: float, aborts: asyncio.Semaphore) -> None:
        self._name = name
        self._timeout = timeout
        self._aborts = aborts
        self._waiting = 0
        self._until = 0.0
        self._unanswered = 0
        """Number of aborts in a row that got no answer."""
        self._gone = False
        self._left = 0
        self._not_aborted = 0
        self._why = ""

    async def send(self, abort: Callable[[], Awaitable[None]]) -> None:
        """Make one abort call; its failure is logged and not raised."""
        loop = asyncio.get_running_loop()
        if self._waiting == 0:
            self._until = loop.time() + self._timeout
            self._unanswered = self._left = self._not_aborted = 0
            self._gone, self._why = False, ""
        self._waiting += 1
        self._left += 1
        self._until += _ABORT_EACH_S
        try:
            async with self._aborts:
                if self._unanswered >= ABORTS_AT_ONCE or loop.time() > self._until:
                    self._not_aborted += 1
                elif not self._gone:
                    await self._try(abort)
        finally:
            self._waiting -= 1
            if self._waiting == 0 and self._not_aborted:
                _log.warning(
                    "%d of %d requests that were left early on %s may still decode: %s",
                    self._not_aborted,
                    self._left,
                    self._name,
                    self._why or "the aborts before them took too long",
                )

    async def _try(self, abort: Callable[[], Awaitable[None]]) -> None:
        try:
            await abort()
        except EngineUnreachable as error:
            # The loss of the engine is reported once elsewhere, not for each request.
            self._gone = True
            _log.debug("a request on %s was not aborted: %s", self._name, error)
        except EngineError as error:
            self._not_aborted += 1
            self._why = str(error)
            self._unanswered += isinstance(error, ControlTimeout)
        else:
            self._unanswered = 0


async def despite_cancellation(work: Coroutine[Any, Any, None]) -> None:
    """Run bounded `work` to its end even if this task is cancelled, and then raise that."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled() and isinstance(task.exception(), KeyboardInterrupt):
        # The event loop has raised it already. Raised here again, it would end the loop that
        # runs the cleanup of everything else.
        raise asyncio.CancelledError
    task.result()
    if cancelled is not None:
        raise cancelled


# --- engine --------------------------------------------------------------------------------------

_DRAIN_SECONDS = 1.0
_DRAIN_BYTES = 2**16


class HttpEngine(Control[FactsT]):
    """One server at an address.

    A subclass says how its program is asked: `_probe`, `_post`, `_reader` and `_abort`, besides
    what :class:`Control` needs. If its streams are not server-sent events, it has `_chunks` too.

    Args:
        url: URL where the server listens, as ``http://host:port``.
        admin_key: key for control calls, where it is not the same.
        api_key: key for generation.
        stream_interval: tokens between two events of a stream.
        limits: timeouts and sizes.
        first_version: version of the weights that the server labels "0".

    Raises:
        ConfigError: if `url`, a key or `stream_interval` cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        admin_key: str | None = None,
        api_key: str | None = None,
        stream_interval: int = 64,
        limits: HttpLimits | None = None,
        first_version: int = 0,
    ) -> None:
        address = ServerAddress.parse(url)
        self._url = address.url
        self._calls: dict[str, Call] = {}
        limits = limits or HttpLimits()
        self._transport = Transport(
            address.name, self._url, admin_key=admin_key, api_key=api_key, limits=limits
        )
        self._unfinished = UnfinishedEvents(address.name, limits.max_unfinished_bytes)
        super().__init__(
            address.name,
            self._transport,
            limits,
            stream_interval=stream_interval,
            first_version=first_version,
        )
        self._bind_to_loop()

    def _bind_to_loop(self) -> None:
        # A semaphore belongs to the loop in which a task first waits for it.
        self._aborts = asyncio.Semaphore(ABORTS_AT_ONCE)
        self._early_aborts = EarlyAborts(self.name, self._limits.abort_timeout, self._aborts)

    @property
    def address(self) -> str:
        """The URL of the server."""
        return str(self._url)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._url)!r})"

    async def open(self) -> None:
        """Connect and probe; close the connections again if the server cannot be used."""
        await self._transport.open()
        self._bind_to_loop()
        try:
            self._facts = await self._probe()
        except BaseException:
            await self._transport.close()
            raise

    async def close(self) -> None:
        """Release the connections; the streams that are open end with an error."""
        for call in self._calls.values():
            call.break_off(EngineError(self.name, "was closed while it generated."))
        await self._transport.close()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Stream one response; see :meth:`aprilsched.kernel.engines.base.Engine.generate`."""
        self._check_request(request)
        call = self._calls[request.request_id] = Call()
        try:
            async with aclosing(self._answer(request, call)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except HungUp:
            yield empty_chunk(spans_known=self.capabilities.version_spans)
        except (EngineRejected, EngineUnreachable):
            # The server does not have the request. An abort could end another one of this id.
            call.over = not call.unsure
            raise
        except (aiohttp.ClientError, OSError) as error:
            failure = engine_error(self.name, self._url, error)
            call.over = isinstance(failure, EngineUnreachable)
            if not (call.aborted and await self._still_runs()):
                raise failure from error
            yield empty_chunk(spans_known=False)
        finally:
            if self._calls.get(request.request_id) is call:
                del self._calls[request.request_id]
            if not call.over:
                await despite_cancellation(self._abort_quietly(request.request_id))

    async def _answer(self, request: GenerationRequest, call: Call) -> AsyncGenerator[Chunk, None]:
        """The chunks of one response, and the errors of whatever brings them."""
        async with self._send(request) as response:
            call.attach(response)
            await self._check_status(response)
            async with aclosing(self._chunks(request, response)) as chunks:
                async for chunk in chunks:
                    if chunk.finish is not None:
                        call.over = True
                        await drain(response)
                    yield chunk

    async def _abort_quietly(self, request_id: str) -> None:
        """Tell the server to abort a generation that nobody reads any more."""
        await self._early_aborts.send(lambda: self._last_abort(request_id))

    async def _last_abort(self, request_id: str) -> None:
        await self._abort(request_id, self._limits.abort_timeout)

    async def abort(self, request_id: str) -> None:
        """End one request; if nothing has arrived from it, its connection is closed as well.

        A connection that it shares is closed only if an abort before this one did not end it.
        """
        call = self._calls.get(request_id)
        if call is not None:
            if call.silent and (call.aborted or not call.shared):
                call.break_off(HungUp())
            call.aborted = True
        async with self._aborts:
            await self._abort(request_id, self._limits.control_timeout)

    async def _still_runs(self) -> bool:
        """Whether the process that was opened answers.

        After an abort a connection may break before its last event, which is no failure of a
        server that goes on (seen once of SGLang 0.5.21): the tokens that have arrived are the
        response. A server that was lost or restarted meanwhile is one that failed.
        """
        try:
            await self._check_process()
        except EngineError:
            return False
        return True

    async def _probe(self) -> FactsT:
        """Ask the server what it is, and refuse one that cannot be used."""
        raise NotImplementedError

    def _post(self, request: GenerationRequest) -> tuple[str, dict[str, Any]]:
        """The path and the body of the call that asks for `request`."""
        raise NotImplementedError

    def _reader(self, request: GenerationRequest) -> ResponseReader:
        """What turns the events of the answer to `request` into chunks."""
        raise NotImplementedError

    async def _abort(self, request_id: str, timeout: float) -> None:  # noqa: ASYNC109
        """Tell the server to abort a request; unknown ids are ignored."""
        raise NotImplementedError

    def _send(
        self, request: GenerationRequest
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """The response to the one POST that asks for `request`."""
        return self._transport.stream(*self._post(request))

    async def _check_status(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 200:
            return
        body = b""
        # The status alone is enough for the error if the body does not end in time.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.control_timeout):
                body = await self._transport.read(response)
        wait = retry_after_s(response.headers.get("Retry-After"))
        answer = Answer(response.status, body, wait)
        raise rejection(self.name, f"POST {response.url.path}", answer)

    def _chunks(
        self, request: GenerationRequest, response: aiohttp.ClientResponse
    ) -> AsyncGenerator[Chunk, None]:
        allowance = Allowance(
            self.name,
            request.request_id,
            self._limits.max_answer_bytes + companion_bytes(request),
            self._unfinished,
            inflow_of(response),
        )
        return read_chunks(response.content.readany, allowance, self._reader(request))


def facts_of(engine: Engine) -> Facts | None:
    """What a server said about itself when it was opened; None for an engine that is no server."""
    return cast("HttpEngine[Facts]", engine).facts if isinstance(engine, HttpEngine) else None


_KEPT_BYTES = 64 << 20
"""Largest size on the wire of what a request keeps: a little of it may be wanted of much."""
_ID_BYTES = 12
"""Largest size of a token id in a list of JSON."""
_LIKELY_BYTES = 80
"""Largest size of a token with its log-probability in one, with the names of vLLM's fields."""


def companion_bytes(request: GenerationRequest) -> int:
    """The largest size of the companions in an answer (base64 of int32, or lists of ids or of
    log-probabilities), and of what else is kept of it."""
    context = len(request.input_ids) + request.sampling.max_new_tokens
    return bool(request.sampling.keep) * _KEPT_BYTES + sum(
        request.sampling.max_new_tokens * MOST_KEPT * _ID_BYTES
        if companion.ragged
        else request.sampling.max_new_tokens * (companion.shape[0] + 1) * _LIKELY_BYTES
        if companion.name == TOP
        else context * math.prod(companion.shape) * 6
        for companion, _ in request.companions
    )


async def drain(response: aiohttp.ClientResponse) -> None:
    """Read what follows the last chunk, so that the connection can be used again."""
    left = _DRAIN_BYTES
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for data in response.content.iter_any():
                left -= len(data)
                if left < 0:
                    response.close()
                    return
    except (aiohttp.ClientError, OSError):
        response.close()
