"""Tests `aprilsched run --engine URL…` with real servers, started as a command."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.observe.log.samples import read_samples
from aprilsched.testing.contract import greedy, whole
from tests.sglang.conftest import ADMIN_KEY
from tests.sglang.helpers import settled
from tests.sglang.recorded import long_tail, try_until
from tests.sglang.server import CpuServer
from tests.support.chain import check_chain

SECONDS = 600


async def test_run_drives_real_servers_from_a_file_of_prompts(
    clean_pair: tuple[CpuServer, CpuServer], models: tuple[Path, Path], tmp_path: Path
):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(line + "\n" for line in _lines(16)))
    names = [server.url.removeprefix("http://") for server in clean_pair]

    async def once(number: int) -> tuple[Path, dict[str, Any]]:
        out = tmp_path / f"run-{number}"
        return out, await _run(
            f"--engine {clean_pair[0].url} {clean_pair[1].url} --admin-key-env KEY "
            f"--prompts {prompts} --weights {models[1]} --batches 3 --batch-groups 3 "
            f"--group-size 2 --over-provision 2 --out {out} --sample 0.1 --json"
        )

    def seen_decoding(result: tuple[Path, object]) -> bool:
        """Whether a sample saw each server decode. Responses may end between two samples."""
        sampled = read_samples(result[0]).engines
        return all(sampled[name].running.max() > 0 for name in names)

    out, summary = await try_until(once, seen_decoding, "no sample saw both servers decode")
    assert summary["batches"] == 3
    assert summary["rollouts"]["delivered"] == 3 * 3 * 2
    assert summary["rollouts"]["lost"] == summary["rollouts"]["duplicated"] == 0
    assert summary["efficiency"] is None, "nothing is known of this machine's step times"
    assert summary["staleness_max"] >= 1
    assert summary["tokens"]["generated"] >= summary["tokens"]["delivered"] > 0
    sampled = read_samples(out).engines
    for name in names:
        figures = sampled[name]
        assert np.nanmax(figures.tokens_per_s) > 0
        assert figures.kv_share.max() < 1
        assert list(figures.t) == sorted(figures.t)
    for name in ("config.toml", "events.jsonl", "summary.json"):
        assert ADMIN_KEY not in (out / name).read_text()
    for server in clean_pair:
        await settled(server.url)
    await asyncio.to_thread(check_chain, out, names)


BUILT_IN = "--median 20 --batch-groups 2 --group-size 2 --batches 1 --update-every 0 --no-report"


@pytest.mark.long
async def test_the_built_in_workload_fits_the_model_that_is_served(
    clean_server: CpuServer, engine: SGLangEngine, tmp_path: Path
):
    url = clean_server.url
    summary = await _run(f"--engine {url} {BUILT_IN} --json --out {tmp_path / 'fits'}")
    assert summary["rollouts"]["delivered"] == 4
    assert summary["rollouts"]["dropped"] == {}
    workload = tomllib.loads((tmp_path / "fits" / "config.toml").read_text())["workload"]
    facts = engine.facts
    assert facts.context_tokens is not None
    assert workload["vocab_size"] == facts.vocab_size == 512
    assert workload["cap"] == min(6000, facts.context_tokens - 8)
    for flag, text in (
        ("--vocab-size 32000", f"knows {facts.vocab_size} token ids"),
        ("--cap 1000000", f"has room for {facts.context_tokens - 8} tokens"),
        ("--prompt-tokens 1000000", f"has room for {facts.context_tokens} tokens"),
    ):
        code, _, errors = await _started(f"--engine {url} {BUILT_IN} {flag} --out {tmp_path / 'r'}")
        assert code == 2
        assert text in errors
        assert errors.count("\n") == 1
        assert not (tmp_path / "r").exists()


async def test_the_longest_response_that_fits_is_whole(engine: SGLangEngine):
    """A response may be exactly as long as the context that the server reports allows."""
    context = engine.facts.context_tokens
    assert context is not None
    prompt = np.full(context - 8, 5, dtype=np.int32)
    assert len(await whole(engine, greedy(8, prompt=prompt))) == 8


async def test_a_run_without_a_batch_is_a_failure(clean_server: CpuServer, tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"input_ids": [5] * 100_000}))
    code, _, errors = await _started(
        f"--engine {clean_server.url} --prompts {prompts} --batches 1 --batch-groups 1 "
        f"--group-size 1 --over-provision 1 --no-report --quiet --out {tmp_path / 'run'}"
    )
    assert code == 2
    assert "no group was delivered: 1 of 1 failed" in errors


def _lines(count: int) -> list[str]:
    """Prompts of one response length each, half of them long. Groups go to the two servers in turn,
    so the long ones come in pairs: with one in four, a server that had none decoded so briefly that
    no sample saw it."""
    return [
        json.dumps(
            {
                "input_ids": prompt.input_ids.tolist(),
                "key": prompt.key,
                "sampling": {"max_tokens": 240 if index % 4 in (1, 2) else 24, "ignore_eos": True},
            }
        )
        for index, prompt in enumerate(long_tail(count))
    ]


async def _run(arguments: str) -> dict[str, Any]:
    code, out, errors = await _started(arguments)
    assert code == 0, errors
    return json.loads(out)


async def _started(arguments: str) -> tuple[int | None, str, str]:
    """Run the command; returns exit code, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "aprilsched",
        "run",
        *arguments.split(),
        env={**os.environ, "KEY": ADMIN_KEY},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(SECONDS):
        out, err = await process.communicate()
    assert ADMIN_KEY not in err.decode()
    return process.returncode, out.decode(), err.decode()
