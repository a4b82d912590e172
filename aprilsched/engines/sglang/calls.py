"""The generations in flight on one server, and how one of them is left.

A request that was sent while the server was paused is held before its scheduler has heard of
it. Aborting it there is lost, and SGLang remembers that it was aborted: no later abort of it
is passed on, and after continue it decodes to its end (0.5.21). What always works while
nothing has arrived yet is to hang up: the server then forgets a held request and aborts a
queued one. No token is lost by that, since none was received or was on its way to be read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import aiohttp

from aprilsched.errors import ControlTimeout, EngineError, EngineUnreachable

__all__ = ["ABORTS_AT_ONCE", "Call", "HungUp", "LastWords", "despite_cancellation"]

_log = logging.getLogger(__name__)

ABORTS_AT_ONCE = 16
"""Abort calls that one server is sent together. Hundreds of them would hold up the client's event
loop for seconds, and a continue would wait behind them for a connection."""
_ABORT_EACH_S = 0.02
"""What one more abort may take. A real server takes 1.5 to 3 ms for one, alone on its machine."""


class HungUp(Exception):
    """Ends the reading of a stream that was closed because it had given nothing yet."""


class Call:
    """One generation in flight."""

    def __init__(self) -> None:
        self.over = False
        """Nothing of it is left on the server that an abort could end."""
        self._response: aiohttp.ClientResponse | None = None
        self._broken_off: Exception | None = None

    def attach(self, response: aiohttp.ClientResponse) -> None:
        """The server has taken the request and will stream into `response`."""
        self._response = response
        if self._broken_off is not None:
            raise self._broken_off

    @property
    def silent(self) -> bool:
        """Whether not one byte of the answer has arrived, read or unread."""
        return self._response is None or self._response.content.total_bytes == 0

    def break_off(self, reason: Exception) -> None:
        """Close the connection now; whoever reads the stream gets `reason`."""
        self._broken_off = reason
        if self._response is not None:
            # In this order: closing first would leave the reader waiting for ever.
            self._response.content.set_exception(reason)
            self._response.close()


class LastWords:
    """Tells one server to abort the generations that were left early, a few at a time.

    Generations that are left together have a bound together, which grows with their number. As
    soon as a whole slice of aborts was not answered the rest is given up. What was not aborted is
    said in one line.

    Args:
        name: of the server, for the log.
        timeout: seconds for one abort.
        aborts: the slots of the server's abort calls.
    """

    def __init__(self, name: str, timeout: float, aborts: asyncio.Semaphore) -> None:
        self._name = name
        self._timeout = timeout
        self._aborts = aborts
        self._waiting = 0
        self._until = 0.0
        self._unanswered = 0
        """In a row."""
        self._gone = False
        self._left = 0
        self._not_aborted = 0
        self._why = ""

    async def say(self, abort: Callable[[], Awaitable[None]]) -> None:
        """Make one abort call; how it ends is nobody's concern any more."""
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
                    "%d of %d requests that were left early on %s may decode unseen: %s",
                    self._not_aborted,
                    self._left,
                    self._name,
                    self._why or "the aborts before them took too long",
                )

    async def _try(self, abort: Callable[[], Awaitable[None]]) -> None:
        try:
            await abort()
        except EngineUnreachable as error:
            # Whoever loses the engine says so once, not for each request.
            self._gone = True
            _log.debug("a request on %s was not aborted: %s", self._name, error)
        except EngineError as error:
            self._not_aborted += 1
            self._why = str(error)
            self._unanswered += isinstance(error, ControlTimeout)
        else:
            self._unanswered = 0


async def despite_cancellation(work: Coroutine[Any, Any, None]) -> None:
    """Run bounded `work` to its end, even if this is cancelled meanwhile; then be cancelled."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled() and isinstance(task.exception(), KeyboardInterrupt):
        # It has left the event loop where it was raised. Raised here once more, it would end the
        # loop in which everything else is cleaned up.
        raise asyncio.CancelledError
    task.result()
    if cancelled is not None:
        raise cancelled
