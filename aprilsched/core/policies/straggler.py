"""What happens to the rollouts that still run when their batch is full, or at an update.

========  =============================================  ===========================
rule      when a synchronous batch is full               at an update
========  =============================================  ===========================
retract   engines paused, requests stay inside           KV flushed and recomputed
in_place  engines paused, requests stay inside           KV kept: stale keys
abort     requests come back with their tokens           sent again, to any engine
run       nothing: they run on, nothing new is sent      waited for; none is mixed
========  =============================================  ===========================
"""

from __future__ import annotations

from typing import Literal, TypeAlias

__all__ = ["StragglerRule", "pause_mode"]

StragglerRule: TypeAlias = Literal["retract", "in_place", "abort", "run"]


def pause_mode(rule: StragglerRule) -> Literal["retract", "in_place"]:
    """How engines are paused around a refit.

    Under "abort" and "run" nothing is inside them by then; retract lets the cache be flushed,
    so that no later request finds a prefix computed under older weights.
    """
    return "in_place" if rule == "in_place" else "retract"
