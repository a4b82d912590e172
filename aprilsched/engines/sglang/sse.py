"""Server-sent events: from bytes, cut anywhere, to the payloads of whole ``data:`` lines."""

from __future__ import annotations

from aprilsched.errors import EngineProtocolError

__all__ = ["EventSplitter"]


class EventSplitter:
    """Cuts a byte stream into the payloads of its ``data:`` lines.

    aiohttp's own ``readline`` gives up at 128 KiB, and one cumulative event can be megabytes.
    """

    def __init__(self, engine: str, max_bytes: int) -> None:
        self._engine = engine
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes."""
        lines = data.split(b"\n")
        rest = lines.pop()
        if lines and self._pieces:
            lines[0] = b"".join((*self._pieces, lines[0]))
            self._pieces, self._size = [], 0
        # Pieces of an unfinished line are kept apart: joining them at each feed would cost
        # the square of a long line's length.
        if rest:
            self._pieces.append(rest)
            self._size += len(rest)
        if max(self._size, *map(len, lines), 0) > self._max_bytes:
            raise EngineProtocolError(
                self._engine,
                f"a streamed event is longer than {self._max_bytes} bytes; raise "
                "max_answer_bytes, or start the server with --incremental-streaming-output.",
            )
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
