"""Trains on Ray: SGLang servers, the scheduler and the trainer are actors, and any of them may die.

::

    pip install '.[ray,torch]' sglang transformers
    python examples/ray_trainer.py Qwen/Qwen3-0.6B --servers 2 --folder /shared/run

The folder must be on a disk that all nodes have. A second call with the same folder goes on where
the first one ended.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aprilsched
from aprilsched import DiskPublisher, Prompt, Rollout, SchedulerConfig, SqliteStore
from aprilsched.fronts.ray import (
    RayFleet,
    RolloutScheduler,
    SGLangServers,
    start_scheduler,
    stop_scheduler,
)

NAME = "rollouts"


def prompts() -> Iterator[Prompt]:
    """Token ids that stand for yours."""
    for key in range(1_000_000):
        yield Prompt(input_ids=[key % 100 + 5, 6, 7], key=key)  # type: ignore[arg-type]


def score(rollout: Rollout, prompt: Prompt) -> float:
    """A reward that stands for yours: short responses are better."""
    return -float(len(rollout))


def make(servers: Sequence[str], folder: Path) -> aprilsched.RolloutScheduler:
    """The scheduler; called in its actor, and again whenever Ray has restarted that."""
    return aprilsched.RolloutScheduler(
        RayFleet(servers),
        prompts(),
        reward=score,
        config=SchedulerConfig(batch_groups=4, group_size=4, over_provision=1.5),
        store=SqliteStore(folder / "rollouts.store"),
    )


class Trainer:
    """The trainer's actor. What it trains is up to you; here it counts tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights = folder / "weights"
        self.checkpoint = folder / "trainer.json"
        known = json.loads(self.checkpoint.read_text()) if self.checkpoint.exists() else {}
        self.trained: int = known.get("trained", -1)
        self.tokens: int = known.get("tokens", 0)

    def train(self, steps: int) -> dict[str, Any]:
        """Train until `steps` batches were trained on."""
        with RolloutScheduler(NAME) as rollouts:
            # The servers may have the weights of an earlier run, and the trainer before this one
            # may have died while it moved some.
            rollouts.update_weights(self.publisher(), acknowledge=False)
            while self.trained < steps - 1:
                batch = rollouts.next_batch()
                if batch.index > self.trained:
                    self.step(batch)
                rollouts.update_weights(self.publisher())  # and the batch is acknowledged
        return {"trained": self.trained + 1, "tokens": self.tokens}

    def step(self, batch: aprilsched.Batch) -> None:
        """Train on a batch, and save what came of it."""
        self.tokens += batch.tokens
        self.trained = batch.index
        part = self.checkpoint.with_suffix(".part")
        part.write_text(json.dumps({"trained": self.trained, "tokens": self.tokens}))
        part.rename(self.checkpoint)

    def publisher(self) -> DiskPublisher:
        """Write the weights, and tell who loads them."""
        self.weights.mkdir(exist_ok=True)
        (self.weights / "config.json").write_text("{}")
        (self.weights / "model.safetensors").write_bytes((self.trained + 1).to_bytes(8, "little"))
        return DiskPublisher(self.weights)


def run(servers: SGLangServers, folder: Path, steps: int) -> dict[str, Any]:
    """Start everything, and train."""
    import ray

    with servers:
        start_scheduler(NAME, partial(make, servers.names, folder))
        # Ray restarts the trainer when it dies, and calls it again.
        options = {"max_restarts": -1, "max_task_retries": -1, "num_gpus": 0}
        trainer = ray.remote(Trainer).options(**options).remote(folder)
        trained = ray.get(trainer.train.remote(steps))
        stop_scheduler(NAME)
        return trained


def main() -> None:
    """Run with real servers."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--host", help='"node" in a cluster of several nodes')
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    ray.init(namespace="aprilsched-example")
    servers = SGLangServers(
        given.servers,
        ["--model-path", given.model, "--tp-size", str(given.tensor_parallel)],
        gpus=given.tensor_parallel,
        host=given.host,
        logs=given.folder / "logs",
    )
    print(run(servers, given.folder.absolute(), given.steps))


if __name__ == "__main__":
    main()
