"""Tests how a batch gets to the trainer: it is not lost, doubled, or acknowledged too early.

The trainer may cancel its wait at any moment, and the store may be slow.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aprilsched import (
    Batch,
    LongTailWorkload,
    MemoryStore,
    RolloutScheduler,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
    SqliteStore,
)
from aprilsched.config import LengthBuckets, Staleness
from aprilsched.errors import StoreError
from aprilsched.kernel.core.invariants import check as check_invariants
from aprilsched.kernel.core.messages.commands import Command, Offer
from aprilsched.kernel.core.messages.events import Event, UpdateRequested
from aprilsched.kernel.core.policies.staleness import StalenessRule
from aprilsched.kernel.core.state.saved import Snapshot
from aprilsched.kernel.store import Store
from aprilsched.planning import presets
from aprilsched.simulation.engine import run_virtual
from tests.support.table import each_row

pytestmark = pytest.mark.virtual_time


def scheduler(
    store: Store | None = None,
    *,
    fleet: SimFleet | None = None,
    listeners: tuple[object, ...] = (),
    **changes: object,
) -> RolloutScheduler:
    values: dict[str, object] = {"batch_groups": 2, "group_size": 2, "over_provision": 1.5}
    return RolloutScheduler(
        fleet or SimFleet(1),
        LongTailWorkload(median=20, cap=100, group_size=2, vocab_size=1000, seed=1),
        config=SchedulerConfig(**{**values, **changes}),  # type: ignore[arg-type]
        store=store,
        listeners=listeners,  # type: ignore[arg-type]
    )


class GatedStore(MemoryStore):
    """A store whose durable writes block in their thread until the test releases them."""

    inline = False

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.started = 0
        self.second = threading.Event()

    def save(self, snapshot: Snapshot, *, durable: bool) -> None:
        if durable:
            self.started += 1
            if self.started == 2:
                self.second.set()
            self.gate.acquire()
        super().save(snapshot, durable=durable)


class Cancelling:
    """A listener that cancels a task at the moment when a batch is offered."""

    def __init__(self) -> None:
        self.task: asyncio.Task[Batch] | None = None

    async def cut_off(self, rollouts: RolloutScheduler) -> None:
        """Wait for a batch until it is offered, and no longer."""
        self.task = asyncio.create_task(rollouts.next_batch())
        with pytest.raises(asyncio.CancelledError):
            await self.task

    def on_event(self, event: Event, now: float) -> None:
        pass

    def on_command(self, command: Command, now: float) -> None:
        if isinstance(command, Offer) and self.task is not None:
            self.task.cancel()
            self.task = None


async def polled(rollouts: RolloutScheduler) -> Batch | None:
    try:
        return await asyncio.wait_for(rollouts.next_batch(), 0.01)
    except TimeoutError:
        return None


@each_row(
    "preset",
    [presets.on_policy, presets.april, presets.rollpacker, presets.pool, "buckets"],
    ids=lambda preset: getattr(preset, "__name__", preset),
)
@each_row("streams", [False, True])
def test_a_polling_trainer_gets_what_a_waiting_one_gets(preset: Any, streams: bool):
    """A call that times out must not end the current batch. Otherwise the engines would pause, and
    the next call would start more groups."""
    base = SchedulerConfig(batch_groups=4, group_size=4)
    buckets = replace(base, refill=LengthBuckets(store=5.0), over_provision=1.5)
    config = buckets if preset == "buckets" else preset(base)

    async def run(patience: float | None) -> tuple[list[tuple[int, bytes]], float, int]:
        found: list[tuple[int, bytes]] = []
        timeouts = 0
        workload = LongTailWorkload(seed=1, median=100, cap=1000, group_size=4)
        async with RolloutScheduler(SimFleet(2), workload, config=config) as rollouts:
            for _ in range(5):
                complete = False
                while not complete:
                    try:
                        async with asyncio.timeout(patience):
                            if streams:
                                part = await anext(rollouts.stream())
                            else:
                                part = await rollouts.next_batch()
                    except TimeoutError:
                        timeouts += 1
                        continue
                    found += [(r.rollout_id, r.token_ids.tobytes()) for r in part.rollouts]
                    complete = part.complete
                await rollouts.update_weights(SimPublisher())
            check_invariants(rollouts.state)
            return found, asyncio.get_running_loop().time(), timeouts

    batches, seconds, _ = run_virtual(run(None))
    for patience in (0.5, 0.1):
        polled_batches, polled_seconds, timeouts = run_virtual(run(patience))
        assert timeouts
        assert polled_batches == batches
        assert polled_seconds == pytest.approx(seconds)


@each_row("pace", ["synchronous", "asynchronous"])
def test_a_store_slower_than_the_trainers_timeout_is_no_loss(pace: str):
    store = GatedStore()

    async def main() -> None:
        async with scheduler(store, fleet=SimFleet(1, time_scale=0.001), pace=pace) as rollouts:
            state = rollouts.state
            try:
                for index in range(4):
                    while store.started == 2 * index:
                        assert await polled(rollouts) is None
                    launched = state.in_flight.counters.launched
                    for _ in range(5):
                        assert await polled(rollouts) is None
                    # It is decided and written once, and no later batch overtakes it.
                    assert store.started == 2 * index + 1
                    assert state.in_flight.counters.batches == index
                    assert state.in_flight.counters.launched - launched <= 2 * 3 * 2
                    store.gate.release()
                    batch = None
                    while batch is None:
                        batch = await polled(rollouts)
                    assert (batch.index, batch.version) == (index, index)
                    assert list(state.delivery.unacknowledged) == [index]
                    store.gate.release()  # for the update
                    await rollouts.update_weights(SimPublisher())
                    assert not state.delivery.unacknowledged
                    check_invariants(state)
            finally:
                for _ in range(100):
                    store.gate.release()

    asyncio.run(main())


@each_row("saved", [False, True])
async def test_a_batch_whose_wait_is_cancelled_is_not_taken(saved: bool):
    cancelling = Cancelling()
    async with scheduler(MemoryStore() if saved else None, listeners=(cancelling,)) as rollouts:
        await cancelling.cut_off(rollouts)
        state = rollouts.state
        assert state.in_flight.counters.batches == 0
        assert state.delivery.offer is not None
        offered = [group.group_id for group in state.delivery.offer.batch.groups]
        assert [g.group_id for g in (await rollouts.next_batch()).groups] == offered


@each_row("rule", ["mask", "evict", "finish"])
async def test_an_update_withdraws_untaken_batches(rule: StalenessRule):
    cancelling = Cancelling()
    async with scheduler(
        MemoryStore(), listeners=(cancelling,), max_staleness=Staleness(0, rule=rule)
    ) as rollouts:
        await cancelling.cut_off(rollouts)
        for _ in range(3):
            await rollouts.update_weights(SimPublisher())
            assert not rollouts.state.delivery.unacknowledged
        check_invariants(rollouts.state)
        batch = await rollouts.next_batch()
        assert (batch.index, batch.version) == (0, 3)
        for rollout in batch.rollouts:
            stale = (rollout.versions >= 0) & (rollout.versions < 3)
            assert not rollout.loss_mask[stale].any()
        if rule == "evict":
            assert rollouts.state.in_flight.ledger.total


async def test_an_update_between_offer_and_take_rebuilds_the_batch():
    updates: list[asyncio.Handle] = []

    def update() -> None:
        rollouts._session.refits.publisher = SimPublisher()
        rollouts._session.feed(UpdateRequested(version=1))

    class Updating(Cancelling):
        def on_command(self, command: Command, now: float) -> None:
            # The update comes before the trainer's next step, which this offer wakes.
            if isinstance(command, Offer) and not updates:
                updates.append(asyncio.get_running_loop().call_soon(update))

    rollouts = scheduler(MemoryStore(), listeners=(Updating(),))
    async with rollouts:
        batch = await rollouts.next_batch()
        assert (batch.index, batch.version) == (0, 1)
        assert list(rollouts.state.delivery.unacknowledged) == [0]


def test_a_withdrawn_batch_is_not_redelivered_after_a_restart():
    store = MemoryStore()
    cancelling = Cancelling()

    async def life(cancels: bool) -> tuple[list[int], list[bool]]:
        listeners = (cancelling,) if cancels else ()
        async with scheduler(store, listeners=listeners) as rollouts:
            if not cancels:
                if not rollouts.state.fleet.control.engines:
                    await rollouts.update_weights(SimPublisher(), version=rollouts.version)
                batches = [await rollouts.next_batch() for _ in range(3)]
                return [b.index for b in batches], [b.redelivered for b in batches]
            await cancelling.cut_off(rollouts)
            await rollouts.update_weights(SimPublisher())
            saved = store.open()
            assert saved is not None
            assert not saved.batches
            return [], []

    run_virtual(life(True))
    assert run_virtual(life(False)) == ([0, 1, 2], [False] * 3)


def test_a_batch_not_taken_before_the_end_is_available_after():
    store = MemoryStore()
    cancelling = Cancelling()

    async def first() -> list[int]:
        async with scheduler(store, listeners=(cancelling,)) as rollouts:
            await cancelling.cut_off(rollouts)
            assert rollouts.state.delivery.offer is not None
            return [group.group_id for group in rollouts.state.delivery.offer.batch.groups]

    async def second() -> tuple[list[int], list[int]]:
        async with scheduler(store) as rollouts:
            # This one is polled like the first.
            batch = await polled(rollouts) or await rollouts.next_batch()
            after = await rollouts.next_batch()
            check_invariants(rollouts.state)
            return [batch.index, after.index], [group.group_id for group in batch.groups]

    offered = run_virtual(first())
    assert run_virtual(second()) == ([0, 1], offered)


# --- acknowledged when it is safe -------------------------------------------------------------


def test_an_update_returns_when_the_store_has_it():
    store = GatedStore()

    async def main() -> None:
        async with scheduler(store, fleet=SimFleet(1, time_scale=0.001)) as rollouts:
            try:
                store.gate.release()
                await rollouts.next_batch()
                update = asyncio.create_task(rollouts.update_weights(SimPublisher()))
                await asyncio.to_thread(store.second.wait)
                assert rollouts.version == 1
                for _ in range(100):
                    await asyncio.sleep(0)
                assert not update.done()
                store.gate.release()
                await update
                saved = store.open()
                assert saved is not None
                assert (saved.run.version, saved.batches) == (1, [])
            finally:
                for _ in range(100):
                    store.gate.release()

    asyncio.run(main())


def test_an_update_does_not_wait_forever_for_a_hanging_store(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("aprilsched.kernel.shell.durability._SAFE_S", 0.5)

    class Hanging(MemoryStore):
        inline = False

        def __init__(self) -> None:
            super().__init__()
            self.go_on = threading.Event()

        def save(self, snapshot: Snapshot, *, durable: bool) -> None:
            if durable and snapshot.run.version:
                self.go_on.wait()

    store = Hanging()

    async def main() -> None:
        async with scheduler(store) as rollouts:
            await rollouts.next_batch()
            assert (await rollouts.update_weights(SimPublisher())).version == 1
            store.go_on.set()

    with caplog.at_level(logging.WARNING, logger="aprilsched"):
        run_virtual(main())
    assert sum("has not taken the last update" in r.message for r in caplog.records) == 1


def test_a_store_that_fails_does_not_hold_an_update_up(caplog: pytest.LogCaptureFixture):
    class Failing(MemoryStore):
        def save(self, snapshot: Snapshot, *, durable: bool) -> None:
            if snapshot.run.version:
                raise StoreError("no room")
            super().save(snapshot, durable=durable)

    async def main() -> None:
        async with scheduler(Failing()) as rollouts:
            for version in (1, 2):
                await rollouts.next_batch()
                assert (await rollouts.update_weights(SimPublisher())).version == version

    with caplog.at_level(logging.ERROR, logger="aprilsched"):
        run_virtual(main())
    assert sum("is not saved" in record.message for record in caplog.records) == 1


def test_a_checkpoint_that_fails_acknowledges_nothing(tmp_path: Path):
    path = tmp_path / "store"

    async def first() -> None:
        async with scheduler(SqliteStore(path, inline=True)) as rollouts:
            batch = await rollouts.next_batch()
            with pytest.raises(StoreError, match="is not a folder"):
                await rollouts.checkpoint(tmp_path / "none" / "checkpoint")
            assert list(rollouts.state.delivery.unacknowledged) == [batch.index]

    async def second() -> None:
        async with scheduler(SqliteStore(path, inline=True)) as rollouts:
            batch = await rollouts.next_batch()
            assert (batch.index, batch.redelivered) == (0, True)
            await rollouts.checkpoint(tmp_path / "checkpoint")
            assert not rollouts.state.delivery.unacknowledged

    run_virtual(first())
    run_virtual(second())


def test_a_checkpoint_holds_what_is_offered_as_not_taken(tmp_path: Path):
    cancelling = Cancelling()

    async def first(store: Store | None) -> list[int]:
        async with scheduler(store, listeners=(cancelling,)) as rollouts:
            await rollouts.next_batch()
            await cancelling.cut_off(rollouts)
            await rollouts.checkpoint(tmp_path / "checkpoint")
            assert rollouts.state.delivery.offer is not None
            return [group.group_id for group in rollouts.state.delivery.offer.batch.groups]

    async def second() -> tuple[int, bool, list[int]]:
        rollouts = scheduler()
        rollouts.restore(tmp_path / "checkpoint")
        async with rollouts:
            batch = await rollouts.next_batch()
            check_invariants(rollouts.state)
            return batch.index, batch.redelivered, [group.group_id for group in batch.groups]

    for store in (None, MemoryStore()):
        offered = run_virtual(first(store))
        assert run_virtual(second()) == (1, False, offered)
