"""Checkpoints: a whole scheduler in one file, to be kept with a trainer's own checkpoint."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from aprilsched.core.state.saved import Cut, Saved
from aprilsched.errors import StoreError
from aprilsched.store.sqlite.file import safe_path, said_by
from aprilsched.store.sqlite.reading import read_saved
from aprilsched.store.sqlite.schema import migrate
from aprilsched.store.sqlite.store import SqliteStore

__all__ = ["read_checkpoint", "write_checkpoint"]


def write_checkpoint(path: Path, cut: Cut) -> None:
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
            store.save(cut, durable=True)
            store.into_one_file()
        finally:
            store.close()
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
