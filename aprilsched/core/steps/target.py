"""How many groups a batch takes, and how many the batch in work keeps open.

A batch that is full by tokens takes as many groups as the lengths seen say, unfinished responses
counted as censored ones. Until one has finished, ``batch_groups`` is what is known.

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
from aprilsched.core.state.records import group_lengths
from aprilsched.core.state.state import SchedulerState

__all__ = ["refill_now", "resize", "retarget"]


def retarget(state: SchedulerState) -> None:
    """Decide how many groups the next batch keeps open."""
    in_flight, capacity = state.in_flight, state.fleet.control.kv_tokens
    _aim(state, None if capacity is None else in_flight.peak_tokens / capacity)
    in_flight.peak_tokens = in_flight.held_tokens


def resize(state: SchedulerState) -> None:
    """The same in the middle of a batch, which may take other groups than was thought."""
    _aim(state, None)


def _aim(state: SchedulerState, kv_share: float | None) -> None:
    state.plan.usual_group = _usual_group(state)
    rules, batch_groups = state.rules, state.batch_groups
    target = state.plan.schedule.over_provision.target_groups(
        PoolLoad(batch_groups=batch_groups, current=state.plan.target_groups, kv_share=kv_share)
    )
    if rules.starting_up(state.begun):
        target = _started(rules, state.begun, batch_groups, target)
    state.plan.target_groups = target


def _usual_group(state: SchedulerState) -> float:
    """What one group counts towards a batch."""
    stop, size = state.rules.stop, state.rules.group_size
    if stop.unit == "groups":
        return 1.0
    if stop.unit == "samples":
        return float(size)
    open_groups = [group_lengths(g) for g in state.in_flight.training_groups() if not g.complete]
    law = state.expectations.observed.law(open_groups)
    if law is None:
        return state.plan.usual_group
    return size * law.mean()


def refill_now(state: SchedulerState) -> Refill:
    """The refill rule in force; a pool would not wait for anything while the run starts up."""
    if state.rules.starting_up(state.begun):
        return Wave()
    return state.plan.schedule.refill


def _started(rules: Rules, batches: int, batch_groups: int, target: int) -> int:
    if rules.start_up == "wait":
        return batch_groups
    share = batches / rules.start_up_batches
    return batch_groups + math.ceil(share * max(0, target - batch_groups))
