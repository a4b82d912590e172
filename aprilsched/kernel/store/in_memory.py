"""The protocol of a store, and a store in memory, whose contents outlive the scheduler."""

from __future__ import annotations

import sqlite3
import weakref
from pathlib import Path
from typing import Protocol

from aprilsched.kernel.core.state.saved import Saved, Snapshot
from aprilsched.kernel.store.file import migrate
from aprilsched.kernel.store.sqlite_reading import read_saved
from aprilsched.kernel.store.sqlite_writing import save_snapshot


class Store(Protocol):
    """Keeps snapshots of the scheduler, which calls one method at a time, from any thread.

    Every method raises only :class:`~aprilsched.errors.StoreError`. If saving a snapshot fails,
    the store stays as it was, and the next snapshot is a full one.
    """

    @property
    def inline(self) -> bool:
        """Whether the calls run on the event loop and not in a thread: they are short enough, or
        the loop has a virtual clock."""
        ...

    def open(self) -> Saved | None:
        """Open the store and return what was saved before; None in a new store."""
        ...

    def save(self, snapshot: Snapshot, *, durable: bool) -> None:
        """Save a snapshot, completely or not at all.

        With `durable` it survives a loss of power; otherwise it survives any end of the process.
        """
        ...

    def close(self) -> None: ...


_PLACE = Path("the store in memory")


class MemoryStore:
    """Keeps everything until the process ends.

    It is meant for tests, and for a trainer that opens a new scheduler after an error.
    """

    inline = True

    def __init__(self) -> None:
        self._connection = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False
        )
        weakref.finalize(self, self._connection.close)
        migrate(self._connection, _PLACE)

    def __deepcopy__(self, _: object) -> MemoryStore:
        copied = MemoryStore()
        self._connection.backup(copied._connection)
        return copied

    def open(self) -> Saved | None:
        """Return what was saved before; None if nothing was."""
        return read_saved(self._connection, _PLACE)

    def save(self, snapshot: Snapshot, *, durable: bool) -> None:
        """Save a snapshot; `durable` makes no difference.

        Raises:
            ConfigError: if the metadata of a prompt cannot be stored.
        """
        save_snapshot(self._connection, snapshot)

    def close(self) -> None:
        """Do nothing: the store can be opened again."""
