"""What a scheduler holds and has counted, told from its events and commands alone.

For a run whose scheduler is gone: fed with its log, the books say at the end what the scheduler
itself would have said, so the run can be summed up.

Invariants:
- An attempt counts while it is open: what is heard of it afterwards is void, as in the core.
- A second Opened is that of a run that was resumed: whatever was in flight is gone, but for the
  groups that are launched as restored then. What was generated and lost stays counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from aprilsched.core.lengths.groups import GroupLengths
from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev
from aprilsched.core.state.ledger import Counters, Entry, Ledger, Reason
from aprilsched.telemetry.ages import ages_of
from aprilsched.telemetry.base import Chunks
from aprilsched.telemetry.dispatching import DispatchingListener
from aprilsched.telemetry.open_attempts import OpenAttempt, OpenAttempts
from aprilsched.telemetry.summary import Remainder
from aprilsched.types import Batch

__all__ = ["Books"]


@dataclass(slots=True, kw_only=True)
class _Member:
    """A rollout in flight; `prompt`, `sampled` and `environment` are in tokens."""

    group_id: int
    prompt: int
    sampled: int = 0
    environment: int = 0
    turns: int = 0
    asked: int | None = None
    """The context of the turn that its episode waits for."""
    finished: bool = False

    @property
    def length(self) -> int:
        # A response that ended with nothing has the length 1, as in the core.
        return max(self.sampled + self.environment, self.finished)


@dataclass(slots=True, kw_only=True)
class _Group:
    evaluated: bool
    rollout_ids: list[int] = field(default_factory=list[int])


class Books(DispatchingListener):
    """Listens to a run; :meth:`remainder` is what the scheduler would say of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.counters = Counters()
        self.ledger = Ledger()
        self._groups: dict[int, _Group] = {}
        self._members: dict[int, _Member] = {}
        self._former: dict[int, _Member] = {}
        """What was in flight when a former process of the run ended."""
        self._dropped: dict[int, Reason] = {}
        """Why each dropped rollout was: tokens of it may come late."""
        self._episodes: set[int] = set()
        self._attempts = OpenAttempts()
        self._began = False
        self._retried: int | None = None
        """The rollout of which an attempt failed in the event in work."""
        self._handlers = {
            ev.Opened: self._opened,
            ev.Progress: self._progress,
            ev.Finished: self._finished,
            ev.Interrupted: self._interrupted,
            ev.Failed: self._failed,
            ev.TurnRequested: self._turn_requested,
            ev.TurnWithdrawn: self._turn_withdrawn,
            ev.TurnKept: self._turn_kept,
            ev.EpisodeFinished: self._episode_finished,
            ev.Flushed: lambda event: self._attempts.flush(event.engine),
            ev.Continued: lambda event: self._attempts.go_on(event.engine),
            do.Launch: self._launch,
            do.Send: self._send,
            do.StartEpisode: lambda command: self._episodes.add(command.rollout_id),
            do.ResolveTurn: self._resolve_turn,
            do.DiscardTokens: self._discard_tokens,
            do.Pause: lambda command: self._attempts.pause(command.engine),
            do.LoseEngine: self._lose_engine,
            do.CancelWork: self._cancel_work,
            do.FinishUpdate: self._finish_update,
            do.Deliver: self._deliver,
            do.DeliverEvaluation: lambda command: self._arrive(command.batch),
        }

    def on_event(self, event: ev.Event, now: float) -> None:
        self._retried = None
        super().on_event(event, now)

    def on_progress(self, chunks: Chunks, now: float) -> None:
        self._retried = None
        super().on_progress(chunks, now)

    def remainder(self) -> Remainder:
        """Rollouts in flight, counts, the ledger, and the lengths of what is still open."""
        return Remainder(
            in_flight=list(self._members),
            counters=self.counters,
            ledger=self.ledger,
            open_groups=[
                self._lengths(group_id, group.rollout_ids)
                for group_id, group in self._groups.items()
                if not group.evaluated
            ],
        )

    def _lengths(self, group_id: int, rollout_ids: list[int]) -> GroupLengths:
        members = [self._members[rollout_id] for rollout_id in rollout_ids]
        return GroupLengths(
            launched=group_id,
            tokens=np.array([member.length for member in members], dtype=np.int64),
            finished=np.array([member.finished for member in members], dtype=np.bool_),
        )

    # --- what is in flight ---------------------------------------------------------------------

    def _opened(self, _: ev.Opened) -> None:
        if not self._began:
            self._began = True
            return
        self._attempts.clear()
        self._episodes.clear()
        for group_id, group in list(self._groups.items()):
            if group.evaluated:
                self._drop(group_id, group.rollout_ids, Reason.RESTARTED, "the run was resumed")
        self._former, self._members = self._members, {}
        self._groups.clear()
        self.counters.launched -= len(self._former)

    def _launch(self, command: do.Launch) -> None:
        ids, lengths = command.rollout_ids, command.restored
        evaluated = command.evaluation_id is not None
        self._groups[command.group_id] = _Group(evaluated=evaluated, rollout_ids=list(ids))
        self.counters.launched += len(ids)
        for place, rollout_id in enumerate(ids):
            member = _Member(group_id=command.group_id, prompt=len(command.prompt.input_ids))
            if lengths is not None:
                # The prompt of an episode's first turn, and what its tools said, is its own.
                member = self._former.pop(rollout_id, member)
                member.turns = 0
                member.sampled = int(lengths.tokens[place]) - member.environment
                member.finished = bool(lengths.finished[place])
            self._members[rollout_id] = member

    def _send(self, command: do.Send) -> None:
        self._attempts.send(command)
        context = len(command.input_ids)
        member = self._members.get(command.rollout_id)
        if member is None:
            # A log of an earlier version says nothing of launches.
            member = self._members[command.rollout_id] = _Member(
                group_id=command.group_id, prompt=context
            )
            group = self._groups.setdefault(command.group_id, _Group(evaluated=False))
            group.rollout_ids.append(command.rollout_id)
        # Sent again, it carries what is known: what was lost on the way is not in it.
        member.sampled = context - member.prompt - member.environment

    def _deliver(self, command: do.Deliver) -> None:
        self.counters.batches += 1
        self._arrive(command.batch)

    def _arrive(self, batch: Batch) -> None:
        for group in batch.groups:
            self._groups.pop(group.group_id, None)
        for rollout in batch.rollouts:
            self._members.pop(rollout.rollout_id, None)
            ages = ages_of(rollout, batch.version)
            self.counters.delivered += 1
            self.counters.tokens_delivered += ages.sampled
            self.counters.tokens_masked += ages.masked

    def _cancel_work(self, command: do.CancelWork) -> None:
        if command.culprit is not None and command.culprit == self._retried:
            self.counters.retries -= 1  # it was the last
        self._drop(
            command.group_id,
            command.rollout_ids,
            Reason(command.reason),
            command.cause,
            culprit=command.culprit,
        )

    def _drop(
        self,
        group_id: int,
        rollout_ids: Sequence[int],
        reason: Reason,
        cause: str,
        *,
        culprit: int | None = None,
    ) -> None:
        self._groups.pop(group_id, None)
        for rollout_id in rollout_ids:
            member = self._members.pop(rollout_id, None)
            # For a prompt that cannot be used nothing is launched but its entry.
            self.counters.launched += reason is Reason.BAD_PROMPT
            tokens = 0 if member is None else member.sampled
            sibling = culprit is not None and rollout_id != culprit
            self._dropped[rollout_id] = reason
            self.counters.tokens_discarded += tokens
            self.ledger.add(
                Entry(
                    rollout_id=rollout_id,
                    group_id=group_id,
                    reason=Reason.SIBLING_FAILED if sibling else reason,
                    cause=cause,
                    tokens=tokens,
                    at=self._now,
                )
            )

    # --- what comes back -----------------------------------------------------------------------

    def _progress(self, event: ev.Progress) -> None:
        attempt = self._attempts.of(event.request_id, event.attempt)
        if attempt is None:
            return
        tokens = len(event.token_ids)
        self.counters.tokens_generated += tokens
        self.counters.tokens_reprefilled += attempt.progress(tokens)
        member = self._members.get(attempt.rollout_id)
        if member is not None:
            member.sampled += tokens
        elif attempt.rollout_id in self._dropped:
            self.counters.tokens_discarded += tokens
            self.ledger.late_tokens(self._dropped[attempt.rollout_id], tokens)

    def _finished(self, event: ev.Finished) -> None:
        attempt = self._attempts.close(event.request_id, event.attempt)
        if attempt is not None:
            self._end(attempt.rollout_id)

    def _interrupted(self, event: ev.Interrupted) -> None:
        self._take_back(self._attempts.close(event.request_id, event.attempt))

    def _failed(self, event: ev.Failed) -> None:
        attempt = self._attempts.close(event.request_id, event.attempt)
        if attempt is not None:
            self._retried = attempt.rollout_id
            self.counters.retries += attempt.rollout_id in self._members
            self._take_back(attempt)

    def _lose_engine(self, command: do.LoseEngine) -> None:
        for attempt in self._attempts.lose(command.engine):
            self._take_back(attempt)

    def _take_back(self, attempt: OpenAttempt | None) -> None:
        # An abort may meet the very last token: then there is nothing left to ask for.
        if attempt is not None and attempt.left <= 0:
            self._end(attempt.rollout_id)

    def _end(self, rollout_id: int) -> None:
        """A request ran to its end, and with it a rollout of a single turn."""
        member = self._members.get(rollout_id)
        if member is not None and rollout_id not in self._episodes:
            member.finished = True

    def _resolve_turn(self, command: do.ResolveTurn) -> None:
        member = self._members.get(command.rollout_id)
        if member is not None:
            member.turns += not command.withdrawn
            member.asked = None

    def _turn_withdrawn(self, event: ev.TurnWithdrawn) -> None:
        member = self._members.get(event.rollout_id)
        if member is not None and member.asked is None:
            # Its answer had been given, and was never seen.
            member.turns -= 1

    def _turn_kept(self, event: ev.TurnKept) -> None:
        member = self._members.get(event.rollout_id)
        if member is not None:
            member.turns += 1

    def _discard_tokens(self, command: do.DiscardTokens) -> None:
        self.counters.tokens_discarded += command.sampled
        self.ledger.late_tokens(Reason(command.reason), command.sampled)
        member = self._members.get(command.rollout_id)
        if member is None:
            return
        member.sampled -= command.sampled
        member.environment -= command.environment
        if member.turns and member.asked is not None:
            # The turn that is asked for was measured against what is forgotten now.
            member.environment = max(
                member.environment, member.asked - member.prompt - member.sampled
            )

    def _turn_requested(self, event: ev.TurnRequested) -> None:
        member = self._members.get(event.rollout_id)
        if member is None:
            return
        context = member.asked = len(event.input_ids)
        if member.turns == 0:
            member.prompt = context
        else:
            member.environment += max(0, context - member.prompt - member.length)

    def _episode_finished(self, event: ev.EpisodeFinished) -> None:
        member = self._members.get(event.rollout_id)
        if member is not None:
            member.finished = member.turns > 0

    def _finish_update(self, command: do.FinishUpdate) -> None:
        self.counters.updates += not command.cause
