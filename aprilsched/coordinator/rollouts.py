"""RolloutScheduler: what a trainer calls."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterable, Iterable, Sequence
from types import TracebackType
from typing import Literal, Self, cast

from aprilsched.config import SchedulerConfig
from aprilsched.coordinator.attempts import Attempts
from aprilsched.coordinator.callbacks import Accept, Episode, GroupReward, Reward
from aprilsched.coordinator.closing import release
from aprilsched.coordinator.controls import EngineControls, RefitReport
from aprilsched.coordinator.loop import EventLoop
from aprilsched.coordinator.opening import check_engines
from aprilsched.coordinator.prompts import PromptSource, checked
from aprilsched.coordinator.tasks import Tasks
from aprilsched.coordinator.waits import Waits
from aprilsched.coordinator.work import Work
from aprilsched.core import commands as do
from aprilsched.core import events as ev
from aprilsched.core.scheduler import Scheduler
from aprilsched.core.state import SchedulerState
from aprilsched.engines.base import Engine, Fleet
from aprilsched.errors import (
    ConfigError,
    FleetLost,
    PromptsExhausted,
    RefitError,
    RunGivenUp,
    SchedulerClosed,
)
from aprilsched.telemetry.base import Listener
from aprilsched.types import Batch, Prompt
from aprilsched.weights.base import WeightPublisher

__all__ = ["RolloutScheduler"]

log = logging.getLogger("aprilsched")


class RolloutScheduler:
    """Keeps a fleet of engines full and hands over batches of whole groups.

    Use it as ``async with RolloutScheduler(...) as rollouts``. Inside, ``async for batch in
    rollouts`` or :meth:`next_batch` give batches, :meth:`update_weights` brings a new policy
    version in, :meth:`evaluate` runs a set of prompts to its end.

    Args:
        fleet: the engines; opened and closed with the scheduler.
        prompts: any iterable or async iterable of :class:`~aprilsched.types.Prompt`; when it
            ends, what is in flight is finished and delivered, the last batch perhaps smaller.
        reward: scores a rollout (or a group, see `reward_scope`); plain functions run in
            threads, coroutines on the loop, both beside generation.
        reward_scope: "rollout": ``reward(rollout, prompt)``; "group": ``reward(group)`` gives
            one score for each rollout.
        accept: ``accept(group)`` keeps or rejects a scored group; rejected ones are replaced.
        episode: ``async episode(turn, prompt)`` drives a rollout of several turns.
        config: how to schedule.
        listeners: see every event and command (telemetry).
        run_id: prefix of the request ids; random unless given.

    Raises:
        ConfigError: for settings, prompts or engines that cannot work, before anything is
            launched.
    """

    def __init__(
        self,
        fleet: Fleet,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        *,
        reward: Reward | GroupReward | None = None,
        reward_scope: Literal["rollout", "group"] = "rollout",
        accept: Accept | None = None,
        episode: Episode | None = None,
        config: SchedulerConfig | None = None,
        listeners: Sequence[Listener] = (),
        run_id: str | None = None,
    ) -> None:
        self.config = config or SchedulerConfig()
        self._fleet = fleet
        self._engines: dict[str, Engine] = {}
        rules = self.config.rules(
            reward_scope=reward_scope if reward is not None else "none",
            accepts=accept is not None,
            episodes=episode is not None,
        )
        self._loop = EventLoop(Scheduler(rules), listeners)
        self._waits = Waits()
        per_group = reward_scope == "group"
        self._work = Work(
            prompts=PromptSource(prompts, group_size=self.config.group_size),
            reward=None if per_group else cast("Reward | None", reward),
            group_reward=cast("GroupReward | None", reward) if per_group else None,
            accept=accept,
            episode=episode,
            feed=self._feed,
        )
        self._attempts = Attempts(
            run_id=run_id or uuid.uuid4().hex[:12],
            engines=self._engines,
            feed=self._feed,
            may_send=self.state.control.runs,
            rate=self.config.dispatch_rate,
        )
        self._controls = EngineControls(
            engines=self._engines,
            feed=self._feed,
            call_timeout_s=self.config.control_timeout_s,
            refit_timeout_s=self.config.refit_timeout_s,
        )
        self._stopping = asyncio.Event()
        self._main: asyncio.Task[None] | None = None
        self._evaluations = 0
        self._update_lock = asyncio.Lock()
        self._wire()

    # --- lifetime ------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._main is not None:
            raise SchedulerClosed("a RolloutScheduler is opened once; make a new one.")
        await self._fleet.open()
        try:
            self._engines.update((engine.name, engine) for engine in self._fleet.engines)
            opened = await check_engines(self._fleet.engines, self.config)
        except BaseException:
            await self._fleet.close()
            raise
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._main = asyncio.create_task(self._run(opened, ready), name="aprilsched")
        await ready
        self._waits.raise_failure()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop from any state: requests aborted, every engine continued, nothing left running."""
        if self._main is None:
            return
        self._stopping.set()
        # A second Ctrl-C cancels this wait; the clean-up below it is bounded and goes on.
        await asyncio.shield(asyncio.gather(self._main, return_exceptions=True))

    async def _run(self, opened: ev.Opened, ready: asyncio.Future[None]) -> None:
        """Own every task of the scheduler from open to close."""
        released = False
        try:
            async with asyncio.TaskGroup() as group:
                tasks = Tasks(group)
                for part in (self._attempts, self._controls, self._work):
                    part.start(tasks)
                self._feed(opened)
                ready.set_result(None)
                await self._stopping.wait()
                self._loop.stop()
                # A pause that is on its way must not arrive after the continue.
                tasks.cancel_kind("control")
                await asyncio.sleep(0)
                await release(self._attempts, self._engines, self.state)
                released = True
                tasks.cancel_all()
        except BaseExceptionGroup as errors:
            # One bug or one bad prompt is what happened; the group is only how it travelled.
            error = _first(errors)
            log.error("the scheduler stopped: %r", error)
            self._waits.fail(error)
        finally:
            self._loop.stop()
            if not released:
                await release(self._attempts, self._engines, self.state)
            closed = SchedulerClosed("the scheduler was closed while it was waited for.")
            self._waits.fail(closed)
            if not ready.done():
                ready.set_exception(closed)
            self._work.close()
            await self._fleet.close()

    def _wire(self) -> None:
        work, attempts, controls, waits = self._work, self._attempts, self._controls, self._waits
        self._loop.performers.update(
            {
                do.FetchPrompts: work.fetch,
                do.StartEpisode: work.start_episode,
                do.ResolveTurn: work.resolve_turn,
                do.Score: work.score,
                do.ScoreGroup: work.score_group,
                do.Judge: work.judge,
                do.CancelWork: work.cancel,
                do.GiveUp: self._give_up,
                do.Send: attempts.send,
                do.Abort: attempts.abort,
                do.Pause: controls.pause,
                do.Flush: controls.flush,
                do.Refit: controls.refit,
                do.Continue: controls.resume,
                do.LoseEngine: self._lose_engine,
                do.FinishUpdate: waits.finish_update,
                do.Deliver: waits.deliver,
                do.EndOfPrompts: waits.end,
                do.DeliverEvaluation: waits.deliver_evaluation,
            }
        )

    def _feed(self, event: ev.Event) -> None:
        self._loop.feed(event)

    @property
    def state(self) -> SchedulerState:
        """What the scheduler knows, to look at (telemetry, tests); only the core changes it."""
        return self._loop.core.state

    def _lose_engine(self, command: do.LoseEngine) -> None:
        log.error("engine %s is out of use: %s", command.engine, command.cause)
        self._attempts.abandon(command.engine)
        self._controls.release(command)
        if command.last:
            self._waits.fail(
                FleetLost(f"no engine is left; the last was {command.engine}: {command.cause}")
            )

    def _give_up(self, command: do.GiveUp) -> None:
        self._waits.fail(
            RunGivenUp(
                f"{command.groups} groups in a row failed and none was accepted, the last because "
                f"{command.cause}; mend that, or raise max_failed_groups."
            )
        )

    def _check_open(self) -> None:
        self._waits.raise_failure()
        if self._main is None or self._stopping.is_set():
            raise SchedulerClosed("use the scheduler inside its `async with` block.")

    # --- batches -------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The trainer's policy version, which every engine in use has."""
        return self.state.tracker.trainer

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        try:
            return await self.next_batch()
        except PromptsExhausted:
            raise StopAsyncIteration from None

    async def next_batch(self) -> Batch:
        """Wait for the next batch. A cancelled wait loses nothing.

        Raises:
            PromptsExhausted: when the prompts have ended and everything was delivered.
            FleetLost: when no engine is left.
            RunGivenUp: when `max_failed_groups` groups in a row failed.
            SchedulerClosed: outside of the ``async with`` block.
        """
        self._check_open()
        if self._waits.batch_wanted:
            raise ConfigError("next_batch() is waited for already; one trainer takes batches.")
        if self._waits.kept is not None:
            batch, self._waits.kept = self._waits.kept, None
            return batch
        future = self._waits.for_batch()
        self._feed(ev.BatchRequested())
        try:
            result = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._waits.kept = future.result()
            else:
                self._feed(ev.BatchWithdrawn())
            raise
        if result is None:
            raise PromptsExhausted("the prompts have ended and everything was delivered.")
        return result

    async def evaluate(self, prompts: Iterable[Prompt], *, group_size: int = 1) -> Batch:
        """Run `prompts` to their end on the same engines, under one version.

        Neither over-provisioned nor carried; an update waits for it. Groups come in the order of
        the prompts; those that failed are missing and in the ledger.

        Raises:
            ConfigError: if there is no prompt or one cannot be used.
        """
        self._check_open()
        chosen = tuple(checked(prompt, group_size) for prompt in prompts)
        if not chosen:
            raise ConfigError("evaluate() got no prompts; give at least one.")
        self._evaluations += 1
        future = self._waits.for_evaluation(self._evaluations)
        self._feed(
            ev.EvaluationRequested(
                evaluation_id=self._evaluations, prompts=chosen, group_size=group_size
            )
        )
        return await future

    # --- weights -------------------------------------------------------------------------------

    async def update_weights(
        self, publisher: WeightPublisher, *, version: int | None = None
    ) -> RefitReport:
        """Bring the trainer's new weights into every engine: pause, refit, verify, continue.

        A cancelled call leaves nothing behind: the update runs to its end and the engines go on.

        Args:
            publisher: moves the weights.
            version: its number; one more than the last unless given.

        Raises:
            RefitError: if no engine took the version; generation goes on under the old one.
            ConfigError: if `version` is not newer than the one in use.
        """
        self._check_open()
        started = asyncio.get_running_loop().time()
        async with self._update_lock:
            await self._previous_update()
            new = self.version + 1 if version is None else version
            if new <= self.version:
                raise ConfigError(
                    f"version {new} is not newer than {self.version}, which is in use; give a "
                    "larger number."
                )
            await publisher.prepare(new)
            self._check_open()
            self._controls.publisher = publisher
            future = self._waits.for_update()
            self._feed(ev.UpdateRequested(version=new))
            result = await asyncio.shield(future)
        if result.cause:
            raise RefitError(
                f"version {new} reached no engine, so generation goes on under {self.version}: "
                f"{result.cause}"
            ) from self._controls.failure
        return RefitReport(
            version=new,
            quarantined=dict(result.failed),
            seconds=asyncio.get_running_loop().time() - started,
        )

    async def _previous_update(self) -> None:
        """An update whose caller was cancelled still runs; two at once would mix their weights."""
        previous = self._waits.update
        if previous is not None and not previous.done():
            await asyncio.wait([previous])


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return error  # pyright: ignore[reportUnknownVariableType]
