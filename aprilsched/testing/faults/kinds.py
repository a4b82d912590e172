"""The kinds of faults: their parameters, the routes on which they happen, and what they do.

A kind only says what happens, to a whole answer or to a stream; the middleware carries it out.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
import numpy as np
from aiohttp import web

from aprilsched.serving.calls import CONTROL, INFO
from aprilsched.serving.refusals import as_json
from aprilsched.serving.streams import DONE, Event, Item, frame_item

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
_MODELLED = (
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/release_memory_occupation",
    "/resume_memory_occupation",
)
"""Control calls that the test server alone has."""
GROUPS: Mapping[str, tuple[str, ...]] = {
    "all": (*GENERATE, *CONTROL, *_MODELLED, *INFO),
    "control": (*CONTROL, *_MODELLED),
    "info": INFO,
    "steering": STEERING,
    "updates": UPDATES,
}
"""Names that a script may use instead of a list of paths."""
PATHS = GROUPS["all"]
"""Every path of the served API."""


def paths_of(name: str) -> tuple[str, ...]:
    """The paths for which `name`, a path or a group, stands; none if it is unknown."""
    return GROUPS.get(name, (name,) if name in PATHS else ())


class Broken(Exception):
    """Ends a call whose connection must be reset."""


async def wait(seconds: float) -> None:
    """Sleep for `seconds`, which may be infinite."""
    if math.isfinite(seconds):
        await asyncio.sleep(seconds)
    else:
        await asyncio.Event().wait()


Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
AtLeastOne: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]

Step: TypeAlias = Item | float | Broken | None
"""What happens next in an answer: an event or bytes are sent, seconds pass, the connection breaks,
or, for None, the item follows that the stream has next."""
Steps: TypeAlias = Iterable[Step]
Told: TypeAlias = web.Response | bytes | float | Broken | Steps | None
"""What a call is answered: something else, another body, the server's own answer after so many
seconds, nothing on a broken connection, or a body in steps; None leaves the answer alone."""

GIGABYTE = 2**30
_PIECE = 2**16
_TOKENS_A_TIME = 64
_MADE_UP = (-1.0, 0, None)
Body: TypeAlias = bytes
"""The body of an answer; some kinds have a number that is called `bytes`."""

KINDS: dict[str, type[Fault]] = {}
"""Every kind, by its name in a script."""


@dataclass(frozen=True, slots=True)
class Met:
    """A fault that one call has met; whether it takes effect is decided while the call is answered.

    Attributes:
        fault: what happens.
        fire: records that it takes effect now; returns False if the fault is used up.
        random: the fault's own random draws.
    """

    fault: Fault
    fire: Callable[[], bool]
    random: np.random.Generator

    def random_bytes(self, count: int) -> bytes:
        """Draw `count` random bytes without a line feed."""
        return self.random.bytes(count).replace(b"\n", b"\0")


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
    """Its name in a script; a class without one is a base of several kinds."""
    default_routes: ClassVar[tuple[str, ...]] = GENERATE
    routes_are_fixed: ClassVar[bool] = False
    """Whether the fault makes sense on its default routes only."""
    ends: ClassVar[bool] = False
    """Whether a stream ends with it."""

    routes: tuple[str, ...] = ()
    at: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    until: Seconds | None = None
    after: AtLeastOne = 1
    every: AtLeastOne = 1
    probability: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    times: AtLeastOne | None = None
    engines: tuple[Count, ...] = ()

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            KINDS[cls.kind] = cls

    @property
    def in_stream(self) -> bool:
        """Whether only streamed answers meet it, when they begin; other calls are not counted."""
        return False

    @property
    def tokens_before(self) -> int:
        """Number of tokens of a stream after which it may happen."""
        return 0

    @property
    def late(self) -> bool:
        """Whether a call is carried out before it happens to its answer."""
        return False

    def answer(self, met: Met, body: Body) -> Told:
        """What a call is answered, where the server's own answer has `body`."""
        return None

    def instead(self, met: Met, event: Event) -> Steps | None:
        """What comes in the place of an event of a stream; None if it does not happen to it."""
        return self.again(event)

    def again(self, item: Item) -> Steps | None:
        """What comes in the place of every item from the first on to which it happens; None if it
        happens to one event alone."""
        return None


class CarriedOut(Fault, frozen=True, kw_only=True):
    """A fault that happens before the call, or after it with `carried_out`."""

    carried_out: bool = False

    @property
    def late(self) -> bool:
        return self.carried_out


class AfterTokens(Fault, frozen=True, kw_only=True):
    """A fault of streams that happens at the first event that it fits after `after_tokens`."""

    after_tokens: Count = 0

    @property
    def tokens_before(self) -> int:
        return self.after_tokens


# -- answers ------------------------------------------------------------------------------------


class Delay(Fault, frozen=True, kw_only=True):
    """The answer comes `seconds` late; with `every_event`, each event of a stream comes late."""

    kind = "delay"
    seconds: Seconds
    every_event: bool = False

    def answer(self, met: Met, body: Body) -> float | None:
        return None if self.every_event else self.seconds

    def again(self, item: Item) -> Steps | None:
        return [self.seconds, item] if self.every_event else None


class Reset(CarriedOut, frozen=True, kw_only=True):
    """The connection is reset (TCP RST), before the answer or after `after_tokens` tokens.

    With `carried_out` the call is carried out first, and only its answer is lost.
    """

    kind = "reset"
    after_tokens: Count | None = None

    @property
    def in_stream(self) -> bool:
        return self.after_tokens is not None

    @property
    def tokens_before(self) -> int:
        return self.after_tokens or 0

    def answer(self, met: Met, body: Body) -> Broken | None:
        return None if self.in_stream else Broken()

    def instead(self, met: Met, event: Event) -> Steps | None:
        return [Broken()] if self.in_stream else None


class Silence(CarriedOut, frozen=True, kw_only=True):
    """There is no answer for `seconds`; with `carried_out` the call is carried out before."""

    kind = "silence"
    default_routes = STEERING
    seconds: Seconds = float("inf")

    def answer(self, met: Met, body: Body) -> float:
        return self.seconds


class Status(CarriedOut, frozen=True, kw_only=True):
    """The answer is an HTTP error with the body `body`, or with `message` in SGLang's form.

    `retry_after` is the Retry-After header, in seconds; None for no such header.
    """

    kind = "status"
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 500
    message: str = "a fault of the script"
    body: str | None = None
    retry_after: Seconds | None = None

    def answer(self, met: Met, body: Body) -> web.Response:
        answer = as_json({"error": {"message": self.message}}, self.status)
        if self.body is not None:
            answer = web.Response(status=self.status, text=self.body)
        if self.retry_after is not None:
            answer.headers["Retry-After"] = f"{self.retry_after:g}"
        return answer


class Spoiled(Fault, frozen=True, kw_only=True):
    """A fault that spoils what the server answers."""

    @property
    def late(self) -> bool:
        return True


class Truncate(Spoiled, AfterTokens, frozen=True, kw_only=True):
    """JSON is cut in half: a whole answer, or one event of a stream after `after_tokens` tokens."""

    kind = "truncate"

    def answer(self, met: Met, body: Body) -> bytes:
        return body[: len(body) // 2]

    def instead(self, met: Met, event: Event) -> Steps:
        whole = frame_item(event)
        return [whole[: len(whole) // 2] + b"\n\n"]


class Garbage(Spoiled, AfterTokens, frozen=True, kw_only=True):
    """Random bytes replace a whole answer, or come as an additional event of a stream.

    With `raw` they are not an event: the next event begins in the middle of their line.
    """

    kind = "garbage"
    bytes: AtLeastOne = 256
    raw: bool = False

    def answer(self, met: Met, body: Body) -> Body:
        return met.random_bytes(self.bytes)

    def instead(self, met: Met, event: Event) -> Steps:
        noise = met.random_bytes(self.bytes)
        return [noise if self.raw else b"data: " + noise + b"\n\n", event]


class SlowLoris(Spoiled, frozen=True, kw_only=True):
    """The answer comes slowly: `bytes` bytes at a time, with `seconds` between them."""

    kind = "slow-loris"
    bytes: AtLeastOne = 16
    seconds: Seconds = 0.1

    def answer(self, met: Met, body: Body) -> Steps | None:
        return self._dribble(body) if body else None

    def again(self, item: Item) -> Steps:
        return self._dribble(frame_item(item))

    def _dribble(self, data: Body) -> Iterator[Step]:
        for start in range(0, len(data), self.bytes):
            yield self.seconds
            yield data[start : start + self.bytes]


class FloodAnswer(Spoiled, frozen=True, kw_only=True):
    """The answer has `bytes` bytes without meaning; on any route except /generate."""

    kind = "flood-answer"
    default_routes = tuple(path for path in PATHS if path not in GENERATE)
    bytes: AtLeastOne = GIGABYTE

    def answer(self, met: Met, body: Body) -> Steps:
        return _flood(b"[", b"1,", self.bytes)


# -- control calls ------------------------------------------------------------------------------


class RefitFails(Fault, frozen=True, kw_only=True):
    """An update of the weights is refused and not carried out.

    SGLang's messages that begin with "Failed to get" mean that the old weights are intact.
    """

    kind = "refit-fails"
    default_routes = UPDATES
    status: Literal[200, 400, 500] = 400
    message: str = "Failed to update weights: a fault of the script"

    def answer(self, met: Met, body: Body) -> web.Response:
        content = {"success": False, "message": self.message, "error_message": self.message}
        return as_json(content, self.status)


class StuckVersion(Fault, frozen=True, kw_only=True):
    """An update reports success but is not carried out: weights and label stay."""

    kind = "stuck-version"
    default_routes = UPDATES

    def answer(self, met: Met, body: Body) -> web.Response:
        return as_json({"success": True, "message": "Succeeded to update model weights."})


class IgnoredAbort(Fault, frozen=True, kw_only=True):
    """An abort is answered with 200 and not carried out."""

    kind = "ignored-abort"
    default_routes = ABORT
    routes_are_fixed = True

    def answer(self, met: Met, body: Body) -> web.Response:
        return web.Response()


# -- streams ------------------------------------------------------------------------------------


class InStream(AfterTokens, frozen=True, kw_only=True):
    """A fault of streamed answers only."""

    routes_are_fixed: ClassVar[bool] = True

    @property
    def in_stream(self) -> bool:
        return True


class Drop(InStream, frozen=True, kw_only=True):
    """The stream ends cleanly before the response does."""

    kind = "drop"
    ends = True

    def instead(self, met: Met, event: Event) -> Steps:
        return []


class Stall(InStream, frozen=True, kw_only=True):
    """The stream is silent for `seconds`, and then continues."""

    kind = "stall"
    seconds: Seconds = float("inf")

    def instead(self, met: Met, event: Event) -> Steps:
        return [self.seconds, event]


class ErrorEvent(InStream, frozen=True, kw_only=True):
    """An error event in SGLang's form ends the stream."""

    kind = "error-event"
    ends = True
    code: Annotated[int, msgspec.Meta(ge=400, le=599)] = 500
    message: str = "a fault of the script"

    def instead(self, met: Met, event: Event) -> Steps:
        kind = "InternalServerError" if self.code >= 500 else "BadRequest"
        return [{"error": {"message": self.message, "type": kind, "code": self.code}}, DONE]


class WrongLogprobs(InStream, frozen=True, kw_only=True):
    """A fault of an event that has tokens with their logprobs."""

    def instead(self, met: Met, event: Event) -> Steps | None:
        given = event.get("meta_info", {}).get("output_token_logprobs")
        return [self.spoil(event, given)] if given else None

    def spoil(self, event: Event, given: list[tuple[Any, ...]]) -> Event:
        """The event with something wrong in it; `given` are its logprobs."""
        raise NotImplementedError


class FewLogprobs(WrongLogprobs, frozen=True, kw_only=True):
    """An event has `missing` fewer logprobs than ids."""

    kind = "few-logprobs"
    missing: AtLeastOne = 1

    def spoil(self, event: Event, given: list[tuple[Any, ...]]) -> Event:
        return _with(event, output_token_logprobs=given[: -self.missing])


class NoLogprobs(WrongLogprobs, frozen=True, kw_only=True):
    """An event has ids but no logprobs."""

    kind = "no-logprobs"

    def spoil(self, event: Event, given: list[tuple[Any, ...]]) -> Event:
        names = ("output_token_logprobs", "output_token_logprobs_length")
        meta = {name: value for name, value in event["meta_info"].items() if name not in names}
        return {**event, "meta_info": meta}


class NanLogprob(WrongLogprobs, frozen=True, kw_only=True):
    """A logprob is not a number; SGLang sends null for NaN."""

    kind = "nan-logprob"
    value: Literal["null", "NaN", "Infinity", "-Infinity", "1e999", '"-0.5"'] = "null"

    def spoil(self, event: Event, given: list[tuple[Any, ...]]) -> Event:
        *before, (_, token, text) = given
        raw = msgspec.Raw(self.value.encode())
        return _with(event, output_token_logprobs=[*before, (raw, token, text)])


class OtherIds(WrongLogprobs, frozen=True, kw_only=True):
    """An id differs from the id of its logprob."""

    kind = "other-ids"

    def spoil(self, event: Event, given: list[tuple[Any, ...]]) -> Event:
        *before, last = event["output_ids"]
        return {**event, "output_ids": [*before, last ^ 1]}


class DuplicateEvents(InStream, frozen=True, kw_only=True):
    """Every event from there on is sent twice."""

    kind = "duplicate-events"

    def again(self, item: Item) -> Steps:
        return [item, item]


class DuplicateFinish(InStream, frozen=True, kw_only=True):
    """The last event is sent twice."""

    kind = "duplicate-finish"

    def instead(self, met: Met, event: Event) -> Steps | None:
        return [event, event] if _finish_of(event) else None


class OutOfOrder(InStream, frozen=True, kw_only=True):
    """Two consecutive events are swapped."""

    kind = "out-of-order"

    def instead(self, met: Met, event: Event) -> Steps | None:
        return None if _finish_of(event) else [None, event]


class FloodEvent(InStream, frozen=True, kw_only=True):
    """One event does not end."""

    kind = "flood-event"
    ends = True
    bytes: AtLeastOne = GIGABYTE

    def instead(self, met: Met, event: Event) -> Steps:
        return _flood(b'data: {"output_ids": [', b"1,", self.bytes)


class FloodComments(InStream, frozen=True, kw_only=True):
    """A flood of comment lines arrives; then the stream continues."""

    kind = "flood-comments"
    bytes: AtLeastOne = GIGABYTE

    def instead(self, met: Met, event: Event) -> Steps:
        yield from _flood(b"", b": nothing\n\n", self.bytes)
        yield event


class FloodTokens(InStream, frozen=True, kw_only=True):
    """`tokens` tokens of id 0, more than were asked for, arrive before the finish.

    It does not happen to responses that end earlier: nothing would distinguish the additional
    tokens from the model's own.
    """

    kind = "flood-tokens"
    tokens: AtLeastOne = GIGABYTE

    def instead(self, met: Met, event: Event) -> Steps | None:
        finish = _finish_of(event)
        return self._flood_tokens(event) if finish and finish["type"] == "length" else None

    def _flood_tokens(self, last: Event) -> Iterator[Event]:
        """Make the `last` event unfinished, add invented tokens, and finish with the new count."""
        meta = last["meta_info"]
        yield _with(last, finish_reason=None, weight_versions=None)
        total: int = meta["completion_tokens"]
        end = total + self.tokens
        while total < end:
            count = min(_TOKENS_A_TIME, end - total)
            total += count
            event = _with({**last, "output_ids": [_MADE_UP[1]] * count}, completion_tokens=total)
            if "output_token_logprobs" in meta:
                event["meta_info"]["output_token_logprobs"] = [_MADE_UP] * count
                event["meta_info"]["output_token_logprobs_length"] = total
            if total < end:
                event = _with(event, finish_reason=None, weight_versions=None)
            elif spans := meta.get("weight_versions"):
                event = _with(event, weight_versions=[*spans[:-1], {**spans[-1], "end": end}])
            yield event


def _finish_of(event: Event) -> dict[str, Any] | None:
    """Why the response ends with `event`; None if it goes on."""
    return event.get("meta_info", {}).get("finish_reason")


def _with(event: Event, **changes: Any) -> Event:
    return {**event, "meta_info": {**event["meta_info"], **changes}}


def _flood(begin: bytes, again: bytes, total: int) -> Iterator[bytes]:
    """`total` bytes in pieces: `begin`, then `again` over and over."""
    yield begin
    piece = again * (_PIECE // len(again))
    for sent in range(0, total - len(begin), len(piece)):
        yield piece[: total - len(begin) - sent]


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
