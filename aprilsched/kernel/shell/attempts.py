"""Sends attempts at requests to engines at a bounded rate, streams them, and aborts them."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import aclosing, suppress

from asyncio_throttle.throttler import Throttler

from aprilsched.errors import EngineBusy, EngineError, EngineRejected, EngineUnreachable
from aprilsched.kernel.core.messages.commands import Abort, Send
from aprilsched.kernel.core.messages.events import Event, Failed, Interrupted
from aprilsched.kernel.engines.base import Chunk, GenerationRequest
from aprilsched.kernel.shell.chunk_buffer import ending, progress
from aprilsched.kernel.shell.tasks import Part, Shell, TaskKey
from aprilsched.types import ANSWER_BYTES

log = logging.getLogger("aprilsched")

_ABORT_AGAIN_S = 0.25
"""Seconds between two aborts of an attempt whose stream has not ended."""
_OF_THE_REQUEST = frozenset({400, 413, 422})
"""Statuses that another attempt cannot change, because the request is wrong. A missing key (401,
403) or path (404) is a fault of the engine or of its proxy: the engine is lost as after a 500, and
may return."""

_ENGINE_FAILED = 500
"""Statuses from here on are failures of the engine, which the request may have caused."""

Key = tuple[int, int]


class Attempts(Part):
    """The attempts of a run that are waiting to be sent or are open."""

    def __init__(self, shell: Shell, *, run_id: str, may_send: Callable[[str], bool]) -> None:
        super().__init__(shell)
        self._run_id = run_id
        self._may_send = may_send
        self.adapter_names: dict[int, str] = {}
        """Name of each version's adapter on the engines."""
        self._throttle = LoopThrottler(rate_limit=shell.config.dispatch.rate)
        self._outbox: OrderedDict[Key, Send] = OrderedDict()
        self._waiting = asyncio.Event()
        self._open: dict[Key, Send] = {}
        self._aborts_unasked: set[str] = set()
        """Engines for which an abort that this run did not request was logged."""
        self._left_out: set[str] = set()
        """Engines for which an answer that is too large was logged."""

    def start(self) -> None:
        self._tasks.start("dispatcher", self._dispatch())

    # --- commands ------------------------------------------------------------------------------

    def send(self, command: Send) -> None:
        self._outbox[command.request_id, command.attempt] = command
        self._waiting.set()

    def abort(self, command: Abort) -> None:
        key = (command.request_id, command.attempt)
        if self._outbox.pop(key, None) is not None:
            self._feed(Interrupted(request_id=key[0], attempt=key[1]))
        elif key in self._open:
            self._tasks.start(("abort", key), self._call_back(self._open[key]))

    def abandon(self, engine: str) -> list[TaskKey]:
        """Drop the requests that wait for a lost engine, and cancel its streams.

        Each stream sends the engine an abort of its request as it ends. Returns the keys of the
        streams' tasks.
        """
        for key in [key for key, send in self._outbox.items() if send.engine == engine]:
            del self._outbox[key]
        return self._cancel(engine)

    async def leave(self, engine: str) -> None:
        """Cancel the engine's streams, and wait until each has sent its abort."""
        await self._tasks.ended(self._cancel(engine))

    def _cancel(self, engine: str) -> list[TaskKey]:
        """Cancel the streams of an engine; returns the keys of their tasks."""
        keys = [key for key, send in self._open.items() if send.engine == engine]
        attempts: list[TaskKey] = [("attempt", key) for key in keys]
        # The tasks that repeat aborts end first, so that the streams' own aborts get through.
        self._tasks.cancel([("abort", key) for key in keys])
        self._tasks.cancel(attempts)
        return attempts

    def stop_sending(self) -> None:
        self._outbox.clear()

    def open_ids(self, engine: str) -> list[str]:
        """Ids of the requests that are open on an engine."""
        return [self._name(send) for send in self._open.values() if send.engine == engine]

    # --- work ----------------------------------------------------------------------------------

    async def _dispatch(self) -> None:
        while True:
            await self._waiting.wait()
            self._waiting.clear()
            while self._outbox:
                await self._throttle.acquire()
                if self._outbox:
                    self._dispatch_one(*self._outbox.popitem(last=False))

    def _dispatch_one(self, key: Key, send: Send) -> None:
        if not self._may_send(send.engine):
            self._feed(Interrupted(request_id=send.request_id, attempt=send.attempt))
        else:
            self._open[key] = send
            self._tasks.start(("attempt", key), self._run(key, send))

    async def _run(self, key: Key, send: Send) -> None:
        try:
            last = await self._stream(send)
        finally:
            del self._open[key]
        for event in last:
            self._feed(event)

    async def _stream(self, send: Send) -> list[Event]:
        """Stream an attempt; returns its last tokens and the event that ends it.

        These belong together. If a response were saved with its last token but without its end, a
        resumed run would generate beyond that end.
        """
        last: list[Event] = []
        request_id, attempt = send.request_id, send.attempt
        request = GenerationRequest(
            request_id=self._name(send),
            input_ids=send.input_ids,
            sampling=send.sampling,
            affinity=send.group_id,
            rollout=send.rollout_id,
            adapter=self._adapter(send),
            cache_key=self._cache_key(send),
            companions=send.companions,
            media=send.media,
            rank=send.rank,
        )
        try:
            async with aclosing(self._engines[send.engine].generate(request)) as chunks:
                async for chunk in chunks:
                    news = progress(chunk, request_id, attempt)
                    if chunk.finish is None:
                        if news is not None:
                            self._feed(news)
                    elif (end := ending(chunk, request_id, attempt)) is not None:
                        self._look_for_others(end, send)
                        self._look_at_size(chunk, send)
                        last = [end] if news is None else [news, end]
                        break
        except EngineBusy as error:
            last = last or [
                Interrupted(
                    request_id=request_id,
                    attempt=attempt,
                    busy=str(error),
                    retry_after_s=error.retry_after_s,
                )
            ]
        except EngineError as error:
            if not last:
                status = error.status if isinstance(error, EngineRejected) else 0
                last = [
                    Failed(
                        request_id=request_id,
                        attempt=attempt,
                        cause=str(error),
                        final=status in _OF_THE_REQUEST,
                        unsent=isinstance(error, EngineUnreachable),
                        answered=status >= _ENGINE_FAILED,
                    )
                ]
        if not last:
            cause = f"{send.engine}: the stream ended before the response did"
            last = [Failed(request_id=request_id, attempt=attempt, cause=cause)]
        return last

    def _look_for_others(self, end: Event, send: Send) -> None:
        """Log once for each engine that it aborted a request which this run did not abort."""
        key: TaskKey = ("abort", (send.request_id, send.attempt))
        asked = self._tasks.running(key)
        unasked = isinstance(end, Interrupted) and not (asked or end.busy)
        if unasked and send.engine not in self._aborts_unasked:
            self._aborts_unasked.add(send.engine)
            log.warning(
                "%s aborted a request although this run did not ask for it; the request is sent "
                "again, but if another scheduler uses the engine, give each its own engines",
                send.engine,
            )

    def _look_at_size(self, chunk: Chunk, send: Send) -> None:
        """Log once for each engine that more of its answer was wanted than is kept."""
        if (answer := chunk.answer) is None or not answer.left_out:
            return
        if send.engine not in self._left_out:
            self._left_out.add(send.engine)
            log.warning(
                "%s answered more than is kept of an attempt (%s): at most %d bytes as JSON; "
                "Rollout.answers names what is left out",
                send.engine,
                ", ".join(f"{name}: {answer.sizes[name]} bytes" for name in answer.left_out),
                ANSWER_BYTES,
            )

    async def _call_back(self, send: Send) -> None:
        key = (send.request_id, send.attempt)
        engine, name = self._engines[send.engine], self._name(send)
        while key in self._open:
            # An error of the engine is reported by the stream.
            with suppress(EngineError):
                await engine.abort(name)
            await asyncio.sleep(_ABORT_AGAIN_S)

    def _adapter(self, send: Send) -> str | None:
        version = send.adapter
        return None if version is None else self.adapter_names.get(version, str(version))

    def _cache_key(self, send: Send) -> str | None:
        return None if send.cache_key is None else f"{self._process}-{send.cache_key}"

    def _name(self, send: Send) -> str:
        # All ids have the same length, because SGLang aborts every request whose id starts with
        # the given one.
        return f"{self._run_id}-{send.request_id:010d}-{send.attempt:04d}"


class LoopThrottler(Throttler):
    """Allows at most `rate_limit` calls per second on the running loop's clock."""

    def flush(self) -> None:
        horizon = asyncio.get_running_loop().time() - self.period
        while self._task_logs and self._task_logs[0] <= horizon:
            self._task_logs.popleft()

    async def acquire(self) -> None:
        self.flush()
        while len(self._task_logs) >= self.rate_limit:
            await asyncio.sleep(self.retry_interval)
            self.flush()
        self._task_logs.append(asyncio.get_running_loop().time())
