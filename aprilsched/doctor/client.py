"""An SGLang server under examination: calls and short generations, which can all be taken back."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp
import msgspec

from aprilsched.doctor.findings import Examined, left_out
from aprilsched.engines.http import (
    Allowance,
    Answer,
    EventSplitter,
    HttpLimits,
    Transport,
    inflow_of,
)
from aprilsched.engines.server import release
from aprilsched.engines.sglang import SGLangEngine
from aprilsched.errors import EngineError

CALL_SECONDS = 10.0
LIMITS = HttpLimits(control_timeout=CALL_SECONDS)
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


def ids_of(events: Iterable[dict[str, Any]]) -> list[int]:
    """The ids of the tokens of incremental or cumulative events."""
    found: list[int] = []
    for event in events:
        ids, total = event.get("output_ids", []), event["meta_info"]["completion_tokens"]
        found = ids if len(ids) == total else found + ids
    return found


class Generation:
    """One generation of ours, which a task reads."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.events: list[dict[str, Any]] = []
        self.task: asyncio.Task[None] | None = None

    async def leave(self) -> None:
        """Disconnect from its stream."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])

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
        """The ids of the tokens that have arrived."""
        return ids_of(self.events)

    @property
    def finish(self) -> str | None:
        """The reason for which it ended; None before its end."""
        reason = self.events[-1].get("meta_info", {}).get("finish_reason") if self.events else None
        return None if reason is None else str(reason.get("type"))


RETURNED = {
    "routed_experts": "--enable-return-routed-experts",
    "indexer_topk": "--enable-return-indexer-topk",
    "hidden_states": "--enable-return-hidden-states",
    "sampling_mask": "SGLang 0.5.21",
}
"""What a request can ask for beside tokens, and what the server needs for it."""


class Server(Examined):
    """One SGLang server, with its calls; :meth:`take_back` undoes what they did.

    Args:
        engine: the scheduler's own adapter, open.
        transport: for what that does not ask, open.
        refit: a folder of other weights of the model; None to load none.
    """

    def __init__(
        self, engine: SGLangEngine, transport: Transport, *, refit: str | None = None
    ) -> None:
        super().__init__()
        self.engine, self.facts, self.refit = engine, engine.facts, refit
        self.version = release(self.facts.capabilities.server.removeprefix("SGLang "))
        self._transport = transport
        self._generations: list[Generation] = []
        self.paused_by_us = False
        self.info: dict[str, Any] = {}
        """The content of /server_info."""
        self.paths: frozenset[str] = frozenset()
        self.paused_before = False
        self.others: int | None = None
        """Number of others' requests at the start; None where the server does not report it."""

    async def describe(self) -> None:
        """Ask the server about itself."""
        self.info = msgspec.json.decode((await self.get("server_info")).body)
        answer = await self.get("openapi.json")
        if answer.status == 200:
            self.paths = frozenset(msgspec.json.decode(answer.body).get("paths", {}))
        self.paused_before = bool(await self.engine.is_paused())
        self.others = await self.running()
        if self.others:
            # The last answer of a request may arrive before the loads show that it has ended.
            await self.idle(1.0)
            self.others = await self.running()

    @property
    def returns(self) -> frozenset[str]:
        """What beside tokens it says that it can return."""
        hidden = {"hidden_states"} if self.info.get("enable_return_hidden_states") else set[str]()
        return (self.facts.capabilities.companions & RETURNED.keys()) | hidden

    @property
    def last_hidden(self) -> bool:
        """Whether it returns the hidden states of the last token alone, and refuses a request for
        all."""
        return self.info.get("return_hidden_states_mode") == "last"

    @property
    def simulated(self) -> bool:
        """Whether the server says that it is a simulated engine."""
        return bool(self.info.get("simulated", False))

    def check_unpaused(self) -> None:
        """Refuse an experiment that would wait for whoever has paused the server.

        Raises:
            LeftOut: if somebody has.
        """
        if self.paused_before:
            raise left_out("somebody else has paused the server")

    async def get(self, path: str, seconds: float = CALL_SECONDS) -> Answer:
        """Make a call that changes nothing."""
        return await self._transport.call("GET", path, timeout=seconds, accept=_ANY, admin=False)

    async def post(self, path: str, body: object = None) -> Answer:
        """Make a control call."""
        return await self._transport.call("POST", path, body, timeout=CALL_SECONDS, accept=_ANY)

    async def running(self) -> int | None:
        """Number of requests that run or wait; None where the server does not report it."""
        try:
            ranks = msgspec.json.decode((await self.get("v1/loads")).body)["loads"]
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
        vocab = self.facts.vocab_size or _PROMPT_TOKENS
        params: dict[str, Any] = {
            "max_new_tokens": tokens,
            "temperature": 0.0,
            "top_k": 1,
            "ignore_eos": True,
            "stream_interval": INTERVAL,
        }
        ids = [index % vocab for index in range(prompt_tokens)]
        return {"input_ids": ids, "sampling_params": params, "rid": rid, "return_logprob": True}

    async def whole(
        self, tokens: int, *, prompt_tokens: int = _PROMPT_TOKENS, **fields: object
    ) -> dict[str, Any]:
        """Get a response that is not streamed; `fields` are further ones of the request."""
        self.check_unpaused()
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
        self.check_unpaused()
        generation = Generation(uuid.uuid4().hex)
        self._generations.append(generation)
        generation.task = asyncio.create_task(self._read(generation, tokens))
        return generation

    async def _read(self, generation: Generation, tokens: int) -> None:
        body = {**self.body(tokens, generation.rid), "stream": True}
        with contextlib.suppress(aiohttp.ClientError, OSError, EngineError, msgspec.DecodeError):
            async with self._transport.stream("generate", body) as response:
                most, inflow = LIMITS.max_answer_bytes, inflow_of(response)
                name = self.engine.name
                splitter = EventSplitter(Allowance(name, generation.rid, most, inflow=inflow))
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
                if not await until(lambda g=generation: g.done, 2.0):
                    await generation.leave()
