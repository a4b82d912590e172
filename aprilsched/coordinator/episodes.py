"""Episodes: rollouts of several turns, driven by a coroutine of the caller's.

An interrupted request resumes inside the same ``await turn.generate(...)``; the episode sees
nothing of pauses, aborts, refits and failovers.

An ``await turn.generate(...)`` that is cancelled (a timeout around it) calls its request back. What
had come of it is given by ``await turn.partial()``, and then belongs to the rollout; without that
call it is dropped, and counted in the ledger. A rollout of which there is nothing else keeps it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from aprilsched.core.messages.commands import ResolveTurn
from aprilsched.core.messages.events import TurnKept, TurnRequested, TurnWithdrawn
from aprilsched.errors import EpisodeError
from aprilsched.sampling import check_sampling
from aprilsched.types import (
    FinishReason,
    Float32Array,
    Int32Array,
    Prompt,
    SamplingParams,
    token_array,
)

__all__ = ["Episode", "Turn", "TurnOutput"]

_ENDED = "the rollout of this turn has ended; nothing can be generated for it any more."


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TurnOutput:
    """What one turn generated: int32 [n], float32 [n], int32 [n].

    `finish_reason` is "length" where the turn was cut short.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    finish_reason: FinishReason


class Turn:
    """What an episode generates with. One for each rollout.

    Attributes:
        index: the rollout's place in its group, 0 to group_size - 1.
    """

    def __init__(
        self,
        rollout_id: int,
        index: int,
        tell: Callable[[TurnRequested | TurnWithdrawn | TurnKept], None],
    ) -> None:
        self.index = index
        self._rollout_id = rollout_id
        self._tell = tell
        self._context: Int32Array | None = None
        self._asked: Int32Array | None = None
        """The context of the latest call."""
        self._answer: asyncio.Future[TurnOutput] | None = None
        """Of the open call."""
        self._back: asyncio.Future[TurnOutput] | None = None
        """What came of the cancelled call, of which the episode has not asked."""
        self._ended = False

    async def generate(
        self, input_ids: Sequence[int] | Int32Array, sampling: SamplingParams | None = None
    ) -> TurnOutput:
        """Generate one turn after the context `input_ids`, [n].

        From the second turn on, `input_ids` must begin with the whole context and output of the
        turn before; what follows is recorded as tokens of the environment, with loss mask 0.

        Cancelling this call (with ``asyncio.timeout``, say) gives the turn up: see
        :meth:`partial`. The next call waits until the request is back.

        Raises:
            ConfigError: if `input_ids` or `sampling` cannot be used.
            EpisodeError: if the context was rewritten, if a turn is being generated already, or if
                the rollout has ended.
        """
        ids = token_array(input_ids, "input_ids of the turn")
        if sampling is not None:
            check_sampling(sampling)
        self._check_free()
        await self._returned()
        self._check_free()
        self._back = None
        before = self._context
        if before is not None and not np.array_equal(ids[: len(before)], before):
            raise EpisodeError(
                "input_ids of the turn do not begin with the context and output of the turn "
                "before; append to them, so that the rollout stays one token sequence."
            )
        self._asked = ids
        self._answer = answer = asyncio.get_running_loop().create_future()
        self._tell(TurnRequested(rollout_id=self._rollout_id, input_ids=ids, sampling=sampling))
        try:
            output = await answer
        except (asyncio.CancelledError, GeneratorExit):
            if self._answer is answer:
                self._withdraw()
            raise
        self._answer = None
        self._context = np.concatenate((ids, output.token_ids))
        return output

    async def partial(self) -> TurnOutput:
        """What had come of the turn whose :meth:`generate` was cancelled, once its request is back.

        These tokens are the rollout's from now on, with their logprobs and versions, and the next
        context has to begin with the one that was asked for and them. If no token had come, the
        turn counts for nothing, and the next context is that of a turn never asked for.

        A request that waits inside a paused engine comes back when the engine continues.

        Raises:
            EpisodeError: if no call was cancelled since the last turn, or the rollout has ended.
        """
        self._check_free()
        await self._returned()
        self._check_free()
        if self._back is None:
            raise EpisodeError("no turn was given up since the last one; nothing is left of it.")
        return self._keep(self._back)

    def _keep(self, back: asyncio.Future[TurnOutput]) -> TurnOutput:
        self._back = None
        output = back.result()
        if self._asked is not None and len(output.token_ids):
            self._tell(TurnKept(rollout_id=self._rollout_id))
            self._context = np.concatenate((self._asked, output.token_ids))
        return output

    def resolve(self, command: ResolveTurn) -> None:
        """The scheduler has the whole turn, or what came of one that was given up."""
        future = self._back if command.withdrawn else self._answer
        if future is not None and not future.done():
            future.set_result(
                TurnOutput(
                    token_ids=command.token_ids,
                    logprobs=command.logprobs,
                    versions=command.versions,
                    finish_reason=command.finish_reason,
                )
            )

    async def settle(self) -> None:
        """The episode has returned: a call that a task of it still waits for is given up, so that
        nothing is generated for nobody."""
        if self._answer is not None:
            answer = self._answer
            self._withdraw()
            _fail(answer, _ENDED)
        await self._returned()
        # An episode that gives every turn up and returns, with the reward of a response that took
        # too long perhaps, would otherwise be one without a token, which fails its group.
        if self._context is None and self._back is not None and not self._ended:
            self._keep(self._back)

    def end(self) -> None:
        """The rollout has ended, or its group was dropped: nothing will come any more."""
        self._ended = True
        _fail(self._answer, _ENDED)
        _fail(self._back, _ENDED)
        self._answer = None

    def _withdraw(self) -> None:
        answer, self._answer = self._answer, None
        if answer is None:
            return
        self._back = answer.get_loop().create_future()
        self._tell(TurnWithdrawn(rollout_id=self._rollout_id))

    async def _returned(self) -> None:
        """A request that was given up is back. To cancel this wait changes nothing."""
        if self._back is not None and not self._back.done():
            await asyncio.wait([self._back])

    def _check_free(self) -> None:
        if self._ended:
            raise EpisodeError(_ENDED)
        if self._answer is not None:
            raise EpisodeError("a turn is being generated already; await it first.")


class Episode(Protocol):
    """Drives one rollout of several turns; may return the rollout's reward."""

    def __call__(self, turn: Turn, prompt: Prompt, /) -> Awaitable[float | None]: ...


def _fail(future: asyncio.Future[TurnOutput] | None, why: str) -> None:
    if future is not None and not future.done():
        future.set_exception(EpisodeError(why))
        # Perhaps nobody waits for it.
        future.exception()
