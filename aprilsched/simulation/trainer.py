"""The modelled trainer: asks for a batch, trains on it, publishes a version, asks again."""

from __future__ import annotations

from collections.abc import Callable

from aprilsched.core.commands import Deliver, EndOfPrompts, FinishUpdate
from aprilsched.core.events import BatchRequested, Event, UpdateRequested
from aprilsched.simulation.agenda import Agenda

__all__ = ["ModelledTrainer"]


class ModelledTrainer:
    """Takes `batches` batches, with a new version after every `update_every` (0: never)."""

    def __init__(
        self,
        agenda: Agenda,
        feed: Callable[[Event], None],
        *,
        batches: int,
        update_every: int,
        train_seconds: float,
    ) -> None:
        self.done = False
        self.batches = 0
        self._agenda = agenda
        self._feed = feed
        self._wanted = batches
        self._update_every = update_every
        self._train_seconds = train_seconds
        self._version = 0

    def begin(self) -> None:
        self._feed(BatchRequested())

    def deliver(self, _: Deliver) -> None:
        self.batches += 1
        self._agenda.after(self._train_seconds, self._trained)

    def end(self, _: EndOfPrompts) -> None:
        self.done = True

    def finish_update(self, _: FinishUpdate) -> None:
        # On the agenda and not at once, as a trainer's next call is no part of the update's end.
        self._agenda.after(0.0, self._next)

    def _trained(self) -> None:
        if self._update_every and self.batches % self._update_every == 0:
            self._version += 1
            self._feed(UpdateRequested(version=self._version))
        else:
            self._next()

    def _next(self) -> None:
        if self.batches >= self._wanted:
            self.done = True
        else:
            self._feed(BatchRequested())
