"""Examines one server: opens it, runs the scenarios, and applies the checks."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from base64 import b64decode
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from aprilsched.companions import Companion
from aprilsched.doctor.checks import CHECKS, Finding, Notes, PauseNotes
from aprilsched.doctor.client import INTERVAL, Client, Generation, until
from aprilsched.doctor.proofs import REFIT_SECONDS, prove, seam
from aprilsched.doctor.vllm import examine_vllm
from aprilsched.engines.addresses import VLLM
from aprilsched.engines.base import PauseMode
from aprilsched.engines.http import HttpLimits, ServerAddress, Transport
from aprilsched.engines.server import despite_cancellation, release
from aprilsched.engines.sglang import SGLangEngine
from aprilsched.errors import EngineError

SCENARIO_SECONDS = 40.0
LAST_SECONDS = 30.0
_LIMITS = HttpLimits(control_timeout=10.0)


async def examine(
    url: str, *, admin_key: str | None = None, api_key: str | None = None, refit: str | None = None
) -> list[Finding]:
    """Run every check on the server at `url`; the findings are in the order of the table.

    With `refit`, a folder of other weights of the model that the server can read, a server that
    nobody else uses is refitted with them and back.

    Raises:
        EngineError: if it cannot be reached or used, is another program than its URL says, or does
            not accept the key.
        ConfigError: if `url` or a key is not valid.
    """
    if url.startswith(VLLM):
        return await examine_vllm(url.removeprefix(VLLM), api_key=api_key, refit=refit)
    engine = SGLangEngine(
        url, admin_key=admin_key, api_key=api_key, limits=_LIMITS, stream_interval=INTERVAL
    )
    await engine.open()
    await engine.close()
    notes = Notes(facts=engine.facts, version=_version(engine))
    address = ServerAddress.parse(url)
    transport = Transport(
        address.name, address.url, admin_key=admin_key, api_key=api_key, limits=_LIMITS
    )
    await transport.open()
    client = Client(address.name, transport, _LIMITS, engine.facts)
    try:
        try:
            await run_scenarios(client, notes, SCENARIO_SECONDS)
            try:
                async with asyncio.timeout(REFIT_SECONDS if refit else SCENARIO_SECONDS):
                    await engine.open()
                    await _proofs(engine, client, notes, refit)
            except (EngineError, TimeoutError, ValueError) as error:
                notes.trouble["proofs"] = f"broke off ({str(error) or 'no answer'})"
            finally:
                await engine.close()
        finally:
            await despite_cancellation(_last(client, notes))
    finally:
        await transport.close()
    return [check.finding(notes) for check in CHECKS]


async def _proofs(engine: SGLangEngine, client: Client, notes: Notes, folder: str | None) -> None:
    """What the scheduler's own adapter shows: rows at a seam, and a refit if the server is ours
    alone, amid a response with routed experts if it can be."""
    told = notes.returned or {}
    companion = None
    if rows := told.get("routed_experts"):
        values = len(b64decode(rows)) // 4 // (told["prompt_tokens"] + SHORT - 1)
        companion = Companion("routed_experts", "int32", (values,))
        notes.seam = await seam(engine, companion)
    if folder is not None and notes.others == 0 and not notes.paused_before:
        await client.idle(LEFT_SECONDS)
        amid = engine.capabilities.flush_while_paused
        await prove(engine, folder, notes.refit, companion if amid else None)


def _version(engine: SGLangEngine) -> tuple[int, int, int]:
    return release(engine.facts.capabilities.server.removeprefix("SGLang "))


async def _last(client: Client, notes: Notes) -> None:
    """Restore the server in bounded time without raising; a failure shows as a finding."""
    with contextlib.suppress(EngineError, TimeoutError, msgspec.DecodeError):
        async with asyncio.timeout(LAST_SECONDS):
            await afterwards(client, notes)


# --- scenarios -----------------------------------------------------------------------------------

# The actions on a server, with notes of what was seen; each is bounded and is taken back.
#
# A server is paused only briefly, and only if no request of others is on it. A pause is continued
# in a ``finally`` here, and once more when the client takes everything back.

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
"""Number of times that a response is paused until one is not over before that. On a busy machine
its events arrive late, and then a server that can pause seemed not to."""
OVER = "a response of ours was over before it could be paused"

Scenario = Callable[[Client, Notes], Awaitable[None]]


async def describe(client: Client, notes: Notes) -> None:
    """Ask the server about itself."""
    notes.info = msgspec.json.decode((await client.get("server_info")).body)
    answer = await client.get("openapi.json")
    if answer.status == 200:
        schema = msgspec.json.decode(answer.body)
        notes.paths = frozenset(schema.get("paths", {}))
        schemas = schema.get("components", {}).get("schemas", {})
        notes.schemas = {name: body.get("properties", {}) for name, body in schemas.items()}
    notes.paused_before = (await client.get("ready")).status == 503
    notes.others = await client.running()
    if notes.others:
        # The last answer of a request may arrive before the loads show that it has ended.
        await client.idle(1.0)
        notes.others = await client.running()


async def health(client: Client, notes: Notes) -> None:
    """Ask /health, unless the server is paused, where the call would hang."""
    if not notes.paused_before:
        notes.health_status = (await client.get("health")).status


async def responses(client: Client, notes: Notes) -> None:
    """Get the same short response twice, whole and streamed."""
    if notes.paused_before:
        return
    notes.whole = await client.whole(SHORT)
    generation = client.stream(SHORT)
    await until(lambda: generation.done, FIRST_SECONDS)
    notes.events = generation.events


async def companions(client: Client, notes: Notes) -> None:
    """Ask for all that it says it can return beside tokens."""
    if not notes.paused_before:
        asked: dict[str, Any] = {f"return_{name}": True for name in notes.returns}
        if notes.last_hidden:
            asked["return_hidden_states"] = "last"
        notes.returned = (await client.whole(SHORT, **asked))["meta_info"]


async def cache_keys(client: Client, notes: Notes) -> None:
    """Send one long prompt under a cache key, under it again, and under another."""
    if notes.paused_before:
        return
    one, other = uuid.uuid4().hex, uuid.uuid4().hex
    for key in (one, one, other):
        answer = await client.whole(1, prompt_tokens=CACHED, extra_key=key)
        notes.cached.append(int(answer["meta_info"]["cached_tokens"]))


async def aborts(client: Client, notes: Notes) -> None:
    """Abort a running request of ours and an unknown one; send a rid that is in use."""
    notes.unknown_abort_status = (await client.post("abort_request", {"rid": "0" * 32})).status
    if notes.paused_before:
        return
    generation = client.stream(LONG)
    if not await until(lambda: bool(generation.events), FIRST_SECONDS):
        return
    notes.duplicate_status = await client.again(generation)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await client.post("abort_request", {"rid": generation.rid})
    if await until(lambda: generation.done, FIRST_SECONDS):
        notes.abort_seconds = loop.time() - began
        notes.aborted = generation.events


async def hanging_up(client: Client, notes: Notes) -> None:
    """Disconnect from a stream; its end is visible only on a server without others' requests."""
    if notes.paused_before or notes.others != 0 or not await client.idle(LEFT_SECONDS):
        return
    generation = client.stream(LONG)
    await until(lambda: bool(generation.events), FIRST_SECONDS)
    loop = asyncio.get_running_loop()
    began = loop.time()
    if generation.done or generation.task is None:
        return
    generation.task.cancel()
    await asyncio.wait([generation.task])
    if await client.idle(LEFT_SECONDS):
        notes.left_seconds = loop.time() - began
    await client.post("abort_request", {"rid": generation.rid})


async def afterwards(client: Client, notes: Notes) -> None:
    """Take everything back, and note the state of the server."""
    await client.take_back()
    if notes.others == 0:
        await client.idle(LEFT_SECONDS)
    info = msgspec.json.decode((await client.get("model_info")).body)
    notes.label_after = info.get("weight_version", notes.facts.label)
    notes.paused_after = (await client.get("ready")).status == 503
    notes.running_after = await client.running()


async def retract(client: Client, notes: Notes) -> None:
    """Pause with retract, flush and continue around a stream; send a request meanwhile."""
    for _ in range(ATTEMPTS):
        notes.retract = noted = PauseNotes()
        await _retract(client, notes, noted)
        if not _too_late(noted):
            break


async def in_place(client: Client, notes: Notes) -> None:
    """Pause in place and continue around a stream; abort another stream in between."""
    for _ in range(ATTEMPTS):
        notes.in_place = noted = PauseNotes()
        await _in_place(client, notes, noted)
        over_before_abort = noted.finish == "length" and noted.abort_finish in (None, "length")
        if not (over_before_abort or _too_late(noted)):
            break


def _too_late(noted: PauseNotes) -> bool:
    """Whether a response of ours had all its tokens before the pause took effect."""
    whole = noted.finish == "length" and not noted.tokens_during
    return noted.why_not == OVER or (whole and bool(noted.ended_during))


async def _retract(client: Client, notes: Notes, noted: PauseNotes) -> None:
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
        await _continue(client)
    await _end(noted, stream, reference)
    noted.held_completed = await until(lambda: held.done, END_SECONDS) and held.finish == "length"


async def _in_place(client: Client, notes: Notes, noted: PauseNotes) -> None:
    reference = await _reference(client, notes, noted)
    if reference is None:
        return
    other = client.stream(PAUSED_TOKENS)
    stream = await _paused(client, noted, "in_place", beside=1)
    if stream is None:
        return
    try:
        before = None if other.done else other.tokens
        await client.post("abort_request", {"rid": other.rid})
        await _watch(client, noted, stream)
        noted.abort_ended_during = None if before is None else other.done
    finally:
        await _continue(client)
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
        generation = client.stream(PAUSED_TOKENS)
        await until(lambda: generation.done, END_SECONDS)
        return generation.ids
    return None


async def _paused(
    client: Client, noted: PauseNotes, mode: PauseMode, *, beside: int = 0
) -> Generation | None:
    """Pause during a stream of ours and return it; None if that did not succeed.

    `beside` is the number of our other running requests.
    """
    stream = client.stream(PAUSED_TOKENS)
    if not await until(lambda: bool(stream.events), END_SECONDS) or stream.done:
        noted.why_not = OVER
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
        await _continue(client)
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


async def _continue(client: Client) -> None:
    await client.post("continue_generation", {})
    client.paused_by_us = False


async def _end(noted: PauseNotes, stream: Generation, reference: list[int]) -> None:
    await until(lambda: stream.done, END_SECONDS)
    noted.finish = stream.finish
    noted.same_tokens = stream.ids == reference


SCENARIOS: Sequence[tuple[str, Scenario]] = (
    ("describe", describe),
    ("health", health),
    ("responses", responses),
    ("companions", companions),
    ("cache_keys", cache_keys),
    ("aborts", aborts),
    ("hanging_up", hanging_up),
    ("retract", retract),
    ("in_place", in_place),
)


async def run_scenarios(client: Client, notes: Notes, seconds: float) -> None:
    """Run all scenarios, each within `seconds`; one that breaks off leaves a note."""
    for name, scenario in SCENARIOS:
        try:
            async with asyncio.timeout(seconds):
                await scenario(client, notes)
        except TimeoutError:
            notes.trouble[name] = f"was not over after {seconds:g} s"
        except (EngineError, msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            notes.trouble[name] = f"broke off ({error})"
        finally:
            with contextlib.suppress(EngineError):  # It is tried once more at the end.
                await client.take_back()
