"""OpenRLHF's checkpoints include what is in flight (`make test-vllm-trainers`).

All processes of a trainer are killed with SIGKILL, and it is started again on the server that the
first one had. The server simulates: it serves SGLang's API, and shows which weights have sampled a
token.
"""

# pyright: basic
from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.simulation.workload import LongTailWorkload
from aprilsched.testing.fixtures import start_sglang_server
from aprilsched.testing.served import DrawnLengths
from aprilsched.testing.server import SimServer
from tests.support.openrlhf_on_cpu import write_stand_ins

__all__ = ["start_sglang_server"]

psutil: Any = pytest.importorskip("psutil")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("openrlhf") is None,
    reason="OpenRLHF is not installed; use make test-vllm-trainers",
)

ROOT = Path(__file__).parents[2]
GROUPS, SIZE, PROMPTS = 2, 3, 12
REWARDS = """
import torch

def reward_func(queries, prompts, labels):
    found = torch.tensor([float(len(query) % 7) for query in queries])
    return {"rewards": found, "scores": found}
"""


@pytest.fixture
def url(start_sglang_server: Any) -> str:
    config = SimConfig(stream_at_pause=False, vocab_size=512)
    # Long responses outlive updates, also on a busy machine.
    lengths = DrawnLengths(LongTailWorkload(median=40, sigma=1.5, cap=200, group_size=1))
    return start_sglang_server(SimServer(config, time_scale=2, lengths=lengths)).url


def run(
    url: str, folder: Path, kill: tuple[int, str] | None = None, **settings: Any
) -> tuple[int, str]:
    """Run the program, and kill it where `kill` says; returns its status and its output."""
    write_stand_ins(folder / "packages")
    (folder / "rewards.py").write_text(REWARDS)
    given = json.dumps(kill), json.dumps(settings)
    with (folder / "output").open("w+") as output:
        program = subprocess.Popen(
            [sys.executable, "-m", "tests.support.openrlhf_resume", url, folder, *given],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{folder / 'packages'}:{ROOT}",
                "RAY_AUTH_MODE": "disabled",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
        while program.poll() is None and not (folder / "kill").exists():
            time.sleep(0.1)
        every: list[Any] = []
        if program.poll() is None:
            own = psutil.Process(program.pid)
            every = [*own.children(recursive=True), own]
        for each in every:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        status = program.wait()
        psutil.wait_procs(every)
    (folder / "kill").unlink(missing_ok=True)
    return status, (folder / "output").read_text()


def steps(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


@pytest.mark.shows(
    "single samples", "checkpoints with partials", engine="embedded", adapter="OpenRLHF"
)
@pytest.mark.parametrize(
    ("at", "place", "resumed", "delivery"),
    [(5, "step", 4, "groups"), (4, "save", 2, "groups"), (5, "step", 4, "samples")],
)
def test_killed_trainer_resumes_with_what_was_in_flight(
    url: str, tmp_path: Path, at: int, place: str, resumed: int, delivery: str
) -> None:
    status, output = run(url, tmp_path, (at, place), delivery=delivery)
    assert status == -9, output[-6000:]
    before = steps(tmp_path)
    assert [each["step"] for each in before] == list(range(1, at + 1))
    status, output = run(url, tmp_path, delivery=delivery)
    assert status == 0, output[-6000:]
    after = steps(tmp_path)[at:]
    assert [each["step"] for each in after] == list(range(resumed + 1, resumed + 1 + len(after)))
    rows = [row for each in [*before[:resumed], *after] for row in each["rows"]]
    # Each response is trained on once.
    assert max(Counter((row["number"], row["index"]) for row in rows).values()) == 1
    # Each prompt was trained on, or is in flight at the end; those of an epoch differ.
    count, left = json.loads((tmp_path / "left.json").read_text())
    assert {row["number"] for row in rows}.union(left) == set(range(count))
    texts: dict[int, set[str]] = {}
    for row in rows:
        texts.setdefault(row["number"] // PROMPTS, set()).add(f"{row['number']} {row['prompt']}")
    for epoch in texts.values():
        assert len({each.split(" ", 1)[0] for each in epoch}) == len(epoch)
        assert len({each.split(" ", 1)[1] for each in epoch}) == len(epoch)
    # The weights of step n have version n + 1, also in the second process, since the first ones are
    # published too. Responses of the first process keep their tokens and their age.
    first = after[0]["rows"]
    assert {row["version"] for row in first} <= {resumed + 1}
    assert min(row["oldest"] for row in first) <= resumed
    assert all(row["staleness"] == row["version"] - row["oldest"] for row in rows)


def test_checkpoint_of_other_groups_is_refused(url: str, tmp_path: Path) -> None:
    run(url, tmp_path, (3, "step"))
    changes: dict[str, Any] = {"rollout.n_samples_per_prompt": 2, "train.batch_size": 4}
    status, output = run(url, tmp_path, **changes)
    assert status != 0
    assert "ConfigError: group_size must be 3 as in the checkpoint" in output
