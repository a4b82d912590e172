"""Checks the fields of GET /v1/loads, on a real server and on the embedded engine's server."""

from __future__ import annotations

from typing import Any

ANSWER: dict[str, Any] = {
    "timestamp": str,
    "version": str,
    "accelerator": (str, type(None)),
    "num_accelerators": int,
    "loads": list,
}
CORE: dict[str, Any] = {
    "timestamp": float,
    "dp_rank": int,
    "num_running_reqs": int,
    "num_waiting_reqs": int,
    "num_waiting_uncached_tokens": int,
    "num_used_tokens": int,
    "num_total_tokens": int,
    "num_active_tokens": int,
    "num_prealloc_ready_tokens": int,
    "max_total_num_tokens": int,
    "max_running_requests": int,
    "token_usage": float,
    "gen_throughput": float,
    "cache_hit_rate": float,
    "utilization": float,
    "total_prefill_uncached_tokens": int,
    "total_prefill_busy_us": int,
    "decode_moments": (list, type(None)),
}
"""Fields and types of one rank, with include=core."""
MOMENTS = 6


def check_loads(answer: Any, *, ranks: int = 1) -> None:
    """Check that the answer has exactly these fields and types, and that its sums agree."""
    assert {name: type(value) for name, value in answer.items()}.keys() == ANSWER.keys()
    for name, kind in ANSWER.items():
        assert isinstance(answer[name], kind), name
    assert len(answer["loads"]) == ranks
    for rank in answer["loads"]:
        _check_rank(rank)


def _check_rank(rank: Any) -> None:
    assert rank.keys() == CORE.keys()
    for name, kind in CORE.items():
        assert isinstance(rank[name], kind), name
    moments = rank["decode_moments"]
    if moments is not None:
        assert len(moments) == MOMENTS
        steps, requests, microseconds, squares, weighted, tokens = moments
        assert tokens == requests >= steps > 0
        assert squares >= requests
        assert weighted >= microseconds > 0
