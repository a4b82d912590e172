"""Plays the part of episodes for tests of the core: asks for turns, and takes their answers.

The environment is a function of the context, so that an episode can be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.types import BranchRule, Int32Array, Score

TOOL = np.array([9, 9], dtype=np.int32)


@dataclass
class Dialogues:
    """The running episodes; all mappings are by rollout."""

    thinking: dict[int, Int32Array] = field(default_factory=dict[int, Int32Array])
    """Context of the next turn, of episodes that wait for no turn."""
    asking: dict[int, Int32Array] = field(default_factory=dict[int, Int32Array])
    turns: dict[int, int] = field(default_factory=dict[int, int])
    answered: dict[int, Int32Array] = field(default_factory=dict[int, Int32Array])
    """Context of the turn that was answered last, until the episode does something else."""
    withdrawn: dict[int, Int32Array] = field(default_factory=dict[int, Int32Array])
    """Context of a turn that the episode gave up, until its request has ended."""
    partial: dict[int, Int32Array] = field(default_factory=dict[int, Int32Array])
    """Context and received tokens of a turn that the episode gave up and whose request ended."""
    wholes: dict[int, list[Int32Array]] = field(default_factory=dict[int, list[Int32Array]])
    """Context and output of each turn that the episode has seen, also before a restart."""
    unseen: list[tuple[int, Int32Array]] = field(default_factory=list[tuple[int, Int32Array]])
    """Rollouts and turns that were seen and given up since the last snapshot. A restart from it
    brings the turns back, whether the episode asks for them again or not."""
    refused: set[int] = field(default_factory=set[int])
    """Episodes whose last answer was that engines refuse the turn."""
    branched: set[int] = field(default_factory=set[int])
    """Episodes that have left their context."""

    def start(self, command: do.StartEpisode) -> None:
        self.thinking[command.rollout_id] = command.prompt.input_ids
        self.turns[command.rollout_id] = 0

    def answer(self, command: do.ResolveTurn) -> None:
        if command.withdrawn:
            self._back(command)
            return
        if command.refused:
            context = self.answered[command.rollout_id] = self.asking.pop(command.rollout_id)
            self.thinking[command.rollout_id] = context
            self.refused.add(command.rollout_id)
            return
        context = self.answered[command.rollout_id] = self.asking.pop(command.rollout_id)
        whole = np.concatenate((context, command.token_ids))
        self.wholes.setdefault(command.rollout_id, []).append(whole)
        self.thinking[command.rollout_id] = np.concatenate((whole, TOOL))
        self.turns[command.rollout_id] += 1

    def _back(self, command: do.ResolveTurn) -> None:
        context = self.withdrawn.pop(command.rollout_id)
        self.thinking[command.rollout_id] = context
        if len(command.token_ids):
            self.partial[command.rollout_id] = np.concatenate((context, command.token_ids))

    def cancel(self, command: facts.GroupDropped) -> None:
        for rollout_id in command.rollout_ids:
            for waiting in (self.thinking, self.asking, self.withdrawn):
                waiting.pop(rollout_id, None)
            self._goes_on(rollout_id)

    def clear(self) -> None:
        for known in (self.thinking, self.asking, self.withdrawn, self.answered, self.partial):
            known.clear()
        for rollout_id, whole in self.unseen:
            self.wholes[rollout_id].append(whole)
        self.unseen.clear()
        self.refused.clear()
        self.turns.clear()
        self.branched.clear()

    def _goes_on(self, rollout_id: int) -> None:
        self.answered.pop(rollout_id, None)
        self.refused.discard(rollout_id)
        self.partial.pop(rollout_id, None)

    def withdraw(self, rollout_id: int) -> ev.TurnWithdrawn:
        """The episode gives up the turn that it waits for, or one whose answer it has not seen."""
        if rollout_id in self.asking:
            self.withdrawn[rollout_id] = self.asking.pop(rollout_id)
        else:
            del self.thinking[rollout_id]
            self.withdrawn[rollout_id] = self.answered.pop(rollout_id)
            if rollout_id not in self.refused:
                self.unseen.append((rollout_id, self.wholes[rollout_id].pop()))
                self.turns[rollout_id] -= 1
            self.refused.discard(rollout_id)
        return ev.TurnWithdrawn(rollout_id=rollout_id)

    def keep(self, rollout_id: int) -> ev.TurnKept:
        """The episode takes the partial output of the turn that it gave up."""
        whole = self.partial.pop(rollout_id)
        self.wholes.setdefault(rollout_id, []).append(whole)
        self.thinking[rollout_id] = np.concatenate((whole, TOOL))
        self.turns[rollout_id] += 1
        return ev.TurnKept(rollout_id=rollout_id)

    def ask(self, rollout_id: int) -> ev.TurnRequested:
        """The episode asks for its next turn."""
        self._goes_on(rollout_id)
        self.asking[rollout_id] = self.thinking.pop(rollout_id)
        return ev.TurnRequested(
            rollout_id=rollout_id,
            input_ids=self.asking[rollout_id],
            branch=rollout_id in self.branched,
        )

    def leave(self, rollout_id: int, choice: int, cut: int) -> None:
        """Let the episode branch: continue from an earlier context, or from a prefix of it."""
        wholes = self.wholes[rollout_id]
        whole = wholes[choice % len(wholes)]
        self.branched.add(rollout_id)
        if cut == 0:
            self.thinking[rollout_id] = np.concatenate((whole, TOOL))
        else:
            left = whole[: 1 + (cut * choice) % len(whole)]
            self.thinking[rollout_id] = np.append(left, np.int32(5 + cut)) if cut > 1 else left

    def end(self, rollout_id: int) -> ev.EpisodeFinished:
        """The episode returns."""
        del self.thinking[rollout_id]
        self._goes_on(rollout_id)
        score = Score(reward=1.0 if rollout_id % 2 else None, info={"rollout": rollout_id})
        rules: tuple[BranchRule, ...] = ("last", "longest", "all")
        return ev.EpisodeFinished(
            rollout_id=rollout_id,
            score=score,
            branches=rules[rollout_id % 3],
            keeps_known=rollout_id % 4 < 2,
        )

    def fail(self, rollout_id: int, *, lost: bool = False) -> ev.EpisodeFailed:
        """The episode raises an error, or MemberLost."""
        del self.thinking[rollout_id]
        self._goes_on(rollout_id)
        return ev.EpisodeFailed(rollout_id=rollout_id, cause="the tool is broken", lost=lost)
