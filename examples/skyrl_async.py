"""Trains with SkyRL's fully asynchronous trainer on rollouts that aprilsched schedules.

    pip install '.[skyrl]'
    VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-0.6B --tokens-only --port 8000
    python examples/skyrl_async.py --engine http://127.0.0.1:8000 --weights /shared/weights \\
        trainer.policy.model.path=Qwen/Qwen3-0.6B data.train_data="['gsm8k/train.parquet']"

The servers are vLLM 0.32 or later, in an environment of their own. All further arguments are
SkyRL's. Everything that is particular to aprilsched is the class Experiment.
"""

from __future__ import annotations

import argparse

from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from aprilsched import SchedulerConfig
from aprilsched.trainers.skyrl import ScheduledRollouts


class Experiment(ScheduledRollouts, BasePPOExp):
    """SkyRL's experiment, whose stragglers are paused in the engine while weights are loaded."""

    scheduler = SchedulerConfig(straggler="retract")


def configuration() -> SkyRLTrainConfig:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--engine", action="extend", nargs="+", required=True, help="URLs of vLLM servers"
    )
    parser.add_argument("--weights", required=True, help="folder that the servers see too")
    options, of_skyrl = parser.parse_known_args()
    Experiment.directory = options.weights
    return SkyRLTrainConfig.from_cli_overrides(
        [
            "trainer.fully_async.enabled=True",
            "trainer.fully_async.max_staleness_steps=4",
            "trainer.fully_async.num_parallel_generation_workers=64",
            "trainer.train_batch_size=32",
            "trainer.policy_mini_batch_size=32",
            "trainer.placement.colocate_all=False",
            "trainer.algorithm.advantage_estimator=grpo",
            "trainer.algorithm.policy_loss_type=rollout_is",
            "trainer.algorithm.use_kl_loss=False",
            "generator.batched=False",
            "generator.n_samples_per_prompt=8",
            "generator.sampling_params.max_generate_length=1024",
            "generator.inference_engine.run_engines_locally=False",
            f"generator.inference_engine.external_server_urls={options.engine}",
            "environment.env_class=gsm8k",
            *of_skyrl,
        ]
    )


def main() -> None:
    cfg = configuration()
    validate_cfg(cfg)
    initialize_ray(cfg)
    Experiment(cfg).run()


if __name__ == "__main__":
    main()
