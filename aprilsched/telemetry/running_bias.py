"""The bias after each batch: measured, and by conservation from what was in flight then."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["running_bias", "transient_by_batch"]


def running_bias(lengths: Sequence[NDArray[np.int64]], mean: float) -> list[float]:
    """Mean length of all delivered up to each batch / `mean` - 1; `lengths` int64 [n] by batch."""
    totals = np.cumsum([float(batch.sum()) for batch in lengths])
    counts = np.cumsum([batch.size for batch in lengths])
    return [float(value) for value in totals / (counts * mean) - 1]


def transient_by_batch(
    *,
    lengths: Sequence[NDArray[np.int64]],
    groups: Sequence[NDArray[np.int64]],
    newest: Sequence[int],
    open_lengths: NDArray[np.float64],
    open_groups: NDArray[np.int64],
    mean: float,
) -> list[float]:
    """-I * (l / mu - 1) / (K * N) after each of the batches.

    What was in flight after a batch is known afterwards: launched until then, and delivered
    later or not at all.

    Args:
        lengths, groups: for each batch the final length, int64 [n], and the group, int64 [n], of
            its responses.
        newest: the largest id launched when the batch was delivered; ids follow the order of
            launches.
        open_lengths, open_groups: float64 [m] and int64 [m], of what was never delivered; the
            lengths known or expected.
        mean: mu.
    """
    final = np.concatenate((*lengths, open_lengths)).astype(np.float64)
    group = np.concatenate((*groups, open_groups))
    order = np.argsort(group, kind="stable")
    excess = np.concatenate(([0.0], np.cumsum(final[order] / mean - 1)))
    launched = excess[np.searchsorted(group[order], np.asarray(newest), side="right")]
    delivered = np.cumsum([float((batch / mean - 1).sum()) for batch in lengths])
    counts = np.cumsum([batch.size for batch in lengths])
    return [float(value) for value in -(launched - delivered) / counts]
