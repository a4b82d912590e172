"""Carries out the faults of streams; a changed event is a copy, never the given one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeAlias

import msgspec

from aprilsched.serving import DONE, Event, Item, framed
from aprilsched.testing.faults.script import (
    Broken,
    Delay,
    Drop,
    DuplicateEvents,
    DuplicateFinish,
    ErrorEvent,
    Fault,
    FewLogprobs,
    FloodComments,
    FloodEvent,
    FloodTokens,
    Garbage,
    Met,
    NanLogprob,
    NoLogprobs,
    OtherIds,
    OutOfOrder,
    Reset,
    SlowLoris,
    Stall,
    Truncate,
    wait,
)

_TOKENS_A_TIME = 64
_MADE_UP = (-1.0, 0, None)


def has_logprobs(event: Event) -> bool:
    """Whether the event brings tokens with their logprobs."""
    return bool(event.get("meta_info", {}).get("output_token_logprobs"))


def finishes(event: Event) -> bool:
    """Whether the event is the last one."""
    return event.get("meta_info", {}).get("finish_reason") is not None


def has_all_its_tokens(event: Event) -> bool:
    """Whether the event ends a response that is as long as was asked for."""
    return finishes(event) and event["meta_info"]["finish_reason"]["type"] == "length"


def error_event(fault: ErrorEvent) -> Event:
    """The error that SGLang sends in the middle of a stream."""
    kind = "InternalServerError" if fault.code >= 500 else "BadRequest"
    return {"error": {"message": fault.message, "type": kind, "code": fault.code}}


def more_tokens(fault: FloodTokens, last: Event) -> Iterator[Event]:
    """Make the `last` event unfinished, add invented tokens, and finish with the new count."""
    meta = last["meta_info"]
    yield _with(last, finish_reason=None, weight_versions=None)
    total: int = meta["completion_tokens"]
    end = total + fault.tokens
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


def _few_logprobs(fault: FewLogprobs, event: Event) -> Item:
    return _with(event, output_token_logprobs=_triples(event)[: -fault.missing])


def _no_logprobs(_: NoLogprobs, event: Event) -> Item:
    names = ("output_token_logprobs", "output_token_logprobs_length")
    meta = {name: value for name, value in event["meta_info"].items() if name not in names}
    return {**event, "meta_info": meta}


def _nan_logprob(fault: NanLogprob, event: Event) -> Item:
    *before, (_, token, text) = _triples(event)
    raw = msgspec.Raw(fault.value.encode())
    return _with(event, output_token_logprobs=[*before, (raw, token, text)])


def _other_ids(_: OtherIds, event: Event) -> Item:
    *before, last = event["output_ids"]
    return {**event, "output_ids": [*before, last ^ 1]}


def _truncated(_: Truncate, event: Event) -> Item:
    whole = framed(event)
    return whole[: len(whole) // 2] + b"\n\n"


def _triples(event: Event) -> list[tuple[Any, ...]]:
    return event["meta_info"]["output_token_logprobs"]


def _with(event: Event, **changes: Any) -> Event:
    return {**event, "meta_info": {**event["meta_info"], **changes}}


CHANGES: Mapping[type[Fault], tuple[Callable[[Any, Event], Item], Callable[[Event], bool]]] = {
    FewLogprobs: (_few_logprobs, has_logprobs),
    NoLogprobs: (_no_logprobs, has_logprobs),
    NanLogprob: (_nan_logprob, has_logprobs),
    OtherIds: (_other_ids, has_logprobs),
    Truncate: (_truncated, bool),
}
"""The faults that change one event: how they do it, and which events can show it."""


Items: TypeAlias = AsyncGenerator[Item, None]
Stage: TypeAlias = Callable[[Met[Any], Items], Items]

_PIECE = 2**16


async def spoiled(mets: Sequence[Met[Fault]], items: Items) -> Items:
    """Apply the faults to `items`, one fault after the other."""
    async with AsyncExitStack() as stack:
        for met in mets:
            if (stage := _STAGES.get(type(met.fault))) is not None:
                items = stage(met, items)
                await stack.enter_async_context(aclosing(items))
        async for item in items:
            yield item


def flood(begin: bytes, again: bytes, total: int) -> Iterator[bytes]:
    """Yield `total` bytes in pieces: `begin`, then `again` over and over."""
    yield begin
    piece = again * (_PIECE // len(again))
    for sent in range(0, total - len(begin), len(piece)):
        yield piece[: total - len(begin) - sent]


async def dribbled(fault: SlowLoris, data: bytes) -> AsyncGenerator[bytes, None]:
    """Yield `data` a few bytes at a time."""
    for start in range(0, len(data), fault.bytes):
        await wait(fault.seconds)
        yield data[start : start + fault.bytes]


class _Spot:
    """The place in a stream at which a fault happens."""

    def __init__(self, met: Met[Any], after_tokens: int = 0) -> None:
        self._met = met
        self._after = after_tokens
        self._sent = 0
        self._over = False

    def reached(self, item: Item, fits: Callable[[Event], bool] = bool) -> bool:
        """Whether the fault happens at `item`, which must fit; called once for each item."""
        if isinstance(item, bytes) or self._over:
            return False
        here = self._sent >= self._after and fits(item)
        self._sent += len(item.get("output_ids", ()))
        self._over = here and self._met.fire()
        return self._over


async def _late(met: Met[Delay], items: Items) -> Items:
    late = False
    async for item in items:
        late = late or (met.fault.every_event and met.fire())
        if late:
            await wait(met.fault.seconds)
        yield item


async def _slow_loris(met: Met[SlowLoris], items: Items) -> Items:
    slow = False
    async for item in items:
        slow = slow or met.fire()
        if not slow:
            yield item
            continue
        async with aclosing(dribbled(met.fault, framed(item))) as pieces:
            async for piece in pieces:
                yield piece


async def _drop(met: Met[Drop], items: Items) -> Items:
    spot = _Spot(met, met.fault.after_tokens)
    async for item in items:
        if spot.reached(item):
            return
        yield item


async def _reset(met: Met[Reset], items: Items) -> Items:
    after = met.fault.after_tokens
    spot = _Spot(met, after or 0)
    async for item in items:
        if after is not None and spot.reached(item):
            raise Broken
        yield item


async def _stall(met: Met[Stall], items: Items) -> Items:
    spot = _Spot(met, met.fault.after_tokens)
    async for item in items:
        if spot.reached(item):
            await wait(met.fault.seconds)
        yield item


async def _error(met: Met[ErrorEvent], items: Items) -> Items:
    spot = _Spot(met, met.fault.after_tokens)
    async for item in items:
        if spot.reached(item):
            yield error_event(met.fault)
            yield DONE
            return
        yield item


async def _garbage(met: Met[Garbage], items: Items) -> Items:
    spot = _Spot(met, met.fault.after_tokens)
    async for item in items:
        if spot.reached(item):
            noise = met.random_bytes(met.fault.bytes)
            yield noise if met.fault.raw else b"data: " + noise + b"\n\n"
        yield item


async def _changed(met: Met[Any], items: Items) -> Items:
    change, fits = CHANGES[type(met.fault)]
    spot = _Spot(met, met.fault.after_tokens)
    async for item in items:
        if not isinstance(item, bytes) and spot.reached(item, fits):
            yield change(met.fault, item)
        else:
            yield item


async def _twice(met: Met[DuplicateEvents], items: Items) -> Items:
    spot, twice = _Spot(met, met.fault.after_tokens), False
    async for item in items:
        twice = twice or spot.reached(item)
        yield item
        if twice:
            yield item


async def _finish_twice(met: Met[DuplicateFinish], items: Items) -> Items:
    spot = _Spot(met, met.fault.after_tokens)
    async for item in items:
        yield item
        if spot.reached(item, finishes):
            yield item


async def _swapped(met: Met[OutOfOrder], items: Items) -> Items:
    """Swap the event that is reached with the next one, if there is one."""
    spot, kept = _Spot(met, met.fault.after_tokens), None
    async for item in items:
        if kept is None and not isinstance(item, bytes) and spot.reached(item, _goes_on):
            kept = item
            continue
        yield item
        if kept is not None:
            yield kept
            kept = None


async def _flooded_by_an_event(met: Met[FloodEvent], items: Items) -> Items:
    spot = _Spot(met, met.fault.after_tokens)
    async for item in items:
        if spot.reached(item):
            for piece in flood(b'data: {"output_ids": [', b"1,", met.fault.bytes):
                yield piece
            return
        yield item


async def _flooded_by_comments(met: Met[FloodComments], items: Items) -> Items:
    spot = _Spot(met, met.fault.after_tokens)
    async for item in items:
        if spot.reached(item):
            for piece in flood(b"", b": nothing\n\n", met.fault.bytes):
                yield piece
        yield item


async def _flooded_by_tokens(met: Met[FloodTokens], items: Items) -> Items:
    spot = _Spot(met, met.fault.after_tokens)
    async for item in items:
        if isinstance(item, bytes) or not spot.reached(item, has_all_its_tokens):
            yield item
            continue
        for event in more_tokens(met.fault, item):
            yield event


def _goes_on(event: Event) -> bool:
    return not finishes(event)


_STAGES: Mapping[type[Fault], Stage] = {
    Delay: _late,
    SlowLoris: _slow_loris,
    Drop: _drop,
    Reset: _reset,
    Stall: _stall,
    ErrorEvent: _error,
    Garbage: _garbage,
    DuplicateEvents: _twice,
    DuplicateFinish: _finish_twice,
    OutOfOrder: _swapped,
    FloodEvent: _flooded_by_an_event,
    FloodComments: _flooded_by_comments,
    FloodTokens: _flooded_by_tokens,
    **dict.fromkeys(CHANGES, _changed),
}
"""How each kind is carried out on a stream; the other kinds leave streams alone."""
