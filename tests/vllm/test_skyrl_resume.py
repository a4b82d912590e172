"""SkyRL's checkpoints include what is in flight (`make test-vllm-trainers`).

A trainer is killed with SIGKILL and started again, on the server that the first one had. The server
simulates: it serves SGLang's API, and shows which weights have sampled a token.
"""

# pyright: basic
from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.testing.fixtures import start_sglang_server
from aprilsched.testing.server import SimServer

__all__ = ["start_sglang_server"]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("skyrl") is None,
    reason="SkyRL is not installed; use make test-vllm-trainers",
)

STEPS, GROUPS, EPOCH = 13, 2, 5


@pytest.fixture
def url(start_sglang_server: Any) -> str:
    config = SimConfig(stream_at_pause=False, vocab_size=512)
    return start_sglang_server(SimServer(config, time_scale=0.05)).url


def run(url: str, folder: Path, kill: tuple[int, str] | None = None, **settings: Any) -> Any:
    return subprocess.run(
        [
            *(sys.executable, "-m", "tests.support.skyrl_resume", url, folder),
            *(json.dumps(kill), json.dumps(settings)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def steps(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


@pytest.mark.shows("checkpoints with partials", engine="embedded", adapter="SkyRL")
@pytest.mark.parametrize(("at", "place", "resumed"), [(8, "step", 6), (9, "pickle", 9)])
def test_killed_trainer_resumes_with_what_was_in_flight(
    url: str, tmp_path: Path, at: int, place: str, resumed: int
) -> None:
    killed = run(url, tmp_path, (at, place))
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-4000:]
    before = steps(tmp_path)
    assert [each["step"] for each in before] == list(range(1, at + 1))
    ended = run(url, tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    after = steps(tmp_path)[at:]
    assert [each["step"] for each in after] == list(range(resumed + 1, STEPS + 1))
    history = [*before[:resumed], *after]
    for start in range(0, STEPS, EPOCH):
        uids = [uid for each in history[start : start + EPOCH] for uid in each["uids"]]
        assert len(set(uids)) == len(uids), "a prompt was trained on twice in an epoch"
        assert len(uids) == GROUPS * len(history[start : start + EPOCH])
    first = after[0]
    if place == "pickle":
        assert "is missing; what was in flight is generated from the start" in ended.stderr
        assert min(first["scheduled"]) == resumed + 1
    else:
        # Groups of the first process keep their tokens, versions and age.
        assert min(first["scheduled"]) <= resumed
        assert min(first["oldest"]) <= resumed
        assert all(each["oldest"] for each in after)


def test_checkpoint_of_other_groups_is_refused(url: str, tmp_path: Path) -> None:
    run(url, tmp_path, (4, "step"))
    ended = run(url, tmp_path, group_size=2)
    assert ended.returncode == 1
    assert "ConfigError: group_size must be 3 as in the checkpoint" in ended.stderr
