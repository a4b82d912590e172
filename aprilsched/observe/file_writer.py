"""Writes lines to a file in a worker thread, so that a hung disk does not block the run.

Invariants: the amount of pending text is bounded; blocks are written in order, each completely or
not at all (disk errors excepted); a failure is logged once, and :attr:`FileWriter.error` describes
what the file lacks.
"""

from __future__ import annotations

import logging
from io import FileIO
from pathlib import Path
from typing import Literal

from aprilsched.kernel.values.files import open_private
from aprilsched.observe.worker import Worker

log = logging.getLogger("aprilsched")


class FileWriter:
    """Writes to `path`, which is opened with the first block.

    Args:
        mode: how the file is opened.
        max_bytes: largest number of pending bytes.
        close_seconds: how long :meth:`close` waits.
        patient: wait for a slow disk instead of dropping blocks, as on a virtual clock.
    """

    def __init__(
        self,
        path: Path,
        mode: Literal["xb", "ab", "wb"],
        *,
        max_bytes: int,
        close_seconds: float,
        patient: bool,
    ) -> None:
        self._path = path
        self._mode: Literal["xb", "ab", "wb"] = mode
        self._file: FileIO | None = None
        self._close_seconds = close_seconds
        self._failure: str | None = None
        self._dropped = 0
        """Number of lines dropped because the queue was full."""
        self._accepted = self._written = 0
        """Lines."""
        self._worker = Worker(
            f"the disk of {path.name}",
            "bytes",
            max_pending=max_bytes,
            close_seconds=close_seconds,
            patient=patient,
            failed=self.fail,
            at_end=self._close_file,
        )

    @property
    def failed(self) -> bool:
        """Whether the file has failed, so that further blocks are pointless."""
        return self._failure is not None

    @property
    def error(self) -> str | None:
        """Why the file is incomplete; None if it is complete."""
        reasons = [] if self._failure is None else [self._failure]
        if self._dropped:
            reasons.append(
                f"{self._dropped} lines were dropped, because the disk was too slow for them"
            )
        return "; ".join(reasons) or None

    def fail(self, error: BaseException) -> None:
        """Mark the file as incomplete because of `error`; pending blocks are still written."""
        if self._failure is None:
            self._failure = str(error) or repr(error)
            log.warning("%s is not complete, the run continues: %s", self._path.name, self._failure)

    def put(self, block: bytes) -> None:
        """Write `block`, which consists of whole lines. The counts in :attr:`error` are exact if
        only one thread calls this."""
        lines = block.count(b"\n")
        if self._worker.put(self._write, block, lines, size=len(block)):
            self._accepted += lines
        elif self._worker.error is None:
            self._dropped += lines

    def close(self) -> None:
        """Write the pending blocks, in bounded time."""
        if not self._worker.close() and self._failure is None:
            # The worker has logged this.
            self._failure = (
                f"the disk did not take {self._accepted - self._written} lines within "
                f"{self._close_seconds:g} s"
            )

    def _write(self, block: bytes, lines: int) -> None:
        if self._file is None:
            # Unbuffered: after an error, closing has nothing left to write.
            self._file = FileIO(self._path, self._mode, opener=open_private)
        rest = memoryview(block)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._written += lines

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
