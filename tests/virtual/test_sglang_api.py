"""Tests what every server of SGLang's HTTP API does: one engine, and a gateway in front of it.

The tests run in scaled wall time, because real sockets and a virtual clock do not fit together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from aprilsched.errors import InconsistentWeights
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.testing import SimServer
from aprilsched.testing.contract import Stream, greedy, until
from tests.support.gateway import front
from tests.support.sim_http import INTERVAL, Raw, asked, served, two_weights

LONG = 5000
KEY = "an-admin-key"
GENERATE = "/generate"
DISK = "/update_weights_from_disk"


@dataclass
class Api:
    """The API under test, and the engine behind it."""

    url: str
    raw: Raw
    server: SimServer

    async def started(self) -> None:
        """Wait until a request decodes."""
        await until(lambda: self.server.engine.batcher.running == 1)


@pytest.fixture(params=["engine", "gateway"])
async def api(request: pytest.FixtureRequest) -> AsyncIterator[Api]:
    async with AsyncExitStack() as stack:
        if request.param == "engine":
            server = await stack.enter_async_context(served(admin_key=KEY))
            url = server.url
        else:
            one = await stack.enter_async_context(front(admin_key=KEY))
            (server,), url = one.servers, one.gateway.url
        yield Api(url, await stack.enter_async_context(Raw(url, KEY)), server)


async def test_whole_and_streamed_answers_agree_with_sglang(api: Api):
    status, whole = await api.raw.post(GENERATE, asked(40, rid="a" * 32, return_logprob=True))
    events = await api.raw.events(asked(40, rid="b" * 32, return_logprob=True))
    assert status == 200
    meta = whole["meta_info"]
    assert meta["id"] == "a" * 32
    assert meta["finish_reason"] == {"type": "length", "length": 40}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (32, 40, 0)
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 40}]
    assert meta["output_token_logprobs_length"] == len(meta["output_token_logprobs"]) == 40
    assert [token for _, token, _ in meta["output_token_logprobs"]] == whole["output_ids"]
    assert len(events) > 2, "the tokens come as they are sampled"
    assert [i for event in events for i in event["output_ids"]] == whole["output_ids"]
    assert all("weight_versions" not in event["meta_info"] for event in events[:-1])
    assert all(event["meta_info"]["finish_reason"] is None for event in events[:-1])
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 40
    last = {**events[-1]["meta_info"], "id": 0, "e2e_latency": 0, "output_token_logprobs": 0}
    assert last == {"e2e_latency": 0, **meta, **last}
    assert last.keys() - meta.keys() <= {"e2e_latency"}
    _, plain = await api.raw.post(GENERATE, asked(5))
    assert not [name for name in plain["meta_info"] if "logprob" in name]


async def test_malformed_bodies_are_refused_as_by_fastapi(api: Api):
    for path, body in (
        ("/continue_generation", None),
        ("/begin_weight_update", None),
        ("/pause_generation", {"mode": "zzz"}),
        (GENERATE, {"input_ids": "x"}),
        ("/update_weight_version", {}),
        ("/abort_request", None),
        ("/flush_cache?timeout=soon", None),
        ("/flush_cache?timeout=-1", None),
    ):
        status, answer = await api.raw.post(path, body)
        assert (status, answer["object"], answer["code"]) == (400, "error", 400), path
    assert await api.raw.get("/nope") == (404, {"detail": "Not Found"})
    assert await api.raw.get(GENERATE) == (405, {"detail": "Method Not Allowed"})


async def test_a_name_in_use_is_refused_and_free_again_afterwards(api: Api):
    first = asyncio.create_task(api.raw.post(GENERATE, asked(LONG, rid="mine")))
    await api.started()
    status, answer = await api.raw.post(GENERATE, asked(5, rid="mine"))
    assert (status, answer["error"]["message"]) == (400, "Duplicate request ID detected: mine")
    assert await api.raw.post("/abort_request", {"rid": "unknown"}) == (200, "")
    assert not first.done()
    assert await api.raw.post("/abort_request", {"abort_all": True}) == (200, "")
    assert (await first)[1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await api.raw.post(GENERATE, asked(5, rid="mine")))[0] == 200


async def test_the_default_pause_ends_every_request_and_holds_new_ones(api: Api):
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(api.raw.post(GENERATE, asked(LONG)))
        await until(lambda: api.server.engine.counters.generated > 300)
        status, answer = await api.raw.post("/pause_generation", {})
        assert (status, answer["status"]) == (200, "ok")
        partial = (await running)[1]
        assert partial["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < partial["meta_info"]["completion_tokens"] == len(partial["output_ids"]) < LONG
        assert (await api.raw.get("/ready"))[0] == 503
        assert (await api.raw.get("/model_info"))[0] == 200
        assert (await api.raw.post("/flush_cache"))[0] == 200
        held = tasks.create_task(api.raw.post(GENERATE, asked(5)))
        await asyncio.sleep(0.3)
        assert not held.done()
        assert (await api.raw.post("/continue_generation", {}))[0] == 200
    assert held.result()[1]["meta_info"]["completion_tokens"] == 5
    assert (await api.raw.get("/ready"))[0] == 200


async def test_a_flush_wants_an_idle_or_paused_engine(api: Api):
    assert (await api.raw.get("/flush_cache"))[0] == 200
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(api.raw.post(GENERATE, asked(LONG)))
        await api.started()
        for query in ("", "?timeout=0.1"):
            status, text = await api.raw.post(f"/flush_cache{query}")
            assert (status, text) == (400, "Flush cache failed.\n")
        late = tasks.create_task(api.raw.post("/flush_cache?timeout=60"))
        await api.raw.post("/pause_generation", {"mode": "retract"})
        assert (await late)[0] == 200, "the flush waits until the engine is idle"
        await api.raw.post("/continue_generation", {})
        await api.raw.post("/abort_request", {"abort_all": True})
    assert call.done()


async def test_an_update_from_disk_reports_its_result(api: Api, tmp_path: Path):
    body = {"model_path": str(two_weights(tmp_path)[1]), "weight_version": "3"}
    status, answer = await api.raw.post(DISK, body)
    message = "Succeeded to update model weights. Weight version updated to 3."
    expected = {"success": True, "message": message, "num_paused_requests": 0}
    assert (status, answer) == (200, expected)
    assert (await api.raw.get("/get_model_info"))[1]["weight_version"] == "3"
    status, answer = await api.raw.post(DISK, {"model_path": "/nowhere"})
    assert (status, answer["success"]) == (400, False)
    assert answer["message"].startswith("Failed to update weights: ")
    assert "/nowhere" in answer["message"]
    assert (await api.raw.get("/get_model_info"))[1]["weight_version"] == "3"
    status, answer = await api.raw.post("/update_weight_version", {"new_version": "4"})
    expected = {"success": True, "message": "Weight version updated to 4", "new_version": "4"}
    assert (status, answer) == (200, expected)
    assert (await api.raw.get("/server_info"))[1]["weight_version"] == "4"


async def test_the_server_reports_its_properties(api: Api):
    for path in ("/health", "/health_generate", "/ready"):
        assert (await api.raw.get(path))[0] == 200
    path = (await api.raw.get("/get_model_info"))[1]["model_path"]
    assert (await api.raw.get("/v1/models"))[1]["data"][0]["id"] == path == "aprilsched-sim"
    _, info = await api.raw.get("/get_server_info")
    assert info["incremental_streaming_output"] is True
    assert info["max_running_requests"] > 0
    (load,) = (await api.raw.get("/v1/loads"))[1]["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)
    _, received = await api.raw.get("/openapi.json")
    assert {GENERATE, DISK} <= received["paths"].keys()
    schemas = received["components"]["schemas"]
    assert schemas["PauseGenerationReqInput"]["properties"]["mode"]["default"] == "abort"
    ends = schemas["UpdateWeightVersionReqInput"]["properties"]["abort_all_requests"]
    assert ends["default"] is True
    assert "torch_empty_cache" in schemas["ContinueGenerationReqInput"]["properties"]


async def test_control_calls_want_the_admin_key(api: Api):
    async with Raw(api.url) as stranger:
        status, answer = await stranger.post("/pause_generation", {})
        assert (status, answer["error"]) == (401, "Unauthorized")
        assert (await stranger.post(GENERATE, asked(5)))[0] == 200


async def test_the_adapter_of_this_library_uses_it(api: Api, tmp_path: Path):
    weights, _ = two_weights(tmp_path)
    engine = SGLangEngine(api.url, admin_key=KEY, stream_interval=INTERVAL)
    await engine.open()
    try:
        stream = await Stream(engine, greedy(1500)).start().reach(INTERVAL)
        await engine.pause("retract")
        await engine.flush()
        await engine.update_from_disk(weights, 1)
        assert await engine.version() == 1
        await engine.resume()
        await stream.end()
        assert len(stream.ids) == 1500
        assert stream.last.spans is not None
        assert [span.version for span in stream.last.spans] == [0, 1]
        cut = await Stream(engine, greedy(LONG)).start().cut(INTERVAL)
        assert cut.last.finish == "abort"
    finally:
        await engine.close()


@pytest.mark.parametrize("follows", [False, True], ids=["own labels", "the trainer's labels"])
async def test_a_folder_loaded_without_a_label_is_not_the_runs(tmp_path: Path, follows: bool):
    own, other = two_weights(tmp_path)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(served(admin_key=KEY))
        raw = await stack.enter_async_context(Raw(server.url, KEY))

        async def joined(name: str, former: str = "a1", *, fresh: bool = False) -> SGLangEngine:
            engine = SGLangEngine(server.url, admin_key=KEY)
            await engine.open()
            stack.push_async_callback(engine.close)
            engine.join_run(name, former, decimal=follows, fresh=fresh)
            return engine

        first = await joined("a1")
        assert await first.version() == 0
        await first.update_from_disk(own, 1)
        assert await first.version() == 1
        for engine, folder in ((first, other), (await joined("b2"), own)):
            await raw.done(DISK, {"model_path": str(folder)})
            if follows:  # The trainer may label the weights later.
                assert await engine.version() == 1
                continue
            with pytest.raises(InconsistentWeights, match=f"but from {folder}, which"):
                await engine.version()
            await engine.begin_update()
            await engine.end_update(2)  # Of tensors, which leave the path.
            assert await engine.version() == 2
        await raw.done(DISK, {"model_path": str(other)})
        engine = await joined("c3", "a1" if follows else "b2", fresh=True)
        for _ in range(2):
            assert await engine.version() == (1 if follows else 2)
            await engine.keep_label()
        await raw.done(DISK, {"model_path": str(own)})
        await engine.accept_weights(3, label=True)
        assert await engine.version() == 3
