"""Opens the file of a store for one scheduler at a time, and explains SQLite's failures."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from aprilsched.errors import StoreError
from aprilsched.store.sqlite.schema import migrate

__all__ = ["connect", "safe_path", "said_by"]

_WAIT_SECONDS = 1.0
_PAGE_BYTES = 16_384
"""Blobs are large; in pages of 4 KiB each blob would be a long chain."""
_WAL_BYTES = 1 << 25
_DAMAGED = "restore a checkpoint, or move it away to begin anew"


def safe_path(path: Path) -> Path:
    """The path, if a plain file or nothing is there.

    Raises:
        StoreError: if it, or a file that belongs to it, is a link or is not a file.
    """
    for name in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-journal")):
        try:
            mode = name.lstat().st_mode
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StoreError(f"{name} cannot be used ({error.strerror}); name another.") from error
        if stat.S_ISLNK(mode):
            raise StoreError(f"{name} is a link out of its folder; name the file that it leads to.")
        if not stat.S_ISREG(mode):
            raise StoreError(f"{name} is no file; name a file for the store.")
    if not path.parent.is_dir():
        raise StoreError(f"{path.parent} is no folder; make it first, or name another store.")
    return path


def connect(path: Path) -> sqlite3.Connection:
    """Open the file, make it if it is missing, bring it to the newest schema, and lock it.

    Raises:
        StoreError: if it cannot be opened.
    """
    connection = None
    with said_by(path, "opened"):
        connection = sqlite3.connect(
            safe_path(path),
            timeout=_WAIT_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
    try:
        with said_by(path, "opened"):
            _prepare(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    # The file stays locked: two schedulers would overwrite each other's rollouts.
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
    connection.execute("PRAGMA wal_autocheckpoint = 1000")
    connection.execute("PRAGMA trusted_schema = OFF")
    migrate(connection, path)
    connection.execute("BEGIN EXCLUSIVE")
    connection.execute("COMMIT")


@contextmanager
def said_by(path: Path, what: str) -> Generator[None]:
    """Turn failures of SQLite into one sentence about `path`.

    Raises:
        StoreError: instead of sqlite3.Error and OSError.
    """
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(f"{path} could not be {what} ({error}); {_advice(error)}.") from error
    except UnicodeDecodeError as error:
        # SQLite's own message quotes a damaged name of the file's schema.
        raise StoreError(f"{path} could not be {what} (it is damaged); {_DAMAGED}.") from error
    except OSError as error:
        why = error.strerror or error
        raise StoreError(f"{path} could not be {what} ({why}); name another store.") from error


def _advice(error: sqlite3.Error) -> str:
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return "another process uses it: end that one, or name another store"
    if name.startswith("SQLITE_FULL"):
        return "the disk is full: free some of it"
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return "make it and its folder writable, or name another store"
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return _DAMAGED
    return "see to the disk, or name another store"
