"""Simulates a run in virtual time, for the commands simulate and replay."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext, suppress

from aprilsched.core.messages.facts import BatchDelivered, Fact, TokensReceived
from aprilsched.engines.sim import H200_QWEN3_4B, SimConfig
from aprilsched.errors import PromptsExhausted
from aprilsched.planning import Planner
from aprilsched.runs.config_file import as_toml
from aprilsched.runs.setup import Setup, remainder, summary_of
from aprilsched.runs.showing import Screen
from aprilsched.simulation import Costs, Simulation, rare_collections
from aprilsched.telemetry.base import AnyListener, TokenChunks
from aprilsched.telemetry.bias_collector import warning_now
from aprilsched.telemetry.event_log import EventLog
from aprilsched.telemetry.figures import RunSummary
from aprilsched.telemetry.run_folder import RunFolder
from aprilsched.timing.model import StepTimeModel

log = logging.getLogger("aprilsched")


class _Generation:
    """Counts generated tokens when they arrive, as a listener, and says how fast they came."""

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
        begin, before = self._deliveries[max(0, burn_in - 1)]
        end, after = self._deliveries[-1]
        return (after - before) / (end - begin) if end > begin else None


class SimulatedRun:
    """One simulated run; :meth:`execute` begins and ends it, and writes a complete run folder.

    Args:
        setup: the parts of the run; its fleet and its publisher are not used but modelled. Prompts
            that raise PromptsExhausted end the run with the batches that it has.
        folder: run folder for its files; None writes none.
        screen: where the run is shown; None shows nothing.
        timing: step-time model of the engines.
        costs: latencies of everything else; by default those of the settings.
    """

    def __init__(
        self,
        setup: Setup,
        folder: RunFolder | None,
        screen: Screen | None,
        *,
        timing: StepTimeModel = H200_QWEN3_4B,
        costs: Costs | None = None,
    ) -> None:
        self._setup = setup
        self._folder = folder
        self._screen = screen
        self._timing = timing
        self._costs = costs or _costs(setup)
        self._generation = _Generation()
        self.schedule = ""
        """The schedule that automatic over-provisioning chose last; empty without it."""
        self.generated_tokens_per_s: float | None = None

    def execute(self) -> RunSummary:
        """Run to the last batch; returns the summary, which is also written to the folder.

        Raises:
            AprilschedError: if the run could not begin or continue.
        """
        events = None if self._folder is None else self._log(self._folder)
        summary = summary_of(self._setup)
        shown = None if self._screen is None else self._screen.shown(summary)
        listeners: list[AnyListener] = [summary, self._generation]
        listeners += [] if events is None else [events]
        listeners += [] if shown is None else shown.listeners
        simulation = self._simulation(listeners)
        in_flight = simulation.state.in_flight
        if shown is not None:
            shown.begin(in_flight.counters, in_flight.ledger, batches=0)
        try:
            with shown or nullcontext(), suppress(PromptsExhausted), rare_collections():
                simulation.run()
        finally:
            if events is not None:
                events.close()
        error = None if events is None else events.error
        result = summary.result(remainder(simulation.state), clock="virtual", event_log_error=error)
        delivered, tokens = result.rollouts.delivered, result.tokens.delivered
        if (warning := warning_now(in_flight.ledger, delivered, tokens)) is not None:
            log.warning("%s", warning)
        if self._folder is not None:
            self._folder.write_summary(result)
        self._conclude(simulation, result)
        return result

    def _log(self, folder: RunFolder) -> EventLog:
        events = EventLog(folder.events, patient=True)
        folder.create(as_toml(self._setup.settings))
        events.start()
        return events

    def _conclude(self, simulation: Simulation, result: RunSummary) -> None:
        burn_in = result.steady_state.burn_in
        self.generated_tokens_per_s = self._generation.tokens_per_s(burn_in)
        if self._setup.config.over_provision == "auto":
            self.schedule = simulation.state.plan.schedule.why

    def _simulation(self, listeners: list[AnyListener]) -> Simulation:
        setup, settings = self._setup, self._setup.settings
        sim = settings.sim
        engine = SimConfig(
            timing=self._timing,
            max_running=sim.max_running,
            kv_tokens=sim.kv_tokens,
            stream_interval=sim.stream_interval,
            prefix_cache=sim.prefix_cache,
            make_tokens=False,
        )
        return Simulation(
            setup.config,
            setup.prompts,
            engines=sim.engines,
            engine=engine,
            costs=self._costs,
            batches=settings.batches,
            update_every=settings.updates_every,
            streamed=settings.streamed,
            planner=Planner(self._timing, max_running=sim.max_running, inline=True),
            listeners=listeners,
        )


def _costs(setup: Setup) -> Costs:
    sim = setup.settings.sim
    return Costs(
        refit_seconds=sim.refit_seconds,
        train_seconds=setup.settings.train_seconds,
        reward_seconds=sim.reward_seconds,
    )
