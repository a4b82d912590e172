"""The campaign of experiments/learning in small: killed in the middle of a cell and continued."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.server import CpuServer

ROOT = Path(__file__).parents[2]
CAMPAIGN = ROOT / "experiments" / "learning" / "campaign.py"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="could not import 'transformers'"
)


@pytest.mark.long
def test_cells_run_and_one_that_is_killed_goes_on(
    clean_server: CpuServer, models: tuple[Path, Path], tmp_path: Path
) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    work.mkdir()
    # The campaign takes the tests' server for one that an earlier call has left.
    (work / "server.json").write_text(json.dumps({"url": clean_server.url, "pid": 0}))
    command = [
        sys.executable, CAMPAIGN, "--out", out, "--work", work, "--model", models[0], "--cpu",
        "--stays", "--cells", "april:1,auto-kept:1,streamed:1", "--seconds", "3", "--groups", "4",
        "--size", "4", "--cap", "48", "--held-out", "4", "--evaluations", "2",
    ]  # fmt: skip
    paths = f"{ROOT}:{ROOT / 'examples' / 'grpo'}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    log = work / "april-1" / "log.jsonl"
    with subprocess.Popen(list(map(str, command)), env=environment) as first:
        while not log.exists() and first.poll() is None:
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
    assert log.exists()
    subprocess.run(list(map(str, command)), env=environment, check=True)
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    cells: list[Any] = [line for line in lines if line["kind"] == "cell"]
    assert [(cell["arm"], cell["resumed"], cell["opened"]) for cell in cells] == [
        ("april", True, 2),
        ("auto-kept", False, 1),
        ("streamed", False, 1),
    ]
    for cell in cells:
        assert [line["update"] for line in cell["updates"]] == [*range(1, len(cell["updates"]) + 1)]
        assert cell["updates"][-1]["seconds"] >= 3
        assert sum(line["inexact"] for line in cell["updates"]) == 0
        assert cell["summary"]["rollouts"]["lost"] == 0
        assert cell["summary"]["rollouts"]["duplicated"] == 0
        assert cell["evaluations"][-1]["update"] > 0
