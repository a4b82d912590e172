"""AReaL's recover checkpoints include what is in flight (`make test-areal`).

A trainer is killed with SIGKILL and started again, on the servers that the first one had.
"""

# pyright: basic, reportMissingImports=false
# The package has no complete types.
from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from aprilsched.testing.fixtures import start_sglang_server
from aprilsched.testing.threaded import ThreadedServer
from tests.support.areal_parts import why_not

__all__ = ["start_sglang_server"]

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.filterwarnings("ignore"),  # Its packages warn of much.
]

STEPS = 13


def run(
    url: str, folder: Path, kill: tuple[int, str] | None = None, **settings: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "tests.support.areal_recover", url, folder, str(STEPS)),
            *(json.dumps(kill), json.dumps(settings)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def done(ended: subprocess.CompletedProcess[str]) -> None:
    assert ended.returncode == 0, ended.stderr[-4000:]


@pytest.mark.shows(
    "single samples", "checkpoints with partials", engine="embedded", adapter="AReaL"
)
@pytest.mark.parametrize(
    ("place", "delivery"),
    [("step", "groups"), ("pickle", "groups"), ("info", "groups"), ("step", "samples")],
)
def test_killed_trainer_resumes_with_what_was_in_flight(
    start_sglang_server: Any, tmp_path: Path, place: str, delivery: str
) -> None:
    from tests.support import areal_recover as program

    server: ThreadedServer = start_sglang_server()
    at = 7 if place == "step" else 8  # Checkpoints are written after steps 2, 5, 8 and 11.
    killed = run(server.url, tmp_path, (at, place), delivery=delivery)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-4000:]
    before = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    done(run(server.url, tmp_path, delivery=delivery))
    every = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    after = every[len(before) :]
    assert [each["step"] for each in before] == list(range(at + 1))
    assert [each["step"] for each in after] == list(range(6, STEPS))
    history = [*before[:6], *after]
    rows = [tuple(row) for each in history for row in each["trained"]]
    # Each response is trained on once.
    assert max(Counter(rows).values()) == 1
    if delivery == "groups":
        assert len(rows) == STEPS * program.GROUPS * program.SIZE
    # The prompts are those of the dataloader, in its order.
    loader, order = program.loader(), []
    for epoch in range(9):
        loader.sampler.set_epoch(epoch)
        order += [item["number"] for items in loader for item in items]
    assert all(order[number] == item for number, item, _ in rows)
    # Each prompt was trained on, or is in flight at the end.
    count, left = json.loads((tmp_path / "left.json").read_text())
    assert {number for number, _, _ in rows}.union(left) == set(range(count))
    # Tokens of the first process are trained on in the second one.
    assert max(after[0]["staleness"]) > 0


def test_checkpoint_of_other_groups_is_refused(start_sglang_server: Any, tmp_path: Path) -> None:
    server: ThreadedServer = start_sglang_server()
    run(server.url, tmp_path, (4, "step"))
    changes: dict[str, Any]
    for changes, name in (
        ({"group_size": 2}, "group_size must be 4 as in the checkpoint"),
        ({"delivery": "samples"}, "delivery must be 'groups' as in the checkpoint"),
    ):
        ended = run(server.url, tmp_path, **changes)
        assert ended.returncode == 1
        assert f"ConfigError: {name}" in ended.stderr.splitlines()[-1]
    (file,) = tmp_path.glob("checkpoints/*/*/*/recover_info/aprilsched-2")
    file.write_bytes(file.read_bytes()[:-1000])
    ended = run(server.url, tmp_path)
    assert f"StoreError: {file} cannot be read" in ended.stderr.splitlines()[-1]


def test_kept_files_are_those_of_the_last_two_checkpoints(
    start_sglang_server: Any, tmp_path: Path
) -> None:
    done(run(start_sglang_server().url, tmp_path))
    found = sorted(tmp_path.glob("checkpoints/*/*/*/recover_info/aprilsched-*"))
    assert [path.name for path in found] == ["aprilsched-11", "aprilsched-8"]


def test_without_the_file_prompts_are_skipped_with_a_warning(
    start_sglang_server: Any, tmp_path: Path
) -> None:
    server: ThreadedServer = start_sglang_server()
    run(server.url, tmp_path, (4, "step"))
    (file,) = tmp_path.glob("checkpoints/*/*/*/recover_info/aprilsched-2")
    file.unlink()
    ended = run(server.url, tmp_path)
    done(ended)
    assert "prompts in flight at step 2 are skipped" in ended.stderr
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    rows = [row for each in itertools.islice(steps, 5, None) for row in each["trained"]]
    assert min(number for number, _, _ in rows) == 0  # A new count.
