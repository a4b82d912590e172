"""What a scheduler is told once: sizes, policies, limits. Built by ``SchedulerConfig.rules()``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from aprilsched.core.policies.over_provision import OverProvision
from aprilsched.core.policies.placement import Placement
from aprilsched.core.policies.refill import Refill
from aprilsched.core.policies.resume import ResumeOrder
from aprilsched.core.policies.staleness import Staleness
from aprilsched.core.policies.start_up import StartUp
from aprilsched.core.policies.stop import Stop
from aprilsched.core.policies.straggler import (
    BEHAVIOURS,
    Behaviour,
    CachedKV,
    Prices,
    StragglerRule,
)
from aprilsched.types import SamplingParams

__all__ = ["Pace", "RewardScope", "Rules"]

LONG_WAIT = 8
"""Versions that a deferred group may wait."""

Pace: TypeAlias = Literal["synchronous", "asynchronous"]
RewardScope: TypeAlias = Literal["none", "rollout", "group"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Everything a scheduler decides by."""

    batch_groups: int
    group_size: int
    over_provision: OverProvision
    refill: Refill
    automatic: bool
    """Both are chosen while the run goes on, and these are not looked at."""
    resume: ResumeOrder
    placement: Placement
    start_up: StartUp
    rebalance: bool
    """Carried rollouts of an engine that holds more than its share move to others."""
    stop: Stop
    straggler: StragglerRule
    prices: Prices
    """What interrupting and waiting cost, for the straggler rule "choose"."""
    kv: CachedKV
    """What becomes of the cached KV at a refit: flushed, kept, or kept apart by version."""
    pace: Pace
    staleness: Staleness
    sampling: SamplingParams
    max_attempts: int
    """Attempts in a row that fail without a token before a request is given up."""
    max_breaks: int
    """Attempts that break off with tokens, or with their engine, before it is."""
    max_failed_groups: int
    """Groups that may fail in a row before the run is given up."""
    max_in_flight: int | None
    ready_batches: int
    """Asynchronous: complete batches held for a slow trainer before launching stops."""
    engine_strikes: int
    """Failed attempts in a row, without one that went well, after which an engine is lost."""
    stall_timeout_s: float
    """Seconds without a token after which it is, while it should generate."""
    slow_share: float
    """Of the usual rate, below which it is; 0 for never."""
    fleet_wait_s: float
    """Seconds that a fleet without any engine is waited for."""
    reward_scope: RewardScope
    accepts: bool
    """The user filters groups."""
    episodes: bool
    """A coroutine of the user's drives each rollout."""

    @property
    def behaviour(self) -> Behaviour:
        """How stragglers are treated."""
        return BEHAVIOURS[self.straggler]

    @property
    def may_defer(self) -> bool:
        """May a refill rule be chosen that defers groups? It calls back what it does not run, so
        nothing may be meant to stay in the engines, and lets it wait, so the bound on staleness
        must be wide."""
        able = self.pace == "synchronous" and self.behaviour.deferrable
        able = able and self.start_up.at_once
        return able and (self.staleness.bound is None or self.staleness.bound >= LONG_WAIT)
