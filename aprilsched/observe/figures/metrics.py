"""A listener that provides every figure of a run to Prometheus, at any time.

Invariants: a chunk of tokens costs nothing here, because the figures in :class:`LiveFigures` are
read at a scrape. A counter never decreases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.kernel.shell.listener import DispatchingListener
from aprilsched.observe.figures.figures import TokenStaleness
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.figures.table import (
    FIGURES,
    Clients,
    Labelled,
    Moment,
    exposed,
    values_at,
)


class Held(NamedTuple):
    """The content of a histogram at one moment, in Prometheus' form: the number of values up to
    each upper edge (as text), and the sum of the values."""

    counts: list[tuple[str, float]]
    sum: float


class Histogram:
    """Counts values by the smallest of the `edges` that they do not exceed. There is one more
    bucket, for larger values."""

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = np.asarray(edges, dtype=np.float64)
        self._counts = np.zeros(len(edges) + 1, dtype=np.int64)
        self._sum = 0.0

    def observe(self, values: ArrayLike) -> None:
        """Count a value, or an array of them."""
        observed = np.atleast_1d(np.asarray(values, dtype=np.float64))
        places = np.searchsorted(self._edges, observed, side="left")
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += float(observed.sum())

    def held(self) -> Held:
        """Return the current content."""
        edges = (*map(str, self._edges.tolist()), "+Inf")
        counts = np.cumsum(self._counts).astype(np.float64).tolist()
        return Held(list(zip(edges, counts, strict=True)), self._sum)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scrape:
    """All figures at one moment, by name."""

    values: Mapping[str, Labelled]
    histograms: Mapping[str, Held]


class Metrics(DispatchingListener):
    """Keeps the metrics of a run that are exported to Prometheus.

    Args:
        figures: the figures of the run, an earlier listener.
        clients: the counts of a gateway; None omits the gateway's metrics.
    """

    def __init__(self, figures: LiveFigures, clients: Clients | None = None) -> None:
        super().__init__()
        self._figures = figures
        self._clients = clients
        self._updates: Counter[str] = Counter(succeeded=0, failed=0)
        self._asked_at: float | None = None
        self._update_at: float | None = None
        self._paused_at: dict[str, float] = {}
        self._refit_at: dict[str, float] = {}
        self._exposed: dict[tuple[str, ...], float] = {}
        """The last exposed seconds of each engine by part."""
        self._histograms = {
            name: Histogram(figure.buckets)
            for name, figure in FIGURES.items()
            if figure.kind == "histogram" and (clients or not name.startswith("gateway/"))
        }
        self._handlers = {
            of.BatchRequested: self._requested,
            of.BatchRequestWithdrawn: self._withdrawn,
            of.PromptsEnded: self._withdrawn,
            of.BatchDelivered: self._delivered,
            of.UpdateBegun: self._update_begun,
            of.UpdateWithdrawn: self._update_withdrawn,
            of.UpdateFinished: self._update_finished,
            of.RefitBegun: self._refit_begun,
            of.EngineRefitted: self._refitted,
            of.EngineModeChanged: self._mode_changed,
            of.EngineLost: self._engine_lost,
        }

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        with self._figures.lock:
            super().on_facts(facts, now)

    def observe(self, name: str, value: float) -> None:
        """Observe a value that no fact contains, in the histogram of this name."""
        self._histograms[name].observe(value)

    def scrape(self) -> Scrape:
        """Return the current values. Any thread may call this."""
        with self._figures.lock:
            self._figures.advance()
            moment = Moment(
                figures=self._figures,
                updates=self._updates,
                seconds=self._engine_seconds(),
                clients=self._clients,
            )
            gateway = self._clients is not None
            names = [name for name in FIGURES if exposed(name, gateway=gateway)]
            held = self._histograms
            return Scrape(
                values={name: values_at(FIGURES[name], moment) for name in names},
                histograms={name: held[name].held() for name in names if name in held},
            )

    def _engine_seconds(self) -> Labelled:
        """Return the seconds to expose for each part. Time counted as re-prefill may later be moved
        to decoding, and a decreasing counter would look like a restart. So such a part keeps its
        exposed value until the true value catches up."""
        for engine in self._figures.state.engines.values():
            for part, seconds in engine.parts.items():
                key = (engine.name, part)
                self._exposed[key] = max(seconds, self._exposed.get(key, 0.0))
        return dict(self._exposed)

    # --- batches -------------------------------------------------------------------------------

    def _requested(self, _: of.BatchRequested) -> None:
        if self._asked_at is None:
            self._asked_at = self._now

    def _withdrawn(self, _: of.BatchRequestWithdrawn | of.PromptsEnded) -> None:
        self._asked_at = None

    def _delivered(self, fact: of.BatchDelivered) -> None:
        self._observe_since("batch/wait_seconds", self._asked_at)
        self._asked_at = None
        batch = self._figures.batch
        if fact.again or batch is None:
            return
        self._histograms["batch/duration_seconds"].observe(batch.seconds)
        self._histograms["run/response_length_tokens"].observe(batch.lengths)
        self._histograms["run/rollout_staleness_versions"].observe(
            batch.staleness[:, TokenStaleness._fields.index("oldest")]
        )

    # --- updates and engines -------------------------------------------------------------------

    def _update_begun(self, _: of.UpdateBegun) -> None:
        self._update_at = self._now

    def _update_withdrawn(self, _: of.UpdateWithdrawn) -> None:
        self._update_at = None

    def _update_finished(self, fact: of.UpdateFinished) -> None:
        self._updates["failed" if fact.cause else "succeeded"] += 1
        self._observe_since("run/update_duration_seconds", self._update_at)
        self._update_at = None

    def _mode_changed(self, fact: of.EngineModeChanged) -> None:
        if fact.finish == "pausing":
            self._paused_at.setdefault(fact.engine, self._now)
        elif fact.start == "continuing":
            since = self._paused_at.pop(fact.engine, None)
            self._observe_since("run/pause_duration_seconds", since)

    def _refit_begun(self, fact: of.RefitBegun) -> None:
        self._refit_at.update(dict.fromkeys(fact.engines, self._now))

    def _refitted(self, fact: of.EngineRefitted) -> None:
        self._observe_since("run/refit_duration_seconds", self._refit_at.pop(fact.engine, None))

    def _engine_lost(self, fact: of.EngineLost) -> None:
        self._paused_at.pop(fact.engine, None)
        self._refit_at.pop(fact.engine, None)

    def _observe_since(self, name: str, started_at: float | None) -> None:
        if started_at is not None:
            self.observe(name, self._now - started_at)
