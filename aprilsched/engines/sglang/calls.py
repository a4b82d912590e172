"""The generations in flight on one server, and how one of them is left.

A request that was sent while the server was paused is held before its scheduler has heard of
it. Aborting it there is lost, and SGLang remembers that it was aborted: no later abort of it
is passed on, and after continue it decodes to its end (0.5.21). What always works while
nothing has arrived yet is to hang up: the server then forgets a held request and aborts a
queued one. No token is lost by that, since none was received or was on its way to be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import aiohttp

__all__ = ["Call", "HungUp", "despite_cancellation"]


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


async def despite_cancellation(work: Coroutine[Any, Any, None]) -> None:
    """Run bounded `work` to its end, even if this is cancelled meanwhile; then be cancelled."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
