"""Checks the data-parallel ranks of a server, a real one or that of the embedded engine."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from aprilsched import SamplingParams
from aprilsched.kernel.engines.base import GenerationRequest
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.kernel.engines.sglang.dp_ranks import TOKENS_PER_LEAD
from aprilsched.testing.contract import whole
from tests.sglang.loads_contract import check_loads
from tests.support.sim_http import Raw, asked

RANKS = 2


async def check_ranks(url: str) -> None:
    """Check a server of two ranks by its own answers, and by the requests of an engine."""
    async with Raw(url) as raw:
        await _check_server(raw)
    engine = SGLangEngine(url, stream_interval=16)
    await engine.open()
    try:
        await _check_groups(engine)
    finally:
        await engine.close()


async def _check_server(raw: Raw) -> None:
    info = (await raw.get("/server_info"))[1]
    assert (info["dp_size"], info["attn_dp_size"], info["tp_size"]) == (1, RANKS, RANKS)
    states = info["internal_states"]
    per_rank = states[0]["effective_max_running_requests_per_dp"]
    loads = (await raw.get("/v1/loads?include=core"))[1]
    check_loads(loads, ranks=RANKS)
    for rank, load in enumerate(loads["loads"]):
        assert load["dp_rank"] == rank
        assert load["max_running_requests"] == per_rank
        assert load["max_total_num_tokens"] == info["max_total_num_tokens"]
    unnamed = [(await raw.done("/generate", asked(3)))["meta_info"]["dp_rank"] for _ in range(4)]
    assert unnamed == [unnamed[0], 1 - unnamed[0]] * 2, "the server's own rule is the round robin"
    for field in ("routed_dp_rank", "data_parallel_rank"):
        for rank in (1, 1, 0):
            named: dict[str, Any] = {field: rank}
            answer = await raw.done("/generate", asked(3, **named))
            assert answer["meta_info"]["dp_rank"] == rank
    refusal = await raw.refused("/generate", asked(3, routed_dp_rank=RANKS))
    assert f"routed_dp_rank={RANKS} out of range [0, {RANKS})" in refusal


async def _check_groups(engine: SGLangEngine) -> None:
    """Groups of two share a rank if their prompt is long; a body has requests of one rank."""
    assert engine.facts.dp_ranks == RANKS
    sampling = SamplingParams(
        max_new_tokens=24, temperature=0.0, ignore_eos=True, keep=("dp_rank",)
    )
    requests = [
        GenerationRequest(
            request_id=f"{number:032d}",
            input_ids=np.resize(np.arange(3 + number // 2, 40, dtype=np.int32), tokens),
            sampling=sampling,
            affinity=1 + number // 2,
        )
        for number, tokens in enumerate([2 * TOKENS_PER_LEAD] * 4 + [40] * 4)
    ]
    streams = await asyncio.gather(*(whole(engine, each) for each in requests))
    ranks = [stream.last.answer.values["dp_rank"] for stream in streams if stream.last.answer]
    assert ranks == [0, 0, 1, 1, 0, 1, 0, 1]
    for one, other in zip(streams[::2], streams[1::2], strict=True):
        assert one.ids == other.ids
    load = await engine.load()
    assert (load.kv_capacity, load.max_running) == (
        engine.capabilities.kv_tokens,
        engine.capabilities.max_running_requests,
    )
