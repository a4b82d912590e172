"""An engine's report of its own load, for displays and logs. Two decisions depend on it: to move
requests from a full KV pool (``dispatch.migrate``), and to start turns of sessions
(``dispatch.max_sessions``).

A figure that an engine does not report is None; no figure is estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """The load of one engine at one moment, over all its ranks.

    Attributes:
        running: number of requests in the decoding batch.
        queued: number of requests that wait for a place in the batch.
        max_running: largest number of requests that decode together.
        kv_tokens: number of tokens in the KV pool.
        kv_capacity: number of tokens that fit in the KV pool.
        preemptions: number of requests that were put back into the queue because the KV pool was
            full, since the engine was started.
        generated: number of tokens that decoding steps made since the engine was started.
        decode_seconds: seconds of such steps since the engine was started; the mean over the ranks.
        prefill_seconds: seconds of steps that read prompts, in the same way.
        tokens_per_s: decoding rate as the engine itself measures it.
        cache_hit_rate: hit rate of the prefix cache, from 0 to 1.
        age_s: age of these figures when the engine reported them.
        series: gauges of the engine's metrics endpoint, where they were asked for.
    """

    running: int
    queued: int
    max_running: int | None = None
    kv_tokens: int | None = None
    kv_capacity: int | None = None
    preemptions: int | None = None
    generated: int | None = None
    decode_seconds: float | None = None
    prefill_seconds: float | None = None
    tokens_per_s: float | None = None
    cache_hit_rate: float | None = None
    age_s: float = 0.0
    series: Mapping[str, float] = field(default_factory=dict[str, float])


@runtime_checkable
class ReportsLoad(Protocol):
    """An engine that reports its load."""

    async def load(self, *, metrics: bool = False) -> EngineLoad:
        """The load now, in bounded time.

        With `metrics` it includes the gauges of the metrics endpoint, if the engine has one.

        Raises:
            EngineError: if the engine does not report it.
        """
        ...
