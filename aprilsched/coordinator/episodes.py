"""Episodes: rollouts of several turns, driven by a coroutine of the caller's.

An interrupted request resumes inside the same ``await turn.generate(...)``; the episode sees
nothing of pauses, aborts, refits and failovers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from aprilsched.core.commands import ResolveTurn
from aprilsched.core.events import TurnRequested
from aprilsched.errors import EpisodeError
from aprilsched.types import (
    FinishReason,
    Float32Array,
    Int32Array,
    SamplingParams,
    token_array,
)

__all__ = ["Turn", "TurnOutput"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TurnOutput:
    """What one turn generated: int32 [n], float32 [n], int32 [n]."""

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
        self, rollout_id: int, index: int, request: Callable[[TurnRequested], None]
    ) -> None:
        self.index = index
        self._rollout_id = rollout_id
        self._request = request
        self._context: Int32Array | None = None
        self._answer: asyncio.Future[TurnOutput] | None = None

    async def generate(
        self, input_ids: Sequence[int] | Int32Array, sampling: SamplingParams | None = None
    ) -> TurnOutput:
        """Generate one turn after the context `input_ids`, [n].

        From the second turn on, `input_ids` must begin with the whole context and output of the
        turn before; what follows is recorded as tokens of the environment, with loss mask 0.

        Raises:
            EpisodeError: if the context was rewritten, or a turn is already being generated.
        """
        ids = token_array(input_ids, "input_ids of the turn")
        if self._answer is not None:
            raise EpisodeError("a turn is being generated already; await it first.")
        before = self._context
        if before is not None and not np.array_equal(ids[: len(before)], before):
            raise EpisodeError(
                "input_ids of the turn do not begin with the context and output of the turn "
                "before; append to them, so that the rollout stays one token sequence."
            )
        self._answer = asyncio.get_running_loop().create_future()
        self._request(TurnRequested(rollout_id=self._rollout_id, input_ids=ids, sampling=sampling))
        try:
            output = await self._answer
        finally:
            self._answer = None
        self._context = np.concatenate((ids, output.token_ids))
        return output

    def resolve(self, command: ResolveTurn) -> None:
        """The scheduler has the whole turn."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(
                TurnOutput(
                    token_ids=command.token_ids,
                    logprobs=command.logprobs,
                    versions=command.versions,
                    finish_reason=command.finish_reason,
                )
            )
