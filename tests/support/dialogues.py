"""Episodes as the core sees them: who waits to ask, what is asked, what was answered.

The environment is a function of the context, as a replayed one must be.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from aprilsched.core import commands as do
from aprilsched.core import events as ev
from aprilsched.types import Int32Array

TOOL = np.array([9, 9], dtype=np.int32)


@dataclass
class Dialogues:
    """The episodes that run."""

    thinking: dict[int, Int32Array] = field(default_factory=dict[int, Int32Array])
    """The context that each would ask with next."""
    asking: dict[int, Int32Array] = field(default_factory=dict[int, Int32Array])
    turns: dict[int, int] = field(default_factory=dict[int, int])

    def start(self, command: do.StartEpisode) -> None:
        self.thinking[command.rollout_id] = command.prompt.input_ids
        self.turns[command.rollout_id] = 0

    def answer(self, command: do.ResolveTurn) -> None:
        context = self.asking.pop(command.rollout_id)
        self.thinking[command.rollout_id] = np.concatenate((context, command.token_ids, TOOL))
        self.turns[command.rollout_id] += 1

    def cancel(self, command: do.CancelWork) -> None:
        for rollout_id in command.rollout_ids:
            self.thinking.pop(rollout_id, None)
            self.asking.pop(rollout_id, None)

    def clear(self) -> None:
        self.thinking.clear()
        self.asking.clear()
        self.turns.clear()

    def ask(self, rollout_id: int) -> ev.TurnRequested:
        """The episode's next turn."""
        self.asking[rollout_id] = self.thinking.pop(rollout_id)
        return ev.TurnRequested(rollout_id=rollout_id, input_ids=self.asking[rollout_id])

    def end(self, rollout_id: int) -> ev.EpisodeFinished:
        """It returns."""
        del self.thinking[rollout_id]
        return ev.EpisodeFinished(rollout_id=rollout_id, reward=1.0 if rollout_id % 2 else None)

    def fail(self, rollout_id: int) -> ev.EpisodeFailed:
        """It raises."""
        del self.thinking[rollout_id]
        return ev.EpisodeFailed(rollout_id=rollout_id, cause="the tool is broken")
