"""Tests a whole training on Ray: two SGLang server actors, a scheduler actor, and a trainer actor,
each of which dies once or twice."""

# pyright: basic
# Ray has no complete types.
from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sglang.recorded import TOLERANCE, scores
from tests.sglang.server import HERE, server_environment, server_python
from tests.support import ray_parts
from tests.support.ray_cluster import listening_process, local_cluster, pid_of, url_of

ray = pytest.importorskip("ray")

from aprilsched.fronts import ray as actors  # noqa: E402

ARGUMENTS = (
    "--device", "cpu",
    "--dtype", "float32",
    "--attention-backend", "torch_native",
    "--max-total-tokens", "65536",
    "--max-running-requests", "64",
    "--mem-fraction-static", "0.3",
    "--stream-interval", "16",
    "--skip-tokenizer-init",
    "--disable-overlap-schedule",
    "--sleep-on-idle",
    "--incremental-streaming-output",
)  # fmt: skip


@pytest.fixture
def cluster() -> Iterator[None]:
    with local_cluster(num_cpus=4):
        yield


def servers(model: Path, logs: Path) -> actors.SGLangServers:
    return actors.SGLangServers(
        2,
        ["--model-path", str(model), *ARGUMENTS],
        command=[str(server_python()), str(HERE / "launch_cpu_server.py")],
        gpus=0,
        cpus=0.5,
        logs=logs,
        # The packages of this environment are not those of the server's.
        environment={**server_environment(), "PYTHONPATH": ""},
    )


class Training:
    """The trainer's actor, which is called again when it has died."""

    def __init__(self, *arguments: Any) -> None:
        self.actor = ray.remote(ray_parts.Trainer).options(max_restarts=-1).remote(*arguments)
        self._call = self.actor.train.remote()
        self.results: Path = arguments[-1]
        self.deaths = 0

    def steps(self) -> int:
        return len(list(self.results.glob("*.pkl")))

    def until(self, ready: Callable[[], bool]) -> None:
        """Continue until `ready`, or to the end."""
        while not ready():
            done, _ = ray.wait([self._call], timeout=0.05)
            if done:
                try:
                    ray.get(done[0])
                    return
                except ray.exceptions.RayActorError:
                    self.deaths += 1
                    self._call = self._again()

    def _again(self) -> Any:
        while True:
            try:
                ray.get(self.actor.pid.remote())
                return self.actor.train.remote()
            except ray.exceptions.RayActorError:
                time.sleep(0.1)

    def stop(self) -> list[int]:
        """End the training; returns the numbers of the batches that came to the last trainer
        although they had been trained on."""
        (self.results / "stop").touch()
        self.until(lambda: False)
        return ray.get(self._call)


@pytest.mark.shows(
    "weights by broadcast",
    "lost engines",
    "checkpoints with partials",
    engine="SGLang",
    adapter="own loop",
)
@pytest.mark.long
def test_everybody_dies_and_nothing_is_lost_or_doubled(
    cluster: None, models: tuple[Path, Path], tmp_path: Path
):
    results = tmp_path / "results"
    results.mkdir()
    with servers(models[0], tmp_path / "logs") as started:
        make = partial(ray_parts.make, started.names, tmp_path / "rollouts.store")
        actors.start_scheduler(ray_parts.NAME, make, num_cpus=0.5)
        training = Training(started.names, models, results)
        first, second = started.names

        def scheduler() -> Any:
            return ray.get_actor(ray_parts.NAME)

        def dies(what: Callable[[], None], how_many: int = 4) -> None:
            after = training.steps() + how_many
            training.until(lambda: training.steps() >= after)
            what()

        dies(lambda: os.kill(listening_process(url_of(first)), signal.SIGKILL))
        dies(lambda: os.kill(pid_of(scheduler()), signal.SIGKILL))
        dies(lambda: os.kill(pid_of(training.actor), signal.SIGKILL))
        training.until(lambda: url_of(first) is not None)
        dies(lambda: ray.kill(ray.get_actor(second), no_restart=False))
        dies(lambda: ray.kill(scheduler(), no_restart=False))
        dies(lambda: ray.kill(training.actor, no_restart=False))
        training.until(lambda: url_of(second) is not None)
        dies(lambda: os.kill(pid_of(ray.get_actor(first)), signal.SIGKILL))
        dies(lambda: None)
        known = training.stop()
        with actors.RolloutScheduler(ray_parts.NAME) as rollouts:
            state = rollouts.state
            versions = rollouts.version
        actors.stop_scheduler(ray_parts.NAME)
    batches = ray_parts.trained(results)
    assert training.deaths == 2
    assert len(known) <= 1
    assert [batch.index for batch in batches] == list(range(len(batches)))
    keys = [group.prompt.key for batch in batches for group in batch.groups]
    assert len(set(keys)) == len(keys)
    assert all(len(group.rollouts) == 2 for batch in batches for group in batch.groups)
    in_flight = {group.prompt.key for group in state.in_flight.groups.values()}
    assert set(range(max(keys) + 1)) <= set(keys) | in_flight
    assert not set(keys) & in_flight
    assert state.in_flight.ledger.total == 0
    assert versions >= len(batches)
    delivered = [rollout for batch in batches for rollout in batch.rollouts]
    assert not any(rollout.stale_keys for rollout in delivered)
    # The versions of what was in flight on a process that died are not all known, and they say so.
    exact = [rollout for rollout in delivered if rollout.versions_exact]
    assert len(exact) > len(delivered) / 2
    assert sum(len(set(rollout.versions.tolist())) > 1 for rollout in exact) > len(batches)
    of_model = scores(models, exact, tmp_path)
    for index, rollout in enumerate(exact):
        first_model = rollout.versions % 2 == 0
        right = np.where(first_model, of_model[0][index], of_model[1][index])
        assert np.abs(rollout.logprobs - right).max() < TOLERANCE
