"""What is counted while a scheduler runs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counters"]


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
