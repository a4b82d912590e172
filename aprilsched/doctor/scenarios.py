"""The actions on a server, with notes of what was seen; each is bounded and is taken back."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from aprilsched.doctor.client import Client, until
from aprilsched.doctor.findings import Notes
from aprilsched.doctor.pauses import in_place, retract
from aprilsched.errors import EngineError

__all__ = ["SCENARIOS", "Scenario"]

SHORT, LONG = 24, 192
CACHED = 257
"""Number of prompt tokens; a cache with pages of 256 tokens can then share one page."""
FIRST_SECONDS = 10.0
LEFT_SECONDS = 3.0

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


SCENARIOS: Sequence[tuple[str, Scenario]] = (
    ("describe", describe),
    ("health", health),
    ("responses", responses),
    ("cache_keys", cache_keys),
    ("aborts", aborts),
    ("hanging_up", hanging_up),
    ("retract", retract),
    ("in_place", in_place),
)


async def run(client: Client, notes: Notes, seconds: float) -> None:
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
