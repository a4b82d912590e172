"""A shard in the process of the collector: a scheduler with its part of the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from aprilsched.coordinator.episodes import Episode
from aprilsched.coordinator.prompts import PromptQueue
from aprilsched.coordinator.refits import RefitReport
from aprilsched.coordinator.rollouts import RolloutScheduler
from aprilsched.core.config import SchedulerConfig
from aprilsched.core.messages import facts as of
from aprilsched.core.messages.facts import Fact
from aprilsched.core.state.ledger import FAILURES
from aprilsched.core.state.state import SchedulerState
from aprilsched.core.steps.engines import stranded
from aprilsched.driver.callbacks import Accept, GroupReward, Reward
from aprilsched.engines.base import Fleet
from aprilsched.errors import AprilschedError, FleetLost, RefitError, SchedulerClosed
from aprilsched.shards.base import Complete, News, Opened, Orders, ShardLost, answer_s, serial_of
from aprilsched.store.in_memory import Store
from aprilsched.telemetry.base import AnyListener, TokenChunks
from aprilsched.telemetry.event_log import EventLog
from aprilsched.types import Batch, Group, Prompt
from aprilsched.weights.publisher import WeightPublisher

_AGAIN_S = 1.0
"""Seconds after which a group is asked for again where no engine can generate before an update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardParts:
    """What a shard is made of; the fields are the arguments of
    :class:`~aprilsched.RolloutScheduler`.

    The functions see a prompt with its number under the key ``aprilsched.serial`` of its metadata.
    """

    fleet: Fleet
    reward: Reward | GroupReward | None = None
    reward_scope: Literal["rollout", "group"] = "rollout"
    accept: Accept | None = None
    episode: Episode | None = None
    store: Store | None = None
    listeners: Sequence[AnyListener] = ()


class LocalShard:
    """A shard in this process.

    Args:
        name: its name, which no other shard has.
        parts: makes the parts of the shard. It is called each time the shard is opened, so that a
            shard that was lost begins again with a new fleet over the same engines and the same
            store.
    """

    def __init__(self, name: str, parts: Callable[[], ShardParts]) -> None:
        self.name = name
        self._parts = parts
        self._rollouts: RolloutScheduler | None = None
        self._queue = PromptQueue(together_s=0)
        self._reporter = self._new_reporter()
        self._log: EventLog | None = None
        self._news = asyncio.Event()
        self._answer_s = 0.0
        self._batches: dict[int, Batch] = {}
        """The batches that the store keeps until they are received."""
        self._held = False
        self._failure: BaseException | None = None
        self._taking: asyncio.Task[None] | None = None

    # --- lifetime ------------------------------------------------------------------------------

    async def open(
        self,
        config: SchedulerConfig,
        *,
        log: Path | None,
        checkpoint: Path | None,
        suspect: bool,
    ) -> Opened:
        """Begin; see :meth:`~aprilsched.shards.base.Shard.open`."""
        await self.close()
        parts = self._parts()
        self._queue, self._news = PromptQueue(together_s=0), asyncio.Event()
        self._batches, self._held, self._failure = {}, False, None
        self._reporter, self._answer_s = self._new_reporter(), answer_s(config)
        listeners: list[AnyListener] = [self._reporter, *parts.listeners]
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log = EventLog(log)
            listeners.append(self._log)
        rollouts = self._rollouts = RolloutScheduler(
            parts.fleet,
            self._queue,
            reward=parts.reward,
            reward_scope=parts.reward_scope,
            accept=parts.accept,
            episode=parts.episode,
            config=config,
            listeners=listeners,
            store=parts.store,
        )
        if checkpoint is not None:
            rollouts.restore(checkpoint)
        if suspect:
            rollouts.suspect_weights()
        try:
            await rollouts.__aenter__()
        except BaseException:
            self._rollouts = None
            raise
        if self._log is not None:
            self._log.start()
        state = rollouts.state
        self._reporter.opened()
        self._taking = asyncio.create_task(self._take(rollouts), name=f"aprilsched {self.name}")
        engines = state.fleet.control.engines
        return Opened(
            version=None if stranded(state) else state.weights.versions.trainer,
            run_version=state.weights.versions.trainer,
            engines=len(engines),
            serials=serials_of(state),
            continued=state.resumed,
            stored=parts.store is not None,
        )

    async def close(self) -> None:
        """End in any state."""
        taking, self._taking = self._taking, None
        if taking is not None:
            taking.cancel()
            await asyncio.wait([taking])
        rollouts, self._rollouts = self._rollouts, None
        if rollouts is not None:
            await rollouts.close()
        log, self._log = self._log, None
        if log is not None:
            await asyncio.to_thread(log.close)

    # --- messages ------------------------------------------------------------------------------

    async def tell(self, orders: Orders) -> None:
        """Carry out orders; see :meth:`~aprilsched.shards.base.Shard.tell`."""
        rollouts = self.opened()
        for number in orders.received:
            batch = self._batches.pop(number, None)
            if batch is not None:
                batch.acknowledge()
        self._reporter.step = orders.step
        if orders.held != self._held:
            self._held = orders.held
            rollouts.hold(held=orders.held)
        if orders.prompts:
            self._queue.put(*orders.prompts)

    async def ask(self) -> News:
        """Wait for news; see :meth:`~aprilsched.shards.base.Shard.ask`."""
        self.opened()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._answer_s / 3):
                await self._news.wait()
        self.opened()
        self._news.clear()
        return self._reporter.news()

    async def update(self, publisher: WeightPublisher, version: int) -> RefitReport:
        """Load a version; see :meth:`~aprilsched.shards.base.Shard.update`."""
        with _lost_with_its_fleet():
            return await self.opened().update_weights(publisher, version=version, acknowledge=False)

    async def evaluate(self, prompts: Sequence[Prompt], group_size: int) -> Batch:
        """Generate responses; see :meth:`~aprilsched.shards.base.Shard.evaluate`."""
        with _lost_with_its_fleet():
            return await self.opened().evaluate(prompts, group_size=group_size)

    async def checkpoint(self, path: Path) -> None:
        """Write the state to a file; see :meth:`~aprilsched.shards.base.Shard.checkpoint`."""
        await self.opened().checkpoint(path, acknowledge=False)

    # --- the scheduler -------------------------------------------------------------------------

    def _new_reporter(self) -> Reporter:
        return Reporter(lambda: self.opened().state, lambda: self._news.set())

    def opened(self) -> RolloutScheduler:
        """The scheduler.

        Raises:
            ShardLost: if the shard is not open, or has lost its fleet.
        """
        if self._failure is not None:
            with _lost_with_its_fleet():
                raise self._failure
        if self._rollouts is None:
            raise ShardLost(f"{self.name} is not open.")
        return self._rollouts

    async def _take(self, rollouts: RolloutScheduler) -> None:
        """Take every group as soon as it is complete, until the scheduler ends."""
        while True:
            try:
                batch = await rollouts.next_batch()
            except RefitError:
                # No engine can generate before the next update, which the next news says.
                await asyncio.sleep(_AGAIN_S)
                continue
            except AprilschedError as error:
                self._failure = error
                self._news.set()
                return
            if batch.receipt is not None:
                self._batches[batch.index] = batch
            self._reporter.deliver(batch.index, batch.groups)


@contextmanager
def _lost_with_its_fleet() -> Generator[None]:
    """Raise ShardLost for the end of the shard's scheduler."""
    try:
        yield
    except (FleetLost, SchedulerClosed) as error:
        raise ShardLost(str(error)) from error


# --- reporter ------------------------------------------------------------------------------------

# Gathers what a shard has to report, from the facts and the state of its scheduler.


class Reporter:
    """A listener of a shard's scheduler that keeps the next :class:`News` of the shard.

    There is news when a group is complete or dropped, when the version has changed, and when
    :attr:`step` rollouts have ended, because some refill rules count the rollouts that generate.

    Args:
        state: returns the state of the scheduler.
        wake: is called when there is news.
    """

    def __init__(self, state: Callable[[], SchedulerState], wake: Callable[[], None]) -> None:
        self._state = state
        self._wake = wake
        self._groups: list[tuple[int, Group]] = []
        self._dropped: dict[int, str] = {}
        self._open: dict[int, int] = {}
        """Serial of each group that was launched and is neither delivered nor dropped."""
        self._cursor: int | None = None
        """Number of prompts that were launched when the shard was opened."""
        self.step = 0
        """Number of rollouts whose end is news; 0 if it never is."""
        self._ended = 0
        """Number of rollouts that have ended since the last news."""
        self._said_complete = 0

    def opened(self) -> None:
        """The scheduler is open. What it has in flight is known, and later launches are counted."""
        state = self._state()
        self._cursor = state.prompts.cursor
        for group in state.in_flight.groups.values():
            self._note(group.group_id)

    def deliver(self, number: int, groups: Iterable[Group]) -> None:
        """A batch of the scheduler was taken."""
        for group in groups:
            self._open.pop(group.group_id, None)
            self._groups.append((number, group))
        self._wake()

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        """Look at what has changed; see :class:`~aprilsched.telemetry.base.Listener`."""
        for fact in facts:
            match fact:
                case of.GroupLaunched(evaluation_id=None):
                    self._note(fact.group_id)
                case of.RolloutFinished():
                    self._ended += 1
                    self._look()
                case of.GroupDropped():
                    serial = self._open.pop(fact.group_id, None)
                    if serial is not None:
                        self._dropped[serial] = fact.cause if fact.reason in FAILURES else ""
                        self._wake()
                    else:
                        # A group of which a member was lost may be complete without it.
                        self._look()
                case of.UpdateFinished() | of.EngineAdmitted() | of.EngineLost():
                    self._wake()
                case _:
                    pass

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        """Tokens are no news; see :class:`~aprilsched.telemetry.base.BulkListener`."""

    def news(self) -> News:
        """Everything since the last call."""
        state = self._state()
        self._ended = 0
        complete = _complete(state)
        self._said_complete = complete.groups
        groups, self._groups = tuple(self._groups), []
        dropped, self._dropped = self._dropped, {}
        return News(
            groups=groups,
            dropped=dropped,
            launched=state.prompts.cursor - (self._cursor or 0),
            generating=state.in_flight.generating,
            complete=complete,
            version=None if stranded(state) else state.weights.versions.trainer,
            engines=len(state.fleet.control.engines),
        )

    def _note(self, group_id: int) -> None:
        group = self._state().in_flight.groups.get(group_id)
        serial = None if group is None else serial_of(group.prompt)
        if serial is not None:
            self._open[group_id] = serial

    def _look(self) -> None:
        """Wake the collector if it would decide otherwise by now."""
        many = self.step and self._ended >= self.step
        if many or _complete(self._state()).groups > self._said_complete:
            self._wake()


def serials_of(state: SchedulerState) -> tuple[int, ...]:
    """The serials of the prompts whose groups a scheduler has: in flight, or in batches that were
    not acknowledged."""
    unacknowledged = state.delivery.unacknowledged.values()
    records = chain(state.in_flight.groups.values(), *(record.groups for record in unacknowledged))
    found = (serial_of(record.prompt) for record in records)
    return tuple(dict.fromkeys(serial for serial in found if serial is not None))


def _complete(state: SchedulerState) -> Complete:
    ready, offer = state.in_flight.ready, state.delivery.offer
    offered = () if offer is None or offer.record is None else offer.groups
    return Complete(
        groups=len(ready) + len(offered),
        samples=ready.samples + sum(len(group.members) for group in offered),
        tokens=ready.tokens + sum(group.tokens for group in offered),
    )
