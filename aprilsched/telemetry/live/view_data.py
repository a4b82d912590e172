"""What is shown of a run at one moment: plain data, made in one piece."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from aprilsched.telemetry.usage.parts import EngineState, Part

__all__ = ["RECENT_BATCHES", "EngineRow", "Faults", "LatestBatch", "Phase", "RunFacts", "Snapshot"]

RECENT_BATCHES = 20
"""Whose mean is told: enough to even one out, few enough to follow a change."""

Phase: TypeAlias = Literal[
    "decoding", "straggler", "prefilling", "re-prefilling", "paused", "waiting", "tools", "scoring"
]
"""What a rollout is at: "straggler" decodes too, and was carried from an earlier batch; "paused" is
with an engine that does not generate; "waiting" is launched, and with no engine."""


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
    """An engine.

    Attributes:
        running, queued: its requests; those beyond what it says that it runs at once wait in it.
        kv_tokens: tokens of their contexts.
        kv_pool: what it says that it has room for; None if it does not say.
        busy, tokens_per_s: of the last minute.
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
    """The one that was delivered last; `efficiency` is T_bound over its time, None if unknown."""

    efficiency: float | None
    staleness_mean: float
    staleness_max: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Counts; `latest` says what was last, `ago` seconds ago."""

    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    """Rollouts, by reason."""
    engines_lost: int = 0
    retries: int = 0
    latest: str = ""
    ago: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A run at one moment; times are seconds of its clock.

    Attributes:
        left: an estimate, from the batches so far; None before the first.
        batches: delivered.
        ready: complete groups, which wait for their batch.
        in_flight: rollouts by what they are at, without those at which none is.
        utilization: busy share of all engines' time so far; `columns` are its last minutes.
        idle: where the rest went, the largest first.
        efficiency: T_bound over the time of the latest batches; None where no model is known.
        note: what the view says beside, such as that nothing is heard of the run.
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
    note: str = ""
