"""Parses server-sent events: byte pieces of any size become payloads of ``data:`` lines."""

from __future__ import annotations

from aprilsched.engines.http.allowance import Allowance

__all__ = ["EventSplitter"]


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
        if lines and self._pieces:
            lines[0] = b"".join((*self._pieces, lines[0]))
            self._pieces, self._size = [], 0
        # The pieces of an unfinished line are joined once: joining them at each call would cost
        # the square of the line's length.
        if rest:
            self._pieces.append(rest)
            self._size += len(rest)
        self._allowance.hold(self._size)
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
