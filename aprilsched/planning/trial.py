"""Tries a schedule out on groups of known lengths, for automatic over-provisioning.

The model is much coarser than :mod:`aprilsched.simulation`, and fifty times faster. Its purpose is
the order of schedules, and a test compares it with the simulation within a few percent.

On the synchronous pace a step is a batch, the trainer's time and the refit, one after the other. On
the asynchronous pace generation continues while the trainer trains, and stops only for the refit. A
refit interrupts all requests in flight; they are recomputed afterwards unless the KV is kept.

A complete group waits for its reward, and may then be rejected. With single samples
(``Setting.siblings``) each is such a group as soon as it and its siblings have ended. A batch is
full when enough groups are complete, and is taken when enough of them are accepted. In between,
engines generate or idle as in a run (``awaits_scores`` in
:mod:`aprilsched.kernel.core.steps.batch`). A member with several turns leaves its engine at a gap,
and queues for a slot after the gap.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import replace
from itertools import count

from aprilsched.kernel.core.policies.pool import Pool
from aprilsched.kernel.core.policies.refill import PoolView
from aprilsched.kernel.core.policies.schedule import Schedule
from aprilsched.kernel.core.policies.staleness import Staleness
from aprilsched.planning.deferred_groups import DeferredGroups
from aprilsched.planning.draws import Draws
from aprilsched.planning.setting import Outcome, Setting
from aprilsched.planning.tally import Tally
from aprilsched.planning.trial_engines import Running, TrialEngines
from aprilsched.planning.trial_groups import CompleteGroups, TrialGroup

_QUANTILES = (0.16, -1.53, 0.89, -0.49, 1.53, -0.16, 0.49, -0.89)
"""Eight quantiles of the normal distribution, with mean 0 and a standard deviation of 0.95."""


def try_out(schedule: Schedule, setting: Setting) -> Outcome:
    """Run `schedule` in this setting; `setting.lengths` is repeated if it is too short."""
    return Trial(schedule, setting).outcome(setting.batches)


class Trial:
    """A trial of a schedule, which can be continued after a first, brief outcome.

    Args:
        schedule: the schedule.
        setting: the conditions.
        draws: the draws of this setting; None to draw them here.
    """

    def __init__(self, schedule: Schedule, setting: Setting, draws: Draws | None = None) -> None:
        self._setting = setting
        self._draws = draws or Draws.of(setting)
        self._engines = TrialEngines(setting)
        self._refill = schedule.refill
        if isinstance(self._refill, Pool):
            # A group of the trial stands for `share` groups of the run.
            together = max(1, round(self._refill.together / setting.share))
            self._refill = replace(self._refill, together=together)
        self._asynchronous = (schedule.pace or setting.pace) == "asynchronous"
        rule = "restart" if setting.restarts else "mask"
        self._gate = Staleness(setting.max_staleness, rule=rule)
        self._group_size = setting.group_size
        self._stop_at, self._usual = setting.full_at, setting.usual_group
        self._batch_groups = self._stop_at.batch_groups(self._usual)
        self._target = schedule.target_groups(self._batch_groups)
        self._deferred = DeferredGroups(schedule.refill, setting) if self._refill.defers else None
        self._tally = Tally()
        self.now = 0.0
        self._opened = self._open = 0
        """Number of groups that were opened so far, and of units that are not complete."""
        self._ready, self._scored = CompleteGroups(), CompleteGroups()
        """The complete groups that were not rejected, and the accepted ones of them."""
        self._tickets = count()
        self._scores: list[tuple[float, int, TrialGroup]] = []
        """Heap of the complete groups that wait for their rewards, by the times of these."""
        self._away: list[tuple[float, int, Running]] = []
        """Heap of the members in a gap between two turns, or after the last one, by its end."""
        rewarded = bool(setting.reward_times)
        self._generates = rewarded and self._target > self._batch_groups and not setting.restarts
        """Whether engines generate while a full batch waits for rewards, on the synchronous
        pace."""
        self._idle = 0.0
        """Seconds in the current batch for which the engines idled, waiting for rewards."""
        self._taken = 0
        """Number of batches since the last update, 0 or 1."""
        self._tail_at = -1
        """Number of running responses at which the tail of a batch starts; -1 for none."""
        self._wave_due = True
        """Whether a batch starts, or started with fewer groups than the refill rule requires."""

    def outcome(self, batches: int) -> Outcome:
        """Return the outcome of the first `batches` batches after the burn-in.

        Runs only the batches that earlier calls did not run.
        """
        setting, engines, tally = self._setting, self._engines, self._tally
        # Deferred groups need a longer burn-in than anything else to reach a steady state.
        burn_in = setting.burn_in * (3 if self._deferred else 1)
        while engines.version < burn_in + batches:
            asked_at, before, version = self.now, engines.bound, engines.version
            delivered = self._batch()
            driven = self.now - asked_at
            waited = self._train()
            engines.version += 1
            self._taken = 0
            self.now += setting.refit_seconds
            if version >= burn_in:
                seconds = self.now - asked_at
                if self._asynchronous and driven > 0:
                    # Tokens that are generated after the last group shorten the next step.
                    driven = seconds
                tally.add(delivered, version, seconds=seconds, waited=waited)
                # As long as rewards take, it takes no longer with longer responses.
                tally.driven += driven - min(self._idle, max(driven, 0.0))
                tally.bound += engines.bound - before
                tally.distance += self._draws.distance(delivered)
        peak_kv = engines.peak_kv / setting.engines
        return tally.outcome(setting, batches, peak_kv, self._stop_at.fixed_groups)

    def _batch(self) -> list[TrialGroup]:
        """Run until a batch is full, and return its groups."""
        self._idle = 0.0
        self._wave_due = self._wave_due or not self._asynchronous
        self._score()
        if not self._stop_at.enough(self._scored):
            # A batch that is complete already starts nothing, and does not wait for what the refit
            # has interrupted.
            self._start()
        while not self._stop_at.enough(self._scored):
            if self._asynchronous or self._generates or not self._stop_at.enough(self._ready):
                self._generate(math.inf)
            else:
                self._await_reward()
        taken = self._scored.groups[: self._stop_at.take(self._scored.groups) or 0]
        for group in taken:
            self._scored.remove(group)
            self._ready.remove(group)
        return taken

    def _start(self) -> None:
        """Start the groups that the refill rule requests, and admit their members."""
        self._launch()
        self._choose()
        self._admit()

    def _generate(self, until: float) -> None:
        """Go to the next end of a response, or of a reward, or to the time `until`."""
        engines = self._engines
        due = min(until, self._scores[0][0]) if self._scores else until
        if due <= self.now:
            pass
        elif engines.running or engines.queue or self._away or due == math.inf:
            self._advance(due)
        elif due == until:
            # Enough is complete for a slow trainer, so nothing generates.
            self.now = until
            return
        else:
            self._idle += due - self.now
            self.now = due
        self._score()
        self._supply()

    def _await_reward(self) -> None:
        """Idle the engines until the next reward arrives."""
        before = self.now
        self._stop()
        self.now = max(self.now, self._scores[0][0])
        self._idle += self.now - before
        self._score()
        if not self._stop_at.enough(self._ready):
            self._start()

    def _score(self) -> None:
        """Accept or reject the groups whose rewards have arrived."""
        while self._scores and self._scores[0][0] <= self.now:
            _, _, group = heapq.heappop(self._scores)
            if self._setting.siblings is not None:
                # A single sample counts for a batch only when it and its siblings have rewards.
                self._complete(group)
            if self._draws.accepts(group):
                self._scored.add(group)
            else:
                self._ready.remove(group)

    def _supply(self) -> None:
        """Start the groups that the refill rule requests after some responses have ended."""
        running, waiting = len(self._engines.running), len(self._engines.queue)
        if self._deferred is None:
            self._launch()
        elif 0 < running + waiting <= self._tail_at:
            self._choose(tail=True)
        elif not (running or self._has_chosen_away) and (
            not self._stop_at.enough(self._ready) or self._generates_ahead
        ):
            # Everything that was chosen has ended, and the batch is not full.
            self._launch()
            self._choose()
        else:
            return
        self._admit()

    @property
    def _generates_ahead(self) -> bool:
        """Whether engines generate while the batch is full, and rewards are missing."""
        if not (self._generates and self._stop_at.enough(self._ready)):
            return False
        return not self._stop_at.enough(self._scored)

    @property
    def _has_chosen_away(self) -> bool:
        """Whether a member that was chosen for this batch is in a gap."""
        version = self._engines.version
        return any(each.group.runs(each.member, version) for _, _, each in self._away)

    def _train(self) -> float:
        """Train on a batch to its end; return the seconds that engines wait for it by design."""
        mean, spread = self._setting.train_seconds, self._setting.train_spread
        # Times with this mean and deviation, in a fixed order without a trend.
        quantile = _QUANTILES[self._engines.version % len(_QUANTILES)]
        starts, done = self.now, self.now + (mean + min(spread, mean) * quantile)
        if not self._asynchronous:
            self._stop()
            if self._deferred is not None and self._setting.restarts:
                self._restart_stale(self._deferred)
            self.now = max(self.now, done)
            return done - starts
        self._taken, self._wave_due = 1, True
        self._launch()
        self._admit()
        while self.now < done:
            self._generate(done)
        self._stop()
        return 0.0

    def _stop(self) -> None:
        """Interrupt what decodes, or let it end if the setting lets responses run out."""
        if not self._setting.runs_out:
            self._engines.stop(forget=self._deferred is not None)
            return
        waiting, self._engines.queue = self._engines.queue, deque()
        away: list[tuple[float, int, Running]] = []
        while self._engines.running:
            away, self._away = away + self._away, []
            self._advance(math.inf)
        self._engines.queue, self._away = waiting, away + self._away
        heapq.heapify(self._away)

    def _restart_stale(self, deferred: DeferredGroups) -> None:
        """Restart the groups that would be too stale for the next batch."""
        oldest = self._engines.version + 1 - (self._setting.max_staleness or 0)
        # They completed together with the last group of the batch.
        for group in [each for each in self._ready.groups if min(each.sampled) < oldest]:
            self._ready.remove(group)
            if group in self._scored.groups:
                self._scored.remove(group)
            deferred.groups.append(group)
            self._open += 1
        deferred.groups.sort(key=lambda group: group.opened)
        stale = [g for g in deferred.groups if g.sampled and min(g.sampled) < oldest]
        for group in stale:
            for tokens in group.have:
                self._engines.discard(tokens)
            deferred.restart(group)
        self._scores = [each for each in self._scores if each[2] not in stale]
        heapq.heapify(self._scores)
        self._away = [each for each in self._away if each[2].group not in stale]
        heapq.heapify(self._away)

    def _launch(self) -> None:
        """Open the groups that the refill rule requests.

        The staleness bound and a slow trainer can reduce their number.
        """
        engines, setting = self._engines, self._setting
        ahead = self._asynchronous or self._generates_ahead
        if ahead:
            if self._stop_at.enough(self._ready, batches=setting.ready_batches):
                return
        elif setting.reward_times and self._stop_at.enough(self._scored):
            return  # the batch is offered
        open_groups = math.ceil(self._open / setting.units_of_group)
        view = PoolView(
            batch_groups=self._batch_groups,
            group_size=self._group_size,
            target_groups=self._target,
            open_groups=open_groups,
            ready_groups=self._stop_at.as_groups(self._ready, self._usual),
            in_flight=len(engines.running) + len(engines.queue) + len(self._away),
            put_aside=0 if self._deferred is None else self._deferred.put_aside(engines.version),
            wave_due=self._wave_due,
            batch_open=not self._stop_at.enough(self._ready),
            asynchronous=ahead,
        )
        wanted = self._refill.launches(view)
        if not wanted:
            self._wave_due = False
            return
        admissible = self._gate.admissible(
            batch_groups=self._batch_groups,
            outstanding=open_groups + view.ready_groups,
            batches_since_update=self._taken,
            wanted=not self._taken,
        )
        number = wanted if admissible is None else min(wanted, admissible)
        self._wave_due = wanted > number
        takes_over = setting.takes_over and isinstance(self._refill, Pool) and not self._opened
        for place in range(number):
            group = self._draws.group(self._opened, engines.version)
            if takes_over:
                # A pool takes over the previous schedule's responses, each at its own position.
                # Equal responses that start together would end together forever, and refits would
                # interrupt nothing: such a forecast is a fifth too fast.
                for member, length in enumerate(group.lengths):
                    group.note(member, length * place // number, engines.version)
            self._opened += 1
            self._open += 1 if setting.siblings is None else len(group.lengths)
            if self._deferred is None:
                engines.queue.extend((group, member) for member in range(len(group.lengths)))
            else:
                self._deferred.groups.append(group)

    def _choose(self, *, tail: bool = False) -> None:
        """Choose the members that run next, if groups are deferred.

        In the `tail` of a batch, choose members that run in addition to the current ones.
        """
        if self._deferred is None:
            return
        ready = self._stop_at.as_groups(self._ready, self._usual)
        running = self._engines.running.values() if tail else ()
        chosen = self._deferred.choose(
            self._target - ready,
            self._batch_groups - ready,
            self._engines.version,
            busy={id(each.group) for each in running},
            tail=tail,
        )
        if self._away:
            away = {(id(each.group), each.member) for _, _, each in self._away}
            chosen = [each for each in chosen if (id(each[0]), each[1]) not in away]
        self._engines.queue.extend(chosen)
        starts = None if tail else self._refill.tail_begins
        self._tail_at = -1 if starts is None else int((1 - starts) * len(chosen))

    def _admit(self, *, alone: bool = False) -> None:
        self.now += self._engines.admit(alone=alone)

    def _advance(self, until: float) -> None:
        """Decode until the next response finishes, and finish all responses that end there.

        Decoding stops earlier, after the step in progress, at the time `until`.
        """
        if self._away:
            until = min(until, self._away[0][0])
            if not self._engines.running or until <= self.now:
                self.now = max(self.now, until)
                self._resume_members()
                return
        seconds, ended = self._engines.decode(self.now, until)
        self.now += seconds
        for running in ended:
            group, goal = running.group, running.goal
            ends = goal == group.lengths[running.member]
            times = self._draws.ends if ends else self._draws.gaps
            if times is None:
                self._finish(running)
            else:
                back = self.now + times.of(group.row, running.member, goal)
                heapq.heappush(self._away, (back, next(self._tickets), running))
        if self._away:
            self._resume_members()
        elif self._engines.queue:
            self._admit(alone=True)

    def _resume_members(self) -> None:
        """Queue the members whose gap is over; if groups are deferred, only the chosen ones."""
        while self._away and self._away[0][0] <= self.now:
            _, _, running = heapq.heappop(self._away)
            group, member = running.group, running.member
            if running.goal == group.lengths[member]:
                self._finish(running)
            elif self._deferred is None or group.runs(member, self._engines.version):
                self._engines.queue.append((group, member))
        self._admit(alone=True)

    def _finish(self, running: Running) -> None:
        """End a member, and put what it completes among what waits for rewards."""
        rewards = self._draws.rewards
        for group in running.group.finish(running.member, self._engines.version):
            if self._setting.siblings is None:
                self._complete(group)
            due = self.now if rewards is None else self.now + rewards.of(group.row, group.place)
            heapq.heappush(self._scores, (due, next(self._tickets), group))
            if rewards is None:
                self._score()
            if self._deferred is not None:
                self._deferred.groups.remove(group)

    def _complete(self, group: TrialGroup) -> None:
        self._open -= 1
        group.complete_at = self.now
        self._ready.add(group)
