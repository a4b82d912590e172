"""Reads a run folder as the arrays that the figures of bias and related modules take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprilsched.observe.log.run import Run


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeliveredLengths:
    """All delivered responses of a run; each array is int64 [n].

    Attributes:
        lengths: length in tokens.
        delivered_in: number of the batch that has the response, from 0.
        launched_in: number of the batch that was being generated when the response was launched.
    """

    rollout_ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    delivered_in: NDArray[np.int64]
    launched_in: NDArray[np.int64]


def delivered_lengths(run: Run) -> DeliveredLengths:
    """The observations of `run`. A response counts as launched when its request was first sent."""
    first: dict[int, float] = {}
    for attempt in run.attempts:
        first[attempt.rollout_id] = min(attempt.start, first.get(attempt.rollout_id, np.inf))
    batches = [len(delivery.rollouts) for delivery in run.deliveries]
    rollouts = [rollout for delivery in run.deliveries for rollout in delivery.rollouts]
    launched = [first.get(rollout.rollout_id, 0.0) for rollout in rollouts]
    # A response that is launched at the very time of a delivery is launched for the next batch.
    times = np.array([delivery.time for delivery in run.deliveries], dtype=np.float64)
    return DeliveredLengths(
        rollout_ids=np.array([rollout.rollout_id for rollout in rollouts], dtype=np.int64),
        lengths=np.array([rollout.tokens for rollout in rollouts], dtype=np.int64),
        delivered_in=np.repeat(np.arange(len(batches)), batches),
        launched_in=np.searchsorted(times, launched, side="right").astype(np.int64),
    )


def lengths_by_batch(run: Run) -> list[NDArray[np.int64]]:
    """Delivered lengths of each batch, int64 [n], as the test of equivalence takes them."""
    return [
        np.array([rollout.tokens for rollout in delivery.rollouts], dtype=np.int64)
        for delivery in run.deliveries
    ]
