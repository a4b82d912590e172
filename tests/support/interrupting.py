"""Interrupts the main thread as Ctrl-C does, at random moments."""

from __future__ import annotations

import gc
import random
import signal

__all__ = ["InterruptingLoop"]


class InterruptingLoop:
    """Raises KeyboardInterrupt in the trainer's thread, at random moments, until it is closed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._before = signal.getsignal(signal.SIGALRM)

    def __enter__(self) -> InterruptingLoop:
        # An interrupt in a callback of the garbage collector, of which hypothesis has one, is
        # swallowed and fails the test as an exception that nobody can catch.
        self._callbacks, gc.callbacks[:] = gc.callbacks[:], []
        signal.signal(signal.SIGALRM, self._raise)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        signal.signal(signal.SIGALRM, self._before)
        gc.callbacks[:] = self._callbacks

    def start(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0002 + 0.02 * self._random.random())

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    @staticmethod
    def _raise(*_: object) -> None:
        raise KeyboardInterrupt
