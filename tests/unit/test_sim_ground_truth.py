"""The simulated engine against two schedules measured on one H200 (SGLang 0.5.17, 4B shape).

Both ran the built-in workload's law (32 groups of 8 a batch). The measured lengths are another
draw, so means over seeds and steps are compared; tolerances are stated where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from aprilsched.engines.base import GenerationRequest
from aprilsched.engines.sim import Batcher, SimConfig
from aprilsched.types import SamplingParams
from aprilsched.workload import LongTailWorkload

GROUPS, MEMBERS, PROMPT = 32, 8, 8
SEEDS = range(4)


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

    def __init__(self, seed: int) -> None:
        self.workload = LongTailWorkload(seed=seed)
        self.batcher = Batcher(SimConfig(make_tokens=False))
        self.now = 0.0
        self.groups = 0
        self.sent: dict[str, tuple[Open, int]] = {}
        self.in_flight = 0
        self.complete: list[Open] = []

    def group(self) -> Open:
        self.groups += 1
        return Open(self.workload.lengths(self.groups - 1))

    def send(self, group: Open, member: int) -> None:
        """Send what is left of one member, its prefix as context."""
        name, done = f"{len(self.sent):08}", int(group.have[member])
        self.sent[name] = (group, member)
        self.in_flight += 1
        left = int(group.lengths[member]) - done
        request = GenerationRequest(
            request_id=name,
            input_ids=np.zeros(PROMPT + done, dtype=np.int32),
            sampling=SamplingParams(max_new_tokens=left, ignore_eos=True),
        )
        self.batcher.submit(request, self.now)

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


def waves(seed: int, steps: int) -> list[tuple[float, float, int]]:
    """APRIL's own schedule: launch 64 groups, abort at 32, carry. Seconds, tokens/s, prefilled."""
    rig, carried = Rig(seed), list[Open]()
    counters, rows = rig.batcher.counters, list[tuple[float, float, int]]()
    for _ in range(steps):
        start, generated, prefilled = rig.now, counters.generated, counters.prefilled
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
        batch = {id(group) for group in rig.complete[:GROUPS]}
        rig.complete = rig.complete[GROUPS:]
        carried = [g for g in launched if id(g) not in batch and not g.complete]
        seconds = rig.now - start
        rate = (counters.generated - generated) / seconds
        rows.append((seconds, rate, counters.prefilled - prefilled))
    return rows


def pool(seed: int, steps: int, size: int) -> list[tuple[float, float, int]]:
    """A constant pool refilled one by one, KV kept. Seconds, tokens/s, cached tokens."""
    rig, queue = Rig(seed), list[tuple[Open, int]]()
    counters, rows = rig.batcher.counters, list[tuple[float, float, int]]()
    for _ in range(steps):
        start, generated = rig.now, counters.generated
        while len(rig.complete) < GROUPS:
            while rig.in_flight < size:
                if not queue:
                    group = rig.group()
                    queue = [(group, member) for member in range(MEMBERS)]
                rig.send(*queue.pop(0))
            assert rig.next_event()
        rig.complete = rig.complete[GROUPS:]
        seconds = rig.now - start
        rows.append((seconds, (counters.generated - generated) / seconds, rig.batcher.kv_in_use))
    return rows


def test_waves_of_64_groups_take_what_they_took() -> None:
    runs = np.array([waves(seed, 6) for seed in SEEDS])
    seconds, rate, prefilled = runs[:, 1:].mean(axis=(0, 1))
    assert seconds == pytest.approx(np.mean([21.9, 22.1, 22.9]), rel=0.10)
    assert rate == pytest.approx(np.mean([12_193, 12_070, 10_789]), rel=0.10)
    assert prefilled == pytest.approx(np.mean([118_000, 148_000, 143_000]), rel=0.25)
    assert runs[:, 0, 0].mean() == pytest.approx(25.1, rel=0.20)


def test_a_pool_of_320_takes_what_it_took() -> None:
    runs = np.array([pool(seed, 5, 320) for seed in SEEDS])
    seconds, rate, cached = runs[:, 1:].mean(axis=(0, 1))
    assert seconds == pytest.approx(np.mean([23.0, 21.2, 19.6, 25.9]), rel=0.10)
    assert rate == pytest.approx(np.mean([12_758, 12_181, 11_926, 11_453]), rel=0.10)
    assert cached == pytest.approx(np.mean([275_000, 279_000, 293_000, 330_000]), rel=0.10)
    assert runs[:, 0, 0].mean() == pytest.approx(37.5, rel=0.20)
