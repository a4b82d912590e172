"""Tests runs that resume after their process died, with the real coordinator and a real store."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from aprilsched import (
    Batch,
    Group,
    MemoryStore,
    Prompt,
    Rollout,
    RolloutScheduler,
    SamplingParams,
    SimFleet,
    SimPublisher,
    SqliteStore,
    Turn,
)
from aprilsched.config import Health
from aprilsched.errors import (
    ConfigError,
    EngineUnreachable,
    FleetLost,
    RefitError,
    SchedulerClosed,
    StoreError,
)
from aprilsched.kernel.core.invariants import check as check_invariants
from aprilsched.kernel.core.messages.commands import Command, Send
from aprilsched.kernel.core.messages.events import Event, Finished
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.saved import Saved, Snapshot
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.shell import durability
from aprilsched.kernel.store import Store
from aprilsched.kernel.store.sqlite_checkpoints import write_checkpoint
from aprilsched.types import Sample, Sibling
from tests.support import small
from tests.support.small import by_length, config

pytestmark = pytest.mark.virtual_time

PROMPTS = 24


workload = partial(small.workload, PROMPTS)


def scheduler(store: Store | None, **changes: Any) -> RolloutScheduler:
    arguments: dict[str, Any] = {
        "fleet": SimFleet(2, stream_interval=8),
        "prompts": workload(),
        "config": config(),
        "store": store,
        **changes,
    }
    return RolloutScheduler(arguments.pop("fleet"), arguments.pop("prompts"), **arguments)


def content(rollout: Rollout) -> tuple[Any, ...]:
    """Return the content of a response, without its position in the run."""
    return tuple(rollout.token_ids.tolist()), rollout.finish_reason


def by_key(batches: list[Batch]) -> dict[tuple[Any, int], tuple[Any, ...]]:
    found: dict[tuple[Any, int], tuple[Any, ...]] = {}
    for batch in batches:
        for unit in batch.units:
            for rollout in unit.rollouts:
                key = (unit.prompt.key, rollout.index)
                assert key not in found, f"{key} was delivered twice"
                found[key] = content(rollout)
    return found


def siblings(batch: Batch) -> list[tuple[Sibling, ...]]:
    """The siblings of each sample; empty if the batch has groups."""
    return [unit.siblings for unit in batch.units if isinstance(unit, Sample)]


async def to_the_end(store: Store | None, **changes: Any) -> list[Batch]:
    async with scheduler(store, **changes) as rollouts:
        batches = [batch async for batch in rollouts]
        check_invariants(rollouts.state)
        assert not rollouts.state.in_flight.rollouts
    return batches


async def whole_run(**changes: Any) -> dict[tuple[Any, int], tuple[Any, ...]]:
    return by_key(await to_the_end(None, **changes))


def left_behind(store: SqliteStore, to: Path) -> None:
    """Return a copy of what kill -9 would leave now: the bytes of the files, open or not."""
    for suffix in ("", "-wal", "-last"):
        source = store.path.with_name(store.path.name + suffix)
        if source.exists():
            shutil.copyfile(source, to.with_name(to.name + suffix))


# --- kill -9 at any moment -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pace", "refill", "delivery"),
    [
        ("synchronous", "wave", "groups"),
        ("synchronous", "buckets", "groups"),
        ("synchronous", "tail", "groups"),
        ("asynchronous", "pool", "groups"),
        ("synchronous", "wave", "samples"),
        pytest.param("asynchronous", "pool", "samples", marks=pytest.mark.long),
        pytest.param("synchronous", "pool", "groups", marks=pytest.mark.long),
        pytest.param("asynchronous", "wave", "groups", marks=pytest.mark.long),
    ],
)
async def test_a_run_resumes_from_any_moment_of_a_kill(
    tmp_path: Path, pace: str, refill: str, delivery: str
):
    settings = config(pace=pace, refill=refill, delivery=delivery, save_interval_s=0.1)
    expected = await whole_run(config=settings, reward=by_length)
    first = SqliteStore(tmp_path / "first", inline=True)
    moments: list[tuple[Path, list[Batch]]] = []
    got: list[Batch] = []

    async def watch() -> None:
        for number in range(60):
            await asyncio.sleep(0.23)
            copy = tmp_path / f"at-{number}"
            left_behind(first, copy)
            moments.append((copy, list(got)))

    async with scheduler(first, config=settings, reward=by_length) as rollouts:
        watching = asyncio.create_task(watch())
        async for batch in rollouts:
            got.append(batch)
            await asyncio.sleep(0.2)
            batch.acknowledge()
        watching.cancel()
    assert len(moments) > 10
    for path, had in moments:
        store = SqliteStore(path, inline=True)
        again = await to_the_end(store, config=settings, reward=by_length)
        known = {batch.index: batch for batch in had}
        assert all(b.index in known or b.index == len(had) for b in again if b.redelivered)
        # A redelivered batch is the same one, and counts once.
        fresh = [batch for batch in again if batch.index not in known]
        for batch in again:
            if batch.index in known:
                assert by_key([batch]) == by_key([known[batch.index]])
                assert siblings(batch) == siblings(known[batch.index])
        assert by_key(had + fresh) == expected
    assert any(had for _, had in moments)


class Ends:
    """A listener that records when each rollout finished, and which rollouts were sent."""

    def __init__(self) -> None:
        self.sent: dict[int, int] = {}
        self.finished: dict[int, float] = {}

    def on_event(self, event: Event, now: float) -> None:
        if isinstance(event, Finished):
            self.finished[self.sent[event.request_id]] = now

    def on_command(self, command: Command, now: float) -> None:
        if isinstance(command, Send):
            self.sent[command.request_id] = command.rollout_id


async def test_what_was_finished_is_not_generated_again(tmp_path: Path):
    store = SqliteStore(tmp_path / "store", inline=True)
    interval, killed_at = 0.1, 0.35
    first, second, started = Ends(), Ends(), asyncio.get_running_loop().time()
    often = config(save_interval_s=interval)
    async with scheduler(store, config=often, listeners=[first]) as rollouts:
        request = asyncio.create_task(rollouts.next_batch())
        await asyncio.sleep(killed_at)
        left_behind(store, tmp_path / "killed")
        assert not request.done()
        await request
    killed = SqliteStore(tmp_path / "killed", inline=True)
    async with scheduler(killed, listeners=[second]) as rollouts:
        held = {r: m.log.size for r, m in rollouts.state.in_flight.rollouts.items()}
        await rollouts.next_batch()
    ended = {r for r, at in first.finished.items() if at < started + killed_at - 1.01 * interval}
    assert len(ended) > 5
    again = set(second.sent.values())
    assert not ended & again
    assert any(held[rollout] for rollout in again & held.keys()), "no partial was kept"


async def test_lost_saves_are_reported_and_redelivery_is_marked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    store, copy = SqliteStore(tmp_path / "store", inline=True), tmp_path / "copy"
    wal = store.path.with_name("store-wal")
    sizes: list[int] = []
    async with scheduler(store) as rollouts:
        for _ in range(3):
            await rollouts.next_batch()
            sizes.append(wal.stat().st_size)
        left_behind(store, copy)
    assert sizes[0] < sizes[2]
    os.truncate(copy.with_name("copy-wal"), sizes[0])
    caplog.clear()
    async with scheduler(SqliteStore(copy, inline=True)) as rollouts:
        batches = [await rollouts.next_batch() for _ in range(5)]
    assert [batch.index for batch in batches] == [0, 1, 2, 3, 4]
    assert [batch.redelivered for batch in batches] == [True, True, True, False, False]
    (received,) = [
        record.message for record in caplog.records if "lost its last saves" in record.message
    ]
    assert str(copy) in received


# --- acknowledging ---------------------------------------------------------------------------


async def first_batch(store: Store | None, **changes: Any) -> Batch:
    """Return the first batch of a scheduler that does nothing else."""
    async with scheduler(store, **changes) as rollouts:
        return await rollouts.next_batch()


async def test_a_batch_is_delivered_again_until_it_is_acknowledged():
    store = MemoryStore()
    first, second = await first_batch(store), await first_batch(store)
    assert [(b.index, b.redelivered) for b in (first, second)] == [(0, False), (0, True)]
    async with scheduler(store) as rollouts:
        third = await rollouts.next_batch()
        third.acknowledge()
        third.acknowledge()
    for again in (second, third):
        assert [r.rollout_id for r in again.rollouts] == [r.rollout_id for r in first.rollouts]
    last = await first_batch(store)
    assert (last.index, last.redelivered) == (1, False)


async def test_checkpoint_is_written_outside_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    threads: list[int] = []

    def noted(path: Path, snapshot: Snapshot) -> None:
        threads.append(threading.get_ident())
        write_checkpoint(path, snapshot)

    monkeypatch.setattr(durability, "write_checkpoint", noted)
    for store in (None, MemoryStore()):
        async with scheduler(store) as rollouts:
            await rollouts.checkpoint(tmp_path / "state")
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_an_update_acknowledges_batches_delivered_before_it():
    store = MemoryStore()
    found: list[int] = []
    for update in (False, True, True, False, False):
        async with scheduler(store) as rollouts:
            if not rollouts.state.fleet.control.engines:
                await rollouts.update_weights(SimPublisher(), version=rollouts.version)
            found.append((await rollouts.next_batch()).index)
            if update:
                await rollouts.update_weights(SimPublisher())
    assert found == [0, 0, 1, 2, 2]


async def test_an_update_before_redelivery_does_not_acknowledge():
    store = MemoryStore()
    assert (await first_batch(store)).index == 0
    async with scheduler(store) as rollouts:
        await rollouts.update_weights(SimPublisher(), version=1)
        again = await rollouts.next_batch()
    assert (again.index, again.redelivered, again.version) == (0, True, 0)


async def test_acknowledging_a_copy_in_another_process_is_refused():
    async with scheduler(MemoryStore()) as rollouts:
        copy = pickle.loads(pickle.dumps(await rollouts.next_batch()))  # noqa: S301 - our own
        assert copy.tokens > 0
        with pytest.raises(ConfigError, match="in the process of the scheduler"):
            copy.acknowledge()


# --- checkpoints -----------------------------------------------------------------------------


def restored(checkpoint: Path, store: Store | None = None) -> RolloutScheduler:
    rollouts = scheduler(store)
    rollouts.restore(checkpoint)
    return rollouts


async def test_a_run_restored_to_a_step_repeats_what_followed(tmp_path: Path):
    checkpoint = tmp_path / "step-2.aprilsched"
    async with scheduler(None) as rollouts:
        for step in (1, 2):
            await rollouts.next_batch()
            await rollouts.update_weights(SimPublisher(), version=step)
        await rollouts.checkpoint(checkpoint)
        after = [batch async for batch in rollouts]
    async with restored(checkpoint) as rollouts:
        assert rollouts.version == 2
        with pytest.raises(RefitError, match="version=2"):
            await rollouts.next_batch()
        await rollouts.update_weights(SimPublisher(), version=2)
        again = [batch async for batch in rollouts]
    assert [(b.index, b.version) for b in after] == [(b.index, b.version) for b in again]
    assert by_key(after) == by_key(again)
    for one, other in zip(after, again, strict=True):
        assert {g.prompt.key for g in one.groups} == {g.prompt.key for g in other.groups}


@pytest.mark.parametrize("trains_first", [False, True])
async def test_weights_trained_before_a_checkpoint_need_a_new_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trains_first: bool
):
    async with scheduler(None) as rollouts:
        await rollouts.next_batch()
        if not trains_first:
            await rollouts.update_weights(SimPublisher())
        await rollouts.checkpoint(tmp_path / "one")
    async with restored(tmp_path / "one") as rollouts:
        await rollouts.update_weights(SimPublisher(), version=rollouts.version)
    assert ("call checkpoint() after update_weights()" in caplog.text) == trains_first
    caplog.clear()
    async with restored(tmp_path / "one") as rollouts:
        await rollouts.update_weights(SimPublisher())
        await rollouts.next_batch()
        with pytest.raises(ConfigError, match="is not newer"):
            await rollouts.update_weights(SimPublisher(), version=rollouts.version)
    assert "checkpoint()" not in caplog.text


async def test_a_checkpoint_takes_the_place_of_what_the_store_has(tmp_path: Path):
    checkpoint, store = tmp_path / "one", SqliteStore(tmp_path / "store", inline=True)
    async with scheduler(store) as rollouts:
        await rollouts.next_batch()
        await rollouts.checkpoint(checkpoint)
        for _ in range(3):
            (await rollouts.next_batch()).acknowledge()
    async with restored(checkpoint, store) as rollouts:
        assert (await rollouts.next_batch()).index == 1
    again = await first_batch(store)
    assert again.index == 1, "the batch was not acknowledged, and is delivered again"


@pytest.mark.parametrize("acknowledge", [True, False])
async def test_a_trainer_that_takes_batches_ahead_acknowledges_itself(
    tmp_path: Path, acknowledge: bool
):
    """It has trained on one of two batches when the weights are updated. Without acknowledge(), a
    checkpoint would acknowledge both."""
    async with scheduler(MemoryStore()) as rollouts:
        ahead = [await rollouts.next_batch() for _ in range(2)]
        ahead[0].acknowledge()
        await rollouts.update_weights(SimPublisher(), acknowledge=False)
        await rollouts.checkpoint(tmp_path / "kept", acknowledge=acknowledge)
    async with restored(tmp_path / "kept") as rollouts:
        await rollouts.update_weights(SimPublisher(), version=rollouts.version)
        batches = [await rollouts.next_batch() for _ in range(2)]
    found = [(batch.index, batch.redelivered) for batch in batches]
    assert found == [(2, False), (3, False)] if acknowledge else [(1, True), (2, False)]


async def test_restoring_comes_before_the_block_and_needs_a_checkpoint(tmp_path: Path):
    rollouts = scheduler(None)
    with pytest.raises(StoreError, match="is not there"):
        rollouts.restore(tmp_path / "nothing")
    (tmp_path / "text").write_text("not a database, but long enough to look at" * 40)
    with pytest.raises(StoreError, match="could not be read"):
        rollouts.restore(tmp_path / "text")
    async with rollouts:
        await rollouts.checkpoint(tmp_path / "good")
        with pytest.raises(SchedulerClosed, match="before the"):
            rollouts.restore(tmp_path / "good")
        with pytest.raises(StoreError, match="not a folder"):
            await rollouts.checkpoint(tmp_path / "no" / "where")


# --- engines of another version --------------------------------------------------------------


class _Behind:
    """A store whose process died after the engines' answer to an update, before its snapshot."""

    inline = True

    def __init__(self, store: MemoryStore) -> None:
        self.save = store.save
        self.close = store.close
        self._store = store

    def open(self) -> Saved:
        saved = self._store.open()
        assert saved is not None
        return replace(saved, run=structs.replace(saved.run, version=0, base=0))


@pytest.mark.parametrize("follows", [False, True])
async def test_an_update_that_was_not_saved_is_repeated_or_followed(follows: bool):
    store = MemoryStore()
    fleet = SimFleet(2, stream_interval=8)

    async with scheduler(store, fleet=fleet) as rollouts:
        await rollouts.next_batch()
        saved = store.open()
        assert saved is not None
        await rollouts.update_weights(SimPublisher())
    old = store.open()
    assert old is not None
    assert old.run.version == 1
    settings = replace(config(), straggler="abort", follow_weights=follows)
    async with scheduler(_Behind(store), fleet=fleet, config=settings) as rollouts:
        assert rollouts.version == 0
        assert not rollouts.state.resumed
        if follows:
            await asyncio.sleep(5)
        else:
            with pytest.raises(RefitError, match="version=0"):
                await rollouts.next_batch()
            await rollouts.update_weights(SimPublisher(), version=1)
        assert rollouts.version == 1
        await rollouts.next_batch()


@pytest.mark.parametrize("end", ["killed", "save fails", "refused"])
async def test_a_run_without_an_update_publishes_after_a_restart(
    end: str, caplog: pytest.LogCaptureFixture
):
    store, fleet = MemoryStore(), SimFleet(2, stream_interval=8)
    async with scheduler(None, fleet=fleet) as earlier:
        await earlier.update_weights(SimPublisher(), version=34)

    if end == "refused":
        fleet.engines[1].crash()
        await fleet.engines[1].restart()
        with pytest.raises(ConfigError, match="different policy versions"):
            await to_the_end(store, fleet=fleet)
    else:
        with suppress(OSError):
            async with scheduler(store, fleet=fleet):
                await asyncio.sleep(2)
                if end == "save fails":
                    raise OSError("disk full")
    caplog.clear()
    async with scheduler(store, fleet=fleet) as rollouts:
        assert not rollouts.state.resumed
        assert any("of an earlier run" in message for message in caplog.messages)
        await rollouts.update_weights(SimPublisher())
        batch = await rollouts.next_batch()
        assert batch.version > (0 if end == "refused" else 34)
    caplog.clear()
    async with scheduler(store, fleet=fleet) as rollouts:
        assert rollouts.state.resumed
        assert not any("of an earlier run" in message for message in caplog.messages)


# --- episodes --------------------------------------------------------------------------------

TOOL = np.array([7, 7, 7], dtype=np.int32)


def episode_prompts(count: int) -> list[Prompt]:
    return [
        Prompt(input_ids=np.array([i + 1, 2], dtype=np.int32), key=i, metadata={"tool": [i, "x"]})
        for i in range(count)
    ]


async def two_turns(turn: Turn, prompt: Prompt) -> float:
    assert prompt.metadata["tool"][1] == "x"
    sampling = SamplingParams(max_new_tokens=120, temperature=0, ignore_eos=True)
    first = await turn.generate(prompt.input_ids, sampling)
    await asyncio.sleep(0.05)
    context = np.concatenate((prompt.input_ids, first.token_ids, TOOL))
    second = await turn.generate(context, sampling)
    return float(len(first.token_ids) + len(second.token_ids))


async def first_life(store: SqliteStore, folder: Path, parts: dict[str, Any]) -> int:
    """Copy the store to `folder` at several moments before the first batch, as kill -9 would leave
    it. Returns the number of copies."""
    async with scheduler(store, **parts) as rollouts:
        request = asyncio.create_task(rollouts.next_batch())
        for number in range(12):
            await asyncio.sleep(0.17)
            left_behind(store, folder / f"at-{number}")
            if request.done():
                return number
        await request
    return 12


async def test_episodes_begin_again_and_are_given_what_they_were_given(tmp_path: Path):
    store = SqliteStore(tmp_path / "store", inline=True)
    parts: dict[str, Any] = {"prompts": episode_prompts(8), "episode": two_turns}
    expected = await whole_run(**parts)

    answered = partial = 0
    for number in range(await first_life(store, tmp_path, parts)):
        killed = SqliteStore(tmp_path / f"at-{number}", inline=True)
        async with scheduler(killed, **parts) as rollouts:
            members = list(rollouts.state.in_flight.rollouts.values())
            answered += sum(len(m.answered) for m in members)
            partial += sum(m.replay is not None and bool(m.replay.partial) for m in members)
            before = rollouts.state.in_flight.counters.tokens_generated
            known = sum(m.log.sampled_tokens for m in members)
            batches = [batch async for batch in rollouts]
            counters = rollouts.state.in_flight.counters
        # No saved token was generated again.
        assert counters.tokens_generated - before + known == counters.tokens_delivered
        assert counters.tokens_discarded == 0
        assert by_key(batches) == expected
    assert answered > 10
    assert partial > 5


async def impatient(turn: Turn, prompt: Prompt) -> float:
    """An episode whose turns time out: it keeps the tokens of the first and drops the second's."""
    sampling = SamplingParams(max_new_tokens=120, temperature=0, ignore_eos=True)
    try:
        async with asyncio.timeout(0.3 + 0.05 * turn.index):
            first = await turn.generate(prompt.input_ids, sampling)
    except TimeoutError:
        first = await turn.partial()
    context = np.concatenate((prompt.input_ids, first.token_ids, TOOL))
    try:
        async with asyncio.timeout(0.2):
            await turn.generate(context, sampling)
    except TimeoutError:
        pass
    second = await turn.generate(np.concatenate((context, TOOL)), sampling)
    return float(len(first.token_ids) + len(second.token_ids))


async def test_turns_that_were_given_up_outlive_the_process(tmp_path: Path):
    store = SqliteStore(tmp_path / "store", inline=True)
    parts: dict[str, Any] = {"prompts": episode_prompts(8), "episode": impatient}

    kept = 0
    for number in range(await first_life(store, tmp_path, parts)):
        killed = SqliteStore(tmp_path / f"at-{number}", inline=True)
        async with scheduler(killed, **parts) as rollouts:
            in_flight = rollouts.state.in_flight
            members = list(in_flight.rollouts.values())
            kept += sum(bool(m.answered) and m.answered[0][1] < 120 for m in members)
            before = in_flight.counters.tokens_generated - in_flight.counters.tokens_discarded
            known = sum(m.log.sampled_tokens for m in members)
            delivered = [r async for batch in rollouts for r in batch.rollouts]
            counters = in_flight.counters
        generated = counters.tokens_generated - counters.tokens_discarded - before
        assert generated + known == counters.tokens_delivered
        assert counters.tokens_discarded == sum(in_flight.ledger.tokens.values())
        assert len({rollout.rollout_id for rollout in delivered}) == len(delivered) == 8 * 4
        for rollout in delivered:
            sampled = int((rollout.versions != -1).sum())
            assert rollout.turns == 2
            assert rollout.reward == sampled
            assert len(rollout) == sampled + 6
    assert kept > 5


async def test_a_diverging_episode_drops_its_saved_later_turns():
    store = MemoryStore()
    prompts = episode_prompts(4)
    one = config(batch_groups=4, group_size=1, over_provision=1.0, save_interval_s=0.1)

    async def longer(turn: Turn, prompt: Prompt) -> float:
        sampling = SamplingParams(max_new_tokens=120, temperature=0, ignore_eos=True)
        first = await turn.generate(prompt.input_ids, sampling)
        context = np.concatenate((prompt.input_ids, first.token_ids, TOOL, TOOL))
        await turn.generate(context, sampling)
        return 0.0

    async with scheduler(store, prompts=prompts, episode=two_turns, config=one) as rollouts:
        request = asyncio.create_task(rollouts.next_batch())
        while not all(m.turns for m in rollouts.state.in_flight.rollouts.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.6)
        request.cancel()
    saved = store.open()
    assert saved is not None
    second_turns = sum(len(held.token_ids) - 123 for held in saved.tokens.values())
    async with scheduler(store, prompts=prompts, episode=longer, config=one) as rollouts:
        batch = await rollouts.next_batch()
        in_flight = rollouts.state.in_flight
    for rollout in batch.rollouts:
        assert len(rollout) == 120 + 6 + 120
        assert rollout.turns == 2
        np.testing.assert_array_equal(rollout.versions[120:126], -1)
    forgotten = in_flight.ledger.tokens[Reason.RESTARTED]
    assert forgotten == in_flight.counters.tokens_discarded == second_turns > 0


# --- rewards and evaluations -----------------------------------------------------------------


def not_the_second(group: Group) -> bool:
    return group.prompt.key != 2


async def test_unsaved_rewards_and_verdicts_are_computed_again():
    store = MemoryStore()
    asked: list[int] = []
    answers = asyncio.Event()

    async def reward(rollout: Rollout, prompt: Prompt) -> float:
        asked.append(rollout.rollout_id)
        if len(asked) > 10:
            await answers.wait()
        return float(rollout.index)

    async with scheduler(store, reward=reward) as rollouts:
        request = asyncio.create_task(rollouts.next_batch())
        while len(asked) < 14:  # noqa: ASYNC110 - the callback would have to know
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)
        request.cancel()
        pending = set(asked[10:])
    asked.clear()
    answers.set()
    async with scheduler(store, reward=reward, accept=not_the_second) as rollouts:
        batches = [batch async for batch in rollouts]
        assert rollouts.state.in_flight.ledger.rollouts[Reason.REJECTED] == 4
    assert pending <= set(asked)
    rewards = [r.reward == r.index for batch in batches for r in batch.rollouts]
    assert all(rewards)
    assert len(rewards) == 4 * (PROMPTS - 1)


async def test_an_open_evaluation_is_in_the_ledger_and_runs_again():
    store = MemoryStore()
    prompts = list(workload())[:3]
    async with scheduler(store) as rollouts:
        evaluating = asyncio.create_task(rollouts.evaluate(prompts, group_size=4))
        await asyncio.sleep(0.7)
        assert not evaluating.done()
    # Cancelled, the call would have withdrawn its evaluation.
    with pytest.raises(SchedulerClosed):
        await evaluating
    async with scheduler(store) as rollouts:
        check_invariants(rollouts.state)
        assert rollouts.state.in_flight.ledger.rollouts[Reason.RESTARTED] == 12
        assert rollouts.state.in_flight.ledger.tokens[Reason.RESTARTED] > 0
        answers = await rollouts.evaluate(prompts, group_size=4)
        assert len(answers.groups) == 3


# --- stores that fail ------------------------------------------------------------------------


class Failing(MemoryStore):
    """A store that refuses writes while `full` is set."""

    full = False
    refused = 0

    def save(self, snapshot: Any, *, durable: bool) -> None:
        if self.full:
            self.refused += 1
            raise StoreError("the store could not be written (database or disk is full)")
        super().save(snapshot, durable=durable)


async def test_a_failing_store_stops_no_run_and_later_catches_up(
    caplog: pytest.LogCaptureFixture,
):
    store = Failing()
    async with scheduler(store) as rollouts:
        (await rollouts.next_batch()).acknowledge()
        store.full = True
        await rollouts.next_batch()
        await asyncio.sleep(25)
        assert store.refused in (2, 3)
        store.full = False
        await asyncio.sleep(12)
        await rollouts.next_batch()
    errors = [r.message for r in caplog.records if "is not saved" in r.message]
    assert len(errors) == 1
    assert any("saved again" in r.message for r in caplog.records)
    batches = await to_the_end(store)
    assert [b.index for b in batches if b.redelivered] == [1, 2]
    assert len(by_key(batches)) == 4 * (PROMPTS - 4)


async def test_the_end_is_saved_even_just_after_a_store_failure():
    store = Failing()
    async with scheduler(store) as rollouts:
        store.full = True
        await rollouts.next_batch()
        assert store.refused == 1
        store.full = False
    batches = await to_the_end(store)
    assert [b.index for b in batches if b.redelivered] == [0]


async def test_a_full_disk_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    store = SqliteStore(tmp_path / "store", inline=True)
    async with scheduler(store) as rollouts:
        await rollouts.next_batch()
        connection = store._connection  # pyright: ignore[reportPrivateUsage]
        assert isinstance(connection, sqlite3.Connection)
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        for _ in range(4):
            await rollouts.next_batch()
    text = [r.message for r in caplog.records if "is not saved" in r.message]
    assert len(text) == 1
    assert "disk is full: free some of it" in text[0]


async def test_what_cannot_be_stored_is_refused_before_it_is_launched():
    def prompts() -> Iterator[Prompt]:
        yield Prompt(input_ids=np.array([1]), metadata={"f": print})

    async with scheduler(MemoryStore(), prompts=prompts()) as rollouts:
        with pytest.raises(ConfigError, match="must be JSON values"):
            await rollouts.next_batch()


async def test_other_prompts_than_those_of_the_saved_run_are_noticed():
    store, everything = MemoryStore(), list(workload())
    async with scheduler(store, prompts=everything) as rollouts:
        for _ in range(3):
            (await rollouts.next_batch()).acknowledge()
    with pytest.raises(ConfigError, match="give the same prompts again"):
        await first_batch(store, prompts=everything[:4])


async def test_a_source_that_can_skip_is_asked_to():
    store = MemoryStore()
    skipped: list[int] = []

    class Source:
        def __iter__(self) -> Iterator[Prompt]:
            return iter(workload())

        def skip(self, count: int) -> list[Prompt]:
            skipped.append(count)
            return list(workload())[count:]

    await first_batch(store, prompts=Source())
    rest = await to_the_end(store, prompts=Source())
    assert skipped
    assert len(by_key(rest)) == 4 * PROMPTS


async def gone() -> None:
    raise EngineUnreachable("sim", "is not there")


async def test_a_lost_fleet_ends_the_scheduler_and_not_the_run(monkeypatch: pytest.MonkeyPatch):
    store = MemoryStore()
    expected = await whole_run()
    fleet = SimFleet(2, stream_interval=8)
    settings = config(health=Health(fleet_wait_s=5.0))
    async with scheduler(store, fleet=fleet, config=settings) as rollouts:
        batches = [await rollouts.next_batch()]
        batches[0].acknowledge()
        waiting = asyncio.create_task(rollouts.next_batch())
        await asyncio.sleep(0.2)
        for engine in fleet.engines:
            engine.crash()
            monkeypatch.setattr(engine, "open", gone)
        with pytest.raises(FleetLost, match="none came back"):
            await waiting
        held = {r.rollout_id: r.log.size for r in rollouts.state.in_flight.rollouts.values()}
    saved = store.open()
    assert saved is not None
    assert {r: len(t.token_ids) for r, t in saved.tokens.items() if r in held} == {
        r: tokens for r, tokens in held.items() if r in saved.tokens
    }
    assert sum(held.values()) > 0
    assert by_key(batches + await to_the_end(store)) == expected


class Gated(MemoryStore):
    """A store whose writes wait until the test lets them continue."""

    inline = False

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.saves = 0

    def save(self, snapshot: Snapshot, *, durable: bool) -> None:
        self.gate.wait()
        self.saves += 1
        super().save(snapshot, durable=durable)


async def test_saves_do_not_pile_up_before_a_slow_store():
    store, settings = Gated(), config(pace="asynchronous", save_interval_s=0.001)
    fleet = SimFleet(2, stream_interval=8, time_scale=0.01)
    async with scheduler(store, fleet=fleet, config=settings) as rollouts:
        for _ in range(100):
            await asyncio.sleep(0.002)
        store.gate.set()
        await rollouts.next_batch()
        saved_in_time = store.saves
    # The save at the gate, the one behind it, and that of the batch; others may follow.
    assert saved_in_time <= 6


class Killed(SimPublisher):
    """Copies what kill -9 would leave during the load of weights."""

    def __init__(self, store: SqliteStore, to: Path, *, whole: bool) -> None:
        super().__init__()
        self.loads_whole = whole
        self._store = store
        self._to = to

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        left_behind(self._store, self._to)
        return await super().publish(version, engines)


@pytest.mark.parametrize("whole", [False, True])
async def test_after_a_kill_in_a_partial_load_no_engine_is_trusted(tmp_path: Path, whole: bool):
    """The engines still have the label of the old version, and maybe tensors of the new one."""
    killed, ended = tmp_path / "killed", tmp_path / "ended"
    store = SqliteStore(tmp_path / "store", inline=True)
    async with scheduler(store) as rollouts:
        await rollouts.next_batch()
        await rollouts.update_weights(Killed(store, killed, whole=whole))
        left_behind(store, ended)
    async with scheduler(SqliteStore(killed, inline=True)) as rollouts:
        assert rollouts.version == 0
        believed = True
        try:
            await rollouts.next_batch()
        except RefitError:
            believed = False
            await rollouts.update_weights(SimPublisher(), version=0)
            assert not rollouts.state.weights.in_parts
        assert believed is whole
        assert (await rollouts.next_batch()).version == 0
    with closing(SqliteStore(ended, inline=True)) as opened:
        after = opened.open()
    assert after is not None
    assert not after.run.in_parts
