"""Decides which fault happens now, and records which have happened.

Invariants:

- A fault counts as fired when it takes effect, not when it is chosen: one that breaks a stream
  after 100 tokens does not happen to a stream of 50.
- Each fault has its own counter and its own random generator, so a change of one fault changes no
  other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import numpy as np

from aprilsched.testing.faults.kinds import EngineWide, Fault, paths_of
from aprilsched.testing.faults.script import FaultScript

__all__ = ["Faults", "Fired", "Met"]

F = TypeVar("F", bound=Fault, covariant=True)

_REMEMBERED = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Fired:
    """A fault that took effect: its time (seconds since the start), its kind and its route."""

    at: float
    kind: str
    route: str | None


class Faults:
    """The faults of one server, made from a script; :meth:`begin` starts their clock."""

    def __init__(self, script: FaultScript) -> None:
        self.fired: Counter[str] = Counter()
        """Number of times that each kind took effect."""
        self.log: deque[Fired] = deque(maxlen=_REMEMBERED)
        """The last faults that took effect."""
        self._triggers = [
            _Trigger(fault, np.random.default_rng((*script.seed, index)))
            for index, fault in enumerate(script.faults)
        ]
        self._clock: Callable[[], float] | None = None
        self._began = 0.0

    def __bool__(self) -> bool:
        return bool(self._triggers)

    def begin(self, clock: Callable[[], float]) -> None:
        """Count the seconds of `clock` from now."""
        self._clock, self._began = clock, clock()

    def now(self) -> float:
        """Seconds since :meth:`begin`."""
        return 0.0 if self._clock is None else self._clock() - self._began

    def meet(self, route: str, *, in_stream: bool = False) -> list[Met[Fault]]:
        """The faults for a call of `route` that has just arrived, in the script's order.

        With `in_stream` these are the faults of streams, for a call that has begun to stream.
        """
        now = self.now()
        own = [t for t in self._triggers if t.fault.in_stream == in_stream]
        return [Met(self, t, route) for t in own if t.matches(route, now)]

    def by_the_clock(self) -> list[Met[EngineWide]]:
        """The faults that happen without a call; called once."""
        own = [t for t in self._triggers if isinstance(t.fault, EngineWide) and not t.routes]
        return [cast("Met[EngineWide]", Met(self, t, None)) for t in own if t.chance()]

    def took_effect(self, trigger: _Trigger, route: str | None) -> None:
        """Record that the fault took effect."""
        trigger.fired += 1
        self.fired[trigger.fault.kind] += 1
        self.log.append(Fired(at=self.now(), kind=trigger.fault.kind, route=route))


class _Trigger:
    """One fault of the script, and how often it was met and fired."""

    def __init__(self, fault: Fault, random: np.random.Generator) -> None:
        self.fault = fault
        self.random = random
        names = fault.routes or fault.default_routes
        self.routes = frozenset(path for name in names for path in paths_of(name))
        self.seen = 0
        self.fired = 0

    @property
    def spent(self) -> bool:
        return self.fault.times is not None and self.fired >= self.fault.times

    def matches(self, route: str, now: float) -> bool:
        """Whether the fault is for a call that arrives now; called once for each call."""
        fault = self.fault
        until = float("inf") if fault.until is None else fault.until
        if route not in self.routes or not fault.at <= now < until:
            return False
        self.seen += 1
        return not self.spent and self._due() and self.chance()

    def _due(self) -> bool:
        past = self.seen - self.fault.after
        return past >= 0 and past % self.fault.every == 0

    def chance(self) -> bool:
        """Draw whether the fault happens, with its probability."""
        return self.fault.probability == 1 or self.random.random() < self.fault.probability


class Met(Generic[F]):
    """A fault that one call has met; whether it fires is decided while the call is answered."""

    def __init__(self, faults: Faults, trigger: _Trigger, route: str | None) -> None:
        self._faults = faults
        self._trigger = trigger
        self._route = route
        self.fault = cast("F", trigger.fault)

    def fire(self) -> bool:
        """Record that the fault takes effect now; False if it is used up."""
        if self._trigger.spent:
            return False
        self._faults.took_effect(self._trigger, self._route)
        return True

    def random_bytes(self, count: int) -> bytes:
        """Draw `count` random bytes without a line feed."""
        return self._trigger.random.bytes(count).replace(b"\n", b"\0")
