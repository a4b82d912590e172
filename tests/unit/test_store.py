"""Tests the stores: what they keep, what they refuse, damaged files, and growth."""

from __future__ import annotations

import datetime
import enum
import gc
import os
import random
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aprilsched import Media, MemoryStore, Prompt, SamplingParams, SqliteStore
from aprilsched.errors import ConfigError, StoreError
from aprilsched.kernel.core.lengths.memory import Remembered
from aprilsched.kernel.core.lengths.observed import GroupLengths
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.policies.length_buckets import LengthBuckets
from aprilsched.kernel.core.policies.pool import Pool
from aprilsched.kernel.core.policies.refill import Refill
from aprilsched.kernel.core.policies.schedule import Forecast, Schedule
from aprilsched.kernel.core.policies.wave import Wave
from aprilsched.kernel.core.state.ledger import Entry, Reason
from aprilsched.kernel.core.state.saved import (
    GroupState,
    RolloutState,
    RunState,
    Saved,
    SavedBatch,
    SavedGroup,
    SavedMember,
    SavedTokens,
    Snapshot,
    TokenPage,
)
from aprilsched.kernel.core.steps.snapshot import full_snapshot, take_changes, take_full
from aprilsched.kernel.store.codec import (
    check_storable,
    group_from,
    group_record,
    schedule_from,
    schedule_record,
)
from aprilsched.kernel.store.file import SCRIPTS, store_errors
from aprilsched.kernel.store.sqlite_checkpoints import read_checkpoint, write_checkpoint
from tests.support.driver import Driver, config
from tests.support.table import each_row

KEYS = ("a", 7, None, "a long key, " * 9)
"""Keys of prompts, each of which comes again."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rollouts.store"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    """A store that is not open yet, and is closed in the end."""
    made = SqliteStore(path)
    yield made
    made.close()


def run(driver: Driver, steps: int, seed: int) -> None:
    """A store's work: tokens, ends, batches, losses, updates, acknowledgements."""
    rng = random.Random(seed)
    for _ in range(steps):
        keys = driver.attempts()
        dice = rng.random()
        if driver.controls or driver.refits or driver.aborts:
            driver.settle()
        elif not driver.state.delivery.takes_parts:
            driver.feed(ev.BatchRequested())
        elif dice < 0.05 and driver.state.weights.update is None:
            driver.update()
        elif dice < 0.1 and driver.state.delivery.unacknowledged:
            oldest = min(driver.state.delivery.unacknowledged)
            driver.feed(ev.BatchesAcknowledged(batches=(oldest,)))
        elif dice < 0.6 and keys:
            driver.progress(rng.choice(keys), rng.randint(1, 40), first=rng.randint(1, 1000))
        elif dice < 0.64 and keys:
            driver.fail(rng.choice(keys), final=rng.random() < 0.5)
        elif keys:
            driver.finish(rng.choice(keys), rng.randint(0, 5))


def running(store: SqliteStore) -> Driver:
    """A run that saves in the store, which is opened."""
    store.open()
    return Driver(config(), store=store)


class Dicts:
    """What a store must hold after some snapshots, by plain dictionaries."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._groups: dict[int, SavedGroup] = {}
        self._states: dict[int, GroupState] = {}
        self._rollouts: dict[int, RolloutState] = {}
        self._tokens: dict[int, SavedTokens] = {}
        self._batches: dict[int, SavedBatch] = {}
        self._dropped: list[Entry] = []
        self._lengths: list[GroupLengths] = []
        self._remembered: dict[str | int, Remembered] = {}

    def save(self, snapshot: Snapshot) -> None:
        if snapshot.full:
            self._clear()
        self._latest = snapshot
        self._groups.update((group.group_id, group) for group in snapshot.groups)
        self._states.update((state.group_id, state) for state in snapshot.group_states)
        for state in snapshot.rollouts:
            self._rollouts[state.rollout_id] = state
            if state.rewritten:
                self._tokens.pop(state.rollout_id, None)
        if snapshot.page is not None:
            self._append(snapshot.page)
        self._dropped.extend(snapshot.dropped)
        self._lengths.extend(snapshot.lengths)
        for record in snapshot.remembered:
            self._remembered.pop(record.key, None)
            self._remembered[record.key] = record
        for index in snapshot.acknowledged:
            self._batches.pop(index, None)
        self._batches.update((batch.index, batch) for batch in snapshot.batches)
        for group_id in snapshot.removed:
            self._states.pop(group_id, None)
            group = self._groups.pop(group_id, None)  # None if it came and went in between.
            for member in () if group is None else group.members:
                self._rollouts.pop(member.rollout_id, None)
                self._tokens.pop(member.rollout_id, None)

    def _append(self, page: TokenPage) -> None:
        at = 0
        for rollout_id, start, length, _, _, _ in page.slices.tolist():
            end, held = at + length, self._tokens.get(rollout_id, SavedTokens())
            assert start == len(held.token_ids)
            self._tokens[rollout_id] = SavedTokens(
                token_ids=np.append(held.token_ids, page.token_ids[at:end]),
                logprobs=np.append(held.logprobs, page.logprobs[at:end]),
            )
            at = end

    def open(self) -> Saved:
        return Saved(
            run=self._latest.run,
            schedule=self._latest.schedule,
            groups=[group for _, group in sorted(self._groups.items())],
            group_states=self._states,
            rollouts=self._rollouts,
            tokens=self._tokens,
            batches=[batch for _, batch in sorted(self._batches.items())],
            dropped=self._dropped,
            lengths=self._lengths,
            damaged={},
            remembered=list(self._remembered.values()),
        )


def plain(saved: Saved | None) -> tuple[Any, ...]:
    """What a store has, with lists in the place of arrays."""
    assert saved is not None
    return (
        saved.run,
        saved.schedule,
        saved.group_states,
        saved.rollouts,
        [*saved.batches],
        [*saved.dropped],
        [*saved.remembered],
        [(g.group_id, g.opened, g.members, g.prompt.input_ids.tolist()) for g in saved.groups],
        {
            rollout: (held.token_ids.tolist(), held.logprobs.tolist())
            for rollout, held in saved.tokens.items()
            if len(held.token_ids)
        },
        [(group.launched, group.tokens.tolist()) for group in saved.lengths],
    )


def same(one: Saved | None, other: Saved | None) -> None:
    for ours, theirs in zip(plain(one), plain(other), strict=True):
        assert ours == theirs


@pytest.mark.parametrize("seed", range(6))
def test_a_store_holds_what_was_saved_after_every_snapshot(path: Path, seed: int):
    races = config(refill="tail", pace="synchronous")
    expected, driver = Dicts(), Driver(config() if seed else races, journal=True, keys=KEYS)
    file, memory = SqliteStore(path), MemoryStore()
    assert file.open() is None
    rng = random.Random(seed)
    for _ in range(12):
        run(driver, rng.randint(5, 60), rng.randint(0, 10**6))
        snapshot = take_changes(driver.state) if rng.random() < 0.8 else take_full(driver.state)
        expected.save(snapshot)
        memory.save(snapshot, durable=False)
        file.save(snapshot, durable=rng.random() < 0.3)
        if rng.random() < 0.5:
            same(file.open(), expected.open())
    same(file.open(), expected.open())
    same(memory.open(), expected.open())
    file.close()
    lost_race = any(state.first_run is not None for state in expected.open().group_states.values())
    assert lost_race or seed


def filled(path: Path, *, snapshots: int = 10, seed: int = 1, steps: int = 40) -> Driver:
    """A store with a run in it, closed."""
    driver = Driver(config(), engines=("a",), store=SqliteStore(path), keys=KEYS)
    with closing(SqliteStore(path)) as driver.store:
        driver.store.open()
        for number in range(snapshots):
            run(driver, steps, seed + number)
            driver.save()
    return driver


def held_in(path: Path) -> Saved:
    """What a store has, which is closed before and after."""
    with closing(SqliteStore(path)) as opened:
        saved = opened.open()
    assert saved is not None
    return saved


# --- damaged files --------------------------------------------------------------------------------


class Noting(SqliteStore):
    """Records the run's part of each snapshot."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.runs: list[RunState] = []

    def save(self, snapshot: Snapshot, *, durable: bool) -> None:
        super().save(snapshot, durable=durable)
        self.runs.append(snapshot.run)


def test_an_incomplete_tail_is_dropped(path: Path, tmp_path: Path):
    store = Noting(path)
    driver = running(store)
    for number in range(25):
        run(driver, 30, number)
        driver.save()
    wal = path.with_name(path.name + "-wal")
    size, seen = wal.stat().st_size, set[int]()
    rng = random.Random(5)
    for number in range(40):
        copy = tmp_path / f"damaged-{number}"
        shutil.copyfile(path, copy)
        damaged = copy.with_name(copy.name + "-wal")
        shutil.copyfile(wal, damaged)
        os.truncate(damaged, rng.randrange(size))
        if number % 2:
            # Sectors that hold what was there before.
            with damaged.open("ab") as file:
                file.write(rng.randbytes(rng.randrange(1, 5000)))
        again = SqliteStore(copy)
        found = again.open()
        if found is not None:
            assert found.run in store.runs
            assert found.damaged == {}
            restored(found).core.check_invariants()
            seen.add(store.runs.index(found.run))
        again.close()
    assert len(seen) > 5
    store.close()


def damage(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    assert connection.execute(statement).rowcount > 0
    connection.commit()
    connection.close()


def restored(saved: Saved | None) -> Driver:
    assert saved is not None
    memory = MemoryStore()
    driver = Driver(config(), store=memory)
    driver.core = type(driver.core)(driver.config)
    driver.core.restore(saved)
    driver.feed(ev.Opened(engines=tuple(driver.info(e, saved.run.version) for e in driver.engines)))
    return driver


def test_tokens_behind_a_damaged_row_do_not_come_back(
    path: Path, store: SqliteStore, caplog: pytest.LogCaptureFixture
):
    """The run generates other ones in their place, and is killed once more."""
    store.open()
    driver = Driver(config(), engines=("a",), store=store)
    driver.feed(ev.BatchRequested())
    (key, *_) = driver.attempts()
    rollout_id = driver.state.in_flight.requests[key[0]].rollout.rollout_id
    for first in (100, 200, 300):
        driver.progress(key, 10, first=first)
        driver.save()
    store.close()
    damage(path, "UPDATE tokens SET crc = crc + 1 WHERE n = (SELECT min(n) + 1 FROM tokens)")
    driver.restart()
    assert "rows of tokens are damaged" in caplog.text
    rollout = driver.state.in_flight.rollouts[rollout_id]
    assert rollout.log.token_ids.tolist() == list(range(100, 110))
    assert driver.state.in_flight.ledger.total == 0
    assert rollout.request is not None
    (key,) = [key for key in driver.attempts() if key[0] == rollout.request.request_id]
    driver.progress(key, 10, first=400)
    driver.save()
    held = rollout.log.token_ids
    driver.restart()
    again = driver.state.in_flight.rollouts[rollout_id].log.token_ids
    np.testing.assert_array_equal(again, held)


def test_a_batch_without_a_damaged_group_is_saved_again(path: Path, store: SqliteStore):
    """Another restart would take the group for delivered, though it is generated again."""
    filled(path)
    damage(path, "UPDATE tokens SET token_ids = zeroblob(length(token_ids)) WHERE n % 5 = 4")
    driver = Driver(config(), engines=("a",), store=store, keys=KEYS)
    driver.restart()
    run(driver, 60, 99)
    driver.save()
    driver.restart()  # and its invariants hold


@pytest.mark.parametrize("table", ["groups", "rollouts"])
def test_a_group_whose_record_is_damaged_is_in_the_ledger(path: Path, table: str):
    before = filled(path)
    damage(path, f"UPDATE {table} SET body = zeroblob(length(body)) WHERE group_id % 2 = 0")  # noqa: S608
    saved = held_in(path)
    assert saved.damaged
    driver = restored(saved)
    driver.core.check_invariants()
    open_groups = {g.group_id for g in driver.state.in_flight.training_groups()}
    assert open_groups
    assert not open_groups & saved.damaged.keys()
    if table == "rollouts":
        dropped = driver.state.in_flight.ledger.rollouts[Reason.DAMAGED]
        assert dropped > 0
        assert before.state.in_flight.counters.launched == driver.state.in_flight.counters.launched


# --- refusals ----------------------------------------------------------------------------------


def test_one_store_is_for_one_scheduler_at_a_time(path: Path):
    first, second = SqliteStore(path), SqliteStore(path)
    first.open()
    with pytest.raises(StoreError, match="another process uses it"):
        second.open()
    first.close()
    second.open()
    second.close()


def test_what_leads_out_of_the_folder_is_refused(path: Path, tmp_path: Path):
    outside = tmp_path / "outside"
    filled(outside, snapshots=1)
    path.symlink_to(outside)
    with pytest.raises(StoreError, match="is a link out of its folder"):
        SqliteStore(path).open()
    path.unlink()
    path.with_name(path.name + "-wal").symlink_to(outside)
    with pytest.raises(StoreError, match="is a link out of its folder"):
        SqliteStore(path).open()
    with pytest.raises(StoreError, match="is not a folder"):
        SqliteStore(tmp_path / "no" / "store").open()
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match="is not a file"):
        SqliteStore(tmp_path / "folder").open()


@pytest.mark.parametrize(
    ("content", "statement", "why"),
    [
        (b"not a database at all" * 100, "", "restore a checkpoint, or move it away"),
        (b"", "CREATE TABLE songs (name TEXT)", "an SQLite file of something else"),
        (None, "PRAGMA user_version = 99", "written by a newer aprilsched"),
        (None, "UPDATE run SET crc = crc + 1", "restore a checkpoint, or move it away"),
    ],
)
def test_other_files_newer_ones_and_those_without_a_run_are_refused(
    path: Path, content: bytes | None, statement: str, why: str
):
    if content is None:
        filled(path, snapshots=1)
    else:
        path.write_bytes(content)
    if statement:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute(statement)
    with pytest.raises(StoreError, match=why):
        SqliteStore(path).open()


@each_row("name", ["", ":memory:", "file:run?mode=memory", "a\0b"])
def test_what_names_no_file_is_refused_with_the_store_that_keeps_none(name: str):
    with pytest.raises(ConfigError, match=r"names no file .* MemoryStore\(\)"):
        SqliteStore(name)


def test_what_is_stored_is_for_its_owner_alone(path: Path, store: SqliteStore, tmp_path: Path):
    driver = running(store)
    run(driver, 60, 1)
    driver.save()
    write_checkpoint(tmp_path / "checkpoint", full_snapshot(driver.state))
    modes = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.iterdir()}
    assert {path.name, f"{path.name}-wal", f"{path.name}-last", "checkpoint"} <= modes.keys()
    assert set(modes.values()) == {0o600}


def test_a_store_that_lost_everything_is_not_taken_for_a_new_one(
    path: Path, store: SqliteStore, tmp_path: Path
):
    driver = running(store)
    run(driver, 60, 1)
    driver.save()
    copy = tmp_path / "copy"
    for end in ("", "-last"):
        shutil.copyfile(path.with_name(path.name + end), copy.with_name(copy.name + end))
    store.close()
    with pytest.raises(StoreError, match="has lost all that was saved in it"):
        SqliteStore(copy).open()
    copy.unlink()
    new = SqliteStore(copy)
    assert new.open() is None, "the marker of a deleted file is ignored"
    new.close()


@pytest.mark.parametrize("where", [4, 40, 0.3, 0.6, 0.95])
def test_a_damaged_log_entry_is_logged_with_what_follows_it(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, where: float
):
    store = SqliteStore(path)
    driver = running(store)
    for number in range(25):
        run(driver, 30, number)
        driver.save()
    copy = tmp_path / "copy"
    for end in ("", "-wal", "-last"):
        shutil.copyfile(path.with_name(path.name + end), copy.with_name(copy.name + end))
    store.close()
    with closing(SqliteStore(path)) as opened:
        whole = opened.open()
    assert not caplog.records, "a complete log loses nothing"
    with copy.with_name("copy-wal").open("r+b") as file:
        at = int(where if where >= 1 else where * os.path.getsize(file.name))
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 255]))
    damaged = SqliteStore(copy)
    if where >= 1:
        with pytest.raises(StoreError, match="has lost all that was saved in it"):
            damaged.open()
        return
    saved = damaged.open()
    assert saved is not None
    assert whole is not None
    assert saved.first_new_batch >= whole.run.counters.batches
    assert len(caplog.records) == 1
    assert "has lost its last saves" in caplog.text
    damaged.close()


def test_the_marker_of_the_last_save_may_be_behind_or_damaged(
    path: Path, caplog: pytest.LogCaptureFixture
):
    driver = filled(path, snapshots=3)
    marker = path.with_name(f"{path.name}-last")
    behind = marker.read_bytes()
    with closing(SqliteStore(path)) as driver.store:
        driver.store.open()
        run(driver, 40, 9)
        driver.save()
    assert marker.read_bytes() != behind
    for content in (behind, b"", behind[:9], bytes(28), b"x" * 28, behind + b"more"):
        marker.write_bytes(content)
        assert held_in(path).first_new_batch == 0
    assert not caplog.records


def test_a_read_only_file_is_refused_with_what_to_do(path: Path):
    filled(path, snapshots=1)
    # Root may write any file; a file system mounted read-only answers it as SQLite does here.
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    with pytest.raises(sqlite3.OperationalError) as raised:
        connection.execute("DELETE FROM run")
    connection.close()
    writable = "make it and its folder writable"
    with pytest.raises(StoreError, match=writable), store_errors(path, "read"):
        raise raised.value


def test_an_unopened_store_is_refused(path: Path):
    with pytest.raises(StoreError, match="is not open"):
        SqliteStore(path).save(full_snapshot(Driver(config()).state), durable=False)


# --- lengths and migrations ----------------------------------------------------------------------


def test_a_restarted_run_expects_of_each_prompt_what_the_prior_one_did(path: Path):
    before = filled(path, snapshots=6)
    driver = restored(held_in(path))
    known, again = before.state.expectations, driver.state.expectations
    assert {record.key for record in known.memory} >= {"a", 7}
    assert list(again.memory) == list(known.memory)
    distribution, version = known.log_lengths(), before.state.weights.versions.trainer
    for key in KEYS:
        expected, found = (
            each.memory.levels([key], distribution, version) for each in (known, again)
        )
        np.testing.assert_array_equal(found.mean, expected.mean)
        np.testing.assert_array_equal(found.variance, expected.variance)


def test_a_failed_migration_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch):
    filled(path, snapshots=2)
    broken = (*SCRIPTS, "CREATE TABLE new (a INTEGER); INSERT INTO nowhere VALUES (1)")
    monkeypatch.setattr("aprilsched.kernel.store.file.SCRIPTS", broken)
    with pytest.raises(StoreError, match="nowhere"):
        SqliteStore(path).open()
    monkeypatch.undo()
    assert held_in(path)


# --- checkpoints -------------------------------------------------------------------------------


def test_a_checkpoint_is_one_file_and_reading_leaves_it_alone(path: Path, tmp_path: Path):
    driver = Driver(config(), store=MemoryStore())
    run(driver, 200, 4)
    snapshot = full_snapshot(driver.state)
    write_checkpoint(path, snapshot)
    write_checkpoint(path, snapshot)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    content = path.read_bytes()
    expected = Dicts()
    expected.save(snapshot)
    same(read_checkpoint(path), expected.open())
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


# --- growth ------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.long] * (seed > 0)) for seed in range(4)]
)
def test_the_file_does_not_grow_with_the_run(
    path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "aprilsched.kernel.store.sqlite_tables.FREE_BYTES", 0 if seed % 2 else 1 << 24
    )
    store, expected = SqliteStore(path), Dicts()
    store.open()
    driver = Driver(config(batch_groups=4, group_size=4), journal=True)
    sizes: list[int] = []
    rng = random.Random(seed)
    stored = 0
    for number in range(200):
        run(driver, 25, rng.randint(0, 10**9))
        while len(driver.state.delivery.unacknowledged) > 2:
            oldest = min(driver.state.delivery.unacknowledged)
            driver.feed(ev.BatchesAcknowledged(batches=(oldest,)))
        snapshot = take_changes(driver.state)
        expected.save(snapshot)
        store.save(snapshot, durable=False)
        connection = store._connection  # pyright: ignore[reportPrivateUsage]
        assert connection is not None
        (stored,) = connection.execute("SELECT sum(length(token_ids)) / 4 FROM tokens").fetchone()
        live = sum(r.log.size for r in driver.state.in_flight.rollouts.values()) + sum(
            m.log.size
            for b in driver.state.delivery.unacknowledged.values()
            for g in b.groups
            for m in g.members
        )
        assert stored <= live
        sizes.append(path.stat().st_size)
        if number % 60 == 0:
            same(store.open(), expected.open())
    same(store.open(), expected.open())
    generated = driver.state.in_flight.counters.tokens_generated
    assert generated > 8 * stored
    assert max(sizes[100:]) <= 1.5 * max(sizes[:100])
    store.close()


def test_the_chunks_of_a_group_between_two_saves_are_one_row(path: Path):
    store, expected = SqliteStore(path), Dicts()
    store.open()
    driver = Driver(config(), journal=True)
    driver.request_batch()
    for number in range(20):
        for chunk in range(30):
            driver.progress(driver.attempts()[chunk % 3], 1, first=30 * number + chunk)
        snapshot = take_changes(driver.state)
        store.save(snapshot, durable=False)
        expected.save(snapshot)
    connection = store._connection  # pyright: ignore[reportPrivateUsage]
    assert connection is not None
    rows = connection.execute("SELECT group_id, slices FROM tokens").fetchall()
    assert len(rows) == 20 * len({group_id for group_id, _ in rows})
    assert sum(len(msgspec.msgpack.decode(slices)) for _, slices in rows) == 20 * 3
    same(store.open(), expected.open())
    store.close()


def test_the_ledger_the_lengths_and_the_keys_are_kept_up_to_a_bound(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, bound in (("KEPT_ENTRIES", 20), ("KEPT_LENGTHS", 10), ("MOST_KEYS", 2)):
        monkeypatch.setattr(f"aprilsched.kernel.store.sqlite_writing.{name}", bound)
    driver = filled(path, snapshots=40)
    assert driver.state.in_flight.ledger.total > 20
    saved = held_in(path)
    assert len(saved.dropped) <= 20
    assert len(saved.lengths) <= 10
    assert 1 <= len(saved.remembered) <= 2
    kept = driver.state.in_flight.ledger.entries
    assert [e.rollout_id for e in saved.dropped] == [e.rollout_id for e in kept][-20:]


# --- records -----------------------------------------------------------------------------------


_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False),
        st.text(),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(key=_VALUES.filter(lambda key: not isinstance(key, int) or abs(key) < 2**63), value=_VALUES)
def test_a_group_is_the_same_after_the_way_through_bytes(key: Any, value: Any):
    one = SamplingParams(max_new_tokens=7, stop_token_ids=(1, 2), extra={"regex": "a*"})
    two = replace(one, temperature=0.0, sampling_seed=3)
    prompt = Prompt(
        input_ids=np.array([5, 6], dtype=np.int32),
        sampling=(one, two),
        key=key,
        metadata={"x": value},
        media=(Media("image", b"\x89PNG"), Media("video", "http://a/b.mp4")),
    )
    members = (
        SavedMember(rollout_id=10, index=0, sampling=one),
        SavedMember(rollout_id=11, index=1, sampling=two),
    )
    check_storable(prompt)
    group = SavedGroup(group_id=9, opened=4, prompt=prompt, members=members)
    again = group_from(group_record(group))
    assert (again.group_id, again.opened, again.members) == (9, 4, members)
    assert again.prompt.input_ids.tolist() == [5, 6]
    assert (again.prompt.sampling, again.prompt.media) == (prompt.sampling, prompt.media)
    # The text shows types, such as those of 1, 1.0 and True.
    assert repr((again.prompt.key, again.prompt.metadata)) == repr((key, {"x": value}))


class Answer(NamedTuple):
    value: int


class Kind(enum.IntEnum):
    ONE = 1


def test_a_value_that_json_does_not_have_is_refused():
    values: list[Any] = [
        *(print, Answer(3), Kind.ONE, defaultdict(int), np.float32(1), np.array([1]), b"x", (1,)),
        *({1}, {1: 2}, "\ud800", 1 << 64, datetime.date(2026, 1, 1), [[[{"deep": range(3)}]]]),
    ]
    for value in values:
        prompts = [Prompt(input_ids=np.array([1]), key=3, metadata={"x": value})]
        if not isinstance(value, int):  # Prompt has its own rule for numbers as keys.
            prompts.append(Prompt(input_ids=np.array([1]), key=value))
        for prompt in prompts:
            with pytest.raises(ConfigError, match="must be JSON values"):
                check_storable(prompt)


def test_metadata_must_be_a_dict_that_does_not_contain_itself():
    endless: list[Any] = []
    endless.append(endless)
    for metadata in (MappingProxyType({"a": 1}), {"x": endless}):
        with pytest.raises(ConfigError, match="must be JSON values"):
            check_storable(Prompt(input_ids=np.array([1]), metadata=metadata))


@each_row("refill", [Wave(), Pool(together=3), LengthBuckets(store=2.5, probes=2)])
def test_a_schedule_is_the_same_after_the_way_through_bytes(refill: Refill):
    forecast = Forecast(step_seconds=12.5, efficiency=0.7, off_policy_share=0.4, mean_staleness=1.5)
    schedule = Schedule(over_provision=1.7, refill=refill, forecast=forecast, why="because")
    assert schedule_from(schedule_record(schedule)) == schedule


# --- damage ------------------------------------------------------------------------------------


def test_damaged_bytes_end_in_an_error_of_ours_when_the_file_is_opened(tmp_path: Path):
    """Bytes are flipped, zeroed and cut off. The file is refused, or its run continues and is
    saved again."""
    whole = tmp_path / "whole"
    filled(whole, snapshots=6)
    checkpoint = tmp_path / "checkpoint"
    store = SqliteStore(whole)
    before = restored(store.open())
    store.close()
    write_checkpoint(checkpoint, full_snapshot(before.state))
    outcomes = {"refused": 0, "resumed": 0}

    @settings(max_examples=60, deadline=None)
    @given(
        data=st.data(),
        source=st.sampled_from([whole, checkpoint]),
        how=st.sampled_from(["flip", "zero", "noise", "cut"]),
    )
    def attempt(data: st.DataObject, source: Path, how: str) -> None:
        body = bytearray(source.read_bytes())
        at = data.draw(st.integers(0, len(body) - 1))
        size = data.draw(st.sampled_from([1, 16, 512, 4096]))
        if how == "flip":
            body[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "cut":
            del body[at:]
        else:
            room = len(body[at : at + size])
            seed = data.draw(st.integers(0, 99))
            new = bytes(room) if how == "zero" else random.Random(seed).randbytes(room)
            body[at : at + size] = new
        for name in tmp_path.glob("damaged*"):
            name.unlink()
        path = tmp_path / "damaged"
        path.write_bytes(body)
        again = SqliteStore(path)
        try:
            saved = read_checkpoint(path) if source is checkpoint else again.open()
            driver = None if saved is None else restored(saved)
            if driver is not None:
                driver.core.check_invariants()
                if source is whole:
                    again.save(full_snapshot(driver.state), durable=False)
            outcomes["resumed"] += 1
        except StoreError:
            outcomes["refused"] += 1
        finally:
            again.close()

    attempt()
    assert min(outcomes.values()) > 0


def test_a_group_that_cannot_be_read_at_all_is_named_in_the_ledger(path: Path):
    group_id = max(group.group_id for group in filled(path).state.in_flight.training_groups())
    damage(path, f"DELETE FROM rollouts WHERE group_id >= {group_id} OR 1")  # noqa: S608
    damage(path, f"UPDATE groups SET body = x'00' WHERE group_id = {group_id}")  # noqa: S608
    driver = restored(held_in(path))
    driver.core.check_invariants()
    entries = [e for e in driver.state.in_flight.ledger.entries if e.reason is Reason.DAMAGED]
    assert [(e.group_id, e.rollout_id) for e in entries] == [(group_id, group_id + 1)]


def test_groups_of_a_batch_that_cannot_be_read_are_delivered_in_another(
    path: Path, store: SqliteStore
):
    driver = running(store)
    driver.feed(ev.BatchRequested())
    driver.finish_batch()
    store.save(full_snapshot(driver.state), durable=True)
    groups = {group.group_id for group in driver.batches[0].groups}
    store.close()
    damage(path, "UPDATE batches SET body = zeroblob(length(body))")
    again = restored(store.open())
    store.close()
    again.core.check_invariants()
    assert groups <= {group.group_id for group in again.state.in_flight.ready}
    assert again.state.in_flight.counters.delivered == 0


# --- forks -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_leaves_the_file_alone(path: Path, store: SqliteStore):
    driver = running(store)
    driver.feed(ev.BatchRequested())
    driver.save()
    child = os.fork()
    if child == 0:
        # As its end does it.
        store.close()
        del driver, store
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    driver.finish(next(iter(driver.sends)))
    driver.save()
    # What kill -9 of this process would leave now.
    for suffix in ("", "-wal"):
        shutil.copyfile(f"{path}{suffix}", f"{path}.left{suffix}")
    left = SqliteStore(f"{path}.left")
    saved = left.open()
    left.close()
    store.close()
    assert saved is not None
    assert saved.run == full_snapshot(driver.state).run
