"""OpenRLHF's asynchronous trainer with checkpoints, which waits at one place to be killed.

It is a program: ``python -m tests.support.openrlhf_resume URL FOLDER KILL SETTINGS ARGUMENTS…``
writes what each step trained on into FOLDER. KILL is a JSON list of a step and a place, "step"
before its checkpoint or "save" while it is written, or null; the file FOLDER/kill then shows that
the program has come there. Each token is held to the weights of its version. Only the policy is not
trained: its weights are words, one more after each step.
"""

# pyright: basic, reportMissingImports=false, reportIncompatibleMethodOverride=false
# Runs under another Python, with packages that the development environment does not have.
from __future__ import annotations

import json
import os
import sys
import time
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aprilsched import SchedulerConfig, SGLangFleet
from aprilsched.simulation.engine.toy_model import toy_rows
from aprilsched.trainers import openrlhf
from examples.openrlhf_async import write_sums
from tests.support.companions import EXPERTS
from tests.support.trl_on_cpu import tokenizer

SIZE = 3


class Rollouts(openrlhf.Rollouts):
    """Checks each token, and gives the trainer the number of each prompt."""

    def __init__(self, fleet: Any, directory: Path, *given: Any) -> None:
        super().__init__(fleet, directory, *given)
        self.folder = directory.parent
        self.newest: tuple[int, list[str]] = 0, []
        """The latest version, and its weights."""

    async def _publish(self) -> None:
        words = (self._staged / "model.safetensors").read_text().split()
        await super()._publish()
        self.newest = self.scheduler.version, words

    def _responses(self, batch: Any) -> Any:
        responses = super()._responses(batch)
        rollouts = [(unit, each) for unit in batch.units for each in unit.rollouts]
        for response, (unit, rollout) in zip(responses, rollouts, strict=True):
            oldest = self.check(rollout)
            assert response["extra_logs"]["staleness"] == batch.version - oldest
            response["extra_logs"] |= {
                **{"number": float(unit.prompt.key), "index": float(rollout.index)},
                **{"oldest": float(oldest), "version": float(batch.version)},
            }
        return responses

    def check(self, rollout: Any) -> int:
        version, words = self.newest
        sampled = rollout.loss_mask
        versions = rollout.versions[sampled].tolist()
        weights = [" ".join(words[: len(words) - (version - each)]) for each in versions]
        keys = np.array([zlib.crc32(each.encode()) for each in weights], np.uint64)
        prompt = len(rollout.prompt_ids)
        places = np.arange(prompt - 1, prompt - 1 + len(rollout.token_ids))[sampled]
        rows = rollout.companions["routed_experts"]
        same = rows.rows.values[places] == toy_rows(EXPERTS, places, keys).values
        assert same[rows.exact[sampled]].all()
        return min(versions)

    async def close(self) -> None:
        openrlhf.forget_delivered(self._rows, self.scheduler.state)
        left = json.dumps([self._pushed, sorted(self._rows)])
        (self.folder / "left.json").write_text(left)
        await super().close()


class Saves:
    """The part of OpenRLHF's strategy that a policy needs here."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.words = ["new"]

    def is_rank_0(self) -> bool:
        return True

    def save_model(self, model: Any, tokenizer: Any, output_dir: str) -> None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        (Path(output_dir) / "config.json").write_text("{}")
        (Path(output_dir) / "model.safetensors").write_text(" ".join(self.words))


def policy(folder: Path, kill: tuple[int, str] | None) -> type[Any]:
    from openrlhf.trainer.ray.launcher import BaseModelActor

    def wait_if(step: int, place: str) -> None:
        if kill is not None and (step, place) == tuple(kill):
            (folder / "kill").touch()
            time.sleep(600)

    class PolicyModelActor(BaseModelActor):
        def init_model_from_pretrained(
            self, strategy: Any, pretrain: str, max_steps: Any, vllm_engines: Any
        ) -> None:
            self.strategy = Saves(strategy.args)
            self.actor = self.tokenizer = None
            self.checkpoint_states: dict[str, Any] = {}
            self.experiences: list[Any] = []
            self.place = Path(strategy.args.ckpt.path) / "_actor"
            if strategy.args.ckpt.load_enable and (self.place / "latest").exists():
                file = self.place / (self.place / "latest").read_text() / "state.pt"
                saved = torch.load(file, weights_only=False)
                self.checkpoint_states, self.strategy.words = saved

        def get_checkpoint_states(self) -> dict[str, Any]:
            return self.checkpoint_states

        def forward(self, sequences: Any, action_mask: Any, **_: Any) -> Any:
            return torch.zeros(action_mask.shape)

        def append(self, experience: Any) -> None:
            self.experiences.append(experience)

        def fit(self, kl_ctl: float = 0) -> dict[str, float]:
            step = len(self.strategy.words)
            rows = [
                {
                    "prompt": each.prompts[index],
                    "tokens": each.sequences[index][each.attention_mask[index].bool()].tolist(),
                    **{
                        name: int(each.info[name][index])
                        for name in ("number", "index", "oldest", "version", "staleness")
                    },
                }
                for each in self.experiences
                for index in range(len(each.prompts))
            ]
            self.experiences.clear()
            with (folder / "steps.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "rows": rows}) + "\n")
            wait_if(step, "step")
            self.strategy.words = [*self.strategy.words, str(os.getpid())]
            return {"policy_loss": 0.0}

        def save_checkpoint(self, tag: str, client_states: Any, **_: Any) -> None:
            wait_if(client_states["global_step"], "save")
            (self.place / tag).mkdir(parents=True)
            content = client_states, self.strategy.words
            torch.save(content, self.place / tag / "state.pt")
            (self.place / "latest").write_text(tag)

        def save_model(self) -> None: ...

    return PolicyModelActor


def main() -> None:
    url, directory, kill, changes, *arguments = sys.argv[1:]
    folder = Path(directory)
    import ray

    variables = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    ray.init(num_cpus=8, num_gpus=1, include_dashboard=False, runtime_env={"env_vars": variables})
    from openrlhf.trainer.ray import ppo_actor

    write_sums(folder / "sums.jsonl")
    tokenizer().save_pretrained(folder / "model")
    ppo_actor.PolicyModelActor = ray.remote(num_gpus=1)(policy(folder, json.loads(kill)))
    openrlhf.Rollouts = Rollouts
    values = {
        **{"actor.model_name_or_path": folder / "model", "actor.num_gpus_per_node": 1},
        **{"vllm.num_engines": 1, "data.prompt_dataset": folder / "sums.jsonl"},
        **{"data.label_key": "sum", "data.max_len": 1024, "data.max_samples": 12},
        **{"reward.remote_url": folder / "rewards.py", "rollout.batch_size": 2},
        **{"rollout.n_samples_per_prompt": SIZE, "rollout.micro_batch_size": SIZE},
        **{"rollout.max_new_tokens": 200, "train.batch_size": 2 * SIZE},
        **{"train.micro_batch_size": SIZE, "train.num_episodes": 2},
        **{"algo.advantage.estimator": "rloo", "algo.kl.init_coef": 0},
        **{"algo.advantage.is_correction_level": "token", "ckpt.save_steps": 2},
        **{"ckpt.output_dir": folder / "out", "ckpt.path": folder / "ckpt"},
    }
    given = json.loads(changes)
    values |= {name: given.pop(name) for name in list(given) if "." in name}
    sys.argv[1:] = [
        *(str(part) for name, value in values.items() for part in (f"--{name}", value)),
        *("--train.async_enable", "--train.partial_rollout_enable", "--ckpt.load_enable"),
        *arguments,
    ]
    openrlhf.main(
        partial(SGLangFleet, [url]),
        folder / "weights",
        config=SchedulerConfig(
            **{
                "over_provision": 3.0,
                "max_staleness": None,
                "refill": "pool",
                "pace": "asynchronous",
                "companions": (EXPERTS,),
                **given,
            }
        ),
    )


if __name__ == "__main__":
    from tests.support import openrlhf_resume

    openrlhf_resume.main()  # Ray imports the module by its name.
