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

import math

from aprilsched.core.policies.repack import LOOK_AGAIN, Load, engine_to_free, surplus
from aprilsched.core.policies.schedule import Schedule
from aprilsched.planning.apart import Engine, FleetTrial
from aprilsched.planning.setting import Setting
from aprilsched.planning.trial import Drawn


class RollingTrial(FleetTrial):
    """A schedule on trial with rolling refits. They have the asynchronous pace only."""

    def __init__(self, schedule: Schedule, setting: Setting, drawn: Drawn | None = None) -> None:
        super().__init__(schedule, setting, drawn)
        self._older: list[Engine] = []
        """Engines that may have an older version than the newest one, and do not load it."""
        self._looked: dict[int, float] = {}
        """For each older version the surplus of engines at which it was last found not to be worth
        it to move their responses."""

    # --- time ----------------------------------------------------------------------------------

    def _arrive(self, engine: Engine) -> None:
        """Carry out an engine's event, the end of a response or of its refit."""
        if engine.loads is not None:
            engine.version, engine.loads = engine.loads, None
            engine.due = math.inf
            self._older.append(engine)
        else:
            super()._arrive(engine)
        self._roll()
        self._admit()

    def _stop(self) -> None:
        """Nothing stops for an update."""

    def _refit(self) -> None:
        self._batches += 1
        self._taken = 0
        self._looked.clear()
        self._older = [engine for engine in self._engines if engine.loads is None]
        for engine in self._engines:
            self._follow(engine)
            self._plan(engine)
        self._roll()
        self._admit()

    # --- engines that take new weights ---------------------------------------------------------

    def _roll(self) -> None:
        """Let engines of older versions take the newest one, where they are empty or should be."""
        older: dict[int, list[Engine]] = {}
        newest, stay = self._batches, list[Engine]()
        for engine in self._older:
            if engine.version == newest or engine.loads is not None:
                continue
            if engine.running or engine.waiting:
                older.setdefault(engine.version, []).append(engine)
                stay.append(engine)
            else:
                self._go(engine)
        self._older = stay
        for version, engines in older.items():
            while self._gather(version, engines):
                pass

    def _gather(self, version: int, engines: list[Engine]) -> bool:
        """Move the responses of one of the `engines` to the others, if that is worth it."""
        if len(engines) < 2:
            return False
        requests = sum([len(engine.running) + len(engine.waiting) for engine in engines])
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
        for running in freed.running.values():
            freed.note(running, freed.version)
        moved = [*freed.clear(), *freed.waiting]
        freed.waiting.clear()
        self._send(moved, engines)
        self._go(freed)
        return True

    def _load(self, engine: Engine) -> Load:
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

    def _go(self, engine: Engine) -> None:
        engine.loads = self._batches
        engine.at = max(engine.at, self.now)
        engine.due = engine.at + self._setting.refit_seconds

    def _admit(self, *, alone: bool = False) -> None:
        """Send what waits to the engines of the newest version."""
        if not self._queue:
            return
        takers = [e for e in self._engines if e.version == self._batches and e.loads is None]
        if takers:
            self._send_queue(takers)
