"""Ways to corrupt one event of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import msgspec

from aprilsched.agents.serving.streams import Event, Item

Changed: TypeAlias = Iterable[Item | None] | None
Change: TypeAlias = Callable[[Event], Changed]
"""Makes the items that take an event's place, or None; see :class:`Corrupt`."""

_TOKENS_A_TIME = 64
_INVENTED = (-1.0, 0, None)


def few_logprobs(event: Event) -> Changed:
    """There is one logprob less than ids."""
    logprobs = _logprobs(event)
    return [_with(event, output_token_logprobs=logprobs[:-1])] if logprobs else None


def no_logprobs(event: Event) -> Changed:
    """There are ids but no logprobs."""
    if not _logprobs(event):
        return None
    names = ("output_token_logprobs", "output_token_logprobs_length")
    meta = {name: value for name, value in event["meta_info"].items() if name not in names}
    return [{**event, "meta_info": meta}]


def strange_logprob(value: str) -> Change:
    """The last logprob is the JSON `value`; SGLang sends null for NaN."""

    def change(event: Event) -> Changed:
        if not (logprobs := _logprobs(event)):
            return None
        *before, (_, token, text) = logprobs
        raw = msgspec.Raw(value.encode())
        return [_with(event, output_token_logprobs=[*before, (raw, token, text)])]

    return change


def other_ids(event: Event) -> Changed:
    """An id differs from the id of its logprob."""
    if not _logprobs(event):
        return None
    *before, last = event["output_ids"]
    return [{**event, "output_ids": [*before, last ^ 1]}]


def out_of_order(event: Event) -> Changed:
    """Two consecutive events are swapped."""
    return None if _finish_of(event) else [None, event]


def twice(event: Event) -> Changed:
    """An event is sent twice."""
    return [event, event]


def twice_at_the_finish(event: Event) -> Changed:
    """The last event is sent twice."""
    return [event, event] if _finish_of(event) else None


def more_tokens(count: int) -> Change:
    """`count` tokens of id 0, more than were asked for, arrive before the finish.

    It fits no response that ends earlier: nothing would distinguish the additional tokens from
    those of the model.
    """

    def change(event: Event) -> Changed:
        finish = _finish_of(event)
        return _flood_tokens(event, count) if finish and finish["type"] == "length" else None

    return change


def _flood_tokens(last: Event, tokens: int) -> Iterator[Event]:
    """Make the `last` event unfinished, add invented tokens, and finish with the new count."""
    meta = last["meta_info"]
    yield _with(last, finish_reason=None, weight_versions=None)
    total: int = meta["completion_tokens"]
    end = total + tokens
    while total < end:
        count = min(_TOKENS_A_TIME, end - total)
        total += count
        event = _with({**last, "output_ids": [_INVENTED[1]] * count}, completion_tokens=total)
        if "output_token_logprobs" in meta:
            event["meta_info"]["output_token_logprobs"] = [_INVENTED] * count
            event["meta_info"]["output_token_logprobs_length"] = total
        if total < end:
            event = _with(event, finish_reason=None, weight_versions=None)
        elif spans := meta.get("weight_versions"):
            event = _with(event, weight_versions=[*spans[:-1], {**spans[-1], "end": end}])
        yield event


def _logprobs(event: Event) -> list[tuple[Any, ...]]:
    return event.get("meta_info", {}).get("output_token_logprobs") or []


def _finish_of(event: Event) -> dict[str, Any] | None:
    """Return why the response ends with `event`; None if it continues."""
    return event.get("meta_info", {}).get("finish_reason")


def _with(event: Event, **changes: Any) -> Event:
    return {**event, "meta_info": {**event["meta_info"], **changes}}
