"""Which rollouts are generated to their end, told from the events alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from aprilsched.core.lengths.groups import GroupLengths
from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev

__all__ = ["Endings"]


class Endings:
    """The rollouts that have finished and are neither delivered nor dropped yet.

    An answer to an attempt that was given up is void; a rollout of several turns finishes with
    its episode and not with a turn.
    """

    def __init__(self) -> None:
        self.finished: set[int] = set()
        self.newest = -1
        """The largest id among the rollouts launched; ids follow the order of launches."""
        self._attempts: dict[int, tuple[int, int]] = {}
        """Attempt and rollout by request."""
        self._episodes: set[int] = set()

    def restart(self, gone: Collection[int]) -> None:
        """The process that held them has ended; `gone` were delivered or dropped before. What
        else is there is launched again."""
        self._attempts.clear()
        self._episodes.clear()
        self.finished.intersection_update(gone)
        self.newest = max(gone, default=-1)

    def restored(self, command: do.Launch, lengths: GroupLengths) -> None:
        """The group is there again, as far as it had come."""
        ended = zip(command.rollout_ids, lengths.finished.tolist(), strict=True)
        self.finished.update(rollout_id for rollout_id, finished in ended if finished)
        self.newest = max(self.newest, *command.rollout_ids)

    def sent(self, command: do.Send) -> None:
        self._attempts[command.request_id] = (command.attempt, command.rollout_id)
        self.newest = max(self.newest, command.rollout_id)

    def episode_started(self, command: do.StartEpisode) -> None:
        self._episodes.add(command.rollout_id)
        self.newest = max(self.newest, command.rollout_id)

    def request_finished(self, event: ev.Finished) -> None:
        attempt, rollout_id = self._attempts.get(event.request_id, (-1, -1))
        if attempt == event.attempt:
            del self._attempts[event.request_id]
            if rollout_id not in self._episodes:
                self.finished.add(rollout_id)

    def left(self, rollout_ids: Iterable[int]) -> None:
        """These were delivered."""
        self.finished.difference_update(rollout_ids)

    def episode_finished(self, event: ev.EpisodeFinished) -> None:
        self.finished.add(event.rollout_id)
