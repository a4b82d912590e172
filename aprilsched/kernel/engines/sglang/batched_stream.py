"""Sends requests that are made in the same turn of the event loop to a server in one POST.

SGLang's scheduler takes requests between two steps. If 32 requests arrive one by one, it prefills
the first few in one pass and the others in the next, and each pass delays every running request.
The requests of one body reach it as one message.

The end of one response leaves the others alone: each has its own events, by their index, its own
end and its own errors, and is aborted by its own id. They share only the connection: if it breaks,
it breaks for all of them. If a body is refused before anything has arrived, the refusal does not
show which requests are at fault, so they are then sent one by one.

Requests with media or with fields of their own are sent alone, because most fields of a body apply
to all its requests. SGLang drops the routing key of requests that share a body.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import aiohttp

from aprilsched.errors import EngineBusy, EngineError, EngineProtocolError, EngineRejected
from aprilsched.kernel.engines.base import Chunk, GenerationRequest
from aprilsched.kernel.engines.generations import Call, HungUp
from aprilsched.kernel.engines.server import HttpEngine, companion_bytes, drain
from aprilsched.kernel.engines.sglang.chunks import ChunkAssembler
from aprilsched.kernel.engines.sglang.dp_ranks import DpRanks
from aprilsched.kernel.engines.sglang.probe import ServerFacts
from aprilsched.kernel.engines.sockets import inflow_of
from aprilsched.kernel.engines.sse import Allowance, EventSplitter
from aprilsched.kernel.engines.stream import DONE

_EACH = ("rid", "input_ids", "sampling_params", "extra_key", "lora_path")
"""The fields of a body that may differ between its requests."""
_MOST_TOKENS = 1 << 16
"""Context tokens in one body. A server prefills fewer in one pass, and starts only after it has
read the whole body."""
_OF_ONE_REQUEST = frozenset({400, 413, 422})
"""Statuses of a body that may be the fault of one of its requests."""


class _Member:
    """One of the requests that share a body."""

    def __init__(self, request: GenerationRequest, call: Call, reader: ChunkAssembler) -> None:
        self.request, self.call, self.reader = request, call, reader
        self.news = asyncio.Queue[Chunk | Exception | None]()
        """Its chunks and the error that ends it; None if it has to be sent alone."""
        self.waits = True
        self.body: _Body | None = None


class _Body:
    """A POST for several requests, whose events have the index of their request."""

    def __init__(self, members: Sequence[_Member]) -> None:
        self.members = members
        self.waiting = len(members)
        """Number of requests that wait for an event."""
        self.heard = False
        """Whether an event has arrived."""
        self.task: asyncio.Task[None] | None = None

    def tell(self, member: _Member, news: Chunk | Exception | None) -> None:
        """Pass a request its next chunk, or its end: an error, or None."""
        if member.waits:
            member.news.put_nowait(news)
            if not isinstance(news, Chunk) or news.finish is not None:
                member.waits = False
                self.waiting -= 1


class SharingEngine(HttpEngine[ServerFacts]):
    """A server whose requests share bodies."""

    def _bind_to_loop(self) -> None:
        super()._bind_to_loop()
        self._asked: list[_Member] = []
        """The requests made in this turn of the event loop."""
        self._dp_ranks = DpRanks(1)

    def _reader(self, request: GenerationRequest) -> ChunkAssembler:
        return ChunkAssembler(self.name, request, self._version_of)

    async def _answer(self, request: GenerationRequest, call: Call) -> AsyncGenerator[Chunk, None]:
        ranks = self._dp_ranks
        ranks.choose(request)
        try:
            if self._may_share(request):
                member = _Member(request, call, self._reader(request))
                if not self._asked:
                    asyncio.get_running_loop().call_soon(self._send_asked)
                self._asked.append(member)
                try:
                    while (news := await member.news.get()) is not None:
                        if isinstance(news, Exception):
                            raise news
                        call.over = news.finish is not None
                        yield news
                        if call.over:
                            return
                finally:
                    _leave(member)
                call.shared = False
            async with aclosing(super()._answer(request, call)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            ranks.leave(request.request_id)

    def _may_share(self, request: GenerationRequest) -> bool:
        return (
            self.facts.shares_bodies
            # A bound on connections bounds the requests in flight.
            and self._limits.max_connections == 0
            and not (request.media or request.sampling.request)
        )

    def _send_asked(self) -> None:
        """Send the requests of this turn, in as few bodies as possible."""
        asked, self._asked = self._asked, []
        alike: dict[Any, list[_Member]] = {}
        for member in asked:
            if member.waits:
                request = member.request
                keys = (request.cache_key is None, request.adapter is None)
                dp_rank = self._dp_ranks.of(request.request_id)
                alike.setdefault((request.companions, request.rank, keys, dp_rank), []).append(
                    member
                )
        for members in alike.values():
            first, tokens = 0, 0
            for end, member in enumerate(members):
                tokens += len(member.request.input_ids)
                if tokens > _MOST_TOKENS and end > first:
                    self._start(members[first:end])
                    first, tokens = end, len(member.request.input_ids)
            self._start(members[first:])

    def _start(self, members: Sequence[_Member]) -> None:
        if len(members) == 1:
            members[0].news.put_nowait(None)
            return
        body = _Body(members)
        for member in members:
            member.body, member.call.shared = body, True
        body.task = asyncio.create_task(self._read_all(body))

    async def _read_all(self, body: _Body) -> None:
        """Send a body, give each of its requests its chunks, and tell all what ends the others."""
        news: Exception | None = None
        try:
            await self._read(body)
            if body.heard:
                news = EngineError(self.name, "the stream of several requests ended before they.")
        except EngineBusy as error:
            for member in body.members:
                member.call.unsure = body.heard
            news = error
        except EngineRejected as error:
            if body.heard:
                news = EngineError(self.name, f"ended a stream of several requests ({error}).")
            elif error.status not in _OF_ONE_REQUEST:
                news = error
        except Exception as error:
            news = error
        for member in body.members:
            body.tell(member, news)

    async def _read(self, body: _Body) -> None:
        async with self._send_all(body.members) as response:
            for member in body.members:
                member.call.attach(response)
            await self._check_status(response)
            allowance = Allowance(
                self.name,
                body.members[0].request.request_id,
                self._limits.max_answer_bytes
                + sum(companion_bytes(member.request) for member in body.members),
                self._unfinished,
                inflow_of(response),
            )
            splitter = EventSplitter(allowance)
            try:
                while body.waiting and (data := await response.content.readany()):
                    for payload in splitter.feed(data):
                        if payload != DONE:
                            self._give(body, payload, allowance)
            finally:
                allowance.close()
            if not body.waiting:
                await drain(response)

    def _send_all(
        self, members: Sequence[_Member]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        posts = [self._post(member.request) for member in members]
        path, body = posts[0]
        each = {name: [post[name] for _, post in posts] for name in _EACH if name in body}
        body = {**body, **each}
        del body["routing_key"]
        return self._transport.stream(path, body)

    def _give(self, body: _Body, payload: bytes, allowance: Allowance) -> None:
        """Give an event to its request, also if that was left: its bytes are accounted for."""
        event = body.members[0].reader.event(payload)
        index = event.index or 0
        if index >= len(body.members):
            raise EngineProtocolError(
                self.name, f"sent an event of index {index} of {len(body.members)}."
            )
        member = body.members[index]
        try:
            chunk = member.reader.chunk(event, payload)
        except EngineError as error:
            if event.error is not None and event.index is None:  # It ends the stream.
                raise
            body.tell(member, error)
            return
        body.heard = True
        if len(chunk.token_ids):
            allowance.pay(len(payload), member.reader.held)
        body.tell(member, chunk)


def _leave(member: _Member) -> None:
    """Note that a request is no longer read, and close the connection after the last one.

    It is also closed if nothing has arrived: a pause may hold the body, and then the server would
    lose an abort."""
    body, waited = member.body, member.waits
    member.waits = False
    if body is not None and waited:
        body.waiting -= 1
        if not body.waiting and body.task is not None:
            body.task.cancel()
        elif not body.heard:
            member.call.break_off(HungUp())
