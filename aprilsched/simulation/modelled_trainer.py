"""The modelled trainer, and the costs of everything but decoding and prefill in a simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.values.bounds import NOT_NEGATIVE, check_settings
from aprilsched.simulation.agenda import Agenda
from aprilsched.types import Batch


class ModelledTrainer:
    """Takes `batches` batches, with a new version after every `update_every` (0: no versions).

    With `streamed` it takes each batch by its units, which are groups or single samples, and trains
    on each for `train_seconds` / `batch_units` before it asks for the next one. Otherwise it starts
    when it has the whole batch.
    """

    def __init__(
        self,
        agenda: Agenda,
        feed: Callable[[ev.Event], None],
        *,
        batches: int,
        update_every: int,
        train_seconds: float,
        batch_units: int,
        streamed: bool,
    ) -> None:
        self.done = False
        self.batches = 0
        self._agenda = agenda
        self._feed = feed
        self._wanted = batches
        self._update_every = update_every
        self._unit_seconds = train_seconds / batch_units
        self._streamed = streamed
        self._asks = False
        self._offered: Batch | None = None
        """Batch that it may take once it has trained on the current units; None without one."""
        self._seconds = train_seconds
        """Seconds for which it trains on the units that it took last."""
        self._version = 0

    def start(self) -> None:
        """Request a batch, or the next group of one."""
        self._asks = True
        self._feed(ev.BatchRequested(streamed=self._streamed))
        self._take()

    def take(self, command: do.Offer) -> None:
        """Take a batch, or the next part of a streamed one, as soon as it asks for it."""
        self._offered = command.offered
        self._take()

    def withdraw(self, _: do.WithdrawOffer) -> None:
        self._offered = None

    def _take(self) -> None:
        offered = self._offered
        if offered is None or not self._asks:
            return
        self._asks, self._offered = False, None
        if self._streamed:
            self._seconds = self._unit_seconds * len(offered.units)
        if not offered.complete:
            self._agenda.after(self._seconds, self.start)
        self._feed(ev.BatchTaken(index=offered.index))

    def deliver(self, _: do.Deliver) -> None:
        self.batches += 1
        self._agenda.after(self._seconds, self._trained)

    def end(self, _: do.EndOfPrompts) -> None:
        self.done = True

    def finish_update(self, _: facts.UpdateFinished) -> None:
        # It waits for the agenda, because a trainer's next call is not part of the update's end.
        self._agenda.after(0.0, self._next)

    def _trained(self) -> None:
        if self._update_every and self.batches % self._update_every == 0:
            self._version += 1
            self._feed(ev.UpdateRequested(version=self._version, republishable=True))
        else:
            self._next()

    def _next(self) -> None:
        if self.batches >= self._wanted:
            self.done = True
        else:
            self.start()


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Durations of everything except decoding and prefill.

    Attributes:
        pause_seconds: duration of a pause beyond the step in progress (SGLang, measured: 2 to
            22 ms with that step).
        refit_seconds: duration of bringing one version into the engines, which load it together;
            with rolling refits, of bringing it into one engine.
        train_seconds: duration of training, between a batch and the update that follows it.
        reward_seconds: duration of scoring one rollout; with 0 rewards are not used.

    Raises:
        ConfigError: if one is negative, or no number.
    """

    pause_seconds: Annotated[float, NOT_NEGATIVE] = 2e-3
    refit_seconds: Annotated[float, NOT_NEGATIVE] = 0.0
    train_seconds: Annotated[float, NOT_NEGATIVE] = 0.0
    reward_seconds: Annotated[float, NOT_NEGATIVE] = 0.0

    def __post_init__(self) -> None:
        check_settings(self)
