"""Everything that summary.json says, gathered while a run goes on.

Invariant: `lost` and `duplicated` are computed from the ids of rollouts that were sent, delivered
and dropped, so that they would show an error in the scheduler's own counters.

A second Opened is that of a process that goes on with the run: what was in flight and is not
launched as restored then never was, so far as ids go (it may have another one soon); pauses and
updates under way have ended.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from aprilsched.core.lengths.groups import GroupLengths
from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev
from aprilsched.core.state.ledger import Counters, Ledger
from aprilsched.telemetry import batch_figures as of
from aprilsched.telemetry.batch_figures import Bound, Measured
from aprilsched.telemetry.batch_meter import BatchMeter
from aprilsched.telemetry.bias import BiasCollector
from aprilsched.telemetry.dispatching import DispatchingListener
from aprilsched.telemetry.figures import (
    RolloutFigures,
    RunSummary,
    SecondsFigures,
    TokenFigures,
)
from aprilsched.telemetry.stopwatch import Stopwatch
from aprilsched.types import Batch

__all__ = ["Remainder", "Summary", "default_burn_in"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Remainder:
    """What only the scheduler itself can say at the end."""

    in_flight: Collection[int]
    """Ids of the rollouts that it still holds."""
    counters: Counters
    ledger: Ledger
    open_groups: Sequence[GroupLengths] = ()
    """Training groups that it holds, with the lengths of their rollouts so far."""


def default_burn_in(batches: int) -> int:
    """Batches left out of the steady state: a quarter, at least the first."""
    return max(1, batches // 4)


class Summary(DispatchingListener):
    """Listens to a run and sums it up.

    Args:
        trainer_waits: the engines stand still while the trainer trains (synchronous pace), so its
            time is not the schedule's.
        bound: T_bound of a batch; None where no step-time model is known.
        workload_mean: the mean response length, where it is known beforehand.
        burn_in: batches left out of the steady state; :func:`default_burn_in` unless given.

    Attributes:
        ledger: the scheduler's own, to look at what it drops while the run goes on: it keeps its
            latest entries only.
        warns: say so to the logger "aprilsched", once, when drops censor lengths.
    """

    def __init__(
        self,
        *,
        trainer_waits: bool,
        bound: Bound | None = None,
        workload_mean: float | None = None,
        burn_in: int | None = None,
    ) -> None:
        super().__init__()
        self.meter = BatchMeter(trainer_waits=trainer_waits, bound=bound)
        """For other listeners too, that come after this one."""
        self._workload_mean = workload_mean
        self._burn_in = burn_in
        self.batches: list[Measured] = []
        self._engines = 0
        self._began: float | None = None
        self._pauses = Stopwatch()
        self._updates = Stopwatch()
        self._sent: set[int] = set()
        self._delivered: set[int] = set()
        self._dropped: set[int] = set()
        self._duplicated: set[int] = set()
        self._evaluated = 0
        self._evaluating: set[int] = set()
        """Rollouts of evaluations under way: they end with their process."""
        self._resumed = False
        self._reissued = 0
        """Evaluated rollouts whose ids a resumed scheduler gave again."""
        self.ledger: Ledger | None = None
        self.warns = True
        self._bias = BiasCollector()
        self._handlers = {
            ev.Opened: self._opened,
            ev.BatchRequested: self._measure,
            ev.UpdateRequested: self._update_requested,
            ev.Continued: self._continued,
            ev.Finished: self._bias.endings.request_finished,
            ev.EpisodeFinished: self._bias.endings.episode_finished,
            do.Launch: self._launch,
            do.Send: self._send,
            do.StartEpisode: self._start_episode,
            do.CancelWork: self._cancel_work,
            do.Pause: self._pause,
            do.LoseEngine: self._continued,
            do.FinishUpdate: self._finish_update,
            do.Deliver: self._deliver,
            do.Redeliver: self._redeliver,
            do.DeliverEvaluation: self._deliver_evaluation,
        }

    # --- the result ----------------------------------------------------------------------------

    def result(
        self,
        remainder: Remainder,
        *,
        clock: Literal["virtual", "wall"],
        interrupted: bool = False,
        error: str | None = None,
        event_log_error: str | None = None,
    ) -> RunSummary:
        """The run up to now."""
        batches = self.batches
        asked = self._burn_in
        burn_in = default_burn_in(len(batches)) if asked is None else asked
        return RunSummary(
            clock=clock,
            interrupted=interrupted,
            error=error,
            event_log_error=event_log_error,
            engines=self._engines,
            batches=len(batches),
            rollouts=self._rollouts(remainder),
            tokens=self._tokens(remainder.counters),
            seconds=self._seconds(),
            delivered_tokens_per_s=of.delivered_tokens_per_s(batches),
            efficiency=of.efficiency(batches) if batches else None,
            off_policy_token_share=of.off_policy_token_share(batches),
            staleness=of.staleness(batches),
            bias=self._bias.figures(
                of.bias(batches, burn_in, self._workload_mean),
                batches,
                remainder.open_groups,
                remainder.ledger,
            ),
            steady_state=of.steady_state(batches, burn_in),
            per_batch=[batch.figures for batch in batches],
        )

    def _rollouts(self, remainder: Remainder) -> RolloutFigures:
        held = set(remainder.in_flight)
        somewhere = held | self._delivered | self._dropped
        launched = len(self._sent | somewhere) + self._reissued
        if self._resumed:
            # What was dropped just before a process ended may be saved, and not in its log.
            launched += remainder.ledger.total - len(self._dropped)
        return RolloutFigures(
            launched=launched,
            delivered=len(self._delivered) + self._reissued,
            evaluated=self._evaluated,
            in_flight=len(held),
            lost=len(self._sent - somewhere),
            duplicated=len(self._duplicated),
            dropped={str(reason): n for reason, n in sorted(remainder.ledger.rollouts.items())},
        )

    def _tokens(self, counters: Counters) -> TokenFigures:
        return TokenFigures(
            generated=counters.tokens_generated,
            delivered=counters.tokens_delivered,
            reprefilled=counters.tokens_reprefilled,
            discarded=counters.tokens_discarded,
            masked=sum(batch.masked for batch in self.batches),
        )

    def _seconds(self) -> SecondsFigures:
        return SecondsFigures(
            wall=self._now - (self._now if self._began is None else self._began),
            trainer=self.meter.trainer_seconds,
            pause=self._pauses.total(self._now) / max(1, self._engines),
            update=self._updates.total(self._now),
        )

    # --- rollouts ------------------------------------------------------------------------------

    def _launch(self, command: do.Launch) -> None:
        ids = command.rollout_ids
        # What a resumed scheduler had not saved is undone, and its ids may be another's.
        self._dropped.difference_update(ids)
        if command.evaluation_id is not None:
            self._evaluating.update(ids)
        if command.restored is not None:
            self._sent.update(ids)
            self._bias.endings.restored(command, command.restored)
        elif not self._delivered.isdisjoint(ids):
            self._reissued += len(self._delivered.intersection(ids))
            self._delivered.difference_update(ids)

    def _send(self, command: do.Send) -> None:
        self._sent.add(command.rollout_id)
        self._bias.endings.sent(command)

    def _start_episode(self, command: do.StartEpisode) -> None:
        self._sent.add(command.rollout_id)
        self._bias.endings.episode_started(command)

    def _cancel_work(self, command: do.CancelWork) -> None:
        self._dropped.update(command.rollout_ids)
        self._evaluating.difference_update(command.rollout_ids)
        if self.ledger is not None:
            self._bias.drop(self.ledger, warn=self.warns)

    def _deliver(self, command: do.Deliver) -> None:
        self._arrive(command.batch)
        measured = self.meter.deliver(command.batch, self._now)
        self.batches.append(measured)
        self._bias.deliver(command.batch, measured)

    def _redeliver(self, command: do.Redeliver) -> None:
        """The trainer has a batch again that counts already."""
        if any(rollout.rollout_id in self._delivered for rollout in command.batch.rollouts):
            self._measure(command)
        else:  # its process ended before it could write that down
            self._deliver(do.Deliver(batch=command.batch))

    def _deliver_evaluation(self, command: do.DeliverEvaluation) -> None:
        self._evaluated += sum(1 for _ in command.batch.rollouts)
        self._bias.endings.left(rollout.rollout_id for rollout in command.batch.rollouts)
        self._evaluating.difference_update(r.rollout_id for r in command.batch.rollouts)
        self._arrive(command.batch)

    def _arrive(self, batch: Batch) -> None:
        for rollout in batch.rollouts:
            if rollout.rollout_id in self._delivered:
                self._duplicated.add(rollout.rollout_id)
            self._delivered.add(rollout.rollout_id)

    # --- time ----------------------------------------------------------------------------------

    def _opened(self, event: ev.Opened) -> None:
        if self._began is None:
            self._began = self._now
        else:
            self._restart()
        self._measure(event)
        self._engines = len(event.engines)

    def _restart(self) -> None:
        self._resumed = True
        self._pauses.stop_all(self._now)
        self._updates.stop_all(self._now)
        self._dropped.update(self._evaluating)
        self._evaluating.clear()
        gone = self._delivered | self._dropped
        self._sent &= gone
        self._bias.restart(gone)

    def _measure(self, what: ev.Event | do.Command) -> None:
        self.meter.hear(what, self._now)

    def _update_requested(self, event: ev.UpdateRequested) -> None:
        self._updates.start("update", self._now)
        self._measure(event)

    def _finish_update(self, command: do.FinishUpdate) -> None:
        self._updates.stop("update", self._now)
        self._measure(command)

    def _pause(self, command: do.Pause) -> None:
        self._pauses.start(command.engine, self._now)

    def _continued(self, event: ev.Continued | do.LoseEngine) -> None:
        self._pauses.stop(event.engine, self._now)
