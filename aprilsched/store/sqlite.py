"""Reads everything that a file holds, and says what is damaged.

Tokens in a damaged page, and those after them in the same rollouts, are generated again. A damaged
record of a group or rollout costs the group, which is named. Only a damaged record of the run
itself makes the file unreadable.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sqlite3
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from aprilsched.core.lengths.observed import MOST_KEYS
from aprilsched.core.state.ledger import Entry
from aprilsched.core.state.saved import (
    GroupState,
    RolloutState,
    RunState,
    Saved,
    SavedBatch,
    SavedGroup,
    Snapshot,
    TokenPage,
)
from aprilsched.errors import ConfigError, StoreError
from aprilsched.store.codec import (
    checksum,
    decode,
    encode,
    group_from,
    group_record,
    lengths_from,
    lengths_record,
    remembered_from,
    remembered_record,
    schedule_from,
    schedule_record,
)
from aprilsched.store.file import (
    COLUMNS,
    Marker,
    Progress,
    connect,
    insert_page,
    migrate,
    page_from,
    safe_path,
    said_by,
)
from aprilsched.store.in_memory import KEPT_ENTRIES, KEPT_LENGTHS, Slice, assemble, slices_of
from aprilsched.types import Float32Array, Int32Array

log = logging.getLogger("aprilsched")

T = TypeVar("T")

_UNREADABLE = (msgspec.MsgspecError, ValueError, IndexError, KeyError, ConfigError)


def read_saved(connection: sqlite3.Connection, path: Path) -> Saved | None:
    """Read the contents of the file; None if nothing was saved yet.

    Raises:
        StoreError: if the run's own record is damaged, or the file is not a valid store.
        sqlite3.Error: if the file cannot be read.
    """
    try:
        # Damage that SQLite would notice only at a later write must not end a run then.
        (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise ValueError(found)
        return _read(connection, path)
    except (StoreError, sqlite3.Error):
        raise
    except Exception as error:
        why = " ".join(str(error).split())
        raise StoreError(
            f"{path} is damaged ({why}); restore a checkpoint, or move it away to start again."
        ) from error


def _read(connection: sqlite3.Connection, path: Path) -> Saved | None:
    row = connection.execute("SELECT body, crc FROM run").fetchone()
    if row is None:
        return None
    run = _record(row[0], row[1], lambda body: decode(body, RunState))
    if run is None:
        raise StoreError(
            f"{path} is damaged (the record of its run cannot be read); restore a checkpoint, or "
            "move it away to start again."
        )
    damaged: dict[int, str] = {}
    groups = list(_groups(connection, damaged))
    rollouts, since = _rollouts(connection, groups, damaged)
    row = connection.execute("SELECT body, crc FROM schedule").fetchone()
    return Saved(
        run=run,
        schedule=None if row is None or row[0] is None else _record(row[0], row[1], schedule_from),
        groups=groups,
        group_states=_group_states(connection, damaged),
        rollouts=rollouts,
        tokens={
            rollout_id: assemble(slices)
            for rollout_id, slices in _slices(connection, groups, since, path).items()
        },
        batches=list(_list(connection, "batches", "batch", lambda b: decode(b, SavedBatch))),
        dropped=list(_list(connection, "dropped", "n", lambda b: decode(b, Entry))),
        lengths=list(_list(connection, "lengths", "n", lengths_from)),
        damaged=damaged,
        remembered=list(_list(connection, "remembered", "n", remembered_from)),
    )


def _record(body: bytes, crc: int, read: Callable[[bytes], T]) -> T | None:
    """Decode a record; None if it is damaged."""
    # A damaged row may hold anything in any column.
    if type(body) is not bytes or checksum(body) != crc:
        return None
    try:
        return read(body)
    except _UNREADABLE:
        return None


def _groups(connection: sqlite3.Connection, damaged: dict[int, str]) -> Iterator[SavedGroup]:
    rows = connection.execute("SELECT group_id, body, crc FROM groups ORDER BY group_id")
    for group_id, body, crc in rows:
        group = _record(body, crc, group_from)
        if group is None or group.group_id != group_id:
            damaged[group_id] = "its record in the store is damaged"
        else:
            yield group


def _group_states(connection: sqlite3.Connection, damaged: dict[int, str]) -> dict[int, GroupState]:
    states: dict[int, GroupState] = {}
    for group_id, *row in connection.execute(
        "SELECT group_id, accepted, first_run FROM group_states"
    ):
        accepted, first_run = row
        if not all(value is None or type(value) is int for value in row):
            damaged[group_id] = "its state in the store is damaged"
        states[group_id] = GroupState(
            group_id=group_id,
            accepted=None if accepted is None else bool(accepted),
            first_run=first_run,
        )
    return states


def _rollouts(
    connection: sqlite3.Connection, groups: list[SavedGroup], damaged: dict[int, str]
) -> tuple[dict[int, RolloutState], dict[int, int]]:
    """The rollouts' states, and the first page that counts for each rollout's tokens."""
    group_of = {m.rollout_id: group.group_id for group in groups for m in group.members}
    states: dict[int, RolloutState] = {}
    since: dict[int, int] = {}
    for rollout_id, first_page, body, crc in connection.execute(
        "SELECT rollout_id, since, body, crc FROM rollouts"
    ):
        state = _record(body, crc, lambda body: decode(body, RolloutState))
        if rollout_id not in group_of:
            if state is not None and state.group_id in damaged:
                states[rollout_id] = state  # With it the lost rollout can be named.
            continue
        if state is None or state.rollout_id != rollout_id or type(first_page) is not int:
            # It is unknown whether the rollout had ended, and to continue after the end of a
            # response would make a response that no policy would sample.
            damaged[group_of[rollout_id]] = "the record of one of its rollouts is damaged"
        else:
            states[rollout_id] = state
            since[rollout_id] = first_page
    return states, since


def _slices(
    connection: sqlite3.Connection, groups: list[SavedGroup], since: dict[int, int], path: Path
) -> dict[int, list[Slice]]:
    slices: dict[int, list[Slice]] = {m.rollout_id: [] for group in groups for m in group.members}
    damaged = 0
    rows = connection.execute(f"SELECT seq, {COLUMNS} FROM pages ORDER BY seq")
    for seq, *row in rows:
        page = page_from(tuple(row))
        if page is None:
            damaged += 1
            continue
        for rollout_id, piece in slices_of(page):
            if rollout_id in slices and seq >= since.get(rollout_id, 0):
                slices[rollout_id].append(piece)
    if damaged:
        log.warning(
            "%s: %d pages are damaged; the tokens in them are generated again", path, damaged
        )
    return slices


def _list(
    connection: sqlite3.Connection, table: str, key: str, read: Callable[[bytes], T]
) -> Iterator[T]:
    for body, crc in connection.execute(f"SELECT body, crc FROM {table} ORDER BY {key}"):
        record = _record(body, crc, read)
        if record is not None:
            yield record


# --- cleaning ------------------------------------------------------------------------------------

# Frees the space of tokens whose rollouts are gone.
#
# A page holds the tokens of many rollouts that arrived between two snapshots, and those rollouts
# leave at different times. When more tokens are dead than alive, pages that are mostly dead are
# merged into new ones, some at a time. So the file never holds much more than twice the live
# tokens, and a token is moved about once. Free pages of the file are returned to the disk.

_SLACK_TOKENS = 1 << 20
"""Number of dead tokens (8 MB) that are always tolerated."""
_MANY_PAGES = 1024
_SMALL_TOKENS = 1 << 16
_AT_ONCE_TOKENS = 1 << 21
"""Number of tokens in one transaction (16 MB): delivering a batch may have to wait for it."""
_FREE_PAGES = 256


@dataclass(slots=True)
class _Census:
    """Counts the contents of the file."""

    members: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """The rollouts of each group."""
    since: dict[int, int] = field(default_factory=dict[int, int])
    """The first page that counts, for each rollout that started again."""
    stored: int = 0
    """Number of tokens in all pages."""
    live: int = 0
    """Number of tokens of live rollouts; too high where rollouts started again."""
    pages: int = 0


class Cleaner:
    """Counts the live tokens, and frees the space of the others when it is worthwhile."""

    def __init__(self) -> None:
        self._census = _Census()

    def begin(self, connection: sqlite3.Connection, saved: Saved | None) -> None:
        """Count the contents of a file that was opened."""
        census = self._census = _Census()
        if saved is None:
            return
        for group in saved.groups:
            census.members[group.group_id] = tuple(m.rollout_id for m in group.members)
        census.live = sum(len(held.token_ids) for held in saved.tokens.values())
        rows = connection.execute("SELECT rollout_id, since FROM rollouts WHERE since > 0")
        census.since = {rollout: page for rollout, page in rows if type(page) is int}
        for (slices,) in connection.execute("SELECT slices FROM pages"):
            census.stored += int(_table(slices)[:, 2].sum())
            census.pages += 1

    def note(self, snapshot: Snapshot, page: int) -> None:
        """Count a snapshot that was written; `page` is the number of its page."""
        if snapshot.full:
            self._census = _Census()
        census = self._census
        for group in snapshot.groups:
            census.members[group.group_id] = tuple(m.rollout_id for m in group.members)
        for state in snapshot.rollouts:
            if state.rewritten:
                census.since[state.rollout_id] = page
        if snapshot.page is not None:
            census.stored += snapshot.page.tokens
            census.live += snapshot.page.tokens
            census.pages += 1
        for group_id, tokens in snapshot.removed:
            # A group that came and went between two snapshots was never written.
            members = census.members.pop(group_id, None)
            if members is None:
                continue
            census.live -= tokens
            for rollout_id in members:
                census.since.pop(rollout_id, None)

    def clean(self, connection: sqlite3.Connection) -> None:
        """Free some space, if it is worthwhile.

        Raises:
            sqlite3.Error: if that fails; the file is then unchanged.
        """
        if not self._due():
            return
        connection.execute("BEGIN IMMEDIATE")
        try:
            chosen, dead = self._choose(connection)
            page = self._merged(connection, chosen)
            connection.executemany("DELETE FROM pages WHERE seq = ?", ((seq,) for seq in chosen))
            if page is not None:
                insert_page(connection, page)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self._census.stored -= dead
        self._census.pages -= len(chosen) - (page is not None)
        connection.execute(f"PRAGMA incremental_vacuum({_FREE_PAGES})").fetchall()

    def _due(self, *, without: int = 0) -> bool:
        """Whether cleaning is worthwhile if the file had `without` fewer dead tokens."""
        census = self._census
        dead = census.stored - without - census.live
        return census.pages > _MANY_PAGES or dead > census.live + _SLACK_TOKENS

    def _choose(self, connection: sqlite3.Connection) -> tuple[list[int], int]:
        """The pages to clean, and their number of dead tokens.

        These are all dead pages and, where those are not enough, mostly dead ones; where there
        are many pages, also small ones.
        """
        many = self._census.pages > _MANY_PAGES
        alive = self._alive()
        chosen: list[int] = []
        mostly: list[tuple[int, int, int]] = []
        dead = 0
        for seq, blob in connection.execute("SELECT seq, slices FROM pages ORDER BY seq"):
            slices = _table(blob)
            total = int(slices[:, 2].sum())
            live = int(slices[np.isin(slices[:, 0], alive), 2].sum())
            if live == 0:
                chosen.append(seq)
                dead += total
            elif 2 * live <= total or (many and total < _SMALL_TOKENS):
                mostly.append((seq, live, total - live))
        if not many and not self._due(without=dead):
            return chosen, dead
        kept = 0
        for seq, live, rest in mostly:
            chosen.append(seq)
            kept, dead = kept + live, dead + rest
            if kept > _AT_ONCE_TOKENS:
                break
        return chosen, dead

    def _alive(self) -> Int32Array:
        members = self._census.members.values()
        return np.fromiter((rollout for group in members for rollout in group), dtype=np.int32)

    def _merged(self, connection: sqlite3.Connection, chosen: Iterable[int]) -> TokenPage | None:
        """Merge the live tokens of these pages into one page; each rollout's tokens are joined."""
        alive, since = self._alive(), self._census.since
        places: dict[str, int] = {}
        tables: list[Int32Array] = []
        ids: list[Int32Array] = []
        logprobs: list[Float32Array] = []
        for seq in chosen:
            page = page_from(
                connection.execute(f"SELECT {COLUMNS} FROM pages WHERE seq = ?", (seq,)).fetchone()
            )
            if page is None:
                continue
            slices = page.slices.copy()
            new_places = [places.setdefault(engine, len(places)) for engine in page.engines]
            # The place -1, which means no engine, indexes the last entry.
            slices[:, 4] = np.array([*new_places, -1], dtype=np.int32)[slices[:, 4]]
            lives = np.isin(slices[:, 0], alive)
            for rollout_id in [r for r, first in since.items() if seq < first]:
                lives &= slices[:, 0] != rollout_id
            kept = np.repeat(lives, slices[:, 2])
            tables.append(slices[lives])
            ids.append(page.token_ids[kept])
            logprobs.append(page.logprobs[kept])
        if not sum(map(len, tables)):
            return None
        slices, order = _joined(np.concatenate(tables))
        return TokenPage(
            slices=slices,
            engines=tuple(places),
            token_ids=np.concatenate(ids)[order],
            logprobs=np.concatenate(logprobs)[order],
        )


def _table(blob: object) -> Int32Array:
    # A damaged row may hold anything; its tokens count as dead.
    if type(blob) is not bytes or len(blob) % 20:
        return np.empty((0, 5), dtype=np.int32)
    return np.frombuffer(blob, dtype=np.int32).reshape(-1, 5)


def _joined(slices: Int32Array) -> tuple[Int32Array, NDArray[np.int64]]:
    """Sort slices by rollout and position and join those that continue each other.

    Also returns the previous index of each token, in the new order.
    """
    by_place = np.lexsort((slices[:, 1], slices[:, 0]))
    begins: NDArray[np.int64] = np.concatenate(([0], np.cumsum(slices[:, 2], dtype=np.int64)[:-1]))[
        by_place
    ]
    slices = slices[by_place]
    lengths: NDArray[np.int64] = slices[:, 2].astype(np.int64)
    new_begins: NDArray[np.int64] = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    shift: NDArray[np.int64] = np.repeat(begins - new_begins, lengths)
    order = shift + np.arange(len(shift))
    before, after = slices[:-1], slices[1:]
    continues = (
        (after[:, 0] == before[:, 0])
        & (after[:, 1] == before[:, 1] + before[:, 2])
        & (after[:, 3] == before[:, 3])
        & (after[:, 4] == before[:, 4])
    )
    firsts = np.flatnonzero(np.concatenate(([True], ~continues)))
    joined = slices[firsts]
    joined[:, 2] = np.add.reduceat(lengths, firsts)
    return joined, order


# --- store ---------------------------------------------------------------------------------------

# A store in one SQLite file, and checkpoints: a whole scheduler in one file of the same format.
#
# Invariants:
#
# - A snapshot is one transaction: the file holds the scheduler's state at one moment, whatever ends
#   the process. Write-ahead logging ensures it: an incomplete end of the log is dropped on opening.
# - Tokens are appended in pages, one for each snapshot, and rewritten only to free the space of
#   tokens that are gone (:mod:`aprilsched.store.sqlite`).
# - The file is locked while it is open, so only one scheduler uses it at a time.

log = logging.getLogger("aprilsched")

_TABLES = (
    "run",
    "schedule",
    "groups",
    "group_states",
    "rollouts",
    "pages",
    "batches",
    "dropped",
    "lengths",
    "remembered",
)


class SqliteStore:
    """Keeps partial rollouts in the file `path`, which is made when the scheduler is opened.

    Args:
        path: the file, in an existing folder. Only one scheduler may use it at a time.
        inline: write on the event loop and not in a thread, as a virtual clock requires.

    Raises:
        ConfigError: if `path` is a name that SQLite has for something else than a file.
    """

    def __init__(self, path: Path | str, *, inline: bool = False) -> None:
        name = str(path)
        if not Path(path).name or name.startswith((":", "file:")) or "\0" in name:
            raise ConfigError(
                f"{name!r} names no file to keep a run in; give the path of a file, or "
                "MemoryStore() to keep it in memory."
            )
        self.path = Path(path)
        self.inline = inline
        self._marker = Marker(self.path)
        self._given = 0
        """Number of batches that were given before saves were lost."""
        self._connection: sqlite3.Connection | None = None
        self._cleaner = Cleaner()
        self._durable = False

    def __repr__(self) -> str:
        return f"SqliteStore({str(self.path)!r})"

    def open(self) -> Saved | None:
        """Open the file and return what was saved before; None in a new file.

        Raises:
            StoreError: if the file cannot be opened, read or written, or is in use, or if all that
                was saved is lost.
        """
        self.close()
        new = not os.path.lexists(self.path)
        connection, dropped = connect(self.path)
        try:
            with said_by(self.path, "read"):
                # This also shows at once that a folder is not writable.
                connection.execute("BEGIN IMMEDIATE")
                if new:
                    self._marker.remove()
                last = self._marker.open()
                saved = self._compared(read_saved(connection, self.path), connection, last, dropped)
                self._cleaner.begin(connection, saved)
                connection.execute("COMMIT")
        except BaseException:
            connection.close()
            self._marker.close()
            raise
        self._connection = connection
        _OPEN.add(self)
        self._durable = False
        connection.execute("PRAGMA synchronous = NORMAL")
        return saved

    def save(self, snapshot: Snapshot, *, durable: bool) -> None:
        """Save a snapshot, completely or not at all.

        Raises:
            StoreError: if it cannot be written; the store is then unchanged.
            ConfigError: if the metadata of a prompt cannot be stored.
        """
        connection = self._opened()
        with said_by(self.path, "written"):
            self._be_durable(connection, durable)
            connection.execute("BEGIN IMMEDIATE")
            try:
                page = _next_page(connection)
                self._write(connection, snapshot, page)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            counters = snapshot.run.counters
            self._marker.write(
                Progress(
                    page=page if snapshot.page is not None else page - 1,
                    launched=counters.launched,
                    batches=max(counters.batches, self._given),
                )
            )
            self._cleaner.note(snapshot, page)
            self._cleaner.clean(connection)

    def into_one_file(self) -> None:
        """End the write-ahead log, so that everything is in the one file.

        Raises:
            StoreError: if that fails.
        """
        with said_by(self.path, "written"):
            self._opened().execute("PRAGMA journal_mode = DELETE")

    def close(self) -> None:
        """Close the file."""
        self._marker.close()
        connection, self._connection = self._connection, None
        if connection is not None:
            with said_by(self.path, "closed"):
                connection.close()

    def _compared(
        self,
        saved: Saved | None,
        connection: sqlite3.Connection,
        last: Progress | None,
        dropped: int,
    ) -> Saved | None:
        """`saved`, with what is said of it if it is not what was saved last.

        `last` is what the marker says, and `dropped` the number of saves that SQLite has dropped.
        """
        self._given = 0
        if last is None and not dropped:
            return saved
        if saved is None:
            raise StoreError(
                f"{self.path} has lost all that was saved in it, because its write-ahead log is "
                "damaged; restore a checkpoint, or move it away to start again."
            )
        counters = saved.run.counters
        found = Progress(_next_page(connection) - 1, counters.launched, counters.batches)
        # Without a marker, each save that is gone may have been that of a batch.
        last = last or found._replace(batches=found.batches + dropped)
        if not dropped and all(a >= b for a, b in zip(found, last, strict=True)):
            return saved
        self._given = last.batches
        log.warning(
            "%s has lost its last saves, because its write-ahead log is damaged or the file was "
            "replaced; the run goes on after %d batches, and %d that may have been given come "
            "again with other responses, as redelivered",
            self.path,
            found.batches,
            max(0, last.batches - found.batches),
        )
        return replace(saved, given=last.batches)

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StoreError(f"{self.path} is not open; a store is opened by its scheduler.")
        return self._connection

    def _be_durable(self, connection: sqlite3.Connection, durable: bool) -> None:
        # NORMAL survives the end of the process. FULL waits for the disk and also survives a loss
        # of power.
        if durable != self._durable:
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._durable = durable

    def _write(self, connection: sqlite3.Connection, snapshot: Snapshot, page: int) -> None:
        if snapshot.full:
            for table in _TABLES:
                connection.execute(f"DELETE FROM {table}")
        if snapshot.page is not None:
            insert_page(connection, snapshot.page)
        _put(connection, "run", encode(snapshot.run))
        if snapshot.schedule is not None:
            _put(connection, "schedule", schedule_record(snapshot.schedule))
        _write_groups(connection, snapshot)
        _write_rollouts(connection, snapshot, page)
        _write_lists(connection, snapshot)
        _remove(connection, (group_id for group_id, _ in snapshot.removed))


_OPEN: weakref.WeakSet[SqliteStore] = weakref.WeakSet()


def _let_go() -> None:
    """Keep a forked process from closing its copies of open connections.

    Closing one there, even by garbage collection, would delete the write-ahead log of the process
    that writes it. So the copies are leaked on purpose.
    """
    for store in _OPEN:
        if store._connection is not None:  # pyright: ignore[reportPrivateUsage]
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(store._connection))  # pyright: ignore[reportPrivateUsage]
            store._connection = None  # pyright: ignore[reportPrivateUsage]
    _OPEN.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def _put(connection: sqlite3.Connection, table: str, body: bytes) -> None:
    connection.execute(f"REPLACE INTO {table} VALUES (1, ?, ?)", (body, checksum(body)))


def _next_page(connection: sqlite3.Connection) -> int:
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'pages'").fetchone()
    return 1 if row is None else row[0] + 1


def _write_groups(connection: sqlite3.Connection, snapshot: Snapshot) -> None:
    bodies = ((group.group_id, group_record(group)) for group in snapshot.groups)
    connection.executemany(
        "REPLACE INTO groups VALUES (?, ?, ?)",
        ((group_id, body, checksum(body)) for group_id, body in bodies),
    )
    connection.executemany(
        "REPLACE INTO group_states VALUES (?, ?, ?)",
        ((state.group_id, state.accepted, state.first_run) for state in snapshot.group_states),
    )


def _write_rollouts(connection: sqlite3.Connection, snapshot: Snapshot, page: int) -> None:
    bodies = ((state, encode(state)) for state in snapshot.rollouts)
    connection.executemany(
        "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?) ON CONFLICT (rollout_id) DO UPDATE SET"
        " body = excluded.body, crc = excluded.crc, since = max(since, excluded.since)",
        (
            (state.rollout_id, state.group_id, page if state.rewritten else 0, body, checksum(body))
            for state, body in bodies
        ),
    )


def _write_lists(connection: sqlite3.Connection, snapshot: Snapshot) -> None:
    _append(connection, "dropped", (encode(entry) for entry in snapshot.dropped), KEPT_ENTRIES)
    _append(
        connection, "lengths", (lengths_record(group) for group in snapshot.lengths), KEPT_LENGTHS
    )
    _remember(connection, snapshot)
    connection.executemany(
        "DELETE FROM batches WHERE batch = ?", ((index,) for index in snapshot.acknowledged)
    )
    bodies = ((batch.index, encode(batch)) for batch in snapshot.batches)
    connection.executemany(
        "REPLACE INTO batches VALUES (?, ?, ?)",
        ((index, body, checksum(body)) for index, body in bodies),
    )


def _remember(connection: sqlite3.Connection, snapshot: Snapshot) -> None:
    if not snapshot.remembered:
        return
    bodies = ((record.key, remembered_record(record)) for record in snapshot.remembered)
    # A key gets a new number each time, so the last numbers are the keys that were seen last.
    connection.executemany(
        "REPLACE INTO remembered (key, body, crc) VALUES (?, ?, ?)",
        ((key, body, checksum(body)) for key, body in bodies),
    )
    connection.execute(
        f"DELETE FROM remembered WHERE n <= (SELECT max(n) FROM remembered) - {MOST_KEYS}"
    )


def _append(connection: sqlite3.Connection, table: str, bodies: Iterable[bytes], most: int) -> None:
    rows = [(body, checksum(body)) for body in bodies]
    if rows:
        connection.executemany(f"INSERT INTO {table} (body, crc) VALUES (?, ?)", rows)
        connection.execute(f"DELETE FROM {table} WHERE n <= (SELECT max(n) FROM {table}) - {most}")


def _remove(connection: sqlite3.Connection, group_ids: Iterable[int]) -> None:
    rows = [(group_id,) for group_id in group_ids]
    for table in ("groups", "group_states", "rollouts"):
        connection.executemany(f"DELETE FROM {table} WHERE group_id = ?", rows)


def write_checkpoint(path: Path, snapshot: Snapshot) -> None:
    """Write a full snapshot to `path`, completely or not at all; an existing file is replaced.

    Raises:
        StoreError: if it cannot be written.
    """
    path = safe_path(path)
    writing = path.with_name(f".{path.name}.writing")
    with said_by(path, "written"):
        writing.unlink(missing_ok=True)
        store = SqliteStore(writing)
        try:
            store.open()
            store.save(snapshot, durable=True)
            store.into_one_file()
        finally:
            store.close()
            Marker(writing).remove()
        os.replace(writing, path)


def read_checkpoint(path: Path) -> Saved:
    """Read a file that :func:`write_checkpoint` wrote; the file is not changed.

    Raises:
        StoreError: if there is no such file, or it cannot be read.
    """
    if not safe_path(path).exists():
        raise StoreError(f"{path} is not there; name a checkpoint that was written.")
    with said_by(path, "read"):
        # A copy in memory can be migrated from an older schema without changing the file.
        connection = sqlite3.connect(":memory:", isolation_level=None)
        try:
            file = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
            try:
                file.backup(connection)
            finally:
                file.close()
            migrate(connection, path)
            saved = read_saved(connection, path)
        finally:
            connection.close()
    if saved is None:
        raise StoreError(f"{path} holds no scheduler; name a checkpoint that was written.")
    return saved
