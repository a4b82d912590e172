"""Runs the measured schedules on the embedded engine, without aprilsched's scheduler.

All have the built-in workload's distribution, batches of 32 groups of 8 and prompts of 8 tokens. A
step is the time from one batch to the next. Each schedule is a function that gives one row for each
step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from aprilsched.kernel.engines.base import GenerationRequest
from aprilsched.planning.step_times.model import H200_QWEN3_4B_LINEAR, StepTimeModel
from aprilsched.simulation.engine import Batcher, SimConfig
from aprilsched.simulation.workload import LongTailWorkload
from aprilsched.types import SamplingParams

__all__ = ["Row", "cached_waves", "pool", "refilled_waves", "wait_for_all", "waves"]

GROUPS, MEMBERS, PROMPT = 32, 8, 8


class Row(NamedTuple):
    """One step: its seconds, generated tokens/s, tokens prefilled, and tokens cached at its end."""

    seconds: float
    rate: float
    prefilled: int
    cached: int


@dataclass
class Open:
    """A group under way: the length of each member, and the tokens it has."""

    lengths: np.ndarray
    have: np.ndarray = field(default_factory=lambda: np.zeros(MEMBERS, dtype=np.int64))

    @property
    def complete(self) -> bool:
        return bool((self.have == self.lengths).all())


class Rig:
    """A batcher with pure timing, and groups that are sent to it."""

    def __init__(self, seed: int, timing: StepTimeModel) -> None:
        self.workload = LongTailWorkload(seed=seed)
        self.batcher = Batcher(
            SimConfig(timing=timing, make_tokens=False, admission="sglang-0.5.21")
        )
        self.now = 0.0
        self.groups = 0
        self.sent: dict[str, tuple[Open, int]] = {}
        self.queue: list[tuple[Open, int]] = []
        self.in_flight = 0
        self.complete: list[Open] = []
        self.rows: list[Row] = []
        self._before = (0.0, 0, 0)

    def group(self) -> Open:
        self.groups += 1
        return Open(self.workload.lengths(self.groups - 1))

    def send(self, group: Open, member: int) -> None:
        """Send what is left of one member, its prefix as context."""
        name, done = f"{len(self.sent):08}", int(group.have[member])
        self.sent[name] = (group, member)
        self.in_flight += 1
        left = int(group.lengths[member]) - done
        sampling = SamplingParams(max_new_tokens=left, ignore_eos=True)
        prompt = np.zeros(PROMPT + done, dtype=np.int32)
        request = GenerationRequest(request_id=name, input_ids=prompt, sampling=sampling)
        self.batcher.submit(request, self.now)

    def send_group(self) -> None:
        group = self.group()
        for member in range(MEMBERS):
            self.send(group, member)

    def fill(self, size: int) -> None:
        """Send members of new groups until `size` are in flight."""
        while self.in_flight < size:
            if not self.queue:
                group = self.group()
                self.queue = [(group, member) for member in range(MEMBERS)]
            self.send(*self.queue.pop(0))

    def next_event(self) -> bool:
        due = self.batcher.next_event_time()
        if due is None:
            return False
        self.now = due
        for name, chunk in self.batcher.advance(due):
            group, member = self.sent[name]
            group.have[member] += len(chunk.token_ids)
            if chunk.finish is not None:
                self.in_flight -= 1
                if group.complete:
                    self.complete.append(group)
        return True

    def retract(self, *, flush: bool) -> None:
        """Everyone back to the queue, their KV dropped or kept; then decoding goes on."""
        self.batcher.pause("retract", self.now)
        while self.batcher.paused is None:
            assert self.next_event()
        if flush:
            assert self.batcher.flush()
        self.batcher.resume(self.now)

    def end_step(self) -> list[Open]:
        """Take the batch and write down its row."""
        batch, self.complete = self.complete[:GROUPS], self.complete[GROUPS:]
        counters, (start, generated, prefilled) = self.batcher.counters, self._before
        seconds = self.now - start
        rate = (counters.generated - generated) / seconds
        computed = counters.prefilled - prefilled
        self.rows.append(Row(seconds, rate, computed, self.batcher.kv_in_use))
        self._before = (self.now, counters.generated, counters.prefilled)
        return batch


def waves(seed: int, steps: int, timing: StepTimeModel = H200_QWEN3_4B_LINEAR) -> list[Row]:
    """APRIL's own schedule: launch up to 64 groups, abort at 32, carry, prefill the carried."""
    rig, carried = Rig(seed, timing), list[Open]()
    for _ in range(steps):
        launched = carried + [rig.group() for _ in range(2 * GROUPS - len(carried))]
        for group in launched:
            for member in np.flatnonzero(group.have < group.lengths):
                rig.send(group, int(member))
        while len(rig.complete) < GROUPS:
            assert rig.next_event()
        for name in rig.sent:
            rig.batcher.abort(name, rig.now)
        while rig.next_event():
            pass
        batch = {id(group) for group in rig.end_step()}
        carried = [g for g in launched if id(g) not in batch and not g.complete]
    return rig.rows


def cached_waves(seed: int, steps: int, timing: StepTimeModel = H200_QWEN3_4B_LINEAR) -> list[Row]:
    """The same with a prefix cache, which gives the carried back their context at once."""
    rig = Rig(seed, timing)
    for step in range(steps):
        if step:
            rig.retract(flush=False)
        groups = {id(g): g for g, _ in rig.sent.values() if not g.complete}
        for _ in range(2 * GROUPS - len(groups) - len(rig.complete)):
            rig.send_group()
        while len(rig.complete) < GROUPS:
            assert rig.next_event()
        rig.end_step()
    return rig.rows


def refilled_waves(
    seed: int, steps: int, size: int, timing: StepTimeModel = H200_QWEN3_4B_LINEAR
) -> list[Row]:
    """`size` requests in flight after each batch, the carried computed again; no refill between."""
    rig = Rig(seed, timing)
    for step in range(steps):
        if step:
            rig.retract(flush=True)
        rig.fill(size)
        while len(rig.complete) < GROUPS:
            assert rig.next_event()
        rig.end_step()
    return rig.rows


def wait_for_all(seed: int, steps: int, timing: StepTimeModel = H200_QWEN3_4B_LINEAR) -> list[Row]:
    """32 groups at a time, the last response waited for."""
    rig = Rig(seed, timing)
    for _ in range(steps):
        rig.fill(GROUPS * MEMBERS)
        while rig.next_event():
            pass
        rig.end_step()
    return rig.rows


def pool(
    seed: int,
    steps: int,
    size: int,
    timing: StepTimeModel = H200_QWEN3_4B_LINEAR,
    *,
    recompute: bool = False,
) -> list[Row]:
    """`size` requests always in flight, refilled one by one; KV kept or computed again."""
    rig = Rig(seed, timing)
    for step in range(steps):
        if step and recompute:
            rig.retract(flush=True)
        while len(rig.complete) < GROUPS:
            rig.fill(size)
            assert rig.next_event()
        rig.end_step()
    return rig.rows
