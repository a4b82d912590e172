"""What an engine says of its own work at one moment, for people and pictures; nothing is decided
by it.

Every figure that an engine does not tell is None: none of them is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

__all__ = ["EngineLoad", "ReportsLoad"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """One answer of one engine, over all its ranks.

    Attributes:
        running: requests in the decoding batch.
        queued: requests that wait for a place in it.
        max_running: most requests that decode together.
        kv_tokens: tokens with a place in the KV pool.
        kv_capacity: tokens that the pool has places for.
        generated: tokens of decoding steps since the engine was started.
        decode_seconds, prefill_seconds: that it has computed such steps since then; of several
            ranks the mean.
        tokens_per_s: as the engine itself measures it.
        cache_hit_rate: of the prefix cache, from 0 to 1.
        age_s: how old these figures were when they were told.
        series: gauges of its metrics endpoint, where it was asked for those too.
    """

    running: int
    queued: int
    max_running: int | None = None
    kv_tokens: int | None = None
    kv_capacity: int | None = None
    generated: int | None = None
    decode_seconds: float | None = None
    prefill_seconds: float | None = None
    tokens_per_s: float | None = None
    cache_hit_rate: float | None = None
    age_s: float = 0.0
    series: Mapping[str, float] = field(default_factory=dict[str, float])


@runtime_checkable
class ReportsLoad(Protocol):
    """An engine that tells its load."""

    async def load(self, *, metrics: bool = False) -> EngineLoad:
        """Its load now, in bounded time; `metrics`: with those of its metrics endpoint, if it has
        one.

        Raises:
            EngineError: if it does not tell.
        """
        ...
