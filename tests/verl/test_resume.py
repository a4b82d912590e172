"""A training that is killed between two checkpoints continues from the last one: partial responses
go on where they were, and no prompt is lost, skipped or trained on twice."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.verl.conftest import FAILS, STEPS
from tests.verl.on_path import python_path
from tests.verl.server import WEIGHTS

pytest.importorskip("verl", reason="verl is not installed; use make test-verl")

SAVED, KILLED = 2, 3
"""The step of the last checkpoint, and the step in which the process is killed."""
SAMPLER = (
    "trainer.v1.sampler.custom_sampler.path=pkg://aprilsched.trainers.verl",
    "trainer.v1.sampler.custom_sampler.name=scheduled_batches",
)


def objects(path: Path) -> list[Any]:
    found = list[Any]()
    with path.open("rb") as file:
        while file.peek(1):
            found.append(pickle.load(file))  # noqa: S301 (this test has written it)
    return found


def row_of(trajectory: Any) -> int:
    """The row of the data set, whose prompt is "wN wN+1"; see conftest.py."""
    words = [token for token in trajectory.prompts.tolist() if token >= 7]
    return words[0] - 7


@pytest.fixture
def train(
    configure: Callable[..., Any], weights: Path, tmp_path: Path
) -> Callable[[str, Sequence[str], int], list[Any]]:
    """Runs a process, which may be killed; returns what it has written."""
    from omegaconf import OmegaConf

    def trains(name: str, changes: Sequence[str], killed_at: int = 0) -> list[Any]:
        config, out = tmp_path / f"{name}.yaml", tmp_path / f"{name}.pickle"
        OmegaConf.save(configure(*changes), config)
        given = [str(config), str(out), str(killed_at)]
        with (tmp_path / f"{name}.log").open("wb") as log:
            ended = subprocess.run(
                [sys.executable, "-m", "tests.verl.in_parts", *given],
                env={
                    **os.environ,
                    "RAY_AUTH_MODE": "disabled",
                    "RAY_worker_niceness": "0",
                    "PYTHONPATH": python_path(),
                    "TRANSFER_QUEUE_ENABLE": "1",
                    WEIGHTS: str(weights),
                },
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        end = (tmp_path / f"{name}.log").read_text(errors="replace")[-4000:]
        assert ended.returncode == (-signal.SIGKILL if killed_at else 0), end
        return objects(out)

    return trains


@pytest.mark.shows("single samples", "checkpoints with partials", engine="embedded", adapter="verl")
@pytest.mark.parametrize(
    ("manager", "changes"),
    [
        ("tests.verl.on_cpu.Usual", ()),
        ("tests.verl.on_cpu.Masked", SAMPLER),
        ("tests.verl.on_cpu.SingleSamples", (*SAMPLER, "algorithm.adv_estimator=aprilsched")),
    ],
)
def test_nothing_is_lost_or_doubled(
    train: Callable[..., list[Any]], weights: Path, manager: str, changes: Sequence[str]
):
    changes = [
        *changes,
        f"actor_rollout_ref.rollout.agent.agent_loop_manager_class={manager}",
        "trainer.v1.separate_async.num_warmup_batches=2",
        f"trainer.save_freq={SAVED}",
    ]
    before = train("before", changes, KILLED)
    assert len(before) == KILLED
    *after, left = train("after", [*changes, "trainer.resume_mode=auto"])
    assert len(after) == STEPS - SAVED

    steps = [*before[:SAVED], *after]
    samples = "SingleSamples" in manager
    for number, step in enumerate(steps, start=1):
        assert {each.step for each in step} == {number}
        assert len(step) == 16
    trained = [each for step in steps for each in step]
    assert len({each.key for each in trained}) == len(trained)
    rollouts = [(row_of(each), each.key.split("_")[1]) for each in trained]
    assert len(set(rollouts)) == len(rollouts)
    rows = {row for row, _ in rollouts}
    # Every prompt up to the last one was trained on, or is in flight.
    seen = rows | set(left)
    assert seen | {FAILS} == set(range(max(seen) + 1))
    if not samples:
        assert rows.isdisjoint(left)
    for each in trained:
        versions = [step for step, _ in each.stretches(weights, every=True)]
        tag = each.tag
        assert [tag["min_global_steps"], tag["max_global_steps"]] == [versions[0], versions[-1]]
        assert tag["global_steps"] <= versions[0] + 1
    # Responses that were partial in the checkpoint have tokens of both processes.
    continued = [
        each
        for step in after
        for each in step
        if each.tag["min_global_steps"] < SAVED <= each.tag["max_global_steps"]
    ]
    assert continued
