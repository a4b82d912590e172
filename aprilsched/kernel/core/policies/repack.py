"""Chooses the engine whose requests move to other engines, so that it can take new weights.

With rolling refits an engine finishes the rollouts of its version before it takes a newer one. As
they end, the engines of an old version have less and less work, while requests wait for engines of
the newest version. The requests of the least loaded engine can then move to the other engines of
the same version, which recompute their contexts once.

Both options are compared by their current cost in engine seconds. Moving the requests now costs
their contexts / prefill rate. Waiting for some time saves this cost for the requests that end in
that time: a share equal to that time / the mean time that they still need. Waiting costs the fixed
part t0 of each step in that time, for the share of an engine that is missing elsewhere. So the
requests move if

    contexts / prefill rate < t0 * mean remaining tokens * missing share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from aprilsched.kernel.values.bounds import ABOVE_0, AT_LEAST_0
from aprilsched.kernel.values.checks import suggesting

LOOK_AGAIN = 0.05
"""Number of engines by which the surplus of a version must grow before the costs are compared
again. Each comparison visits all requests of an engine."""


@suggesting()
@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """The costs of moving a request and of waiting, in seconds of an engine.

    The defaults are those of one H200 with a 4B model; ``aprilsched calibrate`` measures them.

    Attributes:
        step_seconds: The part of a decode step's duration that does not depend on the batch.
        prefill_tokens_per_s: The number of tokens that an engine prefills in a second.
    """

    step_seconds: Annotated[float, AT_LEAST_0] = 3.66e-3
    prefill_tokens_per_s: Annotated[float, ABOVE_0] = 59_900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """An engine with an old version that still has requests."""

    engine: str
    requests: int
    """Number of its open requests."""
    room: int | None
    """Number of requests that it runs at the same time; None if not reported."""
    kv_tokens: int | None
    """Capacity of its KV pool in tokens; None if not reported."""
    contexts: Callable[[], int]
    """Returns the number of tokens of the prompts and responses of its requests."""
    remaining: Callable[[], float]
    """Returns the mean number of tokens that its requests are expected to need still; 0 while no
    length is known."""


def surplus(*, engines: int, requests: int, share: float) -> float:
    """Return by how many engines those of one version exceed what its requests need.

    Args:
        engines: number of engines of the version that take requests.
        requests: number of requests of the version, open and waiting.
        share: mean number of requests, open and waiting, for each engine of the whole fleet.
    """
    return engines - requests / share if share else 0.0


def is_worth_freeing(
    least: Load,
    others: Callable[[], Sequence[Load]],
    *,
    engines: int,
    requests: int,
    share: float,
    prices: Prices,
    needed: bool,
) -> bool:
    """Return whether to move the requests of an engine to the others of its version now.

    Otherwise waiting is better.

    Args:
        least: the engine with the fewest requests among those that take some of the version.
        others: returns the others.
        engines: number of these engines, at least 2.
        requests: number of requests of the version, open and waiting.
        share: mean number of requests, open and waiting, for each engine of the whole fleet.
        prices: what recomputing and waiting cost.
        needed: whether requests wait that only an engine of the newest version can take while no
            engine has it, so that the cost does not matter.
    """
    missing = min(1.0, surplus(engines=engines, requests=requests, share=share))
    moving = least.contexts() / prices.prefill_tokens_per_s
    if not needed and moving >= prices.step_seconds * least.remaining() * missing:
        return False
    loads = others()
    rooms = [load.room for load in loads if load.room is not None]
    if len(rooms) == len(loads) and requests > sum(rooms):
        return False
    pools = [load.kv_tokens for load in loads if load.kv_tokens is not None]
    contexts = least.contexts() + sum(load.contexts() for load in loads)
    return len(pools) < len(loads) or contexts <= sum(pools)
