"""Runs straggler rules on real servers of any kind, and holds every token to its version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aprilsched import Batch, DiskPublisher, Prompt, Rollout, RolloutScheduler, SqliteStore
from aprilsched.config import LengthBuckets
from aprilsched.kernel.core.policies.straggler import StragglerRule
from aprilsched.kernel.engines.base import Fleet
from aprilsched.types import Sample
from tests.sglang.recorded import (
    GROUP_SIZE,
    GROUPS,
    TOLERANCE,
    Recorder,
    Run,
    crossing,
    long_tail,
    record,
    scheduled,
    scores,
    until_crossing,
)

KINDS: dict[str, tuple[StragglerRule, dict[str, Any]]] = {
    "retract": ("retract", {}),
    "in_place": ("in_place", {}),
    "abort": ("abort", {}),
    "buckets": ("retract", {"refill": LengthBuckets(store=3.0), "over_provision": 1.5}),
    "samples": ("retract", {"delivery": "samples"}),
    "run": ("run", {}),
    "rolling": ("run", {"refit": "rolling", "pace": "asynchronous"}),
}
"""The rules, and further settings of each."""


@dataclass(frozen=True)
class Site:
    """Servers, of which version v has the weights of ``models[v % len(models)]``."""

    urls: Sequence[str]
    models: Sequence[Path]
    folder: Path
    reset: Callable[[str], Awaitable[None]]
    """Brings the server of an address to its initial state."""
    fleet: Callable[[Sequence[str]], Fleet] | None = None
    """Makes a fleet that is not SGLang's."""
    python: Path | None = None
    """The Python that has transformers, by default that of SGLang."""


def differences(
    rollouts: Sequence[Rollout], models: Sequence[Path], folder: Path, python: Path | None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each rollout |logprob - score| under the token's own version, and under the next one."""
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


async def run_and_check(
    site: Site,
    kind: str,
    *,
    batches: int,
    versions: int = 2,
    prompts: Sequence[Prompt] | None = None,
) -> None:
    """Run a rule on the first server, or rolling refits on all, and check every token.

    Runs until a response has tokens of this number of `versions`, if the rule allows several.
    """
    rule, changes = KINDS[kind]
    rolling = kind == "rolling"
    if kind == "samples":
        batches *= 3  # No batch waits for a long response, so one lives through more of them.

    async def once(number: int) -> Run:
        for url in site.urls:
            await site.reset(url)
        return await record(
            site.urls if rolling else site.urls[:1],
            site.models,
            rule,
            prompts=prompts or long_tail(10 * batches, longest=400, every=2),
            batches=batches,
            changes=changes,
            fleet=site.fleet,
            folder=site.folder / f"weights-{kind}-{number}" if rolling else None,
        )

    run = await (once(0) if rule == "run" else until_crossing(once, versions))
    _check_whole(run, batches)
    for rollout in run.rollouts:
        assert rollout.versions_exact
        assert rollout.versions.tolist() == run.recorder.reported(rollout)
    assert bool(crossing(run)) == (rule != "run")
    seen, others, stale = set[int](), list[np.ndarray](), [0.0]
    for rollout, (own, other) in zip(
        run.rollouts,
        differences(run.rollouts, site.models, site.folder, site.python),
        strict=True,
    ):
        exact = len(rollout)
        if rule == "in_place":  # Later tokens attend to the keys of older weights.
            exact = int(np.argmax(np.append(rollout.versions, -1) != rollout.versions[0]))
            stale += np.minimum(own, other)[exact:].tolist()
        assert own[:exact].max() < TOLERANCE
        others.append(other[:exact])
        seen |= set(rollout.versions[:exact].tolist())
    assert len(seen) > 1
    assert rule != "in_place" or max(stale) > 0.1, "only the recorded logprob is right there"
    # Not of each response: a few tokens may be as likely under both.
    assert np.median(np.concatenate(others)) > 0.5, "the checkpoints are too alike to prove it"


def _check_whole(run: Run, batches: int) -> None:
    """Check that each batch has its version and its units, and that nothing is lost."""
    assert [batch.version for batch in run.batches] == list(range(batches))
    for batch in run.batches:
        assert sum(1 for _ in batch.rollouts) == GROUPS * GROUP_SIZE
        for unit in batch.units:
            whole = [rollout.index for rollout in unit.rollouts] == list(range(GROUP_SIZE))
            assert whole or (isinstance(unit, Sample) and len(unit.siblings) == GROUP_SIZE // 2)
            for rollout in unit.rollouts:
                assert isinstance(unit.prompt.sampling, tuple)
                sampling = unit.prompt.sampling[rollout.index]
                arrays = rollout.token_ids, rollout.logprobs, rollout.versions, rollout.loss_mask
                assert set(map(len, arrays)) == {sampling.max_new_tokens}
                assert rollout.segments[-1].end == sampling.max_new_tokens
                assert rollout.finish_reason == "length"
    ids = {rollout.rollout_id for rollout in run.rollouts}
    assert len(ids) == len(run.rollouts)
    assert not ids & run.in_flight
    assert not run.dropped
    assert run.counters.launched == len(ids) + len(run.in_flight)


async def check_two_runs(site: Site) -> None:
    """A run is stopped; another one loads other weights under its number; then it resumes."""
    (url,), store = site.urls, site.folder / "run.store"

    def run(path: Path | None = None) -> RolloutScheduler:
        fleet = None if site.fleet is None else site.fleet(site.urls)
        own = None if path is None else SqliteStore(path)
        return scheduled(site.urls, Recorder(), fleet=fleet, store=own)

    batches: list[Batch] = []
    async with run(store) as rollouts:
        await rollouts.update_weights(DiskPublisher(site.models[1]))
        batches.append(await rollouts.next_batch())
    await site.reset(url)  # As a server that was started again: its weights have no number.
    async with run() as other:
        await other.update_weights(DiskPublisher(site.models[0]))
        assert other.version == 1
        await other.next_batch()
    async with run(store) as rollouts:
        assert rollouts.version == 1
        if not rollouts.state.resumed:
            await rollouts.update_weights(DiskPublisher(site.models[1]), version=3)
        batches += [await rollouts.next_batch() for _ in range(2)]
        delivered = [rollout for batch in batches for rollout in batch.rollouts]
        assert {rollout.rollout_id for rollout in batches[0].rollouts}.isdisjoint(
            rollout.rollout_id for batch in batches[2:] for rollout in batch.rollouts
        )
    for own, _ in differences(delivered, site.models, site.folder, site.python):
        assert own.max() < TOLERANCE
    async with run(store) as rollouts:
        assert rollouts.state.resumed, "its own weights are taken as they are"
        batch = await rollouts.next_batch()
    for own, _ in differences(list(batch.rollouts), site.models, site.folder, site.python):
        assert own.max() < TOLERANCE
