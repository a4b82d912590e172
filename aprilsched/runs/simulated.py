"""Simulates a run in virtual time, for the commands simulate and replay."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from aprilsched.core.messages.facts import BatchDelivered, Fact, TokensReceived
from aprilsched.engines.sim import SimConfig
from aprilsched.errors import PromptsExhausted
from aprilsched.runs.config_file import as_toml
from aprilsched.runs.setup import Setup, live_figures_of, remainder, summary_of
from aprilsched.runs.showing import Screen
from aprilsched.simulation import Costs, Simulation, rare_collections
from aprilsched.telemetry.base import AnyListener, TokenChunks
from aprilsched.telemetry.bias_collector import warning_now
from aprilsched.telemetry.event_log import EventLog
from aprilsched.telemetry.figures import RunSummary
from aprilsched.telemetry.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one run."""

    summary: RunSummary
    generated_tokens_per_s: float | None = None
    """Tokens a second that the engines generated in the steady state; None if it is not known."""
    schedule: str = ""
    """The schedule that automatic over-provisioning chose last; empty without it."""


def simulate(
    setup: Setup,
    folder: RunFolder | None = None,
    screen: Screen | None = None,
    *,
    costs: Costs | None = None,
) -> Outcome:
    """Simulate a run to its last batch, and write a complete run folder.

    Args:
        setup: the parts of the run; its fleet and its publisher are not used but modelled. Prompts
            that raise PromptsExhausted end the run with the batches that it has.
        folder: run folder for its files; None writes none.
        screen: where the run is shown; None shows nothing.
        costs: latencies of everything but the engines' steps; by default those of the settings.

    Raises:
        AprilschedError: if the run could not begin or continue.
    """
    summary, generation = summary_of(setup), _Generation()
    listeners: list[AnyListener] = [summary, generation]
    events = None if folder is None else EventLog(folder.events, patient=True)
    if folder is not None and events is not None:
        folder.create(as_toml(setup.settings))
        events.start()
        listeners.append(events)
    shown = None if screen is None else screen.shown(live_figures_of(setup, summary))
    if shown is not None:
        listeners += shown.listeners
    simulation = _simulation(setup, costs, listeners)
    in_flight = simulation.state.in_flight
    with ExitStack() as stack:
        if events is not None:
            stack.callback(events.close)
        if shown is not None:
            shown.begin(in_flight.counters, in_flight.ledger, batches=0)
            stack.enter_context(shown)
        with suppress(PromptsExhausted), rare_collections():
            simulation.run()
    error = None if events is None else events.error
    result = summary.result(remainder(simulation.state), clock="virtual", event_log_error=error)
    delivered, tokens = result.rollouts.delivered, result.tokens.delivered
    if (warning := warning_now(in_flight.ledger, delivered, tokens)) is not None:
        log.warning("%s", warning)
    if folder is not None:
        folder.write_summary(result)
    automatic = setup.config.over_provision == "auto"
    return Outcome(
        summary=result,
        generated_tokens_per_s=generation.tokens_per_s(result.steady_state.burn_in),
        schedule=simulation.state.plan.schedule.why if automatic else "",
    )


def _simulation(setup: Setup, costs: Costs | None, listeners: list[AnyListener]) -> Simulation:
    settings, sim = setup.settings, setup.settings.sim
    return Simulation(
        setup.config,
        setup.prompts,
        engines=sim.engines,
        engine=SimConfig(
            timing=setup.timing,
            max_running=sim.max_running,
            kv_tokens=sim.kv_tokens,
            stream_interval=sim.stream_interval,
            prefix_cache=sim.prefix_cache,
            make_tokens=False,
        ),
        costs=costs
        or Costs(
            refit_seconds=sim.refit_seconds,
            train_seconds=settings.train_seconds,
            reward_seconds=sim.reward_seconds,
        ),
        batches=settings.batches,
        update_every=settings.updates_every,
        streamed=settings.streamed,
        planner=setup.planner,
        listeners=listeners,
    )


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
