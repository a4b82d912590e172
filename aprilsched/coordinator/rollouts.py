"""RolloutScheduler: what a trainer calls."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, cast

from aprilsched.coordinator.bias import BiasNow
from aprilsched.coordinator.episodes import Episode
from aprilsched.coordinator.prompts import PromptSource, checked
from aprilsched.coordinator.refits import RefitReport
from aprilsched.coordinator.session import Session
from aprilsched.coordinator.updates import Updates
from aprilsched.coordinator.work import Work
from aprilsched.core.config import Caller, SchedulerConfig
from aprilsched.core.messages import events as ev
from aprilsched.core.state.state import SchedulerState
from aprilsched.driver.callbacks import Accept, GroupReward, Reward
from aprilsched.engines.base import Fleet
from aprilsched.errors import ConfigError, InvariantViolation, PromptsExhausted
from aprilsched.planning import Planner
from aprilsched.store.base import Store
from aprilsched.telemetry.base import AnyListener
from aprilsched.types import Batch, Prompt
from aprilsched.weights.base import WeightPublisher

__all__ = ["RolloutScheduler"]


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
        planner: chooses schedules for ``over_provision="auto"``, with the step-time model of
            the engines; by default that of an H200 with a 4B model.
        listeners: see every event and command (telemetry).
        run_id: prefix of the request ids; random unless given.
        store: keeps partial rollouts through a crash; with one that holds a run, that run goes on.

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
        planner: Planner | None = None,
        listeners: Sequence[AnyListener] = (),
        run_id: str | None = None,
        store: Store | None = None,
    ) -> None:
        self.config = config or SchedulerConfig()
        caller = Caller(
            reward_scope=reward_scope if reward is not None else "none",
            accepts=accept is not None,
            episodes=episode is not None,
        )
        per_group = reward_scope == "group"
        work = Work(
            prompts=PromptSource(prompts, group_size=self.config.group_size),
            reward=None if per_group else cast("Reward | None", reward),
            group_reward=cast("GroupReward | None", reward) if per_group else None,
            accept=accept,
            episode=episode,
            feed=self._feed,
        )
        self._session = Session(
            fleet=fleet,
            config=self.config,
            caller=caller,
            work=work,
            planner=planner or Planner(),
            listeners=listeners,
            run_id=run_id or uuid.uuid4().hex[:12],
            store=store,
        )
        self._waits = self._session.waits
        self._updates = Updates(self._session)
        self._evaluations = 0

    async def __aenter__(self) -> Self:
        await self._session.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop from any state: requests aborted, every engine continued, nothing left running.

        How long that may take grows with the number of requests in flight. It may be called from
        any task, at any time and repeatedly.
        """
        await self._session.close()

    def _feed(self, event: ev.Event) -> None:
        self._session.feed(event)

    @property
    def state(self) -> SchedulerState:
        """What the scheduler knows, to look at (telemetry, tests); only the core changes it."""
        return self._session.state

    def bias(self) -> BiasNow:
        """How far what was delivered so far is from what is drawn, and how much of it will go
        away. A few milliseconds; a policy that censors lengths is also logged, once."""
        return self._session.bias.now()

    def _check_open(self) -> None:
        self._session.check_open()
        if self._session.state.fleet.sleep is not None:
            raise ConfigError("the engines are asleep; leave the asleep() block first.")
        self._updates.check_whole()

    # --- batches -------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The trainer's policy version, which every engine in use has."""
        return self.state.weights.versions.trainer

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        try:
            return await self.next_batch()
        except PromptsExhausted:
            raise StopAsyncIteration from None

    async def next_batch(self) -> Batch:
        """Wait for the next batch.

        A cancelled wait loses nothing: a batch is taken when the call returns, and until then it
        is there for the next call. A timeout around it may be as short as you like, also shorter
        than the store takes to keep a batch safe. A batch that was not taken before the next
        update is made up anew after it.

        Raises:
            PromptsExhausted: when the prompts have ended and everything was delivered.
            FleetLost: when no engine is left and none comes back within `fleet_wait_s`.
            RefitError: when the engines that are left have not the fleet's weights; after an
                update it goes on.
            RunGivenUp: when `max_failed_groups` groups in a row failed.
            SchedulerClosed: outside of the ``async with`` block.
        """
        await self._offered()
        return self._take()

    async def _offered(self) -> Batch:
        """Wait until a batch may be taken."""
        self._check_open()
        if self._waits.batch_wanted:
            raise ConfigError("next_batch() is waited for already; one trainer takes batches.")
        future = self._waits.for_batch()
        self._feed(ev.BatchRequested())
        try:
            while self._waits.offer is None:
                if not await future:
                    raise PromptsExhausted("the prompts have ended and everything was delivered.")
                if self._waits.offer is None:
                    # An update came in the moment between, and the batch is made up anew.
                    future = self._waits.for_batch()
        except asyncio.CancelledError:
            self._feed(ev.BatchWithdrawn())
            raise
        finally:
            future.cancel()
        return self._waits.offer

    def _take(self) -> Batch:
        """The trainer has the batch that is offered."""
        batch, self._waits.offer = self._waits.offer, None
        if batch is None:
            raise InvariantViolation("a batch was taken that is not offered")
        self._feed(ev.BatchTaken(index=batch.index))
        return batch

    async def evaluate(self, prompts: Iterable[Prompt], *, group_size: int = 1) -> Batch:
        """Run `prompts` to their end on the same engines, under one version.

        Neither over-provisioned nor carried; an update waits for it. Groups come in the order of
        the prompts; those that failed are missing and in the ledger. A call that is cancelled ends
        the evaluation: its requests are called back, and no update waits for it.

        Raises:
            ConfigError: if there is no prompt, if one cannot be used, or if `group_size` is 0.
        """
        self._check_open()
        if group_size < 1:
            raise ConfigError(f"group_size is {group_size}; give 1 or more.")
        chosen = tuple(checked(prompt, group_size) for prompt in prompts)
        if not chosen:
            raise ConfigError("evaluate() got no prompts; give at least one.")
        self._evaluations += 1
        number = self._evaluations
        future = self._waits.for_evaluation(number)
        self._feed(
            ev.EvaluationRequested(evaluation_id=number, prompts=chosen, group_size=group_size)
        )
        try:
            return await future
        except asyncio.CancelledError:
            self._waits.forget_evaluation(number)
            self._feed(ev.EvaluationWithdrawn(evaluation_id=number))
            raise

    # --- durability ----------------------------------------------------------------------------

    async def checkpoint(self, path: Path | str, *, acknowledge: bool = True) -> None:
        """Write the scheduler as it is now to one file, for the trainer's own checkpoint.

        A call that fails acknowledges nothing, and leaves a file that was there as it was. One
        that is cancelled acknowledges nothing either; its file may still be written.

        Everything in flight with its tokens, the place in the prompts, the versions. After
        :meth:`restore` the run goes on as it did from here.

        Args:
            path: the file; replaced if it is there, whole or not at all.
            acknowledge: the trainer's checkpoint has all batches that it was given until now. If
                False, those that were not acknowledged are delivered again after a restore; that
                needs a store, which keeps them.

        Raises:
            StoreError: if it cannot be written.
        """
        self._session.check_open()
        await self._session.durability.checkpoint(Path(path), acknowledge=acknowledge)

    def restore(self, path: Path | str) -> None:
        """Begin where :meth:`checkpoint` was called; before the ``async with`` block.

        The prompts must be those of then, from their begin: what was launched is passed over. A
        store's own content is replaced. Engines with another version wait for
        :meth:`update_weights`, which takes the checkpoint's version here.

        Raises:
            StoreError: if there is no checkpoint, or it cannot be read.
            SchedulerClosed: if the scheduler was opened already.
        """
        self._session.durability.restore(Path(path))

    # --- weights -------------------------------------------------------------------------------

    async def update_weights(
        self, publisher: WeightPublisher, *, version: int | None = None
    ) -> RefitReport:
        """Bring the trainer's new weights into every engine: pause, refit, verify, continue.

        With an :class:`~aprilsched.weights.base.AdapterPublisher` nothing is paused: the new
        adapter serves new requests, what was sent before ends under the old one.

        A call that is cancelled before any weights were loaded changes nothing; after that the
        update runs to its end, since half an update would be neither version.

        Args:
            publisher: moves the weights.
            version: its number; one more than the last unless given.

        Raises:
            RefitError: if no engine took the version; generation goes on under the old one.
            ConfigError: if `version` is not newer than the one in use, or whole weights are
                published where adapters are in use.
        """
        return await self._updates.update(publisher, version)

    def asleep(
        self, *, tags: Sequence[str] = ("kv_cache", "weights")
    ) -> AbstractAsyncContextManager[None]:
        """Lend the engines' GPU memory to a trainer on the same GPUs.

        ``async with rollouts.asleep(): ...`` pauses the engines, keeps the stragglers safe (inside
        them where they can hold requests without memory, else called back with their tokens) and
        releases the memory of `tags`. Inside the block :meth:`update_weights` takes the weights'
        memory back and loads them; at its end the rest comes back and generation goes on.

        Args:
            tags: "kv_cache", "weights" and "cuda_graph", or some of them.

        Raises:
            ConfigError: if `tags` or an engine cannot be put to sleep, or all sleep already.
            RefitError: at the end, if weights were released, the servers did not keep them, and
                no update brought new ones.
        """
        return self._updates.asleep(tags)
