"""Keeps what the live view shows; a listener that builds on the shared LiveFigures.

Invariants: a chunk of tokens costs nothing here, because the figures count it. A snapshot is
computed when it is taken, under the lock of the figures, so it is of one moment whichever thread
takes it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.messages import facts as of
from aprilsched.core.messages.facts import Fact
from aprilsched.core.state.ledger import Reason
from aprilsched.telemetry.base import DispatchingListener, TokenChunks
from aprilsched.telemetry.engine_time import BUSY, EngineState, EngineUsage, Part, utilization_of
from aprilsched.telemetry.figures import Figures
from aprilsched.telemetry.live_figures import LiveFigures

# The data that the live view shows of a run at one moment.

Phase: TypeAlias = Literal[
    "decoding",
    "straggler",
    "prefilling",
    "re-prefilling",
    "paused",
    "waiting",
    "tools",
    "scoring",
    "no agent",
]
"""The activity of a rollout. A "straggler" is decoding too, and was carried from an earlier batch.
"paused" means that its engine does not generate. "waiting" means that it is launched and on no
engine. "no agent" means that its session waits for a launcher."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What is known of a run before it begins.

    Attributes:
        title: the first words of the view and of every plain line.
        where: where the run is kept, such as its folder; the view shows it after the title.
        batches: number of batches that the run will deliver; 0 for a gateway, which shows none.
        batch_groups: ``batch_groups`` of the scheduler.
        modelled: the seconds of the run are those of a virtual clock.
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
        running: number of its requests, up to `max_running`.
        queued: number of its requests beyond `max_running`; they wait inside the engine.
        kv_tokens: number of tokens in the contexts of its requests.
        kv_pool: number of tokens for which the engine says it has room; None if it does not say.
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

    @property
    def kv_share(self) -> float | None:
        return None if not self.kv_pool else self.kv_tokens / self.kv_pool


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Counts of faults. `latest` is the latest fault as text, `ago` the seconds since then."""

    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of dropped rollouts by reason."""
    engines_lost: int = 0
    retries: int = 0
    regenerated: int = 0
    """Number of rollouts that were launched in the place of a lost one."""
    latest: str = ""
    ago: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A run at one moment; times are seconds on the run's clock.

    Attributes:
        left: estimated seconds until the end, from the batches so far; None before the first batch.
        batches: number of delivered batches.
        ready: number of complete groups that wait for their batch.
        in_flight: number of rollouts by phase, without phases that have none.
        utilization: busy share of all engines' time so far; `columns` has that of the last minutes.
        idle: shares of the other parts, the largest first.
        recent: the figures of the latest batches; None before the first.
        note: an additional text, for example that the run has written nothing for some time.
    """

    facts: RunFacts
    elapsed: float
    left: float | None
    batches: int
    version: int
    ready: int
    in_flight: Mapping[Phase, int]
    carried: int
    utilization: float
    columns: tuple[float, ...]
    idle: tuple[tuple[Part, float], ...]
    tokens_per_s: float
    recent: Figures | None
    faults: Faults
    engines: tuple[EngineRow, ...]
    note: str = ""


# --- history -------------------------------------------------------------------------------------

# Keeps what the engines did in each few seconds of the last minutes.
#
# Invariant: its memory does not grow with the run.

COLUMN_SECONDS = 5.0
"""Seconds between two samples, which is one column of the sparkline."""
_COLUMNS = 60
_RATE_SECONDS = 60.0
"""Seconds over which an engine's speed is averaged. This is longer than most batches, so that the
speed does not jump at every pause."""


_Sums: TypeAlias = Mapping[str, tuple[float, float, int]]
"""Busy seconds, all seconds and tokens since the run began, by engine."""


class History:
    """Is given the state of the engines whenever the time is `due` or later."""

    def __init__(self) -> None:
        self.due = 0.0
        """Time of the next sample."""
        self._samples: deque[tuple[float, _Sums]] = deque(maxlen=_COLUMNS + 1)
        self._columns: tuple[float, ...] | None = None
        """Columns computed from the present samples. A frame is drawn several times between two
        samples."""

    def add(self, now: float, engines: Mapping[str, EngineUsage]) -> None:
        """Take a sample. The engines' seconds must be counted up to `now`."""
        self.due = now + COLUMN_SECONDS
        sums = {name: (each.busy, each.wall, each.tokens) for name, each in engines.items()}
        self._samples.append((now, sums))
        self._columns = None

    def utilization(self) -> tuple[float, ...]:
        """Busy share of all engines' time in each column up to the last sample, 0 to 1."""
        if self._columns is None:
            self._columns = self._compute()
        return self._columns

    def _compute(self) -> tuple[float, ...]:
        times: NDArray[np.float64] = np.array([time for time, _ in self._samples])
        if len(times) < 2:
            return ()
        columns = min(_COLUMNS, max(1, round((times[-1] - times[0]) / COLUMN_SECONDS)))
        # If nothing happened for some time, one sample covers several columns.
        stops: NDArray[np.float64] = times[-1] - COLUMN_SECONDS * np.arange(columns, -1, -1)
        sums = [
            [sum(column) for column in zip(*each.values(), strict=True)] or [0.0, 0.0]
            for _, each in self._samples
        ]
        busy, wall = (np.diff(np.interp(stops, times, [s[i] for s in sums])) for i in (0, 1))
        shares = np.divide(busy, wall, out=np.zeros(columns), where=wall > 0)
        return tuple(np.clip(shares, 0.0, 1.0).tolist())

    def lately(self, engine: EngineUsage, now: float) -> tuple[float, float]:
        """The engine's busy share and its tokens a second in the last minute."""
        busy, wall, tokens = self._before(now).get(engine.name, (0.0, 0.0, 0))
        spent = engine.wall - wall
        if spent <= 0:
            return 0.0, 0.0
        return min(1.0, max(0.0, (engine.busy - busy) / spent)), (engine.tokens - tokens) / spent

    def _before(self, now: float) -> _Sums:
        for time, sums in self._samples:
            if now - time <= _RATE_SECONDS:
                if now > time:
                    return sums
                break
        return self._samples[-2][1] if len(self._samples) > 1 else {}


# --- live model ----------------------------------------------------------------------------------


_FAILED = {
    Reason.REWARD_FAILED.value: "a reward",
    Reason.EPISODE_FAILED.value: "an episode",
    Reason.MEMBER_LOST.value: "a member of a group",
}


class LiveModel(DispatchingListener):
    """The live view's model of a run. It keeps only what the figures of the run do not have: the
    last minutes of the engines, and what went wrong last.

    Args:
        facts: what is known of the run before it begins.
        figures: the figures of the run, a listener before this one.

    Attributes:
        note: text that is added to every snapshot.
    """

    def __init__(self, facts: RunFacts, figures: LiveFigures) -> None:
        super().__init__()
        self.note = ""
        self._facts = facts
        self._figures = figures
        self._fault = ("", 0.0)
        """The latest fault in words, and its time; the counts are in the state of the run."""
        self._history = History()
        self._skipped = 0
        self._began: float | None = None
        self._batch_began = 0.0
        self._handlers = {
            of.BatchDelivered: self._delivered,
            of.GroupDropped: self._group_dropped,
            of.EngineLost: lambda fact: self._note(f"{fact.engine} lost: {fact.cause}"),
            of.EngineSlow: lambda fact: self._note(f"{fact.engine} is slow: {fact.cause}"),
            of.EngineBusy: lambda fact: self._note(f"{fact.engine} is busy: {fact.cause}"),
            of.FleetAwaited: lambda fact: self._note(
                f"no engine is left; waited {fact.waited_s:.0f} s, {fact.left_s:.0f} s more"
            ),
            of.FleetGivenUp: lambda _: self._note("no engine came back in time"),
            of.GroupsFailed: lambda fact: self._note(
                f"{fact.groups} groups failed in a row: {fact.cause}"
            ),
            of.UpdateWanted: lambda _: self._note("engines wait for weights to be published"),
            of.UpdateFinished: self._updated,
        }

    def skip(self, batches: int) -> None:
        """Note that the prior run has delivered `batches` batches, which no fact tells here."""
        self._skipped = batches

    # --- what happens --------------------------------------------------------------------------

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        with self._figures.lock:
            if self._began is None:
                self._began = self._batch_began = now
            super().on_facts(facts, now)
            if now >= self._history.due:
                self._sample(now)

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        if now >= self._history.due:
            with self._figures.lock:
                self._sample(now)

    def _delivered(self, _: of.BatchDelivered) -> None:
        self._batch_began = self._now

    def _group_dropped(self, fact: of.GroupDropped) -> None:
        what = _FAILED.get(fact.reason)
        if what is not None:
            self._note(f"{what} failed: {fact.cause}")

    def _updated(self, fact: of.UpdateFinished) -> None:
        if fact.cause:
            self._note(f"version {fact.version} did not get in: {fact.cause}")

    def _note(self, text: str) -> None:
        self._fault = " ".join(text.split()), self._now

    @property
    def _batches(self) -> int:
        return max(self._skipped, self._figures.state.batches)

    def _sample(self, now: float) -> None:
        state = self._figures.state
        state.advance(now)
        self._history.add(now, state.engines)

    # --- what is shown -------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Take a snapshot of the present state."""
        with self._figures.lock:
            now = self._figures.advance()
            if now >= self._history.due and self._began is not None:
                self._sample(now)
            return self._snapshot(now)

    def _snapshot(self, now: float) -> Snapshot:
        state = self._figures.state
        engines = state.engines
        rows = tuple(self._row(engine, now) for engine in engines.values())
        seconds = state.seconds()
        return Snapshot(
            facts=self._facts,
            elapsed=0.0 if self._began is None else max(0.0, now - self._began),
            left=self._left(now),
            batches=self._batches,
            version=max([state.version, *(row.version or 0 for row in rows)]),
            ready=state.groups_ready,
            in_flight=self._in_flight(engines),
            carried=len(state.carried),
            utilization=utilization_of(seconds),
            columns=self._history.utilization(),
            idle=_idle(seconds),
            tokens_per_s=sum(row.tokens_per_s for row in rows),
            recent=Figures.over(self._figures.recent) if self._figures.recent else None,
            faults=self._faults(now),
            engines=rows,
            note=self.note,
        )

    def _row(self, engine: EngineUsage, now: float) -> EngineRow:
        info = engine.info
        most = info.max_running
        running = engine.in_flight if most is None else min(engine.in_flight, most)
        busy, tokens_per_s = self._history.lately(engine, now)
        return EngineRow(
            name=engine.name,
            state=engine.state,
            running=running,
            queued=engine.in_flight - running,
            max_running=most,
            kv_tokens=engine.context_tokens,
            kv_pool=info.kv_tokens,
            tokens_per_s=tokens_per_s,
            version=engine.version,
            busy=busy,
        )

    def _in_flight(self, engines: Mapping[str, EngineUsage]) -> dict[Phase, int]:
        at_work = [engine for engine in engines.values() if engine.state == "generating"]
        state = self._figures.state
        at = Counter(clock.part for clock in self._figures.rollouts.values())
        decoding = sum(engine.decode for engine in at_work)
        stragglers = len(state.carried.intersection(state.decoding())) if state.carried else 0
        counts: dict[Phase, int] = {
            "decoding": decoding - stragglers,
            "straggler": stragglers,
            "prefilling": sum(engine.prefill for engine in at_work),
            "re-prefilling": sum(engine.re_prefill for engine in at_work),
            "paused": at["paused"],
            "waiting": at["queue"],
            "tools": at["tools"],
            "scoring": at["score"],
            "no agent": at["agent"],
        }
        return {phase: count for phase, count in counts.items() if count > 0}

    def _left(self, now: float) -> float | None:
        remaining = self._facts.batches - self._batches
        if remaining <= 0:
            return 0.0
        recent = self._figures.recent
        if not recent:
            return None
        mean = sum(each.step_s for each in recent) / len(recent)
        return max(0.0, mean * remaining - min(mean, now - self._batch_began))

    def _faults(self, now: float) -> Faults:
        latest, at = self._fault
        # The counters may be the scheduler's own, which has no lock, so they are copied in one
        # step.
        dropped = dict(self._figures.ledger.rollouts)
        return Faults(
            dropped={str(reason): n for reason, n in dropped.items()},
            engines_lost=sum(engine.losses for engine in self._figures.state.engines.values()),
            retries=self._figures.counters.retries,
            regenerated=self._figures.counters.regenerated,
            latest=latest,
            ago=max(0.0, now - at) if latest else 0.0,
        )


def _idle(seconds: Mapping[Part, float]) -> tuple[tuple[Part, float], ...]:
    """Shares of the engines' time that were not busy, the largest first."""
    wall = sum(seconds.values())
    lost: Sequence[tuple[Part, float]] = [
        (part, spent / wall) for part, spent in seconds.items() if part not in BUSY and spent > 0
    ]
    return tuple(sorted(lost, key=lambda row: -row[1]))
