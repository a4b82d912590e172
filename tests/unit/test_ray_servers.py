"""Tests SGLang servers as Ray actors, with real Ray and the SGLang-compatible test server."""

# pyright: basic
# Ray has no complete types.
from __future__ import annotations

import asyncio
import itertools
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import Prompt, RolloutScheduler, SamplingParams, SchedulerConfig
from aprilsched.errors import ConfigError, EngineUnreachable
from aprilsched.testing.contract import WAIT_SECONDS, until
from tests.support.ray_cluster import listening_process, local_cluster, pid_of, runs, url_of

ray = pytest.importorskip("ray")

from aprilsched.fronts.ray import RayFleet, SGLangServers  # noqa: E402

SERVE = (sys.executable, "-m", "aprilsched", "serve-sim")
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_trainer.py"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_cluster(num_cpus=4):
        yield


def servers(logs: Path, /, count: int = 1, **changes: Any) -> SGLangServers:
    settings: dict[str, Any] = {"command": SERVE, "arguments": ["--time-scale", "0.05"]}
    return SGLangServers(count, **(settings | {"gpus": 0, "cpus": 0.1, "logs": logs} | changes))


def prompts() -> Iterator[Prompt]:
    sampling = SamplingParams(max_new_tokens=400, ignore_eos=True)
    for key in itertools.count():
        ids = np.array([key % 1000 + 1, 7], dtype=np.int32)
        yield Prompt(input_ids=ids, key=key, sampling=sampling)


@pytest.mark.long
async def test_servers_are_started_again_whatever_ends(cluster: None, tmp_path: Path):
    """The process of one server is killed, then the actor of the other."""
    config = SchedulerConfig(batch_groups=4, group_size=2, over_provision=2.0, straggler="abort")
    started = servers(tmp_path, 2, name="engine")
    await asyncio.to_thread(started.__enter__)
    try:
        assert started.names == ("engine-0", "engine-1")
        before = [url_of(name) for name in started.names]
        processes = [listening_process(url) for url in before]
        fleet = RayFleet(started.names, poll_s=0.1)
        async with (
            asyncio.timeout(WAIT_SECONDS),
            RolloutScheduler(fleet, prompts(), config=config) as rollouts,
        ):

            def moved(number: int) -> bool:
                there = [engine.address.rstrip("/") for engine in fleet.engines]
                gone = before[number] not in there
                return gone and len(rollouts.state.fleet.control.engines) == 2

            batches = [await rollouts.next_batch()]
            os.kill(processes[0], signal.SIGKILL)
            batches.append(await rollouts.next_batch())
            await until(lambda: moved(0))
            os.kill(pid_of(ray.get_actor("engine-1")), signal.SIGKILL)
            batches.append(await rollouts.next_batch())
            await until(lambda: moved(1))
            await until(lambda: not any(runs(process) for process in processes))
            batches.append(await rollouts.next_batch())
            assert rollouts.state.in_flight.ledger.total == 0
            keys = [group.prompt.key for batch in batches for group in batch.groups]
            assert len(set(keys)) == len(keys) == 16
        logs = list(tmp_path.iterdir())  # noqa: ASYNC240
        assert len(logs) == 4
        assert all("listens at" in path.read_text() for path in logs)
        assert {path.stat().st_mode & 0o777 for path in logs} == {0o600}
        last = [listening_process(url_of(name)) for name in started.names]
    finally:
        await asyncio.to_thread(started.close)
    await until(lambda: not any(runs(process) for process in last))


FAILURES: list[dict[str, Any]] = [
    {"command": (sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)")},
    {"command": ("/bin/sh", "-c", "sleep 1000"), "ready_s": 5.0},
    {"logs": Path("/dev/null/logs")},
]


@pytest.mark.long
def test_a_server_that_does_not_start_names_its_output(cluster: None, tmp_path: Path):
    for changes in FAILURES:
        output = f"output is in {changes.get('logs', tmp_path)}"
        with pytest.raises(EngineUnreachable, match=output), servers(tmp_path, **changes):
            pass
    assert "no such model\n" in {path.read_text() for path in tmp_path.iterdir()}


@pytest.mark.long
def test_servers_that_cannot_be_placed_are_refused_and_leave_their_names_to_others(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    refused = pytest.raises(ConfigError, match=r"no node with room for sglang-0.* 1000")
    with monkeypatch.context() as patched:
        patched.setattr("aprilsched.fronts.ray.servers.PLACE_S", 1.0)
        with refused, servers(tmp_path, 2, cpus=1000):
            pass
    with servers(tmp_path):
        with (
            pytest.raises(ValueError, match=r"sglang-0.* is already taken"),
            servers(tmp_path),
        ):
            pass
        assert ray.get_actor("sglang-0")


@pytest.mark.long
def test_the_example_trains_and_goes_on_when_it_is_started_again(cluster: None, tmp_path: Path):
    run = runpy.run_path(str(EXAMPLE), run_name="example")["run"]
    first = run(servers(tmp_path / "logs"), tmp_path, 2)
    second = run(servers(tmp_path / "logs"), tmp_path, 4)
    assert (first["trained"], second["trained"]) == (2, 4)
    assert 0 < first["tokens"] < second["tokens"]
