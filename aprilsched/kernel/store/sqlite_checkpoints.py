"""Copies a store into a checkpoint, and back."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from aprilsched.errors import StoreError
from aprilsched.kernel.core.state.saved import Saved, Snapshot
from aprilsched.kernel.store.file import Marker, migrate, safe_path, store_errors
from aprilsched.kernel.store.sqlite import SqliteStore
from aprilsched.kernel.store.sqlite_reading import read_saved
from aprilsched.kernel.values.files import unused_name


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
