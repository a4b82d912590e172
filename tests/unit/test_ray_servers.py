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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import Prompt, RolloutScheduler, SamplingParams, SchedulerConfig
from aprilsched.errors import ConfigError, EngineUnreachable
from aprilsched.testing.contract import WAIT_SECONDS, until
from tests.support.ray_cluster import listening_process, local_cluster, pid_of, runs

ray = pytest.importorskip("ray")

from aprilsched.ray import RayFleet, SGLangServers  # noqa: E402

SERVE = (sys.executable, "-m", "aprilsched", "serve-sim")
KEY = "a-key-of-the-tests"
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_trainer.py"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_cluster(num_cpus=4):
        yield


def servers(logs: Path, count: int = 1, **changes: Any) -> SGLangServers:
    settings: dict[str, Any] = {"command": SERVE, "arguments": ["--time-scale", "0.05"]}
    return SGLangServers(count, **(settings | {"gpus": 0, "cpus": 0.1, "logs": logs} | changes))


def prompts() -> Iterator[Prompt]:
    sampling = SamplingParams(max_new_tokens=400, ignore_eos=True)
    for key in itertools.count():
        ids = np.array([key % 1000 + 1, 7], dtype=np.int32)
        yield Prompt(input_ids=ids, key=key, sampling=sampling)


def assert_logs_are_kept(folder: Path, logs: Iterable[tuple[str, ...]]) -> None:
    for (where,) in logs:
        path = Path(where.partition(":")[2])
        assert "listens at" in path.read_text()
        assert path.stat().st_mode & 0o777 == 0o600
    assert len(list(folder.iterdir())) == 4


@pytest.mark.long
async def test_servers_are_started_again_whatever_ends(cluster: None, tmp_path: Path):
    """The process of one server is killed, then the actor of the other."""
    config = SchedulerConfig(batch_groups=4, group_size=2, over_provision=2.0, straggler="abort")
    started = servers(tmp_path, 2, name="engine")
    await asyncio.to_thread(started.__enter__)
    try:
        before = started.urls()
        assert list(before) == ["engine-0", "engine-1"]
        processes = [listening_process(url) for url in before.values()]
        fleet = RayFleet(started.names, poll_s=0.1)
        async with (
            asyncio.timeout(WAIT_SECONDS),
            RolloutScheduler(fleet, prompts(), config=config) as rollouts,
        ):

            def moved(number: int) -> bool:
                there = [engine.address.rstrip("/") for engine in fleet.engines]
                gone = before[started.names[number]] not in there
                return gone and len(rollouts.state.fleet.control.engines) == 2

            batches = [await rollouts.next_batch()]
            os.kill(processes[0], signal.SIGKILL)
            batches.append(await rollouts.next_batch())
            await until(lambda: moved(0))
            os.kill(pid_of(ray.get_actor("engine-1")), signal.SIGKILL)
            batches.append(await rollouts.next_batch())
            await until(lambda: moved(1))
            assert not any(runs(process) for process in processes)
            batches.append(await rollouts.next_batch())
            assert rollouts.state.in_flight.ledger.total == 0
            keys = [group.prompt.key for batch in batches for group in batch.groups]
            assert len(set(keys)) == len(keys) == 16
        logs = await asyncio.to_thread(started.logs)
        assert_logs_are_kept(tmp_path, logs.values())
        last = [listening_process(url) for url in (await asyncio.to_thread(started.urls)).values()]
    finally:
        await asyncio.to_thread(started.close)
    await until(lambda: not any(runs(process) for process in last))


@pytest.mark.long
def test_a_server_that_does_not_start_says_why(cluster: None, tmp_path: Path):
    arguments = ["--api-key", KEY, f"--admin-api-key={KEY}2"]
    says = "import sys; print('no such model;', *sys.argv); sys.exit(3)"
    with (
        pytest.raises(EngineUnreachable, match=r"sglang-0: has ended with exit code 3") as raised,
        servers(tmp_path, command=(sys.executable, "-c", says), arguments=arguments),
    ):
        pass
    assert "ends with: no such model; -c --api-key *** --admin-api-key=*** --host" in str(
        raised.value
    )
    assert KEY not in str(raised.value)
    silent = servers(tmp_path, command=("/bin/sh", "-c", "echo loading; sleep 1000"), ready_s=1.0)
    with pytest.raises(EngineUnreachable, match=r"did not answer within 1 s.*loading"), silent:
        pass
    nowhere = servers(Path("/dev/null/logs"))
    with (
        pytest.raises(EngineUnreachable, match=r"cannot be started .*look at"),
        nowhere,
    ):
        pass
    missing = servers(tmp_path, command=("/nonexistent/python",))
    with pytest.raises(EngineUnreachable, match=r"exit code 127.*not found"), missing:
        pass


@pytest.mark.long
def test_servers_that_cannot_be_placed_are_refused_and_leave_their_names_to_others(
    cluster: None, tmp_path: Path
):
    refused = pytest.raises(ConfigError, match=r"no room for sglang-0 within 1 s, .* 1000 CPU on")
    with refused, servers(tmp_path, 2, cpus=1000, place_s=1.0):
        pass
    with servers(tmp_path):
        with pytest.raises(ConfigError, match="there is an actor 'sglang-0' already; end it"):
            servers(tmp_path).start()
        assert ray.get_actor("sglang-0")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arguments": ["--port", "30000"]}, "have --port, which the actors choose"),
        ({"arguments": ["--tp-size=4"]}, "have --tp-size, which the actors choose"),
        ({"arguments": "--log-level info"}, "lists of strings"),
        ({"gpus": 3, "nodes": 2}, "3 GPUs cannot be divided among 2 nodes"),
        ({"count": 0}, "give 1 or more"),
    ],
)
def test_arguments_that_cannot_be_used(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        servers(tmp_path, **({"count": 1} | changes))


def test_no_repr_shows_a_key(tmp_path: Path):
    made = servers(tmp_path, arguments=["--api-key", KEY], environment={"SECRET": KEY})
    assert KEY not in repr(made) + repr(made._plan) + str(made.names)


@pytest.mark.long
def test_the_example_trains_and_goes_on_when_it_is_started_again(cluster: None, tmp_path: Path):
    run = runpy.run_path(str(EXAMPLE), run_name="example")["run"]
    first = run(servers(tmp_path / "logs"), tmp_path, 2)
    second = run(servers(tmp_path / "logs"), tmp_path, 4)
    assert (first["trained"], second["trained"]) == (2, 4)
    assert 0 < first["tokens"] < second["tokens"]
