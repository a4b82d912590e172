"""One call for a simulated run, its result, and the comparison of several results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from aprilsched.errors import PromptsExhausted
from aprilsched.kernel.core.config import SchedulerConfig
from aprilsched.kernel.core.lengths.observed import GroupLengths
from aprilsched.kernel.core.messages.facts import BatchDelivered, Fact, TokensReceived
from aprilsched.kernel.core.state.records import GroupRecord, group_lengths
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.shell.listener import AnyListener, TokenChunks
from aprilsched.observe.figures.bias_collector import warning_now
from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.observe.figures.summary import Remainder, Summary
from aprilsched.observe.log.usage import RunUsage, UsageRecorder
from aprilsched.planning import Planner
from aprilsched.planning.candidates import in_words
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.simulation.modelled_trainer import Costs
from aprilsched.simulation.virtual import TIMED, Simulation, checked_config, checked_count
from aprilsched.simulation.workload import LongTailWorkload
from aprilsched.types import Group, Prompt

log = logging.getLogger("aprilsched")

BASELINE = "sync"
"""The policy that others are compared with."""
FLAT = 0.01
"""The best policy has the lowest mean staleness among those that deliver at most this share fewer
tokens a second than the fastest. Optima are flat, so such a difference is of no use."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SimulationResult:
    """What became of a simulated run of b batches with r delivered responses.

    Attributes:
        summary: all figures, as in summary.json of a run folder.
        config: configuration of the scheduler.
        step_s: float64 [b], modelled seconds of each trainer step, from delivery to delivery.
        tokens: int64 [b], sampled tokens of each batch.
        off_policy: int64 [b], tokens of each batch sampled under an older version than the one that
            consumes them.
        staleness: float64 [b], mean staleness of the tokens of each batch, in versions.
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
    staleness: NDArray[np.float64]
    lengths: NDArray[np.int64]
    batch: NDArray[np.int64]
    usage: RunUsage | None = None
    generated_tokens_per_s: float | None = None
    schedule: str = ""


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
        self._usage = UsageRecorder(batch_units=self.config.batch_units) if self.usage else None

    @property
    def listeners(self) -> list[AnyListener]:
        """Listeners for the simulation, before those that read the summary."""
        return [self.summary, self._generation, *([] if self._usage is None else [self._usage])]

    def result(
        self, simulation: Simulation, *, event_log_error: str | None = None
    ) -> SimulationResult:
        """Return the result of a run that has ended."""
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
            staleness=np.array([b.sums.total / max(1, b.sums.sampled) for b in batches]),
            lengths=np.concatenate([none, *(batch.lengths for batch in batches)]),
            batch=np.repeat(np.arange(len(batches)), sizes),
            usage=None if self._usage is None else self._usage.usage(simulation.agenda.now),
            generated_tokens_per_s=self._generation.tokens_per_s(summary.steady_state.burn_in),
            schedule=in_words(state.plan.schedule) if self.config.over_provision == "auto" else "",
        )


def remainder(state: SchedulerState) -> Remainder:
    """The scheduler's state when its run ends.

    It contains the rollouts in flight, the counters, the ledger, and the lengths in open groups.
    """
    in_flight = state.in_flight
    return Remainder(
        in_flight=list(in_flight.rollouts),
        counters=in_flight.counters,
        ledger=in_flight.ledger,
        open_groups=[_members(group) for group in in_flight.training_groups()],
    )


def _members(group: GroupRecord) -> GroupLengths:
    """Return the lengths in a group, without those of the single samples that have left it."""
    return group_lengths(replace(group, ended={}) if group.ended else group)


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
    tool_tokens: int = 0,
    planner: Planner | None = None,
    seed: int | None = None,
    burn_in: int | None = None,
    usage: bool = True,
    listeners: Sequence[AnyListener] = (),
) -> SimulationResult:
    """Simulate a run of the production scheduler in virtual time.

    It writes no files: run folders are written by the command ``aprilsched simulate``, whose
    config.toml can name its distributions. A distribution that cuts off more than a quarter of the
    responses at its cap is logged as a warning.

    Args:
        workload: the prompts. A response has ``max_new_tokens`` tokens with ``ignore_eos``, and
            otherwise ends at ``min_new_tokens``, if that is not 0. A
            :class:`~aprilsched.LongTailWorkload` gets the configuration's group size.
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
        tool_tokens: number of tokens that each gap appends to the context.
        planner: chooses schedules for ``over_provision="auto"``.
        seed: of the workload, if it is a LongTailWorkload.
        burn_in: batches that are left out of the steady state; a quarter by default.
        usage: whether to record where the engines' time goes, which takes a fifth of the time.
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
        bound = partial(seconds, max_running=most, engines=engines * engine.dp_ranks)
    summary = Summary(bound=bound, workload_mean=mean, burn_in=burn_in)
    measuring = Measuring(config, summary, usage)
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
        tool_tokens=tool_tokens,
        planner=planner,
        listeners=[*measuring.listeners, *listeners],
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
