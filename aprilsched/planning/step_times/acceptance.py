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
"""Share of the weight with which a doubling of the batch has a mean of its own."""


def acceptance_of(running: Floats, accepted: Floats, weights: Floats | None = None) -> Acceptance:
    """Return the mean of `accepted` for each doubling of the batch.

    It is one pair if the batch makes no difference, and none if every step gives one token.

    Args:
        running: batch of each window, float64 [windows].
        accepted: tokens that its steps gave each sequence, float64 [windows].
        weights: weight of each window; without them all count alike.
    """
    if not len(accepted) or (accepted == 1).all():
        return ()
    own = np.ones(len(accepted)) if weights is None else weights
    doublings = np.floor(np.log2(np.maximum(running, 1.0)))
    pairs: list[tuple[float, float]] = []
    for doubling in np.unique(doublings):
        here = doublings == doubling
        if own[here].sum() >= _LEAST_SHARE * own.sum():
            batch, tokens = (
                float(np.average(values[here], weights=own[here])) for values in (running, accepted)
            )
            pairs.append((max(batch, 1.0), tokens))
    numbers = [tokens for _, tokens in pairs]
    if max(numbers) <= (1 + ALIKE) * min(numbers):
        one = float(np.average(accepted, weights=own))
        return ((1.0, max(one, 1.0)),)
    return tuple(pairs)
