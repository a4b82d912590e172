"""Tests reading the load of SGLang servers: several ranks, endless answers, Prometheus pages."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from aprilsched.errors import EngineError, EngineProtocolError, EngineRejected
from aprilsched.kernel.engines.control import decode
from aprilsched.kernel.engines.http import HttpLimits
from aprilsched.kernel.engines.load import EngineLoad
from aprilsched.kernel.engines.server import read_series
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.kernel.engines.sglang.loads import SERIES, Loads, load_of
from tests.support.hostile import CHUNKED, Hostile, chunked, hostile
from tests.support.table import each_row

RANK: dict[str, Any] = {
    "timestamp": 1795298560.5,
    "num_running_reqs": 3,
    "num_waiting_reqs": 1,
    "num_used_tokens": 500,
    "max_total_num_tokens": 1000,
    "max_running_requests": 8,
    "gen_throughput": 100.0,
    "cache_hit_rate": 0.5,
    "total_prefill_busy_us": 2_000_000,
    "decode_moments": [10.0, 30.0, 4_000_000.0, 90.0, 12_000_000.0, 45.0],
    "a field of a later version": {"x": [1]},
}
STAMP = "2026-11-21T22:02:40.752365+00:00"
PAGE = rb"""# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="/m}x",moe_ep_rank="0",tp_rank="0"} 3.0
sglang:num_running_reqs{engine_type="unified",model_name="/m}x",moe_ep_rank="0",tp_rank="1"} 4.0
sglang:num_running_reqs_offline 9.0
sglang:token_usage{tp_rank="0"} 0.25
sglang:token_usage{tp_rank="1"} 0.75 1795298560723
sglang:gen_throughput{tp_rank="0"} +Inf
sglang:cache_hit_rate{tp_rank="0"} what
python:num_queue_reqs 3.0
"""


def loads(*ranks: dict[str, Any], **changes: Any) -> Loads:
    content = {"timestamp": STAMP, "version": "0.5.21", "loads": list(ranks), **changes}
    return decode("e", "/v1/loads", json.dumps(content).encode(), Loads, program="SGLang")


def test_ranks_are_one_engine():
    idle = {**RANK, "num_running_reqs": 0, "decode_moments": None, "timestamp": 1795298559.752365}
    load = load_of(loads(RANK, idle), enabled=True)
    assert load.age_s == pytest.approx(1.0, abs=1e-5)
    assert replace(load, age_s=0.0) == EngineLoad(
        running=3,
        queued=2,
        max_running=16,
        kv_tokens=1000,
        kv_capacity=2000,
        generated=45,
        decode_seconds=2.0,
        prefill_seconds=2.0,
        tokens_per_s=200.0,
        cache_hit_rate=0.5,
    )


def test_what_a_server_does_not_measure_is_not_told():
    """Without --enable-metrics both figures are 0 even on a busy server."""
    load = load_of(loads({**RANK, "gen_throughput": 0.0, "cache_hit_rate": 0.0}), enabled=False)
    assert load.tokens_per_s is None
    assert load.cache_hit_rate is None
    assert load.generated == 45


def test_an_older_version_counts_a_token_for_each_request_of_a_step():
    load = load_of(loads({**RANK, "decode_moments": RANK["decode_moments"][:5]}), enabled=False)
    assert load.generated == 30


def test_a_server_without_counters_tells_none():
    rank = {name: RANK[name] for name in ("num_running_reqs", "num_waiting_reqs")}
    load = load_of(loads(rank, timestamp=None), enabled=False)
    assert load == EngineLoad(running=3, queued=1)


@each_row(
    "change",
    [
        {"loads": []},
        {"loads": [{**RANK, "num_running_reqs": -1}]},
        {"loads": [{**RANK, "num_running_reqs": 10**30}]},
        {"loads": [{**RANK, "num_running_reqs": "3"}]},
        {"loads": [{**RANK, "decode_moments": [1.0]}]},
        {"timestamp": "yesterday"},
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any]):
    with pytest.raises(EngineProtocolError, match="does not answer /v1/loads like SGLang"):
        loads(RANK, **change)


def test_gauges_are_found_in_a_page():
    found = read_series(PAGE, SERIES, program="sglang")
    assert found == {"num_running_reqs": 7.0, "token_usage": 0.5}


async def asked(server: Hostile, **limits: Any) -> EngineLoad:
    engine = SGLangEngine(server.url, limits=HttpLimits(control_timeout=5.0, **limits))
    await engine.open()
    try:
        return await engine.load(metrics=True)
    finally:
        await engine.close()


async def test_a_server_without_a_load_is_refused():
    async with hostile() as server:
        server.answers["/v1/loads"] = lambda: [b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"]
        with pytest.raises(EngineRejected, match="/v1/loads answered 404"):
            await asked(server)


async def test_an_endless_load_is_cut_off_early():
    """The loop that streams responses also reads loads, so a load may have only a few MiB."""
    async with hostile() as server:
        server.answers["/v1/loads"] = lambda: [CHUNKED, *([chunked(b" " * 65536)] * 1000)]
        with pytest.raises(EngineError, match="no such answer is that long"):
            await asked(server, max_answer_bytes=2**30)
        assert server.written < 16 * 2**20
