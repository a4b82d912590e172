"""A script of faults: parsed from TOML, checked before anything is served, and carried out in time.

Invariants:
- A parsed :class:`FaultScript` can be carried out; one that cannot is refused with one sentence
  that names the fault.
- A fault counts as fired when it takes effect, not when it is chosen: one that breaks a stream
  after 100 tokens does not happen to a stream of 50.
- Each fault has its own counter and its own random generator, so a change of one fault changes no
  other.
"""

from __future__ import annotations

import tomllib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np

from aprilsched.checks import nearest
from aprilsched.errors import ConfigError
from aprilsched.testing.faults.kinds import (
    GENERATE,
    GROUPS,
    KINDS,
    PATHS,
    EngineWide,
    Fault,
    FloodAnswer,
    Met,
    Reset,
    paths_of,
)

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

    def meet(self, route: str, *, in_stream: bool = False) -> list[Met]:
        """The faults for a call of `route` that has just arrived, in the script's order.

        With `in_stream` these are the faults of streams, for a call that has begun to stream.
        """
        now = self.now()
        own = [t for t in self._triggers if t.fault.in_stream == in_stream]
        return [self._met(t, route) for t in own if t.matches(route, now)]

    def by_the_clock(self) -> list[Met]:
        """The faults that happen without a call; called once."""
        own = [t for t in self._triggers if isinstance(t.fault, EngineWide) and not t.routes]
        return [self._met(t, None) for t in own if t.chance()]

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


# --- script --------------------------------------------------------------------------------------

Table: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class FaultScript:
    """The faults of one server, or of several: :meth:`of_engine` gives one server its own."""

    faults: tuple[Fault, ...] = ()
    seed: tuple[int, ...] = (0,)
    """Seed of all random draws: whether a fault happens, and random bytes."""

    def of_engine(self, index: int) -> FaultScript:
        """The faults of the engine `index`, with a seed of its own."""
        own = tuple(f for f in self.faults if not f.engines or index in f.engines)
        return replace(self, faults=own, seed=(*self.seed, index))


def parse_faults(text: str, where: str = "the fault script") -> FaultScript:
    """Parse the script in `text`; `where` names it in errors.

    Raises:
        ConfigError: if it is not TOML, or has an unknown or impossible fault, key or value.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}.") from error
    return faults_of(content, where)


def faults_of(content: Table, where: str = "the fault script") -> FaultScript:
    """Read a script from the parsed content of its file.

    Raises:
        ConfigError: as :func:`parse_faults`.
    """
    _refuse_unknown(content, ("seed", "fault"), where)
    seed, entries = content.get("seed", 0), content.get("fault", [])
    if type(seed) is not int or seed < 0:
        raise ConfigError(f"{where}: seed is {seed!r}; give a whole number of 0 or more.")
    if not isinstance(entries, list):
        raise ConfigError(f"{where}: fault is not a list; begin each fault with [[fault]].")
    faults = [
        _fault(entry, f"{where}: fault {number}")
        for number, entry in enumerate(cast("list[Any]", entries), start=1)
    ]
    return FaultScript(faults=tuple(faults), seed=(seed,))


def _fault(entry: object, where: str) -> Fault:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} is not a table; begin each fault with [[fault]].")
    given = dict(cast("Table", entry))
    kind = given.pop("kind", None)
    if kind is None:
        raise ConfigError(f"{where} has no kind; give one of {', '.join(KINDS)}.")
    if kind not in KINDS:
        near = nearest(str(kind), KINDS)
        raise ConfigError(f"{where} has the unknown kind {kind!r}; the nearest one is {near!r}.")
    where = f"{where} ({kind})"
    _refuse_unknown(given, KINDS[kind].__struct_fields__, where)
    try:
        fault = msgspec.convert(given, KINDS[kind])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where} does not fit: {error}.") from error
    for why_not in (_routes(fault), _by_the_clock(fault, given)):
        if why_not is not None:
            raise ConfigError(f"{where} {why_not}.")
    return fault


def _refuse_unknown(given: Table, known: Sequence[str], where: str) -> None:
    for key in given:
        if key not in known:
            near = nearest(key, known)
            raise ConfigError(f"{where} has the unknown key {key!r}; the nearest one is {near!r}.")


def _routes(fault: Fault) -> str | None:
    """Why the fault cannot happen to a call, or None."""
    if fault.until is not None and fault.until <= fault.at:
        return f"ends (until = {fault.until:g}) before it begins (at = {fault.at:g})"
    for name in fault.routes:
        if not paths_of(name):
            near = nearest(name, (*GROUPS, *PATHS))
            return f"has the unknown route {name!r}; the nearest one is {near!r}"
    paths = {path for name in fault.routes for path in paths_of(name)}
    if fault.routes_are_fixed and not paths <= set(fault.default_routes):
        return f"happens on {fault.default_routes[0]} only; leave routes out"
    if isinstance(fault, FloodAnswer) and paths.intersection(GENERATE):
        return "is for other routes than /generate; take flood-event, -comments or -tokens there"
    if isinstance(fault, Reset) and fault.after_tokens is not None:
        if fault.carried_out:
            return "has carried_out and after_tokens; a stream is broken in the middle, or is not"
        if not paths <= set(GENERATE):
            return "has after_tokens, and only /generate streams tokens; leave routes out"
    return None


def _by_the_clock(fault: Fault, given: Table) -> str | None:
    """Why the fault cannot happen at a time without a call, or None."""
    if not isinstance(fault, EngineWide) or fault.routes:
        return None
    counted = [key for key in ("until", "after", "every", "times") if key in given]
    if counted:
        return f"happens by the clock, once, and {counted[0]} is about calls; give it routes"
    return None
