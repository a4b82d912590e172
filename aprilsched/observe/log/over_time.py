"""Which responses were in flight when, and which version sampled them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from aprilsched.observe.log.run import Attempt, Delivery, Run

Piece: TypeAlias = tuple[float, float, int]
"""Start, end and policy version of a piece of a response."""
Bar: TypeAlias = list[Piece]


def window_end(run: Run, batches: int) -> float:
    """Return the time at which the first `batches` batches were delivered."""
    shown = run.deliveries[:batches]
    return shown[-1].time if shown else run.end


def in_flight(run: Run, end: float) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return times up to `end`, and the number of responses in generation from each time on."""
    changes: dict[float, int] = {0.0: 0}
    for attempt in run.attempts:
        changes[attempt.start] = changes.get(attempt.start, 0) + 1
        changes[attempt.end] = changes.get(attempt.end, 0) - 1
    times = np.array(sorted(changes), dtype=np.float64)
    counts = np.cumsum([changes[time] for time in times.tolist()]).astype(np.int64)
    kept = times <= end
    return np.append(times[kept], end), np.append(counts[kept], counts[kept][-1])


def bars(run: Run, end: float, *, at_most: int, start: float = 0.0) -> list[Bar]:
    """Return the rollouts on an engine between `start` and `end`, in the order of launch, evenly
    thinned to `at_most`."""
    by_rollout: dict[int, list[Attempt]] = {}
    for attempt in sorted(run.attempts, key=lambda attempt: (attempt.start, attempt.rollout_id)):
        if attempt.start < end and attempt.end >= start:
            by_rollout.setdefault(attempt.rollout_id, []).append(attempt)
    rollouts = list(by_rollout.values())
    count = min(at_most, len(rollouts))
    chosen = [rollouts[i * len(rollouts) // count] for i in range(count)]
    times = [update.time for update in run.updates]
    versions = [run.updates[0].version - 1 if run.updates else 0]
    versions += [update.version for update in run.updates]
    return [
        [piece for attempt in attempts for piece in _pieces(attempt, times, versions, start, end)]
        for attempts in chosen
    ]


def lengths_of(deliveries: Sequence[Delivery]) -> NDArray[np.int64]:
    """Return the lengths of all responses in these batches."""
    return np.array([r.tokens for d in deliveries for r in d.rollouts], dtype=np.int64)


def tokens_by_class(run: Run, classes: int) -> NDArray[np.int64]:
    """Return the delivered tokens by batch and staleness in versions, int64 [batches, classes]; the
    last class contains all older tokens. Tokens of the environment have no version and are
    omitted."""
    counts = np.zeros((len(run.deliveries), classes), np.int64)
    for place, delivery in enumerate(run.deliveries):
        for rollout in delivery.rollouts:
            for start, end, version, _ in rollout.segments:
                if version >= 0:
                    staleness = min(classes - 1, max(0, delivery.version - version))
                    counts[place, staleness] += end - start
    return counts


def _pieces(
    attempt: Attempt, times: Sequence[float], versions: Sequence[int], start: float, end: float
) -> list[Piece]:
    """Split an attempt at the times of new versions."""
    low, stop = max(start, attempt.start), min(attempt.end, end)
    first, last = bisect_right(times, low), bisect_right(times, stop)
    cuts = [low, *times[first:last], stop]
    return [
        (cuts[i], cuts[i + 1], versions[first + i])
        for i in range(len(cuts) - 1)
        if cuts[i + 1] > cuts[i]
    ]
