"""How many bytes a streamed answer may take, and how many all of them may hold.

- Tokens pay for bytes. What a response sends beyond what its tokens can account for is bounded
  over the whole response, whatever it is: an event that does not end, comments, blank lines,
  events that bring no token, events that are blown up.
- What has arrived of events that are not whole yet is bounded over all streams of a server, since
  thousands of them, each below its own bound, would fill the memory all the same.
"""

from __future__ import annotations

from aprilsched.engines.http.sockets import Inflow
from aprilsched.errors import EngineProtocolError

__all__ = ["Allowance", "UnfinishedEvents"]

_EVENT_BYTES = 4096
"""What an event takes beside its tokens: some twenty fields, a few hundred bytes (0.5.21)."""
_TOKEN_BYTES = 256
"""What a token takes in an event that holds it: id and triple are 40 bytes, its text a few more,
and an abort repeats the whole response."""
_REMEDY = "or start the server with --incremental-streaming-output"


class UnfinishedEvents:
    """The bytes that all streams of one server hold of events whose end has not arrived."""

    def __init__(self, engine: str, max_bytes: int) -> None:
        self._engine = engine
        self._max_bytes = max_bytes
        self.size = 0

    def change(self, by: int) -> None:
        """One stream holds so much more, or less.

        Raises:
            EngineProtocolError: if all of them hold too much; for the stream that asks.
        """
        self.size += by
        if by > 0 and self.size > self._max_bytes:
            raise EngineProtocolError(
                self._engine,
                f"its streams sent more than {self._max_bytes} bytes of events that are not whole "
                f"yet; raise max_unfinished_bytes, {_REMEDY}.",
            )


class Allowance:
    """The bytes of one response.

    Args:
        engine, request_id: for its errors.
        max_bytes: that its tokens do not account for.
        unfinished: shared with the server's other streams.
        inflow: of its connection, where what is no part of a body counts.
    """

    def __init__(
        self,
        engine: str,
        request_id: str,
        max_bytes: int,
        unfinished: UnfinishedEvents | None = None,
        inflow: Inflow | None = None,
    ) -> None:
        self._engine = engine
        self._request_id = request_id
        self._max_bytes = max_bytes
        self._unfinished = unfinished
        self._inflow = inflow or Inflow()
        self._unpaid = 0
        self._held = 0

    def take(self, received: int) -> None:
        """So many bytes have arrived.

        Raises:
            EngineProtocolError: if they are too many for the tokens that came with them.
        """
        self._inflow.renew()
        self._unpaid += received
        if self._unpaid > self._max_bytes:
            raise EngineProtocolError(
                self._engine,
                f"request {self._request_id}: sent more than {self._max_bytes} bytes beyond what "
                f"its tokens account for; raise max_answer_bytes, {_REMEDY}.",
            )

    def pay(self, event: int, tokens: int) -> None:
        """An event of so many bytes brought new tokens; they are `tokens` in all by now."""
        self._unpaid -= min(event, _EVENT_BYTES + _TOKEN_BYTES * tokens)

    def hold(self, size: int) -> None:
        """So much is held of an event that is not whole.

        Raises:
            EngineProtocolError: if the server's streams hold too much of them.
        """
        by, self._held = size - self._held, size
        if by and self._unfinished is not None:
            self._unfinished.change(by)

    def close(self) -> None:
        """The response is over; nothing is held of it any more."""
        self.hold(0)
