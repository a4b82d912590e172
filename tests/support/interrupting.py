"""Interrupts the main thread as Ctrl-C does, at random moments, and kills the process."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable
from typing import Any

_LONGEST_S = 0.02
"""Longest time to an interrupt, after a call that was not interrupted."""


def raise_interrupt() -> None:
    """What Ctrl-C does in the trainer's thread."""
    raise KeyboardInterrupt


def killed(*_: Any, **__: Any) -> None:
    """End the process as kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def half_written(content: Any, file: Any) -> None:
    """End the process while it writes `file`; it takes the place of pickle.dump."""
    file.write(b"half of it")
    file.flush()
    killed()


class InterruptingLoop:
    """Interrupts the trainer's thread, at random moments, until it is closed."""

    def __init__(self, seed: int, interrupt: Callable[[], None] = raise_interrupt) -> None:
        self._interrupt = interrupt
        self._random = random.Random(seed)
        self._before = signal.getsignal(signal.SIGALRM)
        self._longest = _LONGEST_S

    def __enter__(self) -> InterruptingLoop:
        # An interrupt in a callback of the garbage collector, of which hypothesis has one, is
        # swallowed and fails the test as an exception that cannot be caught.
        self._callbacks, gc.callbacks[:] = gc.callbacks[:], []
        signal.signal(signal.SIGALRM, self._raise)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        signal.signal(signal.SIGALRM, self._before)
        gc.callbacks[:] = self._callbacks

    def start(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0002 + self._longest * self._random.random())

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._longest = _LONGEST_S

    def _raise(self, *_: object) -> None:
        # On a busy machine no call was ever over in 20 ms, so that a test had no end.
        self._longest *= 1.1
        self._interrupt()
