"""The tables of a store, and the sizes that bound them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from aprilsched.types import Float32Array, Int32Array

KEPT_ENTRIES = 10_000
"""Number of ledger entries that are kept; the scheduler keeps the same number."""
KEPT_LENGTHS = 4096
"""Number of groups whose lengths are kept; the scheduler uses the same number of responses."""
FREE_BYTES = 1 << 24
"""Free space that a file always keeps for the next tokens."""
FREE_PAGES = 1024
"""Number of pages that one save gives back to the disk at most (4 MB)."""
TABLES = (
    "run",
    "schedule",
    "groups",
    "group_states",
    "rollouts",
    "tokens",
    "companions",
    "batches",
    "dropped",
    "lengths",
    "remembered",
)


class Slice(NamedTuple):
    """Where consecutive tokens of a row belong; they are of one version and engine."""

    rollout_id: int
    start: int
    length: int
    version: int
    engine: str | None


Piece: TypeAlias = tuple[Slice, Int32Array, Float32Array]
"""A slice with its token ids and logprobs."""
