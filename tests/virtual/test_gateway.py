"""Tests the gateway through real loopback HTTP, in front of embedded engines behind theirs.

The tests run in scaled wall time, because real sockets and a virtual clock do not fit together.
"""

from __future__ import annotations

import asyncio
import re
from base64 import b64decode
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aprilsched import SchedulerConfig, SGLangFleet
from aprilsched.__main__ import main
from aprilsched.agents.gateway import Gateway, GatewaySettings
from aprilsched.agents.gateway.settings import for_clients
from aprilsched.agents.serving import streams
from aprilsched.agents.serving.calls import CONTROL
from aprilsched.cli.doctor import examine
from aprilsched.config import Health
from aprilsched.errors import ConfigError, EngineRejected
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.testing import SimServer
from aprilsched.testing.contract import PROMPT, until
from tests.support.faults import Answer, FaultyServer
from tests.support.gateway import LONG, Front, Reader, front, spans
from tests.support.sim_http import CONFIG, INTERVAL, Raw, asked, served, two_weights
from tests.support.tiny_tokenizer import bytes_tokenizer

CHECKS = ("health", "health_generate", "ready")
KEY, ADMIN = "a-key", "an-admin-key"
IMAGES: dict[str, Any] = {"image_data": ["data:image/png;base64,AA==", "http://a/b.png"]}


@pytest.fixture
async def one() -> AsyncIterator[Front]:
    async with front() as opened:
        yield opened


# --- responses ---------------------------------------------------------------------------------


async def test_a_whole_and_a_streamed_response_are_those_of_the_engine(one: Front):
    async with Raw(one.servers[0].url) as engine:
        expected = await engine.done("/generate", asked(50, return_logprob=True))
    whole = await one.raw.done("/generate", asked(50, return_logprob=True, rid="mine"))
    assert whole["output_ids"] == expected["output_ids"]
    meta = whole["meta_info"]
    assert meta["output_token_logprobs"] == expected["meta_info"]["output_token_logprobs"]
    assert (meta["id"], meta["completion_tokens"], meta["prompt_tokens"]) == ("mine", 50, 32)
    assert meta["finish_reason"] == {"type": "length", "length": 50}
    assert spans(meta) == [("default", 0, 50)]
    assert meta["weight_versions_exact"]
    stream = await one.stream(50).end()
    assert stream.ids == expected["output_ids"]
    assert len(stream.events) > 2, "the tokens come as they are sampled"
    assert spans(stream.last) == [("default", 0, 50)]
    assert len(stream.last["output_token_logprobs"]) == len(stream.events[-1]["output_ids"])


async def test_many_clients_at_a_time(one: Front):
    expected = await one.reference(40)
    answers = await asyncio.gather(*(one.raw.post("/generate", asked(40)) for _ in range(60)))
    assert all(answer["output_ids"] == expected for _, answer in answers)
    assert len(one.gateway.service.responses) == 0
    assert one.state.in_flight.counters.delivered == 61


async def test_a_request_that_every_engine_refuses_fails_alone(one: Front):
    bad = {**asked(20), "sampling_params": {"max_new_tokens": 10**9, "ignore_eos": True}}
    running = await one.stream(LONG).reach(INTERVAL)
    assert "refused at attempt" in await one.raw.refused("/generate", bad)
    (error,) = await one.raw.events(bad)
    assert (error["error"]["code"], error["error"]["retryable"]) == (400, False)
    assert one.state.in_flight.ledger.rollouts == {Reason.FAILED: 2}
    assert len((await running.end()).ids) == LONG


async def test_metrics_tell_of_the_run_and_of_its_clients():
    async with front(max_requests=2, api_key=KEY) as one, Raw(one.gateway.url, KEY) as raw:

        async def figures() -> dict[tuple[str, str], float]:
            status, text = await raw.get("/metrics")
            assert status == 200
            return {
                (
                    sample.name.removeprefix("aprilsched_"),
                    sample.labels.get("reason", sample.labels.get("status", "")),
                ): value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if (value := sample.value)
            }

        _, text = await raw.get("/metrics")
        assert "# TYPE aprilsched_gateway_request_seconds histogram" in text
        for name in ("batch_", "batches_delivered", "units_ready", "teardowns_failed"):
            assert f"aprilsched_{name}" not in text, "only a trainer has it"
        reader = await Reader(raw, {**asked(LONG), "stream": True}).reach(INTERVAL)
        whole = asyncio.create_task(raw.post("/generate", asked(LONG)))
        await until(lambda: len(one.gateway.service.responses) == 2)
        open_now = await figures()
        names = ("gateway_open_responses", "gateway_open_streams", "rollouts_launched_total")
        assert [open_now.get((name, "")) for name in names] == [2, 1, 2]
        refused = {**asked(5), "sampling_params": {"nonsense": 1}}
        assert (await raw.post("/generate", refused))[0] == 400
        assert (await raw.post("/generate", asked(5)))[0] == 503
        assert (await one.raw.post("/generate", asked(5)))[0] == 401
        assert (await one.raw.get("/v1/models"))[0] == 401
        assert (await one.raw.get("/ready"))[0] == 200
        await asyncio.gather(reader.end(), whole)
        too_long = {**asked(5), "sampling_params": {"max_new_tokens": 10**9}}
        assert "error" in (await raw.events(too_long))[-1]
        found = await figures()
        refusals = {r: n for (name, r), n in found.items() if name == "gateway_refusals_total"}
        assert refusals == {"invalid": 2, "busy": 1, "key": 2}
        answers = {r: n for (name, r), n in found.items() if name == "gateway_requests_total"}
        assert (answers["400"], answers["401"], answers["503"]) == (2, 2, 1)
        assert answers["200"] == found["gateway_request_seconds_count", ""] - 5
        assert (await one.raw.get("/ready"))[0] == 200
        # The call of the metrics before counts now, and the probe does not.
        later = (await figures())["gateway_request_seconds_count", ""]
        assert later == found["gateway_request_seconds_count", ""] + 1
        assert found["gateway_first_token_seconds_count", ""] == 2
        assert found["tokens_generated_total", ""] == 2 * LONG
        assert not any((name, "") in found for name in names[:2])


async def test_clients_set_only_the_fields_that_the_operator_lists():
    image: dict[str, Any] = {"image_data": "data:image/png;base64,AA=="}
    fields: dict[str, Any] = {"priority": 7, "return_hidden_states": True, **image}
    async with front() as one:
        plain = await one.reference(40)
        ignored = await one.raw.done("/generate", asked(40, **fields))
        assert ignored["output_ids"] == plain, "none of its tokens has arrived"
        for name in ("extra", "request", "keep"):
            params = {**asked(40)["sampling_params"], name: {"priority": 1}}
            status, refused = await one.raw.post(
                "/generate", {**asked(40), "sampling_params": params}
            )
            assert status == 400
            assert f"{name} passes parameters on unchecked" in str(refused)
    async with front(client_fields=("priority", "image_data")) as one:
        answer = await one.raw.done("/generate", asked(40, **fields))
        assert answer["output_ids"] != plain, "the engine has seen the image"
        for bad in ("/etc/passwd", "file:///etc/passwd", 7):
            assert "a URL that starts with data:" in await one.raw.refused(
                "/generate", asked(40, image_data=bad)
            )
        several = {**asked(40, **image), "input_ids": [[1, 2], [3]]}
        assert "several prompts with media" in await one.raw.refused("/generate", several)
    with pytest.raises(ConfigError, match="request holds rid"):
        GatewaySettings(client_fields=("rid",))


ROWS = ("return_routed_experts=uint8[3,2]", "return_sampling_mask")
ASKS: dict[str, Any] = {"return_routed_experts": True, "return_sampling_mask": True}
MASKS = "output_token_sampling_mask"


async def test_requested_rows_have_the_format_of_the_engine():
    async with front(client_fields=ROWS) as one, Raw(one.servers[0].url) as engine:
        answer = await engine.done("/generate", asked(50, **ASKS))
        expected = {k: answer["meta_info"][k] for k in ("routed_experts", MASKS, f"{MASKS}_length")}
        whole = await one.raw.done("/generate", asked(50, **ASKS))
        assert expected.items() <= whole["meta_info"].items()
        assert whole["meta_info"]["routed_experts_exact"]
        *others, last = [event["meta_info"] for event in await one.raw.events(asked(50, **ASKS))]
        assert [mask for meta in (*others, last) for mask in meta[MASKS]] == expected[MASKS]
        assert last["routed_experts"] == expected["routed_experts"]
        assert not any("routed_experts" in meta for meta in others)
        nothings: tuple[dict[str, Any], ...] = ({}, {"return_routed_experts": False})
        stream = await one.stream(LONG, **ASKS, rid="mine").reach(INTERVAL)
        await one.raw.post("/abort_request", {"rid": "mine"})
        assert not (await stream.end()).last["routed_experts_exact"]
        assert len(b64decode(stream.last["routed_experts"])) == 24 * (
            len(PROMPT) + len(stream.ids) - 1
        )
        for nothing in nothings:
            plain = await one.raw.done("/generate", asked(50, **nothing))
            assert not plain["meta_info"].keys() & {*expected, "routed_experts_exact"}
        status, _ = await one.raw.post("/generate", asked(50, return_sampling_mask=1))
        assert status == 400
        status, _ = await one.raw.post("/v1/completions", {"model": "any", "prompt": [1], **ASKS})
        assert status == 400, "its answers have no rows"
    with pytest.raises(ConfigError, match="give the shape of a row"):
        GatewaySettings(client_fields=("return_routed_experts",))


async def test_rows_are_of_the_weights_that_sampled_their_token(tmp_path: Path):
    _, weights = two_weights(tmp_path)
    async with front(client_fields=ROWS) as one:
        plain = await one.stream(LONG, **ASKS).end()
        stream = await one.stream(LONG, **ASKS).reach(INTERVAL)
        # Requests that waited inside the engine would be recomputed under the new weights, with
        # their rows.
        for call in ("/pause_generation", "/update_weights_from_disk", "/continue_generation"):
            body = {"mode": "retract", "model_path": str(weights)}
            await one.raw.done(call, body)
        await stream.end()
    rows, old = (
        np.frombuffer(b64decode(each.last["routed_experts"]), "<i4").reshape(-1, 3, 2)
        for each in (stream, plain)
    )
    (_, _, seam), _ = spans(stream.last)
    same = (rows == old).all((1, 2))[len(PROMPT) - 1 :]
    assert stream.last["routed_experts_exact"]
    assert same[:seam].all()
    assert not same[seam:].any()


# --- clients that leave or abort ---------------------------------------------------------------


@pytest.mark.parametrize("launched", [True, False])
async def test_a_disconnected_client_leaves_only_a_ledger_entry(one: Front, launched: bool):
    if launched:
        reader = await one.stream(LONG).reach(INTERVAL)
    else:
        await one.raw.post("/pause_generation", {"mode": "retract"})
        reader = one.stream(LONG)
        await until(lambda: len(one.gateway.service.responses) == 1)
    reader.task.cancel()
    await until(lambda: len(one.gateway.service.responses) == 0 and not one.state.in_flight.groups)
    if not launched:
        await one.raw.post("/continue_generation", {})
    await until(lambda: one.state.in_flight.ledger.total == 1)
    (entry,) = one.state.in_flight.ledger.entries
    assert (entry.reason, entry.cause) == (Reason.WITHDRAWN, "the client has disconnected")
    batcher = one.servers[0].engine.batcher
    await until(lambda: batcher.running + batcher.waiting == 0)
    assert (await one.raw.get("/v1/loads"))[1]["loads"][0]["num_running_reqs"] == 0


@pytest.mark.parametrize("paused", [False, True])
async def test_an_aborted_response_has_its_tokens_and_versions(one: Front, paused: bool):
    reader = await one.stream(LONG, rid="mine").reach(INTERVAL)
    other = await one.stream(LONG, rid="mine-too").reach(INTERVAL)
    if paused:
        await one.raw.post("/pause_generation", {"mode": "in_place"})
    assert await one.raw.post("/abort_request", {"rid": "unknown"}) == (200, "")
    assert await one.raw.post("/abort_request", {"rid": "mine"}) == (200, "")
    await reader.end()
    assert reader.last["finish_reason"]["type"] == "abort"
    assert spans(reader.last) == [("default", 0, len(reader.ids))]
    assert not other.done, "only the whole name counts"
    if paused:
        await one.raw.post("/continue_generation", {})
    assert len((await other.end()).ids) == LONG


# --- control -----------------------------------------------------------------------------------


async def test_a_response_survives_an_update_and_lists_its_versions(one: Front, tmp_path: Path):
    first, second = two_weights(tmp_path)
    reader = await one.stream(LONG).reach(INTERVAL)
    await one.raw.done("/pause_generation", {"mode": "retract"})
    assert (await one.raw.get("/ready"))[0] == 503
    assert (await one.raw.get("/health"))[0] == 200
    assert one.servers[0].engine.batcher.paused == "retract"
    await one.raw.done("/flush_cache")
    late = one.stream(10)
    body = {"model_path": str(first), "weight_version": "step-1", "flush_cache": False}
    status, answer = await one.raw.post("/update_weights_from_disk", body)
    assert (status, answer["success"]) == (200, True)
    assert one.servers[0].engine.batcher.paused == "retract", "it stays paused after the update"
    assert not late.events, "a request that arrives during a pause waits"
    await one.raw.done("/continue_generation", {})
    assert (await one.raw.get("/ready"))[0] == 200
    await late.end()
    assert spans(late.last) == [("step-1", 0, 10)]
    # Without a pause by the client, the scheduler pauses and continues by itself.
    before = len(reader.ids)
    await reader.reach(before + INTERVAL)
    body = {"model_path": str(second)}
    await one.raw.done("/update_weights_from_disk", body)
    assert (await one.raw.get("/model_info"))[1]["weight_version"] == "2"
    await reader.end()
    assert len(reader.ids) == LONG
    (a, b, c) = spans(reader.last)
    assert (a[0], b[0], c[0]) == ("default", "step-1", "2")
    assert (a[1], a[2], b[2], c[2]) == (0, b[1], c[1], LONG)
    assert reader.last["weight_versions_exact"]


async def test_weights_loaded_behind_the_gateway_get_their_label(one: Front, tmp_path: Path):
    weights, _ = two_weights(tmp_path)
    reader = await one.stream(LONG).reach(INTERVAL)
    await one.raw.post("/pause_generation", {"mode": "retract"})
    async with Raw(one.servers[0].url) as engine:
        await engine.post("/flush_cache")
        await engine.post(
            "/update_weights_from_disk", {"model_path": str(weights), "flush_cache": False}
        )
    body = {"new_version": "behind", "abort_all_requests": False}
    status, answer = await one.raw.post("/update_weight_version", body)
    assert (status, answer["success"], answer["new_version"]) == (200, True, "behind")
    await one.raw.post("/continue_generation", {})
    await reader.end()
    assert [label for label, _, _ in spans(reader.last)] == ["default", "behind"]


async def test_concurrent_control_calls_run_one_at_a_time(one: Front, tmp_path: Path):
    weights = two_weights(tmp_path)
    reader = await one.stream(LONG).reach(1)
    calls = [one.raw.post("/pause_generation", {"mode": "retract"})]
    for number in range(4):
        body = {"model_path": str(weights[number % 2]), "weight_version": f"v{number}"}
        calls += [one.raw.post("/update_weights_from_disk", body), one.raw.post("/flush_cache")]
    calls.append(one.raw.post("/continue_generation", {}))
    answers = await asyncio.gather(*calls)
    assert {status for status, _ in answers} <= {200, 400}
    await one.raw.done("/continue_generation", {})
    await reader.end()
    assert len(reader.ids) == LONG
    assert spans(reader.last)[-1][2] == LONG


# --- engines that fail -------------------------------------------------------------------------


@pytest.mark.parametrize("shown", [{}, IMAGES], ids=["text", "images"])
async def test_a_response_survives_an_engine_that_dies(shown: dict[str, Any]):
    """Images change what the engines sample, so the next attempt must have the same ones."""
    patient = SchedulerConfig(health=Health(fleet_wait_s=60))
    async with (
        front(engines=2, config=patient, client_fields=tuple(shown)) as two,
        Raw(two.servers[1].url) as engine,
    ):
        whole = await engine.done("/generate", asked(LONG, **shown))
        expected = whole["output_ids"]
        assert (expected == await two.reference(LONG)) != bool(shown)
        readers = [two.stream(LONG, **shown) for _ in range(4)]
        for reader in readers:
            await reader.reach(INTERVAL)
        await two.servers[0].crash()
        for reader in readers:
            await reader.end()
            assert reader.ids == expected
            assert spans(reader.last) == [("default", 0, LONG)]
        engines = (await two.raw.get("/server_info"))[1]["gateway"]["engines"]
        assert [engine["mode"] for engine in engines] == ["lost", "running"]


CALLS = {
    "/generate": asked(4),
    "/v1/completions": {"prompt": "a", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
}


@asynccontextmanager
async def front_of_one(
    server: SimServer, config: SchedulerConfig, folder: Path
) -> AsyncGenerator[Raw]:
    """A gateway with a tokenizer in front of a server, and a client."""
    async with (
        server,
        Gateway(
            SGLangFleet([server.url], stream_interval=INTERVAL),
            settings=GatewaySettings(port=0, drain_s=0, tokenizer=bytes_tokenizer(folder)),
            config=config,
        ) as gateway,
        Raw(gateway.url) as raw,
    ):
        yield raw


async def test_clients_of_a_busy_server_wait(tmp_path: Path):
    narrow = SimServer(replace(CONFIG, max_running=1, max_queued=1), time_scale=0.1)
    async with front_of_one(narrow, SchedulerConfig(), tmp_path) as raw:
        answers = await asyncio.gather(
            *(raw.post(path, body) for path, body in CALLS.items() for _ in range(8))
        )
        assert [status for status, _ in answers] == [200] * 8 * len(CALLS), answers


@pytest.mark.parametrize("path", CALLS)
async def test_clients_of_a_busy_server_get_retry_after(path: str, tmp_path: Path):
    # The first call comes from the opening, which reads the size of the vocabulary.
    server = FaultyServer(CONFIG, faults=[Answer(status=429, retry_after=0.01, after=2)])
    config = SchedulerConfig(health=Health(fleet_wait_s=0.0))
    async with (
        front_of_one(server, config, tmp_path) as raw,
        raw.session.post(path, json=CALLS[path]) as answer,
    ):
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "1"
        assert "busy for too long" in (await answer.json())["error"]["message"]


async def test_a_response_with_a_grammar_fails_with_its_engine(
    tmp_path: Path,
):
    async with front(2) as two:
        body = asked(LONG)
        body["sampling_params"]["json_schema"] = '{"type": "object"}'
        reader = await Reader(two.raw, {**body, "stream": True}).reach(INTERVAL)
        await two.raw.post("/pause_generation", {"mode": "retract"})
        update = {"model_path": str(two_weights(tmp_path)[0]), "weight_version": "new"}
        await two.raw.done("/update_weights_from_disk", update)
        await two.raw.post("/continue_generation", {})
        await reader.reach(len(reader.ids) + INTERVAL)
        (busy,) = [each for each in two.servers if each.engine.batcher.running]
        await busy.crash()
        await reader.end()
        error = reader.events.pop()["error"]
        assert (error["code"], "json_schema holds for a whole" in error["message"]) == (503, True)
        assert len(reader.ids) < LONG
        await until(lambda: two.state.in_flight.ledger.rollouts == {Reason.WITHDRAWN: 1})


async def test_an_update_names_a_server_that_was_lost_before_it(tmp_path: Path):
    first, _ = two_weights(tmp_path)
    async with front(engines=2) as two:
        names = [engine.name for engine in two.gateway.service.fleet.engines]
        mode_of = two.gateway.service.controls.mode_of
        await two.servers[0].crash()
        while mode_of(names[0]) != "lost":
            await two.reference(5)
        status, answer = await two.raw.post("/update_weights_from_disk", {"model_path": str(first)})
        assert (status, answer["success"]) == (200, True)
        assert answer["message"].endswith(f" Not updated, and out of use: {names[0]}.")
        assert answer["not_updated"] == names[:1]
        await two.servers[0].restart()
        await until(lambda: mode_of(names[0]) == "running")


@pytest.mark.parametrize("fault", ["are missing", "have changed"])
async def test_a_restarted_server_loads_the_folder_of_the_last_update(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
):
    folder, _ = two_weights(tmp_path)
    body = {"model_path": str(folder), "weight_version": "u1"}
    async with front(engines=2) as two:
        names = set(two.gateway.service.in_use)
        assert (await two.raw.post("/update_weights_from_disk", body))[0] == 200
        for _ in range(2):  # Both at once: nothing else would generate before the next update.
            for server in two.servers:
                await server.crash()
            reader = two.stream(20)
            await until(lambda: not two.gateway.service.in_use)
            for server in two.servers:
                await server.restart()
            await until(lambda: set(two.gateway.service.in_use) == names)
            await reader.end()
            assert reader.last["weight_version"] == "u1"
        assert any("is on standby, without requests" in m for m in caplog.messages)

        if fault == "are missing":
            folder.rename(tmp_path / "away")
        else:
            (folder / "model.safetensors").write_text("other weights")
        await two.servers[0].crash()
        await until(lambda: len(two.gateway.service.in_use) == 1)
        await two.servers[0].restart()
        await until(lambda: any(f"the files in {folder} {fault}" in m for m in caplog.messages))
        assert len(two.gateway.service.in_use) == 1


async def test_without_a_store_a_gateway_starts_with_the_newest_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder, _ = two_weights(tmp_path)
    async with served() as old, served() as new:
        fleet = SGLangFleet([new.url], stream_interval=INTERVAL)
        first = Gateway(fleet, settings=GatewaySettings(port=0, drain_s=0))
        async with first, Raw(first.url) as raw:
            body = {"model_path": str(folder)}
            assert (await raw.post("/update_weights_from_disk", body))[0] == 200
        fleet = SGLangFleet([old.url, new.url], stream_interval=INTERVAL)
        async with Gateway(fleet, settings=GatewaySettings(port=0, drain_s=0)) as second:
            assert second.service.in_use == [new.url.removeprefix("http://")]
            assert any("on standby, without requests" in m for m in caplog.messages)
            async with Raw(second.url) as raw:
                await raw.done("/generate", asked(5))


@pytest.mark.parametrize("wait_s", [0, 600])
async def test_a_gateway_starts_before_all_servers_are_up(
    wait_s: float, caplog: pytest.LogCaptureFixture
):
    """Without `wait_s` the late server joins later; with it the gateway starts with both."""
    async with served() as there, served() as late:
        await late.crash()
        fleet = SGLangFleet([late.url, there.url], wait_s=wait_s, stream_interval=INTERVAL)
        gateway = Gateway(fleet, settings=GatewaySettings(port=0, drain_s=0))
        starting = asyncio.create_task(gateway.start())
        names = [url.removeprefix("http://") for url in (late.url, there.url)]
        if wait_s:
            await until(lambda: any("waiting up to" in printed for printed in caplog.messages))
            assert not starting.done()
            await late.restart()
            await starting
            assert gateway.service.in_use == names
        else:
            await starting
            async with Raw(gateway.url) as raw:
                await raw.done("/generate", asked(5))
                listed = (await raw.get("/server_info"))[1]["gateway"]["engines"]
                assert [(each["name"], each["mode"]) for each in listed] == [
                    (names[1], "running"),
                    (names[0], "lost"),
                ]
                await late.restart()
                await until(lambda: set(gateway.service.in_use) == set(names))
                assert fleet.awaited == ()
                await raw.done("/generate", asked(5))
        await gateway.stop()


async def test_a_server_that_is_of_no_use_ends_the_wait_for_the_others():
    async with served() as away, served(admin_key=ADMIN) as closed:
        await away.crash()
        fleet = SGLangFleet([away.url, closed.url], wait_s=600, admin_key="wrong")
        with pytest.raises(EngineRejected, match="401"):
            await fleet.open()
        assert fleet.awaited == ()


async def test_without_engines_requests_wait_and_it_is_not_ready():
    async with front() as one:
        reader = await one.stream(LONG).reach(INTERVAL)
        await one.servers[0].crash()
        await until(lambda: not one.gateway.service.in_use)
        assert [(await one.raw.get(f"/{path}"))[0] for path in CHECKS] == [200, 503, 503]
        assert not reader.task.done()
        await one.servers[0].restart()
        await reader.end()
        assert len(reader.ids) == LONG


async def test_an_idle_server_that_ends_is_noticed():
    async with front(engines=2) as two:
        for server in two.servers:
            await server.crash()
        await until(lambda: not two.gateway.service.in_use)
        assert (await two.raw.get("/ready"))[0] == 503


async def test_control_calls_without_a_server_are_refused_at_once(tmp_path: Path):
    folder, _ = two_weights(tmp_path)
    async with front() as one:
        await one.servers[0].crash()
        await until(lambda: not one.gateway.service.in_use)
        for path, body in (
            ("/update_weights_from_disk", {"model_path": str(folder)}),
            ("/pause_generation", {"mode": "retract"}),
            ("/begin_weight_update", {}),
        ):
            status, answer = await one.raw.post(path, body)
            assert (status, answer["error"]["message"][:17]) == (503, "No server answers")
        await one.servers[0].restart()
        await one.raw.done("/generate", asked(5))


async def test_a_silent_stream_is_kept_open(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "PING_S", 0.02)
    async with front() as one:
        assert (await one.raw.post("/pause_generation", {"mode": "retract"}))[0] == 200
        async with one.raw.session.post("/generate", json={**asked(5), "stream": True}) as answer:
            assert answer.headers["X-Accel-Buffering"] == "no"
            for _ in range(3):
                assert (await answer.content.readline()).startswith(b": ")
                await answer.content.readline()
            assert (await one.raw.post("/continue_generation", {}))[0] == 200
            *_, done = [line async for line in answer.content if line.startswith(b"data: ")]
            assert done == b"data: [DONE]\n"


async def test_the_log_the_answer_and_a_header_have_one_id(
    one: Front, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level("INFO", "aprilsched"):
        async with one.raw.session.post("/generate", json=asked(5)) as answer:
            name = (await answer.json())["meta_info"]["id"]
            assert answer.headers["X-Request-Id"] == name
        body = {**asked(5), "sampling_params": {"max_new_tokens": 10**9}}
        async with one.raw.session.post("/generate", json=body) as answer:
            assert answer.status == 400
            refused = answer.headers["X-Request-Id"]
    assert any(f"id={name!r}" in message for message in caplog.messages)
    assert any("status=400" in m and f"id={refused!r}" in m for m in caplog.messages)
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


def test_limits_of_the_fleet_replace_those_of_the_scheduler():
    given = GatewaySettings(fleet_wait_s=0, stall_s=5)
    health = for_clients(SchedulerConfig(), given).health
    assert (health.fleet_wait_s, health.stall_s) == (0, 5)
    assert for_clients(SchedulerConfig(), GatewaySettings()).health == Health()


async def test_anthropics_api_is_refused_with_its_place(one: Front):
    status, answer = await one.raw.post("/v1/messages", {})
    assert status == 404
    assert "only in sessions" in answer["error"]["message"]


async def test_each_request_has_a_line_in_the_log(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "aprilsched")
    async with front(api_key=KEY) as one, Raw(one.gateway.url, KEY) as raw:
        await raw.done("/generate", asked(5, rid="mine"))
        await raw.post("/generate?secret=1", {**asked(5), "rid": "x\ny", "input_ids": [-1]})
        await one.raw.post("/generate", asked(5))
        await raw.get("/nowhere-secret")
    lines = [r.getMessage() for r in caplog.records if "method=" in r.getMessage()]
    assert [re.sub(r"seconds=\d+\.\d{3} ", "", line) for line in lines] == [
        "method=POST path=/generate status=200 id='mine'",
        "method=POST path=/generate status=400 id='x\\ny'",
        "method=POST path=/generate status=401 id='-'",
        "method=GET path=- status=404 id='-'",
    ]
    assert KEY not in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("case", ["waiting", "streaming", "whole", "failed"])
async def test_a_request_that_ends_early_has_its_status(
    case: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "aprilsched")
    async with front(fleet_wait_s=0) as one:
        requests = one.gateway.service.clients.requests
        if case == "waiting":
            await one.raw.post("/pause_generation", {"mode": "retract"})
        if case == "whole":
            task = asyncio.create_task(one.raw.done("/generate", asked(LONG)))
        else:
            task = (reader := one.stream(LONG)).task
            if case != "waiting":
                await reader.reach(INTERVAL)
        await until(lambda: len(one.gateway.service.responses) == 1)
        status = "503" if case == "failed" else "499"
        if case == "failed":
            await one.servers[0].crash()
        else:
            task.cancel()
        await until(lambda: bool(requests[status]))
        line = next(m for m in caplog.messages if "path=/generate" in m)
        assert f"status={status}" in line
        assert requests["200"] == (1 if case == "waiting" else 0)


async def test_a_pause_is_in_the_metrics_and_in_the_server_s_facts():
    async with front() as one:
        for call, paused, status in (
            ("/pause_generation", 1, "unavailable"),
            ("/continue_generation", 0, "ready"),
        ):
            await one.raw.post(call, {})
            _, text = await one.raw.get("/metrics")
            assert f"aprilsched_gateway_paused {paused}" in text
            assert (await one.raw.get("/server_info"))[1]["status"] == status


async def test_a_pause_names_the_servers_that_it_leaves_running():
    async with front() as one:
        _, answer = await one.raw.post("/pause_generation", {"mode": "retract"})
        assert one.servers[0].url.removeprefix("http://") in answer["message"]
        assert one.servers[0].engine.batcher.paused is None
        await one.raw.post("/continue_generation", {})
        reader = await one.stream(LONG).reach(INTERVAL)
        _, answer = await one.raw.post("/pause_generation", {"mode": "retract"})
        assert answer["message"] == "Generation paused successfully."
        assert one.servers[0].engine.batcher.paused == "retract"
        await one.raw.post("/continue_generation", {})
        await reader.end()


@pytest.mark.parametrize("by", ["configuration", "setting"])
async def test_a_fleet_that_is_lost_ends_every_response_with_the_cause(by: str):
    config = SchedulerConfig(health=Health(fleet_wait_s=0)) if by == "configuration" else None
    async with front(config=config, fleet_wait_s=0 if config is None else None) as one:
        reader = await one.stream(LONG).reach(INTERVAL)
        await one.servers[0].crash()
        await reader.end()
        assert "no engine is left" in reader.events[-1]["error"]["message"]
        lost = str(await one.gateway.wait_failed())
        assert "no engine is left" in lost
        assert lost.endswith("or raise fleet_wait_s (--fleet-wait-s).")
        assert "stops" in await one.raw.refused("/generate", asked(5), 503)
        assert [(await one.raw.get(f"/{path}"))[0] for path in CHECKS] == [503, 503, 503]


# --- keys, settings, the end -------------------------------------------------------------------


async def test_keys_are_asked_for():
    async with front(api_key=KEY, admin_key=ADMIN) as one:
        async with Raw(one.gateway.url) as stranger:
            for path, key in (
                ("/generate", "API"),
                ("/pause_generation", "admin"),
                ("/no-such-path", "API"),
            ):
                status, answer = await stranger.post(path, {})
                assert (status, answer["error"]) == (401, "Unauthorized")
                assert answer["message"].startswith(f"The {key} key is missing")
            assert (await stranger.get("/health"))[0] == 200
        async with Raw(one.gateway.url, KEY) as client:
            await client.done("/generate", asked(5))
            for path in CONTROL:
                assert (await client.post(path, {}))[0] == 401
            assert (await client.get("/no-such-path"))[0] == 404
        await one.raw.done("/generate", asked(5))
        await one.raw.done("/abort_request", {"rid": "x"})
    # Without an admin key the API key opens everything.
    async with front(api_key=KEY) as one, Raw(one.gateway.url, KEY) as client:
        assert (await one.raw.post("/abort_request", {"rid": "x"}))[0] == 401
        await client.done("/abort_request", {"rid": "x"})


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "admin_key": ADMIN}, False),
        ({"host": "0.0.0.0", "api_key": KEY}, False),
        ({"host": "127.0.0.1"}, False),
    ],
)
async def test_control_calls_that_are_open_to_everybody_are_warned_of(
    settings: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
):
    async with front(**settings):
        printed = [line for line in caplog.messages if "everybody who reaches" in line]
        assert len(printed) == warns


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (SchedulerConfig(straggler="abort"), "wait inside a paused engine"),
        (SchedulerConfig(max_staleness=2), "a gateway has none"),
    ],
)
def test_settings_that_a_gateway_cannot_keep_are_refused(config: SchedulerConfig, words: str):
    with pytest.raises(ConfigError, match=words):
        Gateway(SGLangFleet(["http://127.0.0.1:9"]), config=config)


async def test_an_address_in_use_is_refused_and_frees_the_engine(one: Front):
    port = int(one.gateway.url.rpartition(":")[2])
    async with served() as server:
        with pytest.raises(ConfigError, match="Cannot listen"):
            await Gateway(SGLangFleet([server.url]), settings=GatewaySettings(port=port)).start()
        other = Gateway(SGLangFleet([server.url]), settings=GatewaySettings(port=0))
        async with other, Raw(other.url) as raw:
            await raw.done("/generate", asked(5))


async def test_a_gateway_starts_and_restarts_with_an_empty_cache():
    """Another client may have loaded weights before and kept the keys of older ones."""
    async with served(config=replace(CONFIG, prefix_cache=True)) as server, Raw(server.url) as raw:

        async def found(attempt: int) -> int:
            before = server.engine.counters.cached
            await raw.done("/generate", asked(20, rid=f"same-{attempt}"))
            return server.engine.counters.cached - before

        assert [await found(attempt) for attempt in (1, 2)] == [0, len(PROMPT) - 1]
        for attempt in (3, 5):
            fleet = SGLangFleet([server.url], stream_interval=INTERVAL)
            async with Gateway(fleet, settings=GatewaySettings(port=0, drain_s=0)):
                assert await found(attempt) == 0
            assert await found(attempt + 1) == len(PROMPT) - 1


async def test_stopping_ends_what_is_open_with_its_tokens():
    async with front() as one:
        reader = await one.stream(LONG).reach(INTERVAL)
        await one.gateway.stop()
        await reader.end()
        reason = reader.last["finish_reason"]
        assert (reason["type"], "stops" in reason["message"]) == ("abort", True)
        assert reader.last["completion_tokens"] == len(reader.ids) > 0
        batcher = one.servers[0].engine.batcher
        await until(lambda: batcher.running + batcher.waiting == 0)


async def test_stopping_lets_open_responses_end_and_takes_no_new_ones():
    async with front(drain_s=600) as one:
        reader = await one.stream(LONG).reach(INTERVAL)
        stopping = asyncio.create_task(one.gateway.stop())
        await until(lambda: one.gateway.service.admission.draining)
        async with one.raw.session.post("/generate", json=asked(5)) as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (503, "600")
        assert [(await one.raw.get(f"/{path}"))[0] for path in CHECKS] == [200, 503, 503]
        await reader.end()
        assert len(reader.ids) == LONG
        await stopping


# --- other clients -----------------------------------------------------------------------------


@pytest.mark.parametrize("text", [False, True])
async def test_the_doctor_finds_nothing_wrong_with_it(tmp_path: Path, text: bool):
    async with front(tokenizer=bytes_tokenizer(tmp_path) if text else None) as one:
        findings = {finding.check: finding for finding in await examine(one.gateway.url)}
        assert [finding for finding in findings.values() if finding.status == "fail"] == []
        warned = {name for name, finding in findings.items() if finding.status == "warn"}
        assert warned == {"refit by its logprobs"}


async def test_the_doctor_command_refuses_a_gateway(one: Front, capsys: pytest.CaptureFixture[str]):
    assert await asyncio.to_thread(main, ["doctor", one.gateway.url]) == 2
    assert "is a gateway; name its servers instead" in capsys.readouterr().out
