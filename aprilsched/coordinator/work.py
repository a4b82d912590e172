"""The caller's work beside generation: episodes, rewards, verdicts, and the reading of prompts.

Whatever a callback raises becomes an event with its cause, never an end of the run. The work of a
dropped group is cancelled with it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from aprilsched.coordinator.callbacks import Accept, CallbackRunner, Episode, GroupReward, Reward
from aprilsched.coordinator.episodes import Turn
from aprilsched.coordinator.prompts import PromptSource
from aprilsched.coordinator.tasks import Tasks
from aprilsched.core.commands import (
    CancelWork,
    FetchPrompts,
    Judge,
    ResolveTurn,
    Score,
    ScoreGroup,
    StartEpisode,
)
from aprilsched.core.events import (
    EpisodeFailed,
    EpisodeFinished,
    Event,
    GroupRewarded,
    Judged,
    PromptsArrived,
    Rewarded,
    RewardFailed,
)

__all__ = ["Work"]

log = logging.getLogger("aprilsched")

_EXPECTED = frozenset({"rejected", "stale"})
"""Reasons that the user asked for; the others are failures, and said as they happen."""


class Work:
    """Runs the caller's functions."""

    def __init__(
        self,
        *,
        prompts: PromptSource,
        reward: Reward | None,
        group_reward: GroupReward | None,
        accept: Accept | None,
        episode: Episode | None,
        feed: Callable[[Event], None],
    ) -> None:
        self._prompts = prompts
        self._reward = reward
        self._group_reward = group_reward
        self._accept = accept
        self._episode = episode
        self._feed = feed
        self._runner = CallbackRunner()
        self._turns: dict[int, Turn] = {}
        self._tasks: Tasks | None = None

    def start(self, tasks: Tasks) -> None:
        self._tasks = tasks

    def must_be_storable(self) -> None:
        """Prompts are kept in a store."""
        self._prompts.must_be_storable()

    def pass_over(self, count: int) -> None:
        """The first so many prompts were launched before the run was resumed."""
        self._prompts.pass_over(count)

    def close(self) -> None:
        self._runner.close()

    # --- commands ------------------------------------------------------------------------------

    def fetch(self, command: FetchPrompts) -> None:
        self._start("prompts", self._fetch(command.count))

    def start_episode(self, command: StartEpisode) -> None:
        self._start(("episode", command.rollout_id), self._run_episode(command))

    def resolve_turn(self, command: ResolveTurn) -> None:
        turn = self._turns.get(command.rollout_id)
        if turn is not None:
            turn.resolve(command)

    def score(self, command: Score) -> None:
        self._start(("reward", command.rollout.rollout_id), self._score(command))

    def score_group(self, command: ScoreGroup) -> None:
        self._start(("group", command.group.group_id), self._score_group(command))

    def judge(self, command: Judge) -> None:
        self._start(("verdict", command.group.group_id), self._judge(command))

    def cancel(self, command: CancelWork) -> None:
        if command.reason not in _EXPECTED:
            log.warning("group %d %s: %s", command.group_id, command.reason, command.cause)
        if self._tasks is None:
            return
        self._tasks.cancel([("group", command.group_id), ("verdict", command.group_id)])
        for kind in ("episode", "reward"):
            self._tasks.cancel((kind, rollout_id) for rollout_id in command.rollout_ids)

    # --- work ----------------------------------------------------------------------------------

    def _start(self, key: Any, work: Any) -> None:
        if self._tasks is not None:
            self._tasks.start(key, work)

    async def _fetch(self, count: int) -> None:
        prompts, last = await self._prompts.take(count)
        self._feed(PromptsArrived(prompts=prompts, last=last))

    async def _run_episode(self, command: StartEpisode) -> None:
        rollout_id = command.rollout_id
        turn = Turn(rollout_id, command.index, self._feed)
        self._turns[rollout_id] = turn
        ending: Event
        try:
            if self._episode is None:
                return
            reward = await self._episode(turn, command.prompt)
            ending = EpisodeFinished(
                rollout_id=rollout_id, reward=None if reward is None else _finite(reward)
            )
        except Exception as error:
            ending = EpisodeFailed(rollout_id=rollout_id, cause=f"the episode raised {error!r}")
        finally:
            del self._turns[rollout_id]
        self._feed(ending)

    async def _score(self, command: Score) -> None:
        rollout = command.rollout
        if self._reward is None:
            return
        try:
            reward = _finite(await self._runner.call(self._reward, rollout, command.prompt))
        except Exception as error:
            self._feed(RewardFailed(group_id=rollout.group_id, cause=_cause("reward", error)))
        else:
            self._feed(Rewarded(rollout_id=rollout.rollout_id, reward=reward))

    async def _score_group(self, command: ScoreGroup) -> None:
        group = command.group
        if self._group_reward is None:
            return
        try:
            rewards = await self._runner.call(self._group_reward, group)
            scores = tuple(_finite(reward) for reward in rewards)
            if len(scores) != len(group.rollouts):
                raise ValueError(f"{len(scores)} rewards for {len(group.rollouts)} rollouts")
        except Exception as error:
            self._feed(RewardFailed(group_id=group.group_id, cause=_cause("reward", error)))
        else:
            self._feed(GroupRewarded(group_id=group.group_id, rewards=scores))

    async def _judge(self, command: Judge) -> None:
        group_id = command.group.group_id
        if self._accept is None:
            return
        try:
            accepted = bool(await self._runner.call(self._accept, command.group))
        except Exception as error:
            self._feed(RewardFailed(group_id=group_id, cause=_cause("accept", error)))
        else:
            self._feed(Judged(group_id=group_id, accepted=accepted))


def _finite(reward: float) -> float:
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"a reward of {value}")
    return value


def _cause(name: str, error: Exception) -> str:
    return f"the {name} function raised {error!r}"
