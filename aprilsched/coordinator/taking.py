"""What every asyncio scheduler is to a trainer: a context manager, and an iterator of batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from aprilsched.errors import PromptsExhausted
from aprilsched.types import Batch

__all__ = ["TakesBatches"]


class TakesBatches(ABC):
    """``async for batch in rollouts`` until the prompts end, and the end of ``async with``."""

    @abstractmethod
    async def next_batch(self) -> Batch:
        """Wait for the next batch.

        Raises:
            PromptsExhausted: when the prompts have ended and everything was delivered.
        """

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
