"""What adapters share whose trainers push prompts one by one and wait for each group.

Such a trainer decides how many groups are in flight. The scheduler keeps all of them open, and
reports for each group whether it was delivered or failed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np

from aprilsched.config import SchedulerConfig
from aprilsched.errors import RefitError
from aprilsched.kernel.core.messages.facts import (
    BatchDelivered,
    Fact,
    GroupDropped,
    GroupLaunched,
    PromptRefused,
)
from aprilsched.kernel.core.policies.tail_batching import OnDemand
from aprilsched.kernel.shell import RolloutScheduler
from aprilsched.types import Batch

NOT_TOKENIZED = np.zeros(1, dtype=np.int32)
"""Token ids of a prompt whose agent loop makes the real ones."""

_LOOK_S = 1.0
"""Seconds between two looks for whole weights."""

KeyT = TypeVar("KeyT", bound=Hashable)


def as_pushed(config: SchedulerConfig, **changes: Any) -> SchedulerConfig:
    """Return `config` for groups that are launched when pushed and delivered one by one."""
    return replace(
        config,
        batch_groups=1,
        over_provision=1.0,
        refill=OnDemand(),
        pace="asynchronous",
        **changes,
    )


async def next_batch(scheduler: RolloutScheduler) -> Batch:
    """Return the next batch, even if it is complete only after the next update.

    Until that update, possibly no server has complete weights.
    """
    while True:
        try:
            return await scheduler.next_batch()
        except RefitError:
            await asyncio.sleep(_LOOK_S)


class PushedGroups(Generic[KeyT]):
    """A listener of the scheduler that reports which prompts failed.

    Facts contain group numbers, not prompt keys. Prompts are launched in the order in which they
    were pushed.

    Args:
        failed: is called with the key of each prompt whose group is dropped or refused.
    """

    def __init__(self, failed: Callable[[KeyT], None]) -> None:
        self.open: set[KeyT] = set()
        """Prompts that were pushed and are neither finished nor failed."""
        self._failed = failed
        self._waiting: deque[KeyT] = deque()
        self._keys: dict[int, KeyT] = {}

    def pushed(self, key: KeyT) -> None:
        """Note that the prompt `key` was pushed, behind all others."""
        self._waiting.append(key)
        self.open.add(key)

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        """See :class:`~aprilsched.kernel.shell.listener.Listener`."""
        for fact in facts:
            if isinstance(fact, GroupLaunched) and fact.evaluation_id is None:
                self._keys[fact.group_id] = self._waiting.popleft()
            elif isinstance(fact, GroupDropped) and fact.group_id in self._keys:
                self._failed(self._keys.pop(fact.group_id))
            elif isinstance(fact, PromptRefused):
                self._failed(self._waiting.popleft())
            elif isinstance(fact, BatchDelivered):
                for rollout in fact.rollouts:
                    self._keys.pop(rollout.group_id, None)
