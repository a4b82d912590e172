"""One open scheduler: connects the core with the parts that carry out its commands.

Every task belongs to one task group, from open to close. Whatever ends the group (the caller, a
bug, a cancellation), the engines are released: they decode none of our requests and are not paused.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from aprilsched.errors import ConfigError, EngineTaken, SchedulerClosed, closed_meanwhile
from aprilsched.kernel.core.config import Caller, SchedulerConfig
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.messages.events import EngineInfo
from aprilsched.kernel.core.scheduler import Scheduler
from aprilsched.kernel.core.state.engine_control import Mode
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.engines.base import Engine, Fleet
from aprilsched.kernel.engines.refit import RefitElsewhere
from aprilsched.kernel.shell.attempts import Attempts
from aprilsched.kernel.shell.controls import EngineControls
from aprilsched.kernel.shell.durability import Durability
from aprilsched.kernel.shell.handback import HandBack
from aprilsched.kernel.shell.listener import AnyListener
from aprilsched.kernel.shell.loop import EventLoop
from aprilsched.kernel.shell.membership import Membership, Readmission
from aprilsched.kernel.shell.opening import check_engines, join_run, keep_labels
from aprilsched.kernel.shell.outages import (
    fleet_lost,
    report_busy,
    report_outage,
    report_slow,
    wants_update,
)
from aprilsched.kernel.shell.planning import Planning
from aprilsched.kernel.shell.refits import Refits, moves_elsewhere
from aprilsched.kernel.shell.sharing import Claim, disclaim
from aprilsched.kernel.shell.step_times import StepTimes
from aprilsched.kernel.shell.tasks import Shell, Tasks
from aprilsched.kernel.shell.waits import Waits
from aprilsched.kernel.shell.watches import Claims, Watch, ask_load, ask_version
from aprilsched.kernel.shell.work import Work
from aprilsched.kernel.store.in_memory import Store
from aprilsched.kernel.weights.publisher import RepublishingPublisher
from aprilsched.planning import Planner

log = logging.getLogger("aprilsched")

_TICK_S = 1.0
"""Seconds between two ticks, which tell the core that time passes."""


class Session:
    """Makes and connects the parts of a scheduler. `work` runs the caller's functions."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        config: SchedulerConfig,
        caller: Caller,
        work: Work,
        planner: Planner,
        listeners: Sequence[AnyListener],
        run_id: str,
        store: Store | None,
    ) -> None:
        self.config = config
        self.engines: dict[str, Engine] = {}
        self.waits = Waits()
        self._fleet = fleet
        self._claim = Claim(run_id)
        self._work = work
        if config.automatic and not planner.inline:
            listeners = [*listeners, StepTimes(planner)]
        core = Scheduler(config, caller)
        self._loop = EventLoop(core, listeners, clock=_now)
        self._tasks = Tasks()
        shell = Shell(config=config, engines=self.engines, feed=self.feed, tasks=self._tasks)
        self.state.process = shell.process
        self.durability = Durability(shell, core=core, store=store, waits=self.waits, work=work)
        self.attempts = Attempts(shell, run_id=run_id, may_send=self.state.fleet.control.runs)
        self._controls = EngineControls(shell, self._end_taken)
        self.refits = Refits(
            shell,
            fleet_version=lambda: self.state.weights.versions.trainer,
            is_mine=self._controls.is_mine,
        )
        self._hand_back = HandBack(
            shell, attempts=self.attempts, controls=self._controls, refits=self.refits
        )
        self._readmission = Readmission(shell, self._hand_back, self._join_engine)
        self._membership = Membership(
            shell,
            fleet=fleet,
            readmission=self._readmission,
            hand_back=self._hand_back,
            join=self._join_engine,
        )
        knows = self.state.fleet.control.of
        self._claims = Claims(
            shell, knows=knows, taken=self._end_taken, idles=self._idles, gone=self._lose_idle
        )
        self._version_watch = Watch(shell, self._ask_version)
        self._load_watch = Watch(shell, partial(ask_load, every=config.dispatch.migrate))
        self._planning = Planning(shell, planner)
        self.weights_unknown = False
        """Whether an update was under way when the process before this one died, so that engines
        may have parts of two versions under the label of one."""
        self.weights_trusted = False
        """Whether the weights that the engines have at the start are the trainer's."""
        self._stopping = asyncio.Event()
        self._opening: asyncio.Future[None] | None = None
        self._pid = os.getpid()
        """Id of the process that opened the session."""
        self._main: asyncio.Task[None] | None = None
        self._wire()

    @property
    def state(self) -> SchedulerState:
        return self._loop.core.state

    def feed(self, event: ev.Event) -> None:
        self._loop.feed(event)

    def begin_hand_over(self) -> None:
        """Keep the offer as it is until :meth:`end_hand_over`: an update would withdraw it, and the
        trainer would train on groups that are offered again."""
        self.waits.begin_hand_over()
        if self.config.follow_weights:
            # Any event may show a version that the core follows.
            self._loop.hold()

    def end_hand_over(self, taken: ev.BatchTaken | None = None) -> None:
        """End the hand-over: the offer is taken, or stays as it is if `taken` is None."""
        self.waits.end_hand_over()
        self._loop.release(taken)

    # --- lifetime ------------------------------------------------------------------------------

    async def open(self) -> None:
        if self._main is not None or self._opening is not None:
            raise SchedulerClosed("a RolloutScheduler is opened once; make a new one.")
        self._pid = os.getpid()
        self._opening = asyncio.get_running_loop().create_future()
        try:
            await self._open()
        finally:
            self._opening.set_result(None)
            self._opening = None
        self.waits.raise_failure()

    async def _open(self) -> None:
        await self.durability.open()
        if self.state.weights.in_parts:
            self.weights_unknown = True
            log.warning(
                "the process before this one ended with an update in parts open, or failed, so no "
                "engine is used before weights are loaded"
            )
        try:
            opened = await self._open_fleet()
        except BaseException:
            await self.durability.close()
            raise
        publisher, version = self.refits.publisher, self.state.weights.versions.trainer
        held = isinstance(publisher, RepublishingPublisher) and publisher.holds(version)
        if held:
            self.refits.keep_publisher()
        opened = replace(opened, republishable=held and self.state.restored)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._main = asyncio.create_task(self._run(opened, ready), name="aprilsched")
        try:
            await ready
        except BaseException:
            # The caller whose open() fails does not call close().
            await self._end()
            raise

    async def _open_fleet(self) -> ev.Opened:
        # Claimed before it is opened: a scheduler that is refused must not close the fleet of the
        # one that uses it.
        self._claim.take(self._fleet.engines)
        try:
            await self._fleet.open()
        except BaseException:
            self._claim.give_back()
            raise
        try:
            engines, former = self._fleet.engines, self.durability.former
            self._claim.take(engines)
            self.engines.update((engine.name, engine) for engine in engines)
            if self.weights_unknown:
                for engine in engines:
                    if isinstance(engine, RefitElsewhere):
                        engine.expect_weights()
            join_run(engines, self.state.process, former, decimal=self.config.follow_weights)
            opened = await check_engines(
                engines,
                self.config,
                may_differ=self.state.restored or self.weights_unknown or self.weights_trusted,
                trusted=self.weights_trusted
                or self.weights_unknown
                or self.config.follow_weights
                or self.state.resumed,
            )
            newest = None if former is None else self.state.weights.versions.trainer
            await keep_labels(engines, opened, newest)
            return opened
        except BaseException:
            try:
                await asyncio.gather(*map(disclaim, self._fleet.engines))
                await self._fleet.close()
            finally:
                self._claim.give_back()
            raise

    async def close(self) -> None:
        # A forked process has copies of everything but owns nothing: the engines, the store and the
        # tasks belong to the process that opened them.
        if self._pid != os.getpid():
            return
        if self._opening is not None:
            self._stopping.set()
            await asyncio.wait([self._opening])
        await self._end()

    async def _end(self) -> None:
        if self._main is not None:
            self._stopping.set()
            # A second Ctrl-C cancels only this wait. The clean-up continues; its time is bounded.
            await asyncio.wait([self._main])

    def check_open(self) -> None:
        """Raise the error that ended the session, if there is one.

        Raises SchedulerClosed if the session was not opened or is closed, or if this process was
        forked from the one that opened it.
        """
        if self._main is not None and self._pid != os.getpid():
            raise forked()
        self.waits.raise_failure()
        if self._main is None or self._stopping.is_set():
            raise SchedulerClosed("use the scheduler inside its `async with` block.")

    async def _run(self, opened: ev.Opened, ready: asyncio.Future[None]) -> None:
        """Own every task of the scheduler from open to close."""
        released = False
        tasks = self._tasks
        try:
            async with asyncio.TaskGroup() as group:
                tasks.run_in(group)
                self._start()
                self.feed(opened)
                for info in opened.engines:
                    self._log_standby(info)
                ready.set_result(None)
                self._work.say_opened()
                try:
                    await self._stopping.wait()
                finally:
                    self._work.say_closed(stored=self.durability.stored)
                self._loop.stop()
                # A pause must not arrive after the last continue, and an engine must not be opened
                # again while it is being closed.
                self._controls.stop()
                self._hand_back.stop()
                tasks.cancel_kind(("readmission",))
                tasks.cancel(["membership", "heartbeat", "version watch", "load watch"])
                tasks.cancel(["claims", "pause watch"])
                tasks.cancel_kind(("claim",))
                await asyncio.sleep(0)
                await self._hand_back.release_all(self.state)
                released = True
                self._work.stop()
                tasks.cancel_all()
        except BaseExceptionGroup as errors:
            # The caller gets the first error itself; the exception group has no information.
            error = _first(errors)
            log.error("the scheduler stopped: %r", error)
            self.waits.fail(error)
        except KeyboardInterrupt:
            # asyncio has already raised it out of the event loop. If it were raised here again, it
            # would end the loop in which the caller's own tasks clean up.
            log.warning("the scheduler was interrupted and closes")
        except asyncio.CancelledError:
            self.waits.fail(SchedulerClosed("the scheduler's own task was cancelled from outside."))
            raise
        finally:
            self._loop.stop()
            if not released:
                await self._hand_back.release_all(self.state)
            closed = closed_meanwhile()
            self.waits.fail(closed)
            if not ready.done():
                ready.set_exception(closed)
            self._work.close()
            try:
                await self.durability.close()
                await asyncio.gather(*map(disclaim, self._fleet.engines))
                await self._fleet.close()
            finally:
                self._claim.give_back()

    def _start(self) -> None:
        """Start what runs for as long as the session."""
        self.attempts.start()
        self._membership.start()
        self._tasks.start("heartbeat", self._send_ticks())
        self._tasks.start("claims", self._claims.run())
        self._tasks.start("pause watch", self._controls.watch_pauses(self._judges_pauses))
        if self.config.follow_weights:
            self._tasks.start("version watch", self._version_watch.run())
        if self.config.dispatch.migrate or self.state.limits_sessions:
            self._tasks.start("load watch", self._load_watch.run())
        self._work.start(self._tasks, self.durability.saved)
        self.durability.start()

    async def _send_ticks(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.feed(ev.Tick())

    # --- commands ------------------------------------------------------------------------------

    def _wire(self) -> None:
        work, attempts, controls, waits = self._work, self.attempts, self._controls, self.waits
        self._loop.performers.update(
            {
                facts.PromptsRequested: work.fetch,
                do.StartEpisode: work.start_episode,
                do.ResolveTurn: work.resolve_turn,
                do.ScoreRollout: work.score,
                do.ScoreGroup: work.score_group,
                do.Filter: work.filter,
                facts.GroupDropped: work.cancel,
                facts.PromptRefused: work.refuse,
                do.GiveUp: self._give_up,
                do.Plan: self._planning.plan,
                do.Send: attempts.send,
                do.Abort: attempts.abort,
                do.Pause: controls.pause,
                do.Flush: controls.flush,
                do.Release: controls.release,
                do.Wake: controls.wake,
                do.Continue: controls.resume,
                do.Verify: controls.verify,
                facts.RefitBegun: self.refits.refit,
                facts.AdapterRetired: self.refits.retire,
                facts.EngineLost: self._lose_engine,
                facts.EngineAdmitted: self._admit_engine,
                facts.EngineSlow: report_slow,
                facts.EngineBusy: report_busy,
                facts.FleetAwaited: report_outage,
                facts.FleetGivenUp: lambda c: waits.fail(fleet_lost(c)),
                facts.UpdateWanted: self._want_update,
                facts.UpdateFinished: self._finish_update,
                facts.SleepBegun: waits.finish_sleep,
                facts.SleepEnded: self._end_sleep,
                do.Offer: self.durability.offer,
                do.WithdrawOffer: waits.withdraw,
                do.Deliver: self.durability.deliver,
                do.EndOfPrompts: self._end_prompts,
                do.DeliverEvaluation: waits.deliver_evaluation,
            }
        )

    async def _ask_version(self, engine: Engine) -> ev.VersionSeen:
        """Ask an engine for its version. One in use is silent if it has given no token for a
        second, or is known to be paused."""
        control = self.state.fleet.control.engines.get(engine.name)
        silent = control is not None and (
            self.state.fleet.health.of(engine.name).silence >= 1.0
            or control.paused_elsewhere is not None
        )
        return await ask_version(engine, silent=silent)

    def _judges_pauses(self) -> bool:
        """Whether an engine that another client continues has another owner: no trainer continues
        it after it has loaded weights by its own calls."""
        fleet, publisher = self.state.fleet, self.refits.publisher
        ordinary = publisher is not None and not moves_elsewhere(publisher)
        return ordinary or fleet.paused_by_trainer or fleet.sleep is not None

    def _end_taken(self, engine: str, why: str) -> None:
        """End the scheduler, because an engine that it uses has another owner."""
        if self.state.fleet.control.of(engine) is None:
            return
        self._hand_back.taken.add(engine)
        error = EngineTaken(
            engine,
            f"{why}, so another client owns it too and its weights are not certain; stop the other "
            "one, restart this one, and update the weights first.",
        )
        self._tasks.fail(error)

    def _idles(self, engine: str) -> bool:
        """Whether neither a request nor an update would show that an engine has ended."""
        control = self.state.fleet.control.of(engine)
        idle = not self.state.in_flight.open[engine] and self.state.weights.update is None
        return idle and control is not None and control.mode is Mode.RUNNING

    def _lose_idle(self, engine: str, cause: str) -> None:
        self.feed(ev.EngineLost(engine=engine, cause=cause))

    def _want_update(self, command: facts.UpdateWanted) -> None:
        error = wants_update(command.engines, command.version, command.base)
        self.waits.refuse(error, batch=command.batch, evaluations=command.evaluations)

    def _lose_engine(self, command: facts.EngineLost) -> None:
        how = "on standby until a refit reaches it" if command.standby else "out of use"
        log.error("engine %s is %s: %s", command.engine, how, command.cause)
        if command.standby:
            self.attempts.abandon(command.engine)
        else:
            self._hand_back.start(self.engines[command.engine])
        self._readmission.lost(command)

    def _join_engine(self, info: EngineInfo) -> None:
        self.feed(ev.EngineJoined(info=info))
        self._log_standby(info)

    def _log_standby(self, info: EngineInfo) -> None:
        weights = self.state.weights
        if info.name in self.state.fleet.control.standby:
            log.warning(
                "engine %s has %s and is on standby, without requests, until %s",
                info.name,
                "other weights" if info.version is None else f"version {info.version}",
                f"it has loaded version {weights.versions.trainer}"
                if weights.republishable
                else "the next update",
            )

    def _admit_engine(self, command: facts.EngineAdmitted) -> None:
        log.warning("engine %s takes part again, at version %d", command.engine, command.version)

    def _end_sleep(self, ended: facts.SleepEnded) -> None:
        self._controls.memory_is_back.set()
        self.waits.finish_sleep(ended)

    def _finish_update(self, command: facts.UpdateFinished) -> None:
        if not command.cause:
            self.refits.keep_publisher()
        else:
            old = self.state.weights.versions.trainer
            continues = self.state.fleet.control.engines
            outcome = (
                f"the fleet continues under {old}"
                if continues
                else "no engine generates before an update succeeds"
            )
            log.error("version %d is not in use, %s: %s", command.version, outcome, command.cause)
        self.durability.finish_update(command)

    def _give_up(self, command: do.GiveUp) -> None:
        error = command.error
        self.waits.fail(error if isinstance(error, ConfigError) else self._work.explain(error))

    def _end_prompts(self, command: do.EndOfPrompts) -> None:
        self.waits.refuse(self._work.explain(command.error), batch=True, evaluations=())


def forked() -> SchedulerClosed:
    """The error for a call in a process that was forked from the scheduler's."""
    return SchedulerClosed(
        "this process was forked from that of the scheduler; use the scheduler where it was opened."
    )


def _now() -> float:
    return asyncio.get_running_loop().time()


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return error  # pyright: ignore[reportUnknownVariableType]
