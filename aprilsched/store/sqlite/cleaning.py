"""Frees the space of tokens whose rollouts are gone.

A page holds the tokens of many rollouts that arrived between two snapshots, and those rollouts
leave at different times. When more tokens are dead than alive, pages that are mostly dead are
merged into new ones, some at a time. So the file never holds much more than twice the live tokens,
and a token is moved about once. Free pages of the file are returned to the disk.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.state.saved import Saved, Snapshot, TokenPage
from aprilsched.store.sqlite.file import COLUMNS, insert_page, page_from
from aprilsched.types import Float32Array, Int32Array

_SLACK_TOKENS = 1 << 20
"""Number of dead tokens (8 MB) that are always tolerated."""
_MANY_PAGES = 1024
_SMALL_TOKENS = 1 << 16
_AT_ONCE_TOKENS = 1 << 21
"""Number of tokens in one transaction (16 MB): delivering a batch may have to wait for it."""
_FREE_PAGES = 256


@dataclass(slots=True)
class _Census:
    """Counts the contents of the file."""

    members: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """The rollouts of each group."""
    since: dict[int, int] = field(default_factory=dict[int, int])
    """The first page that counts, for each rollout that started again."""
    stored: int = 0
    """Number of tokens in all pages."""
    live: int = 0
    """Number of tokens of live rollouts; too high where rollouts started again."""
    pages: int = 0


class Cleaner:
    """Counts the live tokens, and frees the space of the others when it is worthwhile."""

    def __init__(self) -> None:
        self._census = _Census()

    def begin(self, connection: sqlite3.Connection, saved: Saved | None) -> None:
        """Count the contents of a file that was opened."""
        census = self._census = _Census()
        if saved is None:
            return
        for group in saved.groups:
            census.members[group.group_id] = tuple(m.rollout_id for m in group.members)
        census.live = sum(len(held.token_ids) for held in saved.tokens.values())
        rows = connection.execute("SELECT rollout_id, since FROM rollouts WHERE since > 0")
        census.since = {rollout: page for rollout, page in rows if type(page) is int}
        for (slices,) in connection.execute("SELECT slices FROM pages"):
            census.stored += int(_table(slices)[:, 2].sum())
            census.pages += 1

    def note(self, snapshot: Snapshot, page: int) -> None:
        """Count a snapshot that was written; `page` is the number of its page."""
        if snapshot.full:
            self._census = _Census()
        census = self._census
        for group in snapshot.groups:
            census.members[group.group_id] = tuple(m.rollout_id for m in group.members)
        for state in snapshot.rollouts:
            if state.rewritten:
                census.since[state.rollout_id] = page
        if snapshot.page is not None:
            census.stored += snapshot.page.tokens
            census.live += snapshot.page.tokens
            census.pages += 1
        for group_id, tokens in snapshot.removed:
            # A group that came and went between two snapshots was never written.
            members = census.members.pop(group_id, None)
            if members is None:
                continue
            census.live -= tokens
            for rollout_id in members:
                census.since.pop(rollout_id, None)

    def clean(self, connection: sqlite3.Connection) -> None:
        """Free some space, if it is worthwhile.

        Raises:
            sqlite3.Error: if that fails; the file is then unchanged.
        """
        if not self._due():
            return
        connection.execute("BEGIN IMMEDIATE")
        try:
            chosen, dead = self._choose(connection)
            page = self._merged(connection, chosen)
            connection.executemany("DELETE FROM pages WHERE seq = ?", ((seq,) for seq in chosen))
            if page is not None:
                insert_page(connection, page)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self._census.stored -= dead
        self._census.pages -= len(chosen) - (page is not None)
        connection.execute(f"PRAGMA incremental_vacuum({_FREE_PAGES})").fetchall()

    def _due(self, *, without: int = 0) -> bool:
        """Whether cleaning is worthwhile if the file had `without` fewer dead tokens."""
        census = self._census
        dead = census.stored - without - census.live
        return census.pages > _MANY_PAGES or dead > census.live + _SLACK_TOKENS

    def _choose(self, connection: sqlite3.Connection) -> tuple[list[int], int]:
        """The pages to clean, and their number of dead tokens.

        These are all dead pages and, where those are not enough, mostly dead ones; where there
        are many pages, also small ones.
        """
        many = self._census.pages > _MANY_PAGES
        alive = self._alive()
        chosen: list[int] = []
        mostly: list[tuple[int, int, int]] = []
        dead = 0
        for seq, blob in connection.execute("SELECT seq, slices FROM pages ORDER BY seq"):
            slices = _table(blob)
            total = int(slices[:, 2].sum())
            live = int(slices[np.isin(slices[:, 0], alive), 2].sum())
            if live == 0:
                chosen.append(seq)
                dead += total
            elif 2 * live <= total or (many and total < _SMALL_TOKENS):
                mostly.append((seq, live, total - live))
        if not many and not self._due(without=dead):
            return chosen, dead
        kept = 0
        for seq, live, rest in mostly:
            chosen.append(seq)
            kept, dead = kept + live, dead + rest
            if kept > _AT_ONCE_TOKENS:
                break
        return chosen, dead

    def _alive(self) -> Int32Array:
        members = self._census.members.values()
        return np.fromiter((rollout for group in members for rollout in group), dtype=np.int32)

    def _merged(self, connection: sqlite3.Connection, chosen: Iterable[int]) -> TokenPage | None:
        """Merge the live tokens of these pages into one page; each rollout's tokens are joined."""
        alive, since = self._alive(), self._census.since
        places: dict[str, int] = {}
        tables: list[Int32Array] = []
        ids: list[Int32Array] = []
        logprobs: list[Float32Array] = []
        for seq in chosen:
            page = page_from(
                connection.execute(f"SELECT {COLUMNS} FROM pages WHERE seq = ?", (seq,)).fetchone()
            )
            if page is None:
                continue
            slices = page.slices.copy()
            new_places = [places.setdefault(engine, len(places)) for engine in page.engines]
            # The place -1, which means no engine, indexes the last entry.
            slices[:, 4] = np.array([*new_places, -1], dtype=np.int32)[slices[:, 4]]
            lives = np.isin(slices[:, 0], alive)
            for rollout_id in [r for r, first in since.items() if seq < first]:
                lives &= slices[:, 0] != rollout_id
            kept = np.repeat(lives, slices[:, 2])
            tables.append(slices[lives])
            ids.append(page.token_ids[kept])
            logprobs.append(page.logprobs[kept])
        if not sum(map(len, tables)):
            return None
        slices, order = _joined(np.concatenate(tables))
        return TokenPage(
            slices=slices,
            engines=tuple(places),
            token_ids=np.concatenate(ids)[order],
            logprobs=np.concatenate(logprobs)[order],
        )


def _table(blob: object) -> Int32Array:
    # A damaged row may hold anything; its tokens count as dead.
    if type(blob) is not bytes or len(blob) % 20:
        return np.empty((0, 5), dtype=np.int32)
    return np.frombuffer(blob, dtype=np.int32).reshape(-1, 5)


def _joined(slices: Int32Array) -> tuple[Int32Array, NDArray[np.int64]]:
    """Sort slices by rollout and position and join those that continue each other.

    Also returns the previous index of each token, in the new order.
    """
    by_place = np.lexsort((slices[:, 1], slices[:, 0]))
    begins: NDArray[np.int64] = np.concatenate(([0], np.cumsum(slices[:, 2], dtype=np.int64)[:-1]))[
        by_place
    ]
    slices = slices[by_place]
    lengths: NDArray[np.int64] = slices[:, 2].astype(np.int64)
    new_begins: NDArray[np.int64] = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    shift: NDArray[np.int64] = np.repeat(begins - new_begins, lengths)
    order = shift + np.arange(len(shift))
    before, after = slices[:-1], slices[1:]
    continues = (
        (after[:, 0] == before[:, 0])
        & (after[:, 1] == before[:, 1] + before[:, 2])
        & (after[:, 3] == before[:, 3])
        & (after[:, 4] == before[:, 4])
    )
    firsts = np.flatnonzero(np.concatenate(([True], ~continues)))
    joined = slices[firsts]
    joined[:, 2] = np.add.reduceat(lengths, firsts)
    return joined, order
