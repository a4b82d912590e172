"""In which order waiting requests are sent.

==========  ============================================================================
carried     what was interrupted first, then in the order of launching (APRIL, CoPRIS)
shortest    what is expected to need the fewest tokens still: most nearly done first
longest     what is expected to need the most: nothing long is begun at a batch's end
==========  ============================================================================

What is expected is told by the caller; a group's finished members are evidence for the others.
Evaluations go before training, which they delay only briefly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from aprilsched.core.state.records import RequestRecord

__all__ = ["Expectation", "Place", "ResumeOrder", "place_of"]

ResumeOrder: TypeAlias = Literal["carried", "shortest", "longest"]

Place: TypeAlias = tuple[bool, bool, float, int, int]

Expectation: TypeAlias = Callable[[RequestRecord], float]
"""Tokens that a request is expected to need still."""


def place_of(request: RequestRecord, order: ResumeOrder, expected: Expectation) -> Place:
    """Sort key of a request that begins to wait."""
    rollout = request.rollout
    group, training = rollout.group.group_id, rollout.group.evaluation_id is None
    if not training or order == "carried":
        return (training, training and not rollout.carried, 0.0, group, rollout.index)
    tokens = expected(request)
    if order == "shortest":
        return (training, not rollout.carried, tokens, group, rollout.index)
    return (training, False, -tokens, group, rollout.index)
