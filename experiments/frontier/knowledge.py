"""Tries schedules that production does not have: more knowledge of lengths, and other uses of it.

All on :func:`aprilsched.planning.trial.try_out`, whose store of open groups is replaced. The
replacement is put where the trial looks for it, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, Literal, TypeAlias
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.lengths.laws import LogLaw, rest_of_groups
from aprilsched.core.policies.refill import LengthBuckets, Refill, Wave, window
from aprilsched.core.policies.schedule import Schedule
from aprilsched.planning import trial
from aprilsched.planning.setting import Setting
from aprilsched.planning.trial import Store, TrialGroup
from aprilsched.timing.model import H200_QWEN3_4B
from aprilsched.workload import LongTailWorkload
from experiments.frontier.results import write_section

__all__ = ["Knowledge", "Pick"]

BATCHES, SEEDS = 120, 4
_GROUPS = 32
_ROWS = 2 * _GROUPS * BATCHES

Knowledge: TypeAlias = Literal["siblings", "epoch", "oracle"]
"""Finished siblings and probes (production), those and one earlier epoch of the same prompt, or
every length itself."""

Pick: TypeAlias = Literal["alike", "oldest", "shortest", "longest"]
"""Which of the open groups run: neighbours in expected rest (production), those opened first,
those with the least expected rest, or those with the most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """What differs from production's store."""

    knowledge: Knowledge = "siblings"
    pick: Pick = "alike"


class VariantStore(Store):
    """A trial's store with other evidence of lengths, and another choice among groups."""

    def __init__(
        self, refill: Refill, setting: Setting, variant: Variant, earlier: dict[bytes, list[int]]
    ) -> None:
        super().__init__(refill, setting)
        assert isinstance(refill, LengthBuckets)
        self._rule, self._variant, self._earlier = refill, variant, earlier
        logs = np.log(setting.lengths)
        self._known_law = LogLaw(
            mean=float(logs.mean()),
            deviation=float(logs.std()),
            shared=setting.shared,
            cap=float(setting.lengths.max()),
        )

    def choose(
        self,
        count: int,
        lacking: int,
        batch: int,
        *,
        busy: Collection[int] = (),
        tail: bool = False,
    ) -> list[tuple[TrialGroup, int]]:
        """As the store of a trial does."""
        age = np.array([batch - group.opened for group in self.groups], dtype=np.int64)
        chosen = set(self._pick(self._rest(), age, max(1, count)).tolist())
        runs: list[tuple[TrialGroup, int]] = []
        for place, group in enumerate(self.groups):
            if id(group) in busy:
                continue
            first = group.first_run
            if place in chosen or (first is not None and batch - first >= self._rule.oldest):
                members = [m for m, done in enumerate(group.finished) if not done]
            else:
                members = list(range(self._rule.probes)) if first is None else []
            if members and first is None:
                group.first_run = batch
            runs += [(group, member) for member in members]
        return runs

    def _rest(self) -> NDArray[np.float64]:
        tokens = np.array([group.have for group in self.groups], dtype=np.int64)
        finished = np.array([group.finished for group in self.groups], dtype=np.bool_)
        if self._variant.knowledge == "oracle":
            lengths = np.array([group.lengths for group in self.groups], dtype=np.int64)
            return (lengths - tokens).max(axis=1).astype(np.float64)
        if self._variant.knowledge == "epoch":
            # An earlier epoch's responses are evidence as finished siblings are.
            earlier = np.array([self._earlier[_key(group.lengths)] for group in self.groups])
            tokens = np.hstack((tokens, earlier))
            finished = np.hstack((finished, np.ones_like(earlier, dtype=np.bool_)))
        return rest_of_groups(tokens, finished, self._known_law)

    def _pick(
        self, rest: NDArray[np.float64], age: NDArray[np.int64], count: int
    ) -> NDArray[np.int64]:
        if self._variant.pick == "alike":
            return window(rest, age, count)
        key = {"oldest": -age, "shortest": rest, "longest": -rest}[self._variant.pick]
        return np.argsort(key, kind="stable")[:count]


def _key(lengths: list[int]) -> bytes:
    return np.array(lengths, dtype=np.int64).tobytes()


def setting(seed: int) -> tuple[Setting, dict[bytes, list[int]]]:
    """The example's lengths, and those of an earlier epoch: 8 other draws of the same prompt."""
    both = LongTailWorkload(seed=seed, group_size=16)
    drawn = np.array([both.lengths(index) for index in range(_ROWS)])
    now, before = drawn[:, :8], drawn[:, 8:]
    earlier = {row.tobytes(): past.tolist() for row, past in zip(now.copy(), before, strict=True)}
    made = Setting(
        lengths=np.ascontiguousarray(now),
        batch_groups=_GROUPS,
        model=H200_QWEN3_4B,
        prompt_tokens=8,
        batches=BATCHES,
    )
    return made, earlier


@contextmanager
def stores(variant: Variant, earlier: dict[bytes, list[int]]) -> Generator[None]:
    """Trials within have stores of this variant."""

    def store(refill: Refill, setting: Setting) -> VariantStore:
        return VariantStore(refill, setting, variant, earlier)

    with mock.patch.object(trial, "Store", store):
        yield


def buckets(groups: int, variant: Variant, **settings: int) -> Callable[[int], tuple[float, float]]:
    """Efficiency and off-policy share by seed, for so many groups in flight."""
    rule = replace(LengthBuckets(), **settings)
    schedule = Schedule(over_provision=groups / _GROUPS, refill=rule)

    def tried(seed: int) -> tuple[float, float]:
        made, earlier = setting(seed)
        with stores(variant, earlier):
            outcome = trial.try_out(schedule, made)
        return outcome.efficiency, outcome.off_policy_share

    return tried


def sorted_waiting(block: int) -> Callable[[int], tuple[float, float]]:
    """Every longest response known: groups sorted by it within `block` batches, waited for."""

    def tried(seed: int) -> tuple[float, float]:
        made, _ = setting(seed)
        longest = made.lengths.max(axis=1)
        size = block * _GROUPS
        order = np.concatenate(
            [first + np.argsort(longest[first : first + size]) for first in range(0, _ROWS, size)]
        )
        whole = replace(made, lengths=made.lengths[order], burn_in=0)
        schedule = Schedule(over_provision=1.0, refill=Wave())
        outcome = trial.try_out(schedule, whole)
        return outcome.efficiency, outcome.off_policy_share

    return tried


def free_prefill(refill: Refill, ratio: float) -> Callable[[int], tuple[float, float]]:
    """All prefill at no time: the most that hiding it behind decoding could give."""

    def tried(seed: int) -> tuple[float, float]:
        made, _ = setting(seed)
        model = replace(made.model, prefill_pass=0.0, prefill_rate=float("inf"))
        schedule = Schedule(over_provision=ratio, refill=refill)
        outcome = trial.try_out(schedule, replace(made, model=model))
        return outcome.efficiency, outcome.off_policy_share

    return tried


def waves(ratio: float) -> Callable[[int], tuple[float, float]]:
    def tried(seed: int) -> tuple[float, float]:
        schedule = Schedule(over_provision=ratio, refill=Wave())
        outcome = trial.try_out(schedule, setting(seed)[0])
        return outcome.efficiency, outcome.off_policy_share

    return tried


def variants() -> list[tuple[str, str, Callable[[int], tuple[float, float]]]]:
    """What each is about, its name, and how to try it on a seed."""
    none, epoch = Variant(), Variant(knowledge="epoch")
    oracle = Variant(knowledge="oracle")
    found = [
        ("reference", f"waves {ratio:g}", waves(ratio)) for ratio in (1.125, 1.25, 1.5, 1.6875, 2.0)
    ]
    sizes = (40, 48, 54, 64)
    found += [
        ("probes 1 (production)", f"{n} groups", buckets(n, none, probes=1)) for n in (*sizes, 60)
    ]
    found += [("probes 2", f"{n} groups", buckets(n, none, probes=2)) for n in sizes]
    found += [("siblings only", f"{n} groups", buckets(n, none, probes=0)) for n in sizes]
    found += [("one earlier epoch", f"{n} groups", buckets(n, epoch, probes=0)) for n in sizes]
    found += [
        ("one earlier epoch and probes", f"{n} groups", buckets(n, epoch, probes=1))
        for n in (40, 48, 54)
    ]
    found += [("every length known", f"{n} groups", buckets(n, oracle, probes=0)) for n in sizes]
    found += [
        ("every length known, sorted and waited for", f"blocks of {block}", sorted_waiting(block))
        for block in (4, 10, 40)
    ]
    found += [
        (f"which groups: {pick}", "54 groups", buckets(54, Variant(pick=pick)))
        for pick in ("oldest", "shortest", "longest")
    ]
    found += [
        ("free prefill, waves", f"waves {ratio:g}", free_prefill(Wave(), ratio))
        for ratio in (1.25, 1.5, 2.0)
    ]
    found += [
        ("free prefill, buckets", f"{n} groups", free_prefill(LengthBuckets(), n / _GROUPS))
        for n in sizes
    ]
    return found


def main() -> None:
    rows: list[dict[str, Any]] = []
    for about, name, tried in variants():
        several = [tried(seed) for seed in range(SEEDS)]
        efficiency, off_policy = (list(column) for column in zip(*several, strict=True))
        row = {
            "about": about,
            "name": name,
            "efficiency": round(fmean(efficiency), 4),
            "efficiency_error": round(stdev(efficiency) / SEEDS**0.5, 4),
            "off_policy": round(fmean(off_policy), 4),
        }
        rows.append(row)
        print(about, name, row["efficiency"], row["off_policy"])
        write_section("knowledge", rows)


if __name__ == "__main__":
    main()
