"""The routes that a fault can be on: each path of the served API, and names for groups of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec

__all__ = [
    "ABORT",
    "GENERATE",
    "GROUPS",
    "KINDS",
    "PATHS",
    "STEERING",
    "UPDATES",
    "Delay",
    "Die",
    "Drop",
    "DuplicateEvents",
    "DuplicateFinish",
    "EngineWide",
    "ErrorEvent",
    "Fault",
    "FewLogprobs",
    "FloodAnswer",
    "FloodComments",
    "FloodEvent",
    "FloodTokens",
    "Garbage",
    "Hang",
    "IgnoredAbort",
    "InStream",
    "NanLogprob",
    "NoLogprobs",
    "OtherIds",
    "OutOfOrder",
    "RefitFails",
    "Reset",
    "Silence",
    "Slow",
    "SlowLoris",
    "Stall",
    "Status",
    "StuckVersion",
    "Truncate",
    "paths_of",
]

GENERATE = ("/generate",)
ABORT = ("/abort_request",)
STEERING = ("/pause_generation", "/continue_generation", "/flush_cache")
UPDATES = ("/update_weights_from_disk", "/update_weight_version", "/load_lora_adapter")
_CONTROL = (
    *STEERING,
    *ABORT,
    *UPDATES,
    "/unload_lora_adapter",
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
"""Every path that is served."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "all": PATHS,
    "control": _CONTROL,
    "info": _INFO,
    "steering": STEERING,
    "updates": UPDATES,
}
"""What a script may say instead of a list of paths."""


def paths_of(name: str) -> tuple[str, ...]:
    """The paths that `name`, a path or a group, stands for; none if there is no such thing."""
    return GROUPS.get(name, (name,) if name in PATHS else ())


Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
AtLeastOne: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]

GIGABYTE = 2**30


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When and where a fault happens; times in seconds of the event loop since the start.

    Attributes:
        routes: the calls that it may happen to, as paths or groups; the kind's own if empty.
        at, until: only calls that arrive in this time are looked at, and counted.
        after: the first of them that it happens to.
        every: it happens to one in so many from there on.
        probability: of happening to one that it would.
        times: how often it happens at most.
        engines: of which engines of a command, counted from 0; all if empty.
    """

    kind: ClassVar[str]
    default_routes: ClassVar[tuple[str, ...]] = GENERATE
    routes_are_fixed: ClassVar[bool] = False
    """No other routes make sense."""

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
        """Only streamed answers meet it, when they begin; the others are not counted."""
        return False


# -- answers ------------------------------------------------------------------------------------


class Delay(Fault, frozen=True, kw_only=True):
    """The answer comes `seconds` late; with `every_event` each event of a stream does instead."""

    kind = "delay"
    seconds: Seconds
    every_event: bool = False


class Reset(Fault, frozen=True, kw_only=True):
    """The connection is reset (TCP RST): before the answer, or after so many streamed tokens.

    With `carried_out` the call is carried out first, and only its answer is lost.
    """

    kind = "reset"
    after_tokens: Count | None = None
    carried_out: bool = False

    @property
    def in_stream(self) -> bool:
        return self.after_tokens is not None


class Silence(Fault, frozen=True, kw_only=True):
    """No answer for `seconds`; with `carried_out` the call is carried out before."""

    kind = "silence"
    default_routes = STEERING
    seconds: Seconds = float("inf")
    carried_out: bool = False


class Status(Fault, frozen=True, kw_only=True):
    """An HTTP error; `body` is sent as it is, otherwise `message` in SGLang's form."""

    kind = "status"
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 500
    message: str = "a fault of the script"
    body: str | None = None
    carried_out: bool = False


class Truncate(Fault, frozen=True, kw_only=True):
    """JSON cut in half: one event of a stream after so many tokens, or a whole answer."""

    kind = "truncate"
    after_tokens: Count = 0


class Garbage(Fault, frozen=True, kw_only=True):
    """Random bytes instead of a whole answer, or as an event between those of a stream.

    With `raw` they are no event of their own: the next event begins in the middle of their line.
    """

    kind = "garbage"
    bytes: AtLeastOne = 256
    after_tokens: Count = 0
    raw: bool = False


class SlowLoris(Fault, frozen=True, kw_only=True):
    """The answer dribbles out, `bytes` at a time with `seconds` between them."""

    kind = "slow-loris"
    bytes: AtLeastOne = 16
    seconds: Seconds = 0.1


class FloodAnswer(Fault, frozen=True, kw_only=True):
    """An answer of `bytes` bytes that says nothing; on any route but /generate."""

    kind = "flood-answer"
    default_routes = tuple(path for path in GROUPS["all"] if path not in GENERATE)
    bytes: AtLeastOne = GIGABYTE


# -- control calls ------------------------------------------------------------------------------


class RefitFails(Fault, frozen=True, kw_only=True):
    """An update of the weights is refused, and nothing is done.

    SGLang's messages that begin with "Failed to get" say that the old weights are whole.
    """

    kind = "refit-fails"
    default_routes = UPDATES
    status: Literal[200, 400, 500] = 400
    message: str = "Failed to update weights: a fault of the script"


class StuckVersion(Fault, frozen=True, kw_only=True):
    """An update answers that it succeeded, and does nothing: weights and label stay."""

    kind = "stuck-version"
    default_routes = UPDATES


class IgnoredAbort(Fault, frozen=True, kw_only=True):
    """An abort answers 200 and does nothing."""

    kind = "ignored-abort"
    default_routes = ABORT
    routes_are_fixed = True


# -- streams ------------------------------------------------------------------------------------


class InStream(Fault, frozen=True, kw_only=True):
    """In a streamed answer, at the first event after `after_tokens` tokens; never in others."""

    routes_are_fixed: ClassVar[bool] = True
    after_tokens: Count = 0

    @property
    def in_stream(self) -> bool:
        return True


class Drop(InStream, frozen=True, kw_only=True):
    """The stream ends cleanly and unfinished."""

    kind = "drop"


class Stall(InStream, frozen=True, kw_only=True):
    """The stream falls silent for `seconds`, and then goes on."""

    kind = "stall"
    seconds: Seconds = float("inf")


class ErrorEvent(InStream, frozen=True, kw_only=True):
    """An error in the stream, as SGLang words it, ends it."""

    kind = "error-event"
    code: Annotated[int, msgspec.Meta(ge=400, le=599)] = 500
    message: str = "a fault of the script"


class FewLogprobs(InStream, frozen=True, kw_only=True):
    """`missing` logprobs fewer than ids."""

    kind = "few-logprobs"
    missing: AtLeastOne = 1


class NoLogprobs(InStream, frozen=True, kw_only=True):
    """Ids without any logprobs."""

    kind = "no-logprobs"


class NanLogprob(InStream, frozen=True, kw_only=True):
    """A logprob that is no number; SGLang sends null for NaN."""

    kind = "nan-logprob"
    value: Literal["null", "NaN", "Infinity", "-Infinity", "1e999", '"-0.5"'] = "null"


class OtherIds(InStream, frozen=True, kw_only=True):
    """An id that is not the one of its logprob."""

    kind = "other-ids"


class DuplicateEvents(InStream, frozen=True, kw_only=True):
    """Every event from there on is sent twice."""

    kind = "duplicate-events"


class DuplicateFinish(InStream, frozen=True, kw_only=True):
    """The last event is sent twice."""

    kind = "duplicate-finish"


class OutOfOrder(InStream, frozen=True, kw_only=True):
    """Two events change places."""

    kind = "out-of-order"


class FloodEvent(InStream, frozen=True, kw_only=True):
    """One event without an end."""

    kind = "flood-event"
    bytes: AtLeastOne = GIGABYTE


class FloodComments(InStream, frozen=True, kw_only=True):
    """Comment lines without an end; then the stream goes on."""

    kind = "flood-comments"
    bytes: AtLeastOne = GIGABYTE


class FloodTokens(InStream, frozen=True, kw_only=True):
    """`tokens` tokens more than were asked for, of id 0, before the finish.

    Not in responses that end before: what came there could not be told from the model's own.
    """

    kind = "flood-tokens"
    tokens: AtLeastOne = GIGABYTE


# -- the whole engine ---------------------------------------------------------------------------


class EngineWide(Fault, frozen=True, kw_only=True):
    """At the time `at`, once; or with routes, at a call like any other fault."""

    default_routes: ClassVar[tuple[str, ...]] = ()


class Hang(EngineWide, frozen=True, kw_only=True):
    """For `seconds` nothing is decoded and no call is answered; connections are accepted."""

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
"""Every kind by the name that a script calls it."""
