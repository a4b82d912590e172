"""OpenRLHF's own asynchronous trainer on a real vLLM server; only the policy is not trained.

The program of the example runs as on a command line. The server's weights change at every step,
and every token that the policy was given is held to its weights.
"""

# pyright: basic, reportMissingImports=false
# The packages have no complete types, and .venv does not have them.
from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched.errors import ConfigError
from aprilsched.trainers import openrlhf as adapter
from tests.sglang.recorded import TOLERANCE, sequence_scores
from tests.support.table import each_row
from tests.support.trl_run import with_tokenizer
from tests.vllm.server import VLLMServer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("openrlhf") is None,
    reason="OpenRLHF is not installed; use make test-vllm-trainers",
)

ROOT = Path(__file__).parents[2]
GROUPS, SIZE, PROMPTS = 4, 3, 24


REWARDS = """
import torch

def reward_func(queries, prompts, labels):
    found = torch.tensor([float(len(query) % 7) for query in queries])
    return {"rewards": found, "scores": found}
"""
"""A file from which OpenRLHF takes a reward that differs within a group."""


@pytest.mark.shows(
    "retract", "weights from disk", "single samples", engine="vLLM", adapter="OpenRLHF"
)
@pytest.mark.parametrize("delivery", ["groups", "samples"])
def test_an_episode_of_openrlhfs_trainer(
    clean_server: VLLMServer,
    models: tuple[Path, Path],
    tmp_path: Path,
    vllm_python: Path,
    delivery: str,
) -> None:
    from tests.support.openrlhf_on_cpu import write_stand_ins

    write_stand_ins(tmp_path / "packages")
    model = with_tokenizer(models[0], tmp_path / "model")
    (kept := tmp_path / "kept").mkdir()
    (rewards := tmp_path / "rewards.py").write_text(REWARDS)
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "tests.support.openrlhf_on_cpu", *models, kept, delivery),
            *("--engine", clean_server.url, "--model", model),
            *("--weights", tmp_path / "weights", "--out", tmp_path / "out"),
            *("--data.max_samples", str(PROMPTS), "--rollout.max_new_tokens", "600"),
            *("--rollout.batch_size", str(GROUPS), "--rollout.n_samples_per_prompt", str(SIZE)),
            *("--rollout.micro_batch_size", str(SIZE), "--train.batch_size", str(GROUPS * SIZE)),
            *("--train.micro_batch_size", str(SIZE), "--reward.remote_url", str(rewards)),
            *("--algo.advantage.estimator", "rloo"),
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
    # Later steps may have prompts that come for the second time.
    check_advantages([row for step in steps[:3] for row in step], delivery)
    scored = sequence_scores(models, responses, tmp_path, python=vllm_python)
    changed = 0
    for row, *each in zip(rows, *scored, strict=True):
        off = np.abs(np.stack(each) - row["logprobs"])
        assert off.min(0).max() < TOLERANCE
        # The two models are far apart, so each logprob identifies its model.
        # After this prompt of unknown words both are uniform.
        whose = off.argmin(0)[off.max(0) > TOLERANCE]
        assert np.median(off.max(0)) > 0.5
        changed += len(set(whose.tolist())) > 1
        assert row["staleness"] >= (len(set(whose.tolist())) > 1)
    assert changed, "no response was interrupted by an update"


def check_advantages(rows: list[dict[str, Any]], delivery: str) -> None:
    """Check every advantage against the rewards of the prompt's other responses."""
    assert len({row["reward"] for row in rows}) > 2
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["text"], []).append(row)
        assert len(set(row["advantages"].tolist())) == 1
    whole = [group for group in groups.values() if len(group) == SIZE]
    assert whole
    assert max(map(len, groups.values())) == SIZE, "a response was trained on twice"
    for group in whole:
        for row in group:
            others = [each["reward"] for each in group if each is not row]
            # A sample has one sibling here: half of the group.
            baselines = others if delivery == "samples" else [np.mean(others)]
            assert row["advantages"][0] in [pytest.approx(row["reward"] - b) for b in baselines]


@each_row(
    ("changes", "error"),
    [
        ({"algo.advantage.estimator": "group_norm"}, 'set "rloo"'),
        ({"algo.dynamic_filtering_enable": True}, "algo.dynamic_filtering_enable is set"),
        ({"algo.kl.init_coef": 0.01}, "set it to 0, or set algo.kl.use_loss too"),
        ({"reward.overlong_buffer_len": 10.0}, "reward.overlong_buffer_len is set"),
        ({"reward.stop_properly_penalty_coef": 0.0}, "reward.stop_properly_penalty_coef is set"),
    ],
)
def test_settings_that_change_a_samples_advantage_are_refused(
    changes: dict[str, Any], error: str
) -> None:
    usual = {
        **{"vllm.enable_sleep": False, "ds.lora.rank": 0, "algo.dynamic_filtering_enable": False},
        **{"algo.advantage.estimator": "rloo", "algo.kl.init_coef": 0.0, "algo.kl.use_loss": False},
        **{"reward.overlong_buffer_len": None, "reward.stop_properly_penalty_coef": None},
    }
    adapter._check(nested(usual), "samples")
    with pytest.raises(ConfigError, match=error):
        adapter._check(nested({**usual, **changes}), "samples")


@pytest.mark.lacks("LoRA adapters", adapter="OpenRLHF", why="The servers load whole models.")
@pytest.mark.lacks("sleep", adapter="OpenRLHF", why="The servers have GPUs of their own.")
@each_row(
    ("changes", "error"),
    [
        ({"ds.lora.rank": 8}, "the servers load whole models"),
        ({"vllm.enable_sleep": True}, "the servers have GPUs of their own"),
    ],
)
def test_settings_of_other_servers_are_refused(changes: dict[str, Any], error: str) -> None:
    usual = {"vllm.enable_sleep": False, "ds.lora.rank": 0}
    adapter._check(nested(usual), "groups")
    with pytest.raises(ConfigError, match=error):
        adapter._check(nested({**usual, **changes}), "groups")


def nested(values: dict[str, Any]) -> Any:
    """OpenRLHF's arguments, which it nests by their dots."""
    from openrlhf.utils.config import hierarchize

    return hierarchize(argparse.Namespace(**values))


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
                    "text": batch["prompts"][index],
                    "reward": float(batch["info"]["reward"][index]),
                    "advantages": batch["advantages"][index][start - 1 : length - 1].numpy(),
                    "staleness": float(batch["info"]["staleness"][index]),
                }
            )
    return found
