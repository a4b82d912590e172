"""The share of running requests' tokens to come that admission leaves room for.

See :class:`~aprilsched.kernel.values.capabilities.Reservation`; the numbers are SGLang's
(environ.py: SGLANG_INIT_NEW_TOKEN_RATIO and the next three).
"""

from __future__ import annotations

_FIRST = 0.7
_LEAST = 0.7 * 0.14
_DECAY = (_FIRST - _LEAST) / 600
"""What the share loses in a decode step."""
_RETRACT_STEPS = 20
"""Tokens of each request that are added to those generated, when the pool has overflowed."""


class ReservedShare:
    """The share at each decode step; it falls between two calls of the other methods.

    With `busy` the engine has been running for long when the first step comes.
    """

    def __init__(self, *, busy: bool = False) -> None:
        self._start, self._step = _LEAST if busy else _FIRST, 0

    def at(self, step: int) -> float:
        """Return the share at a decode step."""
        return max(_LEAST, self._start - (step - self._step) * _DECAY)

    def idle(self, step: int) -> None:
        """Record that the engine has neither running nor waiting requests."""
        self._start, self._step = _FIRST, step

    def overflow(self, step: int, *, requests: int, generated: float, limits: float) -> None:
        """Record that the pool overflowed with `requests` running requests, which have `generated`
        tokens of the sum of their `limits`."""
        self._start = min(1.0, (generated + _RETRACT_STEPS * requests) / (limits + 1))
        self._step = step
