"""Writes blocks to a file in a thread of its own, so that a disk that hangs holds nobody up.

Invariants: what waits to be written is bounded; a block is written whole or not at all (an error of
the disk excepted), in the order in which it was handed over; nothing waits without an end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

__all__ = ["FileWriter"]


class FileWriter:
    """Writes to `path`, which is opened with the first block.

    Args:
        mode: how it is opened.
        max_bytes: that may wait.
        patient: whether a block that does not fit waits for the disk, instead of being refused.
        failed: told, in the thread, of what the disk refused; nothing is written after that.
    """

    def __init__(
        self,
        path: Path,
        mode: Literal["xb", "ab", "wb"],
        *,
        max_bytes: int,
        patient: bool,
        failed: Callable[[OSError], None],
    ) -> None:
        self._path = path
        self._mode: Literal["xb", "ab", "wb"] = mode
        self._max_bytes = max_bytes
        self._patient = patient
        self._failed = failed
        self._blocks: deque[bytes] = deque()
        self._size = 0
        """Of the blocks that wait and of the one that is being written."""
        self._changed = threading.Condition()
        self._closed = self._broken = False
        self._thread: threading.Thread | None = None

    def put(self, block: bytes) -> bool:
        """Hand a block over; whether it will be written, as far as one knows."""
        with self._changed:
            while self._patient and not self._broken and not self._fits(block):
                self._changed.wait()
            if self._broken or self._closed or not self._fits(block):
                return False
            self._blocks.append(block)
            self._size += len(block)
            if self._thread is None:
                # A daemon: a disk that hangs must not keep the process from ending.
                self._thread = threading.Thread(
                    target=self._work, name=f"to {self._path.name}", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
            return True

    def close(self, seconds: float) -> bool:
        """Wait until everything is written, for that long at most; whether it is."""
        until = time.monotonic() + seconds
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))
        return self._thread is None or not self._thread.is_alive()

    def _fits(self, block: bytes) -> bool:
        return not self._size or self._size + len(block) <= self._max_bytes

    def _work(self) -> None:
        try:
            with self._path.open(self._mode) as file:
                while (block := self._next()) is not None:
                    file.write(block)
                    file.flush()
                    with self._changed:
                        self._size -= len(block)
                        self._changed.notify_all()
        except OSError as error:
            # First, so that nobody takes what is refused from here on for a slow disk.
            self._failed(error)
            with self._changed:
                self._broken = True
                self._blocks.clear()
                self._changed.notify_all()

    def _next(self) -> bytes | None:
        """The next block; None when there will be none."""
        with self._changed:
            while not self._blocks and not self._closed:
                self._changed.wait()
            return self._blocks.popleft() if self._blocks else None
