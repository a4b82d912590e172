"""The load of one server, from GET /v1/loads and from /metrics.

SGLang's figures have pitfalls (seen on 0.5.21): it publishes them every 15 decode steps and never
in a pause, so each answer carries its age; throughput and hit rate stay 0 unless the server runs
with --enable-metrics. Counters of decode steps need no such flag.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec

from aprilsched.kernel.engines.control import Questions
from aprilsched.kernel.engines.load import EngineLoad
from aprilsched.kernel.engines.server import Over, read_series

_T = TypeVar("_T", int, float)

_ANSWER_BYTES = 2**20
_SERIES_BYTES = 2**22
_MICROSECONDS = 1e-6
_RETRACTIONS = "num_retracted_requests_total"
_REQUESTS, _STEP_MICROSECONDS, _TOKENS = 1, 2, 5
"""Indices in decode_moments, which holds sums over decode steps of 1, b, us, b * b, b * us and
tokens. SGLang leaves out a step that follows no other decode step, so all sums are a little low."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e18)]


class RankLoad(msgspec.Struct, frozen=True):
    """One data-parallel rank in /v1/loads."""

    num_running_reqs: Count
    num_waiting_reqs: Count
    timestamp: Amount | None = None
    num_used_tokens: Count | None = None
    max_total_num_tokens: Count | None = None
    max_running_requests: Count | None = None
    gen_throughput: Amount | None = None
    cache_hit_rate: Amount | None = None
    total_prefill_busy_us: Count | None = None
    decode_moments: Annotated[list[Amount], msgspec.Meta(min_length=3, max_length=64)] | None = None


class Loads(msgspec.Struct, frozen=True):
    """GET /v1/loads."""

    loads: Annotated[list[RankLoad], msgspec.Meta(min_length=1, max_length=4096)]
    timestamp: datetime | None = None


async def read_load(asked: Questions, *, enabled: bool, metrics: bool) -> EngineLoad:
    """Ask a server for its load.

    Args:
        asked: asks it.
        enabled: whether the server runs with --enable-metrics.
        metrics: whether to ask for the gauges of its metrics endpoint too, and for the number of
            retractions, which it reports nowhere else.

    Raises:
        EngineError: if the server does not report its load.
    """
    load = load_of(await asked.get("v1/loads", Loads, at_most=_ANSWER_BYTES), enabled=enabled)
    if not (metrics and enabled):
        return load
    page = await asked.ask("metrics", at_most=_SERIES_BYTES)
    found = read_series(page.body, {**SERIES, _RETRACTIONS: "sum"}, program="sglang")
    # The series is missing until the first retraction.
    retractions = int(found.pop(_RETRACTIONS, 0))
    return replace(load, series=found, preemptions=retractions)


def load_of(answer: Loads, *, enabled: bool) -> EngineLoad:
    """Sum up the ranks of an answer as one engine."""
    ranks = answer.loads
    # A rank that has not decoded yet leaves out its moments.
    moments = [rank.decode_moments for rank in ranks if rank.decode_moments is not None]
    prefill = _sum(rank.total_prefill_busy_us for rank in ranks)
    counts = prefill is not None
    decode_us = sum(m[_STEP_MICROSECONDS] for m in moments)
    return EngineLoad(
        running=sum(rank.num_running_reqs for rank in ranks),
        queued=sum(rank.num_waiting_reqs for rank in ranks),
        max_running=_sum(rank.max_running_requests for rank in ranks),
        kv_tokens=_sum(rank.num_used_tokens for rank in ranks),
        kv_capacity=_sum(rank.max_total_num_tokens for rank in ranks),
        generated=int(sum(map(_tokens, moments))) if counts else None,
        decode_seconds=decode_us * _MICROSECONDS / len(ranks) if counts else None,
        prefill_seconds=prefill * _MICROSECONDS / len(ranks) if prefill is not None else None,
        tokens_per_s=_sum(rank.gen_throughput for rank in ranks) if enabled else None,
        cache_hit_rate=_mean([rank.cache_hit_rate for rank in ranks]) if enabled else None,
        age_s=_age(answer),
    )


def _tokens(moments: Sequence[float]) -> float:
    # Without speculative decoding each request of a step yields one token.
    return moments[_TOKENS] if len(moments) > _TOKENS else moments[_REQUESTS]


def _sum(values: Iterable[_T | None]) -> _T | None:
    """The sum, or None unless every rank reports the value."""
    total: Any = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _mean(values: Sequence[float | None]) -> float | None:
    total = _sum(values)
    return None if total is None else total / len(values)


def _age(answer: Loads) -> float:
    """The age of the oldest rank's figures; both times are of the server's own clock."""
    times = [rank.timestamp for rank in answer.loads if rank.timestamp]
    if answer.timestamp is None or not times:
        return 0.0
    try:
        return max(0.0, answer.timestamp.timestamp() - min(times))
    except (ValueError, OverflowError):  # A date in the year 1.
        return 0.0


SERIES: Mapping[str, Over] = {
    "num_running_reqs": "sum",
    "num_queue_reqs": "sum",
    "num_used_tokens": "sum",
    "token_usage": "mean",
    "gen_throughput": "sum",
    "cache_hit_rate": "mean",
    "utilization": "mean",
}
"""The gauges of SGLang that are sampled, and how the values of several ranks become one."""
