"""Kills the coordinator with -9 on a real server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.helpers import settled
from tests.sglang.server import CpuServer

pytestmark = pytest.mark.long


def killed_and_resumed(url: str, weights: Path, tmp_path: Path) -> dict[str, Any]:
    """The summary of an `aprilsched run` that was killed and resumed."""
    prompts = tmp_path / "prompts.jsonl"
    sampling = {"max_tokens": 120, "temperature": 0, "ignore_eos": True}
    lines = [json.dumps({"input_ids": [5 + i, 7, 9], "sampling": sampling}) for i in range(40)]
    prompts.write_text("\n".join(lines) + "\n")
    out = tmp_path / "run"
    command = [sys.executable, "-m", "aprilsched"]
    start = [
        "run", "--engine", url, "--prompts", str(prompts), "--weights", str(weights),
        "--batches", "8", "--batch-groups", "2", "--group-size", "2", "--over-provision", "2",
        "--train-seconds", "1", "--out", str(out), "--quiet",
    ]  # fmt: skip
    process = subprocess.Popen([*command, *start], start_new_session=True)
    # The trainer's seconds keep the run from ending before it is killed.
    log = out / "events.jsonl"
    while not (log.exists() and b'"BatchDelivered"' in log.read_bytes()):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / "summary.json").exists()
    done = subprocess.run(
        [*command, "run", "--resume", str(out), "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.shows("checkpoints with partials", engine="SGLang")
async def test_the_command_line_goes_on_after_kill_9(
    clean_server: CpuServer, models: tuple[Path, Path], tmp_path: Path
):
    summary = await asyncio.to_thread(killed_and_resumed, clean_server.url, models[0], tmp_path)
    assert summary["batches"] == 8
    rollouts = summary["rollouts"]
    assert rollouts["lost"] == rollouts["duplicated"] == 0
    assert rollouts["delivered"] == 8 * 2 * 2
    assert rollouts["launched"] == rollouts["delivered"] + rollouts["in_flight"]
    await settled(clean_server.url)
