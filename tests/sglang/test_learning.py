"""The campaigns of experiments/learning and learning_moe in small: killed in the middle of a cell
and continued."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.server import CpuServer

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{ROOT}:{ROOT / 'examples' / 'grpo'}",
}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="could not import 'transformers'"
)


ARMS = {
    "learning/campaign.py": "april:1,auto-kept:1,streamed:1",
    "learning_moe/mixture.py": "april-kept:1,auto-kept-own:1,april:1",
}


@pytest.fixture
def mixture(tmp_path: Path) -> Iterator[tuple[CpuServer, Path]]:
    """A server of a small mixture of experts, and the folder of its policy."""
    folder = ROOT / "experiments" / "learning_moe"
    subprocess.run(
        [sys.executable, folder / "policy.py", tmp_path / "first", "--kind", "moe-tiny",
         "--seconds", "0"], env=ENVIRONMENT, check=True,
    )  # fmt: skip
    flag = "--enable-return-routed-experts"
    with CpuServer(tmp_path / "first", tmp_path / "log.txt", flag) as server:
        server.wait_ready()
        yield server, tmp_path / "first"


@pytest.mark.long
@pytest.mark.parametrize("program", ARMS)
def test_cells_run_and_one_that_is_killed_goes_on(
    request: pytest.FixtureRequest, tmp_path: Path, program: str
) -> None:
    if "moe" in program:
        server, model = request.getfixturevalue("mixture")
        more = ["--kind", "moe-tiny"]
    else:
        server, more = request.getfixturevalue("clean_server"), []
        model = request.getfixturevalue("models")[0]
    out, work = tmp_path / "out", tmp_path / "work"
    work.mkdir()
    # The campaign takes the tests' server for one that an earlier call has left.
    (work / "server.json").write_text(json.dumps({"url": server.url, "pid": 0}))
    cells = ARMS[program]
    first, *_ = cells.split(":")
    command = [
        sys.executable, ROOT / "experiments" / program, "--out", out, "--work", work, "--model",
        model, "--cpu", "--stays", "--cells", cells, "--seconds", "3", "--groups", "4", "--size",
        "4", "--cap", "48", "--held-out", "4", "--evaluations", "2", *more,
    ]  # fmt: skip
    log = work / f"{first}-1" / "log.jsonl"
    with subprocess.Popen(list(map(str, command)), env=ENVIRONMENT) as process:
        while not log.exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert log.exists()
    subprocess.run(list(map(str, command)), env=ENVIRONMENT, check=True)
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    found: list[Any] = [line for line in lines if line["kind"] == "cell"]
    assert [(cell["arm"], cell["resumed"], cell["opened"]) for cell in found] == [
        (arm.partition(":")[0], not place, 2 - bool(place))
        for place, arm in enumerate(cells.split(","))
    ]
    for cell in found:
        assert [line["update"] for line in cell["updates"]] == [*range(1, len(cell["updates"]) + 1)]
        assert cell["updates"][-1]["seconds"] >= 3
        assert sum(line["inexact"] for line in cell["updates"]) == 0
        assert cell["summary"]["rollouts"]["lost"] == 0
        assert cell["summary"]["rollouts"]["duplicated"] == 0
        assert cell["evaluations"][-1]["update"] > 0
        if "moe" in program:
            # Engine and trainer compute in float32 here, so with the same weights they agree.
            fresh = [row for row in cell["measured"]["replayed"] if row[:2] == [0, 0]]
            assert fresh
            assert {row[3] for row in fresh} == {0}
            assert cell["measured"]["inexact_rows"] == 0
