"""The tokens that arrive between two cuts, laid out as a page while they are hot.

Keeping the arrays as they come and joining them at the cut costs several times as much: by then
each of a thousand small arrays is a cache miss.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection

import numpy as np

from aprilsched.core.state.saved import TokenPage
from aprilsched.types import Float32Array, Int32Array

__all__ = ["PageBuilder"]

_ROOM = 1 << 12
_NO_ENGINE = -1


class PageBuilder:
    """A page in the making."""

    def __init__(self, room: int = _ROOM) -> None:
        self._ids: Int32Array = np.empty(room, dtype=np.int32)
        self._logprobs: Float32Array = np.empty(room, dtype=np.float32)
        self._size = 0
        self._slices = array("i")
        self._places: dict[str | None, int] = {None: _NO_ENGINE}

    def __len__(self) -> int:
        """Tokens in it."""
        return self._size

    def add(
        self,
        rollout_id: int,
        start: int,
        ids: Int32Array,
        logprobs: Float32Array,
        version: int,
        engine: str | None,
    ) -> None:
        """Tokens of one rollout from one engine under one version, from `start` on."""
        begin, count = self._size, len(ids)
        end = begin + count
        if end > len(self._ids):
            self._grow(end)
        self._ids[begin:end] = ids
        self._logprobs[begin:end] = logprobs
        self._size = end
        place = self._places.get(engine)
        if place is None:
            place = self._places[engine] = len(self._places) - 1
        self._slices.extend((rollout_id, start, count, version, place))

    def forget(self, rollouts: Collection[int]) -> None:
        """Take the tokens of these rollouts out again."""
        if not rollouts or not self._size:
            return
        slices = self._table()
        out = np.isin(slices[:, 0], list(rollouts))
        if not out.any():
            return
        kept = np.flatnonzero(~np.repeat(out, slices[:, 2]))
        for column in (self._ids, self._logprobs):
            column[: len(kept)] = column[kept]
        self._size = len(kept)
        self._slices = array("i", slices[~out].tobytes())

    def page(self) -> TokenPage | None:
        """What is there; None if that is nothing. Nothing is added after that."""
        if not self._size:
            return None
        return TokenPage(
            slices=self._table(),
            engines=tuple(engine for engine in self._places if engine is not None),
            token_ids=self._ids[: self._size],
            logprobs=self._logprobs[: self._size],
        )

    def _table(self) -> Int32Array:
        return np.array(self._slices, dtype=np.int32).reshape(-1, 5)

    def _grow(self, needed: int) -> None:
        room = max(needed, 2 * len(self._ids))
        ids, logprobs = self._ids, self._logprobs
        self._ids = np.empty(room, dtype=np.int32)
        self._logprobs = np.empty(room, dtype=np.float32)
        self._ids[: self._size] = ids[: self._size]
        self._logprobs[: self._size] = logprobs[: self._size]
