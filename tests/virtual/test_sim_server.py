"""Tests the embedded engine behind SGLang's HTTP API: the adapter uses it like a real server.

The tests run in scaled wall time, because real sockets and a virtual clock do not fit together.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aprilsched import (
    DiskPublisher,
    LongTailWorkload,
    Prompt,
    Rollout,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SGLangFleet,
)
from aprilsched.__main__ import main
from aprilsched.cli.commands.serve_sim import ServeSimCommand
from aprilsched.cli.runs.settings import SimSettings
from aprilsched.errors import ConfigError, EngineRejected
from aprilsched.kernel.core.policies.straggler import StragglerRule
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.kernel.values.capabilities import Reservation
from aprilsched.simulation.engine import SimConfig
from aprilsched.testing import DrawnLengths, SimServer
from aprilsched.testing.contract import ALL_CHECKS, Check, Stream, Subject, greedy, until
from tests.sglang.helpers import running
from tests.support.sim_http import CONFIG, INTERVAL, Raw, asked, served, two_weights
from tests.support.table import each_row

KEY = "an-admin-key"


@pytest.fixture
async def server() -> AsyncIterator[SimServer]:
    async with served() as started:
        yield started


@pytest.fixture
async def engine(server: SimServer) -> AsyncIterator[SGLangEngine]:
    opened = SGLangEngine(server.url, stream_interval=INTERVAL)
    await opened.open()
    yield opened
    await opened.close()


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__)
async def test_it_keeps_the_contract_of_an_engine(
    server: SimServer, engine: SGLangEngine, tmp_path: Path, check: Check
):
    subject = Subject(
        engine=engine, weights=two_weights(tmp_path), busy=lambda: running(server.url)
    )
    await check(subject)


async def test_memory_calls_in_a_wrong_order_say_what_is_wrong(engine: SGLangEngine):
    await engine.pause("retract")
    with pytest.raises(EngineRejected, match="was not released"):
        await engine.wake(["kv_cache"])
    await engine.release(["kv_cache"])
    with pytest.raises(EngineRejected, match="released already"):
        await engine.release(["weights", "kv_cache"])
    with pytest.raises(EngineRejected, match="kv_cache is released; wake it first"):
        await engine.resume()


async def test_stopping_breaks_open_streams(tmp_path: Path):
    server = served()
    await server.start()
    engine = SGLangEngine(server.url)
    await engine.open()
    stream = await Stream(engine, greedy(5000)).start().reach(1)
    await server.stop()
    await until(lambda: stream.done)
    assert stream.task is not None
    assert stream.task.exception() is not None
    await engine.close()


async def test_a_port_in_use_is_refused_in_one_sentence(server: SimServer):
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match="Cannot listen on"):
        await SimServer(port=port).start()


def test_the_command_refuses_what_cannot_be(capsys: pytest.CaptureFixture[str]):
    for arguments, message in (
        (["--port", "70000"], "port is 70000"),
        (["--sim.engines", "0"], "sim.engines is 0"),
        (["--time-scale", "0"], "time_scale is 0"),
        (["--admin-key-env", "NOT_SET_ANYWHERE"], "admin_key_env names is not set"),
    ):
        assert main(["serve-sim", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_the_command_passes_on_the_settings_of_engines():
    sim = SimSettings(prefix_cache=True, dp_ranks=2, max_running=8)
    (server,) = ServeSimCommand(port=0, sim=sim).servers()
    able = server.engine.capabilities
    assert able.caches_contexts
    assert able.max_running_requests == 16


@each_row(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_the_command_serves_until_it_is_ended(number: signal.Signals, code: int):
    arguments = ["serve-sim", "--port", "0", "--sim.engines", "2", "--admin-key-env", "KEY"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "aprilsched", *arguments),
        env={**os.environ, "KEY": KEY},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    urls = [(await process.stdout.readline()).decode().split()[-1] for _ in range(2)]
    fleet = SGLangFleet(urls, admin_key=KEY)
    await fleet.open()
    assert fleet.engines[0].capabilities.version_spans
    await fleet.close()
    process.send_signal(number)
    assert await process.wait() == code


@each_row("straggler", ["abort", "retract"])
async def test_responses_end_at_the_lengths_of_a_law(straggler: StragglerRule, tmp_path: Path):
    """Interrupted and carried over, each has the length that was drawn for it."""
    distribution = LongTailWorkload(median=60, sigma=1.0, cap=900, seed=5)
    lengths, weights = DrawnLengths(distribution), two_weights(tmp_path)
    config = SchedulerConfig(
        batch_groups=4,
        group_size=4,
        over_provision=2.0,
        straggler=straggler,
        sampling=SamplingParams(max_new_tokens=600, temperature=1.0),
    )
    prompts = [Prompt(input_ids=np.array([5, number])) for number in range(16)]
    machine = SimConfig(stream_at_pause=False)
    servers = [SimServer(machine, time_scale=0.2, lengths=lengths) for _ in range(2)]
    async with servers[0], servers[1]:
        fleet = SGLangFleet([server.url for server in servers])
        async with RolloutScheduler(fleet, prompts, config=config) as rollouts:
            found: list[Rollout] = []
            async for batch in rollouts:
                found += batch.rollouts
                await rollouts.update_weights(DiskPublisher(weights[batch.index % 2]))
            assert rollouts.state.in_flight.counters.tokens_reprefilled or straggler == "retract"
    assert len(found) == 64
    several = [r for r in found if len(set(r.versions.tolist())) > 1]
    assert several
    drawn = DrawnLengths(distribution)
    expected = [drawn.take(p.input_ids) for p in prompts for _ in range(4)]
    assert sorted(len(r) for r in found) == sorted(min(600, length) for length in expected)
    ends = {r.finish_reason for r in found if len(r) < 600}
    assert ends == {"stop"}


async def test_stop_tokens_end_a_response_before_its_drawn_length():
    distribution = LongTailWorkload(median=5000, sigma=0.1, vocab_size=512)
    config = replace(CONFIG, kv_tokens=10_000)
    stops = list(range(0, 512, 8))
    body = asked(3000, sampling_params={"max_new_tokens": 3000, "stop_token_ids": stops})
    async with (
        SimServer(config, time_scale=0.05, lengths=DrawnLengths(distribution)) as server,
        Raw(server.url) as raw,
    ):
        answer = await raw.done("/generate", body)
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert answer["output_ids"][-1] in stops
    assert not set(answer["output_ids"][:-1]) & set(stops)


async def test_a_server_reserves_the_limit_of_a_response_with_a_drawn_length():
    """Two responses of 600 tokens do not fit. Reserving 600 for each would start both."""
    distribution = LongTailWorkload(median=600, sigma=0.0, vocab_size=512)
    config = replace(CONFIG, kv_tokens=1000)
    async with SimServer(config, time_scale=0.05, lengths=DrawnLengths(distribution)) as server:
        async with Raw(server.url) as raw:
            body = asked(900, sampling_params={"max_new_tokens": 900})
            answers = await asyncio.gather(*(raw.done("/generate", body) for _ in range(2)))
        assert server.engine.batcher.counters.preemptions == 0
    for answer in answers:
        assert len(answer["output_ids"]) == 600
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"


@each_row(("version", "in_full"), [("0.5.21", False), ("0.5.22", True), ("0.5.23", True)])
async def test_a_server_reserves_by_its_version(version: str, in_full: bool):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aprilsched.testing.served._VERSION", version)
        async with served() as server:
            engine = SGLangEngine(server.url, stream_interval=INTERVAL)
            await engine.open()
            assert engine.capabilities.reservation == Reservation(fixed_in_full=in_full)
            await engine.close()
