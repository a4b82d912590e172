"""Facts of runs that tests write by hand, in their shortest form. A request has the id of its
rollout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.events import EngineInfo
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.kernel.values.capabilities import Capabilities
from aprilsched.types import Batch, Rollout, Segment

__all__ = [
    "ABLE",
    "changed",
    "delivered",
    "dropped",
    "ended",
    "launched",
    "lost",
    "opened",
    "received",
    "refitted",
    "response",
    "sent",
]

ABLE = Capabilities(version_spans=True, flush_while_paused=True)
"""What an engine can do whose capabilities do not matter."""


def opened(*engines: str, version: int = 0, resumed: bool = False) -> of.RunOpened:
    infos = tuple(EngineInfo(name=name, version=version, able=ABLE) for name in engines)
    return of.RunOpened(engines=infos, version=version, resumed=resumed)


def launched(group_id: int, *rollout_ids: int, prompt_tokens: int = 2) -> of.GroupLaunched:
    return of.GroupLaunched(group_id=group_id, rollout_ids=rollout_ids, prompt_tokens=prompt_tokens)


def sent(
    request_id: int, group_id: int = 0, *, attempt: int = 1, engine: str = "a", tokens: int = 2
) -> of.AttemptSent:
    return of.AttemptSent(
        engine=engine,
        request_id=request_id,
        attempt=attempt,
        rollout_id=request_id,
        group_id=group_id,
        tokens=tokens,
        max_new_tokens=100,
    )


def received(request_id: int, tokens: int = 1, *, recomputed: int = 0) -> of.TokensReceived:
    return of.TokensReceived(request_id=request_id, tokens=tokens, recomputed=recomputed)


def ended(request_id: int, group_id: int = 0) -> list[Fact]:
    """A response ends, and with it its rollout."""
    return [
        of.AttemptEnded(request_id=request_id, outcome="finished"),
        of.RolloutFinished(rollout_id=request_id, group_id=group_id),
    ]


def changed(engine: str, *modes: str, pause: str = "", tags: tuple[str, ...] = ()) -> list[Fact]:
    """An engine goes through the modes."""
    return [
        of.EngineModeChanged(engine=engine, start=start, finish=finish, pause=pause, tags=tags)
        for start, finish in pairwise(modes)
    ]


def refitted(engine: str, version: int | None, *, cause: str = "") -> list[Fact]:
    return [
        of.EngineRefitted(engine=engine, version=version, cause=cause),
        *changed(engine, "refitting", "paused"),
    ]


def lost(engine: str, cause: str, *requests: int) -> list[Fact]:
    """An engine is lost, and with it the `requests` that were open there."""
    return [
        of.EngineLost(engine=engine, cause=cause),
        *(of.AttemptEnded(request_id=i, outcome="engine_lost") for i in requests),
    ]


def dropped(
    group_id: int, *rollout_ids: int, reason: str, cause: str, tokens: int = 0
) -> of.GroupDropped:
    rows = tuple(of.DroppedRollout(rollout_id=i, reason=reason, tokens=tokens) for i in rollout_ids)
    return of.GroupDropped(group_id=group_id, reason=reason, cause=cause, rollouts=rows)


def delivered(batch: Batch, *, again: bool = False) -> of.BatchDelivered:
    return of.BatchDelivered(
        batch=batch.index,
        version=batch.version,
        rollouts=of.delivered_rollouts(batch),
        again=again,
    )


def response(versions: Sequence[int], **changes: Any) -> Rollout:
    """A rollout whose tokens have these versions: of engine "a", and those of -1 of none."""
    own = np.array(versions, dtype=np.int32)
    cuts: list[int] = [0, *(np.flatnonzero(np.diff(own)) + 1).tolist(), len(own)]
    values: dict[str, Any] = {
        "rollout_id": 0,
        "group_id": 0,
        "index": 0,
        "prompt_ids": np.array([1, 2], dtype=np.int32),
        "token_ids": np.zeros(len(own), dtype=np.int32),
        "logprobs": np.zeros(len(own), dtype=np.float32),
        "versions": own,
        "loss_mask": own >= 0,
        "segments": tuple(
            Segment(start=a, end=b, version=int(own[a]), engine="a" if own[a] >= 0 else None)
            for a, b in pairwise(cuts)
            if b > a
        ),
        "versions_exact": True,
        "finish_reason": "stop",
    }
    return Rollout(**{**values, **changes})
