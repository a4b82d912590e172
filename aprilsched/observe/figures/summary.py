"""Collects everything in summary.json during a run.

Invariant: `lost` and `duplicated` are computed from the ids of the rollouts that were sent,
delivered and dropped, so they would show an error of the scheduler's own counters.

A second RunOpened comes from a process that resumes the run. Rollouts in flight that are not
launched as restored afterwards are forgotten, because their ids may be reused. Open pauses and
updates have ended.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from aprilsched.kernel.core.lengths.observed import GroupLengths
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.messages.facts import BatchDelivered, Fact
from aprilsched.kernel.core.state.ledger import Counters, Ledger, Reason
from aprilsched.kernel.shell.listener import DispatchingListener
from aprilsched.observe.figures.alignment import AlignmentLedger
from aprilsched.observe.figures.batch_figures import BatchMeter, Bound
from aprilsched.observe.figures.bias_collector import BiasCollector
from aprilsched.observe.figures.figures import Measured, steady_state
from aprilsched.observe.figures.run_figures import (
    RolloutFigures,
    RunSummary,
    SecondsFigures,
    TokenFigures,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Remainder:
    """Figures that only the scheduler knows at the end of a run."""

    in_flight: Collection[int]
    """Ids of the rollouts that the scheduler still has in flight."""
    counters: Counters
    ledger: Ledger
    open_groups: Sequence[GroupLengths] = ()
    """The training groups in flight, with the lengths of their responses so far."""


def default_burn_in(batches: int) -> int:
    """Return the number of batches left out of the steady state: a quarter, at least one."""
    return max(1, batches // 4)


class Summary(DispatchingListener):
    """A listener that summarizes a run.

    Args:
        bound: T_bound of a batch; None without a step-time model.
        workload_mean: mean response length; None if unknown beforehand.
        burn_in: number of batches that are left out of the steady state; by default
            :func:`default_burn_in`.
    """

    def __init__(
        self,
        *,
        bound: Bound | None = None,
        workload_mean: float | None = None,
        burn_in: int | None = None,
    ) -> None:
        super().__init__()
        self.meter = BatchMeter(bound=bound)
        """The figures of each batch. Listeners after this one may use it too."""
        self._workload_mean = workload_mean
        self._burn_in = burn_in
        self.batches: list[Measured] = []
        self._engines = 0
        self._began: float | None = None
        self._pauses = _Stopwatch()
        self._updates = _Stopwatch()
        self._sent: set[int] = set()
        self._delivered: set[int] = set()
        self._dropped: set[int] = set()
        self._duplicated: set[int] = set()
        self._evaluated = 0
        self._evaluating: set[int] = set()
        """Ids of the rollouts of open evaluations, which end with their process."""
        self._resumed = False
        self._reissued = 0
        """Ids of evaluated rollouts that a resumed scheduler gave to other rollouts."""
        self._bias = BiasCollector()
        self._alignment = AlignmentLedger()
        self._handlers = {
            facts.RunOpened: self._opened,
            facts.UpdateBegun: self._update_begun,
            facts.UpdateFinished: self._update_finished,
            facts.GroupLaunched: self._launched,
            facts.MemberLaunched: self._launched_again,
            facts.EpisodeStarted: self._begin,
            facts.AttemptSent: self._begin,
            facts.RolloutFinished: self._finished,
            facts.GroupDropped: self._group_dropped,
            facts.PromptRefused: self._prompt_refused,
            facts.EngineModeChanged: self._mode_changed,
            facts.EngineLost: self._engine_lost,
            facts.BatchDelivered: self._batch_delivered,
            facts.EvaluationDelivered: self._evaluation_delivered,
            facts.LogprobsCompared: self._alignment.take,
        }

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        counted = [self._as_first(f) if type(f) is BatchDelivered else f for f in facts]
        self.meter.on_facts(counted, now)
        super().on_facts(counted, now)

    def _as_first(self, fact: BatchDelivered) -> BatchDelivered:
        """Return a repeated delivery as a first one if it is not counted yet: the process that
        first delivered it ended before it could log this."""
        if fact.again and self._delivered.isdisjoint(each.rollout_id for each in fact.rollouts):
            return msgspec.structs.replace(fact, again=False)
        return fact

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
        """Return the summary of the run up to now."""
        batches = self.batches
        asked = self._burn_in
        burn_in = default_burn_in(len(batches)) if asked is None else asked
        return RunSummary.over(
            batches,
            clock=clock,
            interrupted=interrupted,
            error=error,
            event_log_error=event_log_error,
            engines=self._engines,
            batches=len(batches),
            rollouts=self._rollouts(remainder),
            tokens=TokenFigures.of(remainder.counters),
            seconds=self._seconds(),
            bias=self._bias.figures(
                batches, burn_in, self._workload_mean, remainder.open_groups, remainder.ledger
            ),
            steady_state=steady_state(batches, burn_in),
            alignment=self._alignment.figures(),
            per_batch=[batch.figures for batch in batches],
        )

    @property
    def groups(self) -> int:
        """Number of groups in the batches so far."""
        return sum(batch.groups for batch in self.batches)

    @property
    def rollouts(self) -> int:
        """Number of rollouts in the batches so far."""
        return sum(len(batch.lengths) for batch in self.batches)

    def _rollouts(self, remainder: Remainder) -> RolloutFigures:
        held = set(remainder.in_flight)
        somewhere = held | self._delivered | self._dropped
        launched = len(self._sent | somewhere) + self._reissued
        if self._resumed:
            # Rollouts dropped just before a process ended may be in the store but not in its log.
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

    def _seconds(self) -> SecondsFigures:
        return SecondsFigures(
            wall=self._now - (self._now if self._began is None else self._began),
            trainer=self.meter.time.trainer_seconds,
            pause=self._pauses.total(self._now) / max(1, self._engines),
            update=self._updates.total(self._now),
        )

    # --- rollouts ------------------------------------------------------------------------------

    def _launched(self, fact: facts.GroupLaunched) -> None:
        ids = fact.rollout_ids
        # Forget rollouts that the prior run did not save, because their ids may be reused.
        if not self._dropped.isdisjoint(ids):
            self._dropped.difference_update(ids)
            self._bias.restore(ids)
        if fact.evaluation_id is not None:
            self._evaluating.update(ids)
        if fact.restored is not None:
            self._sent.update(ids)
            finished = zip(ids, fact.restored.finished, strict=True)
            self._bias.finished.update(rollout_id for rollout_id, ended in finished if ended)
            self._bias.newest = max(self._bias.newest, *ids)
        elif not self._delivered.isdisjoint(ids):
            self._reissued += len(self._delivered.intersection(ids))
            self._delivered.difference_update(ids)

    def _begin(self, fact: facts.AttemptSent | facts.EpisodeStarted) -> None:
        self._sent.add(fact.rollout_id)
        self._bias.newest = max(self._bias.newest, fact.rollout_id)

    def _launched_again(self, fact: facts.MemberLaunched) -> None:
        if fact.evaluation_id is not None:
            self._evaluating.add(fact.rollout_id)

    def _finished(self, fact: facts.RolloutFinished) -> None:
        self._bias.finished.add(fact.rollout_id)

    def _group_dropped(self, fact: facts.GroupDropped) -> None:
        self._drop(fact.group_id, fact.rollouts)

    def _prompt_refused(self, fact: facts.PromptRefused) -> None:
        refused = facts.DroppedRollout(
            rollout_id=fact.rollout_id, reason=Reason.BAD_PROMPT, tokens=0
        )
        self._drop(fact.group_id, (refused,))

    def _drop(self, group_id: int, rollouts: Sequence[facts.DroppedRollout]) -> None:
        ids = {each.rollout_id for each in rollouts}
        self._dropped |= ids
        if self._evaluating.isdisjoint(ids):
            self._bias.drop(rollouts)
        self._evaluating -= ids

    def _batch_delivered(self, fact: facts.BatchDelivered) -> None:
        if not fact.again:
            self._arrive(fact.rollouts)
            self.batches.append(self.meter.recent[-1])
            self._bias.deliver(fact.rollouts)

    def _evaluation_delivered(self, fact: facts.EvaluationDelivered) -> None:
        ids = {rollout.rollout_id for rollout in fact.rollouts}
        self._evaluated += len(fact.rollouts)
        self._bias.finished -= ids
        self._evaluating -= ids
        self._arrive(fact.rollouts)

    def _arrive(self, rollouts: Sequence[facts.DeliveredRollout]) -> None:
        for rollout in rollouts:
            if rollout.rollout_id in self._delivered:
                self._duplicated.add(rollout.rollout_id)
            self._delivered.add(rollout.rollout_id)

    # --- time ----------------------------------------------------------------------------------

    def _opened(self, fact: facts.RunOpened) -> None:
        if self._began is None:
            self._began = self._now
        else:
            self._restart()
        self._engines = len(fact.engines)

    def _restart(self) -> None:
        self._resumed = True
        self._pauses.stop_all(self._now)
        self._updates.stop_all(self._now)
        self._dropped.update(self._evaluating)
        self._evaluating.clear()
        gone = self._delivered | self._dropped
        self._sent &= gone
        self._bias.restart(gone)

    def _update_begun(self, fact: facts.UpdateBegun) -> None:
        self._updates.start("update", self._now)

    def _update_finished(self, fact: facts.UpdateFinished) -> None:
        self._updates.stop("update", self._now)

    def _mode_changed(self, fact: facts.EngineModeChanged) -> None:
        if fact.finish == "pausing":
            self._pauses.start(fact.engine, self._now)
        elif fact.start == "continuing":
            self._pauses.stop(fact.engine, self._now)

    def _engine_lost(self, fact: facts.EngineLost) -> None:
        self._pauses.stop(fact.engine, self._now)


class _Stopwatch:
    """Sums up the running time of each key.

    Starting a running key or stopping a stopped one has no effect, because an engine may be lost
    during a pause and confirm its continue afterwards.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._total = 0.0

    def start(self, key: str, now: float) -> None:
        self._since.setdefault(key, now)

    def stop(self, key: str, now: float) -> None:
        since = self._since.pop(key, None)
        if since is not None:
            self._total += now - since

    def stop_all(self, now: float) -> None:
        for key in list(self._since):
            self.stop(key, now)

    def total(self, now: float) -> float:
        """Return the total seconds of all keys, including running ones."""
        return self._total + sum(now - since for since in self._since.values())
