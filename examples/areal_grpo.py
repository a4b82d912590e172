"""Trains with AReaL's PPOTrainer on rollouts from SGLang servers.

    pip install areal aprilsched
    python -m sglang.launch_server --model-path Qwen/Qwen3-0.6B --port 30000
    AREAL_SPMD_MODE=1 torchrun --nproc-per-node 1 examples/areal_grpo.py \\
        --engine http://127.0.0.1:30000 --model Qwen/Qwen3-0.6B

Everything that is particular to aprilsched is in Trainer. One process trains here, on one GPU. With
more of them, one process drives AReaL's workers (``scheduler.type=local``, without
AREAL_SPMD_MODE); the engine is the same there, and that is not tested yet. It runs on a CPU
too, but learns nothing there, since AReaL's packed sequences attend to each other on a CPU.
"""

# pyright: basic, reportMissingImports=false
# AReaL has no complete types, and needs an environment of its own.
from __future__ import annotations

import argparse
from typing import Any

import torch
from areal import PPOTrainer
from areal.api.cli_args import (
    ClusterSpecConfig,
    EvaluatorConfig,
    GenerationHyperparameters,
    GRPOConfig,
    InferenceEngineConfig,
    NameResolveConfig,
    NormConfig,
    OptimizerConfig,
    PPOActorConfig,
    RecoverConfig,
    SaverConfig,
    StatsLoggerConfig,
    TrainDatasetConfig,
)
from areal.utils import name_resolve
from datasets import Dataset

from aprilsched import SchedulerConfig, SGLangFleet
from aprilsched.trainers.areal import RolloutEngine


class Trainer(PPOTrainer):
    """AReaL's trainer, with rollouts from the servers at `urls`."""

    def __init__(self, config: GRPOConfig, *, urls: list[str], **given: Any) -> None:
        self.urls = urls
        super().__init__(config, **given)

    def _init_rollout(
        self, rollout_config: Any, is_eval: bool = False, lora_path: str | None = None
    ) -> RolloutEngine:
        if not is_eval:
            # AReaL's broadcasts abort what waits inside of an engine.
            broadcasts = self.config.actor.weight_update_mode == "xccl"
            self.engine = RolloutEngine(
                SGLangFleet(self.urls),
                config=rollout_config,
                gconfig=self.config.gconfig,
                settings=SchedulerConfig(
                    over_provision=2.0,
                    straggler="abort" if broadcasts else "retract",
                    pace="asynchronous",
                ),
                recover=self.config.recover,
            )
            self.engine.initialize()
        return self.engine


def right(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **item: Any
) -> float:
    """1 for a response with the sum in it, and up to 0.1 for a short one."""
    return float(str(item["answer"]) in completion) + 0.1 / (1 + len(completion_ids) / 100)


def sums() -> Dataset:
    pairs = [(a, b) for a in range(10, 30) for b in range(10, 30)]
    return Dataset.from_list(
        [
            {"messages": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": a + b}
            for a, b in pairs
        ]
    )


def configuration(options: argparse.Namespace) -> GRPOConfig:
    gpu = torch.cuda.is_available()
    names: Any = {"experiment_name": "sums", "trial_name": "trial"}
    files: Any = {**names, "fileroot": options.out}
    gconfig = GenerationHyperparameters(n_samples=4, max_new_tokens=256)
    return GRPOConfig(
        **names,
        total_train_epochs=100,
        total_train_steps=options.steps,
        tokenizer_path=options.model,
        gconfig=gconfig,
        cluster=ClusterSpecConfig(
            fileroot=options.out,
            name_resolve=NameResolveConfig(nfs_record_root=f"{options.out}/names"),
        ),
        train_dataset=TrainDatasetConfig(path="sums", type="rl", batch_size=4, shuffle=True),
        rollout=InferenceEngineConfig(
            **names,
            backend=f"sglang:d{len(options.engine)}",
            consumer_batch_size=4,
            max_head_offpolicyness=4,  # versions, from the oldest token to the step
        ),
        actor=PPOActorConfig(
            **names,
            path=options.model,
            backend="fsdp:d1",
            attn_impl="flash_attention_2" if gpu else "sdpa",
            dtype="bfloat16" if gpu else "float32",
            optimizer=OptimizerConfig(lr=1e-5),
            ppo_n_minibatches=1,
            use_decoupled_loss=True,
            recompute_logprob=True,
            kl_ctl=0.0,
            reward_norm=NormConfig(mean_level="group", std_level="group", group_size=4),
            max_new_tokens=gconfig.max_new_tokens,
            weight_update_mode=options.weights,
        ),
        ref=None,
        saver=SaverConfig(**files),
        recover=RecoverConfig(**files),
        evaluator=EvaluatorConfig(**files),
        stats_logger=StatsLoggerConfig(**files),
    )


def main() -> RolloutEngine:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--engine", action="extend", nargs="+", required=True, help="URL of an SGLang server"
    )
    parser.add_argument("--model", required=True, help="the model of the servers")
    parser.add_argument("--weights", choices=["disk", "xccl"], default="disk")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="runs/areal")
    options = parser.parse_args()
    config = configuration(options)
    name_resolve.reconfigure(config.cluster.name_resolve)
    workflow = {"reward_fn": right, "gconfig": config.gconfig, "tokenizer": options.model}
    with Trainer(config, urls=options.engine, train_dataset=sums()) as trainer:
        trainer.train(workflow="areal.workflow.rlvr.RLVRWorkflow", workflow_kwargs=workflow)
        return trainer.engine


if __name__ == "__main__":
    main()
