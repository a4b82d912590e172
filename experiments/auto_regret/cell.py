"""Runs one schedule on one workload, and measures how fast and how stale it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from aprilsched.config import SchedulerConfig
from aprilsched.core.messages.facts import (
    BatchDelivered,
    BatchRequested,
    Fact,
    TokensReceived,
)
from aprilsched.planning import Planner
from aprilsched.simulation import Simulation, rare_collections
from aprilsched.telemetry.batch_figures import measure
from aprilsched.timing.model import H200_QWEN3_4B, StepTimeModel
from aprilsched.types import Prompt
from aprilsched.workload import LongTailWorkload

__all__ = ["BATCH_GROUPS", "MAX_RUNNING", "Drift", "Figures", "prompts_of", "simulate"]

BATCH_GROUPS = 16
MAX_RUNNING = 512
_MODEL: StepTimeModel = H200_QWEN3_4B


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How the length law changes with the batch for which a prompt is drawn."""

    name: str = "stationary"
    begin: int = 0
    end: int = 1
    """Batches; a jump where they are neighbours."""
    factor: float = 1.0
    """Of the median, at the end."""
    sigma: float | None = None
    """At the end."""

    def law(self, base: LongTailWorkload, batch: float) -> LongTailWorkload:
        share = min(max((batch - self.begin) / (self.end - self.begin), 0.0), 1.0)
        sigma = base.sigma if self.sigma is None else self.sigma
        return replace(
            base,
            median=base.median * (1 + (self.factor - 1) * share),
            sigma=base.sigma + (sigma - base.sigma) * share,
        )


@dataclass(frozen=True, kw_only=True)
class Figures:
    """After the burn-in."""

    efficiency: float
    """T_bound of the generated tokens / time."""
    delivered_efficiency: float
    """T_bound of the delivered responses / time."""
    off_policy: float
    chosen: str = ""


def prompts_of(base: LongTailWorkload, drift: Drift) -> Iterator[Prompt]:
    """The same random numbers for every schedule and every drift."""
    for index in count():
        yield drift.law(base, index / BATCH_GROUPS).prompt(index)


class Work:
    """T_bound of what was generated, at every request for a batch."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []
        self.delivered: list[tuple[float, int, int]] = []
        """T_bound, off-policy tokens and tokens of every batch."""
        self._bound = 0.0
        self._have: dict[int, int] = {}

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            if isinstance(fact, TokensReceived):
                before = self._have.get(fact.request_id, 0)
                self._have[fact.request_id] = before + fact.tokens
                # Prompts of 8 tokens are read with every token.
                reads = 8 * fact.tokens + ((before + fact.tokens) ** 2 - before**2) / 2
                per_token = _MODEL.t1 + _MODEL.t0 / MAX_RUNNING
                self._bound += per_token * fact.tokens + _MODEL.t2 * reads
            elif isinstance(fact, BatchRequested):
                self.marks.append((now, self._bound))
            elif isinstance(fact, BatchDelivered):
                measured = measure(fact, seconds=1.0, trainer_seconds=0.0, bound=_bound)
                sums = measured.sums
                self.delivered.append((measured.t_bound or 0.0, sums.off_policy, sums.sampled))


def simulate(
    config: SchedulerConfig, prompts: Iterator[Prompt], *, batches: int, burn_in: int
) -> Figures:
    """Run `batches` and one more, whose request marks the end of the last one counted."""
    work = Work()
    simulation = Simulation(
        config,
        prompts,
        batches=batches + 1,
        planner=Planner(_MODEL, max_running=MAX_RUNNING, inline=True),
        listeners=(work,),
    )
    with rare_collections():
        simulation.run()
    (began, before), (ended, after) = work.marks[burn_in], work.marks[batches]
    kept = work.delivered[burn_in:batches]
    seconds = ended - began
    return Figures(
        efficiency=(after - before) / seconds,
        delivered_efficiency=sum(bound for bound, _, _ in kept) / seconds,
        off_policy=sum(old for _, old, _ in kept) / sum(tokens for _, _, tokens in kept),
        chosen=simulation.state.plan.schedule.why,
    )


def _bound(prompts: Sequence[int], lengths: Sequence[int]) -> float:
    return _MODEL.bound_seconds(prompts, lengths, MAX_RUNNING)
