"""The eight kinds of faults: what each does to a call, to a stream or to the whole engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from aiohttp import web

from aprilsched.agents.serving.refusals import as_json, error_event
from aprilsched.agents.serving.streams import DONE, Event, Item, frame_item
from tests.support.faults.corrupting import Change, few_logprobs
from tests.support.faults.routes import GENERATE, UPDATES

Items: TypeAlias = AsyncGenerator[Item, None]

_PIECE = 2**16


class Broken(Exception):
    """Ends a call whose connection must be reset."""


async def wait(seconds: float) -> None:
    """Sleep for `seconds`, which may be infinite."""
    if math.isfinite(seconds):
        await asyncio.sleep(seconds)
    else:
        await asyncio.Event().wait()


@dataclass(frozen=True, slots=True)
class Met:
    """A fault that one call has met; it takes effect, or not, while the call is answered.

    Attributes:
        fault: what happens.
        fire: records that it takes effect now; returns False if the fault is used up.
        random: the random draws of the fault.
    """

    fault: Fault
    fire: Callable[[], bool]
    random: np.random.Generator

    def random_bytes(self, count: int) -> bytes:
        """Draw `count` random bytes without a line feed."""
        return self.random.bytes(count).replace(b"\n", b"\0")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """When and where a fault happens; times are seconds of the event loop since the start.

    Attributes:
        routes: paths of the calls to which it may happen.
        at, until: only calls that arrive between these times are considered and counted.
        after: number of the first of these calls to which it happens.
        times: largest number of times that it happens.
        probability: probability with which it happens to such a call.
        after_tokens: it happens in streamed responses only, after this number of tokens.
    """

    kind: ClassVar[str]

    routes: tuple[str, ...] = GENERATE
    at: float = 0.0
    until: float = math.inf
    after: int = 1
    times: float = math.inf
    probability: float = 1.0
    after_tokens: int | None = None

    async def before(self, met: Met) -> web.StreamResponse | None:
        """Act before the call is carried out; an answer replaces the call.

        Raises:
            Broken: if the connection must be reset.
        """
        return None

    def changes_answer(self) -> bool:
        """Return whether :meth:`pieces` takes the place of the server's answer."""
        return False

    async def pieces(self, met: Met, body: bytes) -> AsyncGenerator[bytes]:
        """Yield what is sent in the place of an answer with `body`."""
        yield body

    async def instead(self, met: Met, event: Event, rest: Items) -> Items:
        """Yield what takes the place of `event`; `rest` is what follows it in the stream."""
        yield event

    def fits(self, event: Event) -> bool:
        """Return whether the fault can happen to `event` of a stream."""
        return True


@dataclass(frozen=True, kw_only=True)
class Answer(Fault):
    """The call is not carried out, and answered with an HTTP status.

    The body is `content` as JSON, `body` as it is, or `message` in SGLang's form. With status 200
    the server pretends that it did what it was asked for. In a stream it is the last event.
    """

    kind: ClassVar[str] = "answer"
    status: int = 500
    message: str = "a fault of the test"
    content: Any = None
    body: str | None = None
    retry_after: float | None = None

    async def before(self, met: Met) -> web.StreamResponse | None:
        if not met.fire():
            return None
        answer = as_json(self.content or {"error": {"message": self.message}}, self.status)
        if self.body is not None:
            answer = web.Response(status=self.status, text=self.body)
        if self.retry_after is not None:
            answer.headers["Retry-After"] = f"{self.retry_after:g}"
        return answer

    async def instead(self, met: Met, event: Event, rest: Items) -> Items:
        yield error_event(self.message, self.status)
        yield DONE
        await rest.aclose()


def failed_update(
    status: int = 400, message: str = "Failed to update weights: a fault of the test"
) -> Answer:
    """Make the refusal of an update; "Failed to get ..." leaves the old weights intact."""
    content = {"success": False, "message": message, "error_message": message}
    return Answer(routes=UPDATES, status=status, content=content)


@dataclass(frozen=True, kw_only=True)
class Delay(Fault):
    """The call is carried out `seconds` late, or the stream is silent for `seconds`.

    Attributes:
        piece: if set, the answer is not late but arrives in pieces of `piece` bytes, `seconds`
            apart.
    """

    kind: ClassVar[str] = "delay"
    seconds: float = math.inf
    piece: int | None = None

    async def before(self, met: Met) -> web.StreamResponse | None:
        if self.piece is None and met.fire():
            await wait(self.seconds)
        return None

    def changes_answer(self) -> bool:
        return self.piece is not None

    async def pieces(self, met: Met, body: bytes) -> AsyncGenerator[bytes]:
        size = self.piece or 1
        for start in range(0, len(body), size):
            await asyncio.sleep(self.seconds)
            yield body[start : start + size]

    async def instead(self, met: Met, event: Event, rest: Items) -> Items:
        if self.piece is None:
            await wait(self.seconds)
            yield event
            return
        async for piece in self.pieces(met, frame_item(event)):
            yield piece
        async for item in rest:
            async for piece in self.pieces(met, frame_item(item)):
                yield piece


@dataclass(frozen=True, kw_only=True)
class Cut(Fault):
    """The connection is reset (TCP RST) before the answer, or the stream ends unfinished.

    Attributes:
        clean: the stream ends as if it were complete, without a reset.
    """

    kind: ClassVar[str] = "cut"
    clean: bool = False

    async def before(self, met: Met) -> web.StreamResponse | None:
        if met.fire():
            raise Broken
        return None

    async def instead(self, met: Met, event: Event, rest: Items) -> Items:
        await rest.aclose()
        if not self.clean:
            raise Broken
        return
        yield


@dataclass(frozen=True, kw_only=True)
class LoseAnswer(Fault):
    """The call is carried out; then its answer is lost.

    Attributes:
        silent: the connection stays open, without an answer; else it is reset.
    """

    kind: ClassVar[str] = "lose-answer"
    silent: bool = False

    def changes_answer(self) -> bool:
        return True

    async def pieces(self, met: Met, body: bytes) -> AsyncGenerator[bytes]:
        if self.silent:
            await wait(math.inf)
        raise Broken
        yield


@dataclass(frozen=True, kw_only=True)
class Corrupt(Fault):
    """The first event that fits is changed.

    Attributes:
        change: makes the items that take its place; returns None if the event does not fit. None
            among the items stands for the item that follows in the stream.
    """

    kind: ClassVar[str] = "corrupt"
    after_tokens: int | None = 0
    change: Change = few_logprobs

    def fits(self, event: Event) -> bool:
        return self.change(event) is not None

    async def instead(self, met: Met, event: Event, rest: Items) -> Items:
        for item in self.change(event) or ():
            if item is not None:
                yield item
            elif (following := await anext(rest, None)) is not None:
                yield following


@dataclass(frozen=True, kw_only=True)
class Garbage(Fault):
    """Bytes that are not what SGLang sends replace an answer, or come as events of a stream.

    Attributes:
        what: "noise" is an event of random bytes; "raw" random bytes that are not an event, so
            that the next event starts in the middle of their line; "half" JSON that is cut in half;
            "endless" one event (or answer) of `size` bytes; "comments" lines without an event.
        size: number of bytes.
    """

    kind: ClassVar[str] = "garbage"
    what: Literal["noise", "raw", "half", "endless", "comments"] = "noise"
    size: int = 256

    def changes_answer(self) -> bool:
        return True

    async def pieces(self, met: Met, body: bytes) -> AsyncGenerator[bytes]:
        if self.what == "half":
            yield body[: len(body) // 2]
        elif self.what in ("noise", "raw"):
            yield met.random_bytes(self.size)
        else:
            for piece in _flood(b"[", b"1,", self.size):
                yield piece

    async def instead(self, met: Met, event: Event, rest: Items) -> Items:
        whole = frame_item(event)
        match self.what:
            case "noise":
                yield b"data: " + met.random_bytes(self.size) + b"\n\n"
                yield event
            case "raw":
                yield met.random_bytes(self.size)
                yield event
            case "half":
                yield whole[: len(whole) // 2] + b"\n\n"
            case "endless":
                for piece in _flood(b'data: {"output_ids": [', b"1,", self.size):
                    yield piece
                await rest.aclose()
            case "comments":
                for piece in _flood(b"", b": nothing\n\n", self.size):
                    yield piece
                yield event


def _flood(start: bytes, repeated: bytes, size: int) -> Iterator[bytes]:
    """Yield `size` bytes in pieces: `start`, then `repeated` again and again."""
    yield start
    piece = repeated * (_PIECE // len(repeated))
    for sent in range(0, size - len(start), len(piece)):
        yield piece[: size - len(start) - sent]


@dataclass(frozen=True, kw_only=True)
class EngineWide(Fault):
    """A fault of the whole engine: once at the time `at`, or at a call if it has routes."""

    routes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Hang(EngineWide):
    """For `seconds` the engine decodes at `rate` of its speed; at 0 it also answers no call."""

    kind: ClassVar[str] = "hang"
    seconds: float = math.inf
    rate: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Restart(EngineWide):
    """Every connection is reset and nothing listens; after `seconds` a new process does.

    It has the weights that the first one started with (version 0), unless it `keeps_weights`.
    """

    kind: ClassVar[str] = "restart"
    seconds: float = math.inf
    keeps_weights: bool = False


KINDS = (Answer, Delay, Hang, Cut, Corrupt, Garbage, Restart, LoseAnswer)
"""Every kind of fault."""
