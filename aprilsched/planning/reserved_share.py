"""The share of running requests' tokens to come that admission leaves room for.

See :class:`~aprilsched.kernel.values.capabilities.Reservation`; the numbers are SGLang's
(environ.py: SGLANG_INIT_NEW_TOKEN_RATIO and the next three).
"""

from __future__ import annotations

_FIRST = 0.7
_LEAST_OF_FIRST = 0.14
_DECAY_STEPS = 600
_RETRACT_STEPS = 20
"""Tokens of each request that are added to those generated, when the pool has overflowed."""


class ReservedShare:
    """The share at each decode step; it falls between two calls of the other methods.

    With `busy` the engine has been running for long when the first step comes.
    `conservativeness` is the server's --schedule-conservativeness.
    """

    def __init__(self, *, busy: bool = False, conservativeness: float = 1.0) -> None:
        self._first = min(1.0, _FIRST * conservativeness)
        self._least = self._first * _LEAST_OF_FIRST
        self._decay = (self._first - self._least) / _DECAY_STEPS
        self._start, self._step = self._least if busy else self._first, 0

    def at(self, step: int) -> float:
        """Return the share at a decode step."""
        return max(self._least, self._start - (step - self._step) * self._decay)

    def idle(self, step: int) -> None:
        """Record that the engine has neither running nor waiting requests."""
        self._start, self._step = self._first, step

    def overflow(self, step: int, *, requests: int, generated: float, limits: float) -> None:
        """Record that the pool overflowed with `requests` running requests, which have `generated`
        tokens of the sum of their `limits`."""
        self._start = min(1.0, (generated + _RETRACT_STEPS * requests) / (limits + 1))
        self._step = step
