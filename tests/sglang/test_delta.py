"""Tests patched checkpoints on two real servers amid rollouts, token by token.

Each version has some elements of a second, very different model. One server has a file system of
its own, and its host misses two versions.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from aprilsched import Batch, DeltaPublisher, Rollout, SGLangFleet
from aprilsched.kernel.weights.delta_file import apply_delta
from tests.sglang.conftest import ADMIN_KEY
from tests.sglang.recorded import TOLERANCE, Recorder, check_whole, scheduled, sequence_scores
from tests.sglang.server import CpuServer
from tests.sglang.trained import ChangingWeights, tensors

SHARES = (0.5, 0.01, 0.03, 0.3, 0.01, 0.03, 0.01)


async def load_from(load: Any, folder: Path, path: Path, version: int) -> None:
    """Load from the folder that one host has at `path`."""
    await load(folder, version)


def mislabelled(rollout: Rollout, scores: NDArray[np.float64], lost: str) -> list[int]:
    """Return the places of tokens whose log-probability is not the one of their version.

    `scores` has the log-probability of each token under each version. If the engine `lost` was put
    on standby amid the rollout, it has not reported which versions sampled the tokens. The rollout
    is then marked as inexact, and the first tokens that arrived from that engine after an update
    may be of an earlier version.
    """
    right = np.abs(rollout.logprobs - scores) < TOLERANCE
    wrong: list[int] = []
    for part in rollout.segments:
        start = part.start
        if part.engine == lost and not rollout.versions_exact:
            while start < part.end and right[: part.version, start].any():
                start += 1
        wrong += [at for at in range(start, part.end) if not right[part.version, at]]
    return wrong


@pytest.mark.shows("deltas on disk", engine="SGLang")
@pytest.mark.long
async def test_every_token_is_of_its_version_also_after_missed_deltas(
    clean_pair: tuple[CpuServer, CpuServer], models: tuple[Path, Path], tmp_path: Path
):
    trainer = ChangingWeights(models, SHARES)
    fleet = SGLangFleet([each.url for each in clean_pair], admin_key=ADMIN_KEY, stream_interval=16)
    folders = {engine.name: tmp_path / f"host-{i}" for i, engine in enumerate(fleet.engines)}
    second = fleet.engines[1].name
    files: dict[str, list[str]] = {name: [] for name in folders}
    down: set[str] = set()

    def patch(name: str, file: Path) -> bool:
        files[name].append(file.name)
        return name not in down and apply_delta(file, folders[name])

    for engine in fleet.engines:  # The path is the same on each host.
        vars(engine)["update_from_disk"] = partial(
            load_from, engine.update_from_disk, folders[engine.name]
        )
    publisher = DeltaPublisher(
        tmp_path / "shared",
        trainer.named,
        config=models[0] / "config.json",
        local=tmp_path / "local",
        patch=patch,
    )
    batches: list[Batch] = []
    sizes: list[int] = []
    missing: list[set[str]] = []
    checkpoints = [models[0]]
    async with scheduled([], Recorder(), fleet=fleet) as rollouts:
        for version in range(1, len(SHARES) + 1):
            batches.append(await rollouts.next_batch())
            trainer.step(version)
            down = {second} if version in (4, 5) else set()
            report = await rollouts.update_weights(publisher)
            sizes.append(publisher.written_bytes)
            missing.append(set(report.quarantined))
            checkpoint = tmp_path / f"version-{version}"
            checkpoint.mkdir()
            for name in ("model.safetensors", "config.json"):
                held = folders[fleet.engines[0].name] / name
                (checkpoint / name).write_bytes(held.read_bytes())
            stored = dict(tensors(checkpoint))
            assert all(torch.equal(stored[name], own) for name, own in trainer.named())
            checkpoints.append(checkpoint)
        batches += [await rollouts.next_batch() for _ in range(2)]
        delivered = check_whole(rollouts, batches)
    assert missing == [set(), set(), set(), {second}, {second}, set(), set()]
    assert set(files[fleet.engines[0].name][1:]) == {"delta.bin"}
    # Down, it was offered both files twice. Back, its delta did not fit; the last one did.
    assert files[second][-3:] == ["delta.bin", "full.bin", "delta.bin"]
    assert sizes[1] < 0.04 * sizes[0]
    responses = [(each.prompt_ids, each.token_ids) for each in delivered]
    by_version = sequence_scores(checkpoints, responses, tmp_path)
    seen: set[int] = set()
    for index, rollout in enumerate(delivered):
        wrong = mislabelled(rollout, np.array([each[index] for each in by_version]), second)
        assert not wrong, (wrong, rollout.versions_exact, rollout.segments)
        seen |= set(rollout.versions.tolist())
    assert len(seen) > 5
    crossed = [i for i, rollout in enumerate(delivered) if len(set(rollout.versions.tolist())) > 1]
    assert crossed
    far = [np.abs(by_version[v][0] - by_version[v - 1][0]).max() for v in range(1, len(by_version))]
    assert min(far) > 0.05  # Tokens of another version would have failed.
