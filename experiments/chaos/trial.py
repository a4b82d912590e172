"""Runs one seed: a fleet, a store and a trainer that outlive several schedulers."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import tempfile
import traceback
from collections import Counter
from collections.abc import Coroutine, Iterable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from aprilsched import Batch, MemoryStore, Prompt, RolloutScheduler, SamplingParams, SqliteStore
from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev
from aprilsched.core.messages import facts
from aprilsched.engines.sim import SimEngine
from aprilsched.errors import (
    AprilschedError,
    CallbackError,
    ConfigError,
    EpisodeError,
    InvariantViolation,
    RefitError,
    RunEnded,
    SchedulerClosed,
    StoreError,
)
from aprilsched.store.in_memory import Store
from experiments.chaos.callers import (
    Callers,
    ChaosAdapters,
    ChaosPlanner,
    ChaosPublisher,
    Source,
)
from experiments.chaos.checks import Checks, Records
from experiments.chaos.clockwork import VirtualThreads
from experiments.chaos.fleet import ChaosFleet
from experiments.chaos.history import History, Outcome, recorded
from experiments.chaos.mix import Mix
from experiments.chaos.storing import ChaosStore

__all__ = ["run"]

PATIENCE_S = 2 * 3600.0
"""Of virtual time: a call that takes longer hangs. Everything in the mix ends within 20 minutes."""
DRY_S = 900.0
"""Without a prompt for so long, the trainer ends its life."""


class Hang(Exception):
    """A call does not come back."""


class Killed(BaseException):
    """The trainer's process is killed."""


def run(mix: Mix, *, aloud: bool = False, lines: int = 200) -> Outcome:
    """Run a seed. Complaints are in the outcome; nothing is raised."""
    outcome = Outcome(mix.seed, kinds=sorted(mix.kinds), settings=mix.described())
    history = History(aloud=aloud)
    random.seed(mix.seed)
    with tempfile.TemporaryDirectory() as folder:
        trial = _Trial(mix, outcome, history, Path(folder))
        return recorded(outcome, history, trial.execute(), lines=lines)


class _Trial:
    """The run of one seed, over all its lives."""

    def __init__(self, mix: Mix, outcome: Outcome, history: History, folder: Path) -> None:
        self.mix = mix
        self.outcome = outcome
        self.history = history
        self.folder = folder
        self.records = Records()
        self.callers = Callers(mix)
        self.broken: set[int] = set()
        self.inner: Store | None = None
        self.checkpoints: list[tuple[Path, Records]] = []
        self.figures: Counter[str] = Counter()
        self.fleet: ChaosFleet
        self.threads: VirtualThreads | None = None
        self.taken = 0
        """Batches over all lives."""

    def complain(self, text: str) -> None:
        if len(self.outcome.complaints) < 20:
            self.history.note(f"COMPLAINT {text}")
            self.outcome.complaints.append(text)

    async def execute(self) -> None:
        mix, loop = self.mix, asyncio.get_running_loop()
        loop.set_exception_handler(self._unhandled)
        if not mix.real_threads:
            seconds = mix.draw("threads")
            self.threads = VirtualThreads(lambda name: self._thread_seconds(name, seconds))
            self.threads.install(loop)
        if mix.store == "memory":
            self.inner = MemoryStore()
        elif mix.store == "sqlite":
            self.inner = SqliteStore(self.folder / "store", inline=mix.inline_store)
        self.fleet = ChaosFleet(
            mix.engines,
            mix.machine,
            self.history,
            refit_seconds=mix.refit_seconds,
            pause_seconds=mix.pause_seconds,
        )
        for number in range(mix.lives):
            of_life = mix if number == 0 else mix.of_next_life(number)
            life = _Life(self, of_life, number, last=number == mix.lives - 1)
            self.history.note(f"LIFE {number} begins: {_short(of_life)}")
            try:
                ended = await life.live()
            except Hang as error:
                ended = "hangs"
                self.complain(f"{error}\n{life.in_flight()}")
                self.outcome.ending.append(ended)
                break
            self.outcome.ending.append(ended)
            self.history.note(f"LIFE {number} ended: {ended}")
            if self.inner is None or ended in ("exhausted", "done"):
                break
        self.outcome.seconds = loop.time()
        self.outcome.figures = dict(self.figures)
        del loop
        gc.collect()

    def _thread_seconds(self, name: str, draw: random.Random) -> float:
        if "store" in name:
            if self.mix.has("slow_store"):
                return draw.choice([0.05, 0.4, 2.0]) * draw.random()
            return 0.01 * draw.random()
        return draw.choice([0.0, 0.01, 0.5]) * draw.random()

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        own = error is not None and id(error) in self.callers.raised
        if own or isinstance(error, EpisodeError):
            where = context.get("message", "")
            if "never retrieved" in where:
                return  # of a task of the caller's own
        self.complain(f"the event loop was told: {context.get('message')} {error!r}")


def _short(mix: Mix) -> str:
    kinds = ",".join(sorted(mix.kinds))
    return (
        f"{mix.engines} engines, store {mix.store}{' inline' if mix.inline_store else ''}, "
        f"reward {mix.reward}{' plain' if mix.plain else ''}, accept {mix.accepts}, "
        f"episodes {mix.episodes}, kinds {kinds}, {mix.settings}"
    )


class _Life:
    """One scheduler, from its making to its close."""

    def __init__(self, trial: _Trial, mix: Mix, number: int, *, last: bool) -> None:
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
        self.updating = 0
        self.closing = False
        self.may_acknowledge: set[int] = set()
        self.since_update = 0
        self.parts: list[Batch] = []
        """Groups that the trainer has of a batch that is not whole yet."""
        self.helpers: set[asyncio.Task[Any]] = set()
        self.chaos_draw = mix.draw(f"chaos {number}")
        self.ended = ""

    # --- from begin to end -----------------------------------------------------------------------

    async def live(self) -> str:
        trial = self.trial
        self._make()
        before = set(asyncio.all_tasks())
        try:
            opened = await self._open()
        except Hang:
            raise
        if opened is not None:
            return opened
        chaos = self._help(self._chaos())
        evaluating = (
            self._help(self._evaluate_now_and_then()) if self.mix.has("evaluations") else None
        )
        trainer = asyncio.create_task(self._train())
        kills = self.mix.has("kills") and not self.last
        try:
            limit = self.draw.choice([1.0, 5.0, 30.0, 200.0]) * self.draw.random()
            if kills:
                done, _ = await asyncio.wait([trainer], timeout=limit)
                if not done:
                    self.ended = "killed"
            elif self.mix.has("close") and self.draw.random() < 0.7:
                done, _ = await asyncio.wait([trainer], timeout=limit)
                if not done:
                    self.ended = "closed"
                    self.note("CHAOS close() is called while the trainer works")
                    await self._close()
            if self.ended != "killed":
                done, _ = await asyncio.wait([trainer], timeout=30 * PATIENCE_S)
                if not done:
                    raise Hang("the trainer does not end")
                ended = trainer.result()  # or a Hang
                self.ended = self.ended or ended
        finally:
            self.closing = True
            for task in (chaos, evaluating):
                if task is not None:
                    task.cancel()
        paused = self._killed() if self.ended == "killed" else {}
        await self._cancel(trainer)
        trial.fleet.usual_speed()
        self._restart_the_dead()
        await self._close()
        for helper in list(self.helpers):
            await self._cancel(helper)
        await self._check_the_end(before, paused)
        return self.ended

    def _make(self) -> None:
        trial, mix = self.trial, self.mix
        self.source = Source(
            mix,
            trial.callers,
            group_size=mix.settings["group_size"],
            broken=trial.broken,
            note=self.note,
        )
        if trial.inner is not None:
            self.store = ChaosStore(
                trial.inner,
                inline=mix.inline_store,
                failing=0.05 if mix.has("failing_store") else 0.0,
                draw=mix.draw(f"store {self.number}"),
                given=lambda: self.may_acknowledge,
                complain=self.complain,
                note=self.note,
            )
            self.store.on_saved.append(self._saved)
            self.may_acknowledge |= {i for i, b in trial.records.batches.items() if b.acknowledged}
        callers = trial.callers
        reward: Any = None
        if mix.reward == "rollout":
            reward = callers.reward()
        elif mix.reward == "group":
            reward = callers.group_reward()
        self.scheduler = RolloutScheduler(
            trial.fleet,
            self.source(),
            config=mix.config(),
            reward=reward,
            reward_scope="group" if mix.reward == "group" else "rollout",
            accept=callers.accept() if mix.accepts else None,
            episode=callers.episode() if mix.episodes else None,
            planner=ChaosPlanner(mix),
            listeners=[trial.history, self.checks, _Moments(self)],
            run_id=f"chaos{self.number}",
            store=self.store,
        )
        self.checks.state = self.scheduler.state

    def _saved(self) -> None:
        for batch in self.trial.records.batches.values():
            batch.secured = True

    async def _open(self) -> str | None:
        """Open the scheduler; how the life ended if it did already."""
        trial = self.trial
        if self.number and self.mix.has("restores") and trial.checkpoints:
            path, records = self.draw.choice(trial.checkpoints)
            self.note(f"restore({path.name})")
            trial.records = self.checks.records = records.copy()
            trial.records.expected = {
                i for i, b in trial.records.batches.items() if not b.acknowledged
            }
            self.may_acknowledge = {i for i, b in trial.records.batches.items() if b.acknowledged}
            self.scheduler.restore(path)
            if self.store is not None:
                self.store.replaced = True
        try:
            await self._call("open", self.scheduler.__aenter__())
        except ConfigError as error:
            # A run that nothing was saved of begins on engines that were brought further.
            if "different policy versions" not in str(error):
                self.complain(f"open() raised {error!r}")
                return "refused"
            self.note(f"{error}: all engines are restarted")
            for engine in trial.fleet.engines:
                trial.fleet.restart(engine, 0)
            self._make()
            await self._call("open", self.scheduler.__aenter__())
        # What a process launched and never saved was never launched.
        launched, groups = trial.records.launched, self.scheduler.state.in_flight.groups
        trial.records.launched = {gid: key for gid, key in launched.items() if gid in groups}
        if not self.scheduler.state.resumed and self.number:
            self.note("nothing had been saved: the run begins from the start")
            trial.records.__init__()
            self.may_acknowledge.clear()
        return None

    def _killed(self) -> dict[str, Any]:
        """Nothing that this process does from now on has an effect, but on its connections."""
        self.note("CHAOS the process is killed")
        if self.store is not None:
            self.store.dead = True
        self.trial.records.killed()
        return {
            engine.name: engine.batcher.paused
            for engine in self.trial.fleet.engines
            if engine.batcher.paused is not None
        }

    async def _close(self) -> None:
        await self._call("close", self.scheduler.close())

    async def _cancel(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=PATIENCE_S)
        if not done:
            raise Hang(f"{task} ignores its cancellation")
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, Hang):
                raise error
            if not isinstance(error, (AprilschedError, asyncio.CancelledError)):
                self.complain(f"{task.get_name()} ended with {error!r}")

    def _restart_the_dead(self) -> None:
        for engine in self.trial.fleet.all:
            if engine.name in self.trial.fleet.down:
                self.trial.fleet._begin(engine, engine.batcher.version)

    async def _check_the_end(self, before: set[Any], paused: dict[str, Any]) -> None:
        trial, state = self.trial, self.scheduler.state
        # The engines outlive the scheduler: whatever is left on them goes on there.
        await trial.fleet.open()
        for engine in trial.fleet.all:
            await engine.open()
        await asyncio.sleep(30.0)
        left = [
            t for t in asyncio.all_tasks() if t not in before and t is not asyncio.current_task()
        ]
        left = [t for t in left if not t.done()]
        if left:
            self.complain(f"tasks are left after close(): {left}")
        if trial.threads is not None and trial.threads.open:
            self.complain(f"{trial.threads.open} pieces of work are left in threads")
        for engine in trial.fleet.all:
            inside = engine.batcher
            if inside.paused is not None:
                self.complain(f"{engine.name} is left paused ({inside.paused})")
            if lent := await engine.released():
                self.complain(f"{engine.name} is left without its {sorted(lent)}")
            if inside.running or inside.waiting:
                self.complain(
                    f"{engine.name} has {inside.running} running and {inside.waiting} waiting "
                    "requests after close()"
                )
        kept = getattr(self.scheduler._session.waits, "kept", None)  # pyright: ignore[reportPrivateUsage]
        if not self.ended.startswith("killed"):
            self._end_parts()
            self.checks.end(state, [kept] if isinstance(kept, Batch) else [])
            trial.records.expected = {
                i
                for i, b in trial.records.batches.items()
                if not b.acknowledged and (b.secured or self.store is None)
            }
        for name in ("rollouts", "tokens", "inexact", "content_checked", "evaluations"):
            trial.figures[name] += getattr(self.checks, name)
        if self.mix.companions:
            trial.figures["rows"] += self.checks.rows
            trial.figures["rows_of_another_pass"] += self.checks.rows_of_another_pass
        trial.figures["lives"] += 1
        trial.figures["launched"] += state.in_flight.counters.launched
        await trial.fleet.close()
        for engine in trial.fleet.all:
            if engine.batcher.paused is not None and engine not in trial.fleet.engines:
                trial.fleet.down.add(engine.name)  # somebody looks after it
        # What a killed process left: its engines stay as they were.
        for engine in trial.fleet.engines:
            if engine.name in paused:
                engine.batcher.pause(paused[engine.name], engine.batcher.next_event_time() or 0.0)

    # --- calls of the API ------------------------------------------------------------------------

    def _help(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self.helpers.add(task)
        task.add_done_callback(self.helpers.discard)
        return task

    async def _call(
        self, name: str, work: Coroutine[Any, Any, Any], *, cancel_after: float | None = None
    ) -> Any:
        """The result of a call; raises only what is documented, and asyncio.CancelledError where
        the call was cancelled here."""
        task = asyncio.create_task(work, name=name)
        self.note(f"{name}()" + ("" if cancel_after is None else f" for {cancel_after:.3f} s"))
        try:
            done, _ = await asyncio.wait([task], timeout=cancel_after or PATIENCE_S)
            cancelled = not done and cancel_after is not None
            if cancelled:
                task.cancel()
                done, _ = await asyncio.wait([task], timeout=PATIENCE_S)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task], timeout=PATIENCE_S)
            if not task.done():
                raise Hang(f"{name}() ignores its cancellation") from None
            if not task.cancelled() and task.exception() is None:
                self._late(name, task.result())
            raise
        if not done:
            raise Hang(f"{name}() has not come back for {PATIENCE_S:g} s")
        if task.cancelled():
            if not cancelled:
                self.complain(f"{name}() was cancelled and nobody did it")
            raise asyncio.CancelledError
        error = task.exception()
        if error is None:
            return task.result()
        self.note(f"{name}() raised {error!r}")
        documented = isinstance(error, AprilschedError) and not isinstance(
            error, InvariantViolation
        )
        if not documented and not self._own(error) and not isinstance(error, (TimeoutError, Hang)):
            text = "".join(traceback.format_exception(error)[-6:])
            self.complain(f"{name}() raised {error!r}\n{text}")
        if isinstance(error, Exception):
            raise error
        raise RuntimeError(f"{name}() raised {error!r}") from error

    def _own(self, error: BaseException) -> bool:
        """Is it, or comes it from, what the caller's code raised?"""
        cause = error.__cause__
        raised = self.trial.callers.raised
        return id(error) in raised or (cause is not None and id(cause) in raised)

    def _late(self, name: str, result: Any) -> None:
        """A call gave its result although its caller was cancelled: it has it."""
        if isinstance(result, Batch) and name == "next_batch":
            batch = self._joined(result)
            if batch is not None:
                self._take(batch)

    # --- the trainer -----------------------------------------------------------------------------

    async def _train(self) -> str:
        trial, mix, draw = self.trial, self.mix, self.draw
        refused = 0
        asked_at = asyncio.get_running_loop().time()
        while trial.taken < mix.batches * (1 + self.number):
            now = asyncio.get_running_loop().time()
            try:
                batch = self._joined(await self._next_batch())
            except RunEnded as error:
                if self._failed():
                    return f"{type(error).__name__}: {error}"
                self._check_exhausted()
                self.checks.ended(error, self.scheduler.state)
                return "exhausted"
            except Exception as error:
                if not isinstance(error, Hang) and self._failed():
                    return f"{type(error).__name__}: {error}"
                if not isinstance(error, (TimeoutError, RefitError)):
                    if not isinstance(error, (Hang, SchedulerClosed, ConfigError)):
                        self.complain(f"next_batch() raised {error!r}, and goes on")
                    if isinstance(error, ConfigError):
                        self.complain(f"next_batch() raised {error!r}")
                    if isinstance(error, SchedulerClosed):
                        return "closed"
                    raise
                if isinstance(error, RefitError):
                    if self.source.dry and now - asked_at > DRY_S:
                        # Engines that restart refuse updates for as long as no prompt comes.
                        self._check_dry()
                        return "dry"
                    refused += 1
                    if refused > 60:
                        self.complain(f"update after update is refused: {error}")
                        return "refused"
                    if (failed := await self._update(whole=True)) is not None:
                        return failed
                    continue
                if now - asked_at > PATIENCE_S:
                    if self.source.dry and self.source.dry_for_ever_at is not None:
                        return "dry"
                    raise Hang(f"no batch for {PATIENCE_S:g} s of polling") from None
                if self.source.dry and now - asked_at > DRY_S:
                    self._check_dry()
                    return "dry"
                if draw.random() < 0.3:
                    await asyncio.sleep(draw.choice([0.0, 0.1, 5.0]))
                continue
            refused = 0
            asked_at = asyncio.get_running_loop().time()
            if batch is None:
                continue
            self._take(batch)
            if (failed := await self._use(batch)) is not None:
                return failed
        return "done"

    def _failed(self) -> bool:
        """The run has ended with an error, which every call raises now."""
        try:
            self.scheduler._session.check_open()  # pyright: ignore[reportPrivateUsage]
        except BaseException:
            return True
        return False

    async def _next_batch(self) -> Batch:
        draw = self.draw
        self._since = self.scheduler.version
        streams = self.mix.has("streams") and draw.random() < 0.8
        asks = self._next_part if streams else self.scheduler.next_batch
        if not (self.mix.has("polls") and draw.random() < 0.9):
            if self.source.dry_for_ever_at is None:
                return await self._call("next_batch", asks())
            return await self._call("next_batch", self._within(600.0, asks()))
        seconds = draw.choice([0.0, 0.001, 0.05, 0.5, 5.0, 60.0]) * draw.random()
        if draw.random() < 0.5:
            return await self._call("next_batch", self._within(seconds, asks()))
        return await self._call("next_batch", asyncio.wait_for(asks(), seconds))

    async def _within(self, seconds: float, call: Coroutine[Any, Any, Batch]) -> Batch:
        async with asyncio.timeout(seconds):
            return await call

    async def _next_part(self) -> Batch:
        async with aclosing(self.scheduler.stream()) as parts:
            async for part in parts:
                return part
        # The groups that were still to come were dropped.
        return replace(self.parts[-1], groups=(), complete=True)

    def _joined(self, part: Batch) -> Batch | None:
        """The batch that the part makes whole; None if others are to come."""
        if self.parts and self.parts[-1].index != part.index:
            self._end_parts()
        before, self.parts = self.parts, []
        groups = tuple(group for each in (*before, part) for group in each.groups)
        whole = replace(part, groups=groups, redelivered=part.redelivered or _again(before))
        if part.complete:
            return whole
        self.parts = [*before, part]
        return None

    def _end_parts(self) -> None:
        """Note the batch that has ended with the groups that the trainer has of it."""
        parts, state = self.parts, self.scheduler.state
        if not parts or parts[-1].index >= state.in_flight.counters.batches:
            return
        if any(batch.index == parts[-1].index for batch in state.delivery.batches_again):
            return  # the rest of it comes
        self.parts = []
        groups = tuple(group for part in parts for group in part.groups)
        ended = replace(parts[-1], groups=groups, redelivered=_again(parts))
        self._take(ended, version=ended.version)
        if ended.index not in state.delivery.unacknowledged:
            self._acknowledged([ended.index])

    def _take(self, batch: Batch, *, version: int | None = None) -> None:
        self.trial.taken += 1
        self.since_update += 1
        again = " again" if batch.redelivered else ""
        self.note(f"the trainer has batch {batch.index}{again} at version {self.scheduler.version}")
        secured = self.store is None or self.store.whole
        if version is None:
            version = batch.version if self.updating else self.scheduler.version
        self.checks.batch(batch, version=version, secured=secured, settings=self.mix.settings)

    async def _use(self, batch: Batch) -> str | None:
        """Train on it; why the run ended, if it did."""
        mix, draw = self.mix, self.draw
        if mix.train_s:
            await asyncio.sleep(mix.train_s * draw.random() * 2)
        if mix.has("idle_trainer") and draw.random() < 0.15:
            await asyncio.sleep(draw.choice([50.0, 400.0]))
        if draw.random() < 0.2:
            self._acknowledged([batch.index])
            batch.acknowledge()
        if mix.has("checkpoints") and draw.random() < 0.3:
            await self._checkpoint()
        if self.since_update >= mix.update_every:
            if mix.has("sleep") and draw.random() < 0.5:
                return await self._sleep()
            return await self._update()
        return None

    def _given(self) -> list[int]:
        records = self.trial.records
        return [index for index, b in records.batches.items() if not b.acknowledged]

    def _acknowledged(self, batches: list[int]) -> None:
        for index in batches:
            if (given := self.trial.records.batches.get(index)) is not None:
                given.acknowledged = True
        self.may_acknowledge.update(batches)

    async def _update(self, *, whole: bool = False) -> str | None:
        """Bring the next version in; after an error or a cancellation, perhaps again. Why the run
        ended, if it did."""
        draw, mix = self.draw, self.mix
        for tries in range(80):
            version = self.scheduler.version
            new: int | None = None
            if whole and draw.random() < 0.5 and not self.scheduler.state.fleet.control.engines:
                new = version
            elif draw.random() < 0.1:
                new = version + draw.randrange(1, 4)
            self.publisher.fails = tries < 8
            given = self._given()
            self.may_acknowledge.update(given, (part.index for part in self.parts))
            after = None
            if mix.has("cancels") and draw.random() < 0.3 and tries < 8:
                after = draw.choice([0.0001, 0.01, 0.5, 5.0]) * draw.random() + 1e-6
            self.updating += 1
            try:
                await self._call(
                    "update_weights",
                    self.scheduler.update_weights(self.publisher, version=new),
                    cancel_after=after,
                )
            except asyncio.CancelledError:
                if self.closing or after is None:
                    raise
                # Whether it takes effect shows later. It may acknowledge what was given before.
                for index in given:
                    self.trial.records.batches[index].acknowledged = True
                if draw.random() < 0.5:
                    return None
            except Hang:
                raise
            except Exception as error:
                if self._failed():
                    return f"{type(error).__name__}: {error}"
                prepared = self._own(error)
                newer = isinstance(error, ConfigError) and "newer" in str(error)
                if not (prepared or newer or isinstance(error, (RefitError, CallbackError))):
                    self.complain(f"update_weights() raised {error!r}")
                await asyncio.sleep(draw.choice([0.1, 1.0, 10.0]))
            else:
                self._acknowledged(given)
                self.since_update = 0
                return None
            finally:
                self.updating -= 1
        self.complain("80 updates in a row did not reach an engine")
        return "refused"

    async def _sleep(self) -> str | None:
        draw = self.draw
        tags = draw.choice([("kv_cache", "weights"), ("kv_cache",), ("weights",), ("cuda_graph",)])
        self.updating += 1
        try:
            await self._call("asleep", self._asleep(tags), cancel_after=self._maybe_cancel())
        except asyncio.CancelledError:
            if self.closing:
                raise
        except Hang:
            raise
        except Exception as error:
            if self._failed():
                return f"{type(error).__name__}: {error}"
            if not isinstance(error, RefitError):
                self.complain(f"asleep() raised {error!r}")
        finally:
            self.updating -= 1
        return None

    def _maybe_cancel(self) -> float | None:
        if self.mix.has("cancels") and self.draw.random() < 0.25:
            return self.draw.choice([0.0001, 0.01, 0.5, 5.0]) * self.draw.random() + 1e-6
        return None

    async def _asleep(self, tags: tuple[str, ...]) -> None:
        async with self.scheduler.asleep(tags=tags):
            await asyncio.sleep(self.draw.choice([0.0, 0.5, 30.0]))
            if self.draw.random() < 0.7 and not self.mix.has("adapters"):
                given = self._given()
                self.may_acknowledge.update(given)
                try:
                    await self.scheduler.update_weights(self.publisher)
                except asyncio.CancelledError:
                    # As in an update outside of a sleep: whether it takes effect shows later.
                    for index in given:
                        self.trial.records.batches[index].acknowledged = True
                    raise
                except RefitError as error:
                    self.note(f"update_weights() raised {error!r}")
                except Exception as error:
                    if not self._own(error):
                        raise
                else:
                    self._acknowledged(given)
                    self.since_update = 0

    async def _checkpoint(self) -> None:
        draw, trial = self.draw, self.trial
        number = len(trial.checkpoints)
        fails = draw.random() < 0.2
        path = trial.folder / ("nowhere" if fails else ".") / f"checkpoint-{number}"
        acknowledge = draw.random() < 0.7 or self.store is None
        given = self._given()
        records = trial.records.copy()
        may = set(self.may_acknowledge)
        if acknowledge:
            self.may_acknowledge.update(given)
            for index in given:
                records.batches[index].acknowledged = True
        try:
            await self._call(
                "checkpoint",
                self.scheduler.checkpoint(path, acknowledge=acknowledge),
                cancel_after=self._maybe_cancel(),
            )
        except asyncio.CancelledError:
            if self.closing:
                raise
            if acknowledge:
                self._acknowledged(given)  # perhaps
        except StoreError as error:
            if not fails:
                self.complain(f"checkpoint() raised {error!r}")
            self.may_acknowledge = may
        except Hang:
            raise
        except Exception as error:
            if not self._failed():
                self.complain(f"checkpoint() raised {error!r}")
        else:
            if fails:
                self.complain("checkpoint() into a folder that is not there raised nothing")
            if acknowledge:
                self._acknowledged(given)
            for batch in records.batches.values():
                batch.secured = True
            trial.checkpoints.append((path, records))

    # --- evaluations -----------------------------------------------------------------------------

    async def _evaluate_now_and_then(self) -> None:
        draw = self.mix.draw(f"evaluations {self.number}")
        while not self.closing:
            await asyncio.sleep(draw.expovariate(1 / draw.choice([1.0, 5.0, 40.0])))
            self.evaluate(draw)

    def evaluate(self, draw: random.Random) -> None:
        """Begin an evaluation now."""
        if len(self.helpers) < 8 and not self.closing:
            self._help(self._evaluate(draw))

    async def _evaluate(self, draw: random.Random) -> None:
        count, size = draw.choice([1, 2, 5]), draw.choice([1, 2])
        prompts = [
            Prompt(
                input_ids=[5, place + 3],  # type: ignore[arg-type]
                sampling=SamplingParams(
                    max_new_tokens=1 + draw.randrange(0, 60), ignore_eos=True, sampling_seed=place
                ),
                key=f"evaluation {place}",
            )
            for place in range(count)
        ]
        after = None
        if self.mix.has("cancels") and draw.random() < 0.3:
            after = draw.choice([0.001, 0.5, 5.0]) * draw.random() + 1e-6
        first = self.scheduler.version
        try:
            batch = await self._call(
                "evaluate",
                self.scheduler.evaluate(prompts, group_size=size),
                cancel_after=after,
            )
        except asyncio.CancelledError:
            if self.closing or after is None:
                raise
        except ConfigError as error:
            if "asleep" not in str(error) and not self._failed():
                self.complain(f"evaluate() raised {error!r}")
        except Hang:
            raise
        except Exception as error:
            self.note(f"an evaluation ended with {error!r}")
        else:
            self.checks.evaluation(batch, count, between=(first, self.scheduler.version))

    # --- chaos of the engines --------------------------------------------------------------------

    async def _chaos(self) -> None:
        mix, draw, fleet = self.mix, self.chaos_draw, self.trial.fleet
        kinds = [
            kind
            for kind in ("restarts", "crashes", "foreign", "slow_engines", "membership")
            if mix.has(kind) and not (kind == "foreign" and mix.has("adapters"))
        ]
        mean = draw.choice([2.0, 10.0, 40.0])
        for _ in itertools.count():
            await asyncio.sleep(draw.expovariate(1 / mean))
            if not kinds or self.closing:
                return
            engine = draw.choice(fleet.engines)
            match draw.choice(kinds):
                case "restarts":
                    self.restart(engine)
                case "crashes" if engine.name not in fleet.down:
                    fleet.restart(engine, self._some_version(), after=draw.choice([0.5, 5.0, 60.0]))
                case "foreign":
                    newer = self.scheduler.version + draw.choice([-1, 1, 3])
                    fleet.foreign_refit(engine, max(0, newer))
                case "slow_engines" if engine.name not in fleet.slowed | fleet.down:
                    fleet.slow_down(
                        engine, draw.choice([0.0, 0.05, 0.5]), draw.choice([5.0, 120.0])
                    )
                case "membership":
                    await fleet.change(draw, most=4)
                case _:
                    pass

    def _some_version(self) -> int:
        """Of an engine that restarts: mostly what a server starts with."""
        version, draw = self.scheduler.version, self.chaos_draw
        if self.mix.has("adapters"):
            return 0  # the base, which is never another one
        return draw.choice([0, 0, max(0, version - 1), version // 2, version])

    def restart(self, engine: SimEngine) -> None:
        fleet = self.trial.fleet
        if engine.name not in fleet.down and engine in fleet.engines and not self.closing:
            fleet.restart(engine, self._some_version())

    # --- what is under way -----------------------------------------------------------------------

    def in_flight(self) -> str:
        """For a person who wonders why nothing goes on."""
        state = self.scheduler.state
        in_flight = state.in_flight
        lines = [
            f"batch requested {state.delivery.batch_requested}, update {state.weights.update}, "
            f"sleep {state.fleet.sleep}, fetching {state.prompts.fetching}, "
            f"exhausted {state.prompts.exhausted}, stock {len(state.prompts.stock)}, "
            f"ready {len(list(in_flight.ready))} groups, "
            f"in flight {len(in_flight.rollouts)} rollouts, "
            f"queue {len(in_flight.queue)}, source dry {self.source.dry}",
            f"engines in use {list(state.fleet.control.engines)}, "
            f"standby {list(state.fleet.control.standby)}, lost {state.fleet.lost}",
        ]
        for engine in self.trial.fleet.all:
            inside = engine.batcher
            lines.append(
                f"{engine.name}: version {inside.version}, paused {inside.paused}, running "
                f"{inside.running}, waiting {inside.waiting}, down "
                f"{engine.name in self.trial.fleet.down}"
            )
        lines += [
            f"rollout {r.rollout_id} of group {r.group.group_id}: {r.state}, {r.log.size} tokens, "
            f"eligible {r.eligible}, evaluation {r.group.evaluation_id}, request {r.request}"[:300]
            for r in itertools.islice(in_flight.rollouts.values(), 20)
        ]
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                where = [f"{f.f_code.co_name}:{f.f_lineno}" for f in task.get_stack(limit=3)]
                lines.append(f"task {task.get_name()}: {task.get_coro()} at {where}"[:300])
        return "\n".join(lines)

    def _check_dry(self) -> None:
        """Nothing that could be done without more prompts is left undone."""
        state = self.scheduler.state
        requests = [*state.in_flight.queue, *state.in_flight.open_requests()]
        # An evaluation may have begun a moment ago. One that hangs is told by its own call.
        waits = any(request.rollout.group.evaluation_id is None for request in requests)
        groups = self.mix.settings["stop"] == "groups"
        enough = len(list(state.in_flight.ready)) >= self.mix.settings["batch_groups"]
        if not state.fleet.control.engines:
            return  # they were lost a moment ago
        if state.prompts.stock or waits or (groups and enough and not state.weights.update):
            self.complain(f"the source is dry, and what could be done is not: {self.in_flight()}")

    def _check_exhausted(self) -> None:
        state = self.scheduler.state
        left = [r for r in state.in_flight.rollouts.values() if r.group.evaluation_id is None]
        if left or state.prompts.stock or state.delivery.redelivery:
            self.complain(f"the prompts have ended with {len(left)} rollouts in flight")


def _again(parts: Iterable[Batch]) -> bool:
    return any(part.redelivered for part in parts)


class _Moments:
    """Does something at the worst moments: a listener that restarts engines and evaluates."""

    def __init__(self, life: _Life) -> None:
        self._life = life
        self._draw = life.mix.draw(f"moments {life.number}")
        self._restarts = life.mix.has("moments")
        self._evaluates = life.mix.has("evaluations")

    def on_event(self, event: ev.Event, now: float) -> None:
        match event:
            case ev.Paused() | ev.Flushed() | ev.Refitted() | ev.Continued() | ev.EngineJoined():
                name = event.info.name if isinstance(event, ev.EngineJoined) else event.engine
                self._harm(name, 0.06)
            case ev.UpdateRequested() | ev.BatchRequested():
                self._evaluate(0.1)
            case _:
                pass

    def on_command(self, command: do.Command, now: float) -> None:
        match command:
            case do.Send():
                self._harm(command.engine, 0.004)
            case do.Pause() | do.Continue() | do.Flush() | do.Release() | do.Wake():
                self._harm(command.engine, 0.05)
            case facts.RefitBegun():
                for engine in command.engines:
                    self._harm(engine, 0.05)
            case do.WithdrawOffer() if self._life.store is not None:
                self._life.store.withdrawn[command.index] += 1
            case facts.UpdateFinished() | do.Deliver():
                self._evaluate(0.15)
            case _:
                pass

    def _harm(self, name: str, share: float) -> None:
        if not self._restarts or self._draw.random() > share:
            return
        for engine in self._life.trial.fleet.engines:
            if engine.name == name:
                loop = asyncio.get_running_loop()
                after = self._draw.choice([0.0, 0.0, 0.001, 0.1, 1.0])
                loop.call_later(after, self._life.restart, engine)

    def _evaluate(self, share: float) -> None:
        if self._evaluates and self._draw.random() < share:
            loop = asyncio.get_running_loop()
            after = self._draw.choice([0.0, 0.0, 0.001, 0.1])
            loop.call_later(after, self._life.evaluate, self._draw)
