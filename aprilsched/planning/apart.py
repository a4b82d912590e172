"""Tries a schedule out on several engines, each with its own responses.

A group is sent to one engine, or divided over all of them, by the rule of the run
(:mod:`aprilsched.core.policies.placement`). Which it is decides how uneven the engines are: with
groups of long responses that stay together, one engine decodes them while others have little to do.
Engines that share the work evenly were expected to do 0.73 of the bound there, and did 0.59.

An event concerns one engine, so a trial costs as much for each response as that of one engine.

The gaps between the turns of a response are left out: a response decodes all of its tokens without
one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from aprilsched.core.policies.placement import Places
from aprilsched.core.policies.schedule import Schedule
from aprilsched.planning.setting import Setting
from aprilsched.planning.trial import DecodeBatch, Drawn, Running, Trial

_DUE = attrgetter("due")


class FleetTrial(Trial):
    """A schedule on trial on engines that take new weights in one pause."""

    def __init__(self, schedule: Schedule, setting: Setting, drawn: Drawn | None = None) -> None:
        super().__init__(schedule, setting, drawn)
        self._engines = [Engine(str(index), setting) for index in range(setting.engines)]
        self._stands = True
        """Whether the engines stand, and go on with what is admitted next."""

    def _advance(self, until: float = math.inf) -> None:
        """Go to the next event of any engine."""
        engine = min(self._engines, key=_DUE)
        if engine.due > until:
            self.now = until
            return
        self.now = max(self.now, engine.due)
        self._arrive(engine)

    def _arrive(self, engine: Engine) -> None:
        """Carry out an engine's event, the end of a response."""
        self._decode(engine, engine.steps)
        self._fill(engine)

    def _stop(self) -> None:
        """Record every member's tokens. Those to recompute stay on their engines, behind the ones
        that wait there."""
        if self._setting.runs_out:
            while self._running:
                self._advance()
        elif not self._stands:
            for engine in self._engines:
                self._follow(engine)
                for running in engine.running.values():
                    engine.note(running, engine.version)
                if self._store is not None or not self._setting.keeps_kv:
                    engine.waiting.extend(engine.clear())
                if self._store is not None:
                    engine.waiting.clear()
            if self._store is not None:
                self._running.clear()
        self._stands = True

    # --- responses -----------------------------------------------------------------------------

    def _admit(self, *, alone: bool = False) -> None:
        """Send what waits to the engines, and let those go on that stand."""
        stood, self._stands = self._stands, False
        if stood:
            for engine in self._engines:
                engine.version, engine.at = self._batches, max(engine.at, self.now)
        self._send_queue(self._engines)
        if stood:
            for engine in self._engines:
                self._fill(engine)

    def _send_queue(self, takers: Sequence[Engine]) -> None:
        sent = [Running(0, member, group, group.lengths[member]) for group, member in self._queue]
        self._queue.clear()
        for running in sent:
            self._tickets += 1
            running.ticket = self._tickets
            self._running[running.ticket] = running
        if sent:
            self._send(sent, takers)

    def _send(self, sent: Sequence[Running], takers: Sequence[Engine]) -> None:
        """Give each response to an engine by the rule of the run."""
        places = Places({engine.name: engine.open for engine in takers})
        together = (self.schedule.placement or self._setting.placement) == "prefix"
        touched: dict[str, Engine] = {}
        for running in sent:
            group = running.group
            slack = len(group.lengths) if together else -1
            name = places.take(prefer=group.home, slack=slack, avoid=())
            if name is None:
                raise AssertionError("there is no engine to send to")
            group.home = name
            engine = touched[name] = self._engines[int(name)]
            engine.waiting.append(running)
        for engine in touched.values():
            self._follow(engine)
            self._fill(engine)

    def _fill(self, engine: Engine) -> None:
        """Let waiting responses of an engine begin, as far as there is room."""
        tokens, setting = 0.0, self._setting
        engine.begin_pass()
        while engine.waiting and len(engine.running) < setting.max_running:
            running = engine.waiting[0]
            have = running.group.have[running.member]
            context, left = setting.prompt_tokens + have, running.length - have
            if not engine.fits(context, left):
                break
            engine.waiting.popleft()
            engine.begin(running)
            tokens += context
        if tokens:
            engine.at = max(engine.at, self.now)
            engine.at += setting.model.prefill_seconds(max(1, round(tokens)))
        self._plan(engine)

    def _plan(self, engine: Engine) -> None:
        """Note when the next response of an engine ends."""
        if engine.loads is not None:
            return
        if not engine.running:
            engine.due = math.inf
            return
        engine.steps = engine.room(engine.put_back)
        running, kv = len(engine.running), round(engine.kv)
        engine.due = engine.at + self._decoding.seconds(running, kv, engine.steps)

    def _follow(self, engine: Engine) -> None:
        """Bring an engine to the end of the step that is in progress now."""
        if not engine.running or engine.at >= self.now:
            return
        running, kv = len(engine.running), round(engine.kv)
        steps = self._setting.model.steps_within(running, kv, self.now - engine.at)
        if engine.at + self._decoding.seconds(running, kv, steps) < self.now:
            steps += 1
        if (steps := min(steps, engine.steps - 1)) > 0:
            self._decode(engine, steps)

    def _decode(self, engine: Engine, steps: int) -> None:
        running = len(engine.running)
        engine.at += self._decoding.seconds(running, round(engine.kv), steps)
        tokens = steps * running
        reads = steps * engine.kv + tokens * (steps - 1) / 2
        work = self._token_seconds * tokens + self._setting.model.t2 * reads
        self._bound += work / len(self._engines)
        ends = engine.advance(steps)
        engine.steps -= steps
        self._peak = max(self._peak, engine.kv * len(self._engines))
        for ended in ends:
            del self._running[ended.ticket]
            ended.group.finish(ended.member, engine.version)
            engine.leave(ended)
            self._complete(ended.group)


class Engine(DecodeBatch):
    """One engine with its responses."""

    __slots__ = ("at", "due", "loads", "name", "steps", "version", "waiting")

    def __init__(self, name: str, setting: Setting) -> None:
        super().__init__(setting)
        self.name = name
        self.version = 0
        self.loads: int | None = None
        """The version that it loads at the moment."""
        self.at = 0.0
        """The time up to which its steps are counted, in seconds."""
        self.steps = 0
        """Number of steps to the next end of a response."""
        self.due = math.inf
        """The time of that end, or of the end of its refit."""
        self.waiting: deque[Running] = deque()
        """Responses that wait for a place, or for room in the pool."""

    @property
    def open(self) -> int:
        return len(self.running) + len(self.waiting)

    def put_back(self, running: Running) -> None:
        self.note(running, self.version)
        self.leave(running)
        self.waiting.append(running)

    def clear(self) -> list[Running]:
        self.due = math.inf
        return super().clear()
