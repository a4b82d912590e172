"""Tests cached KV and its keys on a real server."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from aprilsched import (
    Batch,
    DiskPublisher,
    Prompt,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SGLangFleet,
)
from aprilsched.kernel.core.policies.straggler import StragglerRule
from aprilsched.kernel.engines.base import GenerationRequest
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.kernel.store.sqlite import SqliteStore
from aprilsched.testing.contract import greedy, whole
from tests.sglang.recorded import TOLERANCE, scores
from tests.sglang.server import CpuServer

PREFIX = np.arange(100, 228, dtype=np.int32)


def keyed(key: str | None) -> GenerationRequest:
    """A request that continues the long prefix."""
    return msgspec.structs.replace(greedy(20, prompt=PREFIX), cache_key=key)


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


def scheduler(url: str, straggler: StragglerRule, store: Path | None) -> RolloutScheduler:
    """One whose groups share eight prompts."""
    prompts = [
        Prompt(
            input_ids=np.arange(40 * (index % 8), 40 * (index % 8) + 64, dtype=np.int32) + 10,
            key=index,
            sampling=SamplingParams(max_new_tokens=24, temperature=1.0, ignore_eos=True),
        )
        for index in range(64)
    ]
    return RolloutScheduler(
        SGLangFleet([url]),
        prompts,
        config=SchedulerConfig(
            batch_groups=4, group_size=2, over_provision=2.0, straggler=straggler
        ),
        store=None if store is None else SqliteStore(store),
    )


@pytest.mark.parametrize(
    "resumed",
    [
        pytest.param(False, marks=pytest.mark.long, id="a new run"),
        pytest.param(True, id="a resumed run"),
    ],
)
async def test_no_request_meets_keys_that_a_run_before_has_left(
    clean_server: CpuServer, models: tuple[Path, Path], tmp_path: Path, resumed: bool
) -> None:
    """A run with "in_place" leaves prefixes of all its versions in the cache."""
    store = tmp_path / "run.sqlite" if resumed else None
    async with scheduler(clean_server.url, "in_place", store) as rollouts:
        batches: list[Batch] = []
        for version in (1, 2, 3):
            batches.append(await rollouts.next_batch())
            await rollouts.update_weights(DiskPublisher(models[version % 2]))
        newest = max(
            *(r.rollout_id for r in batches[-1].rollouts), *rollouts.state.in_flight.rollouts
        )
    async with scheduler(clean_server.url, "retract", store) as rollouts:
        batches = [await rollouts.next_batch() for _ in range(4)]
    # A resumed run delivers some that the run before it has sampled.
    sampled = [
        r for batch in batches for r in batch.rollouts if not resumed or r.rollout_id > newest
    ]
    assert len(sampled) >= 16
    assert all(r.versions_exact and not r.stale_keys for r in sampled)
    assert {int(v) for r in sampled for v in r.versions} == {3}
    (own,) = scores([models[1]], sampled, tmp_path)
    np.testing.assert_allclose(
        np.concatenate([r.logprobs for r in sampled]), np.concatenate(own), atol=TOLERANCE
    )
