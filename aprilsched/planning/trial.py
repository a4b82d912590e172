"""A schedule tried out on groups of known lengths: the model behind automatic over-provisioning.

Much coarser than :mod:`aprilsched.simulation`, and a hundred times faster: engines are one, with
its work divided evenly; requests are numbers on one step counter; there are no preemptions. What
it is for is the order of schedules, and a test holds it to the simulation within a few percent.

Invariants:
- A rollout of length L that starts decoding at step s ends at s + L, whatever happens around it:
  everything that costs time and no step (prefill, pauses) moves the clock alone.
- `kv` is the sum of prompt and tokens so far over what runs.
"""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np

from aprilsched.core.policies.over_provision import PoolLoad
from aprilsched.core.policies.refill import PoolView
from aprilsched.core.policies.schedule import Schedule
from aprilsched.planning.setting import Outcome, Setting

__all__ = ["try_out"]


def try_out(schedule: Schedule, setting: Setting) -> Outcome:
    """What `schedule` does in this setting. `setting.lengths` is used over again if it is short."""
    return _Trial(schedule, setting).run()


class _Group:
    __slots__ = ("born", "ends", "lengths", "open")

    def __init__(self, lengths: list[int], born: int) -> None:
        self.lengths = lengths
        self.born = born
        self.open = len(lengths)
        self.ends: list[tuple[int, int]] = []
        """The step at which each member ended, and its length."""


class _Trial:
    def __init__(self, schedule: Schedule, setting: Setting) -> None:
        self._setting = setting
        self._refill = schedule.refill
        self._group_size = setting.lengths.shape[1]
        load = PoolLoad(batch_groups=setting.batch_groups, current=0)
        self._target = schedule.over_provision.target_groups(load)
        self._rows: list[list[int]] = setting.lengths.tolist()
        self._next = 0
        self._limit = setting.max_running * setting.engines
        self.now = 0.0
        self._step = 0
        self._kv = 0.0
        self._peak = 0.0
        self._running: list[tuple[int, int, int, _Group]] = []
        self._queue: deque[tuple[int, _Group]] = deque()
        self._ready: list[_Group] = []
        self._open = 0
        self._begins = [0]
        """The step at which each batch began."""
        self._count = 0

    def run(self) -> Outcome:
        setting = self._setting
        seconds = bound = tokens = stale = too_stale = 0.0
        for batch in range(setting.batches):
            began = self.now
            delivered = self._batch()
            if batch >= setting.burn_in:
                seconds += self.now - began
                lengths = np.array([n for g in delivered for _, n in g.ends])
                prompts = np.full(len(lengths), setting.prompt_tokens)
                one = setting.model.bound_seconds(prompts, lengths, setting.max_running)
                bound += one / setting.engines
                tokens += float(lengths.sum())
                stale += self._older(delivered, 0)
                too_stale += self._beyond(delivered)
            self._begins.append(self._step)
        return Outcome(
            efficiency=bound / seconds,
            off_policy_share=stale / tokens,
            too_stale_share=too_stale / tokens,
            peak_kv=self._peak / setting.engines,
        )

    # --- one batch -----------------------------------------------------------------------------

    def _batch(self) -> list[_Group]:
        """Run until a batch is full; its groups."""
        again = 0.0 if self._setting.keeps_kv else self._kv
        self._launch(wave_due=True, prefill=again if len(self._begins) > 1 else 0.0)
        while len(self._ready) < self._setting.batch_groups:
            self._advance()
            self._launch(wave_due=False)
        count = self._setting.batch_groups
        delivered, self._ready = self._ready[:count], self._ready[count:]
        return delivered

    def _launch(self, *, wave_due: bool, prefill: float = 0.0) -> None:
        """Start what the refill rule asks for; `prefill` tokens are computed along with it."""
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
            group = _Group(self._rows[self._next % len(self._rows)], len(self._begins) - 1)
            self._next += 1
            self._open += 1
            self._queue.extend((length, group) for length in group.lengths)
        self._admit(prefill)

    def _admit(self, prefill: float) -> None:
        places = min(self._limit - len(self._running), len(self._queue))
        prompt = self._setting.prompt_tokens
        for _ in range(places):
            length, group = self._queue.popleft()
            self._count += 1
            entry = (self._step + length, self._count, length, group)
            heapq.heappush(self._running, entry)
        self._kv += places * prompt
        if prefill or places:
            tokens = (prefill + places * prompt) / self._setting.engines
            self.now += self._setting.model.prefill_seconds(max(1, round(tokens)))

    def _advance(self) -> None:
        """Decode to the next end of a response; those that end with it end too."""
        running, engines = self._running, self._setting.engines
        steps = running[0][0] - self._step
        batch, kv = max(1, round(len(running) / engines)), round(self._kv / engines)
        self.now += self._setting.model.decode_seconds(batch, kv, steps)
        self._step += steps
        self._kv += steps * len(running)
        self._peak = max(self._peak, self._kv)
        while running and running[0][0] == self._step:
            end, _, length, group = heapq.heappop(running)
            self._kv -= self._setting.prompt_tokens + length
            group.ends.append((end, length))
            group.open -= 1
            if not group.open:
                self._open -= 1
                self._ready.append(group)

    # --- staleness -----------------------------------------------------------------------------

    def _beyond(self, delivered: list[_Group]) -> float:
        bound = self._setting.max_staleness
        return 0.0 if bound is None else self._older(delivered, bound)

    def _older(self, delivered: list[_Group], versions: int) -> float:
        """Tokens that are more than so many versions old when they are delivered."""
        place = len(self._begins) - 1 - versions
        if place <= 0:
            return 0.0
        since = self._begins[place]
        return float(sum(min(n, max(0, n - (end - since))) for g in delivered for end, n in g.ends))
