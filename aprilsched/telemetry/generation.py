"""How fast engines generate, between two deliveries."""

from __future__ import annotations

from collections.abc import Sequence

from aprilsched.core.messages.facts import BatchDelivered, Fact, TokensReceived
from aprilsched.telemetry.base import TokenChunks

__all__ = ["Generation"]


class Generation:
    """Listens to a run; tokens count when they arrive."""

    def __init__(self) -> None:
        self._tokens = 0
        self._deliveries: list[tuple[float, int]] = []

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            if isinstance(fact, TokensReceived):
                self._tokens += fact.tokens
            elif isinstance(fact, BatchDelivered) and not fact.again:
                self._deliveries.append((now, self._tokens))

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        self._tokens += sum([fact.tokens for fact, _ in chunks])

    def tokens_per_s(self, burn_in: int) -> float | None:
        """Over the batches after the first `burn_in`; None if there are none."""
        if len(self._deliveries) <= max(1, burn_in):
            return None
        begin, before = self._deliveries[max(0, burn_in - 1)]
        end, after = self._deliveries[-1]
        return (after - before) / (end - begin) if end > begin else None
