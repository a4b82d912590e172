"""One policy in virtual time, from its setup to its run folder."""

from __future__ import annotations

from contextlib import nullcontext

from aprilsched.commands.config_file import as_toml
from aprilsched.commands.remainder import remainder
from aprilsched.commands.setup import Setup
from aprilsched.engines.sim import H200_QWEN3_4B, SimConfig
from aprilsched.planning import Planner
from aprilsched.simulation import Costs, Simulation
from aprilsched.telemetry.base import Listener
from aprilsched.telemetry.event_log import EventLog
from aprilsched.telemetry.figures import RunSummary
from aprilsched.telemetry.generation import Generation
from aprilsched.telemetry.progress import Progress
from aprilsched.telemetry.run_folder import RunFolder
from aprilsched.telemetry.summary import Summary

__all__ = ["SimulatedRun"]


class SimulatedRun:
    """Begun and ended by :meth:`execute`; the folder is a whole run folder afterwards.

    Args:
        setup: what is run; its fleet and its publisher are modelled, not used.
        folder: where the files go.
        progress: shows it; None is quiet.
    """

    def __init__(self, setup: Setup, folder: RunFolder, progress: Progress | None) -> None:
        self._setup = setup
        self._folder = folder
        self._progress = progress
        self._generation = Generation()
        self.schedule = ""
        """What automatic scheduling chose last."""
        self.generated_tokens_per_s: float | None = None

    def execute(self) -> RunSummary:
        """Run to the last batch; the summary, which is in the folder too.

        Raises:
            AprilschedError: if the run could not begin or go on.
        """
        setup, log = self._setup, EventLog(self._folder.events)
        self._folder.create(as_toml(setup.settings))
        log.start()
        summary = Summary(
            trainer_waits=setup.config.pace == "synchronous",
            bound=setup.bound,
            workload_mean=setup.workload_mean,
            burn_in=setup.settings.burn_in,
        )
        listeners: list[Listener] = [log, summary, self._generation]
        if self._progress is not None:
            listeners.append(self._progress)
        simulation = self._simulation(listeners)
        summary.ledger = simulation.state.book.ledger
        try:
            with self._progress or nullcontext():
                simulation.run()
        finally:
            log.close()
        result = summary.result(
            remainder(simulation.state), clock="virtual", event_log_error=log.error
        )
        self._folder.write_summary(result)
        burn_in = result.steady_state.burn_in
        self.generated_tokens_per_s = self._generation.tokens_per_s(burn_in)
        if setup.config.over_provision == "auto":
            self.schedule = simulation.state.schedule.why
        return result

    def _simulation(self, listeners: list[Listener]) -> Simulation:
        setup, settings = self._setup, self._setup.settings
        sim = settings.sim
        engine = SimConfig(
            max_running=sim.max_running,
            kv_tokens=sim.kv_tokens,
            stream_interval=sim.stream_interval,
            make_tokens=False,
        )
        return Simulation(
            setup.config,
            setup.prompts,
            engines=sim.engines,
            engine=engine,
            costs=Costs(
                refit_seconds=sim.refit_seconds,
                train_seconds=settings.train_seconds,
                reward_seconds=sim.reward_seconds,
            ),
            batches=settings.batches,
            update_every=settings.update_every,
            planner=Planner(H200_QWEN3_4B, max_running=sim.max_running, inline=True),
            listeners=listeners,
        )
