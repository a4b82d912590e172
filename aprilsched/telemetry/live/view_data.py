"""The data that the live view shows of a run at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from aprilsched.telemetry.figures import ForecastFigures
from aprilsched.telemetry.usage.parts import EngineState, Part

__all__ = ["RECENT_BATCHES", "EngineRow", "Faults", "LatestBatch", "Phase", "RunFacts", "Snapshot"]

RECENT_BATCHES = 20
"""Number of latest batches whose mean is shown: enough to even out single batches, and few enough
to follow a change."""

Phase: TypeAlias = Literal[
    "decoding", "straggler", "prefilling", "re-prefilling", "paused", "waiting", "tools", "scoring"
]
"""The activity of a rollout. A "straggler" is decoding too, and was carried from an earlier batch.
"paused" means that its engine does not generate. "waiting" means that it is launched and on no
engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What is known of a run before it begins.

    Attributes:
        title: the first words of the view and of every plain line.
        where: where the run is kept, such as its folder; the view shows it after the title.
        batches: number of batches that the run will deliver.
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
class LatestBatch:
    """The batch that was delivered last.

    Attributes:
        efficiency: T_bound over its time; None if unknown.
        length_distance: distance of its lengths from the drawn law; None if unknown.
        iid_length_distance: what is expected of a batch drawn at random.
    """

    efficiency: float | None
    staleness_mean: float
    staleness_max: int
    length_distance: float | None = None
    iid_length_distance: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Counts of faults. `latest` is the latest fault as text, `ago` the seconds since then."""

    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of dropped rollouts by reason."""
    engines_lost: int = 0
    retries: int = 0
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
        efficiency: T_bound over the time of the latest batches; None if no model is known.
        forecast: forecast and outcome of those batches; None if no schedule was forecast.
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
    efficiency: float | None
    latest: LatestBatch | None
    faults: Faults
    engines: tuple[EngineRow, ...]
    forecast: ForecastFigures | None = None
    note: str = ""
