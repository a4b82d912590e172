"""Events and commands as the plain fields of a line in events.jsonl.

Invariant: with :data:`FIELDS`, no token id, no logprob and nothing of the caller's own data (prompt
keys, metadata) appears, only counts. A field whose name is in the table is written as it says,
every other one as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias, get_args

import msgspec
import numpy as np

from aprilsched.core.lengths.groups import GroupLengths
from aprilsched.core.messages.events import EngineInfo, Event
from aprilsched.core.policies.schedule import Schedule
from aprilsched.telemetry.event_log.frequent_lines import FREQUENT
from aprilsched.types import (
    NO_VERSION,
    Batch,
    Group,
    Prompt,
    Rollout,
    SamplingParams,
    VersionSpan,
)

__all__ = ["FIELDS", "Line", "Lines", "Writers"]


Writers: TypeAlias = Mapping[str, Callable[[Any], dict[str, Any]]]
"""How a field of this name is written."""


Line: TypeAlias = dict[str, Any] | msgspec.Struct

_Fields: TypeAlias = tuple[tuple[str, Callable[[Any], dict[str, Any]] | None], ...]
_EVENTS = frozenset[type](get_args(Event))


class Lines:
    """Makes lines whose fields are written as `writers` say.

    What there is to know of a kind is looked up once: a run has a million lines of few kinds.
    """

    def __init__(self, writers: Writers) -> None:
        self._writers = writers
        self._fields: dict[type, _Fields] = {}
        self._frequent = FREQUENT if writers is FIELDS else {}

    def lines(self, things: Iterable[Any], times: Iterable[float]) -> list[Line]:
        """Of what happened or was decided, at these times."""
        get, other = self._frequent.get, self._line
        return [
            get(thing.__class__, other)(thing, t) for thing, t in zip(things, times, strict=True)
        ]

    def _line(self, thing: Any, t: float) -> Line:
        kind: type[object] = thing.__class__
        line = {"t": t, "event" if kind in _EVENTS else "command": kind.__name__}
        for name, write in self._fields.get(kind) or self._learn(kind):
            value = getattr(thing, name)
            if write is None:
                line[name] = value
            else:
                line.update(write(value))
        return line

    def _learn(self, kind: type) -> _Fields:
        names = [field.name for field in fields(kind)]
        self._fields[kind] = tuple((name, self._writers.get(name)) for name in names)
        return self._fields[kind]


def _tokens(ids: Sequence[int]) -> dict[str, Any]:
    return {"tokens": len(ids)}


def _nothing(_: object) -> dict[str, Any]:
    return {}


def _prompt(prompt: Prompt) -> dict[str, Any]:
    return {"prompt_tokens": len(prompt.input_ids)}


def _sampling(sampling: SamplingParams | None) -> dict[str, Any]:
    return {} if sampling is None else {"max_new_tokens": sampling.max_new_tokens}


def _spans(spans: tuple[VersionSpan, ...] | None) -> dict[str, Any]:
    return {"spans": spans and [[span.version, span.start, span.end] for span in spans]}


def _rollout(rollout: Rollout) -> dict[str, Any]:
    return {"rollout_id": rollout.rollout_id, "group_id": rollout.group_id}


def _group(group: Group) -> dict[str, Any]:
    return {"group_id": group.group_id}


def _batch(batch: Batch) -> dict[str, Any]:
    return {
        "batch": batch.index,
        "version": batch.version,
        "rollouts": [_delivered(rollout) for rollout in batch.rollouts],
    }


class _Delivered(msgspec.Struct, gc=False):
    rollout_id: int
    group_id: int
    prompt_tokens: int
    tokens: int
    segments: list[tuple[int, int, int, str | None]]
    reward: float | None
    finish_reason: str
    versions_exact: bool
    masked: int
    stale_keys: bool


def _delivered(rollout: Rollout) -> _Delivered:
    segments = [(s.start, s.end, s.version, s.engine) for s in rollout.segments]
    # Those of the environment are known by their segments.
    sampled = sum([end - start for start, end, version, _ in segments if version != NO_VERSION])
    return _Delivered(
        rollout.rollout_id,
        rollout.group_id,
        len(rollout.prompt_ids),
        len(rollout.token_ids),
        segments,
        rollout.reward,
        rollout.finish_reason,
        rollout.versions_exact,
        sampled - int(np.count_nonzero(rollout.loss_mask)),
        rollout.stale_keys,
    )


def _version(version: int | None) -> dict[str, Any]:
    return {"torn": True} if version is None else {"version": version}


def _info(info: EngineInfo) -> dict[str, Any]:
    return {
        "engine": info.name,
        **_version(info.version),
        "holds_stragglers": info.holds_stragglers,
        "keeps_weights": info.keeps_weights,
        "kv_tokens": info.kv_tokens,
        "max_running": info.max_running,
    }


def _restored(lengths: GroupLengths | None) -> dict[str, Any]:
    if lengths is None:
        return {}
    lists = {"tokens": lengths.tokens.tolist(), "finished": lengths.finished.tolist()}
    return {"restored": lists}


def _schedule(schedule: Schedule | None) -> dict[str, Any]:
    return {} if schedule is None else {"schedule": schedule.why}


FIELDS: Writers = {
    "token_ids": _tokens,
    "input_ids": _tokens,
    "logprobs": _nothing,
    "versions": _nothing,
    "prompt": _prompt,
    "prompts": lambda prompts: {"prompts": len(prompts)},
    "sampling": _sampling,
    "spans": _spans,
    "rollout": _rollout,
    "group": _group,
    "batch": _batch,
    "offered": lambda batch: {"batch": batch.index, "version": batch.version},
    "info": _info,
    "restored": _restored,
    "ended": lambda groups: {"ended": len(groups)},
    "open": lambda groups: {"open": len(groups)},
    "current": _schedule,
    "schedule": _schedule,
    "version": _version,
    "label": _nothing,
}
