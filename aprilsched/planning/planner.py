"""Chooses the least stale schedule within 1 % of the best by the objective.

The objective is useful work for the time of whole steps
(:class:`~aprilsched.kernel.core.policies.objective.Objective`). Optima are flat: many schedules are
as good as the best within noise, with very different staleness. So differences below the
objective's `tolerance` do not count, and staleness decides.

Invariants: a schedule that exceeds the user's staleness bound is chosen only if all do. A choice is
a function of its arguments, without randomness. A schedule that fills the KV pool is judged by its
cost, which the trials include.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.core.config import SchedulerConfig
from aprilsched.kernel.core.lengths.observed import ObservedLengths
from aprilsched.kernel.core.messages.commands import Plan
from aprilsched.kernel.core.policies.length_buckets import LengthBuckets
from aprilsched.kernel.core.policies.placement import Placement
from aprilsched.kernel.core.policies.pool import Pool
from aprilsched.kernel.core.policies.refill import Refill
from aprilsched.kernel.core.policies.schedule import Forecast, Pace, Schedule
from aprilsched.kernel.core.policies.straggler import BEHAVIOURS
from aprilsched.kernel.core.policies.tail_batching import TailBatching
from aprilsched.kernel.core.policies.wave import Wave
from aprilsched.planning.forecast_bias import Bias
from aprilsched.planning.setting import Outcome, Setting
from aprilsched.planning.step_times.model import H200_QWEN3_4B, StepTimeModel, share_of_experts
from aprilsched.planning.trial import Drawn, Trial

_STAYS = 0.005
"""Additional share of the objective by which the schedule in force may be worse and stay."""
_STALER = 0.03
"""Additional share of off-policy tokens with which the schedule in force is not replaced."""
_TOO_STALE = 0.005
"""Share of the tokens that may exceed the user's bound; they get loss mask 0, or are evicted."""
_BATCHES, _LEAST_BATCHES, _ROLLOUTS = 24, 8, 256
"""Number of batches in a trial: the first number for batches of at most `_ROLLOUTS` rollouts, and
fewer for larger ones, down to the second number. Larger batches scatter less, so fewer of them are
the same evidence. The time of a choice is proportional to the responses in its trials."""
_BRIEF, _LEAST_BRIEF = 6, 3
"""Number of batches in the first, brief trial of every candidate, and of large ones."""
_MAY_RISE = 0.05
"""Largest distance from the best in the brief trial at which the real best may be."""
_MOST_GROUPS = 128
"""A larger batch is tried out as an equal share of it on fewer engines, if each batch waits for its
longest response."""
_LEAST_GROUPS = 32
"""Otherwise a batch of more groups and of more than `_ROLLOUTS` rollouts is tried out as an equal
share of it, if necessary on a share of an engine. The same number of rollouts in more batches
scatters less, because fewer of them precede the count."""
_LEAST_RESPONSES = 16
"""Number of the longest responses that a share of an engine has room for."""
_MOST_CACHE_GAIN = 1.1
"""Gain from prefilling each prompt once, above which groups stay on one engine. Groups of long
responses on one engine make engines uneven, which took 8 % of the speed of waiting with four
engines."""


_GROUPS_OF_A_BATCH = 48
"""Groups that are drawn for each group of a batch, so that a trial's counted batches use none
twice."""
_MOST_GAPS = 8.0
"""Largest number of gaps of a response in a trial. More gaps are tried out as this number of longer
gaps. A choice with three gaps takes six times the CPU time of a choice without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A schedule and the outcome of its trial."""

    schedule: Schedule
    outcome: Outcome

    def as_schedule(self, *, explained: tuple[float, float], batches: int) -> Schedule:
        """Return the schedule; its forecast records the data that the choice was made with."""
        forecast = self.schedule.forecast
        if forecast is not None:
            forecast = replace(forecast, explained=explained, batches=batches)
        return replace(self.schedule, forecast=forecast)


class Planner:
    """Chooses schedules for runs on engines of one kind.

    Args:
        model: step-time model of an engine (``aprilsched calibrate`` fits one).
        max_running: largest number of requests that one engine decodes together.
        inline: choose on the caller's thread, for virtual clocks, which wait for no process. On a
            real clock this would block the event loop for seconds.

    Without `inline` a running scheduler calls :meth:`plan` in another process, on a copy that
    pickle makes, so what a subclass changes in itself there is lost. A subclass must be defined in
    a module that can be imported, and not in a script or a notebook.
    """

    def __init__(
        self,
        model: StepTimeModel = H200_QWEN3_4B,
        *,
        max_running: int = 512,
        inline: bool = False,
    ) -> None:
        self.model = model
        self.max_running = max_running
        self.inline = inline
        self.bias = Bias()
        """Bias of earlier forecasts, which the run updates batch by batch."""

    def plan(self, command: Plan, config: SchedulerConfig) -> Schedule:
        """Return the schedule to follow, with its expected outcome; it may be the one in force."""
        setting = self.setting(command, config)
        space = Space(
            may_defer=config.may_defer,
            tail=isinstance(config.policies.refill, TailBatching) and config.may_defer,
            paces=command.paces,
            placement="spread" if command.places and command.engines > 1 else None,
        )
        schedules = candidates(setting, space)
        known = math.ceil((len(command.ended) + len(command.open)) / command.batch_groups)
        bias = copy(self.bias)
        explained = _explained(command.current, setting, bias.factor())
        bias.explain(*explained, batches=known)
        tried = trials(setting, schedules, current=command.current, factor=bias.factor())
        tolerance = config.objective.tolerance
        best = choose(tried, tolerance)
        now = next((t for t in tried if t.schedule.same_as(command.current)), None)
        if now is not None and _may_stay(now, best, tried, tolerance):
            best = now
        if space.placement is not None and _cache_gain(best, setting) > _MOST_CACHE_GAIN:
            best = replace(best, schedule=replace(best.schedule, placement="prefix"))
        return best.as_schedule(explained=explained, batches=known)

    def setting(self, command: Plan, config: SchedulerConfig) -> Setting:
        """Return the conditions in which candidates are tried out."""
        stop, staleness = config.policies.stop, config.policies.staleness
        observed = ObservedLengths(window=10**9)
        for group in command.ended:
            observed.add_group(group)
        restarts = staleness.rule == "restart"
        scale = Scale.of_run(command, self.max_running, whole_engines=restarts)
        batch_groups = math.ceil(command.batch_groups / scale.share - 1e-9)
        lengths = observed.draw_groups(
            _GROUPS_OF_A_BATCH * batch_groups,
            group_size=command.group_size,
            open_groups=command.open,
            most=command.most_tokens,
        )
        kv, gaps = command.kv_tokens, min(command.gaps, _MOST_GAPS)
        return Setting(
            lengths=lengths,
            batch_groups=batch_groups,
            engines=scale.engines,
            share=command.engines * scale.thinner / scale.engines,
            fleet=command.engines,
            model=_share_of(self.model, scale.thinner),
            max_running=max(1, round(self.max_running / scale.thinner)),
            kv_tokens=None if kv is None else int(kv / command.engines / scale.thinner),
            prompt_tokens=command.prompt_tokens,
            spare_tokens=command.spare_tokens,
            keeps_kv=config.cached_kv == "keep",
            runs_out=BEHAVIOURS[config.straggler].called_back == "never",
            max_staleness=staleness.bound,
            restarts=restarts,
            pace=config.first_pace,
            ready_batches=config.ready_batches,
            train_seconds=command.train_seconds or 0.0,
            train_spread=command.train_spread,
            train_early=min(max(command.train_early, 0.0), 1.0),
            refit_seconds=command.refit_seconds or 0.0,
            reward_times=command.reward_seconds,
            accepted=command.accepted,
            gaps=gaps,
            gap_times=tuple(command.gaps / gaps * seconds for seconds in command.gap_seconds)
            if gaps
            else (),
            end_times=command.end_seconds,
            objective=config.objective,
            iid_distance=observed.iid_distance(batch_groups) or 0.0,
            remembered=min(max(command.remembered, 0.0), 0.99),
            # There are few candidates without stale tokens, and they differ by a few percent.
            batches=80 if restarts else _batches(batch_groups, lengths),
            shared=_shared(observed),
            stop=replace(stop, amount=math.ceil(stop.amount / scale.share - 1e-9)),
            takes_over=True,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """A trial of a smaller fleet that behaves like the whole one.

    Attributes:
        share: groups in a batch of the run, divided by groups in a batch of the trial.
        engines: number of engines in the trial.
        thinner: size of an engine of the run, divided by the size of an engine of the trial.
    """

    share: float
    engines: int
    thinner: float

    @classmethod
    def of_run(cls, command: Plan, max_running: int, *, whole_engines: bool) -> Scale:
        """Return the smallest trial of the run that `command` describes.

        With `whole_engines` only the number of engines shrinks, not their size.
        """
        if whole_engines:
            share = max(1.0, min(command.engines, command.batch_groups // _MOST_GROUPS))
        else:
            size = max(len(group.tokens) for group in command.ended)
            longest = max(int(group.tokens.max()) for group in command.ended)
            share = command.batch_groups / max(_LEAST_GROUPS, _ROLLOUTS / size)
            room = max_running * command.engines / _LEAST_RESPONSES
            if command.kv_tokens is not None:
                least = _LEAST_RESPONSES * (command.prompt_tokens + longest)
                room = min(room, command.kv_tokens / least)
            share = max(1.0, min(share, room))
        engines = max(1, round(command.engines / share))
        thinner = 1.0 if whole_engines else share * engines / command.engines
        return cls(share=share, engines=engines, thinner=thinner)


class Halving:
    """Outcomes of brief trials of candidates, and of full trials of the candidates near the best.

    Args:
        setting: the conditions, in which engines work `factor` times as fast as they are modelled.
        several: the candidates, which are named by their places.
    """

    def __init__(self, setting: Setting, several: Sequence[Schedule], factor: float) -> None:
        self.brief: dict[int, Outcome] = {}
        self.full: dict[int, Outcome] = {}
        self._setting, self._several, self._factor = setting, several, factor
        self._drawn = Drawn.of(setting)
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
            most = _most(self._several[place], self._setting) * self._factor
            if place not in self.brief and most >= self.least_near:
                trial = Trial(self._several[place], self._setting, self._drawn)
                outcome = trial.outcome(self._brief_batches).in_work_of(self._factor)
                if outcome.value >= self.least_near:
                    self._running[place] = trial
                self.brief[place] = outcome

    def try_fully(self, places: Iterable[int]) -> None:
        """Give the candidates at `places` a full trial, unless they have had one."""
        for place in places:
            if place not in self.full:
                trial = self._running.pop(place, None)
                trial = trial or Trial(self._several[place], self._setting, self._drawn)
                outcome = trial.outcome(self._setting.batches)
                self.full[place] = outcome.in_work_of(self._factor)

    def near(self) -> list[int]:
        """Candidates near the best, within the bound so far, that have had no full trial."""
        allowed = {p: self.brief[p] for p in sorted(self.brief) if self._may_be_allowed(p)}
        least = _least_near(allowed)
        return [p for p, each in allowed.items() if each.value >= least and p not in self.full]

    def _may_be_allowed(self, place: int) -> bool:
        return _allowed(self.full.get(place, self.brief[place]))


def trials(
    setting: Setting,
    several: Sequence[Schedule],
    *,
    current: Schedule | None = None,
    factor: float = 1.0,
) -> list[Tried]:
    """Try `several` candidates, and return them with their expected outcomes.

    The outcomes, corrected by `factor`, are also written into the schedules.

    Every fourth ratio of each refill rule gets a brief trial, or every second one if groups are
    deferred, because deferring scatters more. A ratio in between gets one if its neighbour is near
    the best. The candidates near the best, and `current`, then get a full trial. If a candidate
    exceeds a bound in it, the next best one takes its place.
    """
    halving = Halving(setting.faster(factor), several, factor)
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
    waiting = next((place for place in sorted(halving.brief) if _waits(several[place])), None)
    plain = None
    if setting.restarts and waiting is not None:
        halving.try_fully([waiting])
        plain = halving.full[waiting]
    outcomes = halving.full or halving.brief
    return [
        _tried(several[place], outcomes[place], setting, factor, plain)
        for place in sorted(outcomes)
    ]


def _between(
    places: Sequence[int], stride: int, tried: Mapping[int, Outcome], least: float
) -> Iterable[int]:
    """Yield places halfway between places `2 * stride` apart, if a neighbour is worth `least`."""
    for index in range(stride, len(places), 2 * stride):
        beside = places[index - stride : index + stride + 1 : 2 * stride]
        if any(tried[each].value >= least for each in beside if each in tried):
            yield places[index]


def _explained(current: Schedule, setting: Setting, factor: float) -> tuple[float, float]:
    """Return how current data change the forecast of the schedule in force, as two ratios.

    They are the work and the time of a batch with current data, over the work and the time in the
    schedule's own forecast, without a correction.
    """
    before = current.forecast
    if before is None:
        return 1.0, 1.0
    now = Trial(current, setting.faster(factor)).outcome(setting.batches)
    longer = now.step_seconds / before.step_seconds
    # The trial's T_bound assumes engines that are faster by the factor.
    work = 1.0 if before.hidden else longer * now.efficiency * factor / before.efficiency
    return work, longer * factor / before.correction


def _cache_gain(tried: Tried, setting: Setting) -> float:
    """How many times as fast a schedule is if each prompt is prefilled once, on one engine."""
    outcome = tried.outcome
    seconds = setting.prefill_of_divided(outcome.mean_age)
    return 1 + seconds / (outcome.step_seconds + outcome.trainer_seconds)


def _most(schedule: Schedule, setting: Setting) -> float:
    """What a schedule would be worth if its engines always did as much work as they can."""
    work = setting.group_work * setting.batch_groups
    training = setting.train_seconds * (1 - setting.train_early)
    ahead = (schedule.pace or setting.pace) == "asynchronous"
    busy = max(work, training) if ahead else work + training
    return work / (busy + setting.refit_seconds)


def _least_near(outcomes: Mapping[int, Outcome]) -> float:
    """Return the least value that is near the best of those within the bound."""
    best = max((each.value for each in outcomes.values() if _allowed(each)), default=0.0)
    return (1 - _MAY_RISE) * best


def _waits(schedule: Schedule) -> bool:
    """Return whether each batch waits for every response to any prompts."""
    return schedule.refill == Wave() and schedule.over_provision == 1


def _tried(
    schedule: Schedule,
    outcome: Outcome,
    setting: Setting,
    correction: float,
    waiting: Outcome | None = None,
) -> Tried:
    """Return a schedule with its expected outcome.

    The explanation compares it with `waiting`, the outcome of waiting for any prompts.
    """
    model, engines = setting.model, setting.engines * setting.share
    why = (
        f"{in_words(schedule)}: {outcome.efficiency:.1%} of the bound with "
        f"{outcome.off_policy_share:.0%} of the tokens off-policy expected"
    )
    if waiting is not None and not _waits(schedule):
        gain = outcome.value / waiting.value - 1
        why += f", {gain:+.1%} useful work against waiting for any prompts"
    forecast = Forecast(
        step_seconds=outcome.step_seconds,
        efficiency=outcome.efficiency,
        off_policy_share=outcome.off_policy_share,
        mean_age=outcome.mean_age,
        distance=outcome.distance,
        driven=outcome.driven_seconds / outcome.step_seconds,
        correction=correction,
        token_seconds=model.token_seconds(setting.max_running) / engines,
        read_seconds=model.t2 / engines,
    )
    return Tried(schedule=replace(schedule, forecast=forecast, why=why), outcome=outcome)


def choose(tried: Sequence[Tried], tolerance: float) -> Tried:
    """Return the least stale candidate within `tolerance` of the best one within the bound.

    If several are equally stale, for example because nothing may be stale, return the one that
    waits for any prompts, or else the best. Waiting discards no tokens, and its batches follow the
    law.
    """
    allowed = [t for t in tried if _allowed(t.outcome)]
    if not allowed:
        # No candidate is within the bound, so the freshest is the best.
        return min(tried, key=lambda t: (t.outcome.too_stale_share, -t.outcome.value))
    best = max(t.outcome.value for t in allowed)
    near = [t for t in allowed if t.outcome.value >= (1 - tolerance) * best]
    return min(
        near,
        key=lambda t: (t.outcome.off_policy_share, not _waits(t.schedule), -t.outcome.value),
    )


def _allowed(outcome: Outcome) -> bool:
    return outcome.too_stale_share <= _TOO_STALE


def _may_stay(now: Tried, best: Tried, tried: Sequence[Tried], tolerance: float) -> bool:
    most = max((t.outcome.value for t in tried if _allowed(t.outcome)), default=0)
    return (
        _allowed(now.outcome)
        and now.outcome.value >= (1 - tolerance - _STAYS) * most
        and now.outcome.off_policy_share <= best.outcome.off_policy_share + _STALER
    )


def _share_of(model: StepTimeModel, share: float) -> StepTimeModel:
    """Return the model of a 1 / `share` part of an engine.

    Its step takes as long as a step of `model` with `share` times the responses, tokens and room.
    """
    return replace(
        model,
        t1=model.t1 * share,
        t2=model.t2 * share,
        prefill_rate=model.prefill_rate / share,
        prefill_chunk=max(1, round(model.prefill_chunk / share)),
        wide_from=round(model.wide_from / share),
        fill=model.fill / share,
        expert_share=share_of_experts(model.expert_share, share),
    )


def _batches(batch_groups: int, lengths: NDArray[np.int64]) -> int:
    rollouts = batch_groups * np.count_nonzero(lengths) / len(lengths)
    return min(_BATCHES, max(_LEAST_BATCHES, round(_BATCHES * _ROLLOUTS / rollouts)))


def _shared(observed: ObservedLengths) -> float:
    shared = observed.shared_log_variance()
    return 0.5 if shared is None else shared


RATIOS = (1.0, 1.0625, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0)
_POOL_RATIOS = (0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
_POOL_UNTIL = (0.25, 1.0)
_BUCKET_RATIOS = (1.125, 1.25, 1.375, 1.5, 1.5625, 1.625, 1.6875, 1.75, 2.0, 2.25, 2.5, 3.0)
_STORES = (LengthBuckets(store=5.0, oldest=16), LengthBuckets(store=3.5, oldest=6))
_WAITED = (
    LengthBuckets(store=2.0, probe_after=0.97),
    LengthBuckets(store=4.0, probe_after=0.97),
    LengthBuckets(store=6.0, probe_after=0.97),
)
"""Length buckets that are waited for; the middle one is that of the preset `on_policy`."""
_RACES = (1.125, 1.25, 1.375, 1.5)
_AHEAD_WAVES = (1.0, 1.125, 1.25, 1.5, 1.75, 2.0, 2.5)
_AHEAD_POOLS = (0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Ratios on the asynchronous pace, on which at least a batch is generated ahead anyway."""
_TOGETHER = 4
"""Groups of 8 rollouts: one pass for 32 rollouts costs a tenth of one pass for each rollout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Which kinds of schedules are possible.

    Attributes:
        may_defer: length buckets, which take back rollouts that they do not choose.
        tail: tail batching.
        paces: the paces that a schedule may name; with none it has the configured one.
        placement: the placement that schedules name.
    """

    may_defer: bool
    tail: bool = False
    paces: tuple[Pace, ...] = ()
    placement: Placement | None = None


def candidates(setting: Setting, space: Space) -> list[Schedule]:
    """All candidates. Pools refill every engine with a few groups at a time.

    Where the tokens of groups that would be too stale are thrown away, every candidate waits for
    all groups that it runs, or runs each of them to its end some time. On the asynchronous pace
    nothing can be deferred.
    """
    found: list[Schedule] = []
    for pace in space.paces or (None,):
        if (pace or setting.pace) == "asynchronous":
            refills = [] if setting.restarts else _ahead(setting)
        else:
            refills = _in_turn(setting, space)
        found += [
            Schedule(
                over_provision=ratio,
                refill=refill,
                pace=pace,
                placement=space.placement,
            )
            for ratio, refill in refills
        ]
    return found


def _in_turn(setting: Setting, space: Space) -> list[tuple[float, Refill]]:
    """Ratios and refill rules for the synchronous pace."""
    races: list[tuple[float, Refill]] = [(r, TailBatching()) for r in _RACES if space.tail]
    if setting.restarts:
        waited = _WAITED if space.may_defer else ()
        return [(1.0, Wave()), *((1.0, store) for store in waited), *races]
    together = _together(setting)
    refills: list[tuple[float, Refill]] = [(ratio, Wave()) for ratio in RATIOS]
    refills += [
        (ratio, Pool(together=together, until=until))
        for ratio in _POOL_RATIOS
        for until in _POOL_UNTIL
    ]
    if space.may_defer:
        refills += [(ratio, store) for ratio in _BUCKET_RATIOS for store in _STORES]
    return refills + races


def _ahead(setting: Setting) -> list[tuple[float, Refill]]:
    """Ratios and refill rules for the asynchronous pace."""
    pool = Pool(together=_together(setting))
    refills: list[tuple[float, Refill]] = [(ratio, Wave()) for ratio in _AHEAD_WAVES]
    return refills + [(ratio, pool) for ratio in _AHEAD_POOLS]


def _together(setting: Setting) -> int:
    engines = setting.fleet or setting.engines
    return min(_TOGETHER * engines, round(setting.batch_groups * setting.share))


_PLACED: dict[Placement, str] = {
    "prefix": "each group on one engine",
    "spread": "groups divided over the engines",
}


def in_words(schedule: Schedule) -> str:
    """Return the schedule in words."""
    pace = f", {schedule.pace} pace" if schedule.pace is not None else ""
    placed = "" if schedule.placement is None else f", {_PLACED[schedule.placement]}"
    return schedule.refill.describe(f"{schedule.over_provision:g}") + pace + placed
