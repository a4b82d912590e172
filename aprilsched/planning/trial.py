"""Tries a schedule out on groups of known lengths, for automatic over-provisioning.

The model is much coarser than :mod:`aprilsched.simulation`, and fifty times faster: all engines are
one, whose work and KV pool are divided evenly; requests are numbers on one step counter. Its
purpose is the order of schedules, and a test compares it with the simulation within a few percent.

On the synchronous pace a step is a batch, the trainer's time and the refit, one after the other. On
the asynchronous pace generation continues while the trainer trains, and stops only for the refit. A
refit interrupts all requests in flight; they are recomputed afterwards unless the KV is kept.

Invariants:
- A member that starts decoding at step s with r tokens to go ends at step s + r, whatever happens
  to others: what takes time but no step (prefill, pauses) moves only the clock.
- `kv` is the sum of prompts and tokens so far over the running responses. It is at most the pool,
  except for a response that runs alone. A full pool has the same effect as on an engine: requests
  wait, and the one admitted last is preempted and recomputed.

A complete group waits for its reward, and may then be rejected. A batch is full when enough groups
are complete, and is taken when enough of them are accepted. In between, engines generate or idle as
in a run (``awaits_scores`` in :mod:`aprilsched.kernel.core.steps.batch`). A member with several
turns leaves its engine at a gap, and queues for a slot after the gap.

Efficiency counts generated tokens and not delivered ones: in the long run both are the same, and
over a few batches the delivered ones vary four times as much, with what is in flight.

If the trainer is slower than the engines, the time of a step does not depend on its responses, so
random lengths become random work per step. In the long run all candidates do the same work. So the
objective counts the mean work of this number of groups, and the seconds that it would take: the
seconds that depend on the engines are scaled in proportion, the others are unchanged.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.core.lengths.log_law import Levels, LogLaw, normal_quantile, observed_logs
from aprilsched.kernel.core.lengths.observed import hashed_uniforms, padded, resampled
from aprilsched.kernel.core.policies.pool import Pool
from aprilsched.kernel.core.policies.refill import OpenGroups, PoolView, Refill
from aprilsched.kernel.core.policies.schedule import Schedule
from aprilsched.kernel.core.policies.staleness import Staleness, StalenessRule
from aprilsched.planning.setting import Outcome, Setting
from aprilsched.planning.step_times.model import RESERVE_CLIP, RESERVE_SHARE, StepTimeModel

_QUANTILES = (0.16, -1.53, 0.89, -0.49, 1.53, -0.16, 0.49, -0.89)
"""Eight quantiles of the normal law, with mean 0 and a standard deviation of 0.95."""


def try_out(schedule: Schedule, setting: Setting) -> Outcome:
    """Run `schedule` in this setting; `setting.lengths` is repeated if it is too short."""
    return Trial(schedule, setting).outcome(setting.batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Random draws from the lengths of a setting, shared by all schedules.

    A copy for each schedule would take most of the memory of a choice.

    Attributes:
        rows: the lengths of the members of each group.
        again: the lengths of the members of each group if the group restarts.
        remembered: evidence of earlier epochs on each group's level; empty for none.
        accepted: float64 [groups], the accepted share of groups of each group's length.
        law: int64, all lengths in ascending order.
    """

    rows: list[list[int]]
    again: list[list[int]]
    remembered: list[tuple[float, float]]
    accepted: NDArray[np.float64]
    law: NDArray[np.int64]

    @staticmethod
    def of(setting: Setting) -> Drawn:
        rows, lengths = _rows(setting.lengths), setting.lengths
        return Drawn(
            rows=rows,
            # Discarded responses are drawn again, so they get other lengths.
            again=_rows(drawn_again(setting)) if setting.restarts else rows,
            remembered=_remembered(setting) if setting.remembered else [],
            accepted=setting.shares_accepted,
            law=np.sort(lengths[lengths > 0]),
        )


class Trial:
    """A trial of a schedule, which can be continued after a first, brief outcome.

    Args:
        schedule: the schedule.
        setting: the conditions.
        drawn: the draws of this setting, or of one that differs only in the model; None to draw
            them here.
    """

    def __init__(self, schedule: Schedule, setting: Setting, drawn: Drawn | None = None) -> None:
        drawn = drawn or Drawn.of(setting)
        self.schedule = schedule
        self._setting = setting
        self._refill = schedule.refill
        if isinstance(self._refill, Pool):
            # A group of the trial stands for `share` groups of the run.
            together = max(1, round(self._refill.together / setting.share))
            self._refill = replace(self._refill, together=together)
        self._asynchronous = (schedule.pace or setting.pace) == "asynchronous"
        rule: StalenessRule = "restart" if setting.restarts else "mask"
        self._gate = Staleness(setting.max_staleness, rule=rule)
        self._group_size = setting.group_size
        self._stop_at, self._usual = setting.full_at, setting.usual_group
        self._batch_groups = self._stop_at.batch_groups(self._usual)
        self._target = schedule.target_groups(self._batch_groups)
        self._store = Store(schedule.refill, setting) if schedule.refill.defers else None
        self._rows, self._again = drawn.rows, drawn.again
        self._remembered = drawn.remembered if self._store else []
        self._next = 0
        self._limit = setting.max_running * setting.engines
        self._decoded = DecodeBatch(setting, setting.engines)
        """What decodes on all engines together."""
        self.now = 0.0
        self._peak = 0.0
        self._token_seconds = setting.model.token_seconds(setting.max_running)
        self._decoding = Decoding(setting.model)
        self._bound = 0.0
        """T_bound of the generated tokens; see StepTimeModel.bound_seconds."""
        self._running = self._decoded.running
        """The running responses by ticket, in the order of admission."""
        self._queue: deque[tuple[TrialGroup, int]] = deque()
        self._ready = CompleteGroups()
        shares = drawn.accepted
        verdicts = hashed_uniforms(shares.shape, seed=6) < shares
        self._verdicts: list[bool] = [] if verdicts.all() else verdicts.tolist()
        """Whether each group of the lengths is accepted; empty where all are."""
        waits = bool(setting.reward_times)
        self._scored = CompleteGroups() if waits else self._ready
        """The accepted complete groups; all complete groups if rewards take no time."""
        self._scores: list[tuple[float, int, TrialGroup]] = []
        """Heap of the complete groups that wait for their rewards, by the times of these."""
        self._goes_on = waits and self._target > self._batch_groups and not setting.restarts
        """Whether engines generate while a full batch waits for rewards, on the synchronous
        pace."""
        self._stood = 0.0
        """Seconds in the current batch for which the engines idled, waiting for rewards."""
        self._rewards = Times(setting.reward_times, seed=7) if waits else None
        self._gaps = Times(setting.gap_times, seed=8) if setting.gap_times else None
        self._ends_after = Times(setting.end_times, seed=9) if setting.end_times else None
        self._episodes = bool(setting.gap_times or setting.end_times)
        self._away: list[tuple[float, int, Running]] = []
        """Heap of the members in a gap between two turns, or after the last one, by its end."""
        self._open = 0
        self._batches: int = 0
        """Number of batches and of versions so far: each batch is followed by an update."""
        self._taken = 0
        """Number of batches since the last update, 0 or 1."""
        self._tail_at = -1
        """Number of running responses at which the tail of a batch starts; -1 for none."""
        self._wave_pending = True
        """Whether a batch starts, or started with fewer groups than the refill rule requires."""
        self._tickets = 0
        self._seen = _Seen()
        self._law = drawn.law
        self._group_work = setting.group_work
        # Times of the trainer with their mean and deviation, in a fixed order without a trend.
        spread = min(setting.train_spread, setting.train_seconds)
        self._train_seconds = [setting.train_seconds + spread * z for z in _QUANTILES]

    def outcome(self, batches: int) -> Outcome:
        """Return the outcome of the first `batches` batches after the burn-in.

        Runs only the batches that earlier calls did not run.
        """
        setting, seen = self._setting, self._seen
        # Deferred groups need a longer burn-in than anything else to reach a steady state.
        burn_in = setting.burn_in * (3 if self._store else 1)
        while self._batches < burn_in + batches:
            asked_at, before, version = self.now, self._bound, self._batches
            delivered, training = self._batch()
            waited = self._train(training)
            self._refit()
            if version >= burn_in:
                seconds = self.now - asked_at
                seen.add(delivered, version, seconds=seconds, waited=waited)
                # A step lasts until the last group that the trainer waits for is generated. On the
                # asynchronous pace, if this is the last group of the batch, tokens generated after
                # it shorten the next step.
                driven = training.awaited - asked_at
                if not self._asynchronous:
                    seen.not_driven += training.taken - training.awaited
                elif driven > 0 and training.awaited == training.taken:
                    driven = seconds
                else:
                    seen.not_driven += seconds - driven
                # As long as rewards take, it takes no longer with longer responses.
                stood = min(self._stood, max(driven, 0.0))
                seen.not_driven += stood
                seen.driven += driven - stood
                seen.bound += self._bound - before
                seen.distance += self._distance(delivered)
        mean_work = self._group_work * seen.groups if self._stop_at.fixed_groups else seen.bound
        return seen.outcome(setting, batches, self._peak / setting.engines, mean_work)

    def _distance(self, groups: Sequence[TrialGroup]) -> float:
        """Kolmogorov's distance of the lengths of a batch from the law, 0 to 1."""
        lengths = np.sort(np.array([n for group in groups for n in group.lengths]))
        law = np.searchsorted(self._law, lengths, side="right") / len(self._law)
        steps = np.arange(len(lengths) + 1) / len(lengths)
        return float(max(np.max(steps[1:] - law), np.max(law - steps[:-1])))

    # --- one batch -----------------------------------------------------------------------------

    def _batch(self) -> tuple[list[TrialGroup], _Training]:
        """Run until a batch is full; return its groups, and when the trainer trains on them."""
        asked, self._stood = self.now, 0.0
        self._wave_pending = self._wave_pending or not self._asynchronous
        self._score()
        if not self._stop_at.enough(self._scored):
            # A batch that is complete already starts nothing, and does not wait for what the refit
            # has interrupted.
            self._begin()
        while not self._stop_at.enough(self._scored):
            if self._rewards is None:
                self._advance()
                self._supply()
            elif self._asynchronous or self._goes_on or not self._stop_at.enough(self._ready):
                self._go_on()
            else:
                self._stand()
        count = self._stop_at.take(self._scored.groups) or 0
        training = self._training_on(self._scored.groups[:count], asked)
        if self._asynchronous and training.composed > self.now:
            self._generate(until=training.composed)
        taken = self._scored.take(count)
        if self._scored is not self._ready:
            for group in taken:
                self._ready.remove(group)
        return taken, training

    def _begin(self) -> None:
        """Start the groups that the refill rule requests, and admit their members."""
        self._launch()
        self._choose()
        self._admit()

    def _go_on(self, until: float = math.inf) -> None:
        """Go to the next end of a response, or of a reward, where rewards take time."""
        due = min(until, self._scores[0][0]) if self._scores else until
        if due <= self.now:
            pass
        elif self._running or self._queue or self._away or due == math.inf:
            self._advance(until=due)
        elif due == until:
            self.now = until
            return
        else:
            self._stood += due - self.now
            self.now = due
        self._score()
        self._supply()

    def _stand(self) -> None:
        """Idle the engines until the next reward arrives."""
        before = self.now
        self._stop()
        self.now = max(self.now, self._scores[0][0])
        self._stood += self.now - before
        self._score()
        if not self._stop_at.enough(self._ready):
            self._begin()

    def _score(self) -> None:
        """Accept or reject the groups whose rewards have arrived."""
        while self._scores and self._scores[0][0] <= self.now:
            due, _, group = heapq.heappop(self._scores)
            group.scored_at = due
            if group.accepted:
                self._scored.insert(group)
            else:
                self._ready.remove(group)

    def _training_on(self, groups: Sequence[TrialGroup], asked: float) -> _Training:
        """Return when the trainer trains on a complete batch that it requested at `asked`."""
        seconds = self._train_seconds[self._batches % len(self._train_seconds)]
        early, starts = seconds * self._setting.train_early, self.now
        if not early or len(groups) == 1:
            return _Training(awaited=starts, composed=starts, taken=starts, done=starts + seconds)
        done = composed = awaited = asked
        for group in groups[:-1]:
            if group.scored_at > done:
                done = awaited = group.scored_at
            composed = done
            done += early / (len(groups) - 1)
        if starts > done:
            done = awaited = starts
        return _Training(
            awaited=awaited,
            composed=max(composed, starts),
            taken=done,
            done=done + seconds - early,
        )

    def _generate(self, until: float) -> None:
        """Generate ahead, on the asynchronous pace, to the end of the step in progress then."""
        self._launch()
        self._admit()
        while self.now < until:
            if self._rewards is not None:
                self._go_on(until=until)
            elif self._running or self._queue or self._away:
                self._advance(until=until)
                self._supply()
            else:
                # Enough is complete for a slow trainer, so nothing generates.
                self.now = until

    def _supply(self) -> None:
        """Start the groups that the refill rule requests after some responses have ended."""
        if self._store is None:
            self._launch()
        elif 0 < len(self._running) + len(self._queue) <= self._tail_at:
            self._choose(tail=True)
        elif not (self._running or self._chosen_away()) and (
            not self._stop_at.enough(self._ready) or (self._goes_on and self._awaits)
        ):
            # Everything that was chosen has ended, and the batch is not full.
            self._launch()
            self._choose()
        else:
            return
        self._admit()

    def _train(self, training: _Training) -> float:
        """Train on a batch to its end; return the seconds that engines wait for it by design."""
        if not self._asynchronous:
            self._stop()
            if self._store is not None and self._setting.restarts:
                self._throw_away(self._store)
            self.now = max(self.now, training.done)
            return training.done - training.taken
        self._taken, self._wave_pending = 1, True
        self._generate(until=training.done)
        self._stop()
        return 0.0

    def _refit(self) -> None:
        self._batches += 1
        self._taken = 0
        self.now += self._setting.refit_seconds

    def _stop(self) -> None:
        """Record every member's tokens; members to recompute go behind those that wait."""
        if self._setting.runs_out:
            waiting, self._queue = self._queue, deque()
            away: list[tuple[float, int, Running]] = []
            while self._running:
                away, self._away = away + self._away, []
                self._advance()
            self._queue, self._away = waiting, away + self._away
            heapq.heapify(self._away)
            return
        for running in self._running.values():
            self._decoded.note(running, self._batches)
        if self._store is not None:
            self._queue.clear()
        elif self._setting.keeps_kv:
            return
        else:
            self._queue.extend((r.group, r.member) for r in self._running.values())
        self._decoded.clear()

    def _throw_away(self, store: Store) -> None:
        """Restart the groups that would be too stale for the next batch."""
        oldest = self._batches + 1 - (self._setting.max_staleness or 0)
        for group in self._ready.take(len(self._ready)):
            # It completed together with the last group of the batch.
            if min(group.sampled) >= oldest:
                self._ready.add(group)
            else:
                store.groups.append(group)
                self._open += 1
        if self._scored is not self._ready:
            again = set(map(id, store.groups))
            for group in self._scored.take(len(self._scored)):
                if id(group) not in again:
                    self._scored.add(group)
            self._scores = [each for each in self._scores if id(each[2]) not in again]
            heapq.heapify(self._scores)
        store.groups.sort(key=lambda group: group.opened)
        for group in store.groups:
            if group.sampled and min(group.sampled) < oldest:
                for tokens in group.have:
                    self._bound -= self._setting.work(tokens) / self._setting.engines
                store.begin_again(group)
                self._away = [each for each in self._away if each[2].group is not group]
                heapq.heapify(self._away)

    def _launch(self) -> None:
        """Open the groups that the refill rule requests.

        The staleness bound and a slow trainer can reduce their number.
        """
        awaits = self._goes_on and self._awaits
        if self._asynchronous or awaits:
            ahead = self._setting.ready_batches
            if self._stop_at.enough(self._ready, batches=ahead):
                return
        elif self._rewards is not None and self._stop_at.enough(self._scored):
            return  # the batch is offered
        view = PoolView(
            batch_groups=self._batch_groups,
            group_size=self._group_size,
            target_groups=self._target,
            open_groups=self._open,
            ready_groups=self._stop_at.as_groups(self._ready, self._usual),
            in_flight=len(self._running) + len(self._queue) + len(self._away),
            put_aside=0 if self._store is None else self._store.put_aside(self._batches),
            wave_due=self._wave_pending,
            batch_open=not self._stop_at.enough(self._ready),
            asynchronous=self._asynchronous or awaits,
        )
        count = self._refill.launches(view)
        if not count:
            self._wave_pending = False
            return
        admissible = self._gate.admissible(
            batch_groups=self._batch_groups,
            outstanding=self._open + view.ready_groups,
            batches_since_update=self._taken,
            wanted=not self._taken,
        )
        self._wave_pending = admissible is not None and count > admissible
        count = count if admissible is None else min(count, admissible)
        takes_over = self._setting.takes_over and isinstance(self._refill, Pool) and not self._next
        for place in range(count):
            row = self._next % len(self._rows)
            group = TrialGroup(self._again[row], self._batches, then=self._rows[row])
            group.level = self._remembered[row] if self._remembered else None
            group.row = row
            group.accepted = not self._verdicts or self._verdicts[row]
            if self._gaps is not None:
                mean, members = self._setting.gaps, range(len(group.lengths))
                group.gaps = [self._gaps.whole(mean, row, member) for member in members]
            if takes_over:
                # A pool takes over the previous schedule's responses, each at its own position.
                # Equal responses that start together would end together forever, and refits would
                # interrupt nothing: such a forecast is a fifth too fast.
                for member, length in enumerate(group.lengths):
                    group.note(member, length * place // count, self._batches)
            self._next += 1
            self._open += 1
            if self._store is None:
                self._queue.extend((group, member) for member in range(len(group.lengths)))
            else:
                self._store.groups.append(group)

    def _choose(self, *, tail: bool = False) -> None:
        """Choose the members that run next, if groups are deferred.

        In the `tail` of a batch, choose members that run in addition to the current ones.
        """
        if self._store is not None:
            ready = self._stop_at.as_groups(self._ready, self._usual)
            wanted, lacking = self._target - ready, self._batch_groups - ready
            busy = {id(running.group) for running in self._running.values()} if tail else set[int]()
            chosen = self._store.choose(wanted, lacking, self._batches, busy=busy, tail=tail)
            if self._away:
                away = {(id(each.group), each.member) for _, _, each in self._away}
                chosen = [each for each in chosen if (id(each[0]), each[1]) not in away]
            self._queue.extend(chosen)
            starts = None if tail else self._refill.tail_begins
            self._tail_at = -1 if starts is None else int((1 - starts) * len(chosen))
            if tail:
                self._admit()

    def _admit(self, *, alone: bool = False) -> None:
        """Start waiting members in order of arrival, while there is room.

        With `alone`, each member takes a slot that was freed by itself, so an engine of the run,
        with `thinner` times the slots, makes `thinner` prefill passes.
        """
        queue, decoded, prompt = self._queue, self._decoded, self._setting.prompt_tokens
        room = self._limit - len(self._running)
        if not queue or room <= 0:
            return
        tokens, groups, episodes = 0.0, set[int](), self._episodes
        decoded.begin_pass()
        while queue and room:
            group, member = queue[0]
            have = group.have[member]
            goal = group.goal(member) if episodes else group.lengths[member]
            if not decoded.fits(prompt + have, goal - have):
                break
            queue.popleft()
            self._tickets += 1
            room -= 1
            decoded.join(Running(self._tickets, member, group, goal))
            tokens += prompt + have
            groups.add(id(group))
        if groups:
            # The members of a group run on one engine, and the others do not wait for its prefill.
            engines = min(self._setting.engines, len(groups))
            seconds = self._setting.model.prefill_seconds(max(1, round(tokens / engines)))
            if alone:
                seconds += (self._setting.thinner - 1) * self._setting.model.prefill_pass
            self.now += seconds * engines / self._setting.engines

    def _advance(self, until: float = math.inf) -> None:
        """Decode until the next response finishes, and finish all responses that end there.

        Decoding stops earlier, after the step in progress, at the time `until`.
        """
        if self._away:
            until = min(until, self._away[0][0])
            if not self._running or until <= self.now:
                self.now = max(self.now, until)
                self._come_back()
                return
        decoded = self._decoded
        steps = decoded.room(self._put_back)
        running, engines = len(self._running), self._setting.engines
        # If there are fewer responses than engines, as in the tail of a batch, each runs on its own
        # engine. Spread over all engines, their contexts would be read in no time: the forecast of
        # waiting on 32 engines would be a third too fast.
        busy = min(running, engines)
        batch, kv, tokens = round(running / busy), round(decoded.kv / busy), steps * running
        seconds = self._decoding.seconds(batch, kv, steps)
        if until < self.now + seconds:
            steps = min(steps, self._setting.model.steps_within(batch, kv, until - self.now) + 1)
            seconds, tokens = self._decoding.seconds(batch, kv, steps), steps * running
        self.now += seconds
        reads = steps * decoded.kv + tokens * (steps - 1) / 2
        self._bound += (self._token_seconds * tokens + self._setting.model.t2 * reads) / engines
        ends = decoded.advance(steps)
        self._peak = max(self._peak, decoded.kv)
        for ended in ends:
            self._finish(ended)
        if self._away:
            self._come_back()
        elif self._queue:
            self._admit(alone=True)

    def _put_back(self, running: Running) -> None:
        self._decoded.note(running, self._batches)
        self._decoded.leave(running)
        self._queue.append((running.group, running.member))

    def _finish(self, running: Running) -> None:
        if self._episodes:
            times = self._gaps if running.goal < running.length else self._ends_after
            if times is not None:
                group, member = running.group, running.member
                group.note(member, running.goal, self._batches)
                self._decoded.leave(running)
                self._tickets += 1
                back = self.now + times.of(group.row, member, running.goal)
                heapq.heappush(self._away, (back, self._tickets, running))
                return
        running.group.finish(running.member, self._batches)
        self._decoded.leave(running)
        self._complete(running.group)

    def _come_back(self) -> None:
        """Queue the members whose gap is over; if groups are deferred, only the chosen ones."""
        while self._away and self._away[0][0] <= self.now:
            _, _, running = heapq.heappop(self._away)
            group, member = running.group, running.member
            if running.goal == running.length:
                group.finish(member, self._batches)
                self._complete(group)
            elif self._store is None or group.runs(member, self._batches):
                self._queue.append((group, member))
        self._admit(alone=True)

    def _chosen_away(self) -> bool:
        """Return whether a member that was chosen for this batch is in a gap."""
        return any(each.group.runs(each.member, self._batches) for _, _, each in self._away)

    @property
    def _awaits(self) -> bool:
        """Whether the batch is full, and rewards are missing."""
        return self._stop_at.enough(self._ready) and not self._stop_at.enough(self._scored)

    def _complete(self, group: TrialGroup) -> None:
        if not group.unfinished:
            self._open -= 1
            group.complete_at = group.scored_at = self.now
            if self._rewards is not None:
                self._ready.add(group)
                self._tickets += 1
                due = self.now + self._rewards.of(group.row)
                heapq.heappush(self._scores, (due, self._tickets, group))
            elif group.accepted:
                self._ready.add(group)
            if self._store is not None:
                self._store.groups.remove(group)


@dataclass(slots=True)
class _Training:
    """When the trainer trains on a batch; all in seconds."""

    awaited: float
    """Time at which the last group was complete that the trainer has waited for."""
    composed: float
    """Time at which its last group is offered, and the next batch starts."""
    taken: float
    """Time at which the trainer takes the last group."""
    done: float
    """Time at which the trainer is done with the batch."""


class _Seen:
    """Sums over the batches that count."""

    def __init__(self) -> None:
        self.bound = 0.0
        self.distance = 0.0
        self.groups = 0
        """Number of delivered groups."""
        self.driven = 0.0
        """Seconds that are as long as the engines make them."""
        self.not_driven = 0.0
        """Seconds that are as long as the trainer makes them, while engines may wait for it."""
        self._seconds = 0.0
        self._waited = 0.0
        self._by_age: dict[int, float] = {}
        """Number of delivered tokens by their age in versions."""

    def add(
        self, groups: Sequence[TrialGroup], version: int, *, seconds: float, waited: float
    ) -> None:
        """Count a batch that `version` consumes.

        Its step took `seconds`; for `waited` of these seconds the engines waited for the trainer.
        """
        self._seconds += seconds
        self._waited += waited
        self.groups += len(groups)
        for group in groups:
            for sampled, tokens in group.sampled.items():
                age = version - sampled
                self._by_age[age] = self._by_age.get(age, 0.0) + tokens

    def outcome(self, setting: Setting, batches: int, peak_kv: float, mean_work: float) -> Outcome:
        """Return the means over `batches`; `mean_work` is the expected work of these groups."""
        by_age, oldest = self._by_age, setting.max_staleness
        tokens, distance = sum(by_age.values()), self.distance / batches
        worth = setting.objective.usefulness(by_age, bound=oldest)
        worth *= setting.objective.share_left(distance, setting.iid_distance)
        longer = self.driven * (mean_work / self.bound - 1)
        busy = self._seconds - self._waited
        late = 0.0 if oldest is None else sum(n for age, n in by_age.items() if age > oldest)
        return Outcome(
            value=mean_work / (self._seconds + longer) * worth,
            step_seconds=busy / batches,
            trainer_seconds=self._waited / batches,
            driven_seconds=(busy - self.not_driven) / batches,
            efficiency=self.bound / busy,
            off_policy_share=1 - by_age.get(0, 0.0) / tokens,
            mean_age=sum(age * n for age, n in by_age.items()) / tokens,
            distance=distance,
            too_stale_share=late / tokens,
            peak_kv=peak_kv,
        )


class Decoding:
    """A cache of the seconds of decode steps on one engine, from the step-time model
    (:meth:`~aprilsched.planning.step_times.model.StepTimeModel.decode_seconds`).

    A trial needs few batch sizes, but hundreds of thousands of times.
    """

    def __init__(self, model: StepTimeModel) -> None:
        self._model = model
        self._costs: dict[int, tuple[float, float]] = {}
        """For each size of the batch the seconds of a step without its reads, and of one read."""

    def seconds(self, batch: int, kv: float, steps: int) -> float:
        """Seconds of `steps` steps of `batch` sequences; the first step reads `kv` tokens."""
        costs = self._costs.get(batch)
        if costs is None:
            work = self._model.step_seconds(batch, 0)
            read = (self._model.step_seconds(batch, 2**30) - work) / 2**30
            costs = self._costs[batch] = work, read
        return steps * (costs[0] + costs[1] * (kv + batch * (steps - 1) / 2))


class Running:
    """A response that decodes, and the step at which it ends."""

    __slots__ = ("end", "goal", "group", "member", "ticket")

    def __init__(self, ticket: int, member: int, group: TrialGroup, goal: int) -> None:
        self.end = 0
        self.goal = goal
        """Number of its tokens at that step: those of the turn, and of the turns before it."""
        self.member = member
        self.group = group
        self.ticket = ticket

    @property
    def length(self) -> int:
        return self.group.lengths[self.member]


class DecodeBatch:
    """The responses that decode together, with their KV in one pool.

    Args:
        setting: the conditions.
        engines: number of engines whose pools these are together.
    """

    __slots__ = ("_chunk", "_ends", "_full_at", "_joined", "_read", "_spare", "kv", "pool",
                 "prompt", "running", "step", "sum_of_ends")  # fmt: skip

    def __init__(self, setting: Setting, engines: int = 1) -> None:
        tokens = setting.kv_tokens
        self.pool = math.inf if tokens is None else float(tokens * engines)
        """In tokens; infinite if it is not known."""
        self.prompt, self._spare = setting.prompt_tokens, setting.spare_tokens
        self._chunk = setting.model.prefill_chunk * engines
        self._read = self._joined = 0.0
        """Tokens that the present pass reads, and for which its responses need room besides."""
        self._full_at = 0
        """Number of running responses at which one did not fit; 0 for none."""
        self.step = 0
        self.kv = 0.0
        self.running: dict[int, Running] = {}
        self._ends: list[tuple[int, int]] = []
        """Heap of (last step, ticket); entries of preempted responses are ignored."""
        self.sum_of_ends = 0

    def begin_pass(self) -> None:
        """Start a prefill pass; the requests of the previous pass now count as running."""
        self._read = self._joined = 0.0

    def fits(self, context: float, left: int) -> bool:
        """Return whether one more response fits.

        Engines that reserve room use SGLang's rule
        (:class:`~aprilsched.simulation.engine.cache.KvPool`): room for all tokens that the
        responses of the pass may still generate, and for a share of those that running ones may.
        """
        count = len(self.running)
        if self.pool == math.inf or not count:
            return True
        if 0 < self._full_at <= count:
            return False
        need = self.kv + context + 1 + self._joined + self._to_come(left)
        if self._spare is not None:
            to_come = self.sum_of_ends - count * (self.step - self._spare)
            need += RESERVE_SHARE * min(to_come, count * RESERVE_CLIP)
        fits = need <= self.pool
        self._full_at = 0 if fits else count
        return fits

    def _to_come(self, left: int) -> float:
        return 0.0 if self._spare is None else min(left + self._spare, RESERVE_CLIP)

    def join(self, running: Running) -> None:
        have = running.group.have[running.member]
        running.end = self.step + running.goal - have
        self._read += self.prompt + have
        self._joined += (1 - RESERVE_SHARE) * self._to_come(running.goal - have)
        if self._read >= self._chunk:
            self.begin_pass()
        self.running[running.ticket] = running
        heapq.heappush(self._ends, (running.end, running.ticket))
        self.sum_of_ends += running.end
        self.kv += self.prompt + have

    def note(self, running: Running, batch: int) -> None:
        """Note the tokens that it has now, the new ones under the version `batch`."""
        tokens = running.goal - (running.end - self.step)
        running.group.note(running.member, tokens, batch)

    def leave(self, running: Running) -> None:
        """Take the KV of a response, whose tokens are noted, out of the pool."""
        self.kv -= self.prompt + running.group.have[running.member]
        self.sum_of_ends -= running.end

    def room(self, put_back: Callable[[Running], None]) -> int:
        """Number of steps to the next end of a response, as far as there is room in the pool.

        The response that was admitted last is put back until there is room for one step.
        """
        while len(self.running) > 1 and self.pool - self.kv < len(self.running):
            put_back(self.running.popitem()[1])
        while not self._ends_at(*self._ends[0]):
            heapq.heappop(self._ends)
        steps = self._ends[0][0] - self.step
        if self.pool == math.inf:
            return steps
        return min(steps, max(1, int(self.pool - self.kv) // len(self.running)))

    def advance(self, steps: int) -> list[Running]:
        """Decode some steps; returns the responses that end with the last one."""
        self.step += steps
        self.kv += steps * len(self.running)
        ended: list[Running] = []
        while self._ends and self._ends[0][0] <= self.step:
            end, ticket = heapq.heappop(self._ends)
            if self._ends_at(end, ticket):
                ended.append(self.running.pop(ticket))
        return ended

    def _ends_at(self, step: int, ticket: int) -> bool:
        """Whether this response ends here; one that was preempted ends later than was noted."""
        running = self.running.get(ticket)
        return running is not None and running.end == step

    def clear(self) -> list[Running]:
        """Take out what decodes, and return it."""
        decoded = list(self.running.values())
        self.running.clear()
        self._ends.clear()
        self.kv, self.sum_of_ends = 0.0, 0
        return decoded


class TrialGroup:
    """A group; `have` counts each member's tokens at the last stop, or at its end."""

    __slots__ = (
        "accepted",
        "chosen",
        "complete_at",
        "finished",
        "first_run",
        "gaps",
        "have",
        "lengths",
        "level",
        "opened",
        "row",
        "sampled",
        "scored_at",
        "then",
        "unfinished",
    )

    def __init__(self, lengths: list[int], opened: int, *, then: list[int]) -> None:
        self.lengths = lengths
        self.then = then
        """The lengths if the group restarts."""
        self.level: tuple[float, float] | None = None
        """Mean and variance of its log level, by what is remembered of it; None for nothing."""
        self.have = [0] * len(lengths)
        self.finished = [False] * len(lengths)
        self.unfinished = len(lengths)
        self.opened = opened
        """Index of the batch in which the group was opened."""
        self.first_run: int | None = None
        self.sampled: dict[int, int] = {}
        """Number of tokens by the version that sampled them."""
        self.complete_at = 0.0
        """Time at which the last member ended, in seconds."""
        self.row = 0
        """The row of its lengths in the setting."""
        self.scored_at = 0.0
        """Time at which the group was accepted, in seconds."""
        self.accepted = True
        """Whether the group is accepted when it is scored."""
        self.gaps: list[int] | None = None
        """Number of gaps of each member; None where there are none."""
        self.chosen: tuple[int, int] = (-1, 0)
        """The batch for which members were chosen last, where groups are deferred, and how many."""

    @property
    def members(self) -> list[int]:
        return self.lengths

    @property
    def tokens(self) -> int:
        """Number of tokens of the complete group."""
        return sum(self.lengths)

    def goal(self, member: int) -> int:
        """Return the number of tokens of the member at its next gap, or at its end."""
        length, have = self.lengths[member], self.have[member]
        turns = 1 if self.gaps is None else self.gaps[member] + 1
        turn = have * turns // length + 1
        turn += turn * length // turns <= have
        return min(length, max(turn * length // turns, have + 1))

    def runs(self, member: int, batch: int) -> bool:
        """Return whether the member was chosen for this batch, where groups are deferred."""
        return self.chosen[0] == batch and member < self.chosen[1]

    def note(self, member: int, tokens: int, batch: int) -> None:
        """Record that the member has `tokens` tokens at the stop of `batch`."""
        new = tokens - self.have[member]
        if new:
            # A response that was preempted before its first token is of no version.
            self.sampled[batch] = self.sampled.get(batch, 0) + new
        self.have[member] = tokens

    def finish(self, member: int, batch: int) -> None:
        """Record that the member ended in `batch`."""
        length, have = self.lengths[member], self.have
        if length > have[member]:
            self.sampled[batch] = self.sampled.get(batch, 0) + length - have[member]
        have[member] = length
        self.finished[member] = True
        self.unfinished -= 1


class CompleteGroups:
    """The groups that wait for their batch, in the order of their completion."""

    def __init__(self) -> None:
        self.groups: list[TrialGroup] = []
        self.samples = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self.groups)

    def add(self, group: TrialGroup) -> None:
        self.groups.append(group)
        self.samples += len(group.lengths)
        self.tokens += group.tokens

    def insert(self, group: TrialGroup) -> None:
        """Add a group in the order of completion."""
        self.add(group)
        self.groups.sort(key=lambda each: each.complete_at)

    def take(self, count: int) -> list[TrialGroup]:
        """Remove and return the first `count` groups."""
        taken, self.groups = self.groups[:count], self.groups[count:]
        for group in taken:
            self._uncount(group)
        return taken

    def remove(self, group: TrialGroup) -> None:
        self.groups.remove(group)
        self._uncount(group)

    def _uncount(self, group: TrialGroup) -> None:
        self.samples -= len(group.lengths)
        self.tokens -= group.tokens


class Times:
    """Equally likely times, the same for a response under every schedule.

    Otherwise schedules would also differ by chance.
    """

    def __init__(self, times: Sequence[float], *, seed: int) -> None:
        self._times = times
        self._uniforms = hashed_uniforms((997,), seed=seed).tolist()

    def of(self, row: int, member: int = 0, tokens: int = 0) -> float:
        """Return the time of a group's member at `tokens` tokens."""
        return self._times[int(self._uniform(row, member, tokens) * len(self._times))]

    def whole(self, mean: float, row: int, member: int) -> int:
        """Return `mean` rounded down or up at random, so that `mean` is the mean of all members."""
        return int(mean + self._uniform(row, member, 0))

    def _uniform(self, row: int, member: int, tokens: int) -> float:
        return self._uniforms[(131 * row + 17 * member + tokens) % len(self._uniforms)]


class Store:
    """The open groups of a schedule that defers groups, in the order of their opening."""

    def __init__(self, refill: Refill, setting: Setting) -> None:
        self.groups: list[TrialGroup] = []
        self._refill = refill
        self._remembers = setting.restarts or setting.remembered > 0
        logs = np.log(setting.lengths[setting.lengths > 0])
        self._law = LogLaw.estimated(
            mean=float(logs.mean()),
            deviation=float(logs.std()),
            shared=setting.shared,
            cap=float(setting.lengths.max()),
        )

    def begin_again(self, group: TrialGroup) -> None:
        """Discard a group's tokens, and remember what they reveal of its lengths."""
        law = self._law
        tokens = np.array(group.have, dtype=np.int64)
        known = tokens > 0
        count = int(known.sum())
        seen = observed_logs(tokens[known], np.array(group.finished)[known], law).mean()
        weight = law.shared * count / (law.shared * count + 1 - law.shared)
        variance = law.shared * law.deviation**2 * (1 - weight)
        group.level = (law.mean + weight * (float(seen) - law.mean), variance)
        group.lengths = group.then
        group.have = [0] * len(group.lengths)
        group.finished = [False] * len(group.lengths)
        group.unfinished = len(group.lengths)
        group.sampled = {}

    def put_aside(self, batch: int) -> int:
        """Return the number of open groups that ran in a batch before this one."""
        return sum(g.first_run is not None and g.first_run < batch for g in self.groups)

    def choose(
        self,
        count: int,
        lacking: int,
        batch: int,
        *,
        busy: Collection[int] = (),
        tail: bool = False,
    ) -> list[tuple[TrialGroup, int]]:
        """Choose the members that run in this batch, which still takes `lacking` groups.

        `count` is the number of groups by the over-provision ratio. In the `tail`, the groups whose
        identities are in `busy` keep running.
        """
        groups = self.groups
        since = [-1 if g.first_run is None else batch - g.first_run for g in groups]
        view = OpenGroups(
            tokens=padded([group.have for group in groups], 0, np.int64),
            finished=padded([group.finished for group in groups], True, np.bool_),
            sizes=np.array([len(group.lengths) for group in groups], dtype=np.int64),
            ages=np.array([batch - group.opened for group in groups], dtype=np.int64),
            since_first_run=np.array(since, dtype=np.int64),
            running=np.array([id(group) in busy for group in groups], dtype=np.bool_),
            wanted=count,
            lacking=lacking,
            tail=tail,
            law=self._law,
            levels=self._levels(),
        )
        runs: list[tuple[TrialGroup, int]] = []
        for group, started in zip(groups, self._refill.members(view).tolist(), strict=True):
            if id(group) in busy:
                continue
            if started and group.first_run is None:
                group.first_run = batch
            group.chosen = (batch, started)
            runs += [(group, m) for m in range(started) if not group.finished[m]]
        return runs

    def _levels(self) -> Levels | None:
        """Return the remembered levels of the groups; None if the run remembers none."""
        if not self._remembers:
            return None
        unknown = (self._law.mean, self._law.shared * self._law.deviation**2)
        known = np.array([group.level or unknown for group in self.groups]).reshape(-1, 2)
        return Levels(mean=known[:, :1], variance=known[:, 1:])


def drawn_again(setting: Setting) -> NDArray[np.int64]:
    """Return other lengths of the same groups, as if their prompts were generated again.

    A group keeps its level, as estimated from its members. Its members get the deviations of
    another group's members from their mean, plus a random deviation of the mean itself. Each result
    is then replaced by the setting's length of the same rank, so that both have the same law. With
    a longer tail than the law's, waiting would be forecast to take 1.5 times as long.
    """
    lengths = setting.lengths
    there = lengths > 0
    levels, means = _levels_of(setting)
    sizes = there.sum(axis=1, keepdims=True)
    logs = np.log(np.maximum(lengths, 1))
    own = np.where(there, logs - means, 0.0)
    # Deviations from a group's own mean sum to 0, so they lack the random deviation of the mean.
    luck = normal_quantile(hashed_uniforms(means.shape, seed=5))
    luck *= np.sqrt((1 - setting.shared) / sizes) * float(logs[there].std())
    others = resampled(len(lengths), len(lengths), seed=2)
    drawn = (levels + luck + own[others])[there]
    again = np.zeros_like(lengths)
    ranks = np.argsort(np.argsort(drawn, kind="stable"), kind="stable")
    again[there] = np.sort(lengths[there])[ranks]
    return again


def _levels_of(setting: Setting) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a level of each group and the mean of its log lengths, both float64 [G, 1].

    The level is drawn from its posterior, given the group's members. The level is not the mean,
    because the mean includes the members' random deviations. With the mean, a redrawn response
    would carry information on its siblings that a real response does not carry.
    """
    lengths, shared = setting.lengths, setting.shared
    there = lengths > 0
    logs = np.log(np.maximum(lengths, 1))
    sizes = there.sum(axis=1, keepdims=True)
    means = np.where(there, logs, 0.0).sum(axis=1, keepdims=True) / sizes
    grand = float(logs[there].mean())
    # The mean of g members varies by the share w of the level and (1 - w) / g of their own.
    known = shared / (shared + (1 - shared) / sizes)
    unknown = np.sqrt(shared * (1 - known)) * float(logs[there].std())
    luck = normal_quantile(hashed_uniforms(means.shape, seed=4))
    return grand + known * (means - grand) + unknown * luck, means


def _remembered(setting: Setting) -> list[tuple[float, float]]:
    """Return means and variances of the groups' levels, as estimated from earlier epochs.

    Earlier epochs explain the share `remembered` of the levels' variance.
    """
    levels, _ = _levels_of(setting)
    explained, grand = setting.remembered, float(levels.mean())
    common = max(float(levels.var()), 1e-6)
    noise = levels[resampled(len(levels), len(levels), seed=3)] - grand
    means = grand + explained * (levels - grand)
    means += math.sqrt(explained * (1 - explained)) * noise
    return [(mean, common * (1 - explained)) for mean in means[:, 0].tolist()]


def _rows(lengths: NDArray[np.int64]) -> list[list[int]]:
    return [[length for length in row if length] for row in lengths.tolist()]
