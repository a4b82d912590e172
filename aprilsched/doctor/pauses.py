"""The scenarios that pause a server, briefly, and only if no request of others is on it.

A pause is continued in a ``finally`` here, and once more when the client takes everything back.
"""

from __future__ import annotations

import asyncio

from aprilsched.doctor.client import Client, Generation, until
from aprilsched.doctor.findings import Notes, PauseNotes
from aprilsched.engines.base import PauseMode

__all__ = ["in_place", "retract"]

TOKENS = 192
SETTLE_SECONDS = 0.3
"""Time in which a pause takes effect after its answer, and in which a last event may arrive."""
WATCH_SECONDS = 0.6
END_SECONDS = 10.0


async def retract(client: Client, notes: Notes) -> None:
    """Pause with retract, flush and continue around a stream; send a request meanwhile."""
    noted = notes.retract
    reference = await _reference(client, notes, noted)
    stream = await _paused(client, noted, "retract") if reference is not None else None
    if reference is None or stream is None:
        return
    try:
        await _watch(client, noted, stream)
        held = client.stream(4)
        noted.flush_status = (await client.post("flush_cache")).status
        await asyncio.sleep(SETTLE_SECONDS)
        noted.held_silent = not held.events
    finally:
        await _go_on(client)
    await _end(noted, stream, reference)
    noted.held_completed = await until(lambda: held.done, END_SECONDS) and held.finish == "length"


async def in_place(client: Client, notes: Notes) -> None:
    """Pause in place and continue around a stream; abort another stream in between."""
    noted = notes.in_place
    reference = await _reference(client, notes, noted)
    if reference is None:
        return
    other = client.stream(TOKENS)
    stream = await _paused(client, noted, "in_place", beside=1)
    if stream is None:
        return
    try:
        before = None if other.done else other.tokens
        await client.post("abort_request", {"rid": other.rid})
        await _watch(client, noted, stream)
        noted.abort_ended_during = None if before is None else other.done
    finally:
        await _go_on(client)
    await _end(noted, stream, reference)
    if before is not None and await until(lambda: other.done, END_SECONDS):
        noted.abort_finish, noted.abort_tokens = other.finish, other.tokens - before


async def _reference(client: Client, notes: Notes, noted: PauseNotes) -> list[int] | None:
    """The tokens of the response without a pause; None if this server must not be paused."""
    if notes.paused_before:
        noted.why_not = "somebody else has paused it"
    elif notes.others is None:
        noted.why_not = "it does not report whether others' requests are on it"
    elif notes.others or not await client.idle(2.0):
        noted.why_not = "others' requests are on it"
    else:
        generation = client.stream(TOKENS)
        await until(lambda: generation.done, END_SECONDS)
        return generation.ids
    return None


async def _paused(
    client: Client, noted: PauseNotes, mode: PauseMode, *, beside: int = 0
) -> Generation | None:
    """Pause during a stream of ours and return it; None if that did not succeed.

    `beside` is the number of our other running requests.
    """
    stream = client.stream(TOKENS)
    if not await until(lambda: bool(stream.events), END_SECONDS) or stream.done:
        noted.why_not = "a response of ours was over before it could be paused"
        return None
    if not await client.idle(0.0, most=1 + beside):
        noted.why_not = "others' requests are on it"
        return None
    loop = asyncio.get_running_loop()
    began = loop.time()
    client.paused_by_us = True
    answer = await client.post("pause_generation", {"mode": mode})
    noted.pause_seconds = loop.time() - began
    if answer.status != 200:
        noted.why_not = f"pause_generation answered {answer.status}"
        await _go_on(client)
        return None
    return stream


async def _watch(client: Client, noted: PauseNotes, stream: Generation) -> None:
    await asyncio.sleep(SETTLE_SECONDS)
    before = stream.tokens
    await asyncio.sleep(WATCH_SECONDS)
    noted.ended_during = stream.done
    noted.tokens_during = stream.tokens - before
    noted.ready_status = (await client.get("ready")).status
    noted.running_told = await client.running()


async def _go_on(client: Client) -> None:
    await client.post("continue_generation", {})
    client.paused_by_us = False


async def _end(noted: PauseNotes, stream: Generation, reference: list[int]) -> None:
    await until(lambda: stream.done, END_SECONDS)
    noted.finish = stream.finish
    noted.same_tokens = stream.ids == reference
