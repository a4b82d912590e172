"""Tests that prompts and outputs are in a run folder only if log_tokens is set."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from aprilsched.__main__ import main
from aprilsched.observe.log.rebuild import rebuilt_summary
from aprilsched.observe.log.run import read_run

COMMAND = [
    "run", "--quiet", "--batches", "4", "--batch-groups", "4", "--group-size", "4",
    "--over-provision", "2", "--median", "60", "--cap", "600",
]  # fmt: skip
OF_TOKENS = ("token_ids", "input_ids", "logprobs", "key", "asked")


def run(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The lines of the log."""
    assert main([*COMMAND, "--out", str(folder), *arguments]) == 0
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_the_log_has_every_token_if_it_shall(tmp_path: Path):
    lines = run(tmp_path, "--log-tokens")
    sends = [line for line in lines if line["fact"] == "AttemptSent"]
    rollout_of = {line["request_id"]: line["rollout_id"] for line in sends}
    streamed: dict[int, list[int]] = defaultdict(list)
    logprobs: dict[int, list[float]] = defaultdict(list)
    for line in lines:
        if line["fact"] == "TokensReceived":
            streamed[rollout_of[line["request_id"]]] += line["token_ids"]
            logprobs[rollout_of[line["request_id"]]] += line["logprobs"]
    batches = [line for line in lines if line["fact"] == "BatchDelivered"]
    delivered = [rollout for line in batches for rollout in line["rollouts"]]
    assert len(delivered) == 4 * 16
    for rollout in delivered:
        assert rollout["token_ids"] == streamed[rollout["rollout_id"]]
        assert rollout["logprobs"] == logprobs[rollout["rollout_id"]]
        assert len(rollout["token_ids"]) == rollout["tokens"] > 0
        assert len(rollout["input_ids"]) == rollout["prompt_tokens"] > 0


def test_the_log_has_no_token_else(tmp_path: Path):
    assert run(tmp_path)
    content = (tmp_path / "events.jsonl").read_text()
    assert [name for name in OF_TOKENS if f'"{name}"' in content] == []
    assert "log_tokens = false" in (tmp_path / "config.toml").read_text()


def test_analysis_reads_either(tmp_path: Path):
    run(tmp_path / "plain")
    run(tmp_path / "rich", "--log-tokens")
    plain, rich = (read_run(tmp_path / name) for name in ("plain", "rich"))
    assert rich.config == plain.config | {"log_tokens": True}
    assert rich.summary == plain.summary
    for part in ("attempts", "pauses", "updates", "deliveries"):
        assert getattr(rich, part) == getattr(plain, part)
    assert rebuilt_summary(tmp_path / "rich") == rebuilt_summary(tmp_path / "plain")
