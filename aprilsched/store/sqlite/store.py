"""A store in one SQLite file, and checkpoints: a whole scheduler in one file of the same format.

Invariants:

- A snapshot is one transaction: the file holds the scheduler's state at one moment, whatever ends
  the process. Write-ahead logging ensures it: an incomplete end of the log is dropped on opening.
- Tokens are appended in pages, one for each snapshot, and rewritten only to free the space of
  tokens that are gone (:mod:`aprilsched.store.sqlite.cleaning`).
- The file is locked while it is open, so only one scheduler uses it at a time.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sqlite3
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from aprilsched.core.lengths.observed import MOST_KEYS
from aprilsched.core.state.saved import Saved, Snapshot
from aprilsched.errors import ConfigError, StoreError
from aprilsched.store.codec import (
    checksum,
    encode,
    group_record,
    lengths_record,
    remembered_record,
    schedule_record,
)
from aprilsched.store.memory import KEPT_ENTRIES, KEPT_LENGTHS
from aprilsched.store.sqlite.cleaning import Cleaner
from aprilsched.store.sqlite.file import (
    Marker,
    Progress,
    connect,
    insert_page,
    migrate,
    safe_path,
    said_by,
)
from aprilsched.store.sqlite.reading import read_saved

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
