"""Tests a server that spans two nodes of a Ray cluster, both of which are on this machine."""

# pyright: basic
# Ray has no complete types.
from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aprilsched.errors import ConfigError
from tests.support.ray_cluster import pid_of, runs, two_nodes

ray = pytest.importorskip("ray")

from aprilsched.ray import SGLangServers  # noqa: E402

pytestmark = pytest.mark.long
LAUNCH = Path(__file__).parents[1] / "support" / "several_nodes.py"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with two_nodes():
        yield


def meeting(folder: Path) -> tuple[str, list[int]]:
    """Where the ranks of the last start meet, and their processes; empty while not all are
    there."""
    last = max((path.stat().st_mtime_ns, path) for path in folder.iterdir())[1]
    place = last.name.rpartition("-")[0]
    ranks = sorted(folder.glob(f"{place}-*"))
    texts = [path.read_text().split() for path in ranks]
    if len(ranks) < 2 or not all(texts):
        return "", []
    assert all(rest == ["2", "2"] for _, *rest in texts)
    return place, [int(pid) for pid, *_ in texts]


def until(ready: Callable[[], Any]) -> None:
    while not ready():
        time.sleep(0.1)


def test_all_ranks_are_started_again_when_one_has_ended(cluster: None, tmp_path: Path):
    meets = tmp_path / "meets"
    meets.mkdir()
    started = SGLangServers(
        1,
        ["--folder", str(meets)],
        command=[sys.executable, str(LAUNCH)],
        tensor_parallel=2,
        nodes=2,
        gpus=0,
        host="node",
        logs=tmp_path / "logs",
    )
    with started:

        def is_up() -> bool:
            try:
                return started.urls()["sglang-0"] is not None
            except ray.exceptions.RayActorError:
                return False

        def moved() -> bool:
            return meeting(meets)[0] not in ("", place) and is_up()

        assert len(started.logs()["sglang-0"]) == 2
        for what in ("its second rank", "its first rank", "sglang-0-node-1", "sglang-0"):
            until(is_up)
            place, processes = meeting(meets)
            if what.startswith("its"):
                os.kill(processes["first" not in what], signal.SIGKILL)
            else:
                os.kill(pid_of(ray.get_actor(what)), signal.SIGKILL)
            until(moved)
            until(lambda: not any(runs(process) for process in processes))  # noqa: B023
        _, processes = meeting(meets)
    until(lambda: not any(runs(process) for process in processes))


def test_loopback_is_refused_in_a_cluster_of_several_nodes(cluster: None, tmp_path: Path):
    with pytest.raises(ConfigError, match=r'the cluster has 2 nodes.*give host="node"'):
        SGLangServers(1, logs=tmp_path).start()
