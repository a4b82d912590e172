"""What every asyncio scheduler is to a trainer: a context manager, an iterator of batches, and a
stream of groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

from aprilsched.errors import PromptsExhausted
from aprilsched.types import Batch


class TakesBatches(ABC):
    """``async for batch in rollouts`` until the prompts end, and the end of ``async with``."""

    @abstractmethod
    async def next_batch(self) -> Batch:
        """Wait for the next batch.

        A call that timed out or was cancelled has not ended the batch in work: the engines generate
        for it as before, and the next call goes on with it.

        Raises:
            PromptsExhausted: when the prompts have ended and everything was delivered, but for
                groups that failed.
        """

    async def stream(self) -> AsyncGenerator[Batch, None]:
        """The groups of the next batch, each as soon as it is scored and accepted.

        The trainer can compute the loss and the gradient of early groups while the last responses
        of the batch are generated. Each item is a :class:`~aprilsched.Batch` with one group, and
        ``complete`` is True for the last one::

            async for group in rollouts.stream():
                tensors = group.to_torch(packed=True)
                await asyncio.to_thread(accumulate_gradient, tensors)
            optimizer.step()
            await rollouts.update_weights(publisher)

        What is generated, and when it stops, is the same as with :meth:`next_batch`. The groups
        are one batch: it is delivered when its last group was taken, and a resumed run gives a
        batch that was not delivered or not acknowledged again from its first group. A loop
        that timed out or was left has not ended the batch: the engines generate for it as before,
        and another call goes on with the groups that are left. An update, and :meth:`next_batch`,
        end the batch with the groups that were taken before. Of a batch that a resumed run gives
        again, both leave the groups that were not taken: they come next.

        The coroutine must return to the event loop between the groups, so train in a thread or
        another process, or use :meth:`aprilsched.blocking.RolloutScheduler.stream`.

        Raises:
            PromptsExhausted: when the prompts have ended and everything was delivered.
            Exception: every other error of :meth:`next_batch`.
        """
        while True:
            part = await self._offered(streamed=True)
            self._take()
            # A batch may end with groups that were dropped.
            if part.groups:
                yield part
            if part.complete:
                return

    @abstractmethod
    async def _offered(self, *, streamed: bool = False) -> Batch:
        """Wait until a batch, or with `streamed` the next part of one, may be taken; returns it
        without taking it."""

    @abstractmethod
    def _take(self) -> object:
        """Take for the trainer what is offered."""

    @abstractmethod
    async def close(self) -> None:
        """What the end of the block does."""

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
