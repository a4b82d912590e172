"""The model of the live view; a listener that builds on the shared LiveFigures.

Invariants: a chunk of tokens costs nothing here, because the figures count it. A snapshot is taken
under the lock of the figures, so it is consistent in any thread.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.shell.listener import DispatchingListener, TokenChunks
from aprilsched.observe.figures.engine_sums import utilization_of
from aprilsched.observe.figures.engine_time import BUSY, EngineState, EngineUsage, Part
from aprilsched.observe.figures.figures import Figures
from aprilsched.observe.figures.live_figures import LiveFigures

Phase: TypeAlias = Literal[
    "decoding",
    "decoding, carried",
    "prefilling",
    "re-prefilling",
    "paused",
    "waiting for an engine",
    "using tools",
    "scoring",
    "waiting for an agent",
]
"""The activity of a rollout. A carried one was launched for an earlier batch. A paused one is on an
engine that does not generate."""

_SAMPLE_INTERVAL_S = 5.0
_RATE_INTERVAL_S = 60.0
"""Time over which an engine's rates are averaged: longer than most batches, so that the rates do
not jump at every pause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What is known of a run before it starts.

    Attributes:
        title: the first words of the view.
        where: location of the run, such as its folder.
        batches: number of batches that the run will deliver; 0 for a gateway, which shows none.
        batch_groups: ``batch_groups`` of the scheduler.
        modelled: whether the run uses a virtual clock.
    """

    title: str
    batches: int
    batch_groups: int
    where: str = ""
    modelled: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRow:
    """One engine in the live view.

    Attributes:
        running: number of its requests, at most `max_running`.
        queued: number of its requests beyond `max_running`; they wait inside the engine.
        kv_tokens: number of tokens in the contexts of its requests.
        kv_pool: number of tokens for which the engine has room; None if unknown.
        tokens_per_s, busy: figures of the last minute.
    """

    name: str
    state: EngineState
    running: int
    queued: int
    max_running: int | None
    kv_tokens: int
    kv_pool: int | None
    tokens_per_s: float
    version: int | None
    busy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A run at one moment; times are seconds on the run's clock.

    Attributes:
        left: estimated seconds until the end; None before the first batch.
        batches: number of delivered batches.
        ready: number of complete groups that wait for their batch.
        in_flight: number of rollouts by phase, without phases that have none.
        utilization: busy share of all engines' time since the start.
        idle: shares of the other parts, the largest first.
        recent: figures of the latest batches; None before the first.
        dropped: number of dropped rollouts by reason.
        fault, fault_age: the latest fault as text, and the seconds since then.
        note: an additional text, for example that the run has been silent for some time.
    """

    facts: RunFacts
    elapsed: float
    left: float | None
    batches: int
    version: int
    ready: int
    in_flight: Mapping[Phase, int]
    utilization: float
    idle: tuple[tuple[Part, float], ...]
    tokens_per_s: float
    recent: Figures | None
    dropped: Mapping[str, int]
    engines_lost: int
    retries: int
    fault: str
    fault_age: float
    engines: tuple[EngineRow, ...]
    note: str = ""


_Sums: TypeAlias = dict[str, tuple[float, float, int]]
"""Busy seconds, all seconds and tokens since the start, by engine."""

_FAILED = {
    Reason.REWARD_FAILED.value: "a reward",
    Reason.EPISODE_FAILED.value: "an episode",
    Reason.MEMBER_LOST.value: "a member of a group",
}


class LiveModel(DispatchingListener):
    """The live view's model of a run. It adds to the run's figures the rates of the last minute and
    the latest fault.

    Args:
        facts: what is known of the run before it starts.
        figures: the figures of the run, an earlier listener.

    Attributes:
        note: text that is added to every snapshot.
    """

    def __init__(self, facts: RunFacts, figures: LiveFigures) -> None:
        super().__init__()
        self.facts = facts
        self.note = ""
        self._figures = figures
        self._fault = ("", 0.0)
        self._samples: deque[tuple[float, _Sums]] = deque()
        """The sums of the last minute and their times; the oldest may be older."""
        self._next_sample = 0.0
        self._prior_batches = 0
        self._started: float | None = None
        self._batch_started = 0.0
        self._handlers = {
            of.BatchDelivered: self._on_delivered,
            of.GroupDropped: self._on_group_dropped,
            of.EngineLost: lambda fact: self._record(f"{fact.engine} lost: {fact.cause}"),
            of.EngineSlow: lambda fact: self._record(f"{fact.engine} is slow: {fact.cause}"),
            of.EngineBusy: lambda fact: self._record(f"{fact.engine} is busy: {fact.cause}"),
            of.FleetAwaited: lambda fact: self._record(
                f"no engine is left; waited {fact.waited_s:.0f} s, {fact.left_s:.0f} s more"
            ),
            of.FleetGivenUp: lambda _: self._record("no engine came back in time"),
            of.GroupsFailed: lambda fact: self._record(
                f"{fact.groups} groups failed in a row: {fact.cause}"
            ),
            of.UpdateWanted: lambda _: self._record("engines wait for weights to be published"),
            of.UpdateFinished: self._on_updated,
        }

    def skip(self, batches: int) -> None:
        """Count `batches` batches that the prior run has delivered."""
        self._prior_batches = batches

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        with self._figures.lock:
            if self._started is None:
                self._started = self._batch_started = now
            super().on_facts(facts, now)
            self._sample(now)

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        if now >= self._next_sample:
            with self._figures.lock:
                self._sample(now)

    def _on_delivered(self, _: of.BatchDelivered) -> None:
        self._batch_started = self._now

    def _on_group_dropped(self, fact: of.GroupDropped) -> None:
        if (what := _FAILED.get(fact.reason)) is not None:
            self._record(f"{what} failed: {fact.cause}")

    def _on_updated(self, fact: of.UpdateFinished) -> None:
        if fact.cause:
            self._record(f"version {fact.version} was not loaded: {fact.cause}")

    def _record(self, fault: str) -> None:
        self._fault = " ".join(fault.split()), self._now

    def _sample(self, now: float) -> None:
        if now < self._next_sample:
            return
        self._next_sample = now + _SAMPLE_INTERVAL_S
        state = self._figures.state
        state.advance(now)
        sums = {name: (each.busy, each.wall, each.tokens) for name, each in state.engines.items()}
        self._samples.append((now, sums))
        while len(self._samples) > 1 and now - self._samples[1][0] >= _RATE_INTERVAL_S:
            self._samples.popleft()

    def snapshot(self) -> Snapshot:
        """Take a snapshot of the current state."""
        with self._figures.lock:
            now = self._figures.advance()
            return self._snapshot(now)

    def _snapshot(self, now: float) -> Snapshot:
        figures, state = self._figures, self._figures.state
        rows = tuple(self._row(engine) for engine in state.engines.values())
        seconds = state.seconds()
        batches = max(self._prior_batches, state.batches)
        fault, fault_at = self._fault
        return Snapshot(
            facts=self.facts,
            elapsed=0.0 if self._started is None else max(0.0, now - self._started),
            left=self._left(now, self.facts.batches - batches),
            batches=batches,
            version=max([state.version, *(row.version or 0 for row in rows)]),
            ready=state.groups_ready,
            in_flight=self._in_flight(state.engines),
            utilization=utilization_of(seconds),
            idle=_idle(seconds),
            tokens_per_s=sum(row.tokens_per_s for row in rows),
            recent=Figures.over(figures.recent) if figures.recent else None,
            # The scheduler's ledger has no lock, so it is copied in one step.
            dropped={str(reason): n for reason, n in dict(figures.ledger.rollouts).items()},
            engines_lost=sum(engine.losses for engine in state.engines.values()),
            retries=figures.counters.retries,
            fault=fault,
            fault_age=max(0.0, now - fault_at) if fault else 0.0,
            engines=rows,
            note=self.note,
        )

    def _row(self, engine: EngineUsage) -> EngineRow:
        limit = engine.info.max_running
        running = engine.in_flight if limit is None else min(engine.in_flight, limit)
        sums = self._samples[0][1] if self._samples else _Sums()
        busy, wall, tokens = sums.get(engine.name, (0.0, 0.0, 0))
        spent = engine.wall - wall
        return EngineRow(
            name=engine.name,
            state=engine.state,
            running=running,
            queued=engine.in_flight - running,
            max_running=limit,
            kv_tokens=engine.context_tokens,
            kv_pool=engine.info.kv_tokens,
            tokens_per_s=(engine.tokens - tokens) / spent if spent > 0 else 0.0,
            version=engine.version,
            busy=min(1.0, max(0.0, (engine.busy - busy) / spent)) if spent > 0 else 0.0,
        )

    def _in_flight(self, engines: Mapping[str, EngineUsage]) -> dict[Phase, int]:
        generating = [engine for engine in engines.values() if engine.state == "generating"]
        state = self._figures.state
        parts = Counter(clock.part for clock in self._figures.rollouts.values())
        carried = len(state.carried.intersection(state.decoding())) if state.carried else 0
        counts: dict[Phase, int] = {
            "decoding": sum(engine.decode for engine in generating) - carried,
            "decoding, carried": carried,
            "prefilling": sum(engine.prefill for engine in generating),
            "re-prefilling": sum(engine.re_prefill for engine in generating),
            "paused": parts["paused"],
            "waiting for an engine": parts["queue"],
            "using tools": parts["tools"],
            "scoring": parts["score"],
            "waiting for an agent": parts["agent"],
        }
        return {phase: count for phase, count in counts.items() if count > 0}

    def _left(self, now: float, remaining: int) -> float | None:
        if remaining <= 0:
            return 0.0
        recent = self._figures.recent
        if not recent:
            return None
        mean = sum(each.step_s for each in recent) / len(recent)
        return max(0.0, mean * remaining - min(mean, now - self._batch_started))


def _idle(seconds: Mapping[Part, float]) -> tuple[tuple[Part, float], ...]:
    """Return the shares of the engines' time by part that were not busy, the largest first."""
    wall = sum(seconds.values())
    shares: list[tuple[Part, float]] = [
        (part, spent / wall) for part, spent in seconds.items() if part not in BUSY and spent > 0
    ]
    return tuple(sorted(shares, key=lambda row: -row[1]))
