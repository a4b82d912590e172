"""Errors of predictions for measured windows: in total, by batch and by context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aprilsched.timing.server_log import Floats, Windows

__all__ = ["Bucket", "Residuals", "residuals_of"]

_BATCH = (0, 4, 16, 64, 128, 256, 384)
_KV = (0, 10_000, 30_000, 100_000, 200_000, 300_000)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """The windows in which a quantity is above `above` and at most `upto` (None: unbounded).

    `bias` is the median of predicted / measured - 1; `error` is the median of its absolute value.
    """

    above: int
    upto: int | None
    windows: int
    bias: float
    error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Residuals:
    """Relative errors of predicted seconds.

    Attributes:
        windows: number of windows.
        median: median of the absolute error.
        p90: 90th percentile of the absolute error.
        total: sum of the predicted seconds divided by the sum of the measured ones.
        by_batch: errors by mean batch.
        by_kv: errors by mean context tokens of a step.
    """

    windows: int
    median: float
    p90: float
    total: float
    by_batch: tuple[Bucket, ...]
    by_kv: tuple[Bucket, ...]


def residuals_of(windows: Windows, predicted: Floats) -> Residuals:
    """Compare `predicted` seconds, one for each window, with the measured ones."""
    error = predicted / windows.seconds - 1
    return Residuals(
        windows=len(error),
        median=float(np.median(np.abs(error))),
        p90=float(np.percentile(np.abs(error), 90)),
        total=float(predicted.sum() / windows.seconds.sum()),
        by_batch=_buckets(windows.running, error, _BATCH),
        by_kv=_buckets(windows.kv, error, _KV),
    )


def _buckets(values: Floats, error: Floats, edges: Sequence[int]) -> tuple[Bucket, ...]:
    """The buckets with at least one window."""
    found: list[Bucket] = []
    for above, upto in zip(edges, (*edges[1:], None), strict=True):
        chosen = error[(values > above) & (values <= (np.inf if upto is None else upto))]
        if len(chosen):
            found.append(
                Bucket(
                    above=above,
                    upto=upto,
                    windows=len(chosen),
                    bias=float(np.median(chosen)),
                    error=float(np.median(np.abs(chosen))),
                )
            )
    return tuple(found)
