"""One scheduler of a trial, from its creation to its close."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from aprilsched import RolloutScheduler
from aprilsched.errors import ConfigError
from tests.campaign.calls import PATIENCE_S, Calls, Hang
from tests.campaign.checks import Checks
from tests.campaign.disturbing import Disturber, Moments
from tests.campaign.evaluating import Evaluations
from tests.campaign.mix import Mix
from tests.campaign.prompts import Source
from tests.campaign.publishing import ChaosAdapters, ChaosPlanner, ChaosPublisher
from tests.campaign.store import ChaosStore
from tests.campaign.trainer import Trainer

if TYPE_CHECKING:
    from tests.campaign.trial import Trial


class Life:
    """A process of the trainer: it opens a scheduler, trains, and ends or is killed."""

    def __init__(self, trial: Trial, mix: Mix, number: int, *, last: bool) -> None:
        self.trial = trial
        self.mix = mix
        self.last = last
        self.number = number
        self.draw = mix.draw(f"trainer {number}")
        self.note = trial.history.note
        self.complain = trial.complain
        self.checks = Checks(mix, trial.records, trial.complain)
        self.store: ChaosStore | None = None
        self.scheduler: RolloutScheduler
        self.source: Source
        adapters = mix.has("adapters")
        self.publisher = (ChaosAdapters if adapters else ChaosPublisher)(mix, trial.callers)
        self.closing = False
        self.trainer = Trainer(self)
        self.evaluations = Evaluations(self)
        self.disturber = Disturber(self)
        self.calls = Calls(self)
        self.helpers: set[asyncio.Task[Any]] = set()
        self.ended = ""

    async def live(self) -> str:
        """Live to the end, and return how it ended.

        Raises:
            Hang: if a call does not return.
        """
        self._make()
        before = set(asyncio.all_tasks())
        if (refused := await self._open()) is not None:
            return refused
        chaos = [self.help(self.disturber.run())]
        if self.mix.has("evaluations"):
            chaos.append(self.help(self.evaluations.run()))
        trainer = asyncio.create_task(self.trainer.train())
        try:
            await self._train(trainer)
        finally:
            self.closing = True
            for task in chaos:
                task.cancel()
        paused = self._killed() if self.ended == "killed" else {}
        await self.calls.cancel(trainer)
        self.trial.fleet.usual_speed()
        self.trial.fleet.restart_the_dead()
        await self.calls.call("close", self.scheduler.close())
        for helper in list(self.helpers):
            await self.calls.cancel(helper)
        await self._check_the_end(before, paused)
        return self.ended

    async def _train(self, trainer: asyncio.Task[str]) -> None:
        limit = self.draw.choice([1.0, 5.0, 30.0, 200.0]) * self.draw.random()
        if self.mix.has("kills") and not self.last:
            done, _ = await asyncio.wait([trainer], timeout=limit)
            if not done:
                self.ended = "killed"
                return
        elif self.mix.has("close") and self.draw.random() < 0.7:
            done, _ = await asyncio.wait([trainer], timeout=limit)
            if not done:
                self.ended = "closed"
                self.note("CHAOS close() is called while the trainer works")
                await self.calls.call("close", self.scheduler.close())
        done, _ = await asyncio.wait([trainer], timeout=30 * PATIENCE_S)
        if not done:
            raise Hang("the trainer does not end")
        ended = trainer.result()  # or a Hang
        self.ended = self.ended or ended

    def _make(self) -> None:
        trial, mix, callers = self.trial, self.mix, self.trial.callers
        self.source = Source(self)
        if trial.inner is not None:
            self.store = ChaosStore(trial.inner, self)
            self.store.on_saved.append(self._saved)
            self.trainer.may_acknowledge |= trial.records.acknowledged
        rewards = {"none": None, "rollout": callers.reward(), "group": callers.group_reward()}
        self.scheduler = RolloutScheduler(
            trial.fleet,
            self.source(),
            config=mix.config(),
            reward=rewards[mix.reward],
            reward_scope="group" if mix.reward == "group" else "rollout",
            accept=callers.accept() if mix.accepts else None,
            episode=callers.episode() if mix.episodes else None,
            planner=ChaosPlanner(mix),
            listeners=[trial.history, self.checks, Moments(self)],
            run_id=f"chaos{self.number}",
            store=self.store,
        )
        self.checks.state = self.scheduler.state

    def _saved(self) -> None:
        for batch in self.trial.records.batches.values():
            batch.secured = True

    async def _open(self) -> str | None:
        """Open the scheduler; return how the life ended if it has already ended."""
        trial = self.trial
        if self.number and self.mix.has("restores") and trial.checkpoints:
            path, records = self.draw.choice(trial.checkpoints)
            self.note(f"restore({path.name})")
            trial.records = self.checks.records = records.copy()
            trial.records.expected = trial.records.batches.keys() - trial.records.acknowledged
            self.trainer.may_acknowledge = trial.records.acknowledged
            self.scheduler.restore(path)
            if self.store is not None:
                self.store.replaced = True
        try:
            await self.calls.call("open", self.scheduler.__aenter__())
        except ConfigError as error:
            # A run without a save starts on engines that may have later versions.
            if "different policy versions" not in str(error):
                self.complain(f"open() raised {error!r}")
                return "refused"
            self.note(f"{error}: all engines are restarted")
            for engine in trial.fleet.engines:
                trial.fleet.restart(engine, 0)
            self._make()
            await self.calls.call("open", self.scheduler.__aenter__())
        # Unsaved launches of a process do not count as launched.
        trial.records.launched &= self.scheduler.state.in_flight.rollouts.keys()
        if not self.scheduler.state.restored and self.number:
            self.note("nothing had been saved: the run starts from the beginning")
            trial.records.__init__()
            self.trainer.may_acknowledge.clear()
        return None

    def _killed(self) -> dict[str, Any]:
        """Kill the process: after this, only its connections have an effect."""
        self.note("CHAOS the process is killed")
        if self.store is not None:
            self.store.dead = True
        self.trial.records.killed()
        engines = self.trial.fleet.engines
        return {e.name: e.batcher.paused for e in engines if e.batcher.paused is not None}

    def help(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task that ends with this life."""
        task = asyncio.create_task(work)
        self.helpers.add(task)
        task.add_done_callback(self.helpers.discard)
        return task

    def failed(self) -> bool:
        """Return whether the run has ended with an error, which every call now raises."""
        try:
            self.scheduler._session.check_open()
        except BaseException:
            return True
        return False

    async def _check_the_end(self, before: set[Any], paused: dict[str, Any]) -> None:
        trial, state = self.trial, self.scheduler.state
        # The engines outlive the scheduler: requests that it left on them continue.
        await trial.fleet.open()
        for engine in trial.fleet.all:
            await engine.open()
        await asyncio.sleep(30.0)
        left = [t for t in asyncio.all_tasks() - before if t is not asyncio.current_task()]
        if left := [task for task in left if not task.done()]:
            self.complain(f"tasks are left after close(): {left}")
        if trial.threads.open:
            self.complain(f"{trial.threads.open} pieces of work are left in threads")
        for complaint in await trial.fleet.left_on_engines():
            self.complain(complaint)
        if not self.ended.startswith("killed"):
            self.trainer.end_parts()
            self.checks.end(state)
            trial.records.expect_redelivery(with_store=self.store is not None)
        trial.figures += self.checks.figures
        trial.figures["lives"] += 1
        trial.figures["launched"] += state.in_flight.counters.launched
        await trial.fleet.close()
        trial.fleet.pause_again(paused)

    def in_flight(self) -> str:
        """Describe why the run is stuck, to debug a hang."""
        state = self.scheduler.state
        lines = [
            f"{state.delivery}\n{state.weights}\n{state.fleet}\n{state.prompts}"[:4000],
            *map(str, itertools.islice(state.in_flight.rollouts.values(), 20)),
            *(f"{engine.name}: {engine.batcher}" for engine in self.trial.fleet.all),
        ]
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            where = [f"{f.f_code.co_name}:{f.f_lineno}" for f in task.get_stack(limit=3)]
            lines.append(f"task {task.get_name()}: {task.get_coro()} at {where}")
        return "\n".join(line[:300] for line in lines)
