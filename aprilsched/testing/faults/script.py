"""A script of faults: parsed from TOML, and checked before anything is served.

Invariant: a parsed :class:`FaultScript` can be carried out; one that cannot is refused with one
sentence that names the fault.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeAlias, cast

import msgspec

from aprilsched.errors import ConfigError
from aprilsched.testing.faults.kinds import (
    GENERATE,
    GROUPS,
    KINDS,
    PATHS,
    EngineWide,
    Fault,
    FloodAnswer,
    Reset,
    paths_of,
)

__all__ = ["FaultScript", "faults_of", "parse_faults"]

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
        near = get_close_matches(str(kind), KINDS, n=1, cutoff=0.0)
        raise ConfigError(f"{where} has the unknown kind {kind!r}; the nearest one is {near[0]!r}.")
    where = f"{where} ({kind})"
    _refuse_unknown(given, KINDS[kind].__struct_fields__, where)
    try:
        fault = msgspec.convert(given, KINDS[kind])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where} does not fit: {error}.") from error
    for why_not in (_routes(fault), _times(fault), _by_the_clock(fault, given)):
        if why_not is not None:
            raise ConfigError(f"{where} {why_not}.")
    return fault


def _refuse_unknown(given: Table, known: Sequence[str], where: str) -> None:
    for key in given:
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{where} has the unknown key {key!r}; the nearest one is {near!r}.")


def _routes(fault: Fault) -> str | None:
    """Why the fault cannot happen on its routes, or None."""
    for name in fault.routes:
        if not paths_of(name):
            near = get_close_matches(name, (*GROUPS, *PATHS), n=1, cutoff=0.0)[0]
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


def _times(fault: Fault) -> str | None:
    if fault.until is not None and fault.until <= fault.at:
        return f"ends (until = {fault.until:g}) before it begins (at = {fault.at:g})"
    return None


def _by_the_clock(fault: Fault, given: Table) -> str | None:
    """Why the fault cannot happen at a time without a call, or None."""
    if not isinstance(fault, EngineWide) or fault.routes:
        return None
    counted = [key for key in ("until", "after", "every", "times") if key in given]
    if counted:
        return f"happens by the clock, once, and {counted[0]} is about calls; give it routes"
    return None
