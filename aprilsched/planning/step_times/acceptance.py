"""Finds how many tokens a step of speculative decoding gives each sequence, by the batch.

Servers that adapt their drafts to the load, and those with a table of batches, accept more tokens
in a thin batch than in a wide one.
"""

from __future__ import annotations

import numpy as np

from aprilsched.planning.step_times.model import Acceptance
from aprilsched.planning.step_times.server_log import Floats

ALIKE = 0.05
"""Largest difference of the numbers of tokens, as a share, for which the batch is ignored."""
_LEAST_SHARE = 0.01
"""Share of the windows with which a doubling of the batch has a mean of its own."""


def acceptance_of(running: Floats, accepted: Floats) -> Acceptance:
    """Return the mean of `accepted` for each doubling of the batch.

    It is one pair if the batch makes no difference, and none if every step gives one token.

    Args:
        running: batch of each window, float64 [windows].
        accepted: tokens that its steps gave each sequence, float64 [windows].
    """
    if not len(accepted) or (accepted == 1).all():
        return ()
    doublings = np.floor(np.log2(np.maximum(running, 1.0)))
    pairs: list[tuple[float, float]] = []
    for doubling in np.unique(doublings):
        here = doublings == doubling
        if here.mean() >= _LEAST_SHARE:
            pairs.append((max(float(running[here].mean()), 1.0), float(accepted[here].mean())))
    numbers = [tokens for _, tokens in pairs]
    if max(numbers) <= (1 + ALIKE) * min(numbers):
        return ((1.0, float(accepted.mean())),)
    return tuple(pairs)
