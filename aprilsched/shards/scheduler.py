"""ShardedScheduler: N schedulers, each with a part of the fleet, that a trainer uses as one.

The collector (:mod:`~aprilsched.shards.collector`) decides, and this module carries it out: for
each shard there is one task that asks for news and one that tells it orders.

Invariants:
- An update that has begun is carried out by every shard, also if the call is cancelled, because
  shards with different versions could not generate for one batch.
- A shard that is lost is opened again until it is there, and nothing waits for it meanwhile.
- Every call of a shard has an end: a shard that does not answer in time is lost. If all that the
  trainer waits for is with shards that do not take part, the others generate it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any, Self, TypeVar

from aprilsched.coordinator.logprob_comparison import compared
from aprilsched.coordinator.prompts import PromptSource, checked_evaluation
from aprilsched.coordinator.protocol import AsyncScheduler, waited
from aprilsched.coordinator.refits import RefitReport
from aprilsched.coordinator.tasks import Waits
from aprilsched.core.config import SchedulerConfig
from aprilsched.core.messages import facts as of
from aprilsched.core.state.ledger import Reason
from aprilsched.driver.callbacks import called, raised
from aprilsched.driver.listeners import Listeners
from aprilsched.errors import (
    AprilschedError,
    ConfigError,
    EngineError,
    FleetLost,
    InvariantViolation,
    RefitError,
    SchedulerClosed,
    StoreError,
    closed_meanwhile,
)
from aprilsched.shards.base import (
    JointUpdate,
    Orders,
    Shard,
    ShardLost,
    answer_s,
    check_shardable,
    numbered,
    qualified,
    serial_of,
    shard_config,
)
from aprilsched.shards.collector import Collector, Post
from aprilsched.telemetry.alignment import alignment_of
from aprilsched.telemetry.base import AnyListener
from aprilsched.telemetry.event_log import EventLog
from aprilsched.telemetry.event_log.merging import qualified_engine, shard_log
from aprilsched.telemetry.figures import AlignmentFigures
from aprilsched.telemetry.run_folder import EVENTS
from aprilsched.types import Batch, Group, Prompt, RefusedPrompt
from aprilsched.weights.external import ExternalWeights
from aprilsched.weights.publisher import (
    AdapterPublisher,
    ConcludingPublisher,
    RepublishingPublisher,
    WeightPublisher,
)

log = logging.getLogger("aprilsched")

T = TypeVar("T")

_AGAIN_S = 1.0
_LATEST_S = 60.0
"""Seconds until a shard that was lost, or has another version, is tried again: at first, and at
most."""
_COLLECTOR = "collector"
"""Name of the collector's file in a checkpoint."""


class _Member:
    """One shard and its conversation."""

    def __init__(self, shard: Shard, post: Post) -> None:
        self.shard = shard
        self.post = post
        self.open = False
        self.openings = 0
        self.stored = False
        self.suspect = False
        """Whether an update of it has begun, and was not seen to end well."""
        self.held = False
        """What it was told last."""
        self.due = asyncio.Event()
        """Set when there may be something to tell it."""
        self.telling = asyncio.Lock()
        self.catching_up: asyncio.Task[None] | None = None
        self.lost: asyncio.Future[str] | None = None
        """Done when the shard is lost, with the reason; None before it is opened."""
        self.told = False
        """Whether it has taken orders since it was opened."""
        self.answers = True
        """Whether it has had news since then, too. One that is opened and hangs again is not
        there."""
        self.away_since: float | None = None
        """Time since which it has not taken part and answered."""
        self.delay = _AGAIN_S
        """Seconds until it is opened again."""

    def begin(self) -> asyncio.Future[str]:
        """Let it be called, also if it was lost."""
        self.lost = asyncio.get_running_loop().create_future()
        return self.lost

    def lose(self, why: str) -> None:
        """End every call of it."""
        if self.lost is not None and not self.lost.done():
            self.lost.set_result(why)

    async def answered(self, call: Coroutine[Any, Any, T], within: float | None) -> T:
        """What the shard answers to a call. It is lost if that takes longer than `within` seconds.

        A shard that hangs may not even end when it is cancelled, so that is not waited for.

        Raises:
            ShardLost: if it is lost, whichever call has noticed that.
        """
        work, lost = asyncio.ensure_future(call), self.lost or self.begin()
        try:
            # In parts: what blocks this loop for long is no fault of a shard.
            for _ in range(3):
                await asyncio.wait(
                    [work, lost],
                    timeout=None if within is None else within / 3,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if work.done():
                    return work.result()
                if lost.done():
                    break
            else:
                lost.set_result(f"it has not answered {call.__name__}() for {within:g} s")
            raise ShardLost(lost.result())
        finally:
            if not work.done():
                work.cancel()
                work.add_done_callback(lambda done: done.cancelled() or done.exception())
                await asyncio.wait([work], timeout=_AGAIN_S)


class ShardedScheduler(AsyncScheduler):
    """Delivers batches of whole groups from several schedulers, with the methods of
    :class:`~aprilsched.RolloutScheduler`.

    One scheduler decides for a million tokens a second and more on one core. Here each shard is
    such a scheduler with its part of the fleet, and the groups of a batch come from whichever shard
    has them. There is one version, one staleness gate and one over-provision ratio.

    Args:
        shards: the shards; see :class:`~aprilsched.shards.LocalShard`.
        prompts: any iterable or async iterable of :class:`~aprilsched.types.Prompt`, or a
            :class:`~aprilsched.PromptQueue`. Each prompt is given to one shard.
        config: settings of the run. `batch_groups`, the ratio and the bound are those of the whole
            run, whatever the number of shards.
        listeners: telemetry of the collector, which gets the facts about batches and updates. Each
            shard has listeners of its own.
        folder: folder for the event logs of the collector and of every shard, of which
            ``aprilsched.runs.drive.merged_run`` makes one; None writes none. It must be empty.

    Raises:
        ConfigError: if there is no shard, if two have one name, or if a setting needs to see all
            open responses at once.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        *,
        config: SchedulerConfig | None = None,
        listeners: Sequence[AnyListener] = (),
        folder: Path | str | None = None,
    ) -> None:
        self.config = config or SchedulerConfig()
        check_shardable(self.config)
        names = [shard.name for shard in shards]
        if not shards:
            raise ConfigError("there are no shards; give at least one.")
        if len(set(names)) < len(names) or not all(map(_plain, names)):
            raise ConfigError(
                f"the shards are named {', '.join(map(repr, names))}; give each a name of its own "
                "that can be the name of a file."
            )
        self._folder = None if folder is None else Path(folder)
        self._log = None if self._folder is None else EventLog(self._folder / EVENTS)
        logs = [] if self._log is None else [self._log]
        self._listeners = Listeners([*logs, *listeners])
        self._collector = Collector(self.config, names)
        self._members = [
            _Member(shard, post) for shard, post in zip(shards, self._collector.posts, strict=True)
        ]
        self._source = PromptSource(
            prompts,
            group_size=self.config.group_size,
            companions=self.config.policies.companions,
        )
        self._waits = Waits()
        self._called = False
        """Whether a call of the trainer for the batch in work is open, or goes on with its next
        group."""
        self._lock = asyncio.Lock()
        """Held by an update, by a shard that catches up, and by a checkpoint."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._evaluations: set[asyncio.Task[Batch]] = set()
        self._evaluated = 0
        self._publisher: WeightPublisher | None = None
        """Publisher of the version of the run."""
        self._frozen = False
        """Whether a checkpoint is being written, so that shards are told nothing."""
        self._restored: Path | None = None
        self._changed = asyncio.Event()
        self._none_since: float | None = None
        self._is_open = False
        self._pid = os.getpid()

    async def __aenter__(self) -> Self:
        if self._is_open or self._tasks:
            raise SchedulerClosed("a scheduler is opened once; make a new one.")
        self._pid = os.getpid()
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        opened = [asyncio.create_task(self._open(member)) for member in self._members]
        try:
            await asyncio.gather(*opened)
            self._begin()
        except BaseException:
            for task in opened:
                task.cancel()
            await asyncio.wait(opened)
            await self._close_shards()
            raise
        return self

    def _begin(self) -> None:
        collector = self._collector
        fresh = self._restored is None
        if fresh and any(post.version is not None for post in collector.posts):
            collector.version = max(p.version for p in collector.posts if p.version is not None)
        if not fresh:
            self._source.pass_over(collector.prompts.cursor)
        if any(member.stored for member in self._members):
            self._source.must_be_storable()
        for member in self._members:
            if not collector.takes_part(member.post):
                log.warning(
                    "%s has version %s and the run has %d; it waits for update_weights()",
                    member.shard.name,
                    member.post.version,
                    collector.version,
                )
        if self._log is not None:
            self._log.start()
        self._is_open = True
        for member in self._members:
            self._start(self._serve(member))

    async def close(self) -> None:
        """Stop in any state, and close every shard. Any task may call it, repeatedly."""
        if self._pid != os.getpid() or not self._is_open:
            return
        self._is_open = False
        self._waits.fail(closed_meanwhile())
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._close_shards()
        self._listeners.release()
        if self._log is not None:
            await asyncio.to_thread(self._log.close)

    async def _close_shards(self) -> None:
        await asyncio.gather(*map(self._close_shard, self._members))

    async def _close_shard(self, member: _Member) -> None:
        member.lose("it is closed")
        # Its engines have control_s to continue.
        within = self.config.timeouts.control_s + answer_s(self.config)
        member.begin()
        try:
            await member.answered(member.shard.close(), within)
        except Exception as error:
            log.error("%s could not be closed: %s", member.shard.name, error)
        finally:
            member.lose("it is closed")

    # --- batches -------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The trainer's policy version, which every shard that takes part has."""
        return self._collector.version

    async def offered(self, within: float | None = None, *, streamed: bool = False) -> Batch:
        self._check_open()
        offer = self._waits.next_offer(partial(self._ask_for_batch, streamed), self._gave_up)
        batch = await waited(offer, within)
        self._waits.begin_hand_over()
        return batch

    def _ask_for_batch(self, streamed: bool) -> None:
        if self._waits.offer is not None and self._collector.by_group != streamed:
            self._withdraw_offer()
        if not streamed:
            self._end_stream()
        self._request(streamed=streamed)
        self._act()

    def _gave_up(self, error: BaseException) -> None:
        self._called = False
        if isinstance(error, asyncio.CancelledError):
            self._tell_facts(of.BatchRequestWithdrawn())

    def _request(self, *, streamed: bool) -> None:
        if not self._called:
            self._called = True
            self._tell_facts(of.BatchRequested())
        self._collector.request(streamed=streamed)

    def take(self) -> None:
        batch, self._waits.offer = self._waits.offer, None
        if batch is None:
            raise InvariantViolation("a batch was taken that is not offered")
        self._waits.end_hand_over()
        whole = self._collector.take()
        if whole is not None:
            self._tell_delivery(whole)
        for group in () if batch.complete else batch.groups:
            self._tell_facts(of.GroupStreamed(batch=batch.index, group_id=group.group_id))
        self._act()

    def _withdraw_offer(self) -> None:
        if self._waits.offer is not None and self._waits.offer.complete:
            self._tell_facts(of.OfferWithdrawn(batch=self._waits.offer.index))
        self._waits.withdraw(None)
        self._collector.withdraw_offer()

    def _end_stream(self) -> None:
        """Deliver the groups that the trainer has of a streamed batch as a batch, which ends it."""
        batch = self._collector.end_stream()
        if batch is None:
            return
        self._waits.withdraw(None)
        self._tell_delivery(batch)
        if self._waits.batch_requested:
            self._request(streamed=self._collector.by_group)

    def _tell_delivery(self, batch: Batch) -> None:
        self._called = False
        self._tell_facts(
            of.BatchDelivered(
                batch=batch.index, version=batch.version, rollouts=of.delivered_rollouts(batch)
            )
        )

    def hand_back(self) -> None:
        self._waits.end_hand_over()

    async def evaluate(self, prompts: Iterable[Prompt], *, group_size: int = 1) -> Batch:
        """Generate all responses to `prompts`, split over the shards, under one version; see
        :meth:`aprilsched.RolloutScheduler.evaluate`.

        What a shard that is lost had of it is generated again by the others.
        """
        self._check_open()
        chosen = checked_evaluation(prompts, group_size, self.config.policies.companions)
        async with self._lock:
            self._check_open()
            task = self._start(self._evaluate(chosen, group_size))
            self._evaluations.add(task)
            task.add_done_callback(self._evaluations.discard)
        return await self._result(task, lambda left: left.cancel())

    async def _evaluate(self, prompts: Sequence[Prompt], group_size: int) -> Batch:
        self._evaluated += 1
        index, groups = self._evaluated, dict[int, Group]()
        left = list(range(len(prompts)))
        while left:
            members = [m for m in self._members if m.open and self._collector.takes_part(m.post)]
            if not members and (error := self._stranded()) is not None:
                raise error
            if not members:
                self._changed.clear()
                await self._changed.wait()
                continue
            shares = [left[place :: len(members)] for place in range(len(members))]
            parts = await asyncio.gather(
                *(
                    self._evaluate_part(member, prompts, share, group_size)
                    for member, share in zip(members, shares, strict=True)
                )
            )
            left = sorted(serial for _, unanswered in parts for serial in unanswered)
            for found, _ in parts:
                groups.update(found)
        return Batch(
            index=index,
            version=self.version,
            groups=tuple(groups[serial] for serial in sorted(groups)),
        )

    async def _evaluate_part(
        self, member: _Member, prompts: Sequence[Prompt], share: Sequence[int], group_size: int
    ) -> tuple[dict[int, Group], Sequence[int]]:
        """The groups of one shard by the position of their prompts, and what it could not
        answer."""
        if not share:
            return {}, ()
        slot = member.post.slot
        try:
            asked = [numbered(prompts[serial], serial) for serial in share]
            batch = await member.answered(member.shard.evaluate(asked, group_size), None)
        except (ShardLost, RefitError) as error:
            log.warning("%s has lost its part of an evaluation: %s", member.shard.name, error)
            # Its own task finds out too, and notes that it takes part no longer.
            await asyncio.sleep(_AGAIN_S)
            return {}, share
        found: dict[int, Group] = {}
        for group in batch.groups:
            serial = serial_of(group.prompt)
            if serial is not None:
                found[serial] = qualified(
                    group, prompts[serial], slot=slot, shard=member.shard.name
                )
        return found, ()

    async def report_logprobs(self, batch: Batch, logprobs: object) -> AlignmentFigures:
        """Compare the trainer's log-probabilities of a batch with those of the engines; see
        :meth:`aprilsched.RolloutScheduler.report_logprobs`."""
        self._check_open(whole=False)
        comparison = await compared(batch, logprobs)
        self._tell_facts(of.LogprobsCompared(comparison=comparison))
        return alignment_of([comparison])

    # --- weights -------------------------------------------------------------------------------

    async def update_weights(
        self,
        publisher: WeightPublisher,
        *,
        version: int | None = None,
        acknowledge: bool = True,
    ) -> RefitReport:
        """Bring the trainer's new weights into every engine of every shard.

        All shards update at the same time. The call returns when each of them has answered, and the
        run has the version then. A shard that could not take it holds until it has caught up: at
        once if the publisher can publish the version again, and otherwise at the next update.

        A cancelled call ends the wait only: the update runs to its end.

        Args:
            publisher: moves the weights. One that needs all engines together gets the engines of
                all shards in this process in one call.
            version: number of the new version; by default one more than the last.
            acknowledge: must be True: batches that were taken count as trained on.

        Raises:
            RefitError: if no shard took the version.
            ConfigError: if `version` is not newer than the one in use, or if the publisher cannot
                serve several shards.
        """
        self._check_open(whole=False)
        if not acknowledge:
            raise _no_acknowledging()
        if isinstance(publisher, AdapterPublisher | ExternalWeights):
            raise ConfigError(
                f"{type(publisher).__name__} needs one scheduler for all engines; publish full "
                "weights to shards."
            )
        task = self._start(self._update(publisher, version))
        return await self._result(task, lambda left: left.add_done_callback(_note_end))

    async def _update(self, publisher: WeightPublisher, version: int | None) -> RefitReport:
        started = asyncio.get_running_loop().time()
        collector = self._collector
        try:
            async with self._lock:
                new = collector.version + 1 if version is None else version
                again = new == collector.version and not all(
                    map(collector.takes_part, collector.posts)
                )
                if new <= collector.version and not again:
                    raise ConfigError(
                        f"version {new} is not newer than {collector.version}, which is in use; "
                        "give a larger number."
                    )
                await called("the publisher", publisher.prepare, new)
                while self._evaluations:
                    await asyncio.wait(self._evaluations)
                await self._waits.until_handed_over()
                failed = await self._update_all(publisher, new)
        finally:
            if isinstance(publisher, ConcludingPublisher):
                await self._conclude(publisher)
        return RefitReport(
            version=new,
            quarantined=failed,
            seconds=asyncio.get_running_loop().time() - started,
        )

    async def _update_all(self, publisher: WeightPublisher, new: int) -> dict[str, str]:
        """Update every open shard; returns what did not take the version, with causes.

        Raises:
            RefitError: if no shard took it.
        """
        collector = self._collector
        collector.updating = True
        self._withdraw_offer()
        self._end_stream()
        self._tell_facts(of.UpdateBegun(version=new))
        try:
            failed = await self._update_each(publisher, new)
            until = asyncio.get_running_loop().time() + self.config.health.fleet_wait_s
            while asyncio.get_running_loop().time() < until and all(
                isinstance(failed.get(m.shard.name), ShardLost) for m in self._members
            ):
                # Otherwise a trainer would have to repeat its update because of a process that
                # died.
                await self._until_one_is_open()
                failed = await self._update_each(publisher, new)
            taken = [m for m in self._members if m.shard.name not in failed]
            causes = {name: str(error) or repr(error) for name, error in failed.items()}
            cause = "" if taken else "; ".join(f"{name}: {why}" for name, why in causes.items())
            if taken:
                self._publisher = publisher
                collector.updated(new)
            self._tell_facts(
                of.UpdateFinished(version=new, failed=tuple(causes.items()), cause=cause)
            )
        finally:
            collector.updating = False
            self._act()
        if not taken:
            raise RefitError(f"version {new} reached no shard: {cause}")
        for member in self._members:
            self._catch_up(member)
        return causes

    async def _update_each(self, publisher: WeightPublisher, new: int) -> dict[str, Exception]:
        """Update every shard that is open; returns why a shard, or an engine of one, did not take
        the version."""
        members = [member for member in self._members if member.open]
        timeouts = self.config.timeouts
        joint = JointUpdate(
            publisher,
            [member.shard.name for member in members],
            wait_s=min(timeouts.control_s, timeouts.refit_s / 2),
        )
        outcomes = await asyncio.gather(
            *(self._update_one(member, joint, new) for member in members)
        )
        joint.end()
        failed: dict[str, Exception] = {
            member.shard.name: ShardLost("it is being opened again")
            for member in self._members
            if member not in members
        }
        for member, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, Exception):
                failed[member.shard.name] = outcome
            else:
                member.post.version = new
                for engine, cause in outcome.items():
                    failed[qualified_engine(engine, member.shard.name)] = RefitError(cause)
        return failed

    async def _until_one_is_open(self) -> None:
        while not any(member.open for member in self._members):
            self._waits.raise_failure()
            self._changed.clear()
            await self._changed.wait()

    async def _update_one(
        self, member: _Member, joint: JointUpdate, new: int
    ) -> dict[str, str] | Exception:
        """Update one shard; returns the engines that did not take the version, or why none did."""
        name = member.shard.name
        try:
            if member.post.version == new:
                return {}
            before, member.suspect = member.suspect, True
            try:
                timeouts = self.config.timeouts
                report = await member.answered(
                    member.shard.update(joint.part(name), new),
                    timeouts.refit_s + timeouts.control_s,
                )
            except (RefitError, ConfigError):
                # Its scheduler lives, and knows which of its engines are whole.
                member.suspect = before
                raise
            member.suspect = False
            return dict(report.quarantined)
        except AprilschedError as error:
            log.error("%s did not take version %d: %s", name, new, error)
            return error
        finally:
            joint.left(name)

    async def _conclude(self, publisher: ConcludingPublisher) -> None:
        try:
            await called("the publisher", publisher.conclude)
        except Exception as error:
            log.warning("%s", raised("the publisher", error))

    def _catch_up(self, member: _Member) -> None:
        """Let a shard with another version load that of the run, if it can be published again."""
        busy = member.catching_up is not None and not member.catching_up.done()
        if member.open and not busy and not self._collector.takes_part(member.post):
            member.catching_up = self._start(self._caught_up(member))

    async def _caught_up(self, member: _Member) -> None:
        delay = _AGAIN_S
        while member.open:
            async with self._lock:
                publisher, version = self._publisher, self._collector.version
                if self._collector.takes_part(member.post) or not member.open:
                    return
                if publisher is None or not _holds(publisher, version):
                    log.warning(
                        "%s waits for the next update_weights(), because version %d cannot be "
                        "published again",
                        member.shard.name,
                        version,
                    )
                    member.catching_up = None
                    self._act()
                    return
                joint = JointUpdate(publisher, ())
                joint.end()
                if not isinstance(await self._update_one(member, joint, version), Exception):
                    member.post.version = version
                    log.warning("%s has caught up to version %d", member.shard.name, version)
                    self._act()
                    return
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LATEST_S)

    # --- checkpoints ---------------------------------------------------------------------------

    async def checkpoint(self, path: Path | str, *, acknowledge: bool = True) -> None:
        """Write the state of the collector and of all shards to a folder.

        The folder is a cut of one moment: no group is in flight between a shard and the collector
        in it. It must be on a disk that every shard sees. Every shard needs a store.

        Args:
            path: the folder; what an earlier checkpoint has in it is replaced as a whole or not at
                all.
            acknowledge: must be True: batches that were taken count as trained on.

        Raises:
            StoreError: if it cannot be written.
            ConfigError: if a shard has no store.
        """
        self._check_open(whole=False)
        if not acknowledge:
            raise _no_acknowledging()
        without = [member.shard.name for member in self._members if not member.stored]
        if without:
            raise ConfigError(
                f"checkpoint() needs a store in every shard, which keeps its groups until they are "
                f"in a batch; give one to {', '.join(without)}."
            )
        async with self._lock:
            self._frozen = True
            try:
                await self._checkpoint(Path(path))
            finally:
                self._frozen = False
                self._act()

    async def _checkpoint(self, path: Path) -> None:
        lost = [member.shard.name for member in self._members if not member.open]
        if lost:
            raise StoreError(f"{', '.join(lost)} is being opened again; save when it is there.")
        async with asyncio.TaskGroup() as group:
            # No orders are under way after this, and what was decided is told before the cut.
            for member in self._members:
                group.create_task(member.telling.acquire())
        try:
            name = _new_name(path)
            cut = self._collector.cut(name)
            orders = [self._orders(member) for member in self._members]
            folder = path / name
            await asyncio.to_thread(folder.mkdir, parents=True)
            await asyncio.gather(
                *(
                    self._cut_shard(member, each, folder)
                    for member, each in zip(self._members, orders, strict=True)
                )
            )
        except ShardLost as error:
            raise StoreError(f"a shard was lost while it was saved: {error}") from error
        except OSError as error:
            raise StoreError(f"{path} cannot be written ({error}).") from error
        finally:
            for member in self._members:
                member.telling.release()
        await asyncio.to_thread(_conclude_checkpoint, path, name, cut)

    async def _cut_shard(self, member: _Member, orders: Orders, folder: Path) -> None:
        await member.answered(member.shard.tell(orders), answer_s(self.config))
        saving = member.shard.checkpoint(folder / member.shard.name)
        await member.answered(saving, self.config.timeouts.refit_s)

    def restore(self, path: Path | str) -> None:
        """Begin with a checkpoint. Call it before the ``async with`` block, with the same shards
        and the same prompts from the first one.

        Raises:
            StoreError: if there is no checkpoint, or if it cannot be read.
            SchedulerClosed: if the scheduler was opened already.
        """
        if self._is_open:
            raise SchedulerClosed("restore() comes before the `async with` block.")
        path = Path(path)
        try:
            saved = (path / _COLLECTOR).read_bytes()
        except OSError as error:
            raise StoreError(f"{path} has no checkpoint of shards ({error}).") from error
        self._restored = path / self._collector.restore(saved)

    # --- shards --------------------------------------------------------------------------------

    async def _open(self, member: _Member) -> None:
        shard, post = member.shard, member.post
        member.openings += 1
        first = member.openings == 1
        path = None
        if self._folder is not None:
            path = shard_log(self._folder, shard.name, member.openings)
        checkpoint = None
        if self._restored is not None and first:
            checkpoint = self._restored / shard.name
        member.begin()
        opened = await member.answered(
            shard.open(
                shard_config(self.config), log=path, checkpoint=checkpoint, suspect=member.suspect
            ),
            max(self.config.health.fleet_wait_s, self.config.timeouts.control_s),
        )
        if first and self._restored is None and opened.continued:
            raise ConfigError(
                f"the store of {shard.name} has another run; restore a checkpoint of it, or begin "
                "with new stores."
            )
        member.open, member.stored = True, opened.stored
        member.held = member.told = False
        self._collector.opened(post, opened)
        self._tell_facts(
            of.ShardOpened(
                shard=shard.name,
                slot=post.slot,
                opening=member.openings,
                version=opened.run_version,
            )
        )

    async def _serve(self, member: _Member) -> None:
        """Talk to a shard, and open it again when it is lost, until the scheduler is closed."""
        while True:
            try:
                if not member.open:
                    try:
                        await self._open(member)
                    except StoreError as error:
                        # A process that hangs has it until it is gone, some time after its end.
                        raise ShardLost(str(error)) from error
                    log.warning("%s is there again", member.shard.name)
                    self._catch_up(member)
                self._act()
                await self._converse(member)
            except (ShardLost, EngineError) as error:
                await self._lose(member, error)
            except Exception as error:
                log.error("%s ends the run: %r", member.shard.name, error)
                self._waits.fail(error)
                return
            await asyncio.sleep(member.delay)
            member.delay = min(2 * member.delay, _LATEST_S)

    async def _lose(self, member: _Member, error: Exception) -> None:
        if member.open:
            log.error("%s is lost and is opened again: %s", member.shard.name, error)
            self._tell_facts(of.ShardLost(shard=member.shard.name, cause=str(error)))
        else:
            log.error("%s could not be opened: %s", member.shard.name, error)
        member.open = member.answers = False
        member.lose(str(error))
        self._collector.lost(member.post)
        self._act()
        await self._close_shard(member)
        if any(each.answers for each in self._members):
            return
        now = asyncio.get_running_loop().time()
        self._none_since = now if self._none_since is None else self._none_since
        if now - self._none_since >= self.config.health.fleet_wait_s:
            self._waits.fail(FleetLost(f"no shard is left: {error}"))
            self._changed.set()

    async def _converse(self, member: _Member) -> None:
        """Ask and tell until one of both fails."""
        member.due.set()
        both = [asyncio.create_task(self._ask(member)), asyncio.create_task(self._tell(member))]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.wait(both)
        for task in both:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _ask(self, member: _Member) -> None:
        while True:
            news = await member.answered(member.shard.ask(), answer_s(self.config))
            took_part = self._collector.takes_part(member.post)
            self._collector.note(member.post, news)
            if member.told:
                member.answers, self._none_since = True, None
            if member.answers and self._collector.takes_part(member.post):
                member.delay, member.away_since = _AGAIN_S, None
            if took_part and not self._collector.takes_part(member.post):
                self._catch_up(member)
            self._act()

    async def _tell(self, member: _Member) -> None:
        while True:
            await member.due.wait()
            async with member.telling:
                member.due.clear()
                orders = self._orders(member)
                await member.answered(member.shard.tell(orders), answer_s(self.config))
                member.told = True

    def _orders(self, member: _Member) -> Orders:
        """What the shard is to be told now."""
        post = member.post
        member.held = self._collector.must_hold(post)
        orders = Orders(
            prompts=tuple(post.prompts),
            held=member.held,
            received=tuple(post.received),
            step=self._collector.step,
        )
        post.prompts.clear()
        post.received.clear()
        return orders

    # --- decisions -----------------------------------------------------------------------------

    def _act(self) -> None:
        """Carry out what the collector decides now."""
        collector = self._collector
        if not self._is_open:
            return
        self._changed.set()
        for group in self._evicted():
            self._tell_facts(group)
        self._note_away()
        if not self._frozen:
            self._give_up_awaited()
        batch = collector.offer()
        if batch is not None:
            if batch.complete:
                self._tell_facts(of.BatchOffered(batch=batch.index, version=batch.version))
            self._waits.show(batch)
        elif collector.ended and self._waits.batch_requested:
            collector.end_request()
            self._tell_facts(of.PromptsEnded())
            share = self.config.retries.failed_share
            end = collector.prompts.outcome.end(collector.prompts.cursor, share)
            self._waits.refuse(end, batch=True, evaluations=())
        if self._frozen:
            return
        if self._waits.batch_requested and (error := self._stranded()) is not None:
            self._waits.refuse(error, batch=True, evaluations=())
        missing = collector.give()
        if missing:
            collector.prompts.fetching = True
            self._tell_facts(of.PromptsRequested(count=missing))
            self._start(self._fetch(missing))
        held = collector.held
        for member in self._members:
            post = member.post
            holds = collector.must_hold(post, held=held)
            news = post.prompts or post.received or member.held != holds
            if member.open and news:
                member.due.set()

    def _evicted(self) -> list[of.GroupDropped]:
        evicted = list(self._collector.evicted)
        self._collector.evicted.clear()
        return [
            of.GroupDropped(
                group_id=group.group_id,
                reason=Reason.STALE,
                cause="its oldest token is older than the bound on staleness",
                rollouts=tuple(
                    of.DroppedRollout(
                        rollout_id=rollout.rollout_id,
                        reason=Reason.STALE,
                        tokens=int((rollout.versions >= 0).sum()),
                    )
                    for rollout in group.rollouts
                ),
            )
            for group in evicted
        ]

    def _note_away(self) -> None:
        """Note which shards do not take part, and look again when they have had their time."""
        loop = asyncio.get_running_loop()
        for member in self._members:
            if member.away_since is None and not self._collector.takes_part(member.post):
                member.away_since = loop.time()
                loop.call_later(self.config.health.fleet_wait_s + _AGAIN_S, self._act)

    def _coming(self, member: _Member) -> bool:
        """Whether a shard may take part again without the trainer: it is opened again or catches
        up, and has not needed `health.fleet_wait_s` for that yet."""
        busy = member.catching_up is not None and not member.catching_up.done()
        if member.open and not busy:
            return False
        now = asyncio.get_running_loop().time()
        since = now if member.away_since is None else member.away_since
        return now - since < self.config.health.fleet_wait_s

    def _give_up_awaited(self) -> None:
        awaited = {post.name for post in self._collector.awaited}
        for member in self._members:
            if member.shard.name in awaited and not self._coming(member):
                given = self._collector.give_up(member.post)
                log.warning(
                    "%s does not have version %d, so the other shards generate the last %d prompts "
                    "that it has",
                    member.shard.name,
                    self.version,
                    given,
                )

    def _stranded(self) -> RefitError | None:
        """The error that no shard has the version of the run and none will have it by itself."""
        collector = self._collector
        if collector.updating or not any(member.open for member in self._members):
            return None
        if any(collector.takes_part(each.post) or self._coming(each) for each in self._members):
            return None
        return RefitError(
            f"no shard has version {self.version}; call update_weights() with it or a newer one."
        )

    async def _fetch(self, count: int) -> None:
        """Read prompts from the source."""

        def early(prompts: tuple[Prompt | RefusedPrompt, ...]) -> None:
            self._arrive(prompts, last=False, partial=True)

        try:
            prompts, last = await called("the source of prompts", self._source.take, count, early)
        except Exception as error:
            self._waits.fail(error)
            return
        self._arrive(prompts, last=last, partial=False)

    def _arrive(
        self, prompts: Sequence[Prompt | RefusedPrompt], *, last: bool, partial: bool
    ) -> None:
        supply = self._collector.prompts
        for prompt in prompts:
            if isinstance(prompt, Prompt):
                supply.consecutive_failures = 0
                continue
            supply.consecutive_failures += 1
            if prompt.cause not in supply.outcome.causes:
                log.error("a prompt cannot be used: %s; later ones are only counted", prompt.cause)
            supply.outcome.fail(prompt.cause)
            if supply.consecutive_failures >= self.config.retries.failed_groups:
                self._waits.fail(supply.outcome.given_up(supply.consecutive_failures, prompt.cause))
        self._tell_facts(of.PromptsReceived(prompts=len(prompts), last=last, partial=partial))
        self._collector.arrived(prompts, last=last, partial=partial)
        self._act()

    # --- tasks and facts -----------------------------------------------------------------------

    def _check_open(self, *, whole: bool = True) -> None:
        self._waits.raise_failure()
        if not self._is_open or self._pid != os.getpid():
            raise SchedulerClosed("use the scheduler inside its `async with` block.")
        if whole and (error := self._stranded()) is not None:
            raise error

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name="aprilsched shards")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _result(self, task: asyncio.Task[T], leave: Callable[[asyncio.Task[T]], object]) -> T:
        """What a task returns; `leave` is called if the wait for it is cancelled."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not self._is_open and task.cancelled():
                raise closed_meanwhile() from None
            leave(task)
            raise

    def _tell_facts(self, *facts: of.Fact) -> None:
        self._listeners.facts(facts, asyncio.get_running_loop().time())


def _holds(publisher: WeightPublisher, version: int) -> bool:
    return isinstance(publisher, RepublishingPublisher) and publisher.holds(version)


def _no_acknowledging() -> ConfigError:
    return ConfigError(
        "batches of shards count as trained on when they are taken; leave acknowledge out."
    )


def _note_end(task: asyncio.Task[Any]) -> None:
    """Say how an update has ended whose caller waits no longer."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("an update whose call was cancelled has failed: %s", error)


def _plain(name: str) -> bool:
    return bool(name) and Path(name).name == name and name not in (".", "..", _COLLECTOR)


def _new_name(path: Path) -> str:
    taken = {each.name for each in path.iterdir()} if path.is_dir() else set[str]()
    number = 0
    while str(number) in taken:
        number += 1
    return str(number)


def _conclude_checkpoint(path: Path, name: str, cut: Callable[[], bytes]) -> None:
    """Make the new files those of the checkpoint, and remove the ones before."""
    content, writing = cut(), path / f".{_COLLECTOR}.writing"
    try:
        with writing.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(writing, path / _COLLECTOR)
    except OSError as error:
        raise StoreError(f"{path} cannot be written ({error}).") from error
    for other in path.iterdir():
        if other.is_dir() and other.name != name and other.name.isdecimal():
            rmtree(other, ignore_errors=True)
