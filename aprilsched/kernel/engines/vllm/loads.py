"""The load of a vLLM server, read from its metrics page."""

from __future__ import annotations

from collections.abc import Mapping

from aprilsched.errors import EngineError, EngineRejected
from aprilsched.kernel.engines.control import Questions
from aprilsched.kernel.engines.load import EngineLoad
from aprilsched.kernel.engines.server import Over, read_series
from aprilsched.kernel.engines.vllm.server_info import ServerFacts, metrics_page

SERIES: Mapping[str, Over] = {
    "num_requests_running": "sum",
    "num_requests_waiting": "sum",
    "kv_cache_usage_perc": "mean",
}
"""The gauges of vLLM that are sampled, and how the values of several ranks become one."""
_COUNTERS: Mapping[str, Over] = {
    "num_preemptions_total": "sum",
    "generation_tokens_total": "sum",
    "prefix_cache_queries_total": "sum",
    "prefix_cache_hits_total": "sum",
}


async def read_load(asked: Questions, facts: ServerFacts, *, metrics: bool) -> EngineLoad:
    """Ask a server for its load, which it reports only on its metrics page.

    vLLM counts no seconds of steps, so ``decode_seconds`` and ``prefill_seconds`` are None.

    Raises:
        EngineError: if the server does not report its load.
    """
    try:
        page = await metrics_page(asked)
    except EngineRejected as error:
        raise EngineError(asked.engine, f"does not report its load ({error}).") from error
    found = read_series(page, {**SERIES, **_COUNTERS}, program="vllm")
    if "num_requests_running" not in found or "num_requests_waiting" not in found:
        raise EngineError(
            asked.engine, "does not report its load; start it without --disable-log-stats."
        )
    capacity, usage = facts.capabilities.kv_tokens, found.get("kv_cache_usage_perc")
    preemptions = found.get("num_preemptions_total")
    generated = found.get("generation_tokens_total")
    looked_up = found.get("prefix_cache_queries_total")
    return EngineLoad(
        running=int(found["num_requests_running"]),
        queued=int(found["num_requests_waiting"]),
        max_running=facts.capabilities.max_running_requests,
        kv_tokens=None if capacity is None or usage is None else round(usage * capacity),
        kv_capacity=capacity,
        preemptions=None if preemptions is None else int(preemptions),
        generated=None if generated is None else int(generated),
        cache_hit_rate=found.get("prefix_cache_hits_total", 0.0) / looked_up if looked_up else None,
        series={name: found[name] for name in SERIES if name in found} if metrics else {},
    )
