"""Runs a schedule in virtual time, and computes its figures after the burn-in.

Efficiency is T_bound / T in two ways. *Delivered*: the bound of the responses in the counted
batches. *Generated*: the bound of the tokens that engines sampled meanwhile, which in the long run
is the same and scatters much less with what is carried over both ends. With the linear step-time
model the second is exact: decoding takes steps * t0 + work, and the bound is that work and
t0 / max_running for each token. What is left of the time are thin steps (t0 of those that a full
engine would not have made), prefill, and standing still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from statistics import fmean
from typing import NamedTuple

from aprilsched.config import SchedulerConfig
from aprilsched.kernel.core.messages.facts import BatchDelivered, Fact
from aprilsched.kernel.shell.listener import AnyListener
from aprilsched.observe.figures import figures as of
from aprilsched.observe.figures.summary import Summary
from aprilsched.planning import Planner
from aprilsched.planning.step_times.model import H200_QWEN3_4B_LINEAR, StepTimeModel
from aprilsched.simulation import NEVER, Simulation
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.simulation.modelled_engine import ModelledEngine
from aprilsched.types import Prompt

__all__ = ["MAX_RUNNING", "Figures", "Mark", "Run", "mean", "run"]

MAX_RUNNING = 512
KV_TOKENS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """After the burn-in; shares are of the time, or of delivered tokens (`off_policy`)."""

    efficiency: float
    """Generated."""
    efficiency_delivered: float
    off_policy: float
    staleness: float
    """Mean over delivered tokens, in versions."""
    staleness_max: float
    seconds: float
    """A batch."""
    mean_length: float
    generated_per_s: float
    delivered_per_s: float
    reprefilled: float
    """Tokens a batch."""
    thin: float
    prefill: float
    still: float


class Mark(NamedTuple):
    """Totals of all engines when a batch was delivered; `kv` is what their pools hold then."""

    now: float
    generated: int
    work: float
    thin: float
    prefill: float
    reprefilled: int
    passes: int
    steps: int
    kv: int
    peak: int
    """Of `kv`, since the batch before."""


class _Meter:
    """Listens to a run and reads its engines' counters at each delivery."""

    def __init__(self, model: StepTimeModel) -> None:
        self.engines: Iterable[ModelledEngine] = ()
        self.again: Callable[[], int] = int
        """Tokens prefilled again so far."""
        self.marks: list[Mark] = []
        self._peak = 0
        self._model = model

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        self._peak = max(self._peak, self._kv())
        for fact in facts:
            if isinstance(fact, BatchDelivered):
                self.marks.append(self._mark(now))
                self._peak = 0

    def _mark(self, now: float) -> Mark:
        counters = [engine.batcher.counters for engine in self.engines]
        generated = sum(c.generated for c in counters)
        steps = sum(c.steps for c in counters)
        full = self._model.t0 * generated / MAX_RUNNING
        return Mark(
            now=now,
            generated=generated,
            work=sum(c.decode_seconds for c in counters) - self._model.t0 * steps + full,
            thin=self._model.t0 * steps - full,
            prefill=sum(c.prefill_seconds for c in counters),
            reprefilled=self.again(),
            passes=sum(c.prefill_passes for c in counters),
            steps=steps,
            kv=self._kv(),
            peak=self._peak,
        )

    def _kv(self) -> int:
        return sum(engine.batcher.kv_in_use for engine in self.engines)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A finished run: its batches and totals, for figures over any part of it."""

    batches: list[of.Measured]
    marks: list[Mark]
    engines: int
    schedule: str
    """What automatic scheduling chose last."""

    def figures(self, burn_in: int, until: int | None = None) -> Figures:
        """Over the batches from number `burn_in` to before number `until`."""
        kept = self.batches[burn_in:until]
        last = self.marks[: len(self.batches) if until is None else until][-1]
        first = self.marks[burn_in - 1] if burn_in else Mark(0.0, 0, 0.0, 0.0, 0.0, 0, 0, 0, 0, 0)
        seconds = last.now - first.now
        work, thin, prefill = (
            (getattr(last, name) - getattr(first, name)) / self.engines / seconds
            for name in ("work", "thin", "prefill")
        )
        over = of.Figures.over(kept)
        return Figures(
            efficiency=work,
            efficiency_delivered=over.efficiency or 0.0,
            off_policy=over.off_policy_token_share or 0.0,
            staleness=over.staleness_mean or 0.0,
            staleness_max=over.staleness_max,
            seconds=seconds / len(kept),
            mean_length=over.mean_length or 0.0,
            generated_per_s=(last.generated - first.generated) / seconds,
            delivered_per_s=over.delivered_tokens_per_s or 0.0,
            reprefilled=(last.reprefilled - first.reprefilled) / len(kept),
            thin=thin,
            prefill=prefill,
            still=1 - work - thin - prefill,
        )


def run(
    config: SchedulerConfig,
    prompts: Iterable[Prompt],
    *,
    batches: int,
    engines: int = 1,
    model: StepTimeModel = H200_QWEN3_4B_LINEAR,
    kv_tokens: int = KV_TOKENS,
    listeners: Sequence[AnyListener] = (),
) -> Run:
    """Run `batches` batches in virtual time, with a refit after each."""
    meter = _Meter(model)
    one = partial(model.bound_seconds, max_running=MAX_RUNNING)

    def bound(prompt_lengths: Sequence[int], lengths: Sequence[int]) -> float:
        return one(prompt_lengths, lengths) / engines

    summary = Summary(trainer_waits=config.first_pace == "synchronous", bound=bound)
    simulation = Simulation(
        config,
        prompts,
        engines=engines,
        engine=SimConfig(
            timing=model,
            max_running=MAX_RUNNING,
            kv_tokens=kv_tokens,
            make_tokens=False,
            stream_interval=NEVER,
        ),
        batches=batches,
        planner=Planner(model, max_running=MAX_RUNNING, inline=True),
        listeners=[summary, meter, *listeners],
    )
    meter.engines = simulation.engines.values()
    # Engines cannot tell a rollout that was called back and sent again from a new one.
    counts = simulation.state.in_flight.counters
    meter.again = lambda: counts.tokens_reprefilled
    simulation.run()
    return Run(
        batches=summary.batches,
        marks=meter.marks,
        engines=engines,
        schedule=simulation.state.plan.schedule.why,
    )


def mean(several: Sequence[Figures]) -> Figures:
    """Of several seeds."""
    names = [field.name for field in fields(Figures)]
    return Figures(**{name: fmean(getattr(one, name) for one in several) for name in names})
