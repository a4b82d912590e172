"""Compares forecasts with the run, and reports the errors to the planner, for both shells.

- The work of a batch is what the engines generated in its time. The delivered tokens would depend
  on what is in flight at its start and its end. :mod:`aprilsched.planning.trial` counts in the same
  way.
- Tokens that were discarded because nothing may be stale do not count as work.
- Work is valued with the planner's current step-time model.
- A batch does not count if another schedule starts in it or in the batch before, or if engines come
  or go in it.
- If the trainer determines the length of a step, engines that fill up with work generate more than
  forecast, so only the time of such steps is compared. A trainer that consumes a surplus of work
  takes less time, so a shorter step counts only as far as the work has been done in it.
- A new choice knows more of the lengths than the previous one. It also forecasts the previous
  schedule with them, so errors that the lengths explain do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.kernel.core.policies.schedule import Forecast
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.shell.listener import TokenChunks
from aprilsched.observe.figures.batch_figures import BatchTime
from aprilsched.planning import Planner

_SETTLING = 2
"""Number of batches that do not count after another schedule starts."""


class ForecastErrors:
    """A listener that reports the errors of forecasts to the planner.

    Args:
        planner: its ``bias`` receives each batch.
        trainer_waits: as in :class:`~aprilsched.observe.figures.batch_figures.BatchTime`.
    """

    def __init__(self, planner: Planner, *, trainer_waits: bool) -> None:
        self._planner = planner
        self._time = BatchTime(trainer_waits=trainer_waits)
        self._engines: set[str] = set()
        self._context: dict[int, int] = {}
        """Number of context tokens of each open attempt, by request."""
        self._tokens = 0
        """Number of tokens generated since the last batch was requested, without discarded ones."""
        self._reads = 0.0
        """Number of context tokens read to generate these tokens."""
        self._dropped: tuple[int, tuple[of.DroppedRollout, ...]] | None = None
        """The group that was dropped last, and its rollouts."""
        self._forecast: Forecast | None = None
        self._delivered: tuple[Forecast, float] | None = None
        """The forecast of the delivered batch, with its rule, and the batch's seconds."""
        self._left_out = 0
        """Number of deliveries that do not count."""

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            self._time.hear(fact, now)
            match fact:
                case of.AttemptSent():
                    self._context[fact.request_id] = fact.tokens
                case of.TokensReceived():
                    self.on_tokens([(fact, now)], now)
                case of.AttemptEnded():
                    self._context.pop(fact.request_id, None)
                case of.GroupDropped():
                    self._dropped = fact.group_id, fact.rollouts
                case of.GroupLaunched(again=int(group_id)):
                    self._begin_again(group_id, fact.prompt_tokens)
                case of.ScheduleChanged():
                    self._change(fact)
                case of.BatchDelivered(again=False):
                    self._deliver()
                case of.BatchRequested():
                    self._compare()
                case of.RunOpened():
                    self._engines = {info.name for info in fact.engines}
                    self._context.clear()
                    self._leave_out(1)
                case of.EngineAdmitted() | of.EngineLost():
                    self._come_or_go(fact)
                case _:
                    pass

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        context = self._context
        for fact, _ in chunks:
            before, tokens = context.get(fact.request_id), fact.tokens
            if before is not None and fact.dropped != Reason.BEGUN_AGAIN:
                context[fact.request_id] = before + tokens
                self._tokens += tokens
                self._reads += tokens * (before + tokens / 2)

    def _begin_again(self, group_id: int, prompt_tokens: int) -> None:
        """Subtract the tokens of a group that was dropped to restart. Trials do the same."""
        if self._dropped is None or self._dropped[0] != group_id:
            return
        for rollout in self._dropped[1]:
            self._tokens -= rollout.tokens
            self._reads -= rollout.tokens * (prompt_tokens + rollout.tokens / 2)

    def _come_or_go(self, fact: of.EngineAdmitted | of.EngineLost) -> None:
        if isinstance(fact, of.EngineAdmitted):
            self._engines.add(fact.engine)
        else:
            self._engines.discard(fact.engine)
        self._leave_out(1)

    def _leave_out(self, batches: int) -> None:
        self._left_out = max(self._left_out, batches)

    def _change(self, fact: of.ScheduleChanged) -> None:
        before, forecast = self._forecast, fact.forecast
        if forecast is not None and before is not None and forecast != before:
            self._explain(forecast)
        self._forecast = forecast
        if not fact.kept:
            self._leave_out(_SETTLING)

    def _explain(self, forecast: Forecast) -> None:
        """Remove what new lengths explain from the errors found under the previous schedule."""
        work, time = forecast.explained
        self._planner.bias.explain(work, time, batches=forecast.batches)
        if self._delivered is not None:
            before, seconds = self._delivered
            again = replace(
                before,
                efficiency=before.efficiency * work / time,
                step_seconds=before.step_seconds * time,
            )
            self._delivered = again, seconds

    def _deliver(self) -> None:
        forecast = self._forecast
        self._delivered = None
        if self._left_out:
            self._left_out -= 1
        elif forecast is not None:
            self._delivered = forecast, self._time.seconds

    def _compare(self) -> None:
        """Compare the batch before, now that the tokens that came with the pause are known."""
        tokens, reads = self._tokens, self._reads
        self._tokens, self._reads = 0, 0.0
        if self._delivered is None or not self._engines:
            return
        forecast, seconds = self._delivered
        self._delivered = None
        model, engines = self._planner.model, len(self._engines)
        token_s = model.token_seconds(self._planner.max_running) / engines
        read_s = model.t2 / engines
        hidden = forecast.hidden
        if hidden and forecast.token_seconds is not None and forecast.read_seconds is not None:
            # Fast and slow engines that wait for each other make the model slower with each batch.
            token_s, read_s = forecast.token_seconds, forecast.read_seconds
        done = token_s * tokens + read_s * reads
        work = done / (forecast.efficiency * forecast.step_seconds)
        time = seconds / (forecast.step_seconds * forecast.correction)
        if hidden:
            work = min(max(work, time), 1.0) if time < 1 else 1.0
        self._planner.bias.observe(work=work, time=time)
