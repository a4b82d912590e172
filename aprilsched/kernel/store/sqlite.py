"""A store in one SQLite file, and checkpoints: a whole scheduler in one file of the same format.

Invariants:

- A snapshot is one transaction: the file holds the scheduler's state at one moment, whatever ends
  the process. Write-ahead logging ensures it: an incomplete end of the log is dropped on opening.
- A snapshot appends one row of tokens for each group that got some. The rows of a group are deleted
  with it, and SQLite uses their space again.
- The file is locked while it is open, so only one scheduler uses it at a time.
- Tokens in a damaged row, and those after them in the same rollout, are generated again. A damaged
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
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np

from aprilsched.errors import ConfigError, StoreError
from aprilsched.kernel.core.lengths.observed import MOST_KEYS, GroupLengths, Remembered
from aprilsched.kernel.core.state.ledger import Entry
from aprilsched.kernel.core.state.saved import (
    GroupState,
    RolloutState,
    RunState,
    Saved,
    SavedBatch,
    SavedGroup,
    SavedRows,
    SavedRun,
    SavedTokens,
    Snapshot,
    TokenPage,
)
from aprilsched.kernel.store.codec import (
    checksum,
    decode,
    encode,
    group_from,
    group_record,
    rows_from,
    rows_record,
    schedule_from,
    schedule_record,
)
from aprilsched.kernel.store.file import (
    PAGE_BYTES,
    Marker,
    Progress,
    connect,
    migrate,
    safe_path,
    store_errors,
    transaction,
)
from aprilsched.kernel.values.files import unused_name
from aprilsched.types import Float32Array, Int32Array

log = logging.getLogger("aprilsched")

T = TypeVar("T")

KEPT_ENTRIES = 10_000
"""Number of ledger entries that are kept; the scheduler keeps the same number."""
KEPT_LENGTHS = 4096
"""Number of groups whose lengths are kept; the scheduler uses the same number of responses."""
_FREE_BYTES = 1 << 24
"""Free space that a file always keeps for the next tokens."""
_FREE_PAGES = 1024
"""Number of pages that one save gives back to the disk at most (4 MB)."""
_TABLES = (
    "run",
    "schedule",
    "groups",
    "group_states",
    "rollouts",
    "tokens",
    "companions",
    "batches",
    "dropped",
    "lengths",
    "remembered",
)


class _Slice(NamedTuple):
    """Where consecutive tokens of a row belong; they are of one version and engine."""

    rollout_id: int
    start: int
    length: int
    version: int
    engine: str | None


_Piece: TypeAlias = tuple[_Slice, Int32Array, Float32Array]
"""A slice with its token ids and logprobs."""


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
        connection = connect(self.path)
        try:
            with store_errors(self.path, "read"):
                # This also shows at once that a folder is not writable.
                connection.execute("BEGIN IMMEDIATE")
                if new:
                    self._marker.remove()
                last = self._marker.open()
                saved = self._compare(read_saved(connection, self.path), connection, last)
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
        connection = self._require_open()
        with store_errors(self.path, "written"):
            self._be_durable(connection, durable)
            save_snapshot(connection, snapshot)
            counters = snapshot.run.counters
            self._marker.write(
                Progress(
                    row=_last_row(connection),
                    launched=counters.launched,
                    batches=max(counters.batches, self._given),
                )
            )
            _give_back_space(connection)

    def into_one_file(self) -> None:
        """End the write-ahead log, so that everything is in the one file.

        Raises:
            StoreError: if that fails.
        """
        with store_errors(self.path, "written"):
            self._require_open().execute("PRAGMA journal_mode = DELETE")

    def close(self) -> None:
        """Close the file."""
        self._marker.close()
        connection, self._connection = self._connection, None
        if connection is not None:
            with store_errors(self.path, "closed"):
                connection.close()

    def keep_connection(self) -> None:
        """Keep a forked process from closing its copy of the open connection.

        Closing one there, even by garbage collection, would delete the write-ahead log of the
        process that writes it. So the copy is leaked on purpose.
        """
        if self._connection is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
            self._connection = None

    def _compare(
        self, saved: Saved | None, connection: sqlite3.Connection, last: Progress | None
    ) -> Saved | None:
        """`saved`, with a note if the marker `last` shows that more was saved."""
        self._given = 0
        if last is None:
            return saved
        if saved is None:
            raise StoreError(
                f"{self.path} has lost all that was saved in it, because its write-ahead log is "
                "damaged; restore a checkpoint, or move it away to start again."
            )
        counters = saved.run.counters
        found = Progress(_last_row(connection), counters.launched, counters.batches)
        if all(a >= b for a, b in zip(found, last, strict=True)):
            return saved
        self._given = last.batches
        log.warning(
            "%s has lost its last saves, because its write-ahead log is damaged or the file was "
            "replaced; the run continues after %d batches, and %d that may have been given come "
            "again with other responses, as redelivered",
            self.path,
            found.batches,
            max(0, last.batches - found.batches),
        )
        return replace(saved, first_new_batch=last.batches)

    def _require_open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StoreError(f"{self.path} is not open; a store is opened by its scheduler.")
        return self._connection

    def _be_durable(self, connection: sqlite3.Connection, durable: bool) -> None:
        # NORMAL survives the end of the process. FULL waits for the disk and also survives a loss
        # of power.
        if durable != self._durable:
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._durable = durable


def _keep_connections() -> None:
    for store in list(_OPEN):
        store.keep_connection()


_OPEN: weakref.WeakSet[SqliteStore] = weakref.WeakSet()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_connections)


# --- writing -------------------------------------------------------------------------------------


def save_snapshot(connection: sqlite3.Connection, snapshot: Snapshot) -> None:
    """Write a snapshot, completely or not at all.

    Raises:
        sqlite3.Error: if it cannot be written.
        ConfigError: if the metadata of a prompt cannot be stored.
    """
    with transaction(connection):
        if snapshot.full:
            for table in _TABLES:
                connection.execute(f"DELETE FROM {table}")
        _put(connection, "run", [(1, encode(snapshot.run))])
        if snapshot.schedule is not None:
            _put(connection, "schedule", [(1, schedule_record(snapshot.schedule))])
        _put(connection, "groups", ((g.group_id, group_record(g)) for g in snapshot.groups))
        _put(connection, "group_states", ((g.group_id, encode(g)) for g in snapshot.group_states))
        _write_rollouts(connection, snapshot)
        _write_tokens(connection, snapshot)
        _write_companions(connection, snapshot)
        _append(connection, "dropped", map(encode, snapshot.dropped), KEPT_ENTRIES)
        _append(connection, "lengths", map(encode, snapshot.lengths), KEPT_LENGTHS)
        _remember(connection, snapshot)
        rows = [(index,) for index in snapshot.acknowledged]
        connection.executemany("DELETE FROM batches WHERE batch = ?", rows)
        _put(connection, "batches", ((batch.index, encode(batch)) for batch in snapshot.batches))
        rows = [(group_id,) for group_id in snapshot.removed]
        for table in ("groups", "group_states", "rollouts", "tokens", "companions"):
            connection.executemany(f"DELETE FROM {table} WHERE group_id = ?", rows)


def _put(connection: sqlite3.Connection, table: str, records: Iterable[tuple[int, bytes]]) -> None:
    """Write records by their keys, each with its checksum."""
    connection.executemany(
        f"REPLACE INTO {table} VALUES (?, ?, ?)",
        ((key, body, checksum(body)) for key, body in records),
    )


def _last_row(connection: sqlite3.Connection) -> int:
    """The number of the last row of tokens that was ever written; it never falls."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'tokens'").fetchone()
    return 0 if row is None else row[0]


def _give_back_space(connection: sqlite3.Connection) -> None:
    """Return some free pages to the disk, if the file has more of them than it uses."""
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    if free * PAGE_BYTES > _FREE_BYTES and 2 * free > pages:
        connection.execute(f"PRAGMA incremental_vacuum({_FREE_PAGES})").fetchall()


def _write_rollouts(connection: sqlite3.Connection, snapshot: Snapshot) -> None:
    bodies = ((state, encode(state)) for state in snapshot.rollouts)
    row = _last_row(connection) + 1
    connection.executemany(
        "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?) ON CONFLICT (rollout_id) DO UPDATE SET"
        " body = excluded.body, crc = excluded.crc, since = max(since, excluded.since)",
        (
            (state.rollout_id, state.group_id, row if state.rewritten else 0, body, checksum(body))
            for state, body in bodies
        ),
    )


def _write_tokens(connection: sqlite3.Connection, snapshot: Snapshot) -> None:
    if snapshot.page is None:
        return
    # A full snapshot has the tokens in the order of its groups, and they are many.
    page = snapshot.page if snapshot.full else _by_group(snapshot.page)
    connection.executemany(
        "INSERT INTO tokens (group_id, slices, token_ids, logprobs, crc) VALUES (?, ?, ?, ?, ?)",
        _token_rows(page),
    )


def _write_companions(connection: sqlite3.Connection, snapshot: Snapshot) -> None:
    rewritten = [(state.rollout_id,) for state in snapshot.rollouts if state.rewritten]
    connection.executemany("DELETE FROM companions WHERE rollout_id = ?", rewritten)
    bodies = ((saved, rows_record(saved.rows)) for saved in snapshot.companions)
    connection.executemany(
        "INSERT INTO companions (group_id, rollout_id, name, start, body, crc)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (
            (each.group_id, each.rollout_id, each.name, each.start, body, checksum(body))
            for each, body in bodies
        ),
    )


def _by_group(page: TokenPage) -> TokenPage:
    """The same tokens in the order of groups, rollouts and positions.

    Slices that continue each other are joined: a rollout has one for each chunk that has arrived,
    which may be one for each token.
    """
    order = np.lexsort((page.slices[:, 1], page.slices[:, 0], page.slices[:, 5]))
    lengths = page.slices[:, 2].astype(np.int64)
    starts = (np.cumsum(lengths) - lengths)[order]
    slices, lengths = page.slices[order], lengths[order]
    tokens = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(page.tokens)
    before, after = slices[:-1], slices[1:]
    continues = (after[:, 1] == before[:, 1] + before[:, 2]) & (
        after[:, (0, 3, 4)] == before[:, (0, 3, 4)]
    ).all(axis=1)
    firsts = np.flatnonzero(np.append(True, ~continues))
    joined = slices[firsts]
    joined[:, 2] = np.add.reduceat(lengths, firsts)
    return TokenPage(
        slices=joined,
        engines=page.engines,
        token_ids=page.token_ids[tokens],
        logprobs=page.logprobs[tokens],
    )


def _token_rows(page: TokenPage) -> Iterator[tuple[Any, ...]]:
    """A row for each group: its slices, their tokens, and the checksum."""
    at = 0
    engines = (*page.engines, None)  # -1 stands for none.
    rows: list[list[int]] = page.slices.tolist()
    for group_id, own in groupby(rows, key=itemgetter(5)):
        slices = [
            _Slice(rollout_id, start, length, version, engines[place])
            for rollout_id, start, length, version, place, _ in own
        ]
        end = at + sum(each.length for each in slices)
        parts = encode(slices), page.token_ids[at:end].data, page.logprobs[at:end].data
        yield group_id, *parts, checksum(*parts)
        at = end


def _remember(connection: sqlite3.Connection, snapshot: Snapshot) -> None:
    if not snapshot.remembered:
        return
    bodies = ((record.key, encode(record)) for record in snapshot.remembered)
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


# --- reading --------------------------------------------------------------------------------------

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
        tokens=_tokens(connection, groups, since, path),
        companions=_companions(connection),
        batches=list(_list(connection, "batches", "batch", SavedBatch)),
        dropped=list(_list(connection, "dropped", "n", Entry)),
        lengths=list(_list(connection, "lengths", "n", GroupLengths)),
        damaged=damaged,
        remembered=list(_list(connection, "remembered", "n", Remembered)),
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
    for group_id, body, crc in connection.execute("SELECT group_id, body, crc FROM group_states"):
        state = _record(body, crc, lambda body: decode(body, GroupState))
        if state is None or state.group_id != group_id:
            damaged[group_id] = "its state in the store is damaged"
        else:
            states[group_id] = state
    return states


def _rollouts(
    connection: sqlite3.Connection, groups: list[SavedGroup], damaged: dict[int, str]
) -> tuple[dict[int, RolloutState], dict[int, int]]:
    """The rollouts' states, and the first row that counts for each rollout's tokens."""
    group_of = {m.rollout_id: group.group_id for group in groups for m in group.members}
    states: dict[int, RolloutState] = {}
    since: dict[int, int] = {}
    for rollout_id, first_row, body, crc in connection.execute(
        "SELECT rollout_id, since, body, crc FROM rollouts"
    ):
        state = _record(body, crc, lambda body: decode(body, RolloutState))
        if rollout_id not in group_of:
            if state is not None and state.group_id in damaged:
                states[rollout_id] = state  # With it the lost rollout can be named.
            continue
        if state is None or state.rollout_id != rollout_id or type(first_row) is not int:
            # It is unknown whether the rollout had ended, and to continue after the end of a
            # response would make a response that no policy would sample.
            damaged[group_of[rollout_id]] = "the record of one of its rollouts is damaged"
        else:
            states[rollout_id] = state
            since[rollout_id] = first_row
    return states, since


def _tokens(
    connection: sqlite3.Connection, groups: list[SavedGroup], since: dict[int, int], path: Path
) -> dict[int, SavedTokens]:
    pieces: dict[int, list[_Piece]] = {m.rollout_id: [] for group in groups for m in group.members}
    damaged = 0
    rows = connection.execute("SELECT n, slices, token_ids, logprobs, crc FROM tokens ORDER BY n")
    for n, *parts, crc in rows:
        # A damaged row may hold anything in any column.
        if any(type(part) is not bytes for part in parts) or checksum(*parts) != crc:
            damaged += 1
            continue
        ids, logprobs = np.frombuffer(parts[1], np.int32), np.frombuffer(parts[2], np.float32)
        end = 0
        for each in decode(parts[0], list[_Slice]):
            at, end = end, end + each.length
            if each.rollout_id in pieces and n >= since.get(each.rollout_id, 0):
                pieces[each.rollout_id].append((each, ids[at:end], logprobs[at:end]))
    if damaged:
        log.warning(
            "%s: %d rows of tokens are damaged; the tokens in them are generated again",
            path,
            damaged,
        )
    return {rollout_id: _joined(own) for rollout_id, own in pieces.items()}


def _companions(connection: sqlite3.Connection) -> dict[int, list[SavedRows]]:
    """The rows of each rollout. Damaged ones are left out: what was lost is asked for again."""
    found: dict[int, list[SavedRows]] = {}
    for *place, body, crc in connection.execute(
        "SELECT group_id, rollout_id, name, start, body, crc FROM companions ORDER BY n"
    ):
        rows = _record(body, crc, rows_from)
        if rows is not None:
            group_id, rollout_id, name, start = place
            saved = SavedRows(
                group_id=group_id, rollout_id=rollout_id, name=name, start=start, rows=rows
            )
            found.setdefault(rollout_id, []).append(saved)
    return found


def _joined(pieces: list[_Piece]) -> SavedTokens:
    """The tokens of one rollout, up to the first gap; they are a copy."""
    runs: list[SavedRun] = []
    end = count = 0
    pieces.sort(key=lambda piece: piece[0].start)
    for piece, ids, _ in pieces:
        if piece.start != end:
            break
        end, count = end + len(ids), count + 1
        if runs and runs[-1][1:] == (piece.version, piece.engine):
            runs.pop()
        runs.append((end, piece.version, piece.engine))
    cut = count < len(pieces)
    if not count:
        return SavedTokens(cut=cut)
    _, ids, logprobs = zip(*pieces[:count], strict=True)
    return SavedTokens(
        token_ids=np.concatenate(ids), logprobs=np.concatenate(logprobs), runs=tuple(runs), cut=cut
    )


def _list(connection: sqlite3.Connection, table: str, key: str, kind: type[T]) -> Iterator[T]:
    for body, crc in connection.execute(f"SELECT body, crc FROM {table} ORDER BY {key}"):
        record = _record(body, crc, lambda body: decode(body, kind))
        if record is not None:
            yield record


# --- checkpoints ----------------------------------------------------------------------------------


def write_checkpoint(path: Path, snapshot: Snapshot) -> None:
    """Write a full snapshot to `path`, completely or not at all; an existing file is replaced.

    Raises:
        StoreError: if it cannot be written.
    """
    path = safe_path(path)
    writing = unused_name(path)
    with store_errors(path, "written"):
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
        StoreError: if the file does not exist, or it cannot be read.
    """
    if not safe_path(path).exists():
        raise StoreError(f"{path} is not there; name a checkpoint that was written.")
    with store_errors(path, "read"):
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
