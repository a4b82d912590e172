"""SkyRL's fully asynchronous trainer with checkpoints, which may be killed.

It is a program: ``python -m tests.support.skyrl_resume URL FOLDER KILL SETTINGS`` trains for STEPS
steps, or resumes from SkyRL's last checkpoint in FOLDER. KILL is a JSON list of a step and a place:
"step" before its checkpoint, "pickle" while the scheduler's file is written, or null. Each token
is held to the weights of its version. Only the policy is not trained: its weights are a string.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# Runs in an environment of its own, and the packages have no complete types.
from __future__ import annotations

import asyncio
import json
import os
import sys
import typing
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import typing_extensions

from aprilsched import RolloutScheduler, SchedulerConfig, SGLangFleet
from aprilsched.simulation.engine.toy_model import toy_rows
from aprilsched.trainers import adapter
from tests.support.companions import EXPERTS
from tests.support.interrupting import half_written, killed
from tests.support.openrlhf_on_cpu import write_stand_ins
from tests.support.trl_on_cpu import tokenizer

STEPS, GROUPS, SIZE, PROMPTS, EVERY = 13, 2, 3, 10, 3
"""Steps of the run, groups of a step, rollouts of a group, prompts of an epoch, and the steps from
one checkpoint to the next. SkyRL also writes one at the end of an epoch."""


class Policy:
    """SkyRL's dispatch to its policy, whose weights are what was trained on."""

    def __init__(self) -> None:
        self.weights = "new"
        self.published: dict[str, str] = {}
        """Weights by their version."""

    def save_hf_model(self, model: str, export_dir: str, tokenizer: Any) -> None:
        (Path(export_dir) / "config.json").write_text("{}")
        (Path(export_dir) / "model.safetensors").write_bytes(self.weights.encode())

    def save_checkpoint(self, model: str, folder: str, tokenizer: Any) -> None:
        Path(folder).mkdir(parents=True)
        (Path(folder) / "weights.json").write_text(json.dumps([self.weights, self.published]))

    def load_checkpoint(self, model: str, folder: str, **_: Any) -> None:
        self.weights, self.published = json.loads((Path(folder) / "weights.json").read_text())

    def get_lcm_dp_size(self) -> int:
        return 1

    def key(self, version: int) -> int:
        """Return what the test server makes of the weights of a version."""
        return zlib.crc32(self.published[str(version)].encode())


def check_tokens(rollout: Any, policy: Policy) -> int:
    """Hold each token to its weights; returns the oldest version."""
    sampled = rollout.loss_mask
    keys = np.array([policy.key(int(each)) for each in rollout.versions[sampled]], np.uint64)
    prompt = len(rollout.prompt_ids)
    places = np.arange(prompt - 1, prompt - 1 + len(rollout.token_ids))[sampled]
    rows = rollout.companions["routed_experts"]
    found = rows.rows.values[places]
    assert (found == toy_rows(EXPERTS, places, keys).values)[rows.exact[sampled]].all()
    return int(rollout.versions[sampled].min())


def main() -> None:
    url, directory, kill, changes = sys.argv[1:]
    folder = Path(directory)
    typing.TypedDict = typing_extensions.TypedDict  # SkyRL is for Python 3.12.
    write_stand_ins(folder / "packages")
    sys.path.insert(0, str(folder / "packages"))
    import skyrl_gym
    from skyrl.train.dataset import PromptDataset
    from skyrl.train.entrypoints.main_base import BasePPOExp
    from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer

    from aprilsched.trainers.skyrl import ScheduledRollouts
    from tests.vllm.test_skyrl import configuration, environment

    skyrl_gym.register(id="words", entry_point=environment(lost=False))
    tokenizer().save_pretrained(folder / "model")
    at, place = json.loads(kill) or (None, None)
    given = json.loads(changes)
    policy, oldest = Policy(), dict[str, int]()

    class Trainer(FullyAsyncRayPPOTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.dispatch, self.ref_model = policy, None

        def convert_generation_group_mini_batch_to_training_input(
            self, groups: Any, *args: Any
        ) -> Any:
            line = {
                "step": self.global_step,
                "uids": [each.uid for each in groups],
                "scheduled": [each.global_step_when_scheduled for each in groups],
                "oldest": [oldest.get(each.uid) for each in groups],
                "responses": [each.generator_output["response_ids"] for each in groups],
            }
            with (folder / "steps.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            return super().convert_generation_group_mini_batch_to_training_input(groups, *args)

        async def _run_training(self, training_input: Any) -> dict[str, float]:
            policy.weights += f" {os.getpid()}"
            if self.global_step == at:
                if place == "step":
                    killed()
                adapter.pickle.dump = half_written
            return {}

        def build_models(self, *args: Any) -> None: ...

        def _cleanup_old_checkpoints(self) -> None: ...

    class Experiment(ScheduledRollouts, BasePPOExp):
        directory = folder / "weights"
        scheduler = SchedulerConfig(straggler="retract", companions=(EXPERTS,))

        def trainer_class(self) -> type[Any]:
            return Trainer

        def fleet(self) -> Any:
            return SGLangFleet([url])

        def get_train_dataset(self) -> Any:
            return PromptDataset(cfg.data.train_data, self.tokenizer, 64, num_workers=1)

    following = RolloutScheduler.next_batch

    async def next_batch(scheduler: Any) -> Any:
        batch = await following(scheduler)
        for unit in batch.units:
            oldest[str(unit.prompt.key)] = min(check_tokens(each, policy) for each in unit.rollouts)
        return batch

    update = RolloutScheduler.update_weights

    async def update_weights(scheduler: Any, publisher: Any, *, version: Any, **given: Any) -> Any:
        number = scheduler.version + 1 if version is None else version
        policy.published[str(number)] = policy.weights
        return await update(scheduler, publisher, version=version, **given)

    RolloutScheduler.next_batch = next_batch
    RolloutScheduler.update_weights = update_weights
    cfg = configuration(
        url,
        folder / "model",
        folder,
        **{
            "trainer.fully_async.simulate_training": False,
            "trainer.max_training_steps": STEPS,
            "trainer.epochs": 3,
            "trainer.ckpt_interval": EVERY,
            "trainer.resume_mode": "latest",
            "generator.n_samples_per_prompt": given.get("group_size", SIZE),
        },
        rows=PROMPTS,
    )
    asyncio.run(Experiment(cfg)._setup_trainer().train())


if __name__ == "__main__":
    main()
