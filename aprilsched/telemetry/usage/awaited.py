"""What the fleet waits for while it starts nothing new, from events and commands alone.

Invariant: whatever may change an answer of this module sets :attr:`Awaited.changed`, so that
nobody has to ask after each of the many events that do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev
from aprilsched.telemetry.usage.parts import Cause

__all__ = ["Awaited"]

_Answer: TypeAlias = int | Literal["rewards", "verdict"]
"""That is due: the reward of a rollout, those of the group, or the word of `accept`."""


@dataclass(slots=True, kw_only=True)
class _Group:
    """Of a batch to come: members that are not generated to their end, and answers that are due."""

    growing: set[int]
    due: set[_Answer] = field(default_factory=set[_Answer])


class Awaited:
    """Of a fleet whose batches have `batch_groups` groups; None is learnt from the first one.

    Attributes:
        handlers: what each kind of event and command does here; it is called by whoever listens.
        changed: an answer may be another one; set to False by whoever has asked.
    """

    def __init__(self, *, batch_groups: int | None = None) -> None:
        self.changed = True
        self._batch_groups = batch_groups
        self._groups: dict[int, _Group] = {}
        self._group_of: dict[int, int] = {}
        """By rollout."""
        self._episodes: set[int] = set()
        self._outside: set[int] = set()
        """Episodes that are with their tools."""
        self._evaluations: set[int] = set()
        self._generated = 0
        """Groups of which no member grows; answers may be due."""
        self._ready = 0
        """Groups for which nothing is due either."""
        self._asked = False
        self._offer = False
        """The batch that it asks for is there."""
        self._updating = False
        self._launches_unasked = False
        """It does so on the asynchronous pace, from the opening on. On the synchronous one an
        engine that has nothing is not even paused while the trainer trains."""
        self._fetching = False
        self._ended = False
        """No more prompts will come."""
        self.handlers: dict[type, Callable[[Any], None]] = {
            ev.Opened: self._opened,
            ev.BatchRequested: self._requested,
            ev.BatchWithdrawn: self._withdrawn,
            ev.EvaluationRequested: self._evaluation_requested,
            ev.EvaluationWithdrawn: self._evaluation_over,
            ev.UpdateRequested: self._update_requested,
            ev.UpdateWithdrawn: self._updated,
            ev.PromptsArrived: self._prompts_arrived,
            ev.TurnRequested: self._turn_requested,
            ev.EpisodeFinished: self._episode_finished,
            ev.Rewarded: self._rewarded,
            ev.GroupRewarded: self._group_rewarded,
            ev.Judged: self._judged,
            do.FetchPrompts: self._fetch,
            do.Launch: self._launch,
            do.StartEpisode: self._start_episode,
            do.ResolveTurn: self._resolve_turn,
            do.Score: self._score,
            do.ScoreGroup: self._score_group,
            do.Judge: self._judge,
            do.CancelWork: self._cancel_work,
            do.Offer: self._offered,
            do.WithdrawOffer: self._offer_withdrawn,
            do.Deliver: self._deliver,
            do.Redeliver: self._deliver,
            do.DeliverEvaluation: self._evaluation_over,
            do.EndOfPrompts: self._withdrawn,
            do.FinishUpdate: self._updated,
        }

    @property
    def _wanted(self) -> bool:
        """The trainer waits for a batch that is to be generated. One that is offered waits for the
        trainer, or for the store."""
        return self._asked and not self._offer

    @property
    def free(self) -> Cause:
        """Why an engine that generates has free slots."""
        wanted = self._wanted or bool(self._evaluations)
        if not wanted and not self._launches_unasked:
            return "trainer"
        if self._fetching or self._ended:
            return "prompts"
        full = self._batch_groups
        if wanted:
            short = full is not None and self._ready < full <= self._generated
            return "rewards" if short else "tail"
        # Without a bound known, a batch is full when nothing grows.
        if full is None:
            return "tail" if self._groups and self._generated < len(self._groups) else "trainer"
        if self._ready >= full or not self._groups:
            return "trainer"
        return "rewards" if self._generated >= full else "tail"

    @property
    def paused(self) -> Literal["pause", "trainer"]:
        """Why an engine is paused that takes no weights in."""
        busy = self._wanted or self._updating or bool(self._evaluations)
        return "pause" if busy else "trainer"

    @property
    def ready(self) -> int:
        """Groups that are complete, and wait for their batch."""
        return self._ready

    @property
    def outside(self) -> int:
        """Episodes that have nothing for an engine at the moment."""
        return len(self._outside)

    # --- the trainer and the prompts -----------------------------------------------------------

    def _opened(self, _: ev.Opened) -> None:
        self._groups.clear()
        self._group_of.clear()
        self._episodes.clear()
        self._outside.clear()
        self._evaluations.clear()
        self._generated = self._ready = 0
        self._asked = self._offer = False
        self._updating = self._fetching = self._ended = False
        self.changed = True

    def _requested(self, _: ev.BatchRequested) -> None:
        self._asked = self.changed = True

    def _withdrawn(self, _: ev.BatchWithdrawn | do.EndOfPrompts) -> None:
        self._asked = False
        self.changed = True

    def _evaluation_requested(self, event: ev.EvaluationRequested) -> None:
        self._evaluations.add(event.evaluation_id)
        self.changed = True

    def _evaluation_over(self, what: do.DeliverEvaluation | ev.EvaluationWithdrawn) -> None:
        self._evaluations.discard(what.evaluation_id)
        self.changed = True

    def _update_requested(self, _: ev.UpdateRequested) -> None:
        self._updating = self.changed = True

    def _updated(self, _: ev.UpdateWithdrawn | do.FinishUpdate) -> None:
        self._updating = False
        self.changed = True

    def _fetch(self, _: do.FetchPrompts) -> None:
        self._launches_unasked |= not self._wanted
        self._fetching = self.changed = True

    def _prompts_arrived(self, event: ev.PromptsArrived) -> None:
        self._fetching = event.partial
        self._ended = self._ended or event.last
        self.changed = True

    def _offered(self, _: do.Offer) -> None:
        self._offer = self.changed = True

    def _offer_withdrawn(self, _: do.WithdrawOffer) -> None:
        self._offer = False
        self.changed = True

    def _deliver(self, command: do.Deliver | do.Redeliver) -> None:
        self._asked = self._offer = False
        self.changed = True
        self._batch_groups = len(command.batch.groups)
        for group in command.batch.groups:
            self._forget(group.group_id, [rollout.rollout_id for rollout in group.rollouts])

    # --- groups --------------------------------------------------------------------------------

    def _launch(self, command: do.Launch) -> None:
        if command.evaluation_id is not None:
            return
        growing = set(command.rollout_ids)
        if command.restored is None:
            self._launches_unasked |= not self._wanted
        else:
            ended = zip(command.rollout_ids, command.restored.finished.tolist(), strict=True)
            growing -= {rollout_id for rollout_id, finished in ended if finished}
        self.changed = True
        self._groups[command.group_id] = _Group(growing=growing)
        self._group_of.update(dict.fromkeys(command.rollout_ids, command.group_id))
        if not growing:
            self._generated += 1
            self._ready += 1

    def _cancel_work(self, command: do.CancelWork) -> None:
        self._forget(command.group_id, command.rollout_ids)

    def _forget(self, group_id: int, rollout_ids: list[int] | tuple[int, ...]) -> None:
        self.changed = True
        group = self._groups.pop(group_id, None)
        if group is not None and not group.growing:
            self._generated -= 1
            self._ready -= not group.due
        for rollout_id in rollout_ids:
            self._group_of.pop(rollout_id, None)
            self._episodes.discard(rollout_id)
            self._outside.discard(rollout_id)

    # --- from growing to ready -----------------------------------------------------------------

    def finished(self, rollout_id: int) -> None:
        """A request of the rollout ran to its end: the last one, if no episode has others."""
        if rollout_id not in self._episodes:
            self._ended_growing(rollout_id)

    def _start_episode(self, command: do.StartEpisode) -> None:
        self._episodes.add(command.rollout_id)
        self._outside.add(command.rollout_id)
        self.changed = True

    def _turn_requested(self, event: ev.TurnRequested) -> None:
        self._outside.discard(event.rollout_id)
        self.changed = True

    def _resolve_turn(self, command: do.ResolveTurn) -> None:
        self._outside.add(command.rollout_id)
        self.changed = True

    def _episode_finished(self, event: ev.EpisodeFinished) -> None:
        self._outside.discard(event.rollout_id)
        self.changed = True
        self._ended_growing(event.rollout_id)

    def _ended_growing(self, rollout_id: int) -> None:
        group = self._groups.get(self._group_of.get(rollout_id, -1))
        if group is None or rollout_id not in group.growing:
            return
        group.growing.discard(rollout_id)
        if not group.growing:
            self._generated += 1
            self._ready += not group.due
            self.changed = True

    def _score(self, command: do.Score) -> None:
        self._ask(command.rollout.group_id, command.rollout.rollout_id)

    def _score_group(self, command: do.ScoreGroup) -> None:
        self._ask(command.group.group_id, "rewards")

    def _judge(self, command: do.Judge) -> None:
        self._ask(command.group.group_id, "verdict")

    def _rewarded(self, event: ev.Rewarded) -> None:
        self._answered(self._group_of.get(event.rollout_id, -1), event.rollout_id)

    def _group_rewarded(self, event: ev.GroupRewarded) -> None:
        self._answered(event.group_id, "rewards")

    def _judged(self, event: ev.Judged) -> None:
        self._answered(event.group_id, "verdict")

    def _ask(self, group_id: int, answer: _Answer) -> None:
        group = self._groups.get(group_id)
        if group is None:
            return
        if not group.growing and not group.due:
            self._ready -= 1
            self.changed = True
        group.due.add(answer)

    def _answered(self, group_id: int, answer: _Answer) -> None:
        group = self._groups.get(group_id)
        if group is None or answer not in group.due:
            return
        group.due.discard(answer)
        if not group.growing and not group.due:
            self._ready += 1
            self.changed = True
