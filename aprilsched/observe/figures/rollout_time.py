"""Where the time of each rollout goes, from its launch to its delivery.

Invariant: the parts of a rollout add up to the time since its launch. This is not the engines'
time, because slots do other work while a rollout runs its tools; for that see
:mod:`~aprilsched.observe.figures.engine_time`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.shell.listener import DispatchingListener

RolloutPart: TypeAlias = Literal["engine", "paused", "queue", "tools", "agent", "score", "batch"]

ROLLOUT_PARTS: dict[RolloutPart, str] = {
    "engine": "It is with an engine that generates.",
    "paused": "It is with an engine that is paused, takes new weights or sleeps.",
    "queue": "It has a request that no engine has yet, or that was called back.",
    "tools": "It is an episode that has no request: it uses its tools.",
    "agent": "It is a session that no launcher has taken yet.",
    "score": "Its response is complete, or its session has ended, and a reward, or the verdict on "
    "its group, is not there yet.",
    "batch": "It is complete and scored, and waits for its group or siblings, its batch or the "
    "trainer.",
}
"""Each part with its meaning, in the order in which they are shown."""

ROLLOUT_PART_LABELS: dict[RolloutPart, str] = {
    "engine": "with an engine",
    "paused": "paused for new weights",
    "queue": "not sent to an engine",
    "tools": "at its tools",
    "agent": "waiting for an agent",
    "score": "waiting for its score",
    "batch": "waiting for its batch",
}


@dataclass(slots=True, kw_only=True, eq=False)
class RolloutClock:
    """A rollout in flight.

    Attributes:
        part: its current part, since the time `since`.
        seconds: its time before `since`, by part.
        episode: whether a coroutine or a session drives it.
        session: drift and branches, reported when its session ends; None if it is not a session.
    """

    since: float
    part: RolloutPart = "queue"
    seconds: dict[RolloutPart, float] = field(
        default_factory=dict.fromkeys(ROLLOUT_PARTS, 0.0).copy
    )
    episode: bool = False
    session: tuple[int, int] | None = None

    def enter(self, part: RolloutPart, now: float) -> None:
        """End the current part, and start another one."""
        self.seconds[self.part] += now - self.since
        self.part, self.since = part, now


class RolloutTime(DispatchingListener):
    """Measures the time of the rollouts in flight.

    Attributes:
        rollouts: the rollouts in flight, by id.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rollouts: dict[int, RolloutClock] = {}
        self._groups: dict[int, tuple[int, ...]] = {}
        self._on: dict[str, dict[int, int]] = {}
        """Rollout ids by request id, for each engine."""
        self._engines: dict[int, str] = {}
        """The engine of each request, by request id."""
        self._stopped: set[str] = set()
        """Engines that do not generate, because they were instructed not to."""
        self._handlers = {
            of.RunOpened: self._opened,
            of.GroupLaunched: self._launched,
            of.MemberLaunched: self._member_launched,
            of.EpisodeStarted: self._episode_started,
            of.EpisodeWaiting: lambda fact: self._enter(fact.rollout_id, fact.what),
            of.TurnBegun: lambda fact: self._enter(fact.rollout_id, "queue"),
            of.TurnEnded: lambda fact: self._enter(fact.rollout_id, "tools"),
            of.AttemptSent: self._sent,
            of.AttemptEnded: self._back,
            of.RolloutFinished: lambda fact: self._enter(fact.rollout_id, "batch"),
            of.SampleReady: self._sample_ready,
            of.RewardRequested: self._reward_requested,
            of.RolloutScored: self._scored,
            of.VerdictRequested: lambda fact: self._enter_group(fact.group_id, "score"),
            of.GroupAccepted: lambda fact: self._enter_group(fact.group_id, "batch"),
            of.GroupDropped: lambda fact: self._forget(fact.group_id, fact.rollout_ids),
            of.EvaluationDelivered: self._evaluated,
            of.EngineModeChanged: self._mode_changed,
            of.EngineLost: lambda fact: self._stopped.discard(fact.engine),
        }

    def take(
        self, rollouts: Iterable[of.DeliveredRollout], now: float
    ) -> list[RolloutClock | None]:
        """Remove and return the clock of each of these rollouts, which are delivered `now`.

        The seconds of a clock are counted up to `now`. The clock is None if an earlier process
        delivered the rollout.
        """
        clocks: list[RolloutClock | None] = []
        for each in rollouts:
            clocks.append(clock := self.rollouts.pop(each.rollout_id, None))
            if clock is not None:
                clock.enter(clock.part, now)
            for unit in (each.group_id, each.rollout_id):
                self._groups.pop(unit, None)
        return clocks

    # --- what happens --------------------------------------------------------------------------

    def _enter(self, rollout_id: int, part: RolloutPart) -> None:
        clock = self.rollouts.get(rollout_id)
        if clock is not None:
            clock.enter(part, self._now)

    def _enter_group(self, group_id: int, part: RolloutPart) -> None:
        for rollout_id in self._groups.get(group_id, ()):
            self._enter(rollout_id, part)

    def _opened(self, fact: of.RunOpened) -> None:
        # The prior run's rollouts in flight are gone, except those launched as restored.
        for held in (self.rollouts, self._groups, self._on, self._engines, self._stopped):
            held.clear()

    def _launched(self, fact: of.GroupLaunched) -> None:
        self._groups[fact.group_id] = fact.rollout_ids
        for rollout_id in fact.rollout_ids:
            self.rollouts[rollout_id] = RolloutClock(since=self._now)
        if fact.restored is not None:
            for rollout_id, finished in zip(fact.rollout_ids, fact.restored.finished, strict=True):
                if finished:
                    self._enter(rollout_id, "batch")

    def _member_launched(self, fact: of.MemberLaunched) -> None:
        self._groups[fact.group_id] = (*self._groups.get(fact.group_id, ()), fact.rollout_id)
        self.rollouts[fact.rollout_id] = RolloutClock(since=self._now)

    def _episode_started(self, fact: of.EpisodeStarted) -> None:
        self._enter(fact.rollout_id, "tools")
        if fact.rollout_id in self.rollouts:
            self.rollouts[fact.rollout_id].episode = True

    def _sent(self, fact: of.AttemptSent) -> None:
        self._engines[fact.request_id] = fact.engine
        self._on.setdefault(fact.engine, {})[fact.request_id] = fact.rollout_id
        self._enter(fact.rollout_id, "engine")

    def _back(self, fact: of.AttemptEnded) -> None:
        engine = self._engines.pop(fact.request_id, None)
        if engine is None:
            return
        rollout_id = self._on[engine].pop(fact.request_id)
        clock = self.rollouts.get(rollout_id)
        # An episode that withdrew its turn may already have ended.
        if clock is not None and clock.part in ("engine", "paused"):
            clock.enter("queue", self._now)

    def _sample_ready(self, fact: of.SampleReady) -> None:
        self._groups[fact.rollout_id] = (fact.rollout_id,)

    def _reward_requested(self, fact: of.RewardRequested) -> None:
        if fact.rollout_id is None:
            self._enter_group(fact.group_id, "score")
        else:
            self._enter(fact.rollout_id, "score")

    def _scored(self, fact: of.RolloutScored) -> None:
        self._enter(fact.rollout_id, "batch")
        if "session" in fact.info and fact.rollout_id in self.rollouts:
            known = fact.info["session"]
            # The entry is the caller's own if a score has one of that name.
            if isinstance(known, Mapping) and {"drift", "branches"} <= known.keys():
                self.rollouts[fact.rollout_id].session = known["drift"], known["branches"]

    def _forget(self, group_id: int, rollout_ids: Iterable[int]) -> None:
        gone = set(rollout_ids)
        left = tuple(each for each in self._groups.pop(group_id, ()) if each not in gone)
        if left:
            # A lost member leaves its group, and the others continue.
            self._groups[group_id] = left
        for rollout_id in gone:
            self.rollouts.pop(rollout_id, None)

    def _evaluated(self, fact: of.EvaluationDelivered) -> None:
        self.take(fact.rollouts, self._now)

    def _mode_changed(self, fact: of.EngineModeChanged) -> None:
        generates = fact.finish in ("running", "verifying")
        if generates == (fact.engine not in self._stopped):
            return
        (self._stopped.discard if generates else self._stopped.add)(fact.engine)
        for rollout_id in self._on.get(fact.engine, {}).values():
            self._enter(rollout_id, "engine" if generates else "paused")
