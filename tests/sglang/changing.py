"""Runs a server through weights that change by deltas, and checks every token against its version.

For long runs: the weights of each version are kept, and transformers scores every token under them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from aprilsched import Batch, DeltaPublisher, Prompt, Rollout
from aprilsched.kernel.core.policies.straggler import StragglerRule
from tests.sglang.held import Site, differences
from tests.sglang.recorded import TOLERANCE, Recorder, check_whole, long_tail, scheduled
from tests.sglang.trained import ChangingWeights, tensors

SHARES = (0.5, 0.3, 0.03, 0.3, 0.01, 0.3)
"""Shares of the weights that change in versions 1, 2, …"""
TOKENS = 17_000
"""Least number of tokens of a run. Three rules on two servers have 102,000."""
VERSIONS = 5
"""Least number of versions that sample tokens of a run."""
BATCH_GROUPS = 8


@dataclass(frozen=True)
class Checked:
    """What a run has shown.

    Attributes:
        tokens: number of tokens that transformers was asked for.
        versions: number of versions that sampled them.
        spans: number of runs of tokens of one version in one response.
        crossing: number of responses of several versions.
        largest: largest difference from the log-probability under a token's version.
        rollouts: the responses.
    """

    tokens: int
    versions: int
    spans: int
    crossing: int
    largest: float
    rollouts: list[Rollout]


def mixed_prompts(keep: tuple[str, ...]) -> Iterator[Prompt]:
    """Short and long responses; every other pair of groups is greedy, and repeats itself."""
    pairs = (long_tail(2_000, longest=600, temperature=t, every=2) for t in (0.0, 1.0))
    for index, pair in enumerate(zip(*pairs, strict=True)):
        prompt = pair[index // 2 % 2]
        own: Any = prompt.sampling
        yield replace(prompt, sampling=tuple(replace(each, keep=keep) for each in own))


def exact_length(rollout: Rollout, rule: StragglerRule) -> int:
    """Return the number of tokens that were sampled with keys of their own version alone."""
    if rule != "in_place":  # There, tokens after an update attend to the keys of older weights.
        return len(rollout)
    return int(np.argmax(np.append(rollout.versions, -1) != rollout.versions[0]))


async def run_through_deltas(
    site: Site, rule: StragglerRule, *, keep: tuple[str, ...] = ()
) -> Checked:
    """Run a rule until :data:`TOKENS` tokens of :data:`VERSIONS` versions are checked.

    The server is patched by a delta and loads it after each batch.
    """
    (url,) = site.urls
    await site.reset(url)
    recorder, trainer = Recorder(), ChangingWeights(site.models, SHARES)
    local = site.folder / "local"
    publisher = DeltaPublisher(
        site.folder / "shared",
        trainer.named,
        config=site.models[0] / "config.json",
        local=local,
    )
    checkpoints, batches, sizes = [site.models[0]], list[Batch](), list[int]()
    async with scheduled(
        site.urls,
        recorder,
        prompts=list(mixed_prompts(keep)),
        fleet=site.fleet and site.fleet(site.urls),
        straggler=rule,
        # With "keep" a new request may find the prefix of another one under older weights.
        kv_after_refit="apart" if rule == "in_place" else "recompute",
        batch_groups=BATCH_GROUPS,
        max_staleness=None,  # Responses outlive many updates.
    ) as rollouts:
        tokens, version, seen = 0, 0, set[int]()
        while tokens < TOKENS or len(seen) < VERSIONS:
            version += 1
            batches.append(await rollouts.next_batch())
            for rollout in batches[-1].rollouts:
                tokens += exact_length(rollout, rule)
                seen |= set(rollout.versions[: exact_length(rollout, rule)].tolist())
            trainer.step(version)
            await rollouts.update_weights(publisher)
            sizes.append(publisher.written_bytes)
            checkpoints.append(site.folder / f"version-{version}")
            checkpoints[-1].mkdir()
            for name in ("model.safetensors", "config.json"):
                (checkpoints[-1] / name).write_bytes((local / name).read_bytes())
            stored = dict(tensors(checkpoints[-1]))
            assert all(torch.equal(stored[name], own) for name, own in trainer.named())
        delivered = check_whole(rollouts, batches)
    assert max(sizes[1:]) < sizes[0]
    largest, others, spans, crossing = 0.0, list[np.ndarray](), 0, 0
    found = differences(delivered, checkpoints, site.folder, site.python)
    for rollout, (own, other) in zip(delivered, found, strict=True):
        assert rollout.versions_exact
        versions = rollout.versions.tolist()
        assert versions == recorder.reported(rollout)
        exact = exact_length(rollout, rule)
        largest = max(largest, float(own[:exact].max()))
        others.append(other[:exact])
        spans += 1 + int(np.count_nonzero(np.diff(rollout.versions[:exact])))
        crossing += len(set(versions)) > 1
    assert largest < TOLERANCE
    assert np.median(np.concatenate(others)) > 0.05, "the versions are too alike to prove it"
    assert crossing, "no response outlived an update"
    checked = Checked(
        tokens=tokens,
        versions=len(seen),
        spans=spans,
        crossing=crossing,
        largest=largest,
        rollouts=delivered,
    )
    print(replace(checked, rollouts=[]), file=sys.stderr)
    return checked
