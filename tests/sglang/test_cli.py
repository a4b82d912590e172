"""`aprilsched run --engine URL…` against real servers, as a person starts it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from aprilsched.analysis.samples import read_samples
from tests.sglang.conftest import ADMIN_KEY
from tests.sglang.helpers import settled
from tests.sglang.recorded import long_tail
from tests.sglang.server import CpuServer
from tests.support.chain import check_chain

SECONDS = 240


async def test_run_drives_real_servers_from_a_file_of_prompts(
    clean_pair: tuple[CpuServer, CpuServer], models: tuple[Path, Path], tmp_path: Path
):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(line + "\n" for line in _lines(16)))
    out = tmp_path / "run"
    summary = await _run(
        f"--engine {clean_pair[0].url} {clean_pair[1].url} --admin-key-env KEY "
        f"--prompts {prompts} --weights {models[1]} --batches 3 --batch-groups 3 --group-size 2 "
        f"--over-provision 2 --out {out} --sample 0.1 --json"
    )
    assert summary["batches"] == 3
    assert summary["rollouts"]["delivered"] == 3 * 3 * 2
    assert summary["rollouts"]["lost"] == summary["rollouts"]["duplicated"] == 0
    assert summary["efficiency"] is None, "nothing is known of this machine's step times"
    assert summary["staleness"]["max"] >= 1
    assert summary["tokens"]["generated"] >= summary["tokens"]["delivered"] > 0
    sampled = read_samples(out).engines
    for server in clean_pair:
        figures = sampled[server.url.removeprefix("http://")]
        assert figures.running.max() > 0
        assert np.nanmax(figures.tokens_per_s) > 0
        assert figures.kv_share.max() < 1
        assert list(figures.t) == sorted(figures.t)
    for name in ("config.toml", "events.jsonl", "summary.json"):
        assert ADMIN_KEY not in (out / name).read_text()
    for server in clean_pair:
        await settled(server.url)
    names = [server.url.removeprefix("http://") for server in clean_pair]
    await asyncio.to_thread(check_chain, out, names)


def _lines(count: int) -> list[str]:
    """Prompts of one response length each, one in four of them long."""
    return [
        json.dumps(
            {
                "input_ids": prompt.input_ids.tolist(),
                "key": prompt.key,
                "sampling": {"max_tokens": 240 if index % 4 == 1 else 24, "ignore_eos": True},
            }
        )
        for index, prompt in enumerate(long_tail(count))
    ]


async def _run(arguments: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "aprilsched.cli",
        "run",
        *arguments.split(),
        env={**os.environ, "KEY": ADMIN_KEY},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(SECONDS):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert ADMIN_KEY not in err.decode()
    return json.loads(out)
