"""Keeps what the live view shows; a listener that builds on the shared LiveFigures.

Invariants: a chunk of tokens costs nothing here, because the figures count it. A snapshot is
computed when it is taken, under the lock of the figures, so it is of one moment whichever thread
takes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from aprilsched.core.messages import facts as of
from aprilsched.core.messages.facts import Fact
from aprilsched.telemetry.base import TokenChunks
from aprilsched.telemetry.batch_figures import Measured, efficiency, forecasts
from aprilsched.telemetry.live.history import History
from aprilsched.telemetry.live.mishaps import Mishaps
from aprilsched.telemetry.live.view_data import (
    RECENT_BATCHES,
    EngineRow,
    Faults,
    LatestBatch,
    Phase,
    RunFacts,
    Snapshot,
)
from aprilsched.telemetry.live_figures import LiveFigures
from aprilsched.telemetry.usage.engine_usage import EngineUsage, utilization_of
from aprilsched.telemetry.usage.parts import BUSY, Part

__all__ = ["LiveModel"]


class LiveModel:
    """The live view's model of a run. It keeps only what the state of the run does not have: the
    latest batches, the last minutes of the engines, and what went wrong last.

    Args:
        facts: what is known of the run before it begins.
        figures: the figures of the run, a listener before this one.

    Attributes:
        note: text that is added to every snapshot.
    """

    def __init__(self, facts: RunFacts, figures: LiveFigures) -> None:
        self.note = ""
        self._facts = facts
        self._figures = figures
        self._mishaps = Mishaps()
        self._history = History()
        self._recent: deque[Measured] = deque(maxlen=RECENT_BATCHES)
        self._skipped = 0
        self._began: float | None = None
        self._batch_began = 0.0

    def skip(self, batches: int) -> None:
        """Note that the prior run has delivered `batches` batches, which no fact tells here."""
        self._skipped = batches

    # --- what happens --------------------------------------------------------------------------

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        with self._figures.lock:
            if self._began is None:
                self._began = self._batch_began = now
            self._mishaps.on_facts(facts, now)
            for fact in facts:
                if isinstance(fact, of.BatchDelivered):
                    self._delivered(fact.batch, now)
            if now >= self._history.due:
                self._sample(now)

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        if now >= self._history.due:
            with self._figures.lock:
                self._sample(now)

    def _delivered(self, index: int, now: float) -> None:
        self._batch_began = now
        measured = self._figures.batch
        if measured is None or measured.figures.index != index:
            return
        if not self._recent or self._recent[-1] is not measured:
            self._recent.append(measured)

    @property
    def _batches(self) -> int:
        return max(self._skipped, self._figures.state.batches)

    def _sample(self, now: float) -> None:
        state = self._figures.state
        state.advance(now)
        self._history.add(now, state.engine_usage)

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
        engines = state.engine_usage
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
            efficiency=efficiency(list(self._recent)) if self._recent else None,
            latest=self._latest(),
            forecast=forecasts(list(self._recent)),
            faults=self._faults(now),
            engines=rows,
            note=self.note,
        )

    def _row(self, engine: EngineUsage, now: float) -> EngineRow:
        info = engine.info
        most = None if info is None else info.max_running
        running = engine.in_flight if most is None else min(engine.in_flight, most)
        busy, tokens_per_s = self._history.lately(engine, now)
        return EngineRow(
            name=engine.name,
            state=engine.state,
            running=running,
            queued=engine.in_flight - running,
            max_running=most,
            kv_tokens=engine.context_tokens,
            kv_pool=None if info is None else info.kv_tokens,
            tokens_per_s=tokens_per_s,
            version=engine.version,
            busy=busy,
        )

    def _in_flight(self, engines: Mapping[str, EngineUsage]) -> dict[Phase, int]:
        at_work = [engine for engine in engines.values() if engine.state == "generating"]
        state = self._figures.state
        carried, outside = state.carried, len(state.outside)
        decoding = sum(engine.decoding for engine in at_work)
        stragglers = len(carried.intersection(state.decoding())) if carried else 0
        open_requests = sum(engine.in_flight for engine in engines.values())
        waiting = len(state.growing) - open_requests - outside
        counts: dict[Phase, int] = {
            "decoding": decoding - stragglers,
            "straggler": stragglers,
            "prefilling": sum(engine.prefilling for engine in at_work),
            "re-prefilling": sum(engine.re_prefilling for engine in at_work),
            "paused": open_requests - sum(engine.in_flight for engine in at_work),
            "waiting": waiting,
            "tools": outside,
            "scoring": len(state.scoring),
        }
        return {phase: count for phase, count in counts.items() if count > 0}

    def _left(self, now: float) -> float | None:
        remaining = self._facts.batches - self._batches
        if remaining <= 0:
            return 0.0
        if not self._recent:
            return None
        figures = [measured.figures for measured in self._recent]
        mean = sum(f.seconds + f.trainer_seconds for f in figures) / len(figures)
        return max(0.0, mean * remaining - min(mean, now - self._batch_began))

    def _latest(self) -> LatestBatch | None:
        if not self._recent:
            return None
        figures = self._recent[-1].figures
        return LatestBatch(
            efficiency=figures.efficiency,
            staleness_mean=figures.staleness_mean,
            staleness_max=figures.staleness_max,
            length_distance=figures.length_distance,
            iid_length_distance=figures.iid_length_distance,
        )

    def _faults(self, now: float) -> Faults:
        latest = self._mishaps.latest
        # The counters may be the scheduler's own, which has no lock, so they are copied in one
        # step.
        dropped = dict(self._figures.ledger.rollouts)
        return Faults(
            dropped={str(reason): n for reason, n in dropped.items()},
            engines_lost=sum(engine.losses for engine in self._figures.state.engines.values()),
            retries=self._figures.counters.retries,
            latest="" if latest is None else latest.text,
            ago=0.0 if latest is None else max(0.0, now - latest.time),
        )


def _idle(seconds: Mapping[Part, float]) -> tuple[tuple[Part, float], ...]:
    """Shares of the engines' time that were not busy, the largest first."""
    wall = sum(seconds.values())
    lost: Sequence[tuple[Part, float]] = [
        (part, spent / wall) for part, spent in seconds.items() if part not in BUSY and spent > 0
    ]
    return tuple(sorted(lost, key=lambda row: -row[1]))
