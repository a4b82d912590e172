"""RolloutScheduler: the class that a trainer uses."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Literal, Self, TypedDict

from aprilsched.errors import ConfigError, InvariantViolation
from aprilsched.kernel.core.config import Caller, SchedulerConfig
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.engines.base import Fleet
from aprilsched.kernel.shell.callbacks import Accept, GroupReward, Reward
from aprilsched.kernel.shell.episodes import Episode
from aprilsched.kernel.shell.listener import AnyListener
from aprilsched.kernel.shell.logprob_comparison import OTHER_WEIGHTS_K3, compared
from aprilsched.kernel.shell.prompts import PromptSource, checked_evaluation
from aprilsched.kernel.shell.protocol import AsyncScheduler, waited
from aprilsched.kernel.shell.refits import RefitReport
from aprilsched.kernel.shell.session import Session
from aprilsched.kernel.shell.updates import Updates
from aprilsched.kernel.shell.work import Work
from aprilsched.kernel.store.in_memory import Store
from aprilsched.kernel.weights.publisher import RepublishingPublisher, WeightPublisher
from aprilsched.observe.figures.alignment import alignment_of
from aprilsched.observe.figures.run_figures import AlignmentFigures
from aprilsched.planning import Planner
from aprilsched.types import Batch, Prompt

log = logging.getLogger("aprilsched")

_NEVER = 2**31 - 1
"""`failed_groups` of a scheduler that no number of failed groups ends, such as a gateway's."""


class SchedulerOptions(TypedDict, total=False):
    """The keyword arguments of :class:`RolloutScheduler`, which describes them."""

    reward: Reward | GroupReward | None
    reward_scope: Literal["rollout", "group"]
    accept: Accept | None
    episode: Episode | None
    config: SchedulerConfig | None
    planner: Planner | None
    listeners: Sequence[AnyListener]
    run_id: str | None
    store: Store | None


class RolloutScheduler(AsyncScheduler):
    """Keeps a fleet of engines full and delivers batches of whole groups or single samples.

    Use it as ``async with RolloutScheduler(...) as rollouts``. In this block, ``async for batch in
    rollouts`` or :meth:`next_batch` yield batches, :meth:`update_weights` loads a new policy
    version, and :meth:`evaluate` generates the responses to a set of prompts.

    Args:
        fleet: the engines; they are opened and closed with the scheduler.
        prompts: any iterable or async iterable of :class:`~aprilsched.types.Prompt`, or a
            :class:`~aprilsched.PromptQueue` that the trainer pushes prompts into. When it ends,
            the rollouts in flight are finished and delivered, perhaps in a smaller last batch.
        reward: scores a rollout, or a group (see `reward_scope`), while generation continues.
            Plain functions run in threads, coroutines run on the event loop.
        reward_scope: "rollout" calls ``reward(rollout, prompt)``; "group" calls ``reward(group)``,
            which returns one score for each rollout.
        accept: ``accept(group)`` keeps or rejects a scored group, and with ``delivery="samples"``
            ``accept(sample)`` one sample; others replace what is rejected.
        episode: ``async episode(turn, prompt)`` drives a rollout of several turns.
        config: settings of the scheduler.
        planner: chooses schedules for ``over_provision="auto"`` by a step-time model of the
            engines; the default is the model of an H200 with a 4B model.
        listeners: telemetry; each gets the events and commands, or the facts, of the run.
        run_id: prefix of the request ids; random by default.
        store: saves partial rollouts, so that a run can resume after a crash. If the store already
            has a run, the scheduler resumes it.

    Raises:
        ConfigError: if settings, prompts or engines cannot work; nothing is launched then.
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
        alone = caller.reward_scope == "rollout" or (reward is None and episode is not None)
        if self.config.delivery == "samples" and not alone:
            raise ConfigError(
                'delivery="samples" needs the reward of each rollout by itself; give a reward '
                'function with reward_scope="rollout", or episodes that return a Score.'
            )
        work = Work(
            prompts=PromptSource(
                prompts,
                group_size=self.config.group_size,
                companions=self.config.policies.companions,
            ),
            reward=reward,
            scope=reward_scope,
            accept=accept,
            episode=episode,
            feed=self._feed,
            rejections=lambda: self.state.prompts.consecutive_rejections,
            # The client of an endless service gets the refusal itself.
            refusal_level=logging.INFO
            if self.config.retries.failed_groups >= _NEVER
            else logging.ERROR,
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
        self._evaluated: set[int] = set()
        """The first group of each evaluation. An evaluation and a training batch may have the same
        index."""

    async def __aenter__(self) -> Self:
        await self._session.open()
        return self

    async def close(self) -> None:
        """Stop in any state: abort all requests, continue every engine, end all tasks.

        The time that this may take grows with the number of requests in flight. Any task may call
        it, at any time and repeatedly.
        """
        await self._session.close()

    def _feed(self, event: ev.Event) -> None:
        self._session.feed(event)

    @property
    def state(self) -> SchedulerState:
        """The scheduler's state, to be read only (telemetry, tests); only the core changes it."""
        return self._session.state

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

    async def offered(self, within: float | None = None, *, streamed: bool = False) -> Batch:
        self._check_open()
        request = partial(self._feed, ev.BatchRequested(streamed=streamed))
        batch = await waited(self._waits.next_offer(request, self._gave_up), within)
        self._session.begin_hand_over()
        return batch

    def _gave_up(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            self._feed(ev.BatchWithdrawn())

    def take(self) -> None:
        batch, self._waits.offer = self._waits.offer, None
        if batch is None:
            raise InvariantViolation("a batch was taken that is not offered")
        self._session.end_hand_over(ev.BatchTaken(index=batch.index))

    def hand_back(self) -> None:
        self._session.end_hand_over()

    async def evaluate(self, prompts: Iterable[Prompt], *, group_size: int = 1) -> Batch:
        """Generate all responses to `prompts` on the same engines, under one version.

        Evaluations are neither over-provisioned nor carried, and an update waits for their end. The
        groups are in the order of the prompts; failed groups are missing and are in the ledger.
        Cancelling the call ends the evaluation: its requests are aborted, and no update waits for
        it.

        Args:
            prompts: at least one.
            group_size: responses to each prompt without a group size.

        Raises:
            ConfigError: if `prompts` is empty, if a prompt cannot be used, or if `group_size` is 0.
        """
        self._check_open()
        chosen = checked_evaluation(prompts, group_size, self.config.policies.companions)
        self._evaluations += 1
        number = self._evaluations
        future = self._waits.for_evaluation(number)
        self._feed(
            ev.EvaluationRequested(evaluation_id=number, prompts=chosen, group_size=group_size)
        )
        try:
            evaluated = await future
            self._evaluated.update(group.group_id for group in evaluated.groups[:1])
            return evaluated
        except asyncio.CancelledError:
            self._waits.forget_evaluation(number)
            self._feed(ev.EvaluationWithdrawn(evaluation_id=number))
            raise

    async def report_logprobs(self, batch: Batch, logprobs: object) -> AlignmentFigures:
        """Compare the trainer's log-probabilities of a batch with those of the engines.

        At staleness 0 both are of the same weights, so a difference is a mismatch of the engine
        and the trainer. The comparison is written to the event log, and is in `summary.json` and in
        the report under "alignment". Only the first report of a batch counts there. A
        warning names a batch that looks sampled by other weights than the trainer's.

        Args:
            batch: a batch of :meth:`next_batch`.
            logprobs: log-probabilities of the tokens under the weights of ``batch.version``, so
                computed before any step on this batch, at the temperature that they were sampled
                with. Either a tensor or array of the shape of ``batch.to_torch().input_ids`` or of
                ``batch.to_torch(packed=True).input_ids``, or a list with an array [T] for each
                response of ``batch.rollouts``. Only tokens that count in the loss are looked at.

        Returns:
            The figures of this batch.

        Raises:
            ConfigError: if `logprobs` do not have the shape of the batch, or if the batch is not
                one for training.
            SchedulerClosed: outside of the ``async with`` block.
        """
        self._session.check_open()
        if not batch.units or batch.units[0].unit_id in self._evaluated:
            raise ConfigError(
                "the batch is that of an evaluation; report the log-probabilities of training "
                "batches only."
            )
        comparison = await compared(batch, logprobs)
        fresh = comparison.by_staleness[0]
        if fresh.k3 > OTHER_WEIGHTS_K3 * fresh.tokens:
            log.warning(
                "batch %d: on-policy log-probabilities differ from the trainer's, k3=%.3f, so the "
                "engines probably have other weights; call update_weights()",
                batch.index,
                fresh.k3 / fresh.tokens,
            )
        self._feed(ev.LogprobsReported(comparison=comparison))
        return alignment_of([comparison])

    # --- durability ----------------------------------------------------------------------------

    @property
    def stored(self) -> bool:
        """Whether a store exists, so that unacknowledged batches are delivered again."""
        return self._session.durability.stored

    @property
    def store_error(self) -> str | None:
        """Why the store does not save the run at present; None while it does."""
        return self._session.durability.error

    @property
    def restores(self) -> bool:
        """Whether it starts from a checkpoint."""
        return self._session.durability.restores

    def acknowledge(self, *batches: int) -> None:
        """Acknowledge batches by their numbers, as :meth:`aprilsched.Batch.acknowledge` does; for
        a trainer whose batches are copies, in another process."""
        self._session.durability.acknowledge(batches)

    async def saved(self) -> None:
        """Wait until the store, if there is one, has everything up to now."""
        await self._session.durability.saved()

    def trainer_has(self, batches: Iterable[int], groups: Iterable[int] = ()) -> None:
        """Say which batches the trainer has that were not acknowledged, and which groups of a batch
        that it takes group by group. The others of them are delivered again."""
        self._feed(ev.TrainerReturned(batches=tuple(batches), groups=tuple(groups)))

    def suspect_weights(self) -> None:
        """Say, before the scheduler is opened, that an update may have ended halfway: no engine is
        used before the next update."""
        self._session.weights_unknown = True

    def trust_weights(self) -> None:
        """Say, before the scheduler is opened, that the weights in the engines are the trainer's,
        whatever their label, so that a label is not reported as one of an earlier run."""
        self._session.weights_trusted = True

    def republish_with(self, publisher: RepublishingPublisher) -> None:
        """Set, before the scheduler is opened, the publisher of the version that its store has.

        If it holds that version, engines without it load it at once instead of waiting for an
        update."""
        self._session.refits.publisher = publisher

    def hold(self, *, held: bool) -> None:
        """Pause the engines with the requests inside them, or let them generate again."""
        self._feed(ev.HoldChanged(held=held))

    def withdraw(self, group_id: int, cause: str) -> None:
        """Drop a group that is no longer wanted; the ledger has the cause. One that has ended stays
        as it is."""
        self._feed(ev.GroupWithdrawn(group_id=group_id, cause=cause))

    async def checkpoint(self, path: Path | str, *, acknowledge: bool = True) -> None:
        """Write the scheduler's state to one file, for the trainer's own checkpoint.

        The file has everything in flight with its tokens, the position in the prompts, and the
        versions. After :meth:`restore` the run continues from this state.

        A call that fails acknowledges nothing and does not change an existing file. A call that is
        cancelled acknowledges nothing either, but its file may still be written.

        Args:
            path: the file; an existing file is replaced as a whole or not at all.
            acknowledge: True if the trainer's checkpoint includes training on all batches that it
                has taken so far. If False, batches that were not acknowledged are delivered again
                after a restore; this needs a store, which keeps them.

        Raises:
            StoreError: if the file cannot be written.
        """
        self._session.check_open()
        await self._session.durability.checkpoint(Path(path), acknowledge=acknowledge)

    def restore(self, path: Path | str) -> None:
        """Start from the state of a checkpoint. Call it before the ``async with`` block.

        The prompts must be the same as when :meth:`checkpoint` was called, from the first one;
        prompts that were launched are skipped. The content of a store is replaced. Engines with
        another version wait for :meth:`update_weights`, which accepts the checkpoint's version in
        this case.

        Raises:
            StoreError: if the checkpoint is missing or cannot be read.
            SchedulerClosed: if the scheduler was opened already.
        """
        self._session.durability.restore(Path(path))

    # --- weights -------------------------------------------------------------------------------

    async def update_weights(
        self,
        publisher: WeightPublisher,
        *,
        version: int | None = None,
        acknowledge: bool = True,
    ) -> RefitReport:
        """Bring the trainer's new weights into every engine: pause, refit, verify, continue.

        With an :class:`~aprilsched.kernel.weights.publisher.AdapterPublisher` nothing is paused:
        the new adapter serves new requests, and requests that were sent before end under the old
        adapter.

        With ``refit="rolling"`` the call ends when the publisher has prepared the version, and the
        trainer may change its own weights then. Each engine takes the version, or a newer one, when
        it has finished the responses of its older version. The publisher must keep the version for
        that long, as a DiskPublisher does.

        A call that is cancelled before any weights were loaded changes nothing. After that, the
        update runs to its end, because a half update would leave inconsistent weights.

        Args:
            publisher: moves the weights.
            version: number of the new version; by default one more than the last.
            acknowledge: True if the trainer has trained on all batches that it has taken. If False,
                :meth:`~aprilsched.Batch.acknowledge` acknowledges each of them. That is for a
                trainer that takes batches ahead of its training. It needs a store.

        Raises:
            RefitError: if no engine took the version; generation continues under the old one.
            ConfigError: if `version` is not newer than the one in use, or if full weights are
                published while adapters are in use, or if `publisher` cannot bring a version to one
                engine after the other and the refit is "rolling".
        """
        return await self._updates.update(publisher, version, acknowledge=acknowledge)

    def paused_for_weights(
        self, *, version: int | None = None, label: bool = False, acknowledge: bool = True
    ) -> AbstractAsyncContextManager[tuple[str, ...]]:
        """Pause the engines while the trainer loads new weights with its own calls.

        ``async with rollouts.paused_for_weights(version=7) as engines: ...`` pauses and flushes the
        engines as :meth:`update_weights` does. In the block the trainer loads version 7 into every
        engine of `engines` (their names) and labels it "7". At the end of the block every engine is
        asked for its version, and generation continues. The block may be inside of
        ``asleep()``; the engines then have the memory of their weights.

        If the block raises, or takes longer than `timeouts.refit_s`, all these engines may hold
        parts of both versions. They stay on standby until the next update loads complete weights.
        :class:`~aprilsched.Handshake` is the same for trainers whose pause and continue are two
        functions.

        Args:
            version: number of the new version; by default one more than the last.
            label: True if the trainer does not label the weights with the decimal version. The
                label is then set on the engines at the end of the block.
            acknowledge: as of :meth:`update_weights`.

        Raises:
            RefitError: at the end of the block, if no engine has the version.
            ConfigError: as :meth:`update_weights`, and if an engine does not let others load
                weights.
        """
        return self._updates.paused_for_weights(version, label=label, acknowledge=acknowledge)

    @property
    def last_refit(self) -> RefitReport | None:
        """The report of the last update, such as one by :meth:`paused_for_weights`."""
        return self._updates.last

    def asleep(
        self, *, tags: Sequence[str] = ("kv_cache", "weights")
    ) -> AbstractAsyncContextManager[None]:
        """Release the engines' GPU memory for a trainer on the same GPUs.

        ``async with rollouts.asleep(): ...`` pauses the engines, keeps the stragglers, and releases
        the memory of `tags`. Engines that can hold requests without memory keep the stragglers;
        otherwise the requests are aborted and their tokens kept. In the block,
        :meth:`update_weights` takes the memory of the weights back and loads them. At the end of
        the block the rest of the memory is taken back and generation continues.

        Args:
            tags: "kv_cache", "weights" and "cuda_graph", or some of them.

        Raises:
            ConfigError: if a tag is unknown, if an engine cannot release memory, or if the engines
                are asleep already.
            RefitError: at the end of the block, if weights were released, the servers did not keep
                them, and no update loaded new ones.
        """
        return self._updates.asleep(tags)
