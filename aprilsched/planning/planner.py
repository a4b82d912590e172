"""Chooses the schedule with the least mean staleness within 1 % of the best by the objective.

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
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.core.config import SchedulerConfig
from aprilsched.kernel.core.lengths.observed import ObservedLengths
from aprilsched.kernel.core.messages.commands import Plan
from aprilsched.kernel.core.policies.schedule import Schedule
from aprilsched.kernel.core.policies.tail_batching import TailBatching
from aprilsched.kernel.core.policies.wave import Wave
from aprilsched.planning.candidates import Space, candidates
from aprilsched.planning.halving import Tried, is_fresh_enough, trials
from aprilsched.planning.scale import ENOUGH_ROLLOUTS, Scale
from aprilsched.planning.setting import Setting
from aprilsched.planning.step_times.model import H200_QWEN3_4B, StepTimeModel

_STAYS = 0.005
"""Additional share of the objective by which the schedule in force may be worse and stay."""
_STALER = 1 / 8
"""Share of its mean staleness by which the schedule in force may be staler and stay. Neighbouring
ratios differ by about a tenth."""
_BATCHES, _LEAST_BATCHES = 24, 8
"""Number of batches in a trial: the first number for batches of at most `ENOUGH_ROLLOUTS` rollouts,
and fewer for larger ones, down to the second number. Larger batches scatter less, so fewer of them
are the same evidence. The time of a choice is proportional to the responses in its trials."""
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


class Planner:
    """Chooses schedules for runs on engines of one kind.

    Args:
        model: step-time model of an engine (``aprilsched calibrate`` fits one).
        max_running: largest number of requests that one engine decodes together.
        dp_ranks: number of data-parallel ranks of an engine, of each of which `model` and
            `max_running` are.
        inline: choose on the caller's thread, for virtual clocks, which wait for no process. On a
            real clock this would block the event loop for seconds.
        reserve_clip: SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION of the servers, which they do not
            report; None for what the engines report, of servers SGLang's default.

    Without `inline` a running scheduler calls :meth:`plan` in another process, on a copy that
    pickle makes, so what a subclass changes in itself there is lost. A subclass must be defined in
    a module that can be imported, and not in a script or a notebook.
    """

    def __init__(
        self,
        model: StepTimeModel = H200_QWEN3_4B,
        *,
        max_running: int = 512,
        dp_ranks: int = 1,
        inline: bool = False,
        reserve_clip: int | None = None,
    ) -> None:
        whole = Scale(share=1, engines=1, thinner=1 / dp_ranks)
        self.model = model if dp_ranks == 1 else whole.model(model)
        self.max_running = max_running * dp_ranks
        self.inline = inline
        self.reserve_clip = reserve_clip

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
        tried = trials(setting, schedules, current=command.current)
        best = choose(tried, config.objective.tolerance, command.current)
        if space.placement is not None and _cache_gain(best, setting) > _MOST_CACHE_GAIN:
            return replace(best.schedule, placement="prefix")
        return best.schedule

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
        reservation = command.reservation
        if reservation is not None and self.reserve_clip is not None:
            reservation = replace(reservation, clip=self.reserve_clip)
        return Setting(
            lengths=lengths,
            batch_groups=batch_groups,
            engines=scale.engines,
            share=command.engines * scale.thinner / scale.engines,
            fleet=command.engines,
            model=scale.model(self.model),
            max_running=max(1, round(self.max_running / scale.thinner)),
            kv_tokens=None if kv is None else int(kv / command.engines / scale.thinner),
            prompt_tokens=command.prompt_tokens,
            spare_tokens=command.spare_tokens,
            reservation=reservation,
            empties=config.behaviour.called_back == "always",
            keeps_kv=config.cached_kv == "keep",
            runs_out=config.behaviour.called_back == "never",
            max_staleness=staleness.bound,
            restarts=restarts,
            pace=config.first_pace,
            ready_batches=config.ready_batches,
            train_seconds=command.train_seconds or 0.0,
            train_spread=command.train_spread,
            refit_seconds=command.refit_seconds or 0.0,
            siblings=config.policies.siblings,
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


def _cache_gain(tried: Tried, setting: Setting) -> float:
    """How many times as fast a schedule is if each prompt is prefilled once, on one engine."""
    outcome = tried.outcome
    seconds = setting.prefill_of_divided(outcome.mean_staleness)
    return 1 + seconds / (outcome.step_seconds + outcome.trainer_seconds)


def choose(tried: Sequence[Tried], tolerance: float, current: Schedule | None = None) -> Tried:
    """Return the candidate with the least mean staleness within `tolerance` of the best one within
    the bound. The `current` schedule may be a little worse and a little staler.

    If several are equally stale, for example because nothing may be stale, return the one that
    waits for any prompts, or else the best. Waiting discards no tokens, and its batches follow the
    distribution.
    """
    allowed = [t for t in tried if is_fresh_enough(t.outcome)]
    if not allowed:
        # No candidate is within the bound, so the freshest is the best.
        return min(tried, key=lambda t: (t.outcome.too_stale_share, -t.outcome.value))
    best = max(t.outcome.value for t in allowed)

    def stays(t: Tried) -> bool:
        return current is not None and t.schedule.same_as(current)

    near = [t for t in allowed if t.outcome.value >= (1 - tolerance - _STAYS * stays(t)) * best]
    return min(
        near,
        key=lambda t: (
            (1 - _STALER * stays(t)) * t.outcome.mean_staleness,
            not stays(t),
            not _waits(t.schedule),
            -t.outcome.value,
        ),
    )


def _waits(schedule: Schedule) -> bool:
    """Return whether each batch waits for every response to any prompts."""
    return schedule.refill == Wave() and schedule.over_provision == 1


def _batches(batch_groups: int, lengths: NDArray[np.int64]) -> int:
    rollouts = batch_groups * np.count_nonzero(lengths) / len(lengths)
    return min(_BATCHES, max(_LEAST_BATCHES, round(_BATCHES * ENOUGH_ROLLOUTS / rollouts)))


def _shared(observed: ObservedLengths) -> float:
    shared = observed.shared_log_variance()
    return 0.5 if shared is None else shared
