"""Reads everything that a file holds, and says what is damaged.

Tokens in a damaged page, and those after them in the same rollouts, are generated again. A damaged
record of a group or rollout costs the group, which is named. Only a damaged record of the run
itself makes the file unreadable.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from aprilsched.core.state.ledger import Entry
from aprilsched.core.state.saved import (
    GroupState,
    RolloutState,
    RunState,
    Saved,
    SavedBatch,
    SavedGroup,
)
from aprilsched.errors import ConfigError, StoreError
from aprilsched.store.base import Slice, assemble, slices_of
from aprilsched.store.codec import (
    checksum,
    decode,
    group_from,
    lengths_from,
    remembered_from,
    schedule_from,
)
from aprilsched.store.sqlite.file import COLUMNS, page_from

log = logging.getLogger("aprilsched")

T = TypeVar("T")

_UNREADABLE = (msgspec.MsgspecError, ValueError, IndexError, KeyError, ConfigError)


def read_saved(connection: sqlite3.Connection, path: Path) -> Saved | None:
    """Read the contents of the file; None if nothing was saved yet.

    Raises:
        StoreError: if the run's own record is damaged, or the file is not a valid store.
        sqlite3.Error: if the file cannot be read.
    """
    try:
        # Damage that SQLite would notice only at a later write must not end a run then.
        (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise ValueError(found)
        return _read(connection, path)
    except (StoreError, sqlite3.Error):
        raise
    except Exception as error:
        why = " ".join(str(error).split())
        raise StoreError(
            f"{path} is damaged ({why}); restore a checkpoint, or move it away to start again."
        ) from error


def _read(connection: sqlite3.Connection, path: Path) -> Saved | None:
    row = connection.execute("SELECT body, crc FROM run").fetchone()
    if row is None:
        return None
    run = _record(row[0], row[1], lambda body: decode(body, RunState))
    if run is None:
        raise StoreError(
            f"{path} is damaged (the record of its run cannot be read); restore a checkpoint, or "
            "move it away to start again."
        )
    damaged: dict[int, str] = {}
    groups = list(_groups(connection, damaged))
    rollouts, since = _rollouts(connection, groups, damaged)
    row = connection.execute("SELECT body, crc FROM schedule").fetchone()
    return Saved(
        run=run,
        schedule=None if row is None or row[0] is None else _record(row[0], row[1], schedule_from),
        groups=groups,
        group_states=_group_states(connection, damaged),
        rollouts=rollouts,
        tokens={
            rollout_id: assemble(slices)
            for rollout_id, slices in _slices(connection, groups, since, path).items()
        },
        batches=list(_list(connection, "batches", "batch", lambda b: decode(b, SavedBatch))),
        dropped=list(_list(connection, "dropped", "n", lambda b: decode(b, Entry))),
        lengths=list(_list(connection, "lengths", "n", lengths_from)),
        damaged=damaged,
        remembered=list(_list(connection, "remembered", "n", remembered_from)),
    )


def _record(body: bytes, crc: int, read: Callable[[bytes], T]) -> T | None:
    """Decode a record; None if it is damaged."""
    # A damaged row may hold anything in any column.
    if type(body) is not bytes or checksum(body) != crc:
        return None
    try:
        return read(body)
    except _UNREADABLE:
        return None


def _groups(connection: sqlite3.Connection, damaged: dict[int, str]) -> Iterator[SavedGroup]:
    rows = connection.execute("SELECT group_id, body, crc FROM groups ORDER BY group_id")
    for group_id, body, crc in rows:
        group = _record(body, crc, group_from)
        if group is None or group.group_id != group_id:
            damaged[group_id] = "its record in the store is damaged"
        else:
            yield group


def _group_states(connection: sqlite3.Connection, damaged: dict[int, str]) -> dict[int, GroupState]:
    states: dict[int, GroupState] = {}
    for group_id, *row in connection.execute(
        "SELECT group_id, accepted, first_run FROM group_states"
    ):
        accepted, first_run = row
        if not all(value is None or type(value) is int for value in row):
            damaged[group_id] = "its state in the store is damaged"
        states[group_id] = GroupState(
            group_id=group_id,
            accepted=None if accepted is None else bool(accepted),
            first_run=first_run,
        )
    return states


def _rollouts(
    connection: sqlite3.Connection, groups: list[SavedGroup], damaged: dict[int, str]
) -> tuple[dict[int, RolloutState], dict[int, int]]:
    """The rollouts' states, and the first page that counts for each rollout's tokens."""
    group_of = {m.rollout_id: group.group_id for group in groups for m in group.members}
    states: dict[int, RolloutState] = {}
    since: dict[int, int] = {}
    for rollout_id, first_page, body, crc in connection.execute(
        "SELECT rollout_id, since, body, crc FROM rollouts"
    ):
        state = _record(body, crc, lambda body: decode(body, RolloutState))
        if rollout_id not in group_of:
            if state is not None and state.group_id in damaged:
                states[rollout_id] = state  # With it the lost rollout can be named.
            continue
        if state is None or state.rollout_id != rollout_id or type(first_page) is not int:
            # It is unknown whether the rollout had ended, and to continue after the end of a
            # response would make a response that no policy would sample.
            damaged[group_of[rollout_id]] = "the record of one of its rollouts is damaged"
        else:
            states[rollout_id] = state
            since[rollout_id] = first_page
    return states, since


def _slices(
    connection: sqlite3.Connection, groups: list[SavedGroup], since: dict[int, int], path: Path
) -> dict[int, list[Slice]]:
    slices: dict[int, list[Slice]] = {m.rollout_id: [] for group in groups for m in group.members}
    damaged = 0
    rows = connection.execute(f"SELECT seq, {COLUMNS} FROM pages ORDER BY seq")
    for seq, *row in rows:
        page = page_from(tuple(row))
        if page is None:
            damaged += 1
            continue
        for rollout_id, piece in slices_of(page):
            if rollout_id in slices and seq >= since.get(rollout_id, 0):
                slices[rollout_id].append(piece)
    if damaged:
        log.warning(
            "%s: %d pages are damaged; the tokens in them are generated again", path, damaged
        )
    return slices


def _list(
    connection: sqlite3.Connection, table: str, key: str, read: Callable[[bytes], T]
) -> Iterator[T]:
    for body, crc in connection.execute(f"SELECT body, crc FROM {table} ORDER BY {key}"):
        record = _record(body, crc, read)
        if record is not None:
            yield record
