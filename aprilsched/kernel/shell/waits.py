"""Holds the futures that the trainer's calls wait for: a batch, an update, a sleep, evaluations.

A batch is only offered here. The trainer's call takes it when the call continues. So a call that
is cancelled at any moment has taken nothing, and the batch stays available for the next call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from aprilsched.errors import ConfigError
from aprilsched.kernel.core.messages.commands import DeliverEvaluation
from aprilsched.kernel.core.messages.facts import SleepBegun, SleepEnded, UpdateFinished
from aprilsched.types import Batch


class Waits:
    """Futures of the trainer's open calls."""

    def __init__(self) -> None:
        self.offer: Batch | None = None
        """The batch that may be taken; None if there is none. If there is a store, it has saved
        this batch."""
        self._handing: asyncio.Future[None] | None = None
        """Done once the trainer has taken or refused the offer; None while no offer is in transit.
        """
        self._batch: asyncio.Future[None] | None = None
        self.update: asyncio.Future[UpdateFinished] | None = None
        """The wait for the latest update, even if its caller was cancelled."""
        self._evaluations: dict[int, asyncio.Future[Batch]] = {}
        self._sleep: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None

    # --- an offer on its way -------------------------------------------------------------------

    def begin_hand_over(self) -> None:
        """Keep the offer until :meth:`end_hand_over`: it is in transit to a thread or process."""
        # It does not raise the failure of a session that ended just now: the trainer's call has the
        # batch already.
        self._handing = asyncio.get_running_loop().create_future()

    def end_hand_over(self) -> None:
        """The trainer has the offer, or does not get it. Calling it again does nothing."""
        handing, self._handing = self._handing, None
        if handing is not None and not handing.done():
            handing.set_result(None)

    async def until_handed_over(self) -> None:
        """Wait until no offer is on its way."""
        while self._handing is not None:
            await asyncio.shield(self._handing)
            self.raise_failure()

    # --- waiting -------------------------------------------------------------------------------

    @property
    def batch_requested(self) -> bool:
        return self._batch is not None and not self._batch.done()

    async def next_offer(
        self, request: Callable[[], None], gave_up: Callable[[BaseException], None]
    ) -> Batch:
        """Wait until a batch is offered.

        Only one call waits at a time: a second call could take the same offer and return the same
        batch.

        Args:
            request: asks for the batch.
            gave_up: called with the exception that ended the wait without a batch.

        Raises:
            ConfigError: if another call is waiting.
        """
        if self._batch is not None:
            raise ConfigError(
                "another next_batch() call is waiting already; await it before the next call."
            )
        self._batch = future = self._check().create_future()
        request()
        try:
            while self.offer is None:
                await future
                if self.offer is None:
                    # An update came between the offer and this line, so the offer was withdrawn.
                    self._batch = future = self._check().create_future()
        except BaseException as error:
            gave_up(error)
            raise
        finally:
            future.cancel()
            self._batch = None
        return self.offer

    def for_update(self) -> asyncio.Future[UpdateFinished]:
        self.update = self._check().create_future()
        return self.update

    def for_sleep(self) -> asyncio.Future[None]:
        """A future that is done when the engines are asleep, or are awake again."""
        self._sleep = self._check().create_future()
        return self._sleep

    def for_evaluation(self, evaluation_id: int) -> asyncio.Future[Batch]:
        future: asyncio.Future[Batch] = self._check().create_future()
        self._evaluations[evaluation_id] = future
        return future

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- commands ------------------------------------------------------------------------------

    def show(self, batch: Batch) -> None:
        """Offer a batch to the trainer."""
        self.offer = batch
        if self._batch is not None and not self._batch.done():
            self._batch.set_result(None)

    def withdraw(self, _: object) -> None:
        """Withdraw the offer of a batch."""
        self.offer = None

    def finish_update(self, command: UpdateFinished) -> None:
        if self.update is not None and not self.update.done():
            self.update.set_result(command)

    def finish_sleep(self, _: SleepBegun | SleepEnded) -> None:
        if self._sleep is not None and not self._sleep.done():
            self._sleep.set_result(None)

    def deliver_evaluation(self, command: DeliverEvaluation) -> None:
        future = self._evaluations.pop(command.evaluation_id, None)
        if future is not None and not future.done():
            future.set_result(command.batch)

    def forget_evaluation(self, evaluation_id: int) -> None:
        """Drop the future of an evaluation whose caller was cancelled."""
        self._evaluations.pop(evaluation_id, None)

    def refuse(self, error: BaseException, *, batch: bool, evaluations: Iterable[int]) -> None:
        """Raise `error` in the calls that wait for these; later calls work again."""
        futures = [self._evaluations.pop(evaluation, None) for evaluation in evaluations]
        for future in (self._batch if batch else None, *futures):
            fail_future(future, error)

    def fail(self, error: BaseException) -> None:
        """Raise `error` in every call that waits now or later, because the session has ended."""
        self._failure = self._failure or error
        for future in (self._batch, self.update, self._sleep, *self._evaluations.values()):
            fail_future(future, error)
        self.end_hand_over()

    def _check(self) -> asyncio.AbstractEventLoop:
        self.raise_failure()
        return asyncio.get_running_loop()


def fail_future(future: asyncio.Future[Any] | None, error: BaseException) -> None:
    """Let what waits for the future end with the error, if it still waits."""
    if future is not None and not future.done():
        future.set_exception(error)
        # Marks the error as retrieved, because a cancelled waiter does not look at it.
        future.exception()
