"""Events of a stream that say something wrong; pure, and never the given event itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from aprilsched.engines.sim.http.events import Event, Item, framed
from aprilsched.engines.sim.http.faults.kinds import (
    ErrorEvent,
    Fault,
    FewLogprobs,
    FloodTokens,
    NanLogprob,
    NoLogprobs,
    OtherIds,
    Truncate,
)

__all__ = [
    "CHANGES",
    "error_event",
    "finishes",
    "has_all_its_tokens",
    "has_logprobs",
    "more_tokens",
]

_TOKENS_A_TIME = 64
_MADE_UP = (-1.0, 0, None)


def has_logprobs(event: Event) -> bool:
    """Whether it brings tokens, with their logprobs."""
    return bool(event.get("meta_info", {}).get("output_token_logprobs"))


def finishes(event: Event) -> bool:
    """Whether it is the last one."""
    return event.get("meta_info", {}).get("finish_reason") is not None


def has_all_its_tokens(event: Event) -> bool:
    """Whether it is the last one of a response that is as long as was asked for."""
    return finishes(event) and event["meta_info"]["finish_reason"]["type"] == "length"


def error_event(fault: ErrorEvent) -> Event:
    """What SGLang sends in the middle of a stream."""
    kind = "InternalServerError" if fault.code >= 500 else "BadRequest"
    return {"error": {"message": fault.message, "type": kind, "code": fault.code}}


def more_tokens(fault: FloodTokens, last: Event) -> Iterator[Event]:
    """The `last` event, but unfinished, then tokens made up, and a finish that counts them."""
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
"""The faults that change one event: how, and which events can show it."""
