"""Rewards, metrics and file names in slime's form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aprilsched.types import Batch


def reward_number(sample: Any, key: str | None) -> float:
    """Return the reward as the number that the run's figures have.

    A reward that is not a number is meant for the function of
    ``--custom-reward-post-process-path``; it counts as 0.
    """
    reward = sample.reward[key] if key else sample.reward
    try:
        return float(reward)
    except (TypeError, ValueError):
        return 0.0


def with_reward(sample: Any) -> Any:
    if sample.reward is None:
        raise ValueError(f"it returned None for sample {sample.index}; return a reward")
    return sample


def group_index(group: Sequence[Any]) -> int:
    return group[0].index or 0


def batch_metrics(batch: Batch) -> dict[str, float]:
    """How stale the batch is, for the trainer's log."""
    counted = stale = oldest = 0
    for rollout in batch.rollouts:
        ages = batch.version - rollout.versions[rollout.loss_mask]
        counted += len(ages)
        stale += int((ages > 0).sum())
        oldest = max(oldest, int(ages.max(initial=0)))
    return {
        "rollout/aprilsched/off_policy_tokens": stale / counted if counted else 0.0,
        "rollout/aprilsched/staleness_max": float(oldest),
    }


def rollout_folder(path: str) -> Path:
    return Path(path) / "rollout"


def checkpoint_name(rollout_id: int | None) -> str:
    return f"aprilsched_{rollout_id}.checkpoint"


def samples_file(path: Path) -> Path:
    """Return the file with the samples of a checkpoint."""
    return path.with_suffix(".samples")
