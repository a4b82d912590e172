"""The order in which waiting requests are sent (``dispatch.order``).

==========  ============================================================================
carried     interrupted requests first, then the others in the order of their launch (APRIL,
            CoPRIS)
shortest    interrupted requests first, the one that is expected to need the fewest further
            tokens before all others
longest     the request that is expected to need the most further tokens first, so that nothing
            long is begun at the end of a batch
==========  ============================================================================

Requests of evaluations go before those of training, which they delay only briefly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

__all__ = ["Place", "ResumeOrder", "place_of"]

ResumeOrder: TypeAlias = Literal["carried", "shortest", "longest"]

Place: TypeAlias = tuple[bool, bool, float, int, int]


def place_of(
    order: ResumeOrder,
    *,
    training: bool,
    carried: bool,
    group_id: int,
    index: int,
    remaining: Callable[[], float],
) -> Place:
    """The sort key of a request that begins to wait.

    Args:
        order: the setting.
        training: False for a request of an evaluation.
        carried: the rollout was sent before.
        group_id: groups have ascending ids in the order of their launch.
        index: the rollout's place in its group.
        remaining: the number of tokens that the rollout is expected to need yet; it is only asked
            for where the order depends on it.
    """
    if not training or order == "carried":
        return (training, training and not carried, 0.0, group_id, index)
    if order == "shortest":
        return (training, not carried, remaining(), group_id, index)
    return (training, False, -remaining(), group_id, index)
