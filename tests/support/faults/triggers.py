"""Decides which faults a call meets, and counts those that take effect.

A fault counts as fired when it takes effect: one that cuts a stream after 100 tokens does not
happen to a stream of 50. Each fault has its own counter and its own random generator, so that a
change of one fault changes no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tests.support.faults.kinds import EngineWide, Fault, Met


@dataclass(frozen=True, kw_only=True, slots=True)
class Fired:
    """A fault that took effect: its time (seconds since the start), its kind and its route."""

    at: float
    kind: str
    route: str | None


class Faults:
    """The faults of one server; :meth:`start` starts their clock."""

    def __init__(self, faults: Sequence[Fault], seed: Sequence[int]) -> None:
        self.fired: Counter[str] = Counter()
        """Number of times that each kind took effect."""
        self.log: list[Fired] = []
        """The faults that took effect."""
        self._triggers = [
            _Trigger(fault, np.random.default_rng((*seed, index)))
            for index, fault in enumerate(faults)
        ]
        self._clock: Callable[[], float] | None = None
        self._started_at = 0.0

    def start(self, clock: Callable[[], float]) -> None:
        """Count the seconds of `clock` from now."""
        self._clock, self._started_at = clock, clock()

    def now(self) -> float:
        """Return the seconds since :meth:`start`."""
        return 0.0 if self._clock is None else self._clock() - self._started_at

    def meet(self, route: str, *, in_stream: bool = False) -> list[Met]:
        """Return the faults of a call of `route` that arrives now, in their order.

        With `in_stream` these are the faults of streams, for a call whose stream starts.
        """
        now = self.now()
        candidates = [t for t in self._triggers if (t.fault.after_tokens is not None) == in_stream]
        return [self._met(t, route) for t in candidates if t.matches(route, now)]

    def by_the_clock(self) -> list[Met]:
        """Return the faults that happen without a call; called once."""
        own = [t for t in self._triggers if isinstance(t.fault, EngineWide) and not t.fault.routes]
        return [self._met(t, None) for t in own if t.draw()]

    def _met(self, trigger: _Trigger, route: str | None) -> Met:
        return Met(trigger.fault, partial(self._fire, trigger, route), trigger.random)

    def _fire(self, trigger: _Trigger, route: str | None) -> bool:
        if trigger.spent:
            return False
        trigger.fired += 1
        self.fired[trigger.fault.kind] += 1
        self.log.append(Fired(at=self.now(), kind=trigger.fault.kind, route=route))
        return True


class _Trigger:
    """One fault, and how often it was met and fired."""

    def __init__(self, fault: Fault, random: np.random.Generator) -> None:
        self.fault = fault
        self.random = random
        self.calls = 0
        self.fired = 0

    @property
    def spent(self) -> bool:
        return self.fired >= self.fault.times

    def matches(self, route: str, now: float) -> bool:
        """Return whether the fault is for a call that arrives now; called once for each call."""
        fault = self.fault
        if route not in fault.routes or not fault.at <= now < fault.until:
            return False
        self.calls += 1
        return not self.spent and self.calls >= fault.after and self.draw()

    def draw(self) -> bool:
        """Draw whether the fault happens, with its probability."""
        return self.fault.probability == 1 or self.random.random() < self.fault.probability
