"""Runs straggler rules on real vLLM servers, and holds every token to its version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from aprilsched import Rollout, VLLMFleet
from aprilsched.kernel.core.policies.straggler import StragglerRule
from tests.sglang.recorded import (
    TOLERANCE,
    Run,
    crossing,
    long_tail,
    record,
    scores,
    until_crossing,
)
from tests.vllm.conftest import KEY, reset

fleet = partial(VLLMFleet, api_key=KEY, stream_interval=16)

KINDS: dict[str, tuple[StragglerRule, dict[str, object]]] = {
    "retract": ("retract", {}),
    "in_place": ("in_place", {}),
    "abort": ("abort", {}),
    "run": ("run", {}),
    "rolling": ("run", {"refit": "rolling", "pace": "asynchronous"}),
}
"""The rules, and further settings of each."""


def differences(
    rollouts: Sequence[Rollout], models: Sequence[Path], folder: Path, python: Path
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each rollout |logprob - score| under the token's own version, and under the next one.

    Version v has the weights of ``models[v % len(models)]``.
    """
    by_model = scores(models, rollouts, folder, python=python)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for index, rollout in enumerate(rollouts):
        each = np.stack([scored[index] for scored in by_model])
        of, at = rollout.versions % len(models), np.arange(len(rollout))
        found.append(
            (
                np.abs(rollout.logprobs - each[of, at]),
                np.abs(rollout.logprobs - each[(of + 1) % len(models), at]),
            )
        )
    return found


@dataclass(frozen=True)
class Held:
    """What was held to its version.

    Attributes:
        tokens: number of tokens.
        largest: largest difference of a log-probability from that of transformers.
        versions: number of versions that sampled them.
        rollouts: number of rollouts, `crossing` of them of several versions.
    """

    tokens: int
    largest: float
    versions: int
    rollouts: int
    crossing: int


async def run_and_check(
    urls: Sequence[str],
    models: Sequence[Path],
    folder: Path,
    python: Path,
    kind: str,
    batches: int,
) -> Held:
    """Run a rule on the first of the servers, or rolling refits on both, and check every token."""
    rule, changes = KINDS[kind]
    rolling = kind == "rolling"

    async def once(number: int) -> Run:
        for url in urls:
            await reset(url, models[0])
        return await record(
            urls if rolling else urls[:1],
            models,
            rule,
            prompts=long_tail(10 * batches, longest=400, every=2),
            batches=batches,
            changes=changes,
            fleet=fleet,
            folder=folder / f"weights-{kind}-{number}" if rolling else None,
        )

    run = await (once(0) if rule == "run" else until_crossing(once))
    assert [batch.version for batch in run.batches] == list(range(batches))
    ids = [rollout.rollout_id for rollout in run.rollouts]
    assert len(set(ids)) == len(ids)
    assert not run.dropped
    assert run.counters.launched == len(ids) + len(run.in_flight)
    for rollout in run.rollouts:
        assert rollout.versions_exact
        assert rollout.versions.tolist() == run.recorder.reported(rollout)
    crossed = crossing(run)
    assert bool(crossed) == (rule != "run")
    tokens, largest, versions, others = 0, 0.0, set[int](), list[np.ndarray]()
    for rollout, (own, other) in zip(
        run.rollouts, differences(run.rollouts, models, folder, python), strict=True
    ):
        exact = len(rollout)
        if rule == "in_place":  # Later tokens attend to the keys of older weights.
            exact = int(np.argmax(np.append(rollout.versions, -1) != rollout.versions[0]))
        assert own[:exact].max() < TOLERANCE
        others.append(other[:exact])
        tokens, largest = tokens + exact, max(largest, float(own[:exact].max()))
        versions |= set(rollout.versions[:exact].tolist())
    # Not of each response: a few tokens may be as likely under both.
    assert np.median(np.concatenate(others)) > 0.5, "the checkpoints are too alike to prove it"
    return Held(tokens, largest, len(versions), len(ids), len(crossed))
