"""Parses streamed answers (server-sent events), and bounds their bytes.

- The bytes of an answer are set off against its tokens. What exceeds the tokens is bounded over
  the whole answer, whatever it is: an event that does not end, comments, blank lines, events
  without a token, oversized events.
- The bytes of incomplete events are bounded over all streams of a server: thousands of streams,
  each within its own bound, could fill the memory together.
"""

from __future__ import annotations

from aprilsched.errors import EngineProtocolError
from aprilsched.kernel.engines.sockets import Inflow

_EVENT_BYTES = 4096
"""Bytes of an event without its tokens: about twenty fields, a few hundred bytes (0.5.21)."""
_TOKEN_BYTES = 256
"""Bytes for each token in an event: id and triple take 40, the text takes a few more, and an abort
repeats the whole response."""


class UnfinishedEvents:
    """Counts the bytes of incomplete events that all streams of one server hold."""

    def __init__(self, engine: str, max_bytes: int) -> None:
        self._engine = engine
        self._max_bytes = max_bytes
        self.size = 0

    def change(self, by: int) -> None:
        """Add what one stream holds more than before; a negative number when it holds less.

        Raises:
            EngineProtocolError: in the stream that asks, if all streams together hold too much.
        """
        self.size += by
        if by > 0 and self.size > self._max_bytes:
            raise EngineProtocolError(
                self._engine,
                f"its streams sent more than {self._max_bytes} bytes of events that are not whole "
                "yet; raise max_unfinished_bytes, or let the server send shorter events.",
            )


class Allowance:
    """Bounds the bytes of one streamed answer.

    Args:
        engine, request_id: names for the error messages.
        max_bytes: number of bytes that may arrive beyond what the tokens account for.
        unfinished: the counter that this stream shares with the server's other streams.
        inflow: the counter of the connection, which also counts bytes outside of the body.
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
        self._excess = 0
        self._held = 0

    def take(self, received: int) -> None:
        """Count bytes that have arrived.

        Raises:
            EngineProtocolError: if they are too many for the tokens that came with them.
        """
        self._inflow.renew()
        self._excess += received
        if self._excess > self._max_bytes:
            raise EngineProtocolError(
                self._engine,
                f"request {self._request_id}: sent more than {self._max_bytes} bytes beyond what "
                "its tokens account for; raise max_answer_bytes, or let the server send each token "
                "once.",
            )

    def pay(self, event: int, tokens: int) -> None:
        """Set an event of `event` bytes off; the answer has `tokens` tokens in all by now."""
        self._excess -= min(event, _EVENT_BYTES + _TOKEN_BYTES * tokens)

    def hold(self, size: int) -> None:
        """Record that the stream holds `size` bytes of an incomplete event.

        Raises:
            EngineProtocolError: if all streams of the server hold too much.
        """
        by, self._held = size - self._held, size
        if by and self._unfinished is not None:
            self._unfinished.change(by)

    def close(self) -> None:
        """End the answer: the stream contains no more data."""
        self.hold(0)


class EventSplitter:
    """Splits a byte stream into the payloads of its ``data:`` lines, within its allowance.

    aiohttp's own ``readline`` fails at 128 KiB, and one cumulative event can have megabytes.
    """

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that `data` completes.

        Raises:
            EngineProtocolError: if too much has arrived.
        """
        self._allowance.take(len(data))
        lines = data.split(b"\n")
        rest = lines.pop()
        held = self._size
        if lines and self._pieces:
            lines[0] = b"".join((*self._pieces, lines[0]))
            self._pieces, self._size = [], 0
        # The pieces of an unfinished line are joined once: joining them at each call would cost
        # the square of the line's length.
        if rest:
            self._pieces.append(rest)
            self._size += len(rest)
        if self._size != held:
            self._allowance.hold(self._size)
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
