"""The doctor's own calls and short generations, which it can all take back."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from aprilsched.engines.http import (
    Allowance,
    Answer,
    EventSplitter,
    HttpLimits,
    Transport,
    inflow_of,
)
from aprilsched.engines.sglang.probe import ServerFacts
from aprilsched.errors import EngineError

CALL_SECONDS = 10.0
_ANY = tuple(range(200, 600))
_PROMPT_TOKENS = 8
_POLL_SECONDS = 0.02
INTERVAL = 8
"""Number of tokens between two events that a request asks for, where it can."""


async def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for `condition`; whether it became true within `seconds`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not condition():
        if loop.time() >= end:
            return False
        await asyncio.sleep(_POLL_SECONDS)
    return True


class Generation:
    """One generation of ours, which a task reads."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.events: list[dict[str, Any]] = []
        self.task: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        return self.task is None or self.task.done()

    @property
    def tokens(self) -> int:
        """Number of tokens that have arrived."""
        metas = [event.get("meta_info", {}) for event in self.events]
        return max((int(meta.get("completion_tokens", 0)) for meta in metas), default=0)

    @property
    def ids(self) -> list[int]:
        """The ids of the tokens, from incremental or cumulative events."""
        found: list[int] = []
        for event in self.events:
            ids, total = event.get("output_ids", []), event["meta_info"]["completion_tokens"]
            found = ids if len(ids) == total else found + ids
        return found

    @property
    def finish(self) -> str | None:
        """The reason for which it ended; None before its end."""
        reason = self.events[-1].get("meta_info", {}).get("finish_reason") if self.events else None
        return None if reason is None else str(reason.get("type"))


class Client:
    """The calls to a server under examination; :meth:`take_back` undoes what they did."""

    def __init__(
        self, name: str, transport: Transport, limits: HttpLimits, facts: ServerFacts
    ) -> None:
        self._name = name
        self._transport = transport
        self._limits = limits
        self._facts = facts
        self._generations: list[Generation] = []
        self.paused_by_us = False

    async def get(self, path: str, seconds: float = CALL_SECONDS) -> Answer:
        """Make a call that changes nothing."""
        return await self._transport.call("GET", path, timeout=seconds, accept=_ANY, admin=False)

    async def post(self, path: str, body: object = None) -> Answer:
        """Make a control call."""
        return await self._transport.call("POST", path, body, timeout=CALL_SECONDS, accept=_ANY)

    async def running(self) -> int | None:
        """Number of requests that run or wait; None where the server does not report it."""
        answer = await self._transport.call(
            "GET", "v1/loads", timeout=CALL_SECONDS, accept=_ANY, admin=False
        )
        try:
            ranks = msgspec.json.decode(answer.body)["loads"]
            return sum(int(r["num_running_reqs"]) + int(r["num_waiting_reqs"]) for r in ranks)
        except (msgspec.DecodeError, KeyError, TypeError, ValueError):
            return None

    async def idle(self, seconds: float, most: int = 0) -> bool:
        """Wait until at most `most` requests are on the server; whether that happened in time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            running = await self.running()
            if running is not None and running <= most:
                return True
            if running is None or loop.time() >= end:
                return False
            await asyncio.sleep(_POLL_SECONDS)

    def body(self, tokens: int, rid: str, *, prompt_tokens: int = _PROMPT_TOKENS) -> dict[str, Any]:
        """A greedy request with token ids that every model has."""
        vocab = self._facts.vocab_size or _PROMPT_TOKENS
        params: dict[str, Any] = {
            "max_new_tokens": tokens,
            "temperature": 0.0,
            "top_k": 1,
            "ignore_eos": True,
        }
        if self._facts.stream_interval:
            params["stream_interval"] = INTERVAL
        ids = [index % vocab for index in range(prompt_tokens)]
        return {"input_ids": ids, "sampling_params": params, "rid": rid, "return_logprob": True}

    async def whole(
        self, tokens: int, *, prompt_tokens: int = _PROMPT_TOKENS, **fields: object
    ) -> dict[str, Any]:
        """Get a response that is not streamed; `fields` are further ones of the request."""
        body = self.body(tokens, uuid.uuid4().hex, prompt_tokens=prompt_tokens) | fields
        answer = await self._transport.call(
            "POST",
            "generate",
            body,
            timeout=CALL_SECONDS,
            repeatable=False,
            admin=False,
        )
        return msgspec.json.decode(answer.body, type=dict[str, Any])

    async def again(self, generation: Generation) -> int:
        """Send a second request under the rid of a running one; return its status.

        It is not streamed: SGLang aborts a rid two seconds after it refused a stream of that rid.
        """
        body = self.body(1, generation.rid)
        answer = await self._transport.call(
            "POST",
            "generate",
            body,
            timeout=CALL_SECONDS,
            accept=_ANY,
            repeatable=False,
            admin=False,
        )
        return answer.status

    def stream(self, tokens: int) -> Generation:
        """Start a streamed response."""
        generation = Generation(uuid.uuid4().hex)
        self._generations.append(generation)
        generation.task = asyncio.create_task(self._read(generation, tokens))
        return generation

    async def _read(self, generation: Generation, tokens: int) -> None:
        body = {**self.body(tokens, generation.rid), "stream": True}
        with contextlib.suppress(aiohttp.ClientError, OSError, EngineError, msgspec.DecodeError):
            async with self._transport.stream("generate", body) as response:
                allowance = Allowance(
                    self._name,
                    generation.rid,
                    self._limits.max_answer_bytes,
                    inflow=inflow_of(response),
                )
                splitter = EventSplitter(allowance)
                async for data in response.content.iter_any():
                    payloads = [p for p in splitter.feed(data) if p != b"[DONE]"]
                    generation.events += [msgspec.json.decode(p) for p in payloads]

    async def take_back(self) -> None:
        """Continue a pause of ours, and end every generation of ours."""
        if self.paused_by_us:
            await self.post("continue_generation", {})
            self.paused_by_us = False
        for generation in self._generations:
            if not generation.done:
                with contextlib.suppress(EngineError):
                    await self.post("abort_request", {"rid": generation.rid})
                if not await until(lambda g=generation: g.done, 2.0) and generation.task:
                    generation.task.cancel()
                    await asyncio.wait([generation.task])
