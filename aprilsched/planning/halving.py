"""Successive halving: brief trials of candidates, and full trials of those near the best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from aprilsched.kernel.core.policies.refill import Refill
from aprilsched.kernel.core.policies.schedule import Forecast, Pace, Schedule
from aprilsched.planning.candidates import in_words
from aprilsched.planning.draws import Draws
from aprilsched.planning.setting import Outcome, Setting
from aprilsched.planning.trial import Trial

_BRIEF, _LEAST_BRIEF = 6, 3
"""Number of batches in the first, brief trial of every candidate, and of large ones."""
_MAY_RISE = 0.05
"""Largest distance from the best in the brief trial at which the real best may be."""
_TOO_STALE = 0.005
"""Share of the tokens that may exceed the user's bound; they get loss mask 0, or are evicted."""
_TOO_STALE_BRIEFLY = 0.01
"""The same in a brief trial that may be continued. Single samples of a few batches measured 0.0058
where four times as many batches measured 0.0044, for a schedule that was a fifth faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A schedule and the outcome of its trial."""

    schedule: Schedule
    outcome: Outcome


class Halving:
    """Outcomes of brief trials of candidates, and of full trials of the candidates near the best.

    Args:
        setting: the conditions.
        several: the candidates, which are named by their places.
    """

    def __init__(self, setting: Setting, several: Sequence[Schedule]) -> None:
        self.brief: dict[int, Outcome] = {}
        self.full: dict[int, Outcome] = {}
        self._setting, self._several = setting, several
        self._draws = Draws.of(setting)
        self._brief_batches = min(_BRIEF, max(_LEAST_BRIEF, setting.batches // 4))
        self._running: dict[int, Trial] = {}
        """Brief trials that can be continued. Other trials restart if their result is needed."""

    @property
    def least_near(self) -> float:
        """The least value of a brief trial whose candidate may be the best."""
        return _least_near(self.brief)

    def try_briefly(self, places: Iterable[int]) -> None:
        """Give each candidate at `places` a brief trial, unless it has had one.

        Candidates are skipped that would not be near the best even if their engines never waited.
        """
        for place in places:
            most = _most(self._several[place], self._setting)
            if place not in self.brief and most >= self.least_near:
                trial = Trial(self._several[place], self._setting, self._draws)
                outcome = trial.outcome(self._brief_batches)
                if outcome.value >= self.least_near:
                    self._running[place] = trial
                self.brief[place] = outcome

    def try_fully(self, places: Iterable[int]) -> None:
        """Give the candidates at `places` a full trial, unless they have had one."""
        for place in places:
            if place not in self.full:
                trial = self._running.pop(place, None)
                trial = trial or Trial(self._several[place], self._setting, self._draws)
                self.full[place] = trial.outcome(self._setting.batches)

    def near(self) -> list[int]:
        """Candidates near the best, within the bound so far, that have had no full trial."""
        allowed = {p: self.brief[p] for p in sorted(self.brief) if self._may_be_allowed(p)}
        least = _least_near(allowed)
        return [p for p, each in allowed.items() if each.value >= least and p not in self.full]

    def _may_be_allowed(self, place: int) -> bool:
        if place in self.full:
            return is_fresh_enough(self.full[place])
        return self.brief[place].too_stale_share <= _TOO_STALE_BRIEFLY


def trials(
    setting: Setting, several: Sequence[Schedule], *, current: Schedule | None = None
) -> list[Tried]:
    """Try `several` candidates, and return them with their expected outcomes.

    The outcomes are also written into the schedules.

    Every fourth ratio of each refill rule gets a brief trial, or every second one if groups are
    deferred, because deferring scatters more. A ratio in between gets one if its neighbour is near
    the best. The candidates near the best, and `current`, then get a full trial. If a candidate
    exceeds a bound in it, the next best one takes its place.
    """
    halving = Halving(setting, several)
    rules: dict[tuple[Refill, Pace | None], list[int]] = {}
    for place, schedule in enumerate(several):
        rules.setdefault((schedule.refill, schedule.pace), []).append(place)
    # With a slow trainer, the outcomes of asynchronous schedules show that the synchronous ones
    # need no trial.
    ratios = [rules[rule] for rule in sorted(rules, key=lambda rule: rule[1] == "synchronous")]
    for places in ratios:
        halving.try_briefly(places[:: 2 if several[places[0]].refill.defers else 4])
    for stride, tolerance in ((2, _MAY_RISE), (1, 0.0)):
        least = (1 - tolerance) * halving.least_near
        for places in ratios:
            halving.try_briefly(_between(places, stride, halving.brief, least))
    now = [p for p, each in enumerate(several) if current is not None and each.same_as(current)]
    halving.try_briefly(now)
    while near := halving.near():
        halving.try_fully(near)
    if halving.full:
        # The schedule in force needs an equally long trial, or it would be replaced by chance.
        halving.try_fully(place for place in now if place in halving.brief)
    outcomes = halving.full or halving.brief
    return [_tried(several[place], outcomes[place], setting) for place in sorted(outcomes)]


def _between(
    places: Sequence[int], stride: int, tried: Mapping[int, Outcome], least: float
) -> Iterable[int]:
    """Yield places halfway between places `2 * stride` apart, if a neighbour is worth `least`."""
    for index in range(stride, len(places), 2 * stride):
        neighbours = places[index - stride : index + stride + 1 : 2 * stride]
        if any(tried[each].value >= least for each in neighbours if each in tried):
            yield places[index]


def _most(schedule: Schedule, setting: Setting) -> float:
    """What a schedule would be worth if its engines always did as much work as they can."""
    work = setting.group_work * setting.batch_groups
    training = setting.train_seconds
    ahead = (schedule.pace or setting.pace) == "asynchronous"
    busy = max(work, training) if ahead else work + training
    return work / (busy + setting.refit_seconds)


def _least_near(outcomes: Mapping[int, Outcome]) -> float:
    """Return the least value that is near the best of those within the bound."""
    best = max((each.value for each in outcomes.values() if is_fresh_enough(each)), default=0.0)
    return (1 - _MAY_RISE) * best


def _tried(schedule: Schedule, outcome: Outcome, setting: Setting) -> Tried:
    """Return a schedule with its expected outcome."""
    model, engines = setting.model, setting.engines * setting.share
    why = (
        f"{in_words(schedule)}: {outcome.efficiency:.1%} of the bound at a mean staleness of "
        f"{outcome.mean_staleness:.2f} expected"
    )
    forecast = Forecast(
        step_seconds=outcome.step_seconds,
        efficiency=outcome.efficiency,
        off_policy_share=outcome.off_policy_share,
        mean_staleness=outcome.mean_staleness,
        distance=outcome.distance,
        token_seconds=model.token_seconds(setting.max_running) / engines,
        read_seconds=model.read_seconds / engines,
    )
    return Tried(schedule=replace(schedule, forecast=forecast, why=why), outcome=outcome)


def is_fresh_enough(outcome: Outcome) -> bool:
    """Return whether nearly all tokens of a trial are within the user's bound."""
    return outcome.too_stale_share <= _TOO_STALE
