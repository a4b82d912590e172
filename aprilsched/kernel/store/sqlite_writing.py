"""Writes the changes of a run into the tables."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from aprilsched.kernel.core.lengths.memory import MOST_KEYS
from aprilsched.kernel.core.state.saved import Snapshot, TokenPage
from aprilsched.kernel.store.codec import (
    checksum,
    encode,
    group_record,
    rows_record,
    schedule_record,
)
from aprilsched.kernel.store.file import PAGE_BYTES, transaction
from aprilsched.kernel.store.sqlite_tables import (
    FREE_BYTES,
    FREE_PAGES,
    KEPT_ENTRIES,
    KEPT_LENGTHS,
    TABLES,
    Slice,
)


def save_snapshot(connection: sqlite3.Connection, snapshot: Snapshot) -> None:
    """Write a snapshot, completely or not at all.

    Raises:
        sqlite3.Error: if it cannot be written.
        ConfigError: if the metadata of a prompt cannot be stored.
    """
    with transaction(connection):
        if snapshot.full:
            for table in TABLES:
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


def last_row(connection: sqlite3.Connection) -> int:
    """The number of the last row of tokens that was ever written; it never falls."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'tokens'").fetchone()
    return 0 if row is None else row[0]


def give_back_space(connection: sqlite3.Connection) -> None:
    """Return some free pages to the disk, if the file has more of them than it uses."""
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    if free * PAGE_BYTES > FREE_BYTES and 2 * free > pages:
        connection.execute(f"PRAGMA incremental_vacuum({FREE_PAGES})").fetchall()


def _write_rollouts(connection: sqlite3.Connection, snapshot: Snapshot) -> None:
    bodies = ((state, encode(state)) for state in snapshot.rollouts)
    row = last_row(connection) + 1
    connection.executemany(
        "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?) ON CONFLICT (rollout_id) DO UPDATE SET"
        " group_id = excluded.group_id, body = excluded.body, crc = excluded.crc,"
        " since = max(since, excluded.since)",
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
            Slice(rollout_id, start, length, version, engines[place])
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
