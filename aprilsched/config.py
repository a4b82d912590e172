"""The settings of a scheduler, checked against each other before anything is launched."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias, get_args

from aprilsched.core.policies.length_buckets import LengthBuckets
from aprilsched.core.policies.over_provision import FixedRatio, KvTarget, OverProvision
from aprilsched.core.policies.placement import Placement
from aprilsched.core.policies.pool import Pool
from aprilsched.core.policies.refill import Refill
from aprilsched.core.policies.resume import ResumeOrder
from aprilsched.core.policies.staleness import Staleness, StalenessRule
from aprilsched.core.policies.start_up import StartUp, StartUpRule
from aprilsched.core.policies.stop import Groups, Samples, Stop, Tokens
from aprilsched.core.policies.straggler import (
    BEHAVIOURS,
    CachedKV,
    Prices,
    StragglerRule,
    rules_that,
)
from aprilsched.core.policies.wave import Wave
from aprilsched.core.rules import Pace, RewardScope, Rules
from aprilsched.errors import ConfigError
from aprilsched.types import SamplingParams

__all__ = ["KVAfterRefit", "RefillRule", "SchedulerConfig", "StopUnit"]

StopUnit: TypeAlias = Literal["groups", "samples", "tokens"]

RefillRule: TypeAlias = Literal["wave", "pool", "rounds"]

KVAfterRefit: TypeAlias = Literal["auto", "recompute", "keep", "apart"]

_ENGINE_STRIKES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """How rollouts are scheduled.

    Raises:
        ConfigError: if a value is out of its range or two values contradict each other.
    """

    batch_groups: int = 32
    """Groups (prompts) in a batch."""
    group_size: int = 8
    """Rollouts of one prompt."""
    over_provision: float | Literal["auto", "kv"] = 1.5
    """Ratio of groups kept open to groups in a batch; 1 waits for every last response. "auto"
    chooses it, and how to refill, while the run goes on: the least stale schedule within 2 % of
    the fastest, from the lengths seen and the engines' time model. "kv" fills the KV pool to
    kv_target, step by step."""
    kv_target: float = 0.8
    """Of the KV pool, at the peak of a batch; for over_provision="kv"."""
    refill: RefillRule = "wave"
    """"wave": once at the begin of each batch (APRIL); "pool": a constant number in flight;
    "rounds": of a store of open groups those of like expected length run together."""
    refill_groups: int = 4
    """Groups that a pool starts together; one by one costs a third of the throughput."""
    refill_until: float = 1.0
    """Share of a batch that is complete when its pool is no longer refilled."""
    store_batches: float = 5.0
    """Open groups that rounds choose among, in batches."""
    probes: int = 1
    """Members of a group that run once before its round, as evidence of its length."""
    oldest_batches: int = 16
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
    start_up_batches: int = 8
    rebalance: bool = False
    """When a batch is full, call carried rollouts of an overloaded engine back, so that they go
    on at one with less to do."""
    stop: StopUnit = "groups"
    """What fills a batch: batch_groups groups, or whole groups that hold at least
    batch_samples rollouts or batch_tokens response tokens."""
    batch_samples: int | None = None
    batch_tokens: int | None = None
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
    max_staleness: int | None = None
    """Bound on consuming version minus sampling version of a delivered token that counts."""
    staleness_rule: StalenessRule = "mask"
    """What happens to what would pass the bound: "mask", "evict", or "finish" first."""
    max_attempts: int = 3
    """Attempts of a request that may fail in a row, without a new token, before its rollout goes to
    the ledger as failed."""
    max_breaks: int = 16
    """Attempts of it that may break off after new tokens, or with their engine, before it does."""
    max_failed_groups: int = 64
    """Groups that may fail in a row, none accepted between, before the run is given up."""
    max_in_flight: int | None = None
    """Requests with the engines at the same time; None leaves queueing to the engines. The others
    wait until one of these ends, so less than a batch makes a batch take longer, and no more."""
    ready_batches: int = 2
    """Asynchronous pace: complete batches held for a slow trainer before launching stops."""
    allow_inexact_versions: bool = False
    """Accept "retract" and "in_place" on servers that cannot tell the version of each token."""
    dispatch_rate: int = 2_000
    """Requests sent per second, at most."""
    stall_timeout_s: float = 60.0
    """Without a token of any of its open requests for so long, an engine is lost. Pauses do not
    count, and unanswered prompts add their length / 4,000 tokens/s; an engine that prefills more
    slowly, or needs so long between two chunks of a stream, needs more."""
    slow_share: float = 0.2
    """An engine is lost that generates less than this share of what is usual for it and of what the
    other engines generate, for each request; 0 for never."""
    fleet_wait_s: float = 600.0
    """How long a fleet of which no engine is left is waited for."""
    save_interval_s: float = 1.0
    """With a store: new tokens are saved so often. What is over, and what is handed over, at once.
    """
    control_timeout_s: float = 120.0
    """For each pause, flush and continue call of an engine."""
    refit_timeout_s: float = 1800.0
    """For bringing one version into all engines."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """For prompts that bring none of their own."""

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_choices()
        self._check_combinations()

    def rules(self, *, reward_scope: RewardScope, accepts: bool, episodes: bool) -> Rules:
        """The same for the core, with what is known of the caller's functions."""
        return Rules(
            batch_groups=self.batch_groups,
            group_size=self.group_size,
            over_provision=self._over_provision(),
            refill=self._refill(),
            automatic=self.over_provision == "auto",
            resume=self.resume_order,
            placement=self.placement,
            start_up=StartUp(rule=self.start_up, batches=self.start_up_batches),
            rebalance=self.rebalance,
            stop=self._stop(),
            straggler=self.straggler,
            prices=self.prices,
            kv=self.cached_kv,
            pace=self.pace,
            staleness=Staleness(bound=self.max_staleness, rule=self.staleness_rule),
            sampling=self.sampling,
            max_attempts=self.max_attempts,
            max_breaks=self.max_breaks,
            max_failed_groups=self.max_failed_groups,
            max_in_flight=self.max_in_flight,
            ready_batches=self.ready_batches,
            engine_strikes=_ENGINE_STRIKES,
            stall_timeout_s=self.stall_timeout_s,
            slow_share=self.slow_share,
            fleet_wait_s=self.fleet_wait_s,
            reward_scope=reward_scope,
            accepts=accepts,
            episodes=episodes,
        )

    @property
    def cached_kv(self) -> CachedKV:
        """What becomes of the cached KV at a refit, with "auto" resolved."""
        if self.kv_after_refit == "auto":
            return BEHAVIOURS[self.straggler].kv[0]
        return self.kv_after_refit

    def _refill(self) -> Refill:
        if self.refill == "wave":
            return Wave()
        if self.refill == "rounds":
            return LengthBuckets(
                store=self.store_batches, probes=self.probes, oldest=self.oldest_batches
            )
        return Pool(together=self.refill_groups, until=self.refill_until)

    def _over_provision(self) -> OverProvision:
        if self.over_provision == "kv":
            return KvTarget(target=self.kv_target)
        ratio = self.over_provision
        return FixedRatio(ratio=1.0 if isinstance(ratio, str) else ratio)

    def _stop(self) -> Stop:
        if self.stop == "samples":
            return Samples(self.batch_samples or self.batch_groups * self.group_size)
        if self.stop == "tokens":
            return Tokens(self.batch_tokens or 0)
        return Groups(self.batch_groups)

    def _check_ranges(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; give {least} or more.")
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
        for name in ("kv_target", "refill_until"):
            share = getattr(self, name)
            if not 0 < share <= 1:
                raise ConfigError(f"{name} is {share}; give a share above 0 and at most 1.")
        if not 0 <= self.slow_share < 1:
            raise ConfigError(
                f"slow_share is {self.slow_share}; give a share below 1, or 0 for never."
            )
        for price in fields(self.prices):
            value = getattr(self.prices, price.name)
            if value < 0 or (value == 0 and price.name == "prefill_tokens_per_s"):
                raise ConfigError(f"prices.{price.name} is {value}; give a number above 0.")

    def _check_choices(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(choices)}.")

    def _check_combinations(self) -> None:
        behaviour = BEHAVIOURS[self.straggler]
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
        if self.refill == "rounds" and not defers:
            able = " or ".join(f'"{name}"' for name in rules_that(lambda b: b.deferrable))
            raise ConfigError(
                f'refill="rounds" parks what it does not choose, which pace="{self.pace}" with '
                f'straggler="{self.straggler}" cannot; set pace="synchronous" and straggler={able}.'
            )
        if self.refill == "rounds" and self.start_up != "at_once":
            raise ConfigError(
                f'start_up="{self.start_up}" is for waves and pools; rounds fill a store first, '
                'so leave it "at_once".'
            )
        if self.staleness_rule != "mask" and self.max_staleness is None:
            raise ConfigError(
                f'staleness_rule="{self.staleness_rule}" needs a bound; set max_staleness.'
            )


_LEAST: dict[str, float] = {
    "batch_groups": 1,
    "group_size": 1,
    "refill_groups": 1,
    "store_batches": 1,
    "probes": 0,
    "start_up_batches": 1,
    "oldest_batches": 1,
    "batch_samples": 1,
    "batch_tokens": 1,
    "max_staleness": 0,
    "max_attempts": 1,
    "max_failed_groups": 1,
    "max_in_flight": 1,
    "ready_batches": 1,
    "dispatch_rate": 1,
    "max_breaks": 1,
    "stall_timeout_s": 1,
    "fleet_wait_s": 0,
    "save_interval_s": 0.001,
    "control_timeout_s": 0.001,
    "refit_timeout_s": 0.001,
}

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
