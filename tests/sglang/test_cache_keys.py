"""Tests cached KV and its keys on a real server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from aprilsched.engines.base import GenerationRequest
from aprilsched.engines.sglang import SGLangEngine
from aprilsched.testing.streams import greedy, whole

PREFIX = np.arange(100, 228, dtype=np.int32)


def keyed(key: str | None) -> GenerationRequest:
    """A request that continues the long prefix."""
    return replace(greedy(20, prompt=PREFIX), cache_key=key)


async def test_equal_keys_share_a_prefix_and_others_do_not(engine: SGLangEngine) -> None:
    found = [await whole(engine, keyed(key)) for key in ("one", "one", "two", None)]
    assert [stream.last.cached_tokens for stream in found] == [0, len(PREFIX) - 1, 0, 0]
    assert all(stream.ids == found[0].ids for stream in found)


async def test_a_key_for_each_version_keeps_old_kv_out(
    engine: SGLangEngine, models: tuple[Path, Path]
) -> None:
    """Without a flush, a request with the old key still uses the KV of the old weights, so its
    logprobs differ."""
    await whole(engine, keyed("version-0"))
    await engine.pause("retract")
    await engine.update_from_disk(models[1], 1)
    await engine.resume()
    stale = await whole(engine, keyed("version-0"))
    fresh = await whole(engine, keyed("version-1"))
    await engine.pause("retract")
    await engine.flush()
    await engine.resume()
    true = await whole(engine, keyed("version-0"))
    assert [stream.last.cached_tokens for stream in (stale, fresh, true)] == [127, 0, 0]
    assert fresh.ids == true.ids
    np.testing.assert_allclose(fresh.logprobs, true.logprobs, atol=1e-3)
    assert np.abs(stale.logprobs - true.logprobs).max() > 0.1
