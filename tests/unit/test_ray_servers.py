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
KEY = "a-key-of-the-tests"
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


FAILURES: list[tuple[dict[str, Any], str]] = [
    (
        {
            "command": (
                sys.executable, "-c",
                "import sys; print('no such model;', *sys.argv); sys.exit(3)",
            ),
            "arguments": ["--api-key", KEY, f"--admin-api-key={KEY}2"],
        },
        r"sglang-0: has ended with exit code 3; .* ends with: no such model; -c --api-key \*\*\* "
        r"--admin-api-key=\*\*\*2? --host",
    ),
    (
        {"command": ("/bin/sh", "-c", "echo loading; sleep 1000"), "ready_s": 1.0},
        "did not answer within 1 s.*loading",
    ),
    ({"logs": Path("/dev/null/logs")}, "Not a directory"),
    ({"command": ("/nonexistent/python",)}, "exit code 1.*No such file"),
]  # fmt: skip


@pytest.mark.long
def test_a_server_that_does_not_start_says_why(cluster: None, tmp_path: Path):
    for changes, message in FAILURES:
        with (
            pytest.raises(EngineUnreachable, match=message) as raised,
            servers(tmp_path, **changes),
        ):
            pass
        assert KEY not in str(raised.value)


@pytest.mark.long
def test_servers_that_cannot_be_placed_are_refused_and_leave_their_names_to_others(
    cluster: None, tmp_path: Path
):
    refused = pytest.raises(ConfigError, match=r"no room for sglang-0 within 1 s, .* 1000 CPU on")
    with refused, servers(tmp_path, 2, cpus=1000, place_s=1.0):
        pass
    with servers(tmp_path):
        with (
            pytest.raises(ConfigError, match="there is an actor 'sglang-0' already"),
            servers(tmp_path),
        ):
            pass
        assert ray.get_actor("sglang-0")


def test_arguments_that_cannot_be_used(tmp_path: Path):
    with pytest.raises(ConfigError, match="lists of strings"):
        servers(tmp_path, arguments="--log-level info")
    with pytest.raises(ConfigError, match="count must be 1 or more, got 0"):
        servers(tmp_path, 0)


@pytest.mark.long
def test_the_example_trains_and_goes_on_when_it_is_started_again(cluster: None, tmp_path: Path):
    run = runpy.run_path(str(EXAMPLE), run_name="example")["run"]
    first = run(servers(tmp_path / "logs"), tmp_path, 2)
    second = run(servers(tmp_path / "logs"), tmp_path, 4)
    assert (first["trained"], second["trained"]) == (2, 4)
    assert 0 < first["tokens"] < second["tokens"]
