"""The trainer's protocol: the calls that a trainer, or a front for one, may make to a scheduler.

:class:`AsyncScheduler` is implemented by the asyncio scheduler and by the trainer's side of a
scheduler in another process or actor. The blocking forms need nothing beyond it.

Invariant: a batch counts as delivered when :meth:`AsyncScheduler.take` is called. Until then it
stays offered, however often the wait for it is cancelled or times out.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

from aprilsched.errors import PromptsExhausted
from aprilsched.kernel.shell.refits import RefitReport
from aprilsched.kernel.weights.publisher import WeightPublisher
from aprilsched.observe.figures.run_figures import AlignmentFigures
from aprilsched.types import Batch, Prompt


class AsyncScheduler(ABC):
    """The methods that every asyncio scheduler has for a trainer. Use it as
    ``async with ... as rollouts``; in the block ``async for batch in rollouts`` yields batches
    until the prompts end."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The trainer's policy version."""

    # --- batches -------------------------------------------------------------------------------

    async def next_batch(self) -> Batch:
        """Wait for the next batch.

        A call that timed out or was cancelled does not end the current batch: the engines generate
        for it as before, and the next call continues it. A batch is taken when the call returns;
        until then it stays available for the next call. A timeout around the call may be
        arbitrarily short, even shorter than the store needs to save a batch. If a batch is not
        taken before the next update, a new batch is chosen after the update.

        Raises:
            PromptsExhausted: when the prompts have ended and everything was delivered, but for
                groups that failed.
            FleetLost: when no engine is left and none returns within
                `health.fleet_wait_s`.
            RefitError: when the remaining engines do not have the fleet's weights; an update
                repairs this.
            RunGivenUp: when `retries.failed_groups` groups or single samples in a row failed or
                `retries.rejected_groups` were refused by `accept`, and when the prompts
                have ended and no group was delivered, or more than `retries.failed_share` failed.
            SchedulerClosed: outside of the ``async with`` block.
        """
        batch = await self.offered()
        self.take()
        return batch

    async def stream(self) -> AsyncGenerator[Batch, None]:
        """Yield the groups (or samples) of the next batch, each as soon as it is accepted.

        The trainer can compute the loss and the gradient of early groups while the last responses
        of the batch are generated. Each item is a :class:`~aprilsched.Batch` with one group, or
        with one sample if samples are delivered, and ``complete`` is True for the last one::

            async for group in rollouts.stream():
                tensors = group.to_torch(packed=True)
                await asyncio.to_thread(accumulate_gradient, tensors)
            optimizer.step()
            await rollouts.update_weights(publisher)

        Generation runs and stops as with :meth:`next_batch`. The groups are one batch: it is
        delivered when its last group was taken. A resumed run repeats, from its first group, a
        batch that was not delivered or not acknowledged. A loop that timed out or was left does
        not end the batch: the engines generate for it as before, and another call continues with
        the remaining groups. An update, and :meth:`next_batch`, end the batch with the groups
        taken so far. If a resumed run repeats the batch, the groups that were not taken then come
        next.

        The coroutine must return to the event loop between the groups, so train in a thread or
        another process, or use :meth:`aprilsched.fronts.blocking.RolloutScheduler.stream`.

        Raises:
            PromptsExhausted: when the prompts have ended and everything was delivered.
            Exception: every other error of :meth:`next_batch`.
        """
        while True:
            part = await self.offered(streamed=True)
            self.take()
            # A batch may end with groups that were dropped.
            if part.units:
                yield part
            if part.complete:
                return

    @abstractmethod
    async def offered(self, within: float | None = None, *, streamed: bool = False) -> Batch:
        """Wait until a batch may be taken, and return it without taking it.

        With `streamed`, wait for the next part of a batch instead. The result is in transit to
        another thread or process until :meth:`take` confirms that it has arrived, or
        :meth:`hand_back` that it has not. An update waits for that.

        Args:
            within: longest wait, in seconds; None waits without a limit.

        Raises:
            TimeoutError: if none is complete by then. The next call continues the wait.
            Exception: every other error of :meth:`next_batch`.
        """

    @abstractmethod
    def take(self) -> None:
        """Say that what :meth:`offered` returned has arrived: the trainer has it."""

    @abstractmethod
    def hand_back(self) -> None:
        """Say that it has not arrived: it is offered as before."""

    # --- everything else -----------------------------------------------------------------------

    @abstractmethod
    async def evaluate(self, prompts: Iterable[Prompt], *, group_size: int = 1) -> Batch:
        """Generate all responses to `prompts` under one version, without over-provisioning and
        carry."""

    @abstractmethod
    async def report_logprobs(self, batch: Batch, logprobs: object) -> AlignmentFigures:
        """Compare the trainer's log-probabilities of a batch with those of the engines."""

    @abstractmethod
    async def update_weights(
        self,
        publisher: WeightPublisher,
        *,
        version: int | None = None,
        acknowledge: bool = True,
    ) -> RefitReport:
        """Bring the trainer's new weights into every engine."""

    @abstractmethod
    def paused_for_weights(
        self, *, version: int | None = None, label: bool = False, acknowledge: bool = True
    ) -> AbstractAsyncContextManager[tuple[str, ...]]:
        """Pause the engines while the trainer loads new weights with its own calls."""

    @abstractmethod
    def asleep(
        self, *, tags: Sequence[str] = ("kv_cache", "weights")
    ) -> AbstractAsyncContextManager[None]:
        """Release the engines' GPU memory for a trainer on the same GPUs."""

    @abstractmethod
    async def checkpoint(self, path: Path | str, *, acknowledge: bool = True) -> None:
        """Write the scheduler's state to a file, for the trainer's own checkpoint."""

    @abstractmethod
    def restore(self, path: Path | str) -> None:
        """Start from the state of a checkpoint. Call it before the ``async with`` block."""

    # --- lifetime ------------------------------------------------------------------------------

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def close(self) -> None:
        """Stop in any state, which the end of the block does."""

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        try:
            return await self.next_batch()
        except PromptsExhausted:
            raise StopAsyncIteration from None


async def waited(offer: Awaitable[Batch], within: float | None) -> Batch:
    """Wait for an offer, for at most `within` seconds.

    Raises:
        TimeoutError: if there is none by then.
    """
    limit = asyncio.timeout(within)
    try:
        async with limit:
            return await offer
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimeoutError(
            f"no batch was complete within {within} s; the next call continues the wait."
        ) from None
