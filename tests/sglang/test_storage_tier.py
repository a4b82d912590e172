"""Tests a prefix cache whose storage keeps the KV of older weights through a flush."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from aprilsched import Prompt, SamplingParams
from aprilsched.cli.doctor import examine
from aprilsched.kernel.core.messages.facts import EngineLost
from aprilsched.kernel.core.policies.straggler import StragglerRule
from tests.sglang.helpers import reset
from tests.sglang.recorded import TOLERANCE, Run, record, scores, until_crossing
from tests.sglang.server import CpuServer

TIER = (
    *("--enable-hierarchical-cache", "--hicache-storage-backend", "file", "--hicache-size", "1"),
    *("--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"),
    *("--page-size", "16", "--hicache-storage-prefetch-policy", "wait_complete"),
)
PREFIX = 400
"""Number of tokens that the prompts have in common; SGLang looks only for 256 or more."""


class TieredServer(CpuServer):
    """A server whose hierarchical cache has files for its last tier."""

    def _environment(self) -> dict[str, str]:
        return {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self.log.parent / "kv")}


@pytest.fixture(scope="module")
def tiered(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TieredServer]:
    folder = tmp_path_factory.mktemp("tiered")
    (folder / "kv").mkdir()
    with TieredServer(models[0], folder / "log.txt", *TIER) as server:
        server.wait_ready()
        yield server


def prompts(count: int) -> list[Prompt]:
    """Prompts of one long prefix; every third group has a long response."""
    rng = np.random.default_rng(3)
    prefix = rng.integers(3, 500, size=PREFIX).astype(np.int32)
    return [
        Prompt(
            input_ids=np.append(prefix, np.int32(10 + index % 5)),
            key=index,
            sampling=tuple(
                SamplingParams(max_new_tokens=length, temperature=1.0, ignore_eos=True)
                for length in (12, 16, 24, 24 if index % 3 else 400)
            ),
        )
        for index in range(count)
    ]


def worst(run: Run, models: tuple[Path, Path], folder: Path) -> float:
    """The largest difference of a logprob to that of its version's weights in transformers."""
    both = scores(models, run.rollouts, folder)
    return max(
        float(np.abs(np.choose(r.versions % 2, [first[i], second[i]]) - r.logprobs).max())
        for first, second in [both]
        for i, r in enumerate(run.rollouts)
    )


@pytest.mark.shows("KV stores outside", engine="SGLang")
@pytest.mark.parametrize("rule", ["retract", "abort", "run"])
async def test_no_token_attends_to_stored_keys_of_older_weights(
    tiered: TieredServer, models: tuple[Path, Path], tmp_path: Path, rule: StragglerRule
) -> None:
    async def once(number: int) -> Run:
        await reset(tiered.url, models[0])
        return await record([tiered.url], models, rule, prompts=prompts(60), batches=4)

    # Under the rule "run", no response outlives an update.
    run = await (once(0) if rule == "run" else until_crossing(once))
    # A flush that no copy of KV lets through costs the engine.
    assert not any(isinstance(command, EngineLost) for command in run.recorder.commands)
    assert all(r.versions_exact and not r.stale_keys for r in run.rollouts)
    assert worst(run, models, tmp_path) < TOLERANCE


async def test_doctor_reports_the_tier(tiered: TieredServer, models: tuple[Path, Path]) -> None:
    await reset(tiered.url, models[0])
    found = {finding.check: finding for finding in await examine(tiered.url)}
    assert found["KV tier"].status == "warn"
    assert "may survive a flush" in found["KV tier"].seen
    assert not {name for name, finding in found.items() if finding.status == "fail"}
