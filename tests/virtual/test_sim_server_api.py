"""Tests the exact answers of a served embedded engine: SGLang's forms, defaults, edge cases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import SamplingParams
from aprilsched.kernel.engines.base import GenerationRequest
from aprilsched.testing import SimServer
from aprilsched.testing.contract import until
from tests.sglang.loads_contract import check_loads
from tests.sglang.ranks_contract import RANKS, check_ranks
from tests.support.sim_http import CONFIG, Raw, asked, served, two_weights
from tests.support.table import each_row


@pytest.fixture
async def server() -> AsyncIterator[SimServer]:
    async with served() as started:
        yield started


@pytest.fixture
async def raw(server: SimServer) -> AsyncIterator[Raw]:
    async with Raw(server.url) as opened:
        yield opened


async def has_started(server: SimServer, requests: int = 1) -> None:
    """Wait until `count` requests decode."""
    await until(lambda: server.engine.batcher.running == requests)


@each_row(
    ("body", "message"),
    [
        ({"input_ids": []}, "input_ids cannot be empty."),
        ({"text": "hello", "input_ids": None}, "no tokenizer"),
        ({"input_ids": None}, "Either text, input_ids"),
        ({"input_ids": [512]}, "must be in [0, 511], got 512"),
        ({"input_ids": [-1]}, "must be in [0, 511], got -1"),
        ({"sampling_params": {"max_new_tokens": 10**7}}, "KV cache"),
        ({"sampling_params": {"temperature": -1}}, "temperature is -1"),
        ({"sampling_params": {"logit_bias": {"512": 0.0}}}, "keys in [0, 511], got 512"),
        ({"sampling_params": {"n": 2}}, "n is 2"),
    ],
)
async def test_what_cannot_be_is_refused_in_both_forms(
    raw: Raw, body: dict[str, Any], message: str
):
    status, answer = await raw.post("/generate", {**asked(5), **body})
    assert status == 400
    assert message in answer["error"]["message"]
    (event,) = await raw.events({**asked(5), **body})
    assert event["error"]["code"] == 400
    assert message in event["error"]["message"]


async def test_an_unknown_sampling_parameter_fails_as_in_sglang(raw: Raw):
    odd = {"sampling_params": {"nonsense": 1}, "input_ids": [1]}
    assert (await raw.post("/generate", odd))[0] == 500


async def test_a_duplicate_rid_in_a_stream_ends_the_first_one(server: SimServer, raw: Raw):
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(raw.post("/generate", asked(5000, rid="a" * 32)))
        await has_started(server)
        (event,) = await raw.events(asked(5, rid="a" * 32))
        assert event["error"]["code"] == 400
    assert first.result()[1]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_its_health_generates_a_token_so_it_hangs_in_a_pause(raw: Raw):
    await raw.post("/pause_generation", {})
    health = asyncio.create_task(raw.get("/health"))
    await asyncio.sleep(0.3)
    assert not health.done()
    await raw.post("/continue_generation", {})
    assert (await health)[0] == 200


async def test_aborts_match_by_prefix_of_a_known_rid(server: SimServer, raw: Raw):
    async with asyncio.TaskGroup() as tasks:
        calls = [
            tasks.create_task(raw.post("/generate", asked(5000, rid=rid)))
            for rid in ("req-1", "req-10", "req-2")
        ]
        await has_started(server, 3)
        await raw.post("/abort_request", {"rid": "req"})
        await asyncio.sleep(0.1)
        assert not any(call.done() for call in calls), "no request has this rid"
        await raw.post("/abort_request", {"rid": "req-1"})
        await asyncio.wait(calls[:2])
        assert not calls[2].done()
        await raw.post("/abort_request", {"abort_all": True})


async def test_an_abort_after_a_retract_keeps_multiples_of_50_tokens(server: SimServer, raw: Raw):
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(raw.post("/generate", asked(5000, rid="a" * 32)))
        await until(lambda: server.engine.counters.generated > 100)
        await raw.post("/pause_generation", {"mode": "retract"})
        await raw.post("/abort_request", {"rid": "a" * 32})
    meta = call.result()[1]["meta_info"]
    assert meta["completion_tokens"] > 0
    assert meta["completion_tokens"] % 50 == 0
    assert meta["weight_versions"][-1]["end"] == meta["completion_tokens"]
    assert meta["num_retractions"] == 1


async def test_loads_look_like_sglangs_and_freeze_in_a_pause(server: SimServer, raw: Raw):
    check_loads((await raw.get("/v1/loads?include=core"))[1])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(raw.post("/generate", asked(5000)))
        await until(lambda: server.engine.counters.steps > 50)
        before = (await raw.get("/v1/loads"))[1]["loads"][0]["num_running_reqs"]
        await raw.post("/pause_generation", {"mode": "retract"})
        first, second = [(await raw.get("/v1/loads?include=core"))[1] for _ in range(2)]
        check_loads(first)
        assert first["loads"] == second["loads"]
        assert first["loads"][0]["num_running_reqs"] == before == 1
        assert first["timestamp"] < second["timestamp"]
        assert first["loads"][0]["decode_moments"][0] > 50
        await raw.post("/continue_generation", {})
        await raw.post("/abort_request", {"abort_all": True})


async def test_the_ranks_of_a_server_look_like_sglangs():
    async with served(config=replace(CONFIG, dp_ranks=RANKS, rank_rule="round_robin")) as server:
        await check_ranks(server.url)


async def test_a_new_version_aborts_requests_by_default(server: SimServer, raw: Raw):
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(raw.post("/generate", asked(1500)))
        await has_started(server)
        careful = {"new_version": "7", "abort_all_requests": False}
        assert (await raw.post("/update_weight_version", careful))[1]["success"]
    meta = call.result()[1]["meta_info"]
    assert meta["finish_reason"]["type"] == "length"
    assert [span["version"] for span in meta["weight_versions"]] == ["default", "7"]
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(raw.post("/generate", asked(5000)))
        await has_started(server)
        await raw.post("/update_weight_version", {"new_version": "8"})
    assert call.result()[1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await raw.get("/model_info"))[1]["weight_version"] == "8"


async def test_a_new_version_does_not_wait_for_a_departed_client(server: SimServer, raw: Raw):
    """Such a request is prefilled once more after a pause before it ends, and no call blocks on
    it."""
    request = GenerationRequest(
        request_id="left",
        input_ids=np.array([1, 2, 3], dtype=np.int32),
        sampling=SamplingParams(max_new_tokens=5000, ignore_eos=True),
    )
    async with aclosing(server.engine.generate(request)) as chunks:
        await anext(chunks)
        careful = {"new_version": "7", "abort_all_requests": False}
        assert (await raw.post("/update_weight_version", careful))[0] == 200
    assert (await raw.get("/model_info"))[1]["weight_version"] == "7"


async def test_an_update_outside_of_a_pause_waits_for_what_runs(
    server: SimServer, raw: Raw, tmp_path: Path
):
    weights = two_weights(tmp_path)[1]
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(raw.post("/generate", asked(600)))
        await has_started(server)
        body = {"model_path": str(weights), "weight_version": "3"}
        assert (await raw.post("/update_weights_from_disk", body))[0] == 200
        assert call.done()
    spans = call.result()[1]["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["default"]
    assert (await raw.get("/get_server_info"))[1]["simulated"] is True
