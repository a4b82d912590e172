"""A schedule tried out on groups of known lengths: the model behind automatic over-provisioning.

Much coarser than :mod:`aprilsched.simulation`, and fifty times faster: engines are one, with its
work divided evenly; requests are numbers on one step counter; there are no preemptions. What it
is for is the order of schedules, and a test holds it to the simulation within a few percent.

Invariants:
- A member that starts decoding at step s with r tokens to go ends at s + r, whatever happens
  around it: what costs time and no step (prefill, pauses) moves the clock alone.
- `kv` is the sum of prompt and tokens so far over what runs.

Efficiency is counted on what was generated, not on what was delivered: in the long run both are
the same, and over a few batches the latter scatters four times as much with what is in flight.
"""

from __future__ import annotations

import heapq
from collections import deque

from aprilsched.core.policies.over_provision import PoolLoad
from aprilsched.core.policies.refill import PoolView
from aprilsched.core.policies.rounds import Rounds
from aprilsched.core.policies.schedule import Schedule
from aprilsched.planning.group import TrialGroup
from aprilsched.planning.setting import Outcome, Setting
from aprilsched.planning.store import Store

__all__ = ["try_out"]


def try_out(schedule: Schedule, setting: Setting) -> Outcome:
    """What `schedule` does in this setting. `setting.lengths` is used over again if it is short."""
    return _Trial(schedule, setting).run()


class _Trial:
    def __init__(self, schedule: Schedule, setting: Setting) -> None:
        self._setting = setting
        self._refill = schedule.refill
        self._group_size = setting.lengths.shape[1]
        load = PoolLoad(batch_groups=setting.batch_groups, current=0)
        self._target = schedule.over_provision.target_groups(load)
        rounds = isinstance(schedule.refill, Rounds)
        self._store = Store(schedule.refill, setting) if rounds else None
        self._rows: list[list[int]] = setting.lengths.tolist()
        self._next = 0
        self._limit = setting.max_running * setting.engines
        self.now = 0.0
        self._step = 0
        self._kv = 0.0
        self._peak = 0.0
        self._bound = 0.0
        """T_bound of what was generated: see StepTimeModel.bound_seconds."""
        self._running: list[tuple[int, int, int, TrialGroup]] = []
        self._queue: deque[tuple[TrialGroup, int]] = deque()
        self._ready: list[TrialGroup] = []
        self._open = 0
        self._batches = 0
        self._count = 0

    def run(self) -> Outcome:
        setting = self._setting
        seconds = bound = tokens = stale = too_stale = 0.0
        # A store takes longer to fill and to mix than anything else takes to settle.
        burn_in = setting.burn_in * (3 if self._store else 1)
        for batch in range(burn_in + setting.batches):
            began, before = self.now, self._bound
            delivered = self._batch()
            if batch >= burn_in:
                seconds += self.now - began
                bound += self._bound - before
                tokens += sum(sum(group.lengths) for group in delivered)
                stale += sum(group.older_than(batch, 0) for group in delivered)
                oldest = setting.max_staleness
                if oldest is not None:
                    too_stale += sum(group.older_than(batch, oldest) for group in delivered)
        return Outcome(
            efficiency=bound / seconds,
            off_policy_share=stale / tokens,
            too_stale_share=too_stale / tokens,
            peak_kv=self._peak / setting.engines,
        )

    # --- one batch -----------------------------------------------------------------------------

    def _batch(self) -> list[TrialGroup]:
        """Run until a batch is full; its groups."""
        self._launch(wave_due=True)
        if self._store is not None:
            wanted = self._target - len(self._ready)
            self._queue.extend(self._store.choose(wanted, self._batches))
        again = 0.0 if self._setting.keeps_kv or not self._batches else self._kv
        self._admit(again)
        while len(self._ready) < self._setting.batch_groups:
            self._advance()
            if self._store is None:
                self._launch(wave_due=False)
                self._admit(0.0)
        count = self._setting.batch_groups
        delivered, self._ready = self._ready[:count], self._ready[count:]
        self._stop()
        self._batches += 1
        return delivered

    def _stop(self) -> None:
        """Note what everyone has; with a store nobody stays."""
        for end, _, member, group in self._running:
            group.note(member, group.lengths[member] - (end - self._step), self._batches)
        if self._store is not None:
            self._running.clear()
            self._queue.clear()
            self._kv = 0.0

    def _launch(self, *, wave_due: bool) -> None:
        """Open the groups that the refill rule asks for."""
        view = PoolView(
            batch_groups=self._setting.batch_groups,
            group_size=self._group_size,
            target_groups=self._target,
            open_groups=self._open,
            ready_groups=len(self._ready),
            in_flight=len(self._running) + len(self._queue),
            wave_due=wave_due,
            batch_open=len(self._ready) < self._setting.batch_groups,
            asynchronous=False,
        )
        for _ in range(self._refill.launches(view)):
            group = TrialGroup(self._rows[self._next % len(self._rows)], self._batches)
            self._next += 1
            self._open += 1
            if self._store is None:
                self._queue.extend((group, member) for member in range(self._group_size))
            else:
                self._store.groups.append(group)

    def _admit(self, prefill: float) -> None:
        """Start what waits, as far as there is room; `prefill` tokens are computed with it."""
        places = min(self._limit - len(self._running), len(self._queue))
        tokens = 0.0
        for _ in range(places):
            group, member = self._queue.popleft()
            self._count += 1
            end = self._step + group.lengths[member] - group.have[member]
            heapq.heappush(self._running, (end, self._count, member, group))
            tokens += self._setting.prompt_tokens + group.have[member]
        self._kv += tokens
        if prefill or places:
            share = (prefill + tokens) / self._setting.engines
            self.now += self._setting.model.prefill_seconds(max(1, round(share)))

    def _advance(self) -> None:
        """Decode to the next end of a response; those that end with it end too."""
        running, engines = self._running, self._setting.engines
        steps = running[0][0] - self._step
        batch, kv = max(1, round(len(running) / engines)), round(self._kv / engines)
        model = self._setting.model
        self.now += model.decode_seconds(batch, kv, steps)
        tokens, growth = steps * len(running), len(running) * steps * (steps - 1) / 2
        work = (model.t1 + model.t0 / self._setting.max_running) * tokens
        self._bound += (work + model.t2 * (steps * self._kv + growth)) / engines
        self._step += steps
        self._kv += steps * len(running)
        self._peak = max(self._peak, self._kv)
        while running and running[0][0] == self._step:
            _, _, member, group = heapq.heappop(running)
            self._kv -= self._setting.prompt_tokens + group.lengths[member]
            group.finish(member, self._batches)
            if not group.unfinished:
                self._open -= 1
                self._ready.append(group)
                if self._store is not None:
                    self._store.groups.remove(group)
        if self._queue:
            self._admit(0.0)
