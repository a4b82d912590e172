"""Tests weights that a client sends to a gateway as tensors or by a group of ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aprilsched import SchedulerConfig
from aprilsched.config import Timeouts
from aprilsched.testing import SimServer
from aprilsched.testing.contract import until
from tests.support.gateway import LONG, Front, front, spans
from tests.support.sim_http import INTERVAL, asked, two_weights

TENSOR, DISTRIBUTED = "/update_weights_from_tensor", "/update_weights_from_distributed"


@pytest.fixture
async def two() -> AsyncIterator[Front]:
    async with front(engines=2) as opened:
        yield opened


def tensors(*parts: str, **more: Any) -> dict[str, Any]:
    return {"serialized_named_tensors": list(parts), **more}


def key(server: SimServer) -> int:
    """Return the key of the server's weights."""
    return server.engine.batcher.weights_key


@pytest.mark.parametrize("ending", ["label", "continue"])
async def test_many_buckets_in_a_pause_are_one_update(two: Front, ending: str):
    first, second = two.servers
    before = key(first)
    readers = [await two.stream(LONG).reach(INTERVAL) for _ in range(2)]
    await two.raw.done("/pause_generation", {"mode": "retract"})
    await two.raw.done("/flush_cache")
    for part in "abc":
        body = tensors(part, part, flush_cache=part == "c", weight_version="step-1")
        await two.raw.done(TENSOR, body)
    if ending == "label":
        body = {"new_version": "step-1", "abort_all_requests": False}
        await two.raw.done("/update_weight_version", body)
    await two.raw.done("/continue_generation", {})
    assert key(first) == key(second) != before
    assert two.state.in_flight.counters.updates == 1
    assert (await two.raw.get("/model_info"))[1]["weight_version"] == "step-1"
    for reader in readers:
        await reader.end()
        assert [label for label, _, _ in spans(reader.last)] == ["default", "step-1"]
        assert reader.last["weight_versions_exact"]


async def test_without_a_pause_the_bucket_that_flushes_is_the_last(two: Front):
    reader = await two.stream(LONG).reach(INTERVAL)
    await two.raw.done(TENSOR, tensors("a", "a", flush_cache=False))
    length = len(reader.ids)
    assert two.state.weights.update is not None, "the engines wait for the rest"
    # SGLang's default marks this one as the last.
    await two.raw.done(TENSOR, tensors("b", "b"))
    assert two.state.weights.versions.trainer == 1
    await reader.reach(length + INTERVAL)
    await two.raw.done(TENSOR, tensors("c", "d"))
    assert two.state.weights.versions.trainer == 2
    # Each engine got the handles of its own ranks.
    assert key(two.servers[0]) != key(two.servers[1])
    await reader.end()
    assert [label for label, _, _ in spans(reader.last)] == ["default", "1", "2"]


async def test_a_client_may_start_and_end_an_update(two: Front):
    await two.raw.done("/begin_weight_update", {})
    await two.raw.done(TENSOR, tensors("a", "a"))
    await two.raw.done(TENSOR, tensors("b", "b", weight_version="step-1"))
    assert two.state.in_flight.counters.updates == 0
    await two.raw.done("/end_weight_update", {})
    assert two.state.in_flight.counters.updates == 1
    assert (await two.raw.get("/model_info"))[1]["weight_version"] == "step-1"
    assert "start one first" in await two.raw.refused("/end_weight_update", {})
    # A label that arrives later names the same weights.
    await two.raw.done("/begin_weight_update", {})
    await two.raw.done(TENSOR, tensors("c", "c"))
    await two.raw.done("/end_weight_update", {})
    reader = await two.stream(LONG).reach(INTERVAL)
    body = {"new_version": "step-2", "abort_all_requests": False}
    await two.raw.done("/update_weight_version", body)
    await reader.end()
    assert spans(reader.last) == [("step-2", 0, LONG)]
    assert reader.last["weight_versions_exact"]
    assert two.state.in_flight.counters.updates == 2


async def test_a_group_has_a_rank_for_every_rank_of_every_engine(two: Front):
    tp_size = (await two.raw.get("/server_info"))[1]["tp_size"]
    assert tp_size == 2
    group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "group_name": "g"}
    message = await two.raw.refused("/init_weights_update_group", {**group, "world_size": 2})
    assert "world_size is 3 and not 2" in message
    await two.raw.done("/init_weights_update_group", {**group, "world_size": 1 + tp_size})
    found = [server._served.groups for server in two.servers]  # type: ignore[union-attr]
    assert found == [{"g": (1, 3)}, {"g": (2, 3)}]
    bucket = {"names": ["w"], "dtypes": ["torch.bfloat16"], "shapes": [[2, 2]], "group_name": "g"}
    await two.raw.done(DISTRIBUTED, {**bucket, "weight_version": "step-1"})
    assert key(two.servers[0]) == key(two.servers[1])
    assert "0 shapes" in await two.raw.refused(DISTRIBUTED, {**bucket, "shapes": []})
    await two.raw.done("/destroy_weights_update_group", {"group_name": "g"})
    assert "is not in the group g" in await two.raw.refused(DISTRIBUTED, bucket)
    assert found == [{}, {}]


async def test_an_engine_that_does_not_join_makes_the_others_leave(two: Front):
    served = two.servers[1]._served
    assert served is not None
    served.groups["g"] = (7, 8)
    group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "group_name": "g"}
    message = await two.raw.refused("/init_weights_update_group", {**group, "world_size": 3})
    assert "not every engine has joined" in message
    assert two.servers[0]._served is not None
    assert two.servers[0]._served.groups == {}


async def test_a_wrong_number_of_handles_is_refused_before_pausing(two: Front):
    assert "has 3 parts" in await two.raw.refused(TENSOR, tensors("a", "b", "c"))
    assert two.state.weights.update is None
    label = "x" * 1_000_000
    long = tensors("a", "a", weight_version=label)
    assert "got 1000000" in await two.raw.refused(TENSOR, long)
    body = {"new_version": label, "abort_all_requests": False}
    assert "got 1000000" in await two.raw.refused("/update_weight_version", body)
    assert two.state.weights.versions.trainer == 0


async def test_another_update_is_refused_while_buckets_come(two: Front, tmp_path: Path):
    await two.raw.done("/pause_generation", {"mode": "retract"})
    await two.raw.done(TENSOR, tensors("a", "a"))
    body = {"model_path": str(two_weights(tmp_path)[0])}
    assert "Another update is open" in await two.raw.refused("/update_weights_from_disk", body)
    await two.raw.done("/pause_generation", {"mode": "retract"})
    await two.raw.done("/flush_cache")
    await two.raw.done("/continue_generation", {})
    assert two.state.in_flight.counters.updates == 1
    await two.raw.done("/update_weights_from_disk", body)


async def test_a_client_leaving_in_the_middle_of_a_bucket_is_safe():
    # Instant refits could all end between two looks at the state.
    async with front(engines=2, refit_seconds=0.2) as two:
        calls = [two.raw.post(TENSOR, tensors("a", "a")) for _ in range(3)]
        tasks = [asyncio.create_task(call) for call in calls]
        await until(lambda: two.state.weights.update is not None)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await until(lambda: two.state.in_flight.counters.updates > 0)
        await two.raw.done(TENSOR, tensors("b", "b"))
        await two.raw.done("/generate", asked(5))
        assert key(two.servers[0]) == key(two.servers[1])


async def test_two_clients_sending_buckets_make_whole_updates(two: Front):
    bodies = [tensors(part, part) for part in "abcdef"]
    answers = await asyncio.gather(*(two.raw.post(TENSOR, body) for body in bodies))
    assert {status for status, _ in answers} == {200}
    assert two.state.in_flight.counters.updates == len(bodies)
    assert key(two.servers[0]) == key(two.servers[1])


async def test_an_engine_that_dies_between_buckets_is_excluded(two: Front):
    reader = await two.stream(LONG).reach(INTERVAL)
    await two.raw.done("/pause_generation", {"mode": "retract"})
    await two.raw.done(TENSOR, tensors("a", "a"))
    await two.servers[0].crash()
    answer = await two.raw.done(TENSOR, tensors("b", "b", weight_version="step-1"))
    assert two.servers[0].url.removeprefix("http://") in answer["message"]
    await two.raw.done("/continue_generation", {})
    assert two.gateway.service.in_use == [two.servers[1].url.removeprefix("http://")]
    await reader.end()
    assert len(reader.ids) == LONG


@pytest.mark.parametrize("paused", [False, True])
async def test_an_update_that_no_server_accepts_reports_the_stop(
    two: Front, tmp_path: Path, paused: bool, caplog: pytest.LogCaptureFixture
):
    """A server that refuses a folder may have loaded a part of it, so all of them wait."""
    reports = "No server has the weights"
    reader = await two.stream(LONG).reach(INTERVAL)
    waiting = None
    if paused:
        await two.raw.done("/pause_generation", {"mode": "retract"})
        waiting = asyncio.create_task(two.raw.refused("/generate", asked(5), 503))
        await until(lambda: len(two.gateway.service.responses) == 2)
    missing = {"model_path": str(tmp_path / "missing")}
    refused = await two.raw.refused("/update_weights_from_disk", missing)
    assert reports in refused
    assert "update_weights()" not in refused
    if waiting is not None:
        assert reports in await waiting
    assert reports in await two.raw.refused("/generate", asked(5), 503)
    assert (await two.raw.get("/ready"))[0] == 503
    status, answer = await two.raw.post("/continue_generation", {})
    assert (status, reports in answer["message"]) == (400, True)
    assert not any("continues under" in line for line in caplog.messages)
    body = {"model_path": str(two_weights(tmp_path)[0])}
    await two.raw.done("/update_weights_from_disk", body)
    await two.raw.done("/continue_generation", {})
    await two.raw.done("/generate", asked(5))
    await reader.end()
    assert len(reader.ids) == LONG


async def test_a_response_with_tokens_waits_for_an_update_for_so_long(tmp_path: Path):
    async with front(fleet_wait_s=0) as one:
        reader = await one.stream(LONG).reach(INTERVAL)
        missing = {"model_path": str(tmp_path / "missing")}
        await one.raw.refused("/update_weights_from_disk", missing)
        await reader.end()
        assert "No server has the weights" in reader.events[-1]["error"]["message"]
        await until(lambda: not one.state.in_flight.groups)


async def test_the_next_trainer_can_replace_an_abandoned_update():
    config = SchedulerConfig(timeouts=Timeouts(refit_s=0.5))
    async with front(config=config) as one:
        reader = await one.stream(LONG).reach(INTERVAL)
        await one.raw.done(TENSOR, tensors("a", flush_cache=False))
        await until(lambda: not one.gateway.service.in_use)
        await one.raw.done(TENSOR, tensors("b", weight_version="step-2"))
        await reader.end()
        assert [label for label, _, _ in spans(reader.last)] == ["default", "step-2"]


async def test_stopping_in_the_middle_of_an_update_ends():
    """This includes calls that wait for their turn."""
    async with front() as one:
        await one.stream(LONG).reach(INTERVAL)
        await one.raw.done(TENSOR, tensors("a", flush_cache=False))
        controls = one.gateway.service.controls
        async with controls._turn:  # pyright: ignore[reportPrivateUsage]
            waiting = asyncio.create_task(controls.carry_out(controls.resume()))
            await until(lambda: bool(controls._calls))  # pyright: ignore[reportPrivateUsage]
            await one.gateway.stop()
        await asyncio.wait([waiting])
        assert waiting.cancelled()


async def test_a_client_leaving_at_the_end_leaves_no_update_open(two: Front):
    """Otherwise a cancelled end of an update would block every client until the refit times out."""
    await two.raw.done("/pause_generation", {"mode": "retract"})
    await two.raw.done(TENSOR, tensors("a", "a"))
    controls = two.gateway.service.controls
    session = controls._open  # pyright: ignore[reportPrivateUsage]
    assert session is not None
    # aiohttp does this to the handler of a disconnected client.
    call = asyncio.create_task(controls.carry_out(controls.resume()))
    while controls._open is not None:  # noqa: ASYNC110 # pyright: ignore[reportPrivateUsage]
        await asyncio.sleep(0)
    call.cancel()
    await until(session.task.done)
    assert session.task.exception() is None
    await two.raw.done("/continue_generation", {})
    await two.raw.done("/generate", asked(5))


async def test_only_so_many_control_calls_wait(two: Front):
    await two.raw.done("/pause_generation", {"mode": "retract"})
    controls = two.gateway.service.controls
    async with controls._turn:  # pyright: ignore[reportPrivateUsage]
        pauses = [controls.carry_out(controls.pause("retract")) for _ in range(64)]
        waiting = [asyncio.create_task(each) for each in pauses]
        await until(lambda: len(controls._calls) == 64)  # pyright: ignore[reportPrivateUsage]
        for path, body in ((TENSOR, tensors("a", "a")), ("/flush_cache", None)):
            assert "64 control calls" in await two.raw.refused(path, body, 503)
    await asyncio.gather(*waiting)
    await two.raw.done(TENSOR, tensors("a", "a"))
    await two.raw.done("/continue_generation", {})
