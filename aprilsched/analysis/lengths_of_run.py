"""What a run launched, from its event log: every group, its prompt and its response lengths.

Invariants:
- Groups are in the order of their launches, members in that of their ids; groups that were only
  evaluated are left out.
- A length is the recorded one where the response ran to its end, delivered or not. Others are
  drawn from the law of all lengths (Kaplan and Meier, unfinished ones censored) given the tokens
  so far, so they are longer than those; the draws are a function of the log and the seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from aprilsched.analysis.costs_of_run import CostsOfRun, RecordedCosts
from aprilsched.analysis.lines import EngineLine, Line, read_lines
from aprilsched.analysis.run import readable
from aprilsched.core.lengths.draws import hashed_uniforms
from aprilsched.core.lengths.kaplan_meier import kaplan_meier
from aprilsched.errors import RunFolderError
from aprilsched.telemetry.figures import RunSummary
from aprilsched.telemetry.run_folder import EVENTS, SUMMARY

__all__ = ["RecordedBatch", "RecordedGroup", "RecordedRun", "read_record"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedGroup:
    """A prompt's length and its responses', in tokens. `so_far`: the tokens of those members (by
    place) whose length is imputed."""

    prompt_tokens: int
    lengths: tuple[int, ...]
    so_far: Mapping[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedBatch:
    """A delivered batch: the lengths of its prompts and its responses, one for each rollout."""

    prompts: Sequence[int]
    lengths: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """What a run folder says about what was to be done, whatever the schedule."""

    summary: RunSummary
    groups: tuple[RecordedGroup, ...]
    batches: tuple[RecordedBatch, ...]
    costs: RecordedCosts
    updates: int
    """New versions that came into the engines."""
    kv_tokens: int | None
    """Of one engine's KV pool, the smallest; None where one does not say."""
    whole: bool
    """All prompts that there were have been launched: the source ended."""

    @property
    def imputed(self) -> int:
        """Responses of imputed length."""
        return sum(len(group.so_far) for group in self.groups)

    @property
    def known(self) -> int:
        """Responses of recorded length."""
        return sum(len(group.lengths) for group in self.groups) - self.imputed


@dataclass(kw_only=True, slots=True)
class _Member:
    group_id: int
    prompt: int
    tokens: int = 0
    finished: bool = False


def read_record(folder: Path, *, group_size: int, seed: int = 0) -> RecordedRun:
    """The record in `folder`, of groups of `group_size`; `seed` is that of the imputed lengths.

    Raises:
        RunFolderError: if a file is missing, cannot be understood or is not complete, or if the
            run delivered nothing or was driven by episodes.
    """
    with readable(folder):
        summary = msgspec.json.decode((folder / SUMMARY).read_bytes(), type=RunSummary)
        history = _History()
        for line in read_lines(folder / EVENTS, progress=True):
            history.add(line)
    if summary.event_log_error is not None or len(history.batches) != summary.batches:
        raise RunFolderError(
            f"{folder} has {len(history.batches)} of {summary.batches} batches in its event log; "
            "name a run whose log is complete."
        )
    if not history.batches:
        raise RunFolderError(f"{folder} has no delivered batch; name a longer run.")
    if history.episodes:
        raise RunFolderError(
            f"{folder} was driven by episodes, whose tools' time is not in it; name a run of "
            "single turns."
        )
    return history.record(summary, group_size=group_size, seed=seed)


class _History:
    """Puts the lines of a run together."""

    def __init__(self) -> None:
        self.batches: list[RecordedBatch] = []
        self.episodes = False
        self._members: dict[int, _Member] = {}
        self._requests: dict[int, int] = {}
        """The rollout of each request."""
        self._evaluated: set[int] = set()
        self._costs = CostsOfRun()
        self._updates = 0
        self._kv_tokens: int | None = None
        self._fetched = 0
        self._ended = False

    def add(self, line: Line) -> None:
        self._costs.add(line)
        match line.event or line.command:
            case "Send":
                self._send(line)
            case "Progress":
                self._member(line).tokens += line.tokens
            case "Finished":
                self._member(line).finished = True
            case "Deliver":
                self._deliver(line)
            case "DeliverEvaluation":
                self._evaluated.update(rollout.group_id for rollout in line.rollouts)
            case "Opened":
                self._kv_tokens = _smallest_pool(line)
            case "PromptsArrived":
                self._fetched += line.prompts
                self._ended = self._ended or line.last
            case "FinishUpdate" if not line.cause:
                self._updates += 1
            case "StartEpisode":
                self.episodes = True
            case _:
                pass

    def record(self, summary: RunSummary, *, group_size: int, seed: int) -> RecordedRun:
        groups = self._groups(group_size, seed)
        return RecordedRun(
            summary=summary,
            groups=groups,
            batches=tuple(self.batches),
            costs=self._costs.costs(),
            updates=self._updates,
            kv_tokens=self._kv_tokens,
            whole=self._ended and self._fetched == len(groups),
        )

    def _member(self, line: Line) -> _Member:
        rollout_id = self._requests.get(line.request_id)
        if rollout_id is None:
            raise ValueError(f"request {line.request_id} was never sent")
        return self._members[rollout_id]

    def _send(self, line: Line) -> None:
        self._requests[line.request_id] = line.rollout_id
        member = self._members.setdefault(
            line.rollout_id, _Member(group_id=line.group_id, prompt=line.tokens)
        )
        # Sent again, a request carries what is known; what was lost on the way is not in it.
        member.tokens = line.tokens - member.prompt

    def _deliver(self, line: Line) -> None:
        for rollout in line.rollouts:
            # What was begun before the log was is in no Send, or with tokens in its context.
            self._members[rollout.rollout_id] = _Member(
                group_id=rollout.group_id,
                prompt=rollout.prompt_tokens,
                tokens=rollout.tokens,
                finished=True,
            )
        self.batches.append(
            RecordedBatch(
                prompts=[rollout.prompt_tokens for rollout in line.rollouts],
                lengths=[rollout.tokens for rollout in line.rollouts],
            )
        )

    def _groups(self, size: int, seed: int) -> tuple[RecordedGroup, ...]:
        members = self._by_group(size)
        drawn = _lengths([member for group in members for member in group], seed)
        rows = drawn.reshape(-1, size)
        return tuple(
            RecordedGroup(
                prompt_tokens=group[0].prompt,
                lengths=tuple(int(length) for length in row),
                so_far={i: m.tokens for i, m in enumerate(group) if not m.finished},
            )
            for group, row in zip(members, rows, strict=True)
        )

    def _by_group(self, size: int) -> list[list[_Member]]:
        """In the order of launches. What was launched and never sent has no tokens."""
        groups: dict[int, list[_Member]] = {}
        for _, member in sorted(self._members.items()):
            if member.group_id not in self._evaluated:
                groups.setdefault(member.group_id, []).append(member)
        for group_id, group in groups.items():
            missing = size - len(group)
            group.extend(_Member(group_id=group_id, prompt=group[0].prompt) for _ in range(missing))
        return [group[:size] for _, group in sorted(groups.items())]


def _lengths(members: Sequence[_Member], seed: int) -> NDArray[np.int64]:
    """int64 [n]: recorded ones, and draws for what has not finished."""
    finished = np.array([member.finished for member in members], dtype=np.bool_)
    tokens = np.array([member.tokens for member in members], dtype=np.int64)
    seen = np.where(finished, np.maximum(tokens, 1), tokens)
    law = kaplan_meier(seen, ~finished)
    return np.where(
        finished, seen, law.residual_quantile(hashed_uniforms(seen.shape, seed=seed), seen)
    )


def _smallest_pool(line: Line) -> int | None:
    engines = line.engines if isinstance(line.engines, tuple) else ()
    sizes = [engine.kv_tokens for engine in engines if isinstance(engine, EngineLine)]
    known = [size for size in sizes if size is not None]
    return min(known) if known and len(known) == len(sizes) else None
