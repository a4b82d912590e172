"""Computes an engine's rates between two samples, from its counters."""

from __future__ import annotations

from aprilsched.kernel.engines.load import EngineLoad
from aprilsched.observe.sampling.sample_log import EngineLine

TIME_DIGITS = 6


_DIGITS = 4


class Rates:
    """Computes the lines of one engine from its samples, which arrive in order.

    A rate covers the time between the moments for which two figures were valid. If both were valid
    for the same moment, as in a pause, the rate is unknown. An idle engine publishes no new figures
    either, but its last ones remain valid. Counters that decrease indicate a restarted server.
    """

    def __init__(self) -> None:
        self._before: tuple[float, EngineLoad] | None = None

    def line(self, engine: str, t: float, load: EngineLoad) -> EngineLine:
        """Return the line of `load`, which arrived at `t` on the run's clock."""
        at = t - load.age_s if load.running or load.queued else t
        tokens, share = self._since_before(at, load)
        self._before = at, load
        kv = None if load.kv_tokens is None or not load.kv_capacity else load.kv_tokens
        return EngineLine(
            t=round(t, TIME_DIGITS),
            engine=engine,
            running=load.running,
            queued=load.queued,
            max_running=load.max_running,
            kv_tokens=load.kv_tokens,
            kv_share=_rounded(None if kv is None else kv / (load.kv_capacity or 1)),
            tokens_per_s=_rounded(load.tokens_per_s if load.generated is None else tokens),
            step_share=_rounded(share),
            cache_hit_rate=_rounded(load.cache_hit_rate),
            age_s=round(load.age_s, _DIGITS),
            series=dict(load.series) or None,
        )

    def _since_before(self, at: float, load: EngineLoad) -> tuple[float | None, float | None]:
        if self._before is None:
            return None, None
        then, before = self._before
        seconds = at - then
        if seconds <= 0:
            return None, None
        generated = _grown(before.generated, load.generated)
        decoded = _grown(before.decode_seconds, load.decode_seconds)
        prefilled = _grown(before.prefill_seconds, load.prefill_seconds)
        tokens = None if generated is None else generated / seconds
        if decoded is None or prefilled is None:
            return tokens, None
        return tokens, min(1.0, (decoded + prefilled) / seconds)


def _grown(before: float | None, now: float | None) -> float | None:
    if before is None or now is None or now < before:
        return None
    return now - before


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)
