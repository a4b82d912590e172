"""Checks what holds for every schedule: the bound, the transient's identity, and the 2 % rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from aprilsched.config import SchedulerConfig
from aprilsched.core.messages.facts import BatchDelivered, DeliveredRollout, Fact, PromptsReceived
from aprilsched.core.policies.refill import Pool
from aprilsched.core.policies.schedule import FixedRatio, Schedule
from aprilsched.core.policies.straggler import StragglerRule
from aprilsched.planning.planner import Space, candidates, choose, trials
from aprilsched.planning.setting import Setting
from aprilsched.timing.model import H200_QWEN3_4B_LINEAR
from aprilsched.workload import LongTailWorkload
from experiments.formulas.row import Row
from experiments.frontier.measured import Figures, mean, run

__all__ = ["bound", "least_stale", "transients"]

_SEEDS = 2


def bound() -> Iterator[Row]:
    """A full engine that keeps its KV and never lacks work comes near the bound."""
    for ratio in (1.0, 1.5, 2.0):
        for together in (4, 16):
            config = SchedulerConfig(
                over_provision=ratio, refill=Pool(together=together), straggler="in_place"
            )
            found = _mean(config)
            at = f"pool of {round(256 * ratio)}, {8 * together} refilled together, KV kept"
            yield Row("T_bound / T", at, 1.0, found.efficiency)
            explained = found.efficiency + found.thin + found.prefill
            yield Row("T_bound + thin steps + prefill, over T", at, 1.0, explained)


@dataclass(slots=True)
class _Keys:
    """Which prompts were delivered and how many were fetched, after each batch."""

    wants_tokens = True  # with them come the keys of the prompts

    delivered: list[list[int]] = field(default_factory=list[list[int]])
    fetched: list[int] = field(default_factory=list[int])
    _count: int = 0

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            if isinstance(fact, PromptsReceived):
                self._count += fact.prompts
            elif isinstance(fact, BatchDelivered):
                self.delivered.append(list(dict.fromkeys(map(_index, fact.rollouts))))
                self.fetched.append(self._count)


def _index(rollout: DeliveredRollout) -> int:
    assert isinstance(rollout.key, int)
    return rollout.key


def transients() -> Iterator[Row]:
    """Mean delivered length, predicted from the responses in flight, for waves and length buckets.

    The predictions are for 1 to 60 batches. In flight is what was fetched and not delivered;
    prompts that wait unopened have the mean length.
    """
    rounds = replace(SchedulerConfig(), refill="buckets", over_provision=1.69)
    several = {"waves, rho = 2": SchedulerConfig(over_provision=2.0), "rounds, rho = 1.69": rounds}
    for name, config in several.items():
        keys, workload = _Keys(), LongTailWorkload()
        run(config, workload, batches=60, listeners=[keys])
        lengths = np.array([workload.lengths(i).sum() / 8 for i in range(keys.fetched[-1])])
        drawn = workload.mean_length()
        for batches in (1, 4, 16, 60):
            done = np.array([k for batch in keys.delivered[:batches] for k in batch])
            rest = np.setdiff1d(np.arange(keys.fetched[batches - 1]), done)
            # -I (l / mu - 1) / (K N), with the groups as units: all have eight members.
            predicted = -float((lengths[rest] / drawn - 1).sum()) / len(done)
            at = f"{name}, after {batches} batches"
            measured = float(lengths[done].mean())
            yield Row("transient, as 1 + bias", at, 1 + predicted, measured / drawn)
            # What is left is chance: the drawn lengths' own mean is not quite mu.
            mean_of_all = float(lengths[: keys.fetched[batches - 1]].mean())
            own = -float((lengths[rest] / mean_of_all - 1).sum()) / len(done)
            yield Row("the same about the drawn mean", at, 1 + own, measured / mean_of_all)


def least_stale() -> Iterator[Row]:
    """The fastest candidate and the least stale within 2 % of it, both in the simulation."""
    rules: tuple[StragglerRule, ...] = ("retract", "in_place")
    for straggler in rules:
        fastest, chosen = _both(straggler)
        at = "recompute" if straggler == "retract" else "KV kept"
        forecast = chosen.forecast
        assert forecast is not None
        a, b = _mean(_config(fastest, straggler)), _mean(_config(chosen, straggler))
        yield Row("efficiency: least stale within 2 %, fastest", at, b.efficiency, a.efficiency)
        yield Row("off-policy share: the same two", at, b.off_policy, a.off_policy)
        yield Row(
            "efficiency of the choice: trial, simulation", at, forecast.efficiency, b.efficiency
        )
        yield Row(
            "off-policy share: trial, simulation", at, forecast.off_policy_share, b.off_policy
        )


def _both(straggler: StragglerRule) -> tuple[Schedule, Schedule]:
    keeps = straggler == "in_place"
    workload = LongTailWorkload(seed=7)
    setting = Setting(
        lengths=np.array([workload.lengths(index) for index in range(48 * 32)]),
        batch_groups=32,
        model=H200_QWEN3_4B_LINEAR,
        prompt_tokens=8,
        kv_tokens=1_000_000,
        keeps_kv=keeps,
    )
    tried = trials(setting, candidates(setting, Space(may_defer=not keeps)))
    fastest = max(tried, key=lambda one: one.outcome.efficiency)
    return fastest.schedule, choose(tried, 0.02).schedule


def _config(schedule: Schedule, straggler: StragglerRule) -> SchedulerConfig:
    assert isinstance(schedule.over_provision, FixedRatio)
    config = SchedulerConfig(straggler=straggler, over_provision=schedule.over_provision.ratio)
    return replace(config, refill=schedule.refill)


def _mean(config: SchedulerConfig) -> Figures:
    return mean(
        [run(config, LongTailWorkload(seed=s), batches=60).figures(15) for s in range(_SEEDS)]
    )
