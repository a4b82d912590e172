"""The rollouts and groups in flight, and the counters and the ledger of the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from aprilsched.kernel.core.lengths.observed import GroupLengths
from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.state.ledger import Counters, Entry, Ledger, Reason
from aprilsched.kernel.shell.listener import DispatchingListener
from aprilsched.observe.figures.batch_figures import sampled_tokens
from aprilsched.types import EpisodeWait


@dataclass(slots=True, kw_only=True, eq=False)
class RolloutNow:
    """A rollout in flight.

    Attributes:
        sampled: number of tokens of its response that a policy has sampled so far.
        environment: number of tokens of its response that came from the environment so far.
        finished: whether its response has ended.
        carried: whether it was already in flight when an earlier batch was delivered.
    """

    group_id: int
    sampled: int = 0
    environment: int = 0
    finished: bool = False
    carried: bool = False

    @property
    def length(self) -> int:
        # An empty response has length 1, as in the core.
        return max(self.sampled + self.environment, self.finished)


@dataclass(slots=True, kw_only=True, eq=False)
class GroupNow:
    """A group in flight, or a single sample that has left its group.

    Attributes:
        evaluated: whether it belongs to an evaluation, and not to training.
        growing: number of members whose response has not ended.
        accepted: whether it is scored and accepted, and waits for its batch.
        source: id of the group that a single sample has left.
        samples: number of single samples of the group that are in flight.
        split: whether a single sample has left the group.
    """

    rollout_ids: tuple[int, ...]
    evaluated: bool
    growing: int
    accepted: bool = False
    source: int | None = None
    samples: int = 0
    split: bool = False

    def generated(self, siblings: int | None) -> int:
        """Return the number of units that only lack scores and a verdict: 1 for a whole group, or
        its members that have ended once `siblings` others of each have ended too."""
        if siblings is None:
            return not self.growing
        ended = len(self.rollout_ids) - self.growing
        return ended if self.split or ended > siblings or not self.growing else 0


class RolloutsNow(DispatchingListener):
    """Keeps the rollouts in flight.

    Attributes:
        outside: the episodes without a request at an engine, and what they wait for.
        batches: number of batches that the trainer has received.
        siblings: number of siblings of a delivered sample; None if whole groups are delivered.
        training: number of units for training in flight: groups, or rollouts with `siblings`.
        generated: number of these units that only lack scores and a verdict.
        ready: number of these units that are accepted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counters = Counters()
        self.ledger = Ledger()
        self.rollouts: dict[int, RolloutNow] = {}
        self.groups: dict[int, GroupNow] = {}
        self.outside: dict[int, EpisodeWait] = {}
        self.batches = 0
        self.siblings: int | None = None
        self.training = self.generated = self.ready = 0
        self._opened = False
        self._handlers = {
            of.RunOpened: self._run_opened,
            of.GroupLaunched: self._group_launched,
            of.MemberLaunched: self._member_launched,
            of.PromptRefused: self._prompt_refused,
            of.EpisodeStarted: lambda fact: self._wait_outside(fact.rollout_id, "tools"),
            of.EpisodeWaiting: lambda fact: self._wait_outside(fact.rollout_id, fact.what),
            of.TurnBegun: self._turn_begun,
            of.TurnEnded: self._turn_ended,
            of.TeardownFailed: self._teardown_failed,
            of.TokensDiscarded: self._tokens_discarded,
            of.RolloutFinished: self._rollout_finished,
            of.SampleReady: self._sample_ready,
            of.GroupAccepted: self._group_accepted,
            of.GroupDropped: self._group_dropped,
            of.AttemptEnded: self._attempt_ended,
            of.BatchDelivered: self._batch_delivered,
            of.EvaluationDelivered: self._evaluation_delivered,
            of.UpdateFinished: self._update_finished,
        }

    def open_groups(self) -> list[GroupLengths]:
        """Return the lengths so far of the responses of each training group in flight."""
        groups = self.groups.items()
        return [self.lengths_of(i) for i, g in groups if g.rollout_ids and not g.evaluated]

    def lengths_of(self, group_id: int) -> GroupLengths:
        """Return the lengths so far of the responses of a group in flight."""
        members = [self.rollouts[each] for each in self.groups[group_id].rollout_ids]
        return GroupLengths(
            launched=group_id,
            tokens=np.array([member.length for member in members], dtype=np.int64),
            finished=np.array([member.finished for member in members], dtype=np.bool_),
        )

    def _count(self, group: GroupNow, by: Literal[1, -1]) -> None:
        """Count a group, or discount it before it changes."""
        if group.rollout_ids and not group.evaluated:
            self.training += by * (1 if self.siblings is None else len(group.rollout_ids))
            self.generated += by * group.generated(self.siblings)
            self.ready += by * group.accepted

    def _run_opened(self, fact: of.RunOpened) -> None:
        """Forget everything in flight if the process of a prior run has ended."""
        self.siblings = fact.siblings
        if not self._opened:
            self._opened = True
            return
        for group_id, group in list(self.groups.items()):
            if group.evaluated:
                cause = "its evaluation ended with the process that asked for it"
                rows = [(i, Reason.RESTARTED, self.rollouts[i].sampled) for i in group.rollout_ids]
                self._drop(group_id, rows, cause)
        self.counters.launched -= len(self.rollouts)
        for held in (self.rollouts, self.groups, self.outside):
            held.clear()
        self.training = self.generated = self.ready = 0

    def _group_launched(self, fact: of.GroupLaunched) -> None:
        ids, lengths = fact.rollout_ids, fact.restored
        self.counters.launched += len(ids)
        for place, rollout_id in enumerate(ids):
            rollout = self.rollouts[rollout_id] = RolloutNow(group_id=fact.group_id)
            if lengths is not None:
                rollout.sampled = lengths.sampled[place]
                rollout.environment = lengths.tokens[place] - rollout.sampled
                rollout.finished = lengths.finished[place]
        growing = len(ids) if lengths is None else lengths.finished.count(False)
        evaluated = fact.evaluation_id is not None
        group = GroupNow(rollout_ids=ids, evaluated=evaluated, growing=growing)
        self.groups[fact.group_id] = group
        self._count(group, 1)

    def _member_launched(self, fact: of.MemberLaunched) -> None:
        self.counters.launched += 1
        self.counters.regenerated += 1
        self.rollouts[fact.rollout_id] = RolloutNow(group_id=fact.group_id)
        evaluated = fact.evaluation_id is not None
        group = self.groups.setdefault(
            fact.group_id, GroupNow(rollout_ids=(), evaluated=evaluated, growing=0)
        )
        self._count(group, -1)
        group.rollout_ids = (*group.rollout_ids, fact.rollout_id)
        group.growing += 1
        self._count(group, 1)

    def _prompt_refused(self, fact: of.PromptRefused) -> None:
        # An unusable prompt counts as one launched rollout, which the ledger contains.
        self.counters.launched += 1
        self._drop(fact.group_id, [(fact.rollout_id, Reason.BAD_PROMPT, 0)], fact.cause)

    def _wait_outside(self, rollout_id: int, what: EpisodeWait) -> None:
        self.outside[rollout_id] = what

    def _turn_begun(self, fact: of.TurnBegun) -> None:
        self.outside.pop(fact.rollout_id, None)
        rollout = self.rollouts.get(fact.rollout_id)
        if rollout is not None:
            rollout.environment += fact.environment

    def _turn_ended(self, fact: of.TurnEnded) -> None:
        self.outside[fact.rollout_id] = "tools"
        self.counters.turns_refused += bool(fact.refused)

    def _teardown_failed(self, _: of.TeardownFailed) -> None:
        self.counters.teardowns_failed += 1

    def _tokens_discarded(self, fact: of.TokensDiscarded) -> None:
        self.counters.tokens_discarded += fact.sampled
        self.ledger.late_tokens(Reason(fact.reason), fact.sampled)
        rollout = self.rollouts.get(fact.rollout_id)
        if rollout is not None:
            rollout.sampled -= fact.sampled
            rollout.environment -= fact.environment

    def _rollout_finished(self, fact: of.RolloutFinished) -> None:
        self.outside.pop(fact.rollout_id, None)
        rollout = self.rollouts.get(fact.rollout_id)
        group = self.groups.get(fact.group_id)
        if rollout is None or group is None or rollout.finished:
            return
        rollout.finished = True
        self._count(group, -1)
        group.growing -= 1
        self._count(group, 1)

    def _sample_ready(self, fact: of.SampleReady) -> None:
        rollout = self.rollouts.get(fact.rollout_id)
        if rollout is None or rollout.group_id == fact.rollout_id:
            return
        group = self.groups[fact.group_id]
        self._leave(fact.rollout_id, rollout)
        self._count(group, -1)
        group.samples += 1
        group.split = True
        self._count(group, 1)
        rollout.group_id = fact.rollout_id
        sample = GroupNow(
            rollout_ids=(fact.rollout_id,), evaluated=False, growing=0, source=fact.group_id
        )
        self.groups[fact.rollout_id] = sample
        self._count(sample, 1)

    def _group_accepted(self, fact: of.GroupAccepted) -> None:
        group = self.groups.get(fact.group_id)
        if group is not None:
            self._count(group, -1)
            group.accepted = True
            self._count(group, 1)

    def _group_dropped(self, fact: of.GroupDropped) -> None:
        rows = [(each.rollout_id, Reason(each.reason), each.tokens) for each in fact.rollouts]
        for rollout_id in fact.rollout_ids:
            rollout = self.rollouts.get(rollout_id)
            if rollout is not None and rollout.group_id != fact.group_id:
                self._leave(rollout_id, rollout)
                self._forget_empty(rollout.group_id)
        self._drop(fact.group_id, rows, fact.cause)
        self._forget([fact.group_id])

    def _leave(self, rollout_id: int, rollout: RolloutNow) -> None:
        """Remove a rollout from its group, which continues."""
        self.outside.pop(rollout_id, None)
        group = self.groups[rollout.group_id]
        self._count(group, -1)
        group.rollout_ids = tuple(each for each in group.rollout_ids if each != rollout_id)
        group.growing -= not rollout.finished
        self._count(group, 1)

    def _attempt_ended(self, fact: of.AttemptEnded) -> None:
        self.counters.retries += fact.retried

    def _batch_delivered(self, fact: of.BatchDelivered) -> None:
        self.batches = fact.batch + 1
        if not fact.again:
            self.counters.batches += 1
            self._arrive(fact.rollouts)
        self._forget(of.unit_ids(fact.rollouts))
        for rollout in self.rollouts.values():
            rollout.carried = True

    def _evaluation_delivered(self, fact: of.EvaluationDelivered) -> None:
        self._arrive(fact.rollouts)
        self._forget(of.unit_ids(fact.rollouts))

    def _update_finished(self, fact: of.UpdateFinished) -> None:
        self.counters.updates += not fact.cause

    def _arrive(self, rollouts: Sequence[of.DeliveredRollout]) -> None:
        self.counters.delivered += len(rollouts)
        for rollout in rollouts:
            self.counters.tokens_delivered += sampled_tokens(rollout)
            self.counters.tokens_masked += rollout.masked

    def _drop(self, group_id: int, rows: Sequence[tuple[int, Reason, int]], cause: str) -> None:
        for rollout_id, reason, tokens in rows:
            self.rollouts.pop(rollout_id, None)
            self.counters.tokens_discarded += tokens
            self.ledger.add(
                Entry(
                    rollout_id=rollout_id,
                    group_id=group_id,
                    reason=reason,
                    cause=cause,
                    tokens=tokens,
                    at=self._now,
                )
            )

    def _forget(self, group_ids: Iterable[int]) -> None:
        """Remove these groups and their rollouts: they are no longer in flight."""
        for group_id in group_ids:
            group = self.groups.pop(group_id, None)
            if group is not None:
                self._count(group, -1)
                for rollout_id in group.rollout_ids:
                    self.rollouts.pop(rollout_id, None)
                    self.outside.pop(rollout_id, None)
                if group.source in self.groups:
                    self.groups[group.source].samples -= 1
                    self._forget_empty(group.source)

    def _forget_empty(self, group_id: int) -> None:
        """Remove a single sample without its rollout, and a group of which nothing is left."""
        group = self.groups.get(group_id)
        if group is not None and not group.rollout_ids and not group.samples:
            self._forget([group_id])
