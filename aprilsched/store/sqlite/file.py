"""The file of a store: opening and locking it, its tables, and its rows of tokens.

A file of schema n has run the first n scripts; a new file runs all of them. A script that was
released is never changed; a change of the schema is a new script.
"""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from aprilsched.core.state.saved import TokenPage
from aprilsched.errors import StoreError
from aprilsched.store.codec import checksum

__all__ = [
    "APPLICATION",
    "COLUMNS",
    "SCRIPTS",
    "connect",
    "insert_page",
    "migrate",
    "page_from",
    "safe_path",
    "said_by",
]

_WAIT_SECONDS = 1.0
_PAGE_BYTES = 16_384
"""Blobs are large; in pages of 4 KiB each blob would be a long chain."""
_WAL_BYTES = 1 << 25
_DAMAGED = "restore a checkpoint, or move it away to start again"


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
            raise StoreError(f"{name} is not a file; name a file for the store.")
    if not path.parent.is_dir():
        raise StoreError(f"{path.parent} is not a folder; make it first, or name another store.")
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
    return "check the disk, or name another store"


APPLICATION = 0x4150524C
""""APRL", the application id in the header of each file."""

SCRIPTS: tuple[str, ...] = (
    """
    CREATE TABLE run (one INTEGER PRIMARY KEY CHECK (one = 1), body BLOB NOT NULL, crc INTEGER);
    CREATE TABLE groups (group_id INTEGER PRIMARY KEY, body BLOB NOT NULL, crc INTEGER);
    CREATE TABLE group_states (
        group_id INTEGER PRIMARY KEY, accepted INTEGER, first_run INTEGER
    );
    CREATE TABLE rollouts (
        rollout_id INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, since INTEGER NOT NULL,
        body BLOB NOT NULL, crc INTEGER
    );
    CREATE INDEX rollouts_by_group ON rollouts (group_id);
    CREATE TABLE pages (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, slices BLOB NOT NULL, engines BLOB NOT NULL,
        token_ids BLOB NOT NULL, logprobs BLOB NOT NULL, crc INTEGER
    );
    CREATE TABLE batches (batch INTEGER PRIMARY KEY, body BLOB NOT NULL, crc INTEGER);
    CREATE TABLE dropped (n INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB NOT NULL, crc INTEGER);
    """,
    """
    CREATE TABLE schedule (one INTEGER PRIMARY KEY CHECK (one = 1), body BLOB, crc INTEGER);
    CREATE TABLE lengths (n INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB NOT NULL, crc INTEGER);
    """,
    """
    CREATE TABLE remembered (
        n INTEGER PRIMARY KEY AUTOINCREMENT, key UNIQUE NOT NULL, body BLOB NOT NULL, crc INTEGER
    );
    """,
)


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the file to the newest schema, in one transaction.

    Raises:
        StoreError: if it is not a store, or was written by a newer version of aprilsched.
        sqlite3.Error: if the file cannot be read or written.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables and application != APPLICATION:
        raise StoreError(f"{path} is an SQLite file of something else; name another one.")
    if version > len(SCRIPTS):
        raise StoreError(
            f"{path} was written by a newer aprilsched (schema {version}, this one knows "
            f"{len(SCRIPTS)}); upgrade aprilsched, or name another store."
        )
    if version == len(SCRIPTS):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        for script in SCRIPTS[version:]:
            for statement in script.split(";"):
                if statement.strip():
                    connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {len(SCRIPTS)}")
        connection.execute("COMMIT")
    except BaseException:
        # On a full disk SQLite has already ended the transaction.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


COLUMNS = "slices, engines, token_ids, logprobs, crc"


def insert_page(connection: sqlite3.Connection, page: TokenPage) -> None:
    """Insert a page."""
    engines = msgspec.json.encode(page.engines)
    slices, ids, logprobs = page.slices.data, page.token_ids.data, page.logprobs.data
    crc = checksum(slices, engines, ids, logprobs)
    connection.execute(
        f"INSERT INTO pages ({COLUMNS}) VALUES (?, ?, ?, ?, ?)",
        (slices, engines, ids, logprobs, crc),
    )


def page_from(row: tuple[bytes, bytes, bytes, bytes, int]) -> TokenPage | None:
    """The page in a row of :data:`COLUMNS`; None if it is damaged."""
    slices, engines, ids, logprobs, crc = row
    if not all(type(part) is bytes for part in row[:4]):
        return None
    if checksum(slices, engines, ids, logprobs) != crc:
        return None
    return TokenPage(
        slices=np.frombuffer(slices, dtype=np.int32).reshape(-1, 5),
        engines=tuple(msgspec.json.decode(engines, type=list[str])),
        token_ids=np.frombuffer(ids, dtype=np.int32),
        logprobs=np.frombuffer(logprobs, dtype=np.float32),
    )
