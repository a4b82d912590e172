"""Tests that a gateway with a store carries responses over a restart and over the end of its
process, through real loopback HTTP."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from aprilsched import PromptQueue, RolloutScheduler, SchedulerConfig, SGLangFleet, SqliteStore
from aprilsched.agents.gateway import Gateway, GatewaySettings
from aprilsched.errors import ConfigError, StoreError
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.testing import SimServer
from aprilsched.testing.contract import until
from aprilsched.types import Prompt
from tests.support.gateway import LONG, Front, Reader, spans
from tests.support.sim_http import INTERVAL, Raw, asked, served, two_weights
from tests.support.tiny_tokenizer import bytes_tokenizer


@pytest.fixture
async def server() -> AsyncIterator[SimServer]:
    async with served() as opened:
        yield opened


@asynccontextmanager
async def gateway(server: SimServer, store: Path, **settings: Any) -> AsyncGenerator[Front]:
    made = Gateway(
        SGLangFleet([server.url], stream_interval=INTERVAL),
        settings=GatewaySettings(port=0, drain_s=0, store=store, **settings),
        config=SchedulerConfig(save_interval_s=0.05),
    )
    async with made, Raw(made.url) as raw:
        yield Front(made, [server], raw)
        await made.stop()  # Before the clients leave.


async def reference(server: SimServer, tokens: int) -> list[int]:
    async with Raw(server.url) as raw:
        return (await raw.post("/generate", asked(tokens)))[1]["output_ids"]


async def interrupted(reader: Reader) -> int:
    """Wait until the gateway ends a response because it stops; returns the number of its tokens."""
    await reader.end()
    error = reader.events.pop()["error"]
    assert (error["code"], error["retryable"]) == (503, True)
    assert "send the same rid again" in error["message"]
    return len(reader.ids)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_response_continues_after_a_restart_with_versions(
    server: SimServer, tmp_path: Path, stream: bool
):
    expected = await reference(server, LONG)
    store, (weights, _) = tmp_path / "store", two_weights(tmp_path)
    async with gateway(server, store) as first:
        reader = await first.stream(LONG, rid="mine").reach(INTERVAL)
        body = {"model_path": str(weights), "weight_version": "step-1"}
        await first.raw.done("/update_weights_from_disk", body)
        await reader.reach(len(reader.ids) + INTERVAL)
    before = await interrupted(reader)
    async with gateway(server, store) as second:
        if stream:
            again = await second.stream(LONG, rid="mine").end()
            assert len(again.events[0]["output_ids"]) >= before
            ids, meta = again.ids, again.last
        else:
            whole = await second.raw.done("/generate", asked(LONG, rid="mine"))
            ids, meta = whole["output_ids"], whole["meta_info"]
        assert ids[:before] == reader.ids
        assert len(ids) == LONG
        assert ids != expected, "the new weights have sampled the rest"
        (old, new) = spans(meta)
        assert (old[0], new[0], new[2]) == ("default", "step-1", LONG)
        assert (await second.raw.get("/model_info"))[1]["weight_version"] == "step-1"
        await until(lambda: not second.state.delivery.unacknowledged)


async def test_a_response_that_was_complete_is_there_until_it_is_read(
    server: SimServer, tmp_path: Path
):
    expected = await reference(server, 3 * INTERVAL)
    async with gateway(server, tmp_path / "store") as first:
        await first.stream(LONG, rid="mine").reach(INTERVAL)
    async with gateway(server, tmp_path / "store") as second:
        (member,) = second.state.in_flight.rollouts.values()
        await until(lambda: member.log.size == LONG and not second.state.in_flight.groups)
    async with gateway(server, tmp_path / "store") as third:
        status, whole = await third.raw.post("/generate", asked(LONG, rid="mine"))
        assert (status, len(whole["output_ids"])) == (200, LONG)
        assert whole["output_ids"][: 3 * INTERVAL] == expected
        await until(lambda: not third.state.delivery.unacknowledged)
        assert third.state.in_flight.counters.launched == 1
    async with gateway(server, tmp_path / "store") as last:
        assert len(last.gateway.service.responses) == 0


async def test_another_prompt_under_a_restored_rid_is_refused(server: SimServer, tmp_path: Path):
    async with gateway(server, tmp_path / "store") as first:
        await first.stream(LONG, rid="mine").reach(INTERVAL)
    async with gateway(server, tmp_path / "store") as second:
        for other in (asked(LONG - 1), {**asked(LONG), "input_ids": [5, 6]}):
            assert "another prompt" in await second.raw.refused(
                "/generate", {**other, "rid": "mine"}
            )
        # If two clients ask at once, only one gets it.
        one, two = await asyncio.gather(
            *(second.raw.post("/generate", asked(LONG, rid="mine")) for _ in range(2))
        )
        assert sorted([one[0], two[0]]) == [200, 400]
        assert "Duplicate" in min(one, two, key=lambda each: -each[0])[1]["error"]["message"]
        assert second.state.in_flight.counters.launched == 1


async def test_unclaimed_responses_end_in_the_ledger(server: SimServer, tmp_path: Path):
    async with gateway(server, tmp_path / "store") as first:
        await first.stream(LONG, rid="mine").reach(INTERVAL)
        await first.stream(LONG).reach(INTERVAL)
    async with gateway(server, tmp_path / "store", reclaim_s=0) as second:
        await until(lambda: second.state.in_flight.ledger.total == 2)
        causes = sorted(entry.cause for entry in second.state.in_flight.ledger.entries)
        assert causes == [
            "its request had no rid, so no client can request it after the restart",
            "no client requested it within 0 s after the restart",
        ]
        assert {e.reason for e in second.state.in_flight.ledger.entries} == {Reason.WITHDRAWN}
        assert len(second.gateway.service.responses) == 0
        batcher = server.engine.batcher
        await until(lambda: batcher.running + batcher.waiting == 0)
        # The name is free again.
        await second.raw.done("/generate", asked(5, rid="mine"))


async def test_unclaimed_responses_take_no_place_of_new_ones(server: SimServer, tmp_path: Path):
    async with gateway(server, tmp_path / "store") as first:
        for rid in ("one", "two"):
            await first.stream(LONG, rid=rid).reach(INTERVAL)
    async with gateway(server, tmp_path / "store", max_requests=1) as second:
        responses = second.gateway.service.responses
        await second.raw.done("/pause_generation", {"mode": "retract"})
        other = second.stream(LONG, rid="other")
        await until(lambda: len(responses) == 3)
        assert responses.unclaimed == 2
        refused = await second.raw.refused("/generate", asked(5), 503)
        assert '/abort_request {"abort_all": true}' in refused
        # A client that returns gets its response, beyond the limit too.
        again = second.stream(LONG, rid="one")
        await until(lambda: responses.unclaimed == 1)
        await second.raw.post("/abort_request", {"abort_all": True})
        await asyncio.gather(other.end(), again.end())
        await second.raw.done("/continue_generation", {})
        await second.raw.done("/generate", asked(5))


async def test_a_restored_response_can_be_aborted(server: SimServer, tmp_path: Path):
    async with gateway(server, tmp_path / "store") as first:
        await first.stream(LONG, rid="mine").reach(INTERVAL)
    async with gateway(server, tmp_path / "store") as second:
        assert len(second.gateway.service.responses) == 1
        await second.raw.post("/abort_request", {"rid": "mine"})
        await until(lambda: second.state.in_flight.ledger.total == 1)
        assert len(second.gateway.service.responses) == 0


async def test_a_gateway_stopped_in_a_pause_keeps_waiting_requests(
    server: SimServer, tmp_path: Path
):
    expected = await reference(server, LONG)
    async with gateway(server, tmp_path / "store") as first:
        reader = await first.stream(LONG, rid="mine").reach(INTERVAL)
        await first.raw.done("/pause_generation", {"mode": "in_place"})
        waiting = first.stream(10, rid="later")
        await until(lambda: len(first.gateway.service.responses) == 2)
    await interrupted(reader)
    assert await interrupted(waiting) == 0
    async with gateway(server, tmp_path / "store") as second:
        # No server ran the second one before the kill, so it starts now.
        again = [second.stream(LONG, rid="mine"), second.stream(10, rid="later")]
        assert [len((await each.end()).ids) for each in again] == [LONG, 10]
        assert again[0].ids == expected
        assert second.state.in_flight.counters.launched == 2


async def test_a_client_that_has_left_is_not_restored(server: SimServer, tmp_path: Path):
    async with gateway(server, tmp_path / "store") as first:
        reader = await first.stream(LONG, rid="mine").reach(INTERVAL)
        reader.task.cancel()
        await until(lambda: not first.state.in_flight.groups)
    async with gateway(server, tmp_path / "store") as second:
        assert len(second.gateway.service.responses) == 0
        assert second.state.in_flight.ledger.total == 1


async def test_a_store_of_another_program_is_refused_unchanged(server: SimServer, tmp_path: Path):
    store, queue = tmp_path / "store", PromptQueue()
    queue.put(Prompt(input_ids=[3, 4], key="mine"))  # type: ignore[arg-type]
    config = SchedulerConfig(batch_groups=1, group_size=1, straggler="retract")
    async with RolloutScheduler(
        SGLangFleet([server.url]), queue, config=config, store=SqliteStore(store)
    ) as trainer:
        await asyncio.wait_for(asyncio.create_task(_launched(trainer)), 60)
    with pytest.raises(ConfigError, match="the run of a trainer"):
        async with gateway(server, store):
            pass
    with closing(SqliteStore(store)) as opened:
        saved = opened.open()
    assert saved is not None
    assert [group.prompt.key for group in saved.groups] == ["mine"]


async def _launched(trainer: RolloutScheduler) -> None:
    batch = asyncio.create_task(trainer.next_batch())
    await until(lambda: bool(trainer.state.in_flight.groups))
    batch.cancel()


async def test_a_damaged_file_of_labels_is_refused(server: SimServer, tmp_path: Path):
    (tmp_path / "store-labels.json").write_text("{")
    with pytest.raises(StoreError, match="remove the file"):
        async with gateway(server, tmp_path / "store"):
            pass


async def test_a_restarted_gateway_reloads_the_folder_and_its_tokenizer(
    server: SimServer, tmp_path: Path
):
    folder, _ = two_weights(tmp_path)
    model = bytes_tokenizer(tmp_path / "model")
    store = tmp_path / "store"
    async with gateway(server, store, tokenizer=model) as one:
        body = {"model_path": str(folder), "weight_version": "u1"}
        assert (await one.raw.post("/update_weights_from_disk", body))[0] == 200
    await server.crash()
    await server.restart()
    async with gateway(server, store) as again:
        await until(lambda: bool(again.gateway.service.in_use))
        assert again.gateway.service.label == "u1"
        assert again.gateway.service.model_path == str(folder)
        assert (await again.raw.post("/tokenize", {"prompt": "the"}))[0] == 200


@pytest.mark.parametrize("remedy", ["folder", "label"])
async def test_an_old_store_with_other_servers_refuses_requests(
    server: SimServer, tmp_path: Path, remedy: str, caplog: pytest.LogCaptureFixture
):
    folder, other = two_weights(tmp_path)
    async with gateway(server, tmp_path / "store") as one:
        body = {"model_path": str(folder), "weight_version": "u1"}
        await one.raw.done("/update_weights_from_disk", body)
        await one.stream(LONG, rid="mine").reach(INTERVAL)
    await server.crash()
    await server.restart()
    (folder / "model.safetensors").write_text("other weights")
    caplog.clear()
    async with gateway(server, tmp_path / "store") as again:
        await until(lambda: any("new requests get 503" in m for m in caplog.messages))
        for rid in ("mine", "new"):
            refused = await again.raw.refused("/generate", asked(LONG, rid=rid), 503)
            assert 'No server has the weights "u1"' in refused
        (line,) = [m for m in caplog.messages if "new requests get 503" in m]
        assert refused in line
        assert "update_weights(" not in caplog.text
        up = f'aprilsched_engine_up{{engine="{server.url.removeprefix("http://")}"}}'
        assert f"{up} 0" in (await again.raw.get("/metrics"))[1]
        assert (await again.raw.get("/server_info"))[1]["status"] == "unavailable"
        if remedy == "folder":
            body = {"model_path": str(other), "weight_version": "u2"}
            await again.raw.done("/update_weights_from_disk", body)
        else:
            body = {"new_version": "u2", "abort_all_requests": False}
            await again.raw.done("/update_weight_version", body)
        meta = (await again.raw.done("/generate", asked(LONG, rid="mine")))["meta_info"]
        assert [span[0] for span in spans(meta)] == ["u1", "u2"]
        assert f"{up} 1" in (await again.raw.get("/metrics"))[1]
        assert (await again.raw.get("/server_info"))[1]["status"] == "ready"


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("ending", ["refused", "stopped"])
async def test_servers_of_an_unfinished_update_wait_after_a_restart(
    server: SimServer,
    tmp_path: Path,
    loaded: bool,
    ending: str,
    caplog: pytest.LogCaptureFixture,
):
    """They may have a part of it. They reload the folder of the last update, if it is known."""
    store, (folder, other) = tmp_path / "store", two_weights(tmp_path)
    async with gateway(server, store) as one:
        if loaded:
            body = {"model_path": str(folder), "weight_version": "u1"}
            await one.raw.done("/update_weights_from_disk", body)
        if ending == "refused":
            missing = {"model_path": str(tmp_path / "missing")}
            await one.raw.refused("/update_weights_from_disk", missing)
        else:
            await one.raw.done("/begin_weight_update", {})
    caplog.set_level("INFO", "aprilsched")
    caplog.clear()
    async with gateway(server, store) as again:
        if loaded:
            await until(lambda: bool(again.gateway.service.in_use))
            meta = (await again.raw.done("/generate", asked(5)))["meta_info"]
            assert meta["weight_version"] == "u1"
            assert any("loads weights label='u1'" in m for m in caplog.messages)
            return
        refused = await again.raw.refused("/generate", asked(5), 503)
        assert 'No server has the weights "default"' in refused
        body = {"model_path": str(other), "weight_version": "u1"}
        await again.raw.done("/update_weights_from_disk", body)
    async with gateway(server, store) as third:
        assert third.gateway.service.in_use
        meta = (await third.raw.done("/generate", asked(5)))["meta_info"]
        assert meta["weight_version"] == "u1"


@pytest.mark.parametrize("labelled", ["by another gateway", "by a client of the server"])
async def test_a_restarted_gateway_takes_no_weights_of_another_one_for_its_own(
    server: SimServer, tmp_path: Path, labelled: str
):
    own, other = two_weights(tmp_path)
    body = {"model_path": str(own), "weight_version": "mine"}
    async with gateway(server, tmp_path / "store") as one:
        await one.raw.done("/update_weights_from_disk", body)
        expected = await one.reference(INTERVAL)
    await server.crash()
    await server.restart()
    body = {"model_path": str(other), "weight_version": "1"}
    if labelled == "by another gateway":
        async with gateway(server, tmp_path / "other") as two:
            await two.raw.done("/update_weights_from_disk", body)
    else:
        async with Raw(server.url) as raw:
            await raw.done("/update_weights_from_disk", body)
    assert await reference(server, INTERVAL) != expected
    async with gateway(server, tmp_path / "store") as again:
        assert await again.reference(INTERVAL) == expected


async def test_a_failing_store_does_not_stop_the_gateway(
    server: SimServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object, **__: object) -> None:
        raise StoreError("the disk is full")

    async with gateway(server, tmp_path / "store") as one:
        monkeypatch.setattr(SqliteStore, "save", full)
        await one.raw.done("/generate", asked(50, rid="mine"))
        await until(lambda: not one.state.in_flight.groups)
        text = (await one.raw.get("/server_info"))[1]["gateway"]["store"]
        assert "the disk is full" in text


# --- a process of its own ----------------------------------------------------------------------


class Process:
    """``aprilsched gateway`` in a process of its own."""

    def __init__(self, server: SimServer, store: Path) -> None:
        self._command = ["-m", "aprilsched", "gateway", "--engine", server.url, "--port", "0"]
        self._command += ["--store", str(store), "--drain-s", "0"]
        self._command += ["--stream-interval", str(INTERVAL)]

    async def __aenter__(self) -> Process:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, *self._command, stdout=asyncio.subprocess.PIPE
        )
        assert self.process.stdout is not None
        line = (await self.process.stdout.readline()).decode()
        self.raw = Raw(line.rpartition(" ")[2].strip())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.raw.session.close()
        await self.end(signal.SIGKILL)

    async def end(self, number: int) -> int:
        """Send a signal, and wait for the end; returns the exit code."""
        if self.process.returncode is None:
            os.kill(self.process.pid, number)
        return await self.process.wait()

    def stream(self, tokens: int, **body: Any) -> Reader:
        return Reader(self.raw, {**asked(tokens, **body), "stream": True, "return_logprob": True})


def saved_tokens(store: Path, copy: Path) -> int:
    """Return the number of tokens in a copy of a store that another process writes."""
    for path in store.parent.glob(f"{store.name}*"):
        shutil.copy(path, copy.with_name(path.name.replace(store.name, copy.name, 1)))
    try:
        stored = SqliteStore(copy)
        saved = stored.open()
        stored.close()
    except StoreError:  # The copy was made in the middle of a write.
        return 0
    return 0 if saved is None else sum(len(each.token_ids) for each in saved.tokens.values())


async def test_a_response_survives_a_kill_and_then_a_signal(server: SimServer, tmp_path: Path):
    expected = await reference(server, LONG)
    store = tmp_path / "store"
    async with Process(server, store) as first:
        reader = await first.stream(LONG, rid="mine").reach(INTERVAL)
        copies = iter(range(10**6))
        await until(lambda: saved_tokens(store, tmp_path / f"copy{next(copies)}") > 0)
        assert await first.end(signal.SIGKILL) == -signal.SIGKILL
    with pytest.raises(aiohttp.ClientError):  # The connection broke.
        await reader.end()
    async with Process(server, store) as second:
        again = await second.stream(LONG, rid="mine").reach(1)
        assert len(again.events[0]["output_ids"]) > 0
        await again.reach(len(again.ids) + 1)
        assert await second.end(signal.SIGTERM) == 0
        before = await interrupted(again)
    async with Process(server, store) as third:
        whole = await third.raw.done("/generate", asked(LONG, rid="mine"))
        assert whole["output_ids"] == expected
        assert whole["output_ids"][:before] == again.ids
        assert spans(whole["meta_info"]) == [("default", 0, LONG)]
