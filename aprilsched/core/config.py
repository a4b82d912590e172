"""The settings of a scheduler, checked against each other before anything is launched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias, get_args

from aprilsched.core.policies.bounds import AT_LEAST_0, AT_LEAST_1, SHARE, Bound, check_bounds
from aprilsched.core.policies.length_buckets import LengthBuckets
from aprilsched.core.policies.over_provision import FixedRatio, KvTarget, OverProvision
from aprilsched.core.policies.placement import Placement
from aprilsched.core.policies.pool import Pool
from aprilsched.core.policies.refill import Refill
from aprilsched.core.policies.resume_order import ResumeOrder
from aprilsched.core.policies.staleness import Staleness, StalenessRule
from aprilsched.core.policies.start_up import StartUp, StartUpRule
from aprilsched.core.policies.stop import Groups, Samples, Stop, Tokens
from aprilsched.core.policies.straggler import (
    BEHAVIOURS,
    Behaviour,
    CachedKV,
    Prices,
    StragglerRule,
    rules_that,
)
from aprilsched.core.policies.wave import Wave
from aprilsched.errors import ConfigError
from aprilsched.types import SamplingParams

__all__ = [
    "Caller",
    "KVAfterRefit",
    "Pace",
    "RefillRule",
    "RewardScope",
    "SchedulerConfig",
    "StopUnit",
]

StopUnit: TypeAlias = Literal["groups", "samples", "tokens"]

RefillRule: TypeAlias = Literal["wave", "pool", "rounds"]

KVAfterRefit: TypeAlias = Literal["auto", "recompute", "keep", "apart"]

LONG_WAIT = 8
"""Versions that a deferred group may wait."""

Pace: TypeAlias = Literal["synchronous", "asynchronous"]
RewardScope: TypeAlias = Literal["none", "rollout", "group"]

_NOT_0 = Bound(least=0.001, words="0.001 or more")
_BELOW_1 = Bound(least=0, below=1, words="a share below 1, or 0 for never")


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """What the scheduler knows of the caller's functions, beside the settings."""

    reward_scope: RewardScope = "none"
    """Whether rollouts are scored, and alone or with their group."""
    accepts: bool = False
    """The caller filters groups."""
    episodes: bool = False
    """A coroutine of the caller's drives each rollout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """How rollouts are scheduled.

    Raises:
        ConfigError: if a value is out of its range or two values contradict each other.
    """

    batch_groups: Annotated[int, AT_LEAST_1] = 32
    """Groups (prompts) in a batch."""
    group_size: Annotated[int, AT_LEAST_1] = 8
    """Rollouts of a prompt that has no group size of its own."""
    over_provision: float | Literal["auto", "kv"] = 1.5
    """Ratio of groups kept open to groups in a batch; 1 waits for every last response. "auto"
    chooses it, and how to refill, while the run goes on: the least stale schedule within 2 % of
    the fastest, from the lengths seen and the engines' time model. "kv" fills the KV pool to
    kv_target, step by step."""
    kv_target: Annotated[float, SHARE] = 0.8
    """Of the KV pool, at the peak of a batch; for over_provision="kv"."""
    refill: RefillRule | Refill = "wave"
    """"wave": once at the begin of each batch (APRIL); "pool": a constant number in flight;
    "rounds": of a store of open groups those of like expected length run together. Or a rule as a
    value, such as Pool(together=4, until=0.25) or one of your own."""
    refill_groups: Annotated[int, AT_LEAST_1] = 4
    """Groups that a pool starts together; one by one costs a third of the throughput."""
    refill_until: Annotated[float, SHARE] = 1.0
    """Share of a batch that is complete when its pool is no longer refilled."""
    store_batches: Annotated[float, AT_LEAST_1] = 5.0
    """Open groups that rounds choose among, in batches."""
    probes: Annotated[int, AT_LEAST_0] = 1
    """Members of a group that run once before its round, as evidence of its length."""
    oldest_batches: Annotated[int, AT_LEAST_1] = 16
    """Batches after its first token at which a group runs, whatever its length."""
    resume_order: ResumeOrder = "carried"
    """Which waiting request goes first: "carried" ones, those with the "shortest" or those with
    the "longest" expected rest."""
    placement: Placement = "prefix"
    """"prefix" keeps a group on one engine, which has its prompt cached; "spread" sends each
    rollout to the engine with the least to do."""
    start_up: StartUpRule = "at_once"
    """How the run begins: "at_once" with all groups, whose shortest make the first batches;
    "wait" for every response of the first start_up_batches, which are then not biased; "ramp":
    over-provisioning grows over them, and the bias is spread evenly."""
    start_up_batches: Annotated[int, AT_LEAST_1] = 8
    rebalance: bool = False
    """When a batch is full, call carried rollouts of an overloaded engine back, so that they go
    on at one with less to do."""
    stop: StopUnit | Stop = "groups"
    """What fills a batch: batch_groups groups, or whole groups that hold at least
    batch_samples rollouts or batch_tokens response tokens. Or a rule as a value, such as
    Samples(256) or one of your own."""
    batch_samples: Annotated[int, AT_LEAST_1] | None = None
    batch_tokens: Annotated[int, AT_LEAST_1] | None = None
    straggler: StragglerRule = "retract"
    """What happens to those still running: "retract" (paused, KV recomputed), "in_place"
    (paused, KV kept: later tokens attend to stale keys), "abort" (called back, sent again),
    "run" (they run to their end; nothing is ever of two versions), "choose" (each what costs
    least, by `prices` and its expected rest)."""
    prices: Prices = field(default_factory=Prices)
    """What interrupting and waiting cost; for straggler="choose"."""
    kv_after_refit: KVAfterRefit = "auto"
    """What becomes of KV that older weights computed: "recompute" (the cache is flushed), "keep"
    (later tokens attend to stale keys), "apart" (a cache key for each version, for servers that
    cannot flush: new requests never meet older keys). "auto" keeps for "in_place" and recomputes
    for the other straggler rules."""
    pace: Pace = "synchronous"
    """"synchronous" pauses the engines from a full batch until the next one is asked for;
    "asynchronous" generates on while the trainer trains and pauses only to refit."""
    max_staleness: Annotated[int, AT_LEAST_0] | None = None
    """Bound on consuming version minus sampling version of a delivered token that counts."""
    staleness_rule: StalenessRule = "mask"
    """What happens to what would pass the bound: "mask", "evict", or "finish" first."""
    max_attempts: Annotated[int, AT_LEAST_1] = 3
    """Attempts of a request that may fail in a row, without a new token, before its rollout goes to
    the ledger as failed."""
    max_breaks: Annotated[int, AT_LEAST_1] = 16
    """Attempts of it that may break off after new tokens, or with their engine, before it does."""
    max_failed_groups: Annotated[int, AT_LEAST_1] = 64
    """Groups that may fail in a row, none accepted between, before the run is given up."""
    max_in_flight: Annotated[int, AT_LEAST_1] | None = None
    """Requests with the engines at the same time; None leaves queueing to the engines. The others
    wait until one of these ends, so less than a batch makes a batch take longer, and no more."""
    ready_batches: Annotated[int, AT_LEAST_1] = 2
    """Asynchronous pace: complete batches held for a slow trainer before launching stops."""
    allow_inexact_versions: bool = False
    """Accept "retract" and "in_place" on servers that cannot tell the version of each token."""
    dispatch_rate: Annotated[int, AT_LEAST_1] = 2_000
    """Requests sent per second, at most."""
    stall_timeout_s: Annotated[float, AT_LEAST_1] = 60.0
    """Without a token of any of its open requests for so long, an engine is lost. Pauses do not
    count, and unanswered prompts add their length / 4,000 tokens/s; an engine that prefills more
    slowly, or needs so long between two chunks of a stream, needs more."""
    slow_share: Annotated[float, _BELOW_1] = 0.2
    """An engine is lost that generates less than this share of what is usual for it and of what the
    other engines generate, for each request; 0 for never."""
    fleet_wait_s: Annotated[float, AT_LEAST_0] = 600.0
    """How long a fleet of which no engine is left is waited for."""
    save_interval_s: Annotated[float, _NOT_0] = 1.0
    """With a store: new tokens are saved so often. What is over, and what is handed over, at once.
    """
    control_timeout_s: Annotated[float, _NOT_0] = 120.0
    """For each pause, flush and continue call of an engine."""
    refit_timeout_s: Annotated[float, _NOT_0] = 1800.0
    """For bringing one version into all engines."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """For prompts that bring none of their own."""

    def __post_init__(self) -> None:
        check_bounds(self)
        self._check_ratio()
        self._check_choices()
        self._check_combinations()

    # --- what follows from the settings --------------------------------------------------------

    @property
    def automatic(self) -> bool:
        """Over-provisioning and refill are chosen while the run goes on."""
        return self.over_provision == "auto"

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
        able = able and self.start_up == "at_once"
        return able and (self.max_staleness is None or self.max_staleness >= LONG_WAIT)

    @property
    def cached_kv(self) -> CachedKV:
        """What becomes of the cached KV at a refit, with "auto" resolved."""
        if self.kv_after_refit == "auto":
            return self.behaviour.kv[0]
        return self.kv_after_refit

    @property
    def refill_policy(self) -> Refill:
        """When new groups are started, unless that is chosen while the run goes on."""
        if isinstance(self.refill, Refill):
            return self.refill
        if self.refill == "wave":
            return Wave()
        if self.refill == "rounds":
            return LengthBuckets(
                store=self.store_batches, probes=self.probes, oldest=self.oldest_batches
            )
        return Pool(together=self.refill_groups, until=self.refill_until)

    @property
    def over_provision_policy(self) -> OverProvision:
        """How many groups are kept open, unless that is chosen while the run goes on."""
        if self.over_provision == "kv":
            return KvTarget(target=self.kv_target)
        ratio = self.over_provision
        return FixedRatio(ratio=1.0 if isinstance(ratio, str) else ratio)

    @property
    def stop_policy(self) -> Stop:
        """When a batch is full."""
        if isinstance(self.stop, Stop):
            return self.stop
        if self.stop == "samples":
            return Samples(self.batch_samples or self.batch_groups * self.group_size)
        if self.stop == "tokens":
            return Tokens(self.batch_tokens or 0)
        return Groups(self.batch_groups)

    @property
    def staleness_policy(self) -> Staleness:
        """The bound on staleness, and what happens to what would pass it."""
        return Staleness(bound=self.max_staleness, rule=self.staleness_rule)

    @property
    def start_up_policy(self) -> StartUp:
        """How the run begins."""
        return StartUp(rule=self.start_up, batches=self.start_up_batches)

    # --- checks --------------------------------------------------------------------------------

    def _check_ratio(self) -> None:
        ratio = self.over_provision
        if isinstance(ratio, str):
            if ratio not in ("auto", "kv"):
                raise ConfigError(
                    f'over_provision is {ratio!r}; give a number such as 1.5, "auto" or "kv".'
                )
        elif not 1 <= ratio <= 64:
            raise ConfigError(
                f"over_provision is {ratio}; give a ratio from 1 (wait for all) to 64."
            )

    def _check_choices(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices and not isinstance(value, _VALUES.get(name, ())):
                raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(choices)}.")

    def _check_combinations(self) -> None:
        behaviour = self.behaviour
        if self.cached_kv not in behaviour.kv:
            raise ConfigError(
                f'kv_after_refit="{self.kv_after_refit}" is not possible with '
                f'straggler="{self.straggler}"; choose one of {", ".join(behaviour.kv)}.'
            )
        if self.stop == "tokens" and self.batch_tokens is None:
            raise ConfigError('stop="tokens" needs batch_tokens; set it to the tokens of a batch.')
        for unit in ("samples", "tokens"):
            if self.stop != unit and getattr(self, f"batch_{unit}") is not None:
                raise ConfigError(f'batch_{unit} is set but stop is "{self.stop}"; set stop too.')
        defers = self.pace == "synchronous" and behaviour.deferrable
        if self.refill_policy.defers and not defers:
            able = " or ".join(f'"{name}"' for name in rules_that(lambda b: b.deferrable))
            raise ConfigError(
                f'refill="rounds" parks what it does not choose, which pace="{self.pace}" with '
                f'straggler="{self.straggler}" cannot; set pace="synchronous" and straggler={able}.'
            )
        if self.refill_policy.defers and self.start_up != "at_once":
            raise ConfigError(
                f'start_up="{self.start_up}" is for waves and pools; rounds fill a store first, '
                'so leave it "at_once".'
            )
        if self.staleness_rule != "mask" and self.max_staleness is None:
            raise ConfigError(
                f'staleness_rule="{self.staleness_rule}" needs a bound; set max_staleness.'
            )


_VALUES: dict[str, type] = {"refill": Refill, "stop": Stop}
"""Fields that take a rule as a value beside its name."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "kv_after_refit": get_args(KVAfterRefit),
    "refill": get_args(RefillRule),
    "stop": get_args(StopUnit),
    "straggler": get_args(StragglerRule),
    "pace": get_args(Pace),
    "staleness_rule": get_args(StalenessRule),
    "resume_order": get_args(ResumeOrder),
    "placement": get_args(Placement),
    "start_up": get_args(StartUpRule),
}
