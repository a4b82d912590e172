"""Runs a command on a terminal of its own, and reads what it draws and how it ends."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["Terminal", "on_a_terminal"]

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_WAIT_SECONDS = 600.0
"""Longest wait for anything, for a loaded machine. Usually one or two seconds are enough."""


class Terminal:
    """A terminal and its command. A thread reads the output, so the command never waits for it."""

    def __init__(self, reads: int, process: subprocess.Popen[Any]) -> None:
        self.process = process
        self._reads = reads
        self._bytes = bytearray()
        self._news = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._read, daemon=True, name="terminal")
        self._thread.start()

    @property
    def raw(self) -> str:
        """All output so far, including the sequences for cursor and colours."""
        with self._news:
            return self._bytes.decode(errors="replace")

    @property
    def text(self) -> str:
        """All output so far, without the sequences for cursor and colours."""
        return _ESCAPE.sub("", self.raw).replace("\r\n", "\n")

    def wait_for(self, text: str) -> None:
        """Wait until `text` was drawn."""
        with self._news:
            found = self._news.wait_for(
                lambda: text in self._text() or self._closed, timeout=_WAIT_SECONDS
            )
        assert found, f"{text!r} did not come: {self.text[-2000:]}"
        assert text in self.text, self.text[-2000:]

    def type(self, keys: bytes) -> None:
        os.write(self._reads, keys)

    def end(self) -> int:
        """Wait for the command's end; returns its exit code."""
        code = self.process.wait(_WAIT_SECONDS)
        self._thread.join(_WAIT_SECONDS)
        return code

    def _text(self) -> str:
        return _ESCAPE.sub("", self._bytes.decode(errors="replace"))

    def _read(self) -> None:
        while True:
            try:
                some = os.read(self._reads, 1 << 16)
            except OSError:  # Linux raises it when the other side is closed
                some = b""
            with self._news:
                self._bytes += some
                self._closed = not some
                self._news.notify_all()
            if not some:
                return


@contextmanager
def on_a_terminal(
    *arguments: str,
    columns: int = 100,
    lines: int = 30,
    environment: Mapping[str, str] | None = None,
) -> Generator[Terminal]:
    """Run ``aprilsched`` with `arguments` as the foreground job of a new terminal."""
    reads, writes = pty.openpty()
    fcntl.ioctl(writes, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    options: dict[str, Any] = {"stdin": writes, "stdout": writes, "stderr": writes}
    process = subprocess.Popen(
        [sys.executable, "-m", "aprilsched", *arguments],
        env={**kept, "TERM": "xterm-256color", **(environment or {})},
        start_new_session=True,
        preexec_fn=_take_the_terminal,
        **options,
    )
    os.close(writes)
    try:
        yield Terminal(reads, process)
    finally:
        process.kill()
        process.wait()
        os.close(reads)


def _take_the_terminal() -> None:
    """Let Ctrl-C in the terminal reach the command, even if the test runner ignores Ctrl-C."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
