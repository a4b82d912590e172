"""In which order waiting requests are sent: carried rollouts first, oldest groups first."""

from __future__ import annotations

from aprilsched.core.records import RequestRecord

__all__ = ["carried_first"]


def carried_first(request: RequestRecord) -> tuple[bool, int, int]:
    """Sort key. Evaluations before training, which they delay only briefly."""
    rollout = request.rollout
    training = rollout.group.evaluation_id is None
    return (training and not rollout.carried, rollout.group.group_id, rollout.index)
