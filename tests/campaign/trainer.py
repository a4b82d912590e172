"""The trainer of a life: it polls for batches or for their groups, and trains on them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aprilsched import Batch
from aprilsched.errors import RefitError, RunEnded, SchedulerClosed
from tests.campaign.calls import PATIENCE_S, Hang
from tests.campaign.updating import Updates

if TYPE_CHECKING:
    from tests.campaign.life import Life

DRY_S = 900.0
"""Time without a prompt after which the trainer ends its life."""
_MOST_REFUSED = 60


class Trainer:
    """Takes batches, and records which of them it may acknowledge."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._updates = Updates(life, self)
        self.may_acknowledge: set[int] = set()
        """Batches that the scheduler may delete from its store."""
        self.since_update = 0
        self.parts: list[Batch] = []
        """Groups of the current, incomplete batch."""

    async def train(self) -> str:
        """Train until the end; return how it ended."""
        life, mix, draw = self._life, self._life.mix, self._life.draw
        refused = 0
        clock = asyncio.get_running_loop().time
        last = clock()
        while life.trial.batches < mix.batches * (1 + life.number):
            now = clock()
            try:
                batch = self._joined(await self._next_batch())
            except RunEnded as error:
                if life.failed():
                    return f"{type(error).__name__}: {error}"
                self._check_exhausted()
                life.checks.ended(error, life.scheduler.state)
                return "exhausted"
            except SchedulerClosed as error:
                return f"{type(error).__name__}: {error}" if life.failed() else "closed"
            except (TimeoutError, RefitError) as error:
                if life.failed():
                    return f"{type(error).__name__}: {error}"
                if life.source.dry and now - last > DRY_S:
                    # Restarted engines refuse updates until a prompt arrives.
                    self._check_dry()
                    return "dry"
                if isinstance(error, RefitError):
                    refused += 1
                    if refused > _MOST_REFUSED:
                        life.complain(f"update after update is refused: {error}")
                        return "refused"
                    if (failed := await self._updates.update(whole=True)) is not None:
                        return failed
                    continue
                if now - last > PATIENCE_S:
                    raise Hang(f"no batch for {PATIENCE_S:g} s of polling") from None
                if draw.random() < 0.3:
                    await asyncio.sleep(draw.choice([0.0, 0.1, 5.0]))
                continue
            except Exception as error:
                if life.failed():
                    return f"{type(error).__name__}: {error}"
                life.complain(f"next_batch() raised {error!r}, and the run continues")
                raise
            refused, last = 0, clock()
            if batch is None:
                continue
            self._take(batch)
            if (failed := await self._use(batch)) is not None:
                return failed
        return "done"

    async def _next_batch(self) -> Batch:
        life, draw = self._life, self._life.draw
        streams = life.mix.has("streams") and draw.random() < 0.8
        wanted = self._next_part if streams else life.scheduler.next_batch
        if life.mix.has("polls") and draw.random() < 0.9:
            seconds = draw.choice([0.0, 0.001, 0.05, 0.5, 5.0, 60.0]) * draw.random()
            if draw.random() < 0.5:
                return await life.calls.call("next_batch", asyncio.wait_for(wanted(), seconds))
            return await life.calls.call("next_batch", _within(seconds, wanted()))
        if life.source.dry_forever_at is None:
            return await life.calls.call("next_batch", wanted())
        return await life.calls.call("next_batch", _within(600.0, wanted()))

    async def _next_part(self) -> Batch:
        async with aclosing(self._life.scheduler.stream()) as parts:
            async for part in parts:
                return part
        # The missing groups were dropped.
        return replace(self.parts[-1], units=(), complete=True)

    def returned_late(self, name: str, result: Any) -> None:
        """Take a batch that a call returned despite its cancellation."""
        if isinstance(result, Batch) and name == "next_batch":
            batch = self._joined(result)
            if batch is not None:
                self._take(batch)

    def _joined(self, part: Batch) -> Batch | None:
        """Return the batch that the part completes, or None if groups are missing."""
        if self.parts and self.parts[-1].index != part.index:
            self.end_parts()
        before, self.parts = self.parts, []
        units = tuple(unit for each in (*before, part) for unit in each.units)
        whole = replace(part, units=units, redelivered=_any_redelivered([*before, part]))
        if part.complete:
            return whole
        self.parts = [*before, part]
        return None

    def end_parts(self) -> None:
        """Record a batch that ended early with the groups taken so far."""
        parts, state = self.parts, self._life.scheduler.state
        if not parts or parts[-1].index >= state.in_flight.counters.batches:
            return
        if any(batch.index == parts[-1].index for batch in state.delivery.batches_again):
            return  # more groups will follow
        self.parts = []
        units = tuple(unit for part in parts for unit in part.units)
        ended = replace(parts[-1], units=units, redelivered=_any_redelivered(parts))
        self._take(ended, version=ended.version)
        if ended.index not in state.delivery.unacknowledged:
            self.acknowledged([ended.index])

    def _take(self, batch: Batch, *, version: int | None = None) -> None:
        life = self._life
        life.trial.batches += 1
        self.since_update += 1
        again = " again" if batch.redelivered else ""
        life.note(f"the trainer has batch {batch.index}{again} at version {life.scheduler.version}")
        secured = life.store is None or life.store.whole
        if version is None:
            version = batch.version if self._updates.running else life.scheduler.version
        life.checks.batch(batch, version=version, secured=secured, settings=life.mix.settings)

    async def _use(self, batch: Batch) -> str | None:
        """Train on a batch; return why the run ended, or None."""
        mix, draw = self._life.mix, self._life.draw
        if mix.train_s:
            await asyncio.sleep(mix.train_s * draw.random() * 2)
        if mix.has("idle_trainer") and draw.random() < 0.15:
            await asyncio.sleep(draw.choice([50.0, 400.0]))
        if draw.random() < 0.2:
            self.acknowledged([batch.index])
            batch.acknowledge()
        if mix.has("checkpoints") and draw.random() < 0.3:
            await self._updates.checkpoint()
        if self.since_update >= mix.update_every:
            if mix.has("sleep") and draw.random() < 0.5:
                return await self._updates.sleep()
            return await self._updates.update()
        return None

    def unacknowledged(self) -> list[int]:
        """Return the batches that the trainer has not acknowledged."""
        records = self._life.trial.records
        return [index for index in records.batches if index not in records.acknowledged]

    def acknowledged(self, batches: Iterable[int]) -> None:
        """Record that the scheduler may have acknowledged `batches`."""
        for index in batches:
            if (given := self._life.trial.records.batches.get(index)) is not None:
                given.acknowledged = True
            self.may_acknowledge.add(index)

    def _check_dry(self) -> None:
        """Check that only work that needs more prompts is unfinished."""
        life, state = self._life, self._life.scheduler.state
        requests = [*state.in_flight.queue, *state.in_flight.open_requests()]
        # An evaluation may have started a moment ago; its own call reports whether it hangs.
        waits = any(request.rollout.group.evaluation_id is None for request in requests)
        groups = life.mix.settings["stop"] == "groups"
        stop = life.mix.config().policies.stop
        enough = len(list(state.in_flight.ready)) >= stop.amount
        if not state.fleet.control.engines:
            return  # they were lost just before
        if state.prompts.stock or waits or (groups and enough and not state.weights.update):
            life.complain(f"the source is dry, and other work is left undone: {life.in_flight()}")

    def _check_exhausted(self) -> None:
        state = self._life.scheduler.state
        left = [r for r in state.in_flight.rollouts.values() if r.group.evaluation_id is None]
        if left or state.prompts.stock or state.delivery.redelivery:
            self._life.complain(f"the prompts have ended with {len(left)} rollouts in flight")


async def _within(seconds: float, call: Coroutine[Any, Any, Batch]) -> Batch:
    async with asyncio.timeout(seconds):
        return await call


def _any_redelivered(parts: Iterable[Batch]) -> bool:
    return any(part.redelivered for part in parts)
