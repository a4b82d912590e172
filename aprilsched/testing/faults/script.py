"""A script of faults: parsed from TOML, and checked before anything is served.

Invariant: a parsed :class:`FaultScript` can be carried out; one that cannot is refused with one
sentence that names the fault.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
import tomllib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar, cast

import msgspec
import numpy as np

from aprilsched.errors import ConfigError

# Broken connections, and waits that may be endless.

_NO_LINGER = struct.pack("ii", 1, 0)


class Broken(Exception):
    """Ends a call whose connection must be reset."""


def reset(transport: asyncio.BaseTransport | None) -> None:
    """Close with a TCP RST: the peer sees a broken connection, and no end of the stream."""
    if not isinstance(transport, asyncio.WriteTransport):
        return
    held: socket.socket | None = transport.get_extra_info("socket")
    if held is not None and held.fileno() >= 0:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()


async def wait(seconds: float) -> None:
    """Sleep for `seconds`, which may be infinite."""
    if math.isfinite(seconds):
        await asyncio.sleep(seconds)
    else:
        await asyncio.Event().wait()


# --- kinds ---------------------------------------------------------------------------------------

# The kinds of faults with their parameters, and the routes on which they can happen.

GENERATE = ("/generate",)
ABORT = ("/abort_request",)
STEERING = ("/pause_generation", "/continue_generation", "/flush_cache")
UPDATES = (
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weight_version",
    "/load_lora_adapter",
)
_CONTROL = (
    *STEERING,
    *ABORT,
    *UPDATES,
    "/unload_lora_adapter",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/begin_weight_update",
    "/end_weight_update",
    "/release_memory_occupation",
    "/resume_memory_occupation",
)
_INFO = (
    "/model_info",
    "/get_model_info",
    "/server_info",
    "/get_server_info",
    "/openapi.json",
    "/v1/loads",
    "/v1/models",
    "/ready",
    "/health",
    "/health_generate",
)
PATHS = (*GENERATE, *_CONTROL, *_INFO)
"""Every path of the served API."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "all": PATHS,
    "control": _CONTROL,
    "info": _INFO,
    "steering": STEERING,
    "updates": UPDATES,
}
"""Names that a script may use instead of a list of paths."""


def paths_of(name: str) -> tuple[str, ...]:
    """The paths for which `name`, a path or a group, stands; none if it is unknown."""
    return GROUPS.get(name, (name,) if name in PATHS else ())


Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
AtLeastOne: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]

GIGABYTE = 2**30


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When and where a fault happens; times are seconds of the event loop since the start.

    Attributes:
        routes: calls to which it may happen, as paths or groups; if empty, those of the kind.
        at, until: only calls that arrive between these times are considered and counted.
        after: number of the first of these calls to which it happens.
        every: from there on it happens to one call in this number.
        probability: probability with which it happens to such a call.
        times: largest number of times that it happens.
        engines: engines of a command to which it happens, counted from 0; all if empty.
    """

    kind: ClassVar[str]
    default_routes: ClassVar[tuple[str, ...]] = GENERATE
    routes_are_fixed: ClassVar[bool] = False
    """Whether the fault makes sense on its default routes only."""

    routes: tuple[str, ...] = ()
    at: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    until: Seconds | None = None
    after: AtLeastOne = 1
    every: AtLeastOne = 1
    probability: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    times: AtLeastOne | None = None
    engines: tuple[Count, ...] = ()

    @property
    def in_stream(self) -> bool:
        """Whether only streamed answers meet it, when they begin; other calls are not counted."""
        return False


# -- answers ------------------------------------------------------------------------------------


class Delay(Fault, frozen=True, kw_only=True):
    """The answer comes `seconds` late; with `every_event`, each event of a stream comes late."""

    kind = "delay"
    seconds: Seconds
    every_event: bool = False


class Reset(Fault, frozen=True, kw_only=True):
    """The connection is reset (TCP RST), before the answer or after `after_tokens` tokens.

    With `carried_out` the call is carried out first, and only its answer is lost.
    """

    kind = "reset"
    after_tokens: Count | None = None
    carried_out: bool = False

    @property
    def in_stream(self) -> bool:
        return self.after_tokens is not None


class Silence(Fault, frozen=True, kw_only=True):
    """There is no answer for `seconds`; with `carried_out` the call is carried out before."""

    kind = "silence"
    default_routes = STEERING
    seconds: Seconds = float("inf")
    carried_out: bool = False


class Status(Fault, frozen=True, kw_only=True):
    """The answer is an HTTP error with the body `body`, or with `message` in SGLang's form."""

    kind = "status"
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 500
    message: str = "a fault of the script"
    body: str | None = None
    carried_out: bool = False


class Truncate(Fault, frozen=True, kw_only=True):
    """JSON is cut in half: a whole answer, or one event of a stream after `after_tokens` tokens."""

    kind = "truncate"
    after_tokens: Count = 0


class Garbage(Fault, frozen=True, kw_only=True):
    """Random bytes replace a whole answer, or come as an additional event of a stream.

    With `raw` they are not an event: the next event begins in the middle of their line.
    """

    kind = "garbage"
    bytes: AtLeastOne = 256
    after_tokens: Count = 0
    raw: bool = False


class SlowLoris(Fault, frozen=True, kw_only=True):
    """The answer comes slowly: `bytes` bytes at a time, with `seconds` between them."""

    kind = "slow-loris"
    bytes: AtLeastOne = 16
    seconds: Seconds = 0.1


class FloodAnswer(Fault, frozen=True, kw_only=True):
    """The answer has `bytes` bytes without meaning; on any route except /generate."""

    kind = "flood-answer"
    default_routes = tuple(path for path in GROUPS["all"] if path not in GENERATE)
    bytes: AtLeastOne = GIGABYTE


# -- control calls ------------------------------------------------------------------------------


class RefitFails(Fault, frozen=True, kw_only=True):
    """An update of the weights is refused and not carried out.

    SGLang's messages that begin with "Failed to get" mean that the old weights are intact.
    """

    kind = "refit-fails"
    default_routes = UPDATES
    status: Literal[200, 400, 500] = 400
    message: str = "Failed to update weights: a fault of the script"


class StuckVersion(Fault, frozen=True, kw_only=True):
    """An update reports success but is not carried out: weights and label stay."""

    kind = "stuck-version"
    default_routes = UPDATES


class IgnoredAbort(Fault, frozen=True, kw_only=True):
    """An abort is answered with 200 and not carried out."""

    kind = "ignored-abort"
    default_routes = ABORT
    routes_are_fixed = True


# -- streams ------------------------------------------------------------------------------------


class InStream(Fault, frozen=True, kw_only=True):
    """A fault of streamed answers only; it happens at the first event after `after_tokens`."""

    routes_are_fixed: ClassVar[bool] = True
    after_tokens: Count = 0

    @property
    def in_stream(self) -> bool:
        return True


class Drop(InStream, frozen=True, kw_only=True):
    """The stream ends cleanly before the response does."""

    kind = "drop"


class Stall(InStream, frozen=True, kw_only=True):
    """The stream is silent for `seconds`, and then continues."""

    kind = "stall"
    seconds: Seconds = float("inf")


class ErrorEvent(InStream, frozen=True, kw_only=True):
    """An error event in SGLang's form ends the stream."""

    kind = "error-event"
    code: Annotated[int, msgspec.Meta(ge=400, le=599)] = 500
    message: str = "a fault of the script"


class FewLogprobs(InStream, frozen=True, kw_only=True):
    """An event has `missing` fewer logprobs than ids."""

    kind = "few-logprobs"
    missing: AtLeastOne = 1


class NoLogprobs(InStream, frozen=True, kw_only=True):
    """An event has ids but no logprobs."""

    kind = "no-logprobs"


class NanLogprob(InStream, frozen=True, kw_only=True):
    """A logprob is not a number; SGLang sends null for NaN."""

    kind = "nan-logprob"
    value: Literal["null", "NaN", "Infinity", "-Infinity", "1e999", '"-0.5"'] = "null"


class OtherIds(InStream, frozen=True, kw_only=True):
    """An id differs from the id of its logprob."""

    kind = "other-ids"


class DuplicateEvents(InStream, frozen=True, kw_only=True):
    """Every event from there on is sent twice."""

    kind = "duplicate-events"


class DuplicateFinish(InStream, frozen=True, kw_only=True):
    """The last event is sent twice."""

    kind = "duplicate-finish"


class OutOfOrder(InStream, frozen=True, kw_only=True):
    """Two consecutive events are swapped."""

    kind = "out-of-order"


class FloodEvent(InStream, frozen=True, kw_only=True):
    """One event does not end."""

    kind = "flood-event"
    bytes: AtLeastOne = GIGABYTE


class FloodComments(InStream, frozen=True, kw_only=True):
    """A flood of comment lines arrives; then the stream continues."""

    kind = "flood-comments"
    bytes: AtLeastOne = GIGABYTE


class FloodTokens(InStream, frozen=True, kw_only=True):
    """`tokens` tokens of id 0, more than were asked for, arrive before the finish.

    It does not happen to responses that end earlier: nothing would distinguish the additional
    tokens from the model's own.
    """

    kind = "flood-tokens"
    tokens: AtLeastOne = GIGABYTE


# -- the whole engine ---------------------------------------------------------------------------


class EngineWide(Fault, frozen=True, kw_only=True):
    """A fault of the whole engine: once at the time `at`, or with routes at a call."""

    default_routes: ClassVar[tuple[str, ...]] = ()


class Hang(EngineWide, frozen=True, kw_only=True):
    """For `seconds` nothing decodes and no call is answered; connections are accepted."""

    kind = "hang"
    seconds: Seconds


class Slow(EngineWide, frozen=True, kw_only=True):
    """For `seconds` the engine decodes at `factor` of its speed."""

    kind = "slow"
    seconds: Seconds
    factor: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.1


class Die(EngineWide, frozen=True, kw_only=True):
    """Every connection is reset and nothing listens; after `seconds` a new process does.

    It has the weights that the first one started with (version 0), unless it `keeps_weights`.
    """

    kind = "die"
    seconds: Seconds = float("inf")
    keeps_weights: bool = False


KINDS: Mapping[str, type[Fault]] = {
    found.kind: found
    for found in (
        Delay,
        Reset,
        Silence,
        Status,
        Truncate,
        Garbage,
        SlowLoris,
        FloodAnswer,
        RefitFails,
        StuckVersion,
        IgnoredAbort,
        Drop,
        Stall,
        ErrorEvent,
        FewLogprobs,
        NoLogprobs,
        NanLogprob,
        OtherIds,
        DuplicateEvents,
        DuplicateFinish,
        OutOfOrder,
        FloodEvent,
        FloodComments,
        FloodTokens,
        Hang,
        Slow,
        Die,
    )
}
"""Every kind, by its name in a script."""


# --- choosing ------------------------------------------------------------------------------------

# Decides which fault happens now, and records which have happened.
#
# Invariants:
#
# - A fault counts as fired when it takes effect, not when it is chosen: one that breaks a stream
#   after 100 tokens does not happen to a stream of 50.
# - Each fault has its own counter and its own random generator, so a change of one fault changes no
#   other.

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
