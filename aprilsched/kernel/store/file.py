"""The file of a store: opening and locking it, its tables, and the marker of its last save.

A file of schema n has run the first n scripts; a new file runs all of them. A script that was
released is never changed; a change of the schema is a new script.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import struct
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from aprilsched.errors import StoreError
from aprilsched.kernel.store.codec import checksum
from aprilsched.kernel.values.files import open_private

_ENDS = ("-wal", "-journal", "-last")
"""What the names of the files end in that belong to a store."""
_WAIT_SECONDS = 1.0
PAGE_BYTES = 4096
"""A row of tokens has some KiB; in larger pages more of the room between rows stays empty."""
_WAL_BYTES = 1 << 25
_PROGRESS, _CRC = struct.Struct("<3q"), struct.Struct("<I")
_DAMAGED = "restore a checkpoint, or move it away to start again"


def safe_path(path: Path) -> Path:
    """The path, if a plain file or nothing is there.

    Raises:
        StoreError: if it, or a file that belongs to it, is a link or is not a file.
    """
    for name in (path, *(path.with_name(path.name + end) for end in _ENDS)):
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
    with store_errors(path, "opened"):
        safe_path(path)
        # SQLite gives the files that belong to it the same mode. Prompts and responses are for
        # no other process to read. What fails here fails in SQLite too, with a better message.
        with suppress(OSError):
            os.close(open_private(path, os.O_RDWR | os.O_CREAT))
        connection = sqlite3.connect(
            path,
            timeout=_WAIT_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
    try:
        with store_errors(path, "opened"):
            _prepare(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the file into the form that a store needs."""
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    # Some builds of SQLite overwrite what is deleted. The mode of the file protects it already.
    connection.execute("PRAGMA secure_delete = OFF")
    # The file stays locked: two schedulers would overwrite each other's rollouts.
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
    connection.execute("PRAGMA wal_autocheckpoint = 4000")
    connection.execute("PRAGMA trusted_schema = OFF")
    migrate(connection, path)
    connection.execute("BEGIN EXCLUSIVE")
    connection.execute("COMMIT")


@contextmanager
def store_errors(path: Path, what: str) -> Generator[None]:
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


class Progress(NamedTuple):
    """How far a run had come at a save; none of the numbers ever falls."""

    row: int
    """The number of the last row of tokens."""
    launched: int
    batches: int


class Marker:
    """How far the last save had come, in a small file next to the store.

    SQLite drops what follows a damaged place of the write-ahead log without a word, as if it had
    never been saved. The marker is not in the log, so it shows that, also where the log was cut.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + "-last")
        self._file = -1

    def open(self) -> Progress | None:
        """Open the file; returns its content, None if it is empty.

        Raises:
            OSError: if it cannot be opened.
        """
        self.close()
        self._file = open_private(self._path, os.O_RDWR | os.O_CREAT)
        found = os.pread(self._file, _PROGRESS.size + _CRC.size, 0)
        body, crc = found[: _PROGRESS.size], found[_PROGRESS.size :]
        if len(crc) < _CRC.size or _CRC.unpack(crc) != (checksum(body),):
            return None
        return Progress(*_PROGRESS.unpack(body))

    def write(self, progress: Progress) -> None:
        """Note a save, which is done. A marker that is behind the store does no harm."""
        body = _PROGRESS.pack(*progress)
        with suppress(OSError):
            os.pwrite(self._file, body + _CRC.pack(checksum(body)), 0)

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def remove(self) -> None:
        """Remove the file, whose store is gone."""
        self._path.unlink(missing_ok=True)


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
    CREATE TABLE group_states (group_id INTEGER PRIMARY KEY, body BLOB NOT NULL, crc INTEGER);
    CREATE TABLE rollouts (
        rollout_id INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, since INTEGER NOT NULL,
        body BLOB NOT NULL, crc INTEGER
    );
    CREATE INDEX rollouts_by_group ON rollouts (group_id);
    CREATE TABLE tokens (
        n INTEGER PRIMARY KEY AUTOINCREMENT, group_id INTEGER NOT NULL, slices BLOB NOT NULL,
        token_ids BLOB NOT NULL, logprobs BLOB NOT NULL, crc INTEGER
    );
    CREATE INDEX tokens_by_group ON tokens (group_id);
    CREATE TABLE companions (
        n INTEGER PRIMARY KEY AUTOINCREMENT, group_id INTEGER NOT NULL, rollout_id INTEGER NOT NULL,
        name TEXT NOT NULL, start INTEGER NOT NULL, body BLOB NOT NULL, crc INTEGER
    );
    CREATE INDEX companions_by_group ON companions (group_id);
    CREATE INDEX companions_by_rollout ON companions (rollout_id);
    CREATE TABLE batches (batch INTEGER PRIMARY KEY, body BLOB NOT NULL, crc INTEGER);
    CREATE TABLE dropped (n INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB NOT NULL, crc INTEGER);
    CREATE TABLE schedule (one INTEGER PRIMARY KEY CHECK (one = 1), body BLOB, crc INTEGER);
    CREATE TABLE lengths (n INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB NOT NULL, crc INTEGER);
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
    with transaction(connection):
        for script in SCRIPTS[version:]:
            for statement in script.split(";"):
                if statement.strip():
                    connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {len(SCRIPTS)}")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Generator[None]:
    """Commit what the block writes, or roll it back if the block raises."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # On a full disk SQLite has already ended the transaction.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
