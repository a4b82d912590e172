"""A trainer with AReaL's dataloader, recover handler and registry, which may be killed.

It is a program: ``python -m tests.support.areal_recover URL FOLDER STEPS KILL SETTINGS`` trains up
to STEPS, or from AReaL's last recover checkpoint on, and writes what each step trained on into
FOLDER. KILL is a JSON list of a step and a place: "step" before its checkpoint, "pickle" while the
scheduler's file is written, "info" before AReaL's own files are, or null. Each token is held to the
weights of its version. Only the policy is not trained: its weights are a string that grows.
"""

# pyright: basic, reportMissingImports=false
# The package has no complete types.
from __future__ import annotations

import json
import os
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from aprilsched import SchedulerConfig, SGLangFleet
from aprilsched.simulation.engine.toy_model import toy_rows, weights_key_of_version
from aprilsched.trainers import adapter
from aprilsched.trainers.areal import RolloutEngine
from tests.support.areal_parts import areal, saved
from tests.support.companions import EXPERTS
from tests.support.interrupting import half_written, killed

ITEMS, GROUPS, SIZE, BOUND, EVERY = 15, 3, 4, 2, 3
"""Items of an epoch, groups of a step, rollouts of a group, the staleness bound, and the steps from
one checkpoint to the next."""


class Policy:
    """AReaL's training engine: its weights are what was trained on, in a string."""

    def __init__(self, parts: Any, config: Any, folder: Path) -> None:
        self.parts, self.config, self.folder = parts, config, folder
        self.weights = ["new"]
        self.version = 0
        self.engine: Any = None

    def save(self, meta: Any) -> None:
        # AReaL overwrites the weights; a kill right after that would leave those of another step.
        path = Path(meta.path)
        path.mkdir(parents=True, exist_ok=True)
        (path / f"{len(self.weights)}.json").write_text(json.dumps(self.weights))

    def load(self, meta: Any) -> None:
        info = json.loads((Path(meta.path).parents[1] / "recover_info/step_info.json").read_text())
        path = Path(meta.path) / f"{info['global_step'] + 2}.json"
        self.weights = json.loads(path.read_text())

    def connect_engine(self, engine: Any, meta: Any) -> None:
        self.engine = engine

    def update_weights(self, meta: Any) -> None:
        future = self.engine.update_weights_from_disk(meta)
        saved(self.parts, self.config, self.version, Path(meta.path))
        (Path(meta.path) / "model.safetensors").write_bytes(self.weights[-1].encode())
        future.result(60)

    def set_version(self, version: int) -> None:
        self.version = version

    def key(self, version: int) -> int:
        """Return what the test server makes of the weights of a version."""
        return zlib.crc32(self.weights[version].encode()) if version else weights_key_of_version(0)


class Workflow:
    """One request, of another length for each, and the experts of each position."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts
        self.asked = 0

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        self.asked += 1
        gconfig = self.parts.Generation(max_new_tokens=20 + 400 * (self.asked % 5 == 0))
        response = await engine.agenerate(
            self.parts.Request(input_ids=list(data["ids"]), gconfig=gconfig)
        )
        tokens = response.input_tokens + response.output_tokens
        experts = np.pad(response.routed_experts, ((0, 1), (0, 0)))
        return {
            "input_ids": torch.tensor([tokens]),
            "rewards": torch.tensor([float(len(tokens) % 5)]),
            "routed_experts": torch.from_numpy(experts)[None],
        }


def check_tokens(trajectory: Any, policy: Policy, version: int) -> int:
    """Hold each token to its weights and to the bound; returns the staleness of the oldest one."""
    oldest = version
    for row in range(len(trajectory["input_ids"])):
        shown = trajectory["versions"][row][trajectory["attention_mask"][row]]
        versions = shown[3:]  # Three tokens of the prompt.
        keys = np.array([policy.key(int(each)) for each in versions], np.uint64)
        places = np.arange(2, 2 + len(versions))
        expected = toy_rows(EXPERTS, places, keys).values.reshape(len(versions), -1)
        assert (trajectory["routed_experts"][row, places].numpy() == expected).all()
        counted = trajectory["loss_mask"][row][trajectory["attention_mask"][row]][3:].bool()
        oldest = min([oldest, *versions[counted].tolist()])  # Older tokens are masked.
    assert version - oldest <= BOUND
    return version - oldest


def files(folder: Path) -> dict[str, Any]:
    return {"experiment_name": "experiment", "trial_name": "trial", "fileroot": str(folder)}


def loader() -> Any:
    from areal.api.cli_args import TrainDatasetConfig
    from areal.utils.dataloader import create_dataloader

    items = [{"number": number, "ids": [5, 6, 7 + number]} for number in range(ITEMS)]
    of = TrainDatasetConfig(path="items", type="rl", batch_size=GROUPS, shuffle=True)
    return create_dataloader(items, 0, 1, of)


def main() -> None:
    url, directory, steps, kill, changes = sys.argv[1:]
    from areal.api import FinetuneSpec, StepInfo
    from areal.api.cli_args import RecoverConfig
    from areal.utils import recover

    folder = Path(directory)
    parts = areal(folder / "names")
    given = json.loads(changes)
    config = parts.Config(
        backend="sglang:d1",
        consumer_batch_size=GROUPS,
        max_head_offpolicyness=BOUND,
        return_routed_experts=True,
        request_timeout=60,
        **files(folder),
    )
    saves = RecoverConfig(mode="on", freq_steps=EVERY, **files(folder))
    made = RolloutEngine(
        SGLangFleet([url]),
        config=config,
        gconfig=parts.Generation(n_samples=given.pop("group_size", SIZE)),
        settings=SchedulerConfig(
            over_provision=2.0, pace="asynchronous", companions=(EXPERTS,), **given
        ),
        trainer=SimpleNamespace(actor=SimpleNamespace(**unchanged()), critic=None),
        recover=saves if given.pop("recover", True) else None,
    )
    made.initialize()
    units: list[Any] = []
    following = made.scheduler.next_batch

    def next_batch(**limit: Any) -> Any:
        batch = following(**limit)
        units[:] = batch.units
        return batch

    made.scheduler.next_batch = next_batch
    policy, dataloader = Policy(parts, config, folder), loader()
    spec = FinetuneSpec(total_train_epochs=9, dataset_size=ITEMS, train_batch_size=GROUPS)
    handler = recover.RecoverHandler(saves, spec)
    state: Any = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    meta = parts.Meta(type="disk", path=str(folder / "weights"))
    policy.connect_engine(made, meta)
    info = handler.load(policy, state, state, state, dataloader, made, meta)
    start = 0 if info is None else info.last_step_info.global_step + 1
    at, place = json.loads(kill) or (None, None)
    size = made.settings.group_size
    for step in range(start, int(steps)):
        batch = made.prepare_batch(dataloader, Workflow(parts), group_size=size)
        assert made.get_version() == step
        line = {
            "step": step,
            "trained": [
                [each.prompt.key, made._task(each.prompt).item["number"], rollout.index]
                for each in units
                for rollout in each.rollouts
            ],
            "staleness": [check_tokens(each, policy, step) for each in batch],
        }
        with (folder / "steps.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        policy.weights.append(f"{policy.weights[-1]} {os.getpid()}")
        policy.update_weights(meta.with_version(step + 1))
        policy.set_version(step + 1)
        made.set_version(step + 1)
        if step == at:
            if place == "step":
                killed()
            elif place == "pickle":
                adapter.pickle.dump = half_written
            else:
                recover.RecoverInfo.dump = killed
        of = StepInfo(
            epoch=step // spec.steps_per_epoch,
            epoch_step=step % spec.steps_per_epoch,
            global_step=step,
            steps_per_epoch=spec.steps_per_epoch,
        )
        handler.dump(policy, of, state, state, state, dataloader)
    made.scheduler.on_loop(made._forget)
    (folder / "left.json").write_text(json.dumps([made._read_count, sorted(made._tasks)]))
    made.destroy()


def unchanged() -> dict[str, Any]:
    """AReaL's settings of an actor whose advantages are rewards minus values."""
    from aprilsched.trainers.areal import _UNCHANGED

    return {name: value for name, value in _UNCHANGED.items() if name != "critic"}


if __name__ == "__main__":
    main()
