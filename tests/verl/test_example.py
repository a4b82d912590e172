"""The example's program runs to its end, started as it is on a command line."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verl.on_path import ROOT, python_path
from tests.verl.server import WEIGHTS

pytest.importorskip("verl", reason="verl is not installed; use make test-verl")


def test_the_example_trains(model: Path, weights: Path, tmp_path: Path):
    program = ROOT / "examples" / "verl_separate_async.py"
    ended = subprocess.run(
        [
            sys.executable,
            program,
            f"--model={model}",
            "--steps=3",
            f"--out={tmp_path}",
            "data.train_batch_size=4",
            "data.max_prompt_length=32",
            "data.dataloader_num_workers=0",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.rollout.n=4",
            # Is refused unless the trainer waits for the scheduler.
            "++actor_rollout_ref.rollout.agent.agent_loop_manager_class="
            "tests.verl.on_cpu.Finishing",
            "actor_rollout_ref.rollout.n_gpus_per_node=2",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            "actor_rollout_ref.rollout.checkpoint_engine.backend=files",
            "algorithm.rollout_correction.bypass_mode=True",
            "reward.num_workers=1",
            "trainer.n_gpus_per_node=1",
            "trainer.device=cpu",
            "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
            "ray_kwargs.ray_init.num_cpus=16",
            "+ray_kwargs.ray_init.include_dashboard=False",
        ],
        env={
            **os.environ,
            "PYTHONPATH": python_path(),
            "RAY_AUTH_MODE": "disabled",
            "VERL_USE_EXTERNAL_MODULES": "tests.verl.registered",
            WEIGHTS: str(weights),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    for step in range(1, 4):
        assert f"step:{step} " in ended.stdout
    assert "critic/score/mean" in ended.stdout
