"""Giving up the space of tokens that are gone.

A page holds what arrived between two cuts, of many rollouts, and those leave at different times.
When more tokens are dead than alive, pages that are mostly dead are written together into new
ones, some at a time: the file never holds much more than twice what lives, and a token is moved
about once. Pages of the file that became free are given back to the disk.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from aprilsched.core.saving.saved import Cut, Saved, TokenPage
from aprilsched.store.assembling import Slice, slices_of
from aprilsched.store.sqlite.pages import COLUMNS, insert_page, page_from
from aprilsched.types import Int32Array

__all__ = ["Cleaner"]

_SLACK_TOKENS = 1 << 20
"""8 MB: below that it is not worth the trouble."""
_MANY_PAGES = 1024
_SMALL_TOKENS = 1 << 16
_AT_ONCE_TOKENS = 1 << 21
"""16 MB in one transaction: a batch that is to be handed over may have to wait for it."""
_FREE_PAGES = 256


@dataclass(slots=True)
class _Census:
    """What is in the file."""

    members: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """The rollouts of each group."""
    since: dict[int, int] = field(default_factory=dict[int, int])
    """The first page that counts, for rollouts that began anew."""
    stored: int = 0
    """Tokens in all pages."""
    live: int = 0
    """Of them those of rollouts that are still there; about, where some began anew."""
    pages: int = 0


class Cleaner:
    """Knows what lives, and cleans when it is time."""

    def __init__(self) -> None:
        self._census = _Census()

    def begin(self, connection: sqlite3.Connection, saved: Saved | None) -> None:
        """A file was opened that holds this."""
        census = self._census = _Census()
        if saved is None:
            return
        for group in saved.groups:
            census.members[group.group_id] = tuple(m.rollout_id for m in group.members)
        census.live = sum(len(held.token_ids) for held in saved.tokens.values())
        rows = connection.execute("SELECT rollout_id, since FROM rollouts WHERE since > 0")
        census.since = dict(rows.fetchall())
        for (slices,) in connection.execute("SELECT slices FROM pages"):
            census.stored += int(_table(slices)[:, 2].sum())
            census.pages += 1

    def note(self, cut: Cut, page: int) -> None:
        """A cut was written; `page` is the number of its page."""
        if cut.whole:
            self._census = _Census()
        census = self._census
        for group in cut.groups:
            census.members[group.group_id] = tuple(m.rollout_id for m in group.members)
        for state in cut.rollouts:
            if state.anew:
                census.since[state.rollout_id] = page
        if cut.page is not None:
            census.stored += cut.page.tokens
            census.live += cut.page.tokens
            census.pages += 1
        for group_id, tokens in cut.removed:
            # One that came and went between two cuts was never written.
            members = census.members.pop(group_id, None)
            if members is None:
                continue
            census.live -= tokens
            for rollout_id in members:
                census.since.pop(rollout_id, None)

    def clean(self, connection: sqlite3.Connection) -> None:
        """Clean some of it, if it is time.

        Raises:
            sqlite3.Error: if that fails; everything is then as before.
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

    def _due(self) -> bool:
        census = self._census
        if census.pages > _MANY_PAGES:
            return True
        if census.stored < _SLACK_TOKENS:
            return False
        return census.stored - census.live > census.live + _SLACK_TOKENS

    def _choose(self, connection: sqlite3.Connection) -> tuple[list[int], int]:
        """Pages that are mostly dead, or small where there are many; and what is dead in them."""
        many = self._census.pages > _MANY_PAGES
        alive = np.array(self._alive(), dtype=np.int32)
        chosen: list[int] = []
        kept = dead = 0
        for seq, blob in connection.execute("SELECT seq, slices FROM pages ORDER BY seq"):
            slices = _table(blob)
            total = int(slices[:, 2].sum())
            live = int(slices[np.isin(slices[:, 0], alive), 2].sum())
            if 2 * live <= total or (many and total < _SMALL_TOKENS):
                chosen.append(seq)
                kept += live
                dead += total - live
            if kept > _AT_ONCE_TOKENS:
                break
        return chosen, dead

    def _alive(self) -> list[int]:
        return [rollout for members in self._census.members.values() for rollout in members]

    def _merged(self, connection: sqlite3.Connection, chosen: Iterable[int]) -> TokenPage | None:
        pieces: dict[int, list[Slice]] = {}
        alive = set(self._alive())
        for seq in chosen:
            row = connection.execute(
                f"SELECT {COLUMNS} FROM pages WHERE seq = ?", (seq,)
            ).fetchone()
            page = page_from(row)
            if page is None:
                continue
            for rollout_id, piece in slices_of(page):
                counts = seq >= self._census.since.get(rollout_id, 0)
                if counts and rollout_id in alive:
                    pieces.setdefault(rollout_id, []).append(piece)
        return _page(pieces)


def _table(blob: bytes) -> Int32Array:
    return np.frombuffer(blob, dtype=np.int32).reshape(-1, 5)


def _page(pieces: dict[int, list[Slice]]) -> TokenPage | None:
    rows: list[list[int]] = []
    places: dict[str, int] = {}
    ordered: list[Slice] = []
    for rollout_id, slices in pieces.items():
        end = -1
        for piece in sorted(slices, key=lambda piece: piece.start):
            place = -1 if piece.engine is None else places.setdefault(piece.engine, len(places))
            length = len(piece.token_ids)
            if piece.start == end and rows[-1][3:] == [piece.version, place]:
                rows[-1][2] += length
            else:
                rows.append([rollout_id, piece.start, length, piece.version, place])
            end = piece.start + length
            ordered.append(piece)
    if not rows:
        return None
    return TokenPage(
        slices=np.array(rows, dtype=np.int32),
        engines=tuple(places),
        token_ids=np.concatenate([piece.token_ids for piece in ordered]),
        logprobs=np.concatenate([piece.logprobs for piece in ordered]),
    )
