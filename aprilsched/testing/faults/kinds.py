"""The kinds of faults with their parameters, and the routes on which they can happen."""

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
