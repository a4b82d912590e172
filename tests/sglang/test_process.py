"""A scheduler in a process of its own on a real server, with weights of the trainer's process."""

# pyright: basic
# The packages have no complete types.
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aprilsched import DistributedPublisher, SGLangFleet
from aprilsched.fronts import process
from tests.sglang.server import CpuServer
from tests.support import in_a_process

TOLERANCE = 1e-4


@pytest.mark.shows("weights by broadcast", engine="SGLang", adapter="own loop")
@pytest.mark.long
def test_broadcasts_from_the_trainers_process(
    clean_server: CpuServer, models: tuple[Path, Path]
) -> None:
    """Each token has the log-probability that the weights of its version give it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    policies: list[Any] = [
        transformers.AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).eval()
        for each in models
    ]
    trained = list(policies[0].named_parameters())
    publisher = process.FromTrainer(
        DistributedPublisher(lambda: iter(trained), backend="gloo"),
        SGLangFleet([clean_server.url]),
    )
    batches = []
    with process.RolloutScheduler(in_a_process.served, clean_server.url) as rollouts:
        for version in range(1, 5):
            batches.append(rollouts.next_batch())
            trained = list(policies[version % 2].named_parameters())
            assert rollouts.update_weights(publisher).version == version
        # On a busy machine all groups of a batch may have been complete before the last update.
        while not any(4 in rollout.versions for rollout in batches[-1].rollouts):
            batches.append(rollouts.next_batch())
    versions = set()
    for rollout in (rollout for batch in batches for rollout in batch.rollouts):
        ids = torch.tensor([*rollout.prompt_ids, *rollout.token_ids]).long()
        for version in set(rollout.versions.tolist()):
            versions.add(version)
            with torch.no_grad():
                scores = policies[version % 2](ids[None]).logits[0, :-1].log_softmax(-1)
            right = scores.gather(1, ids[1:, None])[-len(rollout) :, 0].numpy()
            of_it = rollout.versions == version
            assert abs(right - rollout.logprobs)[of_it].max() < TOLERANCE
    assert {0, 4} <= versions
