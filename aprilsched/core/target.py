"""How many groups the batch in work keeps open."""

from __future__ import annotations

from aprilsched.core.policies.over_provision import PoolLoad
from aprilsched.core.state import SchedulerState

__all__ = ["retarget"]


def retarget(state: SchedulerState) -> None:
    """Decide how many groups the next batch keeps open."""
    book, capacity = state.book, state.control.kv_tokens
    state.target_groups = state.schedule.over_provision.target_groups(
        PoolLoad(
            batch_groups=state.rules.batch_groups,
            current=state.target_groups,
            kv_share=None if capacity is None else book.peak_tokens / capacity,
        )
    )
    book.peak_tokens = book.held_tokens
