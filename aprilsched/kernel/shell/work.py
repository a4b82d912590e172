"""Runs the caller's functions for the core: episodes, rewards, accept, and reading prompts.

An exception of a callback becomes an event with its cause and does not end the run. The first of
each kind is logged. The work of a dropped group is cancelled with the group.
"""

from __future__ import annotations

import asyncio
import logging
import re
import reprlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Set
from typing import Any, SupportsFloat, SupportsIndex, TypeVar, cast

from aprilsched.errors import MemberLost, RunEnded
from aprilsched.kernel.core.config import RewardScope
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.ledger import REFUSED, Reason
from aprilsched.kernel.shell.callbacks import (
    Accept,
    CallbackRunner,
    Failures,
    GroupReward,
    Overdue,
    Reward,
    WrongResult,
    called,
    check_callable,
    place_of,
)
from aprilsched.kernel.shell.episodes import Episode, FollowsRun, Turn
from aprilsched.kernel.shell.prompts import PromptSource
from aprilsched.kernel.shell.tasks import Tasks
from aprilsched.kernel.values.companions import of_prompt
from aprilsched.kernel.weights.threads import to_the_end
from aprilsched.types import Prompt, RefusedPrompt, Score

log = logging.getLogger("aprilsched")

_REWARD = "the reward function"
_ACCEPT = "the accept function"
_EPISODE = "the episode"
_TEARDOWN = "the teardown of an episode"

_WARN_AT = 100
"""Number of groups rejected in a row at which a warning is logged."""

_TEARDOWN_S = 30.0
"""Seconds that each function has that an episode registered for its end."""

_EXPECTED = frozenset({"rejected", "stale", "begun_again", "withdrawn"})
"""Reasons that the user asked for. All other reasons are failures."""
_NOTED = (f"{_REWARD} r", f"{_ACCEPT} r", f"{_EPISODE} r")
"""Prefixes of the causes that were logged with their traceback: raised or returned."""

End = TypeVar("End", bound=RunEnded)


class Work:
    """Runs the caller's functions."""

    def __init__(
        self,
        *,
        prompts: PromptSource,
        reward: Reward | GroupReward | None,
        scope: RewardScope,
        accept: Accept | None,
        episode: Episode | None,
        feed: Callable[[ev.Event], None],
        rejections: Callable[[], int],
        refusal_level: int = logging.ERROR,
    ) -> None:
        if reward is not None and scope == "group":
            check_callable('reward with reward_scope="group"', reward, "group")
        elif reward is not None:
            check_callable("reward", reward, "rollout", "prompt")
        if accept is not None:
            check_callable("accept", accept, "group")
        if episode is not None:
            check_callable("episode", episode, "turn", "prompt")
        self._failures = Failures()
        self._prompts = prompts
        self._reward = reward
        self._accept = accept
        self._episode = episode
        self._feed = feed
        self._refusal_level = refusal_level
        self._rejections = rejections
        """Number of groups that `accept` has rejected in a row before this one."""
        self._runner = CallbackRunner()
        self._teardowns = CallbackRunner()
        """Has its own threads, because rewards may block all of theirs."""
        self._turns: dict[int, Turn] = {}
        self._tasks = Tasks()
        self._saved: Callable[[], Awaitable[None]] | None = None
        self._asked: deque[int] = deque()
        self._reads = asyncio.Event()

    def start(self, tasks: Tasks, saved: Callable[[], Awaitable[None]]) -> None:
        self._tasks, self._saved = tasks, saved
        tasks.start("prompts", called("the source of prompts", self._read))

    def must_be_storable(self) -> None:
        """Refuse prompts that a store cannot save."""
        self._prompts.must_be_storable()

    def pass_over(self, count: int) -> None:
        """Skip the first `count` prompts, because the run launched them before it was resumed."""
        self._prompts.pass_over(count)

    def say_opened(self) -> None:
        """Notify the episode function of the rollouts that start now, including resumed ones."""
        if isinstance(self._episode, FollowsRun):
            keys = self._tasks.of_kind(("episode",))
            self._episode.run_opened([int(key[1]) for key in keys])

    def say_closed(self, *, stored: bool) -> None:
        """Tell it that the scheduler closes, and whether a store has its rollouts."""
        if isinstance(self._episode, FollowsRun):
            self._episode.run_closed(goes_on=stored)

    def stop(self) -> None:
        """Fail the open turns of all episodes, because the scheduler ends."""
        for turn in self._turns.values():
            turn.end()

    def close(self) -> None:
        self._runner.close()
        self._teardowns.close()

    # --- commands ------------------------------------------------------------------------------

    def fetch(self, command: facts.PromptsRequested) -> None:
        self._asked.append(command.count)
        self._reads.set()

    def start_episode(self, command: do.StartEpisode) -> None:
        self._tasks.start(("episode", command.rollout_id), self._run_episode(command))

    def resolve_turn(self, command: do.ResolveTurn) -> None:
        turn = self._turns.get(command.rollout_id)
        if turn is not None:
            turn.resolve(command)
        if command.refused:
            self._note_failure(
                f"rollout {command.rollout_id}", "continues after a refused turn", command.refused
            )

    def score(self, command: do.ScoreRollout) -> None:
        rollout = command.rollout

        def scored(reward: object) -> ev.Event:
            return ev.Rewarded(rollout_id=rollout.rollout_id, score=_rewarded(reward))

        work = self._ask(
            _REWARD,
            self._reward,
            rollout.group_id,
            scored,
            rollout,
            command.prompt,
            rollout_id=rollout.rollout_id,
        )
        self._tasks.start(("reward", rollout.rollout_id), work)

    def score_group(self, command: do.ScoreGroup) -> None:
        group = command.group

        def scored(rewards: object) -> ev.Event:
            scores = _scores(rewards, len(group.rollouts))
            return ev.GroupRewarded(group_id=group.group_id, scores=scores)

        work = self._ask(_REWARD, self._reward, group.group_id, scored, group)
        self._tasks.start(("group", group.group_id), work)

    def filter(self, command: do.Filter) -> None:
        unit = command.unit

        def filtered(accepted: object) -> ev.Event:
            if accepted is None:
                raise WrongResult("None; return True or False")
            if not accepted:
                self._note_rejection()
            return ev.Filtered(group_id=unit.unit_id, accepted=bool(accepted))

        work = self._ask(_ACCEPT, self._accept, unit.unit_id, filtered, unit)
        self._tasks.start(("verdict", unit.unit_id), work)

    def _note_rejection(self) -> None:
        """Warn of a function that rejects everything: the trainer would wait forever."""
        if self._rejections() + 1 == _WARN_AT:
            log.warning(
                "%s has accepted nothing, rejected_in_a_row=%d; correct %s, the reward or the "
                "prompts",
                _ACCEPT,
                _WARN_AT,
                place_of(self._accept),
            )

    def refuse(self, command: facts.PromptRefused) -> None:
        what = f"group {command.group_id}"
        self._note_failure(what, Reason.BAD_PROMPT.value, command.cause)

    def _note_failure(self, what: str, reason: str, cause: str) -> None:
        failed = reason not in _EXPECTED and not cause.startswith(_NOTED)
        # Causes of one kind differ in ids, counts and names of engines.
        if failed and self._failures.first(reason, re.sub(r"\d+", "", cause)):
            log.log(
                self._refusal_level if cause.startswith(REFUSED) else logging.ERROR,
                "%s %s: %s; later failures of this kind are only counted",
                what,
                reason,
                cause,
            )

    def cancel(self, command: facts.GroupDropped) -> None:
        what = f"group {command.group_id}"
        if command.reason == Reason.MEMBER_LOST:
            what = f"rollout {command.rollout_ids[0]}"
        self._note_failure(what, command.reason, command.cause)
        self._tasks.cancel([("group", command.group_id), ("verdict", command.group_id)])
        for rollout_id in command.rollout_ids:
            if rollout_id in self._turns:
                self._turns[rollout_id].end()
        for kind in ("episode", "reward"):
            self._tasks.cancel((kind, rollout_id) for rollout_id in command.rollout_ids)

    def explain(self, error: End) -> End:
        """Give the end of a run the error of the caller's code as its cause, if that was it."""
        logged = self._failures.errors
        error.__cause__ = next((logged[cause] for cause in error.causes if cause in logged), None)
        return error

    # --- work ----------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Read prompts as they are requested, in one task for the whole run. So a source that
        waits is never read twice at a time, and can be cancelled."""
        while True:
            await self._reads.wait()
            self._reads.clear()
            while self._asked:
                prompts, last = await self._prompts.take(self._asked.popleft(), self._tell_early)
                self._feed(ev.PromptsArrived(prompts=prompts, last=last))

    def _tell_early(self, prompts: tuple[Prompt | RefusedPrompt, ...]) -> None:
        self._tell(ev.PromptsArrived(prompts=prompts, partial=True))

    def _tell(self, event: ev.Event) -> None:
        """Feed an event from within the caller's code.

        An exception here is a bug of the scheduler. It must end the run, although the caller's code
        might catch it, and it must not count as an error of that code.
        """
        try:
            self._feed(event)
        except Exception as error:
            self._tasks.fail(error)
            raise

    async def _run_episode(self, command: do.StartEpisode) -> None:
        rollout_id = command.rollout_id
        asked = of_prompt(self._prompts.companions, command.prompt.companions)
        turn = Turn(
            rollout_id,
            command.index,
            self._tell,
            sampling=command.sampling,
            companions=asked,
            known=command.known,
            partial_turn=command.partial_turn,
            saved=self._saved,
        )
        self._turns[rollout_id] = turn
        try:
            await self._drive(turn, command)
        finally:
            # Neither a cancellation nor the end of the scheduler interrupts it.
            turn.recorded.set()
            if turn.ending:
                await to_the_end(self._tear_down(turn, rollout_id))
            turn.over = True

    async def _drive(self, turn: Turn, command: do.StartEpisode) -> None:
        rollout_id = command.rollout_id
        ending: ev.Event
        try:
            if self._episode is None:
                return
            reward = await called(_EPISODE, self._episode, turn, command.prompt)
            score = None if reward is None else _score(reward)
            await turn.settle()
            if turn.refusal is not None and turn.empty:
                raise turn.refusal
            ending = ev.EpisodeFinished(
                rollout_id=rollout_id,
                score=score,
                branches=turn.branches,
                keeps_known=turn.keeps_known,
            )
        except Exception as error:
            cause = self._failures.note(_EPISODE, self._episode, error)
            # A program that crashes after a refused turn counts like one that reports the refusal.
            lost = isinstance(error, MemberLost) or turn.refusal is not None
            ending = ev.EpisodeFailed(rollout_id=rollout_id, cause=cause, lost=lost)
        finally:
            turn.end()
            del self._turns[rollout_id]
        self._feed(ending)

    async def _tear_down(self, turn: Turn, rollout_id: int) -> None:
        """Call the functions that the episode registered for its end, the latest first."""
        while turn.ending:
            function = turn.ending.pop()
            call = self._teardowns.call
            try:
                await called(_TEARDOWN, call, _TEARDOWN, function, within=_TEARDOWN_S)
                continue
            except Overdue:
                late = WrongResult(f"nothing within {_TEARDOWN_S:.0f} s")
                cause = self._failures.note(_TEARDOWN, function, late)
            except Exception as error:
                cause = self._failures.note(_TEARDOWN, function, error)
            self._feed(ev.TeardownFailed(rollout_id=rollout_id, cause=cause))

    async def _ask(
        self,
        what: str,
        function: Callable[..., Any] | None,
        group_id: int,
        event_of: Callable[[object], ev.Event],
        *args: Any,
        rollout_id: int | None = None,
    ) -> None:
        """Call a function that judges a group or one of its rollouts; pass on its result."""
        if function is None:
            return
        try:
            event = event_of(await self._runner.call(what, function, *args))
        except Exception as error:
            cause = self._failures.note(what, function, error)
            event = ev.RewardFailed(
                group_id=group_id,
                cause=cause,
                rollout_id=rollout_id,
                lost=rollout_id is not None and isinstance(error, MemberLost),
            )
        self._feed(event)


def _score(reward: object) -> Score:
    """Return the caller's result as a new score.

    The caller may still change the mappings in the score that it returned."""
    if isinstance(reward, Score):
        return Score(reward=reward.reward, parts=reward.parts, info=reward.info)
    try:
        # float() also takes text. The protocols of numbers are slow to check.
        if isinstance(reward, float | SupportsFloat | SupportsIndex):
            return Score(reward=cast("float", reward))
    except Exception as error:
        raise WrongResult(f"{reprlib.repr(reward)} ({error})") from error
    raise WrongResult(f"{reprlib.repr(reward)}; return a number or a Score")


def _rewarded(reward: object) -> Score:
    score = _score(reward)
    if score.reward is None:
        raise WrongResult("a Score without a reward; return Score(reward=...)")
    return score


def _scores(rewards: Any, count: int) -> tuple[Score, ...]:
    """The scores of a group in the order of its rollouts.

    A mapping, a set and a string are refused, because iterating over them does not give the scores
    in order: a mapping would give its keys.
    """
    if isinstance(rewards, Mapping | Set | str | bytes):
        kind = cast("object", rewards).__class__.__name__
        raise WrongResult(f"a {kind}; return one reward for each rollout, in order")
    try:
        given = list(rewards)
    except TypeError as error:
        why = f"{reprlib.repr(rewards)}; return one reward for each rollout, in order"
        raise WrongResult(why) from error
    if len(given) != count:
        raise WrongResult(f"{len(given)} rewards for {count} rollouts")
    scores = tuple(_rewarded(reward) for reward in given)
    return scores
