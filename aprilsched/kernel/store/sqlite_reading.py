"""Reads a saved run back from the tables."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from aprilsched.errors import ConfigError, StoreError
from aprilsched.kernel.core.lengths.memory import Remembered
from aprilsched.kernel.core.lengths.observed import GroupLengths
from aprilsched.kernel.core.state.ledger import Entry
from aprilsched.kernel.core.state.saved import (
    GroupState,
    RolloutState,
    RunState,
    Saved,
    SavedBatch,
    SavedGroup,
    SavedRows,
    SavedRun,
    SavedTokens,
)
from aprilsched.kernel.store.codec import checksum, decode, group_from, rows_from, schedule_from
from aprilsched.kernel.store.sqlite_tables import Piece, Slice

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
        tokens=_tokens(connection, groups, since, path),
        companions=_companions(connection),
        batches=list(_list(connection, "batches", "batch", SavedBatch)),
        dropped=list(_list(connection, "dropped", "n", Entry)),
        lengths=list(_list(connection, "lengths", "n", GroupLengths)),
        damaged=damaged,
        remembered=list(_list(connection, "remembered", "n", Remembered)),
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
    for group_id, body, crc in connection.execute("SELECT group_id, body, crc FROM group_states"):
        state = _record(body, crc, lambda body: decode(body, GroupState))
        if state is None or state.group_id != group_id:
            damaged[group_id] = "its state in the store is damaged"
        else:
            states[group_id] = state
    return states


def _rollouts(
    connection: sqlite3.Connection, groups: list[SavedGroup], damaged: dict[int, str]
) -> tuple[dict[int, RolloutState], dict[int, int]]:
    """The rollouts' states, and the first row that counts for each rollout's tokens."""
    group_of = {m.rollout_id: group.group_id for group in groups for m in group.members}
    states: dict[int, RolloutState] = {}
    since: dict[int, int] = {}
    for rollout_id, first_row, body, crc in connection.execute(
        "SELECT rollout_id, since, body, crc FROM rollouts"
    ):
        state = _record(body, crc, lambda body: decode(body, RolloutState))
        if rollout_id not in group_of:
            if state is not None and state.group_id in damaged:
                states[rollout_id] = state  # With it the lost rollout can be named.
            continue
        if state is None or state.rollout_id != rollout_id or type(first_row) is not int:
            # It is unknown whether the rollout had ended, and to continue after the end of a
            # response would make a response that no policy would sample.
            damaged[group_of[rollout_id]] = "the record of one of its rollouts is damaged"
        else:
            states[rollout_id] = state
            since[rollout_id] = first_row
    return states, since


def _tokens(
    connection: sqlite3.Connection, groups: list[SavedGroup], since: dict[int, int], path: Path
) -> dict[int, SavedTokens]:
    pieces: dict[int, list[Piece]] = {m.rollout_id: [] for group in groups for m in group.members}
    damaged = 0
    rows = connection.execute("SELECT n, slices, token_ids, logprobs, crc FROM tokens ORDER BY n")
    for n, *parts, crc in rows:
        # A damaged row may hold anything in any column.
        if any(type(part) is not bytes for part in parts) or checksum(*parts) != crc:
            damaged += 1
            continue
        ids, logprobs = np.frombuffer(parts[1], np.int32), np.frombuffer(parts[2], np.float32)
        end = 0
        for each in decode(parts[0], list[Slice]):
            at, end = end, end + each.length
            if each.rollout_id in pieces and n >= since.get(each.rollout_id, 0):
                pieces[each.rollout_id].append((each, ids[at:end], logprobs[at:end]))
    if damaged:
        log.warning(
            "%s: %d rows of tokens are damaged; the tokens in them are generated again",
            path,
            damaged,
        )
    return {rollout_id: _joined(own) for rollout_id, own in pieces.items()}


def _companions(connection: sqlite3.Connection) -> dict[int, list[SavedRows]]:
    """The rows of each rollout. Damaged ones are left out: what was lost is asked for again."""
    found: dict[int, list[SavedRows]] = {}
    for *place, body, crc in connection.execute(
        "SELECT group_id, rollout_id, name, start, body, crc FROM companions ORDER BY n"
    ):
        rows = _record(body, crc, rows_from)
        if rows is not None:
            group_id, rollout_id, name, start = place
            saved = SavedRows(
                group_id=group_id, rollout_id=rollout_id, name=name, start=start, rows=rows
            )
            found.setdefault(rollout_id, []).append(saved)
    return found


def _joined(pieces: list[Piece]) -> SavedTokens:
    """The tokens of one rollout, up to the first gap; they are a copy."""
    runs: list[SavedRun] = []
    end = count = 0
    pieces.sort(key=lambda piece: piece[0].start)
    for piece, ids, _ in pieces:
        if piece.start != end:
            break
        end, count = end + len(ids), count + 1
        if runs and runs[-1][1:] == (piece.version, piece.engine):
            runs.pop()
        runs.append((end, piece.version, piece.engine))
    cut = count < len(pieces)
    if not count:
        return SavedTokens(cut=cut)
    _, ids, logprobs = zip(*pieces[:count], strict=True)
    return SavedTokens(
        token_ids=np.concatenate(ids), logprobs=np.concatenate(logprobs), runs=tuple(runs), cut=cut
    )


def _list(connection: sqlite3.Connection, table: str, key: str, kind: type[T]) -> Iterator[T]:
    for body, crc in connection.execute(f"SELECT body, crc FROM {table} ORDER BY {key}"):
        record = _record(body, crc, lambda body: decode(body, kind))
        if record is not None:
            yield record
