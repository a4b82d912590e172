"""Which rollouts grow, which of them were carried, and which wait for their rewards.

Invariants: a rollout grows from its Launch until it is generated to its end or dropped; it is
carried while it grows after a batch that was delivered without it.
"""

from __future__ import annotations

from collections.abc import Iterable

from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev
from aprilsched.telemetry.dispatching import DispatchingListener
from aprilsched.types import Batch

__all__ = ["Rollouts"]


class Rollouts(DispatchingListener):
    """Hears of no chunk of tokens: it costs next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.growing: set[int] = set()
        self.carried: set[int] = set()
        """Those of them that an earlier batch was delivered without."""
        self.scored: set[int] = set()
        """Whose reward, or whose group's, or the verdict about it, is due."""
        self._requests: dict[int, int] = {}
        """The rollout of each request."""
        self._episodes: set[int] = set()
        self._members: dict[int, tuple[int, ...]] = {}
        """Of each group that is neither delivered nor dropped."""
        self._handlers = {
            ev.Opened: self._opened,
            ev.Finished: self._finished,
            ev.EpisodeFinished: lambda event: self._ended(event.rollout_id),
            ev.Rewarded: lambda event: self.scored.discard(event.rollout_id),
            ev.GroupRewarded: self._answered,
            ev.Judged: self._answered,
            ev.RewardFailed: self._answered,
            do.Launch: self._launch,
            do.Send: self._send,
            do.StartEpisode: lambda command: self._episodes.add(command.rollout_id),
            do.Score: lambda command: self.scored.add(command.rollout.rollout_id),
            do.ScoreGroup: self._ask,
            do.Judge: self._ask,
            do.CancelWork: lambda command: self._forget(command.group_id, command.rollout_ids),
            do.Deliver: self._deliver,
            do.Redeliver: self._deliver,
            do.DeliverEvaluation: lambda command: self._arrive(command.batch),
        }

    def _opened(self, _: ev.Opened) -> None:
        """What a former process had in flight is launched as restored, or gone."""
        for held in (self.growing, self.carried, self.scored, self._episodes):
            held.clear()
        self._requests.clear()
        self._members.clear()

    # --- growing -------------------------------------------------------------------------------

    def _launch(self, command: do.Launch) -> None:
        self._members[command.group_id] = command.rollout_ids
        self.growing.update(command.rollout_ids)
        if command.restored is not None:
            ended = zip(command.rollout_ids, command.restored.finished.tolist(), strict=True)
            self.growing.difference_update(rollout_id for rollout_id, done in ended if done)

    def _send(self, command: do.Send) -> None:
        self._requests[command.request_id] = command.rollout_id

    def _finished(self, event: ev.Finished) -> None:
        rollout_id = self._requests.pop(event.request_id, None)
        if rollout_id is not None and rollout_id not in self._episodes:
            self._ended(rollout_id)

    def _ended(self, rollout_id: int) -> None:
        self.growing.discard(rollout_id)
        self.carried.discard(rollout_id)

    # --- rewards -------------------------------------------------------------------------------

    def _ask(self, command: do.ScoreGroup | do.Judge) -> None:
        group_id = command.group.group_id
        self.scored.update(self._members.get(group_id, ()))

    def _answered(self, event: ev.GroupRewarded | ev.Judged | ev.RewardFailed) -> None:
        self.scored.difference_update(self._members.get(event.group_id, ()))

    # --- the end -------------------------------------------------------------------------------

    def _deliver(self, command: do.Deliver | do.Redeliver) -> None:
        self._arrive(command.batch)
        self.carried.update(self.growing)

    def _arrive(self, batch: Batch) -> None:
        for group in batch.groups:
            self._forget(group.group_id, (rollout.rollout_id for rollout in group.rollouts))

    def _forget(self, group_id: int, rollout_ids: Iterable[int]) -> None:
        self._members.pop(group_id, None)
        for rollout_id in rollout_ids:
            self._ended(rollout_id)
            self.scored.discard(rollout_id)
            self._episodes.discard(rollout_id)
