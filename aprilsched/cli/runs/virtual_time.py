"""Simulates a run in virtual time, for the commands simulate and replay."""

from __future__ import annotations

from contextlib import ExitStack, suppress

from aprilsched.cli.runs.config_file import as_toml
from aprilsched.cli.runs.setup import Setup
from aprilsched.cli.runs.workload_limits import summary_of
from aprilsched.errors import PromptsExhausted
from aprilsched.kernel.shell.listener import AnyListener
from aprilsched.observe.log import EventLog
from aprilsched.observe.log.run_folder import RunFolder
from aprilsched.simulation import Costs, Simulation, SimulationResult, rare_collections
from aprilsched.simulation.engine import SimConfig
from aprilsched.simulation.results import Measuring


def simulate(
    setup: Setup,
    folder: RunFolder | None = None,
    *,
    costs: Costs | None = None,
) -> SimulationResult:
    """Simulate a run to its last batch, and write a complete run folder.

    Args:
        setup: the parts of the run; its fleet and its publisher are modelled, not used. Prompts
            that raise PromptsExhausted end the run with the batches delivered so far.
        folder: run folder for its files; None writes no files.
        costs: latencies of everything but the engines' steps; by default from the settings.

    Raises:
        AprilschedError: if the run could not start or continue.
    """
    measuring = Measuring(setup.config, summary_of(setup), usage=False)
    listeners = measuring.listeners
    events = None if folder is None else EventLog(folder.events, patient=True)
    if folder is not None and events is not None:
        folder.create(as_toml(setup.settings))
        events.start()
        listeners.append(events)
    simulation = _simulation(setup, costs, listeners)
    with ExitStack() as stack:
        if events is not None:
            stack.callback(events.close)
        with suppress(PromptsExhausted), rare_collections():
            simulation.run()
    error = None if events is None else events.error
    result = measuring.result(simulation, event_log_error=error)
    if folder is not None:
        folder.write_summary(result.summary)
    return result


def _simulation(setup: Setup, costs: Costs | None, listeners: list[AnyListener]) -> Simulation:
    settings, sim = setup.settings, setup.settings.sim
    return Simulation(
        setup.config,
        setup.prompts,
        engines=sim.engines,
        engine=SimConfig(timing=setup.timing, make_tokens=False, **sim.of_engine),
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
