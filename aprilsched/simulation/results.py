"""One call for a simulated run, what came of it, and several of them side by side."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from aprilsched.errors import PromptsExhausted
from aprilsched.kernel.core.config import SchedulerConfig
from aprilsched.kernel.core.messages.facts import BatchDelivered, Fact, TokensReceived
from aprilsched.kernel.core.state.records import group_lengths
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.shell.listener import AnyListener, TokenChunks
from aprilsched.observe.figures.bias_collector import warning_now
from aprilsched.observe.figures.figures import RunSummary
from aprilsched.observe.figures.summary import Remainder, Summary
from aprilsched.observe.log.usage import RunUsage, UsageRecorder
from aprilsched.planning import Planner
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.simulation.virtual import (
    TIMED,
    Costs,
    Simulation,
    checked_config,
    checked_count,
)
from aprilsched.simulation.workload import LongTailWorkload
from aprilsched.types import Group, Prompt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("aprilsched")

BASELINE = "sync"
"""The policy that others are compared with."""
FLAT = 0.01
"""The best policy is the least stale one among those that deliver at most this share fewer tokens a
second than the fastest, as automatic scheduling chooses. Optima are flat, so such a difference is
of no use."""
_SHOWN_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SimulationResult:
    """What became of a simulated run of b batches with r delivered responses.

    Attributes:
        summary: all figures, as in summary.json of a run folder.
        config: how it was scheduled.
        step_s: float64 [b], modelled seconds of each trainer step, from delivery to delivery.
        tokens: int64 [b], sampled tokens of each batch.
        off_policy: int64 [b], those of them that are of an older version than the one that consumes
            them.
        age: float64 [b], mean staleness of the tokens of each batch, in versions.
        lengths: int64 [r], tokens of each response, in the order of delivery.
        batch: int64 [r], the number of the batch that each response is in.
        usage: where the engines' time went, by its cause; None if it was not recorded.
        generated_tokens_per_s: tokens a second that the engines generated in the steady state; None
            if there are too few batches.
        schedule: the schedule that ``over_provision="auto"`` chose last; empty without it.
    """

    summary: RunSummary
    config: SchedulerConfig
    step_s: NDArray[np.float64]
    tokens: NDArray[np.int64]
    off_policy: NDArray[np.int64]
    age: NDArray[np.float64]
    lengths: NDArray[np.int64]
    batch: NDArray[np.int64]
    usage: RunUsage | None = None
    generated_tokens_per_s: float | None = None
    schedule: str = ""

    def plot(self, *, title: str = "") -> Figure:
        """Draw what the engines' slots did over the time of the run, by cause.

        Raises:
            MissingExtra: if matplotlib is not installed (the extra ``plots``).
            ValueError: if the usage was not recorded.
        """
        from aprilsched.observe import plots

        if self.usage is None:
            raise ValueError("the usage was not recorded; simulate without usage=False.")
        return plots.causes(self.usage, title=title)


@dataclass
class Measuring:
    """The listeners that make a :class:`SimulationResult`.

    Args:
        config: of the run.
        summary: sums the run up.
        usage: whether to record where the engines' time goes.
    """

    config: SchedulerConfig
    summary: Summary
    usage: bool = True

    def __post_init__(self) -> None:
        self._generation = _Generation()
        self._usage = UsageRecorder(batch_groups=self.config.batch_groups) if self.usage else None

    @property
    def listeners(self) -> list[AnyListener]:
        """To be given to the simulation, before those that read the summary."""
        return [self.summary, self._generation, *([] if self._usage is None else [self._usage])]

    def result(
        self, simulation: Simulation, *, event_log_error: str | None = None
    ) -> SimulationResult:
        """The result of a run that has ended."""
        state = simulation.state
        in_flight, batches = state.in_flight, self.summary.batches
        summary = self.summary.result(
            remainder(state), clock="virtual", event_log_error=event_log_error
        )
        delivered, tokens = summary.rollouts.delivered, summary.tokens.delivered
        if (warning := warning_now(in_flight.ledger, delivered, tokens)) is not None:
            log.warning("%s", warning)
        sizes = [len(batch.lengths) for batch in batches]
        none = np.zeros(0, dtype=np.int64)
        return SimulationResult(
            summary=summary,
            config=self.config,
            step_s=np.array([batch.step_s for batch in batches]),
            tokens=np.array([batch.sums.sampled for batch in batches], dtype=np.int64),
            off_policy=np.array([batch.sums.off_policy for batch in batches], dtype=np.int64),
            age=np.array([b.sums.total / max(1, b.sums.sampled) for b in batches]),
            lengths=np.concatenate([none, *(batch.lengths for batch in batches)]),
            batch=np.repeat(np.arange(len(batches)), sizes),
            usage=None if self._usage is None else self._usage.usage(simulation.agenda.now),
            generated_tokens_per_s=self._generation.tokens_per_s(summary.steady_state.burn_in),
            schedule=state.plan.schedule.why if self.config.over_provision == "auto" else "",
        )


def remainder(state: SchedulerState) -> Remainder:
    """What the scheduler still holds when its run ends: the rollouts in flight, the counters, the
    ledger, and the lengths in open groups."""
    in_flight = state.in_flight
    return Remainder(
        in_flight=list(in_flight.rollouts),
        counters=in_flight.counters,
        ledger=in_flight.ledger,
        open_groups=[group_lengths(group) for group in in_flight.training_groups()],
    )


def simulate(
    workload: Iterable[Prompt],
    config: SchedulerConfig | None = None,
    *,
    engines: int = 1,
    engine: SimConfig | Sequence[SimConfig] = TIMED,
    costs: Costs | None = None,
    batches: int = 60,
    update_every: int = 1,
    streamed: bool = False,
    accept: Callable[[Group], bool] | None = None,
    pauses: Callable[[Prompt, int], Sequence[float]] | None = None,
    planner: Planner | None = None,
    seed: int | None = None,
    burn_in: int | None = None,
    usage: bool = True,
    progress: bool = False,
    listeners: Sequence[AnyListener] = (),
) -> SimulationResult:
    """Simulate a run of the production scheduler in virtual time.

    It writes no files: run folders are written by the command ``aprilsched simulate``, whose
    config.toml can name its laws. A law that cuts off more than a quarter of the responses at its
    cap is logged as a warning.

    Args:
        workload: the prompts. Each response has the length that ``max_new_tokens`` gives, as
            :class:`~aprilsched.LongTailWorkload` draws it. A workload of that class gets the
            configuration's group size.
        config: how it is scheduled; by default :class:`~aprilsched.SchedulerConfig`'s defaults.
            Recipes are in :mod:`aprilsched.planning.presets`.
        engines: number of engines.
        engine: settings of every engine, with its step-time model (one H200 with a dense model of
            4 billion parameters by default); or a list with those of each.
        costs: seconds of everything else: training, refits, pauses and rewards.
        batches: number of batches that the trainer takes. Prompts that end earlier end the run.
        update_every: number of batches between two versions; 0 for a single version.
        streamed: whether the trainer takes each batch group by group.
        accept: filters groups, as in RolloutScheduler.
        pauses: makes episodes: the seconds of each gap between the turns of a response, by its
            prompt and its index in the group.
        planner: chooses schedules for ``over_provision="auto"``.
        seed: of the workload, if it is a LongTailWorkload.
        burn_in: batches that are left out of the steady state; a quarter by default.
        usage: whether to record where the engines' time goes, which takes a fifth of the time.
        progress: whether to tell on stderr how far it is.
        listeners: objects that see every event and command, such as an event log.

    Raises:
        ConfigError: if a setting cannot be used.
        AprilschedError: if a real run would end too.
    """
    config = SchedulerConfig() if config is None else config
    checked_config(config)
    if seed is not None:
        checked_count("seed", seed, least=0)
    if burn_in is not None:
        checked_count("burn_in", burn_in, least=0)
    mean: float | None = None
    if isinstance(workload, LongTailWorkload):
        workload = replace(
            workload, group_size=config.group_size, seed=workload.seed if seed is None else seed
        )
        mean = workload.mean_length()
        if (warning := workload.cap_warning()) is not None:
            log.warning("%s", warning)
    bound = None
    if isinstance(engine, SimConfig):  # No bound is known of engines that differ.
        seconds, most = engine.timing.bound_seconds, engine.max_running
        bound = partial(seconds, max_running=most, engines=engines)
    summary = Summary(
        trainer_waits=config.trainer_waits,
        bound=bound,
        workload_mean=mean,
        burn_in=burn_in,
    )
    measuring = Measuring(config, summary, usage)
    shown = [_Progress(batches)] if progress else []
    simulation = Simulation(
        config,
        workload,
        engines=engines,
        engine=engine,
        costs=costs,
        batches=batches,
        update_every=update_every,
        streamed=streamed,
        accept=accept,
        pauses=pauses,
        planner=planner,
        listeners=[*measuring.listeners, *shown, *listeners],
    )
    with suppress(PromptsExhausted):
        simulation.run()
    return measuring.result(simulation)


class _Generation:
    """Counts generated tokens when they arrive, as a listener, and reports their rate."""

    def __init__(self) -> None:
        self._tokens = 0
        self._deliveries: list[tuple[float, int]] = []

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            if isinstance(fact, TokensReceived):
                self._tokens += fact.tokens
            elif isinstance(fact, BatchDelivered) and not fact.again:
                self._deliveries.append((now, self._tokens))

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        self._tokens += sum([fact.tokens for fact, _ in chunks])

    def tokens_per_s(self, burn_in: int) -> float | None:
        """Generated tokens a second over the batches after the first `burn_in`; None without such
        batches."""
        if len(self._deliveries) <= max(1, burn_in):
            return None
        start, before = self._deliveries[max(0, burn_in - 1)]
        end, after = self._deliveries[-1]
        return (after - before) / (end - start) if end > start else None


class _Progress:
    """Reports on stderr how far a simulation is, once a second."""

    def __init__(self, batches: int) -> None:
        self._wanted, self._done = batches, 0
        self._began = self._told = time.monotonic()

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        self._done += sum([isinstance(f, BatchDelivered) and not f.again for f in facts])
        clock = time.monotonic()
        if clock - self._told >= _SHOWN_EVERY_S:
            self._told = clock
            spent = f"{now:,.0f} modelled seconds in {clock - self._began:.0f} s"
            print(f"batch {self._done} of {self._wanted}, {spent}", file=sys.stderr, flush=True)


# --- side by side --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRow:
    """The figures of one policy. A figure that cannot be known is None.

    Rates, efficiency and shares are those of the steady state, after the burn-in. All other figures
    are those of the whole run.
    """

    policy: str
    efficiency: float | None
    """T_bound / T: the least possible time for the delivered tokens, divided by the actual time
    without that in which the engines stood still for the trainer."""
    step_efficiency: float | None
    """The same with that time: T_bound over the seconds of whole steps."""
    delivered_tokens_per_s: float | None
    """Sampled tokens that the trainer gets, over the seconds of whole steps."""
    generated_tokens_per_s: float | None
    """All tokens that the engines generated, including those still in flight at the end."""
    off_policy_share: float | None
    """Share of the delivered tokens that are of an older version than the one that consumes
    them."""
    staleness_mean: float
    """Mean staleness of the delivered tokens, in versions."""
    staleness_max: int
    length_bias: float | None
    """Mean delivered length / mean drawn length - 1, over the whole run. It is a transient if all
    stragglers are carried."""
    first_batch_length_bias: float | None
    wall_s: float
    """Modelled seconds of the whole run."""
    batches: int
    step_s: float | None
    """Mean seconds of a whole step, from delivery to delivery, the trainer's time included under
    every pace; after the burn-in."""
    step_p10: float | None
    step_p90: float | None
    """A tenth of these steps took less than the first, and a tenth more than the second."""
    reprefilled_tokens: int
    masked_tokens: int
    speedup: float | None
    """Delivered tokens/s divided by the baseline's."""
    schedule: str = ""
    """The schedule that automatic over-provisioning chose last; empty without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Policies side by side: the content of comparison.json."""

    schema: int = 3
    baseline: str | None
    fastest: str | None
    """The policy that delivers the most tokens a second. These are the seconds of whole steps, so a
    trainer that the engines wait for counts, which it does not in `efficiency`."""
    best: str | None
    """The least stale policy of those within 1 % of the fastest."""
    policies: list[PolicyRow]


def compare(results: Mapping[str, SimulationResult | RunSummary]) -> Comparison:
    """The figures of results by name, compared with the one named "sync" if there is one. A summary
    is that of a real run."""
    first = results.get(BASELINE)
    base = None if first is None else _summary(first).steady_state.delivered_tokens_per_s
    rows = [_row(name, result, base) for name, result in results.items()]
    known = [row for row in rows if row.delivered_tokens_per_s is not None]
    fastest = max(known, key=lambda row: row.delivered_tokens_per_s or 0.0, default=None)
    return Comparison(
        baseline=BASELINE if BASELINE in results else None,
        fastest=None if fastest is None else fastest.policy,
        best=None if fastest is None else _best(known, fastest),
        policies=rows,
    )


def spread_of_steps(summary: RunSummary) -> tuple[float, float] | None:
    """The tenth and the ninetieth percentile of the seconds of whole steps after the burn-in; None
    without such steps."""
    steps = summary.steady_steps_s
    if not steps:
        return None
    low, high = np.percentile(steps, (10, 90))
    return float(low), float(high)


def _best(rows: list[PolicyRow], fastest: PolicyRow) -> str:
    least = (1 - FLAT) * (fastest.delivered_tokens_per_s or 0.0)
    near = [row for row in rows if (row.delivered_tokens_per_s or 0.0) >= least]
    return min(near, key=lambda row: row.off_policy_share or 0.0).policy


def _summary(result: SimulationResult | RunSummary) -> RunSummary:
    return result.summary if isinstance(result, SimulationResult) else result


def _row(name: str, result: SimulationResult | RunSummary, base: float | None) -> PolicyRow:
    summary = _summary(result)
    simulated = result if isinstance(result, SimulationResult) else None
    steady = summary.steady_state
    rate = steady.delivered_tokens_per_s
    steps, spread = summary.steady_steps_s, spread_of_steps(summary)
    return PolicyRow(
        policy=name,
        efficiency=steady.efficiency,
        step_efficiency=summary.step_efficiency,
        delivered_tokens_per_s=rate,
        generated_tokens_per_s=None if simulated is None else simulated.generated_tokens_per_s,
        off_policy_share=steady.off_policy_token_share,
        staleness_mean=summary.staleness_mean or 0.0,
        staleness_max=summary.staleness_max,
        length_bias=summary.bias.bias_estimate,
        first_batch_length_bias=summary.bias.first_batch_length_bias,
        wall_s=summary.seconds.wall,
        batches=summary.batches,
        step_s=sum(steps) / len(steps) if steps else None,
        step_p10=None if spread is None else spread[0],
        step_p90=None if spread is None else spread[1],
        reprefilled_tokens=summary.tokens.reprefilled,
        masked_tokens=summary.tokens.masked,
        speedup=rate / base if rate is not None and base else None,
        schedule="" if simulated is None else simulated.schedule,
    )
