"""OpenRLHF's own asynchronous trainer on a real vLLM server; only the policy is not trained.

The program of the example runs as on a command line. The server's weights change at every step,
and every token that the policy was given is held to its weights.
"""

# pyright: basic, reportMissingImports=false
# The packages have no complete types, and .venv does not have them.
from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sglang.recorded import TOLERANCE, sequence_scores
from tests.support.trl_run import with_tokenizer
from tests.vllm.server import VLLMServer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("openrlhf") is None,
    reason="OpenRLHF is not installed; use make test-vllm-trainers",
)

ROOT = Path(__file__).parents[2]
GROUPS, SIZE, PROMPTS = 4, 3, 24


def test_an_episode_of_openrlhfs_trainer(
    clean_server: VLLMServer, models: tuple[Path, Path], tmp_path: Path, vllm_python: Path
) -> None:
    from tests.support.openrlhf_on_cpu import write_stand_ins

    write_stand_ins(tmp_path / "packages")
    model = with_tokenizer(models[0], tmp_path / "model")
    (kept := tmp_path / "kept").mkdir()
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "tests.support.openrlhf_on_cpu", *models, kept),
            *("--engine", clean_server.url, "--model", model),
            *("--weights", tmp_path / "weights", "--out", tmp_path / "out"),
            *("--data.max_samples", str(PROMPTS), "--rollout.max_new_tokens", "200"),
            *("--rollout.batch_size", str(GROUPS), "--rollout.n_samples_per_prompt", str(SIZE)),
            *("--rollout.micro_batch_size", str(SIZE), "--train.batch_size", str(GROUPS * SIZE)),
            *("--train.micro_batch_size", str(SIZE)),
        ],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{tmp_path / 'packages'}:{ROOT}",
            "RAY_AUTH_MODE": "disabled",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    steps = [trained(path) for path in sorted(kept.glob("step-*.pt"))]
    assert len(steps) >= PROMPTS // GROUPS
    assert {len(step) for step in steps} == {GROUPS * SIZE}
    rows = [row for step in steps for row in step]
    responses = [(row["prompt"], row["response"]) for row in rows]
    scored = sequence_scores(models, responses, tmp_path, python=vllm_python)
    changed = 0
    for row, *each in zip(rows, *scored, strict=True):
        off = np.abs(np.stack(each) - row["logprobs"])
        assert off.min(0).max() < TOLERANCE
        # The two models are far apart, so each logprob identifies its model.
        whose = off.argmin(0)
        assert np.median(off.max(0)) > 0.5
        changed += len(set(whose.tolist())) > 1
        assert row["staleness"] >= (len(set(whose.tolist())) > 1)
    assert changed, "no response was interrupted by an update"


def trained(path: Path) -> list[dict[str, Any]]:
    """Return the rollouts of one step as the policy received them."""
    import torch

    found: list[dict[str, Any]] = []
    for batch in torch.load(path, weights_only=False):
        for index, tokens in enumerate(batch["sequences"]):
            length = int(batch["attention_mask"][index].sum())
            start = int(batch["action_mask"][index].nonzero()[0, 0]) + 1
            found.append(
                {
                    "prompt": tokens[:start].numpy().astype(np.int32),
                    "response": tokens[start:length].numpy().astype(np.int32),
                    "logprobs": batch["rollout_log_probs"][index][start - 1 : length - 1].numpy(),
                    "staleness": float(batch["info"]["staleness"][index]),
                }
            )
    return found
