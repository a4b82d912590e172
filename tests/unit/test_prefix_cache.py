"""Tests what the simulated engine's prefix cache saves, and when it must save nothing."""

from __future__ import annotations

import numpy as np

from aprilsched.config import Dispatch, SchedulerConfig
from aprilsched.kernel.engines.base import GenerationRequest
from aprilsched.simulation import Simulation
from aprilsched.simulation.engine import SimConfig
from aprilsched.simulation.engine.cache import PrefixCache
from aprilsched.simulation.workload import LongTailWorkload
from aprilsched.types import Prompt, SamplingParams


def request(name: str, context: int, group: int = 7) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        input_ids=np.zeros(context, dtype=np.int32),
        sampling=SamplingParams(max_new_tokens=8),
        affinity=group,
    )


def test_a_request_finds_what_it_had_and_its_group_s_prompt_until_a_flush():
    cache = PrefixCache()
    assert cache.attach(request("1-1", 100)) == 0
    assert cache.attach(request("2-1", 100)) == 99, "all of the prompt but its last token"
    assert cache.attach(request("3-1", 100, group=8)) == 0
    cache.end(request("1-1", 100), 160)
    assert cache.attach(request("1-2", 160)) == 159
    assert cache.attach(request("2-2", 300)) == 100, "a sibling shares the prompt only"
    cache.flush()
    assert cache.attach(request("2-3", 100)) == 0


def test_no_more_is_remembered_than_fits():
    cache = PrefixCache()
    for name in ("1-1", "2-1"):
        cache.attach(request(name, 100, group=0))
        cache.end(request(name, 100, group=0), 100)
    cache.trim(150)
    assert cache.attach(request("1-2", 100, group=0)) == 0, "the least recently used goes first"
    assert cache.attach(request("2-2", 100, group=0)) == 99
    assert cache.attach(request("2-3", 100, group=0)) == 0, "what runs is not in the cache"


def test_turns_find_their_context_while_running_requests_leave_room():
    """Two sessions of 1,000 tokens fit into the pool one after the other, not together."""

    def cached_share(kv_tokens: int) -> float:
        sampling = SamplingParams(max_new_tokens=400, ignore_eos=True)
        prompt = Prompt(input_ids=np.zeros(100, dtype=np.int32), sampling=sampling)
        simulation = Simulation(
            SchedulerConfig(
                batch_groups=2,
                group_size=1,
                over_provision=1.0,
                dispatch=Dispatch(max_sessions=None),
            ),
            [prompt] * 2,
            engine=SimConfig(make_tokens=False, prefix_cache=True, kv_tokens=kv_tokens),
            batches=1,
            pauses=lambda _, index: [1.0] * 3,
            tool_tokens=100,
        )
        simulation.run()
        counters = simulation.engines["sim-0"].batcher.counters
        assert counters.prefilled >= 2 * (100 + 300 + 500 + 700)
        return counters.cached / counters.prefilled

    assert cached_share(10_000) > 0.5
    assert cached_share(1_000) < cached_share(10_000)


def cached(**changes: object) -> tuple[int, float]:
    """The number of tokens found in the cache, and the seconds of prefill."""
    config = SchedulerConfig(batch_groups=4, group_size=8, over_provision=2.0, **changes)  # type: ignore[arg-type]
    workload = LongTailWorkload(median=100, cap=800, prompt_tokens=500)
    engine = SimConfig(make_tokens=False, prefix_cache=True, stream_interval=1 << 30)
    simulation = Simulation(config, workload, engine=engine, batches=6)
    simulation.run()
    counters = simulation.engines["sim-0"].batcher.counters
    return counters.cached, counters.prefill_seconds


def test_a_group_s_prompt_is_computed_once():
    found, _ = cached(straggler="run")
    assert found >= 6 * 4 * 7 * 499


def test_what_is_flushed_at_a_refit_is_computed_again():
    flushed, with_flush = cached(straggler="abort")
    kept, without = cached(straggler="abort", kv_after_refit="apart")
    assert kept > flushed
    assert without < with_flush
