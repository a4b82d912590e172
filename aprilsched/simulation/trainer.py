"""The modelled trainer, and the costs of everything but decoding and prefill in a simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aprilsched.core.messages.commands import (
    Deliver,
    EndOfPrompts,
    FinishUpdate,
    Offer,
    WithdrawOffer,
)
from aprilsched.core.messages.events import BatchRequested, BatchTaken, Event, UpdateRequested
from aprilsched.errors import ConfigError
from aprilsched.simulation.agenda import Agenda
from aprilsched.types import Batch

__all__ = ["Costs", "ModelledTrainer"]


class ModelledTrainer:
    """Takes `batches` batches, with a new version after every `update_every` (0: no versions).

    With `streamed` it takes each batch group by group, and trains on each group for an equal part
    of `train_seconds` before it asks for the next one. Otherwise it begins when it has the whole
    batch.
    """

    def __init__(
        self,
        agenda: Agenda,
        feed: Callable[[Event], None],
        *,
        batches: int,
        update_every: int,
        train_seconds: float,
        batch_groups: int,
        streamed: bool,
    ) -> None:
        self.done = False
        self.batches = 0
        self._agenda = agenda
        self._feed = feed
        self._wanted = batches
        self._update_every = update_every
        self._group_seconds = train_seconds / batch_groups
        self._streamed = streamed
        self._asks = False
        self._offered: Batch | None = None
        """What it may take, and has not taken yet because it trains on a group."""
        self._seconds = train_seconds
        """For how long it trains on what it has taken last."""
        self._version = 0

    def begin(self) -> None:
        """Ask for a batch, or for the next group of one."""
        self._asks = True
        self._feed(BatchRequested(streamed=self._streamed))
        self._take()

    def take(self, command: Offer) -> None:
        """Take a batch, or the next part of a streamed one, as soon as it asks for it."""
        self._offered = command.offered
        self._take()

    def withdraw(self, _: WithdrawOffer) -> None:
        self._offered = None

    def _take(self) -> None:
        offered = self._offered
        if offered is None or not self._asks:
            return
        self._asks, self._offered = False, None
        if self._streamed:
            self._seconds = self._group_seconds * len(offered.groups)
        if not offered.complete:
            self._agenda.after(self._seconds, self.begin)
        self._feed(BatchTaken(index=offered.index))

    def deliver(self, _: Deliver) -> None:
        self.batches += 1
        self._agenda.after(self._seconds, self._trained)

    def end(self, _: EndOfPrompts) -> None:
        self.done = True

    def finish_update(self, _: FinishUpdate) -> None:
        # It waits for the agenda, because a trainer's next call is not part of the update's end.
        self._agenda.after(0.0, self._next)

    def _trained(self) -> None:
        if self._update_every and self.batches % self._update_every == 0:
            self._version += 1
            self._feed(UpdateRequested(version=self._version, republishable=True))
        else:
            self._next()

    def _next(self) -> None:
        if self.batches >= self._wanted:
            self.done = True
        else:
            self.begin()


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Durations of what is not decoding or prefill.

    Attributes:
        pause_seconds: duration of a pause beyond the step in progress (SGLang, measured: 2 to
            22 ms with that step).
        refit_seconds: duration of bringing one version into the engines, which load it together;
            with rolling refits, of bringing it into one engine.
        train_seconds: duration of training, between a batch and the update that follows it.
        reward_seconds: duration of scoring one rollout; with 0 there is no reward at all.

    Raises:
        ConfigError: if one is negative.
    """

    pause_seconds: float = 2e-3
    refit_seconds: float = 0.0
    train_seconds: float = 0.0
    reward_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("pause_seconds", "refit_seconds", "train_seconds", "reward_seconds"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is a time; give 0 or more.")
