"""The scheduler and the trainer of tests/sglang/test_ray.py, each of which runs in an actor."""

# pyright: basic
# Ray has no complete types.
from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from aprilsched import (
    DistributedPublisher,
    Prompt,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SqliteStore,
)
from aprilsched.config import Pool
from aprilsched.fronts import ray as actors
from tests.sglang.trained import tensors

__all__ = ["NAME", "Trainer", "make", "trained"]

NAME = "rollouts"
LENGTHS = (20, 40, 80, 160, 320)


def prompts() -> Iterator[Prompt]:
    random = np.random.default_rng(7)
    for key in itertools.count():
        ids = np.array([key % 90 + 5, 6, 7, key % 13 + 5], dtype=np.int32)
        tokens = int(random.choice(LENGTHS, p=(0.4, 0.3, 0.15, 0.1, 0.05)))
        sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        yield Prompt(input_ids=ids, key=key, sampling=sampling)


def make(servers: Sequence[str], store: Path) -> RolloutScheduler:
    return RolloutScheduler(
        actors.RayFleet(servers, poll_s=0.5, stream_interval=16),
        prompts(),
        config=SchedulerConfig(
            batch_groups=4,
            group_size=2,
            over_provision=2.0,
            refill=Pool(together=2),
            pace="asynchronous",
            straggler="retract",
        ),
        store=SqliteStore(store),
    )


class Trainer:
    """Trains on batches, which here is to keep them, and broadcasts weights after each.

    The result of a step is in a file before the batch is acknowledged by the update. A trainer that
    takes the place of a dead one knows by the files what was trained on.
    """

    def __init__(self, servers: Sequence[str], models: Sequence[Path], results: Path) -> None:
        self._models = models
        self._results = results
        self._servers = servers

    def pid(self) -> int:
        return os.getpid()

    def train(self) -> list[int]:
        """Train until there is a file "stop"; returns the numbers of the batches that came although
        they had been trained on."""
        known: list[int] = []
        with actors.RolloutScheduler(NAME) as rollouts:
            coming = rollouts.version + 1

            def weights() -> Iterator[tuple[str, Tensor]]:
                return tensors(self._models[coming % 2])

            publisher = actors.FromTrainer(
                DistributedPublisher(weights, backend="gloo", bucket_bytes=64 * 1024),
                actors.RayFleet(self._servers),
            )
            # The trainer before this one may have died in a broadcast.
            rollouts.update_weights(publisher, acknowledge=False)
            while not (self._results / "stop").exists():
                batch = rollouts.next_batch()
                result = self._results / f"{batch.index}.pkl"
                if result.exists():
                    known.append(batch.index)
                else:
                    part = result.with_suffix(".part")
                    part.write_bytes(pickle.dumps(batch))
                    part.rename(result)
                coming = rollouts.version + 1
                rollouts.update_weights(publisher)
        return known


def trained(results: Path) -> list[Any]:
    """The batches that were trained on, in their order."""
    paths = sorted(results.glob("*.pkl"), key=lambda path: int(path.stem))
    return [pickle.loads(path.read_bytes()) for path in paths]  # noqa: S301
