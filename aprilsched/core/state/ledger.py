"""Counters, and the ledger of everything that was dropped on purpose.

Every rollout that is neither delivered nor in flight has an entry in the ledger, with its reason,
the cause behind it and its tokens. Counts are kept for ever, entries up to a bound.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Counters", "Entry", "Ledger", "Reason"]


@dataclass(slots=True, kw_only=True)
class Counters:
    """Monotonic counts. Rollouts of evaluations count like any other."""

    launched: int = 0
    delivered: int = 0
    batches: int = 0
    updates: int = 0
    tokens_generated: int = 0
    """Tokens that arrived from engines."""
    tokens_delivered: int = 0
    """Sampled tokens in delivered rollouts (those of environments not counted)."""
    tokens_discarded: int = 0
    """Sampled tokens of rollouts in the ledger, late ones included."""
    tokens_reprefilled: int = 0
    """Context tokens computed again after an interruption."""
    tokens_masked: int = 0
    """Delivered with loss mask 0 because they passed the staleness bound."""
    retries: int = 0


_KEPT_ENTRIES = 10_000


class Reason(StrEnum):
    """Why a rollout was dropped."""

    REJECTED = "rejected"
    """The user's accept function refused its group (dynamic sampling)."""
    FAILED = "failed"
    """Its request failed too often, or was refused by the engine."""
    SIBLING_FAILED = "sibling_failed"
    """Another rollout of its group failed; groups are never torn."""
    BAD_PROMPT = "bad_prompt"
    """A prompt of the source that cannot be used: one entry for it, and nothing was generated."""
    REWARD_FAILED = "reward_failed"
    EPISODE_FAILED = "episode_failed"
    STALE = "stale"
    """Evicted at an update because it would pass the staleness bound. Censors lengths."""
    RESTARTED = "restarted"
    """Of an evaluation, or of an episode that took another way, when the scheduler was resumed."""
    ABANDONED = "abandoned"
    """Of an evaluation whose engines are gone, where only an update leads on."""
    WITHDRAWN = "withdrawn"
    """Given up by the caller: rollouts of an evaluation whose call was cancelled; and tokens of
    turns that an episode gave up and did not keep, whose rollouts go on."""
    OTHER_VERSION = "other_version"
    """Of an evaluation, some tokens of which an engine sampled under another version. The prompt
    was generated again."""
    DAMAGED = "damaged"
    """The store could not read it any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One dropped rollout."""

    rollout_id: int
    group_id: int
    reason: Reason
    cause: str
    tokens: int
    at: float


class Ledger:
    """Counts by reason, tokens by reason, and the latest entries."""

    def __init__(self) -> None:
        self.rollouts: Counter[Reason] = Counter()
        self.tokens: Counter[Reason] = Counter()
        self.entries: deque[Entry] = deque(maxlen=_KEPT_ENTRIES)

    def add(self, entry: Entry) -> None:
        self.rollouts[entry.reason] += 1
        self.tokens[entry.reason] += entry.tokens
        self.entries.append(entry)

    def late_tokens(self, reason: Reason, tokens: int) -> None:
        """Tokens that arrived for a rollout after it was dropped."""
        self.tokens[reason] += tokens

    @property
    def total(self) -> int:
        """Rollouts dropped."""
        return sum(self.rollouts.values())
