"""The load of a simulated engine, exact at any moment between its events."""

from __future__ import annotations

from aprilsched.engines.load import EngineLoad
from aprilsched.engines.sim.batcher import Batcher

__all__ = ["load_of"]


def load_of(batcher: Batcher, now: float, scale: float) -> EngineLoad:
    """At the modelled time `now`; `scale` is what a modelled second takes on the loop's clock."""
    steps, decoding, prefilling = batcher.in_progress(now)
    tokens = steps * batcher.running
    counters, config = batcher.counters, batcher.config
    return EngineLoad(
        running=batcher.running,
        queued=batcher.waiting,
        max_running=config.max_running,
        kv_tokens=batcher.kv_in_use + tokens,
        kv_capacity=config.kv_tokens,
        generated=counters.decoded + tokens,
        decode_seconds=(counters.decode_seconds + decoding) * scale,
        prefill_seconds=(counters.prefill_seconds + prefilling) * scale,
    )
