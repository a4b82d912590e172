"""The engines of a trial: the requests that wait and decode, their KV, and the seconds they take.

All engines are one, whose work and KV pool are divided evenly; requests are numbers on one step
counter.

Invariants:
- A member that starts decoding at step s with r tokens to go ends at step s + r, whatever happens
  to others: what takes time but no step (prefill, pauses) moves only the clock.
- `kv` is the sum of prompts and tokens so far over the running responses. It is at most the pool,
  except for a response that runs alone. A full pool has the same effect as on an engine: requests
  wait, and the one admitted last is preempted and recomputed.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from aprilsched.planning.reserved_share import ReservedShare
from aprilsched.planning.setting import Setting
from aprilsched.planning.trial_groups import TrialGroup


@dataclass(slots=True, eq=False)
class Running:
    """A response that decodes, and the step at which it ends.

    `goal` is the number of its tokens at that step: of the turn, and of the turns before it.
    """

    ticket: int
    member: int
    group: TrialGroup
    goal: int
    end: int = 0


class TrialEngines:
    """All engines of a trial, whose weights have the version `version`."""

    def __init__(self, setting: Setting) -> None:
        self.version = 0
        self.queue: deque[tuple[TrialGroup, int]] = deque()
        """The members that wait, in order of arrival."""
        self.running: dict[int, Running] = {}
        """The running responses by ticket, in the order of admission."""
        self.bound = 0.0
        """T_bound of the generated tokens; see StepTimeModel.bound_seconds."""
        self.peak_kv = 0.0
        """Largest number of tokens in all KV pools together."""
        self._setting, self._model, self._engines = setting, setting.model, setting.engines
        tokens = setting.kv_tokens
        self._pool = math.inf if tokens is None else float(tokens * setting.engines)
        self._prompt, self._spare = setting.prompt_tokens, setting.spare_tokens
        self._rule = rule = setting.reservation
        self._share = ReservedShare(
            busy=True, conservativeness=1.0 if rule is None else rule.conservativeness
        )
        self._chunk = setting.model.prefill_chunk * setting.engines
        self._read = self._joined = 0.0
        """Tokens that the present pass reads, and for which its responses need more room."""
        self._full_at = 0
        """Number of running responses at which one did not fit; 0 for none."""
        self._kv = 0.0
        self._step = self._tickets = 0
        self._ends: list[tuple[int, int]] = []
        """Heap of (last step, ticket); entries of preempted responses are ignored."""
        self._sum_of_ends = 0
        self._token_seconds = setting.model.token_seconds(setting.max_running)
        self._read_seconds = setting.model.read_seconds
        self._costs: dict[int, tuple[float, float]] = {}
        """For each size of a batch the seconds of a step without its reads, and of one read. A
        trial needs few sizes, but hundreds of thousands of times."""

    def admit(self, *, alone: bool = False) -> float:
        """Start waiting members while there is room; return the seconds of their prefill.

        With `alone`, each member takes a slot that was freed by itself, so an engine of the run,
        with `thinner` times the slots, makes `thinner` prefill passes.
        """
        queue, prompt = self.queue, self._prompt
        room = self._setting.max_running * self._engines - len(self.running)
        if not queue or room <= 0:
            return 0.0
        tokens, groups = 0.0, set[int]()
        self._read = self._joined = 0.0
        while queue and room:
            group, member = queue[0]
            have, goal = group.have[member], group.goal(member)
            if not self._fits(prompt + have, goal - have):
                break
            queue.popleft()
            room -= 1
            self._join(group, member, goal)
            tokens += prompt + have
            groups.add(id(group))
        if not groups:
            return 0.0
        # The members of a group run on one engine, and the others do not wait for its prefill.
        engines = min(self._engines, len(groups))
        seconds = self._model.prefill_seconds(max(1, round(tokens / engines)))
        if alone:
            seconds += (self._setting.thinner - 1) * self._model.prefill_pass
        return seconds * engines / self._engines

    def decode(self, now: float, until: float) -> tuple[float, list[Running]]:
        """Decode until the next response reaches its goal, and return the seconds.

        Decoding stops earlier, after the step in progress, at the time `until`. The second result
        are the responses that have reached their goals, without their KV.
        """
        steps = self._steps_with_room()
        running, engines = len(self.running), self._engines
        # If there are fewer responses than engines, as in the tail of a batch, each runs on its own
        # engine. Spread over all engines, their contexts would be read in no time: the forecast of
        # waiting on 32 engines would be a third too fast.
        busy = min(running, engines)
        batch, kv = round(running / busy), round(self._kv / busy)
        seconds = self._decode_seconds(batch, kv, steps)
        if until < now + seconds:
            steps = min(steps, self._model.steps_within(batch, kv, until - now) + 1)
            seconds = self._decode_seconds(batch, kv, steps)
        tokens = steps * running
        reads = steps * self._kv + tokens * (steps - 1) / 2
        self.bound += (self._token_seconds * tokens + self._read_seconds * reads) / engines
        self._step += steps
        self._kv += tokens
        self.peak_kv = max(self.peak_kv, self._kv)
        ended: list[Running] = []
        while self._ends and self._ends[0][0] <= self._step:
            end, ticket = heapq.heappop(self._ends)
            if self._ends_at(end, ticket):
                ended.append(self.running.pop(ticket))
        for each in ended:
            self._leave(each)
        if not self.running and not self.queue:
            self._share.idle(self._step)
        return seconds, ended

    def stop(self, *, forget: bool) -> None:
        """Record every response's tokens; those to recompute go behind those that wait.

        With `forget`, nothing waits afterwards.
        """
        for running in self.running.values():
            self._note(running)
        if forget or self._setting.empties:
            self._share.idle(self._step)
        if forget:
            self.queue.clear()
        elif self._setting.keeps_kv:
            return
        else:
            self.queue.extend((r.group, r.member) for r in self.running.values())
        self.running.clear()
        self._ends.clear()
        self._kv, self._sum_of_ends = 0.0, 0

    def discard(self, tokens: int) -> None:
        """Count the tokens of a response as not generated."""
        self.bound -= self._setting.work(tokens) / self._engines

    def _fits(self, context: float, left: int) -> bool:
        """Return whether one more response fits.

        The rule is that of the engines' admission
        (:class:`~aprilsched.kernel.values.capabilities.Reservation`).
        """
        count = len(self.running)
        if self._pool == math.inf or not count:
            return True
        if 0 < self._full_at <= count:
            return False
        need = self._kv + context + 1 + self._joined + self._to_come(left)
        if self._rule is not None:
            to_come = self._sum_of_ends - count * (self._step - self._spare)
            need += self._running_share * min(to_come, count * self._rule.clip)
        fits = need <= self._pool
        self._full_at = 0 if fits else count
        return fits

    def _to_come(self, left: int) -> float:
        return 0.0 if self._rule is None else min(left + self._spare, self._rule.clip)

    @property
    def _running_share(self) -> float:
        in_full = self._rule is not None and self._rule.fixed_in_full
        return 1.0 if in_full else self._share.at(self._step)

    def _join(self, group: TrialGroup, member: int, goal: int) -> None:
        have = group.have[member]
        self._tickets += 1
        running = Running(self._tickets, member, group, goal, self._step + goal - have)
        self._read += self._prompt + have
        self._joined += (1 - self._running_share) * self._to_come(goal - have)
        if self._read >= self._chunk:
            # Another pass starts; the requests of the previous one now count as running.
            self._read = self._joined = 0.0
        self.running[running.ticket] = running
        heapq.heappush(self._ends, (running.end, running.ticket))
        self._sum_of_ends += running.end
        self._kv += self._prompt + have

    def _note(self, running: Running) -> None:
        tokens = running.goal - (running.end - self._step)
        running.group.note(running.member, tokens, self.version)

    def _leave(self, running: Running) -> None:
        """Record the tokens of a response, and take its KV out of the pool."""
        self._note(running)
        self._kv -= self._prompt + running.group.have[running.member]
        self._sum_of_ends -= running.end

    def _steps_with_room(self) -> int:
        """Return the number of steps to the next end of a response for which the pool has room.

        The response that was admitted last is put back until there is room for one step.
        """
        while len(self.running) > 1 and self._pool - self._kv < len(self.running):
            generated = self._kv - self._prompt * len(self.running)
            to_come = self._sum_of_ends - len(self.running) * (self._step - self._spare)
            self._share.overflow(
                self._step,
                requests=len(self.running),
                generated=generated,
                limits=generated + to_come,
            )
            _, preempted = self.running.popitem()
            self._leave(preempted)
            self.queue.append((preempted.group, preempted.member))
        while not self._ends_at(*self._ends[0]):
            heapq.heappop(self._ends)
        steps = self._ends[0][0] - self._step
        if self._pool == math.inf:
            return steps
        return min(steps, max(1, int(self._pool - self._kv) // len(self.running)))

    def _ends_at(self, step: int, ticket: int) -> bool:
        """Return whether this response ends here; one that was preempted ends later."""
        running = self.running.get(ticket)
        return running is not None and running.end == step

    def _decode_seconds(self, batch: int, kv: float, steps: int) -> float:
        """Return seconds of `steps` steps of `batch` sequences; the first reads `kv` tokens."""
        costs = self._costs.get(batch)
        if costs is None:
            work = self._model.step_seconds(batch, 0)
            read = (self._model.step_seconds(batch, 2**30) - work) / 2**30
            costs = self._costs[batch] = work, read
        return steps * (costs[0] + costs[1] * (kv + batch * (steps - 1) / 2))
