"""Drives a run through the real coordinator (``aprilsched run``), with the listeners that export
it, or in virtual time (``simulate``).

Invariant: once the run folder exists, summary.json is written into it, however the run ends.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Generator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

from rich.console import Console

from aprilsched.cli.runs.config_file import as_toml
from aprilsched.cli.runs.exports import exporters
from aprilsched.cli.runs.setup import Setup, run_on_clock
from aprilsched.cli.runs.workload_limits import live_figures_of, summary_of
from aprilsched.errors import AprilschedError, ConfigError, PromptsExhausted, RunFolderError
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.shell import RolloutScheduler
from aprilsched.kernel.shell.listener import AnyListener
from aprilsched.kernel.store.in_memory import Store
from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.observe.figures.summary import Remainder, Summary
from aprilsched.observe.live import LiveView, RunFacts
from aprilsched.observe.log import EventLog
from aprilsched.observe.log.reading import replay
from aprilsched.observe.log.run import readable
from aprilsched.observe.log.run_folder import CONFIG, EVENTS, RunFolder
from aprilsched.observe.sampling import Sampler
from aprilsched.simulation.results import remainder
from aprilsched.types import Batch, Prompt, Rollout


class Run:
    """One run, from start to end in :meth:`execute`.

    Args:
        setup: the parts of the run.
        folder: run folder for its files: a new one, or the folder of a run to resume.
        console: shows the run; None shows nothing.
        store: saves the run, so that it can resume after a crash; a resumed run needs its old
            store.
    """

    def __init__(
        self,
        setup: Setup,
        folder: RunFolder,
        console: Console | None,
        *,
        store: Store | None = None,
    ) -> None:
        self._setup = setup
        self._store = store
        self._folder = folder
        self._log = EventLog(
            folder.events,
            append=folder.resumed,
            patient=setup.clock == "virtual",
            log_tokens=setup.settings.log_tokens,
            waits=True,
        )
        self._sampler = _sampler(setup, folder, self._log)
        self._summary = summary_of(setup)
        self._figures = live_figures_of(setup, self._summary)
        self._exported: list[AnyListener] = []
        self._shown = None if console is None else self._view(console)
        self._prior = PriorRun(folder.path, self._summary) if folder.resumed else None
        self._scheduler: RolloutScheduler | None = None
        self._interrupted = False
        self._end: PromptsExhausted | None = None

    def _view(self, console: Console) -> LiveView:
        facts = RunFacts(
            title="run",
            where=str(self._folder.path),
            batches=self._setup.settings.batches,
            batch_units=self._setup.config.batch_units,
            modelled=self._setup.clock == "virtual",
        )
        return LiveView(console, facts, self._figures)

    def execute(self) -> RunSummary:
        """Run to the end or to Ctrl-C; return the summary, which is also written to the folder.

        If failed groups are the reason for missing batches, the summary's `error` explains it.

        Raises:
            AprilschedError: if the run could not start or continue.
        """
        self._folder.reserve()
        with ExitStack() as exporting:
            return self._execute(exporting)

    def _execute(self, exporting: ExitStack) -> RunSummary:
        """Run; close the exporters only after the summary is written, because this may be slow."""
        failure: AprilschedError | None = None
        try:
            self._exported = exporting.enter_context(
                exporters(self._setup, self._folder.path, self._figures)
            )
            with self._shown or nullcontext():
                run_on_clock(self._setup, self._drive)
        except (KeyboardInterrupt, asyncio.CancelledError):
            if not self._interrupted or not self._folder.created:
                raise KeyboardInterrupt from None
        except AprilschedError as error:
            if not self._folder.created:
                raise
            failure = error
        finally:
            if not self._folder.created:
                exporting.close()
            self._folder.discard()
        summary = self._finish(failure)
        if failure is not None:
            raise failure
        return summary

    async def _drive(self) -> None:
        with self._ended_by_ctrl_c():
            await self._run()

    async def _run(self) -> None:
        setup = self._setup
        summary = self._summary if self._prior is None else self._prior
        listeners: list[AnyListener] = [self._log, summary]
        if self._shown is not None:
            listeners += self._shown.listeners
        if self._exported and self._figures not in listeners:
            listeners.append(self._figures)
        listeners += self._exported
        self._scheduler = RolloutScheduler(
            setup.fleet,
            setup.prompts,
            # Otherwise single samples would wait for the rewards of their siblings.
            reward=_unscored if setup.config.delivery == "samples" else None,
            config=setup.config,
            planner=setup.planner,
            listeners=listeners,
            run_id=setup.run_id,
            store=self._store,
        )
        async with self._scheduler as rollouts:
            before = await self._begin(rollouts.state)
            if not rollouts.state.fleet.control.engines and setup.publisher is not None:
                # Restarted engines do not have the version of the resumed run.
                await rollouts.update_weights(setup.publisher, version=rollouts.version)
            async with self._sampler:
                await self._train(rollouts, before)

    async def _train(self, rollouts: RolloutScheduler, before: int) -> None:
        """Take and acknowledge batches as a trainer does, starting after the first `before`."""
        setup, settings = self._setup, self._setup.settings
        for done in range(before + 1, settings.batches + 1):
            try:
                await self._step(rollouts)
            except PromptsExhausted as end:
                self._end = end
                return
            if setup.publisher is not None and done % settings.updates_every == 0:
                await rollouts.update_weights(setup.publisher)

    async def _step(self, rollouts: RolloutScheduler) -> None:
        """Take a batch, train on it, and acknowledge it."""
        settings = self._setup.settings
        taken: Batch | None = None
        if settings.streamed:
            unit_seconds = settings.train_seconds / self._setup.config.batch_units
            async for taken in rollouts.stream():
                if unit_seconds:
                    await asyncio.sleep(unit_seconds * len(taken.units))
        else:
            taken = await rollouts.next_batch()
            if settings.train_seconds:
                await asyncio.sleep(settings.train_seconds)
        if taken is not None:
            taken.acknowledge()

    async def _begin(self, state: SchedulerState) -> int:
        """Create the folder, start the log, and return the number of earlier batches."""
        settings, before = self._setup.settings, 0
        if self._prior is not None:
            before = await self._prior.show(state, inline=self._setup.clock == "virtual")
            if before >= settings.batches and self._folder.ended:
                raise ConfigError(
                    f"{self._folder.path} has all its {before} batches; give more with --batches."
                )
        self._figures.count_with(state.in_flight.counters, state.in_flight.ledger)
        if self._shown is not None:
            self._shown.start(state.in_flight.counters, state.in_flight.ledger, batches=before)
        self._folder.create(as_toml(settings))
        self._log.start(batches=state.in_flight.counters.batches)
        return before

    @contextmanager
    def _ended_by_ctrl_c(self) -> Generator[None]:
        """Let Ctrl-C cancel the run, which then cleans up.

        A KeyboardInterrupt could interrupt the loop anywhere, even during the clean-up.
        """
        loop, run = asyncio.get_running_loop(), asyncio.current_task()
        # A job that a shell starts in the background ignores Ctrl-C, and this must stay so.
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if run is None or ignored or threading.current_thread() is not threading.main_thread():
            yield
            return

        def end() -> None:
            self._interrupted = True
            run.cancel()

        loop.add_signal_handler(signal.SIGINT, end)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    def _finish(self, failure: AprilschedError | None) -> RunSummary:
        self._log.close()
        summary = self._summary.result(
            self._remainder(),
            clock=self._setup.clock,
            interrupted=self._interrupted,
            error=self._shortfall() if failure is None else str(failure),
            event_log_error=self._log.error,
        )
        self._folder.write_summary(summary)
        return summary

    def _shortfall(self) -> str | None:
        """Return the reason for fewer batches than requested, or None if it is not a failure.

        A file of prompts may end before the requested number of batches. This is not a failure if
        at least one batch was delivered and the failed groups could not have filled the missing
        ones.
        """
        end, asked = self._end, self._setup.settings.batches
        if end is None or self._scheduler is None or self._interrupted:
            return None
        if not end.delivered:
            return "no batch was delivered, because there are no prompts; give some."
        config, summary = self._setup.config, self._summary
        samples = config.delivery == "samples"
        missing = asked * config.batch_units - (summary.rollouts if samples else summary.groups)
        if end.failed * config.batch_units / config.batch_groups < missing:
            return None
        many = "1 group" if end.failed == 1 else f"{end.failed} groups"
        return (
            f"{self._scheduler.state.in_flight.counters.batches} of {asked} batches were "
            f"delivered, because {many} failed, most often because "
            f"{next(iter(end.causes)).rstrip('.')}; correct that, or give more prompts."
        )

    def _remainder(self) -> Remainder:
        if self._scheduler is None:
            raise AssertionError("the folder is made inside the scheduler's block")
        return remainder(self._scheduler.state)


class PriorRun:
    """Replays the part of a resumed run that an earlier process wrote to `folder`, and then passes
    the facts of the new part to `summary`.

    A process that resumes a run has a new clock. Its facts are shifted so that they continue from
    the end of the prior run, without the time between the two processes. They are buffered until
    :meth:`show` has replayed the prior part.
    """

    def __init__(self, folder: Path, summary: Summary) -> None:
        self._folder = folder
        self._summary = summary
        self._held: list[tuple[Sequence[Fact], float]] = []
        self._end: float | None = None
        """Seconds from the start of the run to the end of the prior run; None before `show`."""
        self._first: float | None = None
        """The time of the first forwarded fact, on the clock of this process."""

    async def show(self, state: SchedulerState, *, inline: bool) -> int:
        """Replay the prior part to the summary; return the number of batches the trainer had.

        Args:
            state: state of the scheduler, already restored.
            inline: replay in this thread; otherwise a virtual clock would advance during the
                replay.

        Raises:
            RunFolderError: if nothing was saved, or if the log cannot be read.
        """
        if not state.restored:
            raise RunFolderError(
                f"{self._folder} has nothing saved that could be resumed; start a new run with "
                f"--config {self._folder / CONFIG}."
            )
        batches = state.in_flight.counters.batches
        self._end = (
            self._replay(batches) if inline else await asyncio.to_thread(self._replay, batches)
        )
        held, self._held = self._held, []
        for facts, now in held:
            self.on_facts(facts, now)
        return batches - len(state.delivery.redelivery)

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        if self._end is None:
            self._held.append((facts, now))
            return
        if self._first is None:
            self._first = now
        self._summary.on_facts(facts, now - self._first + self._end)

    def _replay(self, batches: int) -> float:
        with readable(self._folder):
            return replay(self._folder / EVENTS, [self._summary], batches=batches)


def _unscored(_: Rollout, __: Prompt) -> float:
    """Return 0, the reward of every rollout of a run that trains nothing."""
    return 0.0


def _sampler(setup: Setup, folder: RunFolder, log: EventLog) -> AbstractAsyncContextManager[object]:
    """Samples engines and GPUs on the clock of `log`; does nothing if the settings say so.

    Raises:
        ConfigError: if the GPUs are to be sampled and cannot be.
    """
    settings, virtual = setup.settings, setup.clock == "virtual"
    if not settings.sample:
        return nullcontext()
    wanted = {"auto": None, "on": True, "off": False}[settings.gpu]
    return Sampler(
        folder.samples,
        setup.fleet,
        interval=settings.sample,
        # A GPU does not run on a virtual clock.
        gpu=False if virtual else wanted,
        clock=log.seconds,
        patient=virtual,
    )
