"""Runs examples/openrlhf_async.py with a policy that is not trained and needs no GPU.

It is a program: ``python -m tests.support.openrlhf_on_cpu MODEL MODEL FOLDER DELIVERY ARGUMENTS…``
keeps the experiences of each step in FOLDER, and the policy's weights are those of the two models
in turn.
OpenRLHF imports flash-attn, which is for GPUs only; FOLDER gets modules of that name without
content.
"""

# pyright: basic, reportMissingImports=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

import os
import runpy
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "openrlhf_async.py"
FLASH = {
    "__init__": "",
    "bert_padding": "index_first_axis = pad_input = rearrange = unpad_input = None",
    "utils/__init__": "",
    "utils/distributed": "all_gather = None",
}


def write_stand_ins(folder: Path) -> None:
    """Modules in the name of flash-attn, without content."""
    for name, text in FLASH.items():
        path = folder / "flash_attn" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class Saves:
    """The part of OpenRLHF's strategy that a policy needs here."""

    def __init__(self, models: list[str]) -> None:
        self._models = models
        self._saved = 0

    def is_rank_0(self) -> bool:
        return True

    def save_model(self, model: Any, tokenizer: Any, output_dir: str) -> None:
        self._saved += 1
        shutil.copytree(self._models[self._saved % 2], output_dir, dirs_exist_ok=True)


def policy(models: list[str], folder: str) -> type[Any]:
    from openrlhf.trainer.ray.launcher import BaseModelActor

    class PolicyModelActor(BaseModelActor):
        def init_model_from_pretrained(
            self, strategy: Any, pretrain: str, max_steps: Any, vllm_engines: Any
        ) -> None:
            assert vllm_engines is None
            self.strategy = Saves(models)
            self.actor = self.tokenizer = None
            self.checkpoint_states: dict[str, Any] = {}
            self.steps = 0
            self.experiences: list[Any] = []

        def forward(self, sequences: Any, action_mask: Any, **_: Any) -> Any:
            return torch.zeros(action_mask.shape)

        def append(self, experience: Any) -> None:
            self.experiences.append(experience)

        def fit(self, kl_ctl: float = 0) -> dict[str, float]:
            self.steps += 1
            rows = [vars(each) for each in self.experiences]
            torch.save(rows, f"{folder}/step-{self.steps}.pt")
            self.experiences.clear()
            return {"policy_loss": 0.0}

        def save_model(self) -> None: ...

    return PolicyModelActor


def main() -> None:
    first, second, folder, delivery, *arguments = sys.argv[1:]
    import ray
    from openrlhf.trainer.ray import ppo_actor

    from aprilsched.trainers import openrlhf

    run = openrlhf.main
    openrlhf.main = lambda *given, config: run(*given, config=replace(config, delivery=delivery))
    variables = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    ray.init(num_cpus=8, num_gpus=1, include_dashboard=False, runtime_env={"env_vars": variables})
    made = policy([first, second], folder)
    ppo_actor.PolicyModelActor = ray.remote(num_gpus=1)(made)
    sys.argv[1:] = arguments
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
