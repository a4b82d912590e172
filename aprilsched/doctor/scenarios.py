"""The experiments on an SGLang server that more than one check asks for.

A server is paused only briefly, and only if no request of others is on it. A pause is continued in
a ``finally`` here, and once more when the server takes everything back.
"""

from __future__ import annotations

import asyncio
import uuid
from base64 import b64decode
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from numpy.typing import NDArray

from aprilsched.companions import Companion
from aprilsched.doctor import proofs
from aprilsched.doctor.client import Generation, Server, until
from aprilsched.doctor.findings import LeftOut, left_out
from aprilsched.engines.base import PauseMode
from aprilsched.testing.contract import Stream

T = TypeVar("T")

SHORT, LONG = 24, 192
CACHED = 257
"""Number of prompt tokens; a cache with pages of 256 tokens can then share one page."""
FIRST_SECONDS = 10.0
LEFT_SECONDS = 3.0
PAUSED_TOKENS = 192
SETTLE_SECONDS = 0.3
"""Time in which a pause takes effect after its answer, and in which a last event may arrive."""
WATCH_SECONDS = 0.6
END_SECONDS = 10.0
ATTEMPTS = 3
"""Number of times that a response is paused, aborted or left until one is not over before that. On
a busy machine its events arrive late, and then a server that can do it seemed not to."""
SAW_NOTHING = "the probe saw nothing"


class TooLate(LeftOut):
    """A response of ours was over before anything could be done to it."""


async def whole(server: Server) -> dict[str, Any]:
    """A short response that is not streamed."""
    return await server.whole(SHORT)


async def streamed(server: Server) -> list[dict[str, Any]]:
    """The events of the same response, streamed."""
    generation = server.stream(SHORT)
    await until(lambda: generation.done, FIRST_SECONDS)
    if not generation.events:
        raise left_out(SAW_NOTHING)
    return generation.events


async def returned(server: Server) -> dict[str, Any]:
    """The meta_info of a response for which everything was asked that the server can return."""
    asked: dict[str, Any] = {f"return_{name}": True for name in server.returns}
    if server.last_hidden:
        asked["return_hidden_states"] = "last"
    return (await server.whole(SHORT, **asked))["meta_info"]


async def cached(server: Server) -> list[int]:
    """Number of cached tokens of one long prompt: under a cache key, under it again, under
    another."""
    one, other = uuid.uuid4().hex, uuid.uuid4().hex
    answers = [
        await server.whole(1, prompt_tokens=CACHED, extra_key=key) for key in (one, one, other)
    ]
    return [int(answer["meta_info"]["cached_tokens"]) for answer in answers]


@dataclass(frozen=True, kw_only=True, slots=True)
class Aborted:
    """What an abort has shown.

    Attributes:
        last: the last event of the stream that was aborted.
        seconds: from the abort to its end.
        duplicate: status of a second request of the same rid, while it ran.
    """

    last: dict[str, Any]
    seconds: float
    duplicate: int


async def aborted(server: Server) -> Aborted:
    """Abort a running request of ours whose rid is asked for once more."""

    def too_late(found: Aborted) -> bool:
        reason: dict[str, Any] = found.last["meta_info"]["finish_reason"] or {}
        return reason.get("type") == "length"

    return await _in_time(server, _aborted, too_late)


async def _aborted(server: Server) -> Aborted:
    generation = await _running(server)
    duplicate = await server.again(generation)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await server.post("abort_request", {"rid": generation.rid})
    if not await until(lambda: generation.done, FIRST_SECONDS):
        raise left_out(SAW_NOTHING)
    return Aborted(last=generation.events[-1], seconds=loop.time() - began, duplicate=duplicate)


async def left(server: Server) -> float | None:
    """Disconnect from a stream; returns the seconds until its request had left the server, None if
    it stays."""
    if server.others != 0 or not await server.idle(LEFT_SECONDS):
        # Its end is visible only on a server without others' requests.
        raise left_out("others' requests are on it, or it does not report its load")
    return await _in_time(server, _left, lambda _: False)


async def _left(server: Server) -> float | None:
    generation = await _running(server)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await generation.leave()
    seconds = loop.time() - began if await server.idle(LEFT_SECONDS) else None
    await server.post("abort_request", {"rid": generation.rid})
    return seconds


async def _running(server: Server) -> Generation:
    """A response of ours that is not over."""
    generation = server.stream(LONG)
    if not await until(lambda: bool(generation.events), FIRST_SECONDS):
        raise left_out(SAW_NOTHING)
    if generation.done:
        raise TooLate(left_out("a response of ours was over before anything was done").verdict)
    return generation


# --- as the scheduler reads them -----------------------------------------------------------------


async def _routed(server: Server) -> Companion:
    """The routed experts, as many for each token as the server returns."""
    told = await server.seen(returned)
    if not (rows := told.get("routed_experts")):
        raise left_out(SAW_NOTHING)
    values = len(b64decode(rows)) // 4 // (told["prompt_tokens"] + SHORT - 1)
    return Companion("routed_experts", "int32", (values,))


async def seam(server: Server) -> list[NDArray[Any]]:
    """See :func:`aprilsched.doctor.proofs.seam`."""
    server.check_unpaused()
    return await proofs.seam(server.engine, await server.seen(_routed))


async def refit(server: Server) -> tuple[list[Stream], list[NDArray[Any]]]:
    """See :func:`aprilsched.doctor.proofs.prove`. Other weights are loaded amid a response with
    routed experts, if it can be."""
    if server.refit is None or server.others != 0 or server.paused_before:
        raise LeftOut(proofs.NOT_ASKED)
    await server.idle(LEFT_SECONDS)
    companion = None
    if "routed_experts" in server.returns and server.engine.capabilities.flush_while_paused:
        companion = await server.seen(_routed)
    return await proofs.prove(server.engine, server.refit, companion)


# --- pauses --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Paused:
    """What a pause has shown with a stream of ours in it.

    Attributes:
        seconds: from the call to its answer.
        tokens: number of tokens that arrived while it was paused.
        ended: whether the stream ended meanwhile.
        ready: status of /ready meanwhile.
        running: number of requests that it told meanwhile.
        finish: why the stream ended after the continue; None if it did not.
        same: whether it has the tokens that it has without a pause.
    """

    seconds: float
    tokens: int
    ended: bool
    ready: int
    running: int | None
    finish: str | None
    same: bool

    @property
    def too_late(self) -> bool:
        """Whether the stream had all its tokens before the pause took effect."""
        return self.finish == "length" and not self.tokens and self.ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Retracted:
    """A pause with retract: the status of a flush in it, and of a request that was sent in it
    whether it was silent, and whether it was answered after the continue."""

    pause: Paused
    flush: int
    held_silent: bool
    held_completed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class InPlace:
    """A pause in place: whether another stream, aborted in it, ended before the continue, why it
    ended, and the number of its tokens after the abort; None if it did not end or was over."""

    pause: Paused
    abort: tuple[bool, str | None, int] | None


async def retract(server: Server) -> Retracted:
    """Pause with retract, flush and continue around a stream; send a request meanwhile."""
    return await _in_time(server, _retract, lambda found: found.pause.too_late)


async def in_place(server: Server) -> InPlace:
    """Pause in place and continue around a stream; abort another stream in between."""

    def too_late(found: InPlace) -> bool:
        over = found.abort is None or found.abort[1] == "length"
        return found.pause.too_late or (found.pause.finish == "length" and over)

    return await _in_time(server, _in_place, too_late)


async def _in_time(
    server: Server, attempt: Callable[[Server], Awaitable[T]], too_late: Callable[[T], bool]
) -> T:
    for _ in range(ATTEMPTS - 1):
        try:
            found = await attempt(server)
        except TooLate:
            continue
        if not too_late(found):
            return found
    return await attempt(server)


async def _retract(server: Server) -> Retracted:
    reference = await _reference(server)
    stream, seconds = await _pause(server, "retract")
    try:
        watched = await _watch(server, stream)
        held = server.stream(4)
        flush = (await server.post("flush_cache")).status
        await asyncio.sleep(SETTLE_SECONDS)
        silent = not held.events
    finally:
        await _continue(server)
    pause = await _ended(stream, reference, seconds, watched)
    completed = await until(lambda: held.done, END_SECONDS) and held.finish == "length"
    return Retracted(pause=pause, flush=flush, held_silent=silent, held_completed=completed)


async def _in_place(server: Server) -> InPlace:
    reference = await _reference(server)
    other = server.stream(PAUSED_TOKENS)
    stream, seconds = await _pause(server, "in_place", beside=1)
    try:
        before = None if other.done else other.tokens
        await server.post("abort_request", {"rid": other.rid})
        watched = await _watch(server, stream)
        during = other.done
    finally:
        await _continue(server)
    pause = await _ended(stream, reference, seconds, watched)
    abort = None
    if before is not None and await until(lambda: other.done, END_SECONDS):
        abort = (during, other.finish, other.tokens - before)
    return InPlace(pause=pause, abort=abort)


async def _reference(server: Server) -> list[int]:
    """The tokens of the response without a pause, on a server that may be paused."""
    server.check_unpaused()
    if server.others is None:
        raise left_out("it does not report whether others' requests are on it")
    if server.others or not await server.idle(2.0):
        raise left_out("others' requests are on it")
    generation = server.stream(PAUSED_TOKENS)
    await until(lambda: generation.done, END_SECONDS)
    return generation.ids


async def _pause(server: Server, mode: PauseMode, *, beside: int = 0) -> tuple[Generation, float]:
    """Pause during a stream of ours; returns it, and the seconds until the answer.

    `beside` is the number of our other running requests.
    """
    stream = server.stream(PAUSED_TOKENS)
    if not await until(lambda: bool(stream.events), END_SECONDS) or stream.done:
        raise TooLate(left_out("a response of ours was over before it could be paused").verdict)
    if not await server.idle(0.0, most=1 + beside):
        raise left_out("others' requests are on it")
    loop = asyncio.get_running_loop()
    began = loop.time()
    server.paused_by_us = True
    answer = await server.post("pause_generation", {"mode": mode})
    seconds = loop.time() - began
    if answer.status != 200:
        await _continue(server)
        raise left_out(f"pause_generation answered {answer.status}")
    return stream, seconds


async def _watch(server: Server, stream: Generation) -> dict[str, Any]:
    await asyncio.sleep(SETTLE_SECONDS)
    before = stream.tokens
    await asyncio.sleep(WATCH_SECONDS)
    return {
        "ended": stream.done,
        "tokens": stream.tokens - before,
        "ready": (await server.get("ready")).status,
        "running": await server.running(),
    }


async def _continue(server: Server) -> None:
    await server.post("continue_generation", {})
    server.paused_by_us = False


async def _ended(
    stream: Generation, reference: list[int], seconds: float, watched: dict[str, Any]
) -> Paused:
    await until(lambda: stream.done, END_SECONDS)
    same = stream.ids == reference
    return Paused(seconds=seconds, finish=stream.finish, same=same, **watched)
