"""Interrupts the main thread as Ctrl-C does, at random moments."""

from __future__ import annotations

import gc
import random
import signal

from aprilsched import blocking

__all__ = ["InterruptingLoop", "taken_under_interrupts"]


_LONGEST_S = 0.02
"""Longest time to an interrupt, after a call that was not interrupted."""


class InterruptingLoop:
    """Raises KeyboardInterrupt in the trainer's thread, at random moments, until it is closed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._before = signal.getsignal(signal.SIGALRM)
        self._longest = _LONGEST_S

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
        signal.setitimer(signal.ITIMER_REAL, 0.0002 + self._longest * self._random.random())

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._longest = _LONGEST_S

    def _raise(self, *_: object) -> None:
        # On a busy machine no call was ever over in 20 ms, so that a test had no end.
        self._longest *= 1.1
        raise KeyboardInterrupt


def taken_under_interrupts(
    rollouts: blocking.RolloutScheduler, batches: int, *, seed: int
) -> tuple[list[int], int]:
    """Open `rollouts` and take so many batches, in calls that are interrupted at random moments.

    Returns the indexes of the batches that the calls returned, and the number of batches that the
    scheduler has delivered. Some calls were interrupted, or there is an assertion.
    """
    got: list[int] = []
    interrupts = 0
    with InterruptingLoop(seed) as alarm, rollouts:
        while len(got) < batches:
            batch = None
            try:
                alarm.start()
                batch = rollouts.next_batch()
                alarm.stop()
            except KeyboardInterrupt:
                interrupts += 1
            if batch is not None:
                got.append(batch.index)
        alarm.stop()
        delivered = rollouts.state.in_flight.counters.batches
    assert interrupts
    return got, delivered
