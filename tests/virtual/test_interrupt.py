"""Tests Ctrl-C in the middle of a long run: the run ends at once and has its summary."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

SECONDS = 600
"""Timeout in seconds. The run would take hours, and ends about a second after Ctrl-C."""


def test_ctrl_c_ends_a_run(tmp_path: Path):
    out = tmp_path / "run"
    arguments = ["run", "--batches", "1000000", "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, "-m", "aprilsched", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        # A test runner in the background ignores Ctrl-C, and its child processes inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        try:
            _wait_for_events(out / "events.jsonl", process)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "never awaited" not in errors
    summary = json.loads((out / "summary.json").read_text())
    assert summary["interrupted"]
    assert summary["error"] is None
    assert summary["rollouts"]["lost"] == summary["rollouts"]["duplicated"] == 0
    assert summary["rollouts"]["in_flight"] > 0
    last = (out / "events.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["t"] > 0


def _wait_for_events(path: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the log has events of a later virtual time; the file exists before that."""
    while not _has_begun(path):
        assert process.poll() is None
        time.sleep(0.05)


def _has_begun(path: Path) -> bool:
    if not path.exists():
        return False
    whole = path.read_bytes().split(b"\n")[:-1]
    return bool(whole) and json.loads(whole[-1])["t"] > 0
