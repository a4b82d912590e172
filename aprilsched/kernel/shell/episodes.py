"""Runs episodes: rollouts of several turns that a coroutine of the caller drives.

An interrupted request resumes inside the same ``await turn.generate(...)``. The episode does not
notice pauses, aborts, refits and failovers.

Cancelling an ``await turn.generate(...)``, for example by a timeout around it, aborts its request.
``await turn.partial()`` then returns the tokens that had arrived, and they become part of the
rollout. Without that call they are dropped and counted in the ledger. But a rollout that would
otherwise have no tokens keeps them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from aprilsched.errors import EpisodeError, TurnRefused
from aprilsched.kernel.core.messages.commands import ResolveTurn, context_mark
from aprilsched.kernel.core.messages.events import (
    EpisodeWaits,
    TurnKept,
    TurnRequested,
    TurnWithdrawn,
)
from aprilsched.kernel.shell.prompts import check_media
from aprilsched.kernel.shell.waits import fail_future
from aprilsched.kernel.values.companions import Companion, CompanionRows
from aprilsched.kernel.values.sampling import check_sampling
from aprilsched.types import (
    BranchRule,
    EpisodeWait,
    FinishReason,
    Float32Array,
    Int32Array,
    Media,
    Prompt,
    SamplingParams,
    Score,
    token_array,
)

_ENDED = "the rollout of this turn has ended; nothing more can be generated for it."


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TurnOutput:
    """The output of one turn, n tokens.

    Attributes:
        token_ids: int32 [n], the sampled tokens.
        logprobs: float32 [n], log-probability of each token under the version that sampled it.
        versions: int32 [n], policy version of each token.
        finish_reason: "length" if the turn was cut short.
        companions: data that engines returned in addition to the tokens, by name: rows of the
            rollout from its first prompt token to the last token of this turn, if the scheduler
            asks for them.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    finish_reason: FinishReason
    companions: Mapping[str, CompanionRows] = field(default_factory=dict[str, CompanionRows])


class Turn:
    """Lets an episode generate. Each rollout has its own.

    Attributes:
        index: position of the rollout in its group, 0 to group_size - 1.
        rollout_id: number of the rollout in its run; a resumed run keeps it.
        sampling: the default parameters of a turn.
        branches: which of several branches are delivered: the one of the "last" turn, the "longest"
            one, which has most sampled tokens, or "all" (``Rollout.branches``). The episode sets it
            before it returns. Tokens of the others are in the ledger (``other_branch``).
        keeps_known: whether turns from before the run was resumed stay in the rollout although the
            episode has not asked for them again. An episode that runs again takes other turns; an
            episode whose program runs elsewhere already has its answers. With a store it gets each
            answer only when the store has it, so none is missing after a restart.
        recorded: set when the scheduler knows how the episode has ended.
    """

    def __init__(
        self,
        rollout_id: int,
        index: int,
        tell: Callable[[TurnRequested | TurnWithdrawn | TurnKept | EpisodeWaits], None],
        sampling: SamplingParams,
        companions: Sequence[Companion] = (),
        known: Collection[tuple[int, int]] = (),
        partial_turn: tuple[int, int] | None = None,
        saved: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.index = index
        self.rollout_id = rollout_id
        self.sampling = sampling
        self._known, self._begun = frozenset(known), partial_turn
        self.branches: BranchRule = "last"
        self.keeps_known = False
        self._branched = False
        """Whether a call may have left the context of the one before."""
        self._tell = tell
        self._saved = saved
        self._companions = companions
        self._context: Int32Array | None = None
        self._asked: Int32Array | None = None
        """Context of the latest call."""
        self._answer: asyncio.Future[TurnOutput] | None = None
        """Output of the open call; None while no call is open."""
        self._back: asyncio.Future[TurnOutput] | None = None
        """Output of the cancelled call, until the episode takes it or starts another turn."""
        self._ended = False
        self.ending: list[Callable[[], object]] = []
        """Functions to call when the episode has ended, in the order in which it registered
        them."""
        self.refusal: TurnRefused | None = None
        """Why the latest turn was refused; None if it was not."""
        self.recorded = asyncio.Event()
        self.over = False
        """All of these were called, so no further one may come."""

    def on_end(self, function: Callable[[], object]) -> None:
        """Call `function` once after the episode, to release an outside resource like a sandbox.

        It is called however the episode ends: it returned, raised, or was cancelled because its
        rollout was dropped, became too stale or was lost, or because the scheduler closes. Register
        it as soon as the resource exists. Functions are called one after the other, the latest
        first. A coroutine function runs on the event loop, and a plain one in a thread. Each has
        30 seconds. Its exceptions are logged once and counted (``teardowns_failed``), and have no
        other effect.

        Raises:
            EpisodeError: if the episode has ended, and a task of it that still runs registers
                something.
        """
        if self.over:
            raise EpisodeError(
                "the episode has ended and its functions for that were called; give back in place "
                "what was made after that."
            )
        self.ending.append(function)

    def waits_for(self, what: EpisodeWait) -> None:
        """Report what the episode waits for until its next turn, for displays of the run.

        `what` is "tools" (assumed after each turn), "agent" for an agent that drives the episode,
        or "score"."""
        self._tell(EpisodeWaits(rollout_id=self.rollout_id, what=what))

    @property
    def known(self) -> int:
        """Number of its turns from before the run was resumed, whole or partial."""
        return len(self._known) + (self._begun is not None)

    @property
    def empty(self) -> bool:
        """Whether its rollout has no turn."""
        return self._context is None and not (self.keeps_known and self._known)

    def knows(self, input_ids: Sequence[int] | Int32Array, *, whole: bool = False) -> bool:
        """Return whether a turn after this context exists from before the run was resumed.

        Partial turns count unless `whole` is True. :meth:`generate` then returns the turn's tokens
        and generates only the missing ones."""
        if not self.known:
            return False
        mark = context_mark(np.asarray(input_ids, dtype=np.int32))
        return mark in self._known or (mark == self._begun and not whole)

    async def generate(
        self,
        input_ids: Sequence[int] | Int32Array,
        sampling: SamplingParams | None = None,
        media: Sequence[Media] | None = None,
        *,
        branch: bool = False,
    ) -> TurnOutput:
        """Generate one turn after the context `input_ids`, [n].

        From the second turn on, `input_ids` must start with the whole context and output of the
        previous turn. The tokens after that are recorded as tokens of the environment, with loss
        mask 0.

        With `branch` this is not required. If `input_ids` start with the whole context and output
        of any branch of the rollout, the turn continues that branch. Otherwise it starts a new
        branch at the first token that differs from the others. The tokens before that position
        are shared with another branch, as they were sampled; a branch that differs within the
        prompt of the first turn has its own prompt.

        `media` are all images and other media of the context, in the order of their positions in
        `input_ids`, such as the prompt's media and an image that an environment answered with. None
        means the prompt's media.

        Cancelling this call, for example with ``asyncio.timeout``, gives up the turn; see
        :meth:`partial`. The next call waits until the engine has ended the request.

        Raises:
            ConfigError: if `input_ids`, `sampling` or `media` cannot be used.
            TurnRefused: if the engines refuse it; the rollout is as it was before the call.
            EpisodeError: if the context does not continue the previous turn, if a turn is being
                generated already, or if the rollout has ended.
        """
        ids = token_array(input_ids, "input_ids of the turn")
        if sampling is not None:
            check_sampling(sampling)
        shown = None if media is None else tuple(media)
        check_media(shown or (), self._companions)
        self._check_free()
        await self._returned()
        self._check_free()
        self._back = None
        before = self._context
        self._branched = self._branched or branch
        if before is not None and not branch and not np.array_equal(ids[: len(before)], before):
            raise EpisodeError(
                "input_ids of the turn do not start with the context and output of the turn "
                "before; append to them, so that the rollout stays one token sequence."
            )
        self._asked = ids
        self._answer = answer = asyncio.get_running_loop().create_future()
        self._tell(
            TurnRequested(
                rollout_id=self.rollout_id,
                input_ids=ids,
                sampling=sampling,
                media=shown,
                branch=self._branched,
            )
        )
        try:
            output = await answer
            if self.keeps_known:
                await self.saved()
        except (asyncio.CancelledError, GeneratorExit):
            if self._answer is answer:
                self._withdraw()
            raise
        except TurnRefused as error:
            self._answer, self.refusal = None, error
            raise
        if self._answer is not answer:
            raise EpisodeError(_ENDED)  # While it was saved.
        self._answer = self.refusal = None
        self._context = np.concatenate((ids, output.token_ids))
        return output

    async def saved(self) -> None:
        """Wait until the store, if there is one, has the rollout as it is now, so that it survives
        the end of the process. A program that lives elsewhere may then act on it."""
        if self._saved is not None:
            await self._saved()

    async def partial(self) -> TurnOutput:
        """Wait until a cancelled :meth:`generate` has ended, and return the tokens that arrived.

        These tokens become part of the rollout, with their logprobs and versions. The next context
        must start with the context of the cancelled call and these tokens. If no token arrived, the
        cancelled call has no effect, and the next context continues the previous turn.

        A request that waits inside a paused engine ends when the engine continues.

        Raises:
            EpisodeError: if no call was cancelled since the last turn, or the rollout has ended.
        """
        self._check_free()
        await self._returned()
        self._check_free()
        if self._back is None:
            raise EpisodeError(
                "no generate() call was cancelled since the last turn; call partial() only after "
                "one."
            )
        return self._keep(self._back)

    def _keep(self, back: asyncio.Future[TurnOutput]) -> TurnOutput:
        self._back = None
        output = back.result()
        if self._asked is not None and len(output.token_ids):
            self._tell(TurnKept(rollout_id=self.rollout_id))
            self._context = np.concatenate((self._asked, output.token_ids))
        return output

    def resolve(self, command: ResolveTurn) -> None:
        """Take the whole turn from the scheduler, or the tokens of a turn that was given up."""
        future = self._back if command.withdrawn else self._answer
        if command.refused:
            fail_future(future, TurnRefused(f"the engine refuses this request: {command.refused}"))
        elif future is not None and not future.done():
            future.set_result(
                TurnOutput(
                    token_ids=command.token_ids,
                    logprobs=command.logprobs,
                    versions=command.versions,
                    finish_reason=command.finish_reason,
                    companions=command.companions,
                )
            )

    async def settle(self) -> None:
        """End the turns of an episode that has returned.

        A call that a task of the episode still waits for is cancelled, because its tokens would not
        be used.
        """
        if self._answer is not None:
            answer = self._answer
            self._withdraw()
            fail_future(answer, EpisodeError(_ENDED))
        await self._returned()
        # An episode may give up every turn and then return, for example with the reward for a
        # response that took too long. Without these tokens its rollout would have none, and its
        # group would fail.
        if self._context is None and self._back is not None and not self._ended:
            self._keep(self._back)

    def end(self) -> None:
        """Fail all open calls, because the rollout has ended or its group was dropped."""
        self._ended = True
        fail_future(self._answer, EpisodeError(_ENDED))
        fail_future(self._back, EpisodeError(_ENDED))
        self._answer = None

    def _withdraw(self) -> None:
        answer, self._answer = self._answer, None
        if answer is None:
            return
        self._back = answer.get_loop().create_future()
        self._tell(TurnWithdrawn(rollout_id=self.rollout_id))

    async def _returned(self) -> None:
        """Wait until a request that was given up has ended. Cancelling this wait is harmless."""
        if self._back is not None and not self._back.done():
            await asyncio.wait([self._back])

    def _check_free(self) -> None:
        if self._ended:
            raise EpisodeError(_ENDED)
        if self._answer is not None:
            raise EpisodeError("a turn is being generated already; await it first.")


@runtime_checkable
class FollowsRun(Protocol):
    """An episode function that follows its scheduler."""

    def run_opened(self, rollouts: Collection[int]) -> None:
        """Note that the scheduler is open and will call it for these rollouts, resumed ones
        included."""
        ...

    def run_closed(self, *, goes_on: bool) -> None:
        """Note that the scheduler closes, and whether another one may continue its rollouts."""
        ...


class Episode(Protocol):
    """Coroutine function that drives one rollout of several turns; it may return the reward, or
    a :class:`~aprilsched.types.Score`."""

    def __call__(self, turn: Turn, prompt: Prompt, /) -> Awaitable[float | Score | None]: ...
