"""Trains with verl's asynchronous trainer on rollouts that aprilsched schedules.

    pip install '.[verl]'
    python examples/verl_separate_async.py --model Qwen/Qwen3-0.6B \\
        trainer.n_gpus_per_node=4 actor_rollout_ref.rollout.n_gpus_per_node=4

It needs SGLang and two groups of GPUs: one for the trainer, and one for the servers. All further
arguments are verl's own. Everything that is particular to aprilsched is the class Rollouts, its
name in the configuration, and the call of ``verl.main()``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pandas

from aprilsched import SchedulerConfig
from aprilsched.config import Dispatch
from aprilsched.trainers import verl


class Rollouts(verl.AgentLoopManager):
    """The rollouts of this training, with at most 512 requests in the servers at a time."""

    scheduler = SchedulerConfig(dispatch=Dispatch(max_in_flight=512))


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """1 for a response with the sum in it."""
    return float(ground_truth in solution_str)


def write_sums(path: Path) -> None:
    pairs = [(a, b) for a in range(10, 30) for b in range(10, 30)]
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"What is {a} + {b}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": index},
        }
        for index, (a, b) in enumerate(pairs)
    ]
    pandas.DataFrame(rows).to_parquet(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a model of Hugging Face, or its folder")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/verl"))
    options, of_verl = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    data = options.out / "sums.parquet"
    write_sums(data)
    sys.argv[1:] = [
        f"data.train_files={data}",
        f"data.val_files={data}",
        "data.train_batch_size=64",
        "data.max_prompt_length=128",
        "data.max_response_length=1024",
        f"actor_rollout_ref.model.path={options.model}",
        "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class="
        f"{Path(__file__).stem}.{Rollouts.__name__}",
        "algorithm.adv_estimator=grpo",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        f"trainer.default_local_dir={options.out.resolve()}/checkpoints",
        f"trainer.total_training_steps={options.steps}",
        "trainer.logger=[console]",
        "trainer.val_before_train=False",
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.num_warmup_batches=1",
        "trainer.v1.separate_async.parameter_sync_step=1",
        *of_verl,
    ]
    verl.main()


if __name__ == "__main__":
    main()
