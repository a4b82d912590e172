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
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from aprilsched.errors import ConfigError, StoreError
from aprilsched.kernel.core.state.saved import Saved, Snapshot
from aprilsched.kernel.store.file import Marker, Progress, connect, store_errors
from aprilsched.kernel.store.sqlite_reading import read_saved
from aprilsched.kernel.store.sqlite_writing import give_back_space, last_row, save_snapshot

log = logging.getLogger("aprilsched")

T = TypeVar("T")


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
                    row=last_row(connection),
                    launched=counters.launched,
                    batches=max(counters.batches, self._given),
                )
            )
            give_back_space(connection)

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
        found = Progress(last_row(connection), counters.launched, counters.batches)
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
