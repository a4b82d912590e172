"""Interrupts the main thread as Ctrl-C does, at random moments."""

from __future__ import annotations

import random
import signal

__all__ = ["InterruptingLoop"]


class InterruptingLoop:
    """Raises KeyboardInterrupt in the trainer's thread, at random moments, until it is closed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._before = signal.getsignal(signal.SIGALRM)

    def __enter__(self) -> InterruptingLoop:
        signal.signal(signal.SIGALRM, self._raise)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        signal.signal(signal.SIGALRM, self._before)

    def start(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0002 + 0.02 * self._random.random())

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    @staticmethod
    def _raise(*_: object) -> None:
        raise KeyboardInterrupt
