"""Rollouts for trainers that push prompts one by one and wait for each group.

Such a trainer decides how many groups are in flight. The scheduler keeps all of them open, and
reports for each group whether it was delivered or failed. A trainer that takes batches
(``batches=True``) pushes prompts in advance instead, and the scheduler decides when they start.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aprilsched.config import SchedulerConfig
from aprilsched.errors import RefitError
from aprilsched.kernel.core.messages.facts import (
    Fact,
    GroupDropped,
    GroupLaunched,
    PromptRefused,
)
from aprilsched.kernel.core.policies.tail_batching import OnDemand
from aprilsched.kernel.engines.base import Fleet
from aprilsched.kernel.shell import Episode, PromptQueue, RolloutScheduler
from aprilsched.kernel.shell.listener import AnyListener
from aprilsched.kernel.store import Store
from aprilsched.trainers.adapter import untrained_groups
from aprilsched.types import Batch, Prompt

NOT_TOKENIZED = np.zeros(1, dtype=np.int32)
"""Token ids of a prompt whose agent loop makes the real ones."""

_LOOK_S = 1.0
"""Seconds between two looks for whole weights."""


class GroupLost(RuntimeError):
    """A group was dropped, or its prompt was refused."""


def as_pushed(config: SchedulerConfig, **changes: Any) -> SchedulerConfig:
    """Return `config` for groups that are launched when pushed, and delivered one by one.

    The default bound on staleness would count each group as a batch and hold most of them back; the
    trainer has a bound of its own.
    """
    return replace(
        config,
        batch_groups=1,
        over_provision=1.0,
        refill=OnDemand(),
        pace="asynchronous",
        max_staleness=None if config.max_staleness == "auto" else config.max_staleness,
        **changes,
    )


class PushedRollouts:
    """A scheduler of prompts that are pushed.

    Args:
        fleet: the engines.
        episode: drives a rollout.
        config: settings from :func:`as_pushed`; with `batches`, any.
        listeners: telemetry of the scheduler.
        store: keeps what is delivered until :meth:`trained`, for a checkpoint.
        ended: awaited for each prompt when its group is complete, or with the reason why there is
            none: :class:`GroupLost`, or the error that stopped the scheduler. With `batches`, only
            for evaluations.
        batches: whether the trainer takes batches from the scheduler itself.

    Attributes:
        scheduler: the scheduler.
        prompts: its prompts.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        episode: Episode,
        config: SchedulerConfig,
        listeners: Sequence[AnyListener],
        store: Store | None = None,
        ended: Callable[[Prompt, Exception | None], Awaitable[None]],
        batches: bool = False,
    ) -> None:
        self.prompts = PromptQueue()
        self._ended = ended
        self._batches = batches
        self._unlaunched: deque[Prompt] = deque()
        """Facts contain group ids, not prompts. Prompts are launched in the order of the pushes."""
        self._launched: dict[int, Prompt] = {}
        """Prompts whose groups are neither complete nor failed, by group id."""
        self._cursor = 0
        """Number of prompts that have left `_unlaunched`, also in earlier processes."""
        self._tasks: set[asyncio.Future[None]] = set()
        self._delivery: asyncio.Task[None] | None = None
        self.is_open = False
        """Whether :meth:`open` has opened the fleet."""
        self.scheduler = RolloutScheduler(
            fleet,
            self.prompts,
            episode=episode,
            config=config,
            listeners=[self, *listeners],
            store=store,
        )
        self._store = store
        self._untrained: dict[object, Batch] = {}
        """What the trainer has and has not trained on, by the key of its prompt."""

    async def open(self) -> None:
        """Open the fleet, and report groups from now on; later calls only check the scheduler.

        Raises:
            Exception: the error that stopped the scheduler, if there is one.
        """
        if not self.is_open:
            await self.scheduler.__aenter__()
            self.is_open = True
            self._cursor = self.scheduler.state.prompts.cursor
            if not self._batches:
                self._delivery = asyncio.create_task(self._deliver())
        elif self._delivery is not None and self._delivery.done():
            self._delivery.result()

    async def close(self) -> None:
        """Abort requests in flight and release the fleet, if it is open."""
        if self._delivery is not None:
            self._delivery.cancel()
            await asyncio.gather(self._delivery, return_exceptions=True)
        if self.is_open:
            await self.scheduler.close()

    def push(self, prompt: Prompt) -> None:
        """Add a prompt."""
        self.prompts.put(prompt)
        self._unlaunched.append(prompt)

    async def evaluate(self, prompt: Prompt) -> None:
        """Generate the group of a prompt under one version, and report it.

        Raises:
            Exception: the error that stopped the scheduler, if there is one.
        """
        groups = (await self.scheduler.evaluate([prompt])).groups
        await self._ended(prompt, None if groups else GroupLost())

    def unfinished(self) -> set[str | int | None]:
        """Return the keys of the prompts that may still be delivered, whole or in part."""
        state = self.scheduler.state
        if self._batches:
            for _ in range(state.prompts.cursor - self._cursor):
                self._unlaunched.popleft()
            self._cursor = state.prompts.cursor
        launched = {group.prompt.key for group in state.in_flight.training_groups()}
        return launched.union(prompt.key for prompt in self._unlaunched)

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        """See :class:`~aprilsched.kernel.shell.listener.Listener`."""
        if self._batches:
            return
        for fact in facts:
            if isinstance(fact, GroupLaunched) and fact.evaluation_id is None:
                if fact.restored is None:
                    self._launched[fact.group_id] = self._unlaunched.popleft()
            elif isinstance(fact, GroupDropped) and fact.group_id in self._launched:
                self._lose(self._launched.pop(fact.group_id))
            elif isinstance(fact, PromptRefused):
                self._lose(self._unlaunched.popleft())

    def trained(self, key: object) -> None:
        """Note that the trainer no longer needs the group of this prompt."""
        if (batch := self._untrained.pop(key, None)) is not None:
            batch.acknowledge()

    def _adopt(self) -> None:
        """Note the groups of a checkpoint, which another process has launched."""
        for group in untrained_groups(self.scheduler.state):
            self._launched.setdefault(group.group_id, group.prompt)

    def _lose(self, prompt: Prompt) -> None:
        task = asyncio.ensure_future(self._ended(prompt, GroupLost()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deliver(self) -> None:
        self._adopt()
        try:
            while True:
                for unit in (await self._next_batch()).units:
                    await self._ended(self._launched.pop(unit.group_id), None)
        except Exception as error:
            # The trainer would wait forever for a group that is neither complete nor failed.
            for prompt in (*self._launched.values(), *self._unlaunched):
                await self._ended(prompt, error)
            raise

    async def _next_batch(self) -> Batch:
        while True:
            try:
                batch = await self.scheduler.next_batch()
                if self._store is not None:
                    keys = {unit.prompt.key for unit in batch.units}
                    self._untrained.update(dict.fromkeys(keys, batch))
                return batch
            except RefitError:
                # Possibly no server has complete weights until the trainer's next update.
                await asyncio.sleep(_LOOK_S)
