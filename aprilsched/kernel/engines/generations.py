"""The streams of a server: how they are read, left early and aborted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import aiohttp

from aprilsched.errors import ControlTimeout, EngineError, EngineUnreachable

_log = logging.getLogger(__name__)


ABORTS_AT_ONCE = 16
"""Number of abort calls that one server gets at a time. Hundreds of them would block the client's
event loop for seconds, and a continue would wait behind them for a connection."""
_ABORT_EACH_S = 0.02
"""Time allowed for each further abort; a real server on its own machine takes 1.5 to 3 ms."""


class HungUp(Exception):
    """Ends the reading of a stream that was closed before any data arrived."""


class Call:
    """One generation in flight."""

    def __init__(self) -> None:
        self.over = False
        """Whether the server has nothing left of the request that an abort could end."""
        self.aborted = False
        """Whether an abort of the request was sent to the server."""
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
            # The order matters: after close() first, the reader would wait forever.
            self._response.content.set_exception(reason)
            self._response.close()


class EarlyAborts:
    """Aborts the generations of one server whose streams were left early, a few at a time.

    Generations that are left together share a time bound, which grows with their number. When
    ``ABORTS_AT_ONCE`` aborts in a row get no answer, the rest are skipped, and one log line gives
    their number.

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
