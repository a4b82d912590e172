"""The treatment of rollouts that still generate when their batch is full, or at an update.

Each behaviour is one entry of :data:`BEHAVIOURS`. All code that depends on the behaviour reads that
entry: the core (when engines are paused, what is aborted, what a refit or a sleep waits for), the
configuration (what may happen to the cached KV), the check of the engines when a run starts, and
the report. So a new behaviour is one entry here and one name in :data:`StragglerRule`. One without
an entry is used as a value, ``SchedulerConfig(straggler=Behaviour(...))``.

========  =============================================  ===========================
rule      when a synchronous batch is full               at an update
========  =============================================  ===========================
retract   engines paused, requests stay inside           KV flushed and recomputed
in_place  engines paused, requests stay inside           KV kept: stale keys
abort     requests return with their tokens              sent again, to any engine
run       requests keep running, no new ones are sent    waited for; none is mixed
========  =============================================  ===========================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

from aprilsched.errors import ConfigError
from aprilsched.kernel.values.bounds import check_settings
from aprilsched.kernel.values.checks import suggesting

StragglerRule: TypeAlias = Literal["retract", "in_place", "abort", "run"]

CachedKV: TypeAlias = Literal["recompute", "keep", "apart"]


@suggesting()
@dataclass(frozen=True, kw_only=True, slots=True)
class Behaviour:
    """One treatment of stragglers, with all properties that the rest of the program needs.

    Raises:
        ConfigError: if a property is wrong, or if two contradict each other.
    """

    name: str
    """Name of the behaviour in errors and files."""
    kv: tuple[CachedKV, ...]
    """Possible treatments of the cached KV at a refit; "auto" means the first entry."""
    waits_inside: bool
    """Whether requests wait inside their paused engine until the next batch, and during a refit.
    Otherwise engines keep running, and a refit waits until they are empty."""
    waits_asleep: bool = False
    """Whether requests also wait inside while the memory is released, if the engine supports
    that."""
    called_back: Literal["always", "for sleep", "never"] = "for sleep"
    """When open requests are aborted to return with their tokens: whenever no training rollout
    should run, only before memory is released under them, or never, so that their end is
    awaited."""
    deferrable: bool = False
    """Whether a rollout may be aborted and wait for several batches, as with length buckets."""

    def __post_init__(self) -> None:
        check_settings(self)
        known = get_args(CachedKV)
        if not self.kv or not set(self.kv).issubset(known):
            raise ConfigError(f"kv must name one or more of {', '.join(known)}, got {self.kv!r}.")
        if self.waits_inside and self.called_back == "always":
            raise ConfigError(
                'called_back must not be "always" with waits_inside=True, because a request that '
                "is always aborted never waits inside an engine; set one of them."
            )
        if self.waits_asleep and not self.waits_inside:
            raise ConfigError("waits_asleep=True needs waits_inside=True; set both.")

    def pause_mode(self, kv: CachedKV) -> Literal["retract", "in_place"]:
        """Return how engines are paused around a refit.

        After "retract" the cache can be flushed, so that no later request finds a prefix computed
        with older weights. "in_place" is for requests that wait inside and keep their KV.
        """
        return "in_place" if self.waits_inside and kv != "recompute" else "retract"

    def called_back_first(self) -> Behaviour:
        """Return a variant of the behaviour with which no request waits inside an engine."""
        return replace(
            self,
            waits_inside=False,
            waits_asleep=False,
            called_back="always",
        )

    @property
    def needs_spans(self) -> bool:
        """Whether the engines must report the version of each token.

        They must if a request waits inside during a refit, because it then has tokens of several
        versions.
        """
        return self.waits_inside

    def needs_flush_while_paused(self, kv: CachedKV) -> bool:
        """Return whether engines must be able to flush the cache with requests waiting inside."""
        return self.waits_inside and kv == "recompute"


BEHAVIOURS: Mapping[StragglerRule, Behaviour] = MappingProxyType(
    {
        "retract": Behaviour(
            name="retract",
            # A retracted request finds its own older prefix in a cache that was not flushed.
            kv=("recompute",),
            waits_inside=True,
            waits_asleep=True,
            deferrable=True,
        ),
        "in_place": Behaviour(
            name="in_place",
            # Nothing can be flushed while requests keep their KV.
            kv=("keep", "apart"),
            waits_inside=True,
        ),
        "abort": Behaviour(
            name="abort",
            kv=("recompute", "apart"),
            waits_inside=False,
            called_back="always",
            deferrable=True,
        ),
        "run": Behaviour(
            name="run",
            kv=("recompute", "apart"),
            waits_inside=False,
            called_back="never",
        ),
    }
)
"""The behaviours by their names in the configuration."""


def rules_that(holds: Callable[[Behaviour], bool]) -> tuple[StragglerRule, ...]:
    """Return the names of the behaviours with a property, as the remedy in an error message."""
    return tuple(name for name, behaviour in BEHAVIOURS.items() if holds(behaviour))
