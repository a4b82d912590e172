"""How many groups the batch in work keeps open.

A run that begins with all of them at once delivers the shortest first: a bias of lengths that
goes away only with the number of batches (:mod:`aprilsched.core.lengths.identity`). While it
starts up with "wait", each batch is launched alone and waited for, so there is no bias until then;
with "ramp" the ratio grows from 1 to its value over the batches, which spreads the same bias
evenly over them. Both cost the speed that the missing groups would have bought.
"""

from __future__ import annotations

import math

from aprilsched.core.policies.over_provision import PoolLoad
from aprilsched.core.policies.refill import Refill, Wave
from aprilsched.core.rules import Rules
from aprilsched.core.state import SchedulerState

__all__ = ["refill_now", "retarget"]


def retarget(state: SchedulerState) -> None:
    """Decide how many groups the next batch keeps open."""
    book, rules, capacity = state.book, state.rules, state.control.kv_tokens
    target = state.schedule.over_provision.target_groups(
        PoolLoad(
            batch_groups=rules.batch_groups,
            current=state.target_groups,
            kv_share=None if capacity is None else book.peak_tokens / capacity,
        )
    )
    book.peak_tokens = book.held_tokens
    if rules.starting_up(book.counters.batches):
        target = _started(rules, book.counters.batches, target)
    state.target_groups = target


def refill_now(state: SchedulerState) -> Refill:
    """The refill rule in force; a pool would not wait for anything while the run starts up."""
    if state.rules.starting_up(state.book.counters.batches):
        return Wave()
    return state.schedule.refill


def _started(rules: Rules, batches: int, target: int) -> int:
    if rules.start_up == "wait":
        return rules.batch_groups
    share = batches / rules.start_up_batches
    return rules.batch_groups + math.ceil(share * max(0, target - rules.batch_groups))
