"""Turns lines of version 1 of events.jsonl back into the events and commands that were written.

The lines do not have everything, so the rest is filled in: token ids and log-probabilities are 0,
prompts have their length, and loss masks are computed from the number of masked tokens. The
rollouts and groups that rewards and verdicts are about have only their ids. Plans are not read,
because their evidence was not written, and lines of unknown kinds are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, TypeAlias, get_args

import msgspec
import numpy as np

from aprilsched.core.lengths.groups import GroupLengths
from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev
from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.events import Event
from aprilsched.types import (
    NO_VERSION,
    Batch,
    BoolArray,
    Float32Array,
    Group,
    Int32Array,
    Prompt,
    Rollout,
    SamplingParams,
    Score,
    Segment,
    VersionSpan,
)

__all__ = ["Fields", "chunk", "typed"]

Fields: TypeAlias = Mapping[str, Any]


def typed(line: Fields) -> Event | Command | None:
    """The event or command of a line; None if the line has a kind that is not read."""
    name = line.get("event") or line.get("command") or ""
    build = _BUILD.get(name)
    if build is not None:
        return build(line)
    kind = _PLAIN.get(name)
    return None if kind is None else msgspec.convert(line, kind)


# --- events ----------------------------------------------------------------------------------


def _evaluation_requested(line: Fields) -> Event:
    return ev.EvaluationRequested(
        evaluation_id=line["evaluation_id"],
        prompts=_prompts(line["prompts"]),
        group_size=line["group_size"],
    )


def _prompts_arrived(line: Fields) -> Event:
    return ev.PromptsArrived(
        prompts=_prompts(line["prompts"]),
        last=line.get("last", False),
        partial=line.get("partial", False),
    )


def chunk(request_id: int, attempt: int, tokens: int) -> ev.Progress:
    """An event with `tokens` new tokens of an attempt; their ids are not known."""
    token_ids, logprobs = _unknown(tokens)
    return ev.Progress(
        request_id=request_id, attempt=attempt, token_ids=token_ids, logprobs=logprobs
    )


@lru_cache(maxsize=1024)
def _unknown(tokens: int) -> tuple[Int32Array, Float32Array]:
    """Arrays for a chunk of this size. They are shared and read-only, because a log has a million
    chunks of a few sizes."""
    token_ids, logprobs = _ids(tokens), _logprobs(tokens)
    token_ids.flags.writeable = logprobs.flags.writeable = False
    return token_ids, logprobs


def _progress(line: Fields) -> Event:
    return chunk(line["request_id"], line["attempt"], line["tokens"])


def _finished(line: Fields) -> Event:
    return ev.Finished(
        request_id=line["request_id"],
        attempt=line["attempt"],
        reason=line["reason"],
        spans=_spans(line.get("spans")),
    )


def _interrupted(line: Fields) -> Event:
    return ev.Interrupted(
        request_id=line["request_id"], attempt=line["attempt"], spans=_spans(line.get("spans"))
    )


def _turn_requested(line: Fields) -> Event:
    return ev.TurnRequested(
        rollout_id=line["rollout_id"],
        input_ids=_ids(line["tokens"]),
        sampling=_sampling(line) if "max_new_tokens" in line else None,
    )


def _rewarded(line: Fields) -> Event:
    return ev.Rewarded(rollout_id=line["rollout_id"], score=Score(reward=line["reward"]))


def _group_rewarded(line: Fields) -> Event:
    scores = tuple(Score(reward=reward) for reward in line["rewards"])
    return ev.GroupRewarded(group_id=line["group_id"], scores=scores)


def _episode_finished(line: Fields) -> Event:
    return ev.EpisodeFinished(rollout_id=line["rollout_id"], score=Score(reward=line.get("reward")))


def _filtered(line: Fields) -> Event:
    return ev.Filtered(group_id=line["group_id"], accepted=line["accepted"])


def _update_requested(line: Fields) -> Event:
    return msgspec.convert({**line, "adapter": line.get("beside", False)}, ev.UpdateRequested)


def _engine_joined(line: Fields) -> Event:
    fields = {"version": None, **line, "name": line["engine"]}
    return ev.EngineJoined(info=msgspec.convert(fields, ev.EngineInfo))


def _refitted(line: Fields) -> Event:
    return ev.Refitted(
        engine=line["engine"],
        version=line.get("version"),
        cause=line.get("cause", ""),
        catch_up=line.get("catch_up", False),
    )


# --- commands --------------------------------------------------------------------------------


def _launch(line: Fields) -> Command:
    lengths = line.get("restored")
    return do.Launch(
        group_id=line["group_id"],
        rollout_ids=tuple(line["rollout_ids"]),
        prompt=_prompt(line),
        evaluation_id=line.get("evaluation_id"),
        restored=None if lengths is None else _lengths(line["group_id"], lengths),
    )


def _lengths(launched: int, lists: Fields) -> GroupLengths:
    return GroupLengths(
        launched=launched,
        tokens=np.array(lists["tokens"], dtype=np.int64),
        finished=np.array(lists["finished"], dtype=np.bool_),
    )


def _send(line: Fields) -> Command:
    return do.Send(
        engine=line["engine"],
        request_id=line["request_id"],
        attempt=line["attempt"],
        rollout_id=line["rollout_id"],
        group_id=line["group_id"],
        input_ids=_ids(line["tokens"]),
        sampling=_sampling(line),
        adapter=line.get("adapter"),
        cache_version=line.get("cache_version"),
    )


def _start_episode(line: Fields) -> Command:
    return do.StartEpisode(
        rollout_id=line["rollout_id"],
        index=line["index"],
        prompt=_prompt(line),
        sampling=_sampling(line),
    )


def _resolve_turn(line: Fields) -> Command:
    tokens = line["tokens"]
    return do.ResolveTurn(
        rollout_id=line["rollout_id"],
        token_ids=_ids(tokens),
        logprobs=_logprobs(tokens),
        versions=_ids(tokens),
        finish_reason=line["finish_reason"],
        withdrawn=line.get("withdrawn", False),
    )


def _score(line: Fields) -> Command:
    rollout = _unread(line["rollout_id"], line["group_id"])
    return do.ScoreRollout(rollout=rollout, prompt=_prompt(line))


def _score_group(line: Fields) -> Command:
    return do.ScoreGroup(group=_unread_group(line["group_id"]))


def _filter(line: Fields) -> Command:
    return do.Filter(group=_unread_group(line["group_id"]))


def _refit(line: Fields) -> Command:
    return msgspec.convert({**line, "adapter": line.get("beside", False)}, do.Refit)


def _deliver(line: Fields) -> Command:
    return do.Deliver(batch=_batch(line))


def _redeliver(line: Fields) -> Command:
    return do.Redeliver(batch=_batch(line))


def _deliver_evaluation(line: Fields) -> Command:
    return do.DeliverEvaluation(evaluation_id=line["evaluation_id"], batch=_batch(line))


# --- parts -----------------------------------------------------------------------------------


def _batch(line: Fields) -> Batch:
    by_group = groupby(line["rollouts"], key=lambda row: row["group_id"])
    return Batch(
        index=line["batch"],
        version=line["version"],
        groups=tuple(_group(group_id, rows) for group_id, rows in by_group),
    )


def _group(group_id: int, rows: Iterable[Fields]) -> Group:
    rollouts = tuple(_rollout(row, index) for index, row in enumerate(rows))
    return Group(
        group_id=group_id, prompt=Prompt(input_ids=rollouts[0].prompt_ids), rollouts=rollouts
    )


def _rollout(row: Fields, index: int) -> Rollout:
    segments = tuple(Segment(start=s, end=e, version=v, engine=n) for s, e, v, n in row["segments"])
    versions = np.repeat(
        np.array([s.version for s in segments], dtype=np.int32),
        [s.end - s.start for s in segments],
    )
    return Rollout(
        rollout_id=row["rollout_id"],
        group_id=row["group_id"],
        index=index,
        prompt_ids=_ids(max(1, row.get("prompt_tokens", 1))),
        token_ids=_ids(row["tokens"]),
        logprobs=_logprobs(row["tokens"]),
        versions=versions,
        loss_mask=_loss_mask(versions, row.get("masked", 0)),
        segments=segments,
        versions_exact=row.get("versions_exact", True),
        finish_reason=row.get("finish_reason", "length"),
        reward=row.get("reward"),
        stale_keys=row.get("stale_keys", False),
    )


def _unread(rollout_id: int, group_id: int) -> Rollout:
    """A rollout of which the log has only the ids."""
    row = {"rollout_id": rollout_id, "group_id": group_id, "tokens": 0, "segments": ()}
    return _rollout(row, 0)


def _unread_group(group_id: int) -> Group:
    return Group(group_id=group_id, prompt=Prompt(input_ids=_ids(1)), rollouts=())


def _loss_mask(versions: Int32Array, masked: int) -> BoolArray:
    """The loss mask of a rollout with `masked` stale tokens.

    It is False for tokens of the environment and for the `masked` oldest sampled tokens, because a
    bound on staleness masks all tokens below some version.
    """
    mask = versions != NO_VERSION
    if masked:
        sampled = np.flatnonzero(mask)
        oldest = np.argsort(versions[sampled], kind="stable")[:masked]
        mask[sampled[oldest]] = False
    return mask


def _prompt(line: Fields) -> Prompt:
    return Prompt(input_ids=_ids(max(1, line.get("prompt_tokens", 1))))


def _prompts(count: int) -> tuple[Prompt, ...]:
    """Prompts of length 1 in place of the real ones, whose lengths are in the lines of launches."""
    return (Prompt(input_ids=_ids(1)),) * count


def _sampling(line: Fields) -> SamplingParams:
    return SamplingParams(max_new_tokens=line["max_new_tokens"])


def _spans(rows: Sequence[tuple[int, int, int]] | None) -> tuple[VersionSpan, ...] | None:
    if rows is None:
        return None
    return tuple(VersionSpan(version=v, start=start, end=end) for v, start, end in rows)


def _ids(count: int) -> Int32Array:
    return np.zeros(count, dtype=np.int32)


def _logprobs(count: int) -> Float32Array:
    return np.zeros(count, dtype=np.float32)


def _offer(line: Fields) -> Command:
    return do.Offer(offered=Batch(index=line["batch"], version=line["version"], groups=()))


_BUILD: dict[str, Callable[[Fields], Event | Command]] = {
    "EvaluationRequested": _evaluation_requested,
    "PromptsArrived": _prompts_arrived,
    "Progress": _progress,
    "Finished": _finished,
    "Interrupted": _interrupted,
    "TurnRequested": _turn_requested,
    "EpisodeFinished": _episode_finished,
    "Rewarded": _rewarded,
    "GroupRewarded": _group_rewarded,
    "EngineJoined": _engine_joined,
    "Refitted": _refitted,
    "Launch": _launch,
    "Send": _send,
    "StartEpisode": _start_episode,
    "Score": _score,
    "ScoreGroup": _score_group,
    "Judge": _filter,
    "Judged": _filtered,
    "Refit": _refit,
    "UpdateRequested": _update_requested,
    "ResolveTurn": _resolve_turn,
    "Offer": _offer,
    "Deliver": _deliver,
    "Redeliver": _redeliver,
    "DeliverEvaluation": _deliver_evaluation,
}
_NOT_WRITTEN = frozenset({"Planned", "Plan", "Filter", "Filtered"})
_PLAIN: dict[str, type[Event | Command]] = {
    kind.__name__: kind
    for kind in (*get_args(Event), *get_args(Command))
    if kind.__name__ not in _BUILD and kind.__name__ not in _NOT_WRITTEN
}
"""Kinds whose lines have the same fields as their class."""
