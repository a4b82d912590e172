"""The pytest fixtures of aprilsched.testing, used as another project would use them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from urllib.request import urlopen

import pytest

from aprilsched.errors import ConfigError
from aprilsched.testing import SimServer, ThreadedServer

ROOT = Path(__file__).resolve().parents[2]

TRAINER = """
import asyncio

from aprilsched import Prompt, RolloutScheduler, SamplingParams, SchedulerConfig, SGLangFleet

CONFIG = SchedulerConfig(batch_groups=2, group_size=2, sampling=SamplingParams(max_new_tokens=8))


def test_a_trainer_gets_its_batch(start_sglang_server):
    urls = [start_sglang_server().url for _ in range(2)]

    async def train():
        prompts = (Prompt(input_ids=[1, 2, place]) for place in range(100))
        async with RolloutScheduler(SGLangFleet(urls), prompts, config=CONFIG) as rollouts:
            return await rollouts.next_batch()

    assert [len(rollout) for rollout in asyncio.run(train()).rollouts] == [8] * 4
"""


def test_another_project_s_tests_have_servers_by_one_line(tmp_path: Path):
    guide = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    guide = guide.partition("### With pytest")[2].partition("### Without")[0]
    line, client, faulty = re.findall(r"^```python\n(.*?)^```", guide, flags=re.DOTALL | re.M)
    (tmp_path / "conftest.py").write_text(line)
    (tmp_path / "test_client.py").write_text(client + faulty)
    (tmp_path / "test_trainer.py").write_text(TRAINER)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert "3 passed" in ended.stdout, ended.stdout + ended.stderr
    assert line.count("\n") == 1


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "test server" in thread.name]


def test_a_server_in_a_thread_leaves_nothing_behind():
    with ThreadedServer() as server:
        with urlopen(f"{server.url}/health") as answer:
            assert answer.status == 200
        server.crash()
        assert not server.listening
        with pytest.raises(RuntimeError, match="started already"):
            server.start()
    server.stop()
    with pytest.raises(RuntimeError, match="not started"):
        server.crash()
    assert threads() == []


def test_a_server_that_cannot_listen_leaves_no_thread():
    with ThreadedServer() as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match="Cannot listen on"):
            ThreadedServer(SimServer(port=port)).start()
    assert threads() == []
