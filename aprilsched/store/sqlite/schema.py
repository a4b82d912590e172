"""The tables of the file, and the scripts that bring an older file to the newest schema.

A file of schema n has run the first n scripts; a new file runs all of them. A script that was
released is never changed; a change of the schema is a new script.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from aprilsched.errors import StoreError

__all__ = ["APPLICATION", "SCRIPTS", "migrate"]

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
