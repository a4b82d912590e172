"""Tries a schedule out where each engine takes new weights alone (``refit="rolling"``).

What rolling refits cost does not depend on what the engines do on average: it is the last engine of
each old version, which decodes a few long responses, and what is moved to empty another one. So
this trial has each engine for itself, with its version, its clock and its responses. The rule that
says when an engine's responses are moved is the production one
(:mod:`aprilsched.core.policies.repack`).

At an update nothing stops. A new group goes to the engine of the newest version that has the fewest
responses, and waits while there is none. An engine of an older version takes the newest one when it
is empty, because its responses have ended or were moved to other engines of their version. What is
moved is the only thing that is recomputed.

Rewards and filters are those of every trial. The gaps between the turns of a response are left out:
a response decodes all of its tokens without one.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

from aprilsched.core.policies.repack import LOOK_AGAIN, Load, engine_to_free, surplus
from aprilsched.core.policies.schedule import Schedule
from aprilsched.planning.setting import Setting
from aprilsched.planning.trial import RESERVE_SHARE, Running, Trial


class RollingTrial(Trial):
    """A schedule on trial with rolling refits. They have the asynchronous pace only."""

    def __init__(self, schedule: Schedule, setting: Setting) -> None:
        super().__init__(schedule, setting)
        self._engines = [_Engine(str(index), setting) for index in range(setting.engines)]
        self._looked: dict[int, float] = {}
        """For each older version the surplus of engines at which it was last found not to be worth
        it to move their responses."""

    # --- time ----------------------------------------------------------------------------------

    def _advance(self, until: float = math.inf) -> None:
        """Go to the next end of a response, or of a refit, on any engine."""
        engine = min(self._engines, key=_due)
        if engine.due > until:
            self.now = until
            return
        self.now = max(self.now, engine.due)
        if engine.loads is not None:
            engine.version, engine.loads = engine.loads, None
            engine.due = math.inf
        else:
            self._decode(engine, engine.steps)
            self._fill(engine)
        self._roll()
        self._admit()

    def _stop(self) -> None:
        """Nothing stops for an update."""

    def _refit(self) -> None:
        self._batches += 1
        self._taken = 0
        self._looked.clear()
        for engine in self._engines:
            self._follow(engine)
            self._plan(engine)
        self._roll()
        self._admit()

    # --- engines that take new weights ---------------------------------------------------------

    def _roll(self) -> None:
        """Let engines of older versions take the newest one, where they are empty or should be."""
        older: dict[int, list[_Engine]] = {}
        for engine in self._engines:
            if engine.version != self._batches and engine.loads is None:
                if engine.open:
                    older.setdefault(engine.version, []).append(engine)
                else:
                    self._go(engine)
        for version, engines in older.items():
            while self._gather(version, engines):
                pass

    def _gather(self, version: int, engines: list[_Engine]) -> bool:
        """Move the responses of one of the `engines` to the others, if that is worth it."""
        if len(engines) < 2:
            return False
        requests = sum(engine.open for engine in engines)
        share = (len(self._running) + len(self._queue)) / len(self._engines)
        over = surplus(engines=len(engines), requests=requests, share=share)
        if over < self._looked.get(version, 0.0) + LOOK_AGAIN:
            return False
        self._looked[version] = over
        name = engine_to_free(
            [self._load(engine) for engine in engines],
            requests=requests,
            share=share,
            prices=self._setting.prices,
            needed=False,
        )
        if name is None:
            return False
        self._looked[version] = 0.0
        freed = self._engines[int(name)]
        engines.remove(freed)
        self._follow(freed)
        moved = [*freed.running.values(), *freed.waiting]
        for running in freed.running.values():
            self._note_on(freed, running)
        freed.running.clear()
        freed.waiting.clear()
        freed.ends.clear()
        freed.kv, freed.sum_of_ends = 0.0, 0
        self._send(moved, engines)
        self._go(freed)
        return True

    def _load(self, engine: _Engine) -> Load:
        def remaining() -> float:
            left = engine.sum_of_ends - len(engine.running) * engine.step
            left += sum(r.group.lengths[r.member] - r.group.have[r.member] for r in engine.waiting)
            return left / engine.open

        def contexts() -> int:
            prompt = self._setting.prompt_tokens
            waiting = sum(prompt + r.group.have[r.member] for r in engine.waiting)
            return round(engine.kv + waiting)

        self._follow(engine)
        self._plan(engine)
        pool = self._setting.kv_tokens
        return Load(
            engine=engine.name,
            requests=engine.open,
            room=self._setting.max_running,
            kv_tokens=pool,
            contexts=contexts,
            remaining=remaining,
        )

    def _go(self, engine: _Engine) -> None:
        engine.loads = self._batches
        engine.at = max(engine.at, self.now)
        engine.due = engine.at + self._setting.refit_seconds

    # --- responses -----------------------------------------------------------------------------

    def _admit(self) -> None:
        """Send what waits to the engines of the newest version, each group to one engine."""
        if not self._queue:
            return
        takers = [e for e in self._engines if e.version == self._batches and e.loads is None]
        if not takers:
            return
        sent = [Running(0, member, group) for group, member in self._queue]
        self._queue.clear()
        for running in sent:
            self._tickets += 1
            running.ticket = self._tickets
            self._running[running.ticket] = running
        self._send(sent, takers)

    def _send(self, sent: Sequence[Running], takers: Sequence[_Engine]) -> None:
        """Give each response to the engine with the fewest, and groups to one engine as far as
        that has less than a group more than the others."""
        homes: dict[int, _Engine] = {}
        touched: dict[str, _Engine] = {}
        for running in sent:
            engine = min(takers, key=_open)
            group = running.group
            home = homes.setdefault(id(group), engine)
            if home.open <= engine.open + len(group.lengths):
                engine = home
            engine.waiting.append(running)
            touched[engine.name] = engine
        for engine in touched.values():
            self._follow(engine)
            self._fill(engine)

    def _fill(self, engine: _Engine) -> None:
        """Let waiting responses of an engine begin, as far as there is room."""
        tokens, setting = 0.0, self._setting
        while engine.waiting and len(engine.running) < setting.max_running:
            running = engine.waiting[0]
            have = running.group.have[running.member]
            context, left = setting.prompt_tokens + have, running.length - have
            if not engine.fits(context, left):
                break
            engine.waiting.popleft()
            running.end = engine.step + left
            engine.running[running.ticket] = running
            heapq.heappush(engine.ends, (running.end, running.ticket))
            engine.sum_of_ends += running.end
            engine.kv += context
            tokens += context
        if tokens:
            engine.at = max(engine.at, self.now)
            engine.at += setting.model.prefill_seconds(max(1, round(tokens)))
        self._plan(engine)

    def _plan(self, engine: _Engine) -> None:
        """Note when the next response of an engine ends."""
        if engine.loads is not None:
            return
        if not engine.running:
            engine.due = math.inf
            return
        engine.steps = self._room_on(engine, engine.next_end() - engine.step)
        running, kv = len(engine.running), round(engine.kv)
        engine.due = engine.at + self._setting.model.decode_seconds(running, kv, engine.steps)

    def _follow(self, engine: _Engine) -> None:
        """Bring an engine to the end of the step that is in progress now."""
        if not engine.running or engine.at >= self.now:
            return
        running, kv, model = len(engine.running), round(engine.kv), self._setting.model
        steps = model.steps_within(running, kv, self.now - engine.at)
        if engine.at + model.decode_seconds(running, kv, steps) < self.now:
            steps += 1
        if (steps := min(steps, engine.steps - 1)) > 0:
            self._decode(engine, steps)

    def _decode(self, engine: _Engine, steps: int) -> None:
        running, model, engines = len(engine.running), self._setting.model, len(self._engines)
        engine.at += model.decode_seconds(running, round(engine.kv), steps)
        tokens, growth = steps * running, running * steps * (steps - 1) / 2
        work = model.token_seconds(self._setting.max_running) * tokens
        self._bound += (work + model.t2 * (steps * engine.kv + growth)) / engines
        engine.step += steps
        engine.steps -= steps
        engine.kv += tokens
        self._peak = max(self._peak, engine.kv * engines)
        while engine.ends and engine.ends[0][0] <= engine.step:
            end, ticket = heapq.heappop(engine.ends)
            if engine.ends_at(ticket, end):
                ended = engine.running.pop(ticket)
                del self._running[ticket]
                ended.group.finish(ended.member, engine.version)
                self._leave_engine(engine, ended)
                self._complete(ended.group)

    def _room_on(self, engine: _Engine, steps: int) -> int:
        """Bound the steps by the room in an engine's pool, as :meth:`Trial._room_for` does."""
        while len(engine.running) > 1 and engine.pool - engine.kv < len(engine.running):
            _, running = engine.running.popitem()
            self._note_on(engine, running)
            self._leave_engine(engine, running)
            engine.waiting.append(running)
            steps = engine.next_end() - engine.step
        if engine.pool == math.inf:
            return steps
        return min(steps, max(1, int(engine.pool - engine.kv) // len(engine.running)))

    def _note_on(self, engine: _Engine, running: Running) -> None:
        tokens = running.length - (running.end - engine.step)
        running.group.note(running.member, tokens, engine.version)

    def _leave_engine(self, engine: _Engine, running: Running) -> None:
        engine.kv -= self._setting.prompt_tokens + running.group.have[running.member]
        engine.sum_of_ends -= running.end


class _Engine:
    """One engine with its responses."""

    __slots__ = (
        "at",
        "due",
        "ends",
        "kv",
        "loads",
        "name",
        "pool",
        "running",
        "step",
        "steps",
        "sum_of_ends",
        "version",
        "waiting",
    )

    def __init__(self, name: str, setting: Setting) -> None:
        self.name = name
        self.pool = math.inf if setting.kv_tokens is None else float(setting.kv_tokens)
        self.version = 0
        self.loads: int | None = None
        """The version that it loads at the moment."""
        self.at = 0.0
        """The time up to which its steps are counted, in seconds."""
        self.step = 0
        self.steps = 0
        """Number of steps to the next end of a response."""
        self.due = math.inf
        """The time of that end, or of the end of its refit."""
        self.kv = 0.0
        self.running: dict[int, Running] = {}
        self.ends: list[tuple[int, int]] = []
        self.sum_of_ends = 0
        self.waiting: deque[Running] = deque()
        """Responses that wait for a place, or for room in the pool."""

    @property
    def open(self) -> int:
        return len(self.running) + len(self.waiting)

    def fits(self, context: float, left: int) -> bool:
        """Whether one more fits, with a share of all tokens still to come."""
        if self.pool == math.inf or not self.running:
            return True
        to_come = self.sum_of_ends - len(self.running) * self.step + left
        return self.kv + context + 1 + RESERVE_SHARE * to_come <= self.pool

    def next_end(self) -> int:
        """The last step of the response that ends first."""
        while not self.ends_at(self.ends[0][1], self.ends[0][0]):
            heapq.heappop(self.ends)
        return self.ends[0][0]

    def ends_at(self, ticket: int, step: int) -> bool:
        """Whether this response ends here; one that was preempted ends later than was noted."""
        running = self.running.get(ticket)
        return running is not None and running.end == step


def _due(engine: _Engine) -> float:
    return engine.due


def _open(engine: _Engine) -> int:
    return engine.open
