"""The settings of a scheduler: one tree, checked at construction.

Common settings are at the top level, and the others in named sections (:class:`Dispatch`,
:class:`Retries`, :class:`Health`, :class:`Timeouts`). A policy with its own settings is chosen by a
shorthand (``refill="pool"``) or as a value (``refill=Pool(until=0.25)``). The scheduler reads the
policies from :attr:`SchedulerConfig.policies`, which contains no shorthands.

The command-line flags and the tables of config.toml are generated from this tree, so a setting has
the same path everywhere: ``retries.attempts`` is
``SchedulerConfig(retries=Retries(attempts=5))``, ``--retries.attempts 5``, and ``attempts = 5`` in
the table ``[scheduler.retries]``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from aprilsched.errors import ConfigError
from aprilsched.kernel.core.policies.kinds import REFILLS, RefillRule, StopUnit
from aprilsched.kernel.core.policies.objective import Objective
from aprilsched.kernel.core.policies.placement import Placement
from aprilsched.kernel.core.policies.refill import Refill
from aprilsched.kernel.core.policies.repack import Prices
from aprilsched.kernel.core.policies.schedule import RATIO, Pace, Schedule
from aprilsched.kernel.core.policies.staleness import Staleness
from aprilsched.kernel.core.policies.stop import Groups, Samples, SingleSamples, Stop, Tokens
from aprilsched.kernel.core.policies.straggler import (
    BEHAVIOURS,
    Behaviour,
    CachedKV,
    StragglerRule,
    rules_that,
)
from aprilsched.kernel.core.policies.wave import Wave
from aprilsched.kernel.values.bounds import AT_LEAST_0, AT_LEAST_1, Bound, check_settings
from aprilsched.kernel.values.checks import suggesting
from aprilsched.kernel.values.companions import Companion
from aprilsched.types import MAX_GROUP_SIZE, SamplingParams

KVAfterRefit: TypeAlias = Literal["auto", "recompute", "keep", "apart"]

DEFAULT_MAX_STALENESS = 4
"""The bound on staleness, in versions, if neither the user nor the trainer sets one."""
LONG_WAIT = 8
"""Number of versions for which a deferred group may wait."""

Delivery: TypeAlias = Literal["groups", "samples"]
PaceRule: TypeAlias = Pace | Literal["auto"]
RefitRule: TypeAlias = Literal["together", "rolling"]
RewardScope: TypeAlias = Literal["none", "rollout", "group"]
MemberRule: TypeAlias = Literal["again", "shrink", "drop_group"]

_GROUP_SIZE = Bound(least=1, most=MAX_GROUP_SIZE, words=f"1 to {MAX_GROUP_SIZE:,}")
_NOT_0 = Bound(least=0.001, words="0.001 or more")
_SHARE_FROM_0 = Bound(least=0, most=1, words="a share from 0 to 1")
_BELOW_1 = Bound(least=0, below=1, words="a share below 1, or 0 for never")


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Properties of the caller's functions, in addition to the settings."""

    reward_scope: RewardScope = "none"
    """Whether there is a reward function, and whether it scores single rollouts or groups."""
    accepts: bool = False
    """Whether the caller filters groups."""
    episodes: bool = False
    """Whether a coroutine of the caller drives each rollout."""


@suggesting()
@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """Which requests are sent, when, and to which engine."""

    placement: Placement | Literal["auto"] = "auto"
    """"prefix" keeps a group on one engine, which has its prompt cached; "spread" sends each
    rollout to the engine with the fewest requests; "auto" is "prefix", and with
    `over_provision="auto"` the schedule may name "spread" instead."""
    max_in_flight: Annotated[int, AT_LEAST_1] | None = None
    """Largest number of requests in flight on all engines; None leaves the queueing to the engines.
    Further requests wait, so a number below the rollouts of a batch only makes the batch take
    longer."""
    max_sessions: Annotated[int, AT_LEAST_1] | Literal["auto"] | None = "auto"
    """Largest number of training sessions (episodes) that have started and not ended, on all
    engines. "auto" limits them by what each engine's KV pool can hold: a turn that would prefill
    its whole context waits for room. It has no effect on engines that keep no KV between turns, or
    keep it outside the pool. None sends every turn at once."""
    rate: Annotated[int, AT_LEAST_1] = 2_000
    """Largest number of requests sent per second."""
    migrate: bool = False
    """Whether a request whose engine's KV pool is full continues on an engine with room for it,
    with its tokens so far. It moves at most once. The other engine recomputes its context, as its
    own engine would after the wait. It is refused with `straggler="run"`."""


@suggesting()
@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """Limits of failures at each level, from an attempt to the run."""

    attempts: Annotated[int, AT_LEAST_1] = 3
    """Number of consecutive attempts of a request that may fail without a new token. After that the
    rollout is lost."""
    interruptions: Annotated[int, AT_LEAST_1] = 16
    """Number of attempts of a request that may be interrupted after new tokens, or by the loss of
    their engine. After that the rollout is lost."""
    member: MemberRule = "again"
    """What happens to a group when one of its rollouts is lost, because its attempts are exhausted
    or user code raises MemberLost or TurnRefused: "again" regenerates that member, "shrink"
    delivers the group without it, and "drop_group" drops the group."""
    regenerations: Annotated[int, AT_LEAST_0] = 2
    """Number of times that one member of a group may be regenerated or scored again. After that the
    group is dropped."""
    smallest_group: Annotated[int, AT_LEAST_1] = 2
    """Smallest number of rollouts to which a group may shrink. A smaller group is dropped, because
    a single reward has no advantage. A group of an evaluation may shrink to one rollout."""
    failed_groups: Annotated[int, AT_LEAST_1] = 64
    """Number of groups, or of single samples, that may fail without an accepted one between them.
    After that the run is given up."""
    rejected_groups: Annotated[int, AT_LEAST_1] = 1_000
    """Number of consecutive groups, or single samples, that `accept` may reject. After that the run
    is given up; otherwise the trainer would wait forever."""
    failed_share: Annotated[float, _SHARE_FROM_0] = 0.5
    """Share of all prompts whose groups may fail. If more have failed when the prompts end, the run
    ends with an error; 1 allows any number, if at least one group was delivered."""


@suggesting()
@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """When an engine counts as lost, and how long the run waits for a fleet without engines."""

    stall_s: Annotated[float, AT_LEAST_1] = 60.0
    """Seconds without a token for any open request after which an engine is lost. Pauses do not
    count, and unanswered prompts add one second per 4,000 tokens. An engine with slower prefill, or
    with longer gaps between the chunks of a stream, needs a larger value."""
    slow_share: Annotated[float, _BELOW_1] = 0.2
    """An engine is lost if its token rate per request falls below this share of its own usual rate
    and of the other engines' rate; 0 for never."""
    fleet_wait_s: Annotated[float, AT_LEAST_0] = 600.0
    """Seconds that the run waits when no engine is left, or for an engine that refuses all requests
    because it is busy."""


@suggesting()
@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Timeouts of the control calls to engines."""

    control_s: Annotated[float, _NOT_0] = 120.0
    """Timeout in seconds of each pause, flush and continue call to one engine."""
    refit_s: Annotated[float, _NOT_0] = 1800.0
    """Timeout in seconds to load one version into all engines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policies:
    """The policies of a configuration, with every shorthand resolved.

    Attributes:
        stop: when a batch is full.
        siblings: number of siblings of a delivered sample; None if whole groups are delivered.
        over_provision: ratio of open groups to groups in a batch; None if chosen during the run.
        refill: when new groups start, unless chosen during the run.
        staleness: bound on staleness, and the treatment of rollouts that would exceed it.
        companions: data that engines return in addition to the tokens.
    """

    stop: Stop
    siblings: int | None
    over_provision: float | None
    refill: Refill
    staleness: Staleness
    companions: tuple[Companion, ...] = ()


@suggesting()
@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """How rollouts are scheduled.

    Raises:
        ConfigError: if a value is out of its range, or if two values contradict each other.
    """

    batch_groups: Annotated[int, AT_LEAST_1] = 32
    """Number of groups (prompts) in a batch."""
    group_size: Annotated[int, _GROUP_SIZE] = 8
    """Number of rollouts of a prompt that does not set its own group size."""
    delivery: Delivery = "groups"
    """What a batch is made of: "groups" is all rollouts of each prompt at once; "samples" is single
    rollouts, each as soon as it and `siblings` others of its group are generated and scored. With
    "samples" a batch has `batch_groups * group_size` rollouts, and the rest of a group comes in
    later batches."""
    siblings: Annotated[int, AT_LEAST_1] | None = None
    """With delivery="samples", the number of other rollouts of its group whose rewards form the
    baseline of a sample: the first ones whose generation ended. None for half of the group."""
    stop: StopUnit | Stop = "groups"
    """What fills a batch: "groups" is `batch_groups` groups, Samples(256) is whole groups with a
    total of at least 256 rollouts, and Tokens(100_000) whole groups with a total of at least
    100,000 response tokens. "samples" is `batch_groups * group_size` rollouts."""
    over_provision: Annotated[float, RATIO] | Literal["auto"] = 1.5
    """Ratio of groups kept open to groups in a batch; 1 waits for every last response. "auto"
    chooses the ratio and the refill rule during the run: the schedule with the least mean
    staleness within 1 % of the best by `objective`, for the lengths seen so far and the time model
    of the engines."""
    refill: RefillRule | Refill = "wave"
    """When new groups start: "wave" starts them once at the start of each batch (APRIL), "pool" or
    Pool(together=4, until=0.25) keeps a constant number generating, "buckets" or
    LengthBuckets(store=5) keeps more groups open and runs those of similar expected length
    together, and "tail" lets groups race for their batch and delivers the losers in separate
    batches."""
    objective: Objective = field(default_factory=Objective)
    """What over_provision="auto" maximizes: useful work per time of whole steps, with tokens
    discounted by their staleness."""
    straggler: StragglerRule | Behaviour = "retract"
    """What happens to the rollouts that still generate when a batch is full: "retract" pauses them
    in the engine and recomputes their KV after a refit, "in_place" pauses them and keeps their KV,
    so that later tokens attend to stale keys, "abort" aborts them and sends them again, and "run"
    lets them run to their end, so that no rollout has two versions. A Behaviour is a rule of your
    own."""
    pace: PaceRule = "synchronous"
    """"synchronous" pauses the engines from a full batch until the next one is requested;
    "asynchronous" keeps generating while the trainer trains, and pauses only for a refit; "auto"
    starts synchronously and chooses the pace during the run, with over_provision="auto". It stays
    synchronous once the trainer has used the engines' memory."""
    max_staleness: Annotated[int, AT_LEAST_0] | Staleness | Literal["auto"] | None = "auto"
    """Bound on the staleness of a delivered token in the loss: the consuming version minus the
    sampling version. Tokens beyond it get loss mask 0; Staleness(2, rule="evict"), "finish" or
    "restart" treats them differently. "auto" is the bound of the trainer's own settings, or 4:
    at the usual learning rate it was safe in experiments/learning_moe, where 8 was not always, and
    halved staleness at no measured cost; AReaL's documentation sets it too. None is no bound. With
    a bound, at most (bound + 1) * `batch_groups` groups start per version, so it must be larger for
    a trainer that takes more batches per update. With over_provision="auto" 0 means Staleness(0,
    rule="restart"), if the straggler rule and the pace allow it; "auto" takes length buckets only
    with 8 or more, or None."""
    ready_batches: Annotated[int, AT_LEAST_1] = 2
    """Number of complete batches that wait for a slow trainer before no new groups start, on the
    asynchronous pace."""
    kv_after_refit: KVAfterRefit = "auto"
    """What happens to KV that older weights computed: "recompute" flushes it (and, if it may
    survive the flush, uses a cache key for each version too), "keep" lets later tokens attend to
    stale keys, and "apart" uses a cache key for each version, for servers that cannot flush, so
    that new requests never hit older keys. "auto" is "keep" for "in_place" and "recompute" for the
    other straggler rules."""
    refit: RefitRule = "together"
    """"together" loads a new version into all engines in one pause of the fleet. "rolling" loads it
    into each engine once that has no responses of an older version left, while the others continue
    under their version; unfinished responses are gathered on fewer engines of their version if this
    costs less than the wait. It needs pace="asynchronous" and straggler="run"."""
    follow_weights: bool = False
    """Whether the scheduler adopts newer weights that another process loads without an update call,
    as soon as half of the engines show their version. Without this setting such an engine is put
    on standby."""
    companions: tuple[Companion | str, ...] = ()
    """Data that engines return in addition to each token: Companion or its string, such as
    "routed_experts=uint8[48,8]" or "sampling_mask". Rows of the context come from the forward pass
    that sampled each token. So if a refit would make engines recompute contexts ("retract"),
    unfinished responses are aborted first, as with "abort"."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters of prompts that do not set their own."""
    dispatch: Dispatch = field(default_factory=Dispatch)
    """Which requests are sent, when, and to which engine."""
    prices: Prices = field(default_factory=Prices)
    """Costs of moving a request to another engine, for `refit="rolling"` and `dispatch.migrate`."""
    retries: Retries = field(default_factory=Retries)
    """Limits of failures at each level, from an attempt to the run."""
    health: Health = field(default_factory=Health)
    """When an engine counts as lost, and how long the run waits for a fleet without engines."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """Timeouts of the control calls to engines."""
    save_interval_s: Annotated[float, _NOT_0] = 1.0
    """Seconds between two saves of new tokens, if there is a store. Finished rollouts and delivered
    batches are saved at once."""
    allow_inexact_versions: bool = False
    """Whether "retract" and "in_place" are allowed on servers that do not report the version of
    each token."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "companions", tuple(map(Companion.of, self.companions)))
        check_settings(self)
        self._check_combinations()

    # --- what follows from the settings --------------------------------------------------------

    @property
    def policies(self) -> Policies:
        """The policies that the settings name."""
        ratio = self.over_provision
        return Policies(
            stop=self._stop(),
            siblings=self._siblings(),
            over_provision=None if isinstance(ratio, str) else float(ratio),
            refill=self.refill if isinstance(self.refill, Refill) else REFILLS[self.refill](),
            staleness=self._staleness(),
            companions=tuple(map(Companion.of, self.companions)),
        )

    @property
    def batch_units(self) -> int:
        """Number of groups, or of single samples, in a batch with the stop rule of these."""
        stop = self.policies.stop
        if isinstance(stop, SingleSamples):
            return stop.amount
        return self.batch_groups * (1 if self.delivery == "groups" else self.group_size)

    @property
    def automatic(self) -> bool:
        """Whether over-provisioning and refill are chosen during the run."""
        return self.over_provision == "auto"

    @property
    def first_pace(self) -> Pace:
        """The pace at the start of the run."""
        return "synchronous" if self.pace == "auto" else self.pace

    @property
    def _straggler(self) -> Behaviour:
        rule = self.straggler
        return rule if isinstance(rule, Behaviour) else BEHAVIOURS[rule]

    @property
    def straggler_name(self) -> str:
        """Name of the straggler rule."""
        return self._straggler.name

    @property
    def behaviour(self) -> Behaviour:
        """The treatment of stragglers.

        An engine that recomputes a context under new weights silently returns the rows of that pass
        for all older tokens. So with companions of the context no request waits inside an engine
        for such a refit.
        """
        behaviour = self._straggler
        recomputes = behaviour.waits_inside and self.cached_kv == "recompute"
        if recomputes and any(Companion.of(each).per == "context" for each in self.companions):
            return behaviour.called_back_first()
        return behaviour

    @property
    def may_defer(self) -> bool:
        """Whether a refill rule that defers groups may be chosen during the run.

        Such a rule aborts the requests that it does not run, so the straggler rule must not keep
        them in the engines. It also lets groups wait, so the bound on staleness must be wide, or
        groups that have waited too long must restart.
        """
        policies = self.policies
        bound = policies.staleness.bound
        again = policies.staleness.rule == "restart"
        return self._defers and (bound is None or bound >= LONG_WAIT or again)

    @property
    def cached_kv(self) -> CachedKV:
        """The treatment of cached KV at a refit, with "auto" resolved."""
        if self.kv_after_refit == "auto":
            return self._straggler.kv[0]
        return self.kv_after_refit

    @property
    def _defers(self) -> bool:
        whole = self.delivery == "groups"
        return whole and self.pace != "asynchronous" and self.behaviour.deferrable

    @staticmethod
    def settles(schedule: Schedule) -> bool:
        """Return whether every group finishes under this schedule although updates discard tokens.

        This is for the synchronous pace and ``Staleness(0, rule="restart")``.
        """
        refill = schedule.refill
        if refill.settles:
            return True
        waits = refill.defers or isinstance(refill, Wave)
        return waits and schedule.over_provision == 1

    @property
    def _settles(self) -> bool:
        """Whether every group finishes although its tokens are discarded at updates.

        An automatic schedule is checked when it is chosen.
        """
        policies = self.policies
        if policies.over_provision is None:
            return self.pace != "asynchronous"
        chosen = Schedule(over_provision=policies.over_provision, refill=policies.refill)
        return self.settles(chosen) and (policies.refill.settles or self.pace == "synchronous")

    def _staleness(self) -> Staleness:
        bound = self.max_staleness
        if isinstance(bound, Staleness):
            return bound
        if bound == "auto":
            return Staleness(DEFAULT_MAX_STALENESS)
        if bound == 0 and self.automatic and self._defers:
            # Without stale tokens every schedule waits for all requests that it runs. This permits
            # length buckets, whose probes are discarded, and nothing would be masked anyway.
            return Staleness(0, rule="restart")
        return Staleness(bound)

    def _siblings(self) -> int | None:
        if self.delivery == "groups":
            return None
        return max(1, self.group_size // 2) if self.siblings is None else self.siblings

    def _stop(self) -> Stop:
        if self.delivery == "samples" and not isinstance(self.stop, Tokens):
            own = self.stop.amount if isinstance(self.stop, Samples) else None
            return SingleSamples(own or self.batch_groups * self.group_size)
        if isinstance(self.stop, Stop):
            return self.stop
        if self.stop == "groups":
            return Groups(self.batch_groups)
        if self.stop == "samples":
            return Samples(self.batch_groups * self.group_size)
        raise ConfigError(
            f'stop="{self.stop}" does not set how many {self.stop} fill a batch; set stop.amount, '
            "or give Tokens(100_000), for example."
        )

    # --- checks --------------------------------------------------------------------------------

    def _check_combinations(self) -> None:
        behaviour, policies = self.behaviour, self.policies
        if self.straggler_name in BEHAVIOURS and self._straggler not in BEHAVIOURS.values():
            raise ConfigError(
                f'straggler must have a name of its own, got another "{self.straggler_name}"; the '
                "files of a run would name the built-in rule."
            )
        names = [each.name for each in policies.companions]
        if len(set(names)) < len(names):
            raise ConfigError(f"companions has {', '.join(names)}; give each name once.")
        if self.cached_kv not in behaviour.kv:
            raise ConfigError(
                f'kv_after_refit="{self.kv_after_refit}" is not possible with '
                f'straggler="{self.straggler_name}"; choose one of {", ".join(behaviour.kv)}.'
            )
        if isinstance(policies.stop, Groups) and policies.stop.amount != self.batch_groups:
            raise ConfigError(
                f"stop.amount is {policies.stop.amount} groups, and batch_groups is "
                f"{self.batch_groups}; set batch_groups alone, or another unit than groups as stop."
            )
        self._check_delivery(policies)
        if self.pace == "auto" and not self.automatic:
            raise ConfigError(
                'pace="auto" is chosen together with the ratio and the refill rule, so it is '
                f"refused with over_provision={self.over_provision!r}; set "
                'over_provision="auto", or pace="synchronous" or "asynchronous".'
            )
        if self.follow_weights and self.pace != "asynchronous" and behaviour.waits_inside:
            able = " or ".join(f'"{name}"' for name in rules_that(lambda b: not b.waits_inside))
            raise ConfigError(
                f'straggler="{self.straggler_name}" with pace="{self.pace}" continues engines at '
                "each batch, also those that another client has paused, so follow_weights=True is "
                f'refused; set pace="asynchronous", or straggler={able}.'
            )
        if self.dispatch.migrate and behaviour.called_back == "never":
            raise ConfigError(
                "dispatch.migrate interrupts a response to move it, and new weights may come "
                f'before it continues, so it is refused with straggler="{self.straggler_name}", '
                "which keeps each response to one version; leave migrate False, or set another "
                "straggler."
            )
        if self.refit == "rolling":
            self._check_rolling()
        if policies.refill.defers and not self._defers:
            able = " or ".join(f'"{name}"' for name in rules_that(lambda b: b.deferrable))
            raise ConfigError(
                f'refill="{policies.refill.name}" defers the groups that it does not choose, which '
                f'pace="{self.pace}" with straggler="{self.straggler_name}" cannot; set '
                f'pace="synchronous" and straggler={able}.'
            )
        if policies.staleness.rule != "mask" and policies.staleness.bound is None:
            raise ConfigError(
                f'max_staleness.rule is "{policies.staleness.rule}" without a bound; set '
                "max_staleness to a number of versions too."
            )
        if policies.staleness.rule == "restart" and not self._settles:
            raise ConfigError(
                f'max_staleness.rule is "restart" with refill="{policies.refill.name}" and '
                f"over_provision={self.over_provision!r}, where a prompt of long responses may "
                'restart forever; set refill="tail", or refill="wave" or "buckets" with '
                "over_provision=1."
            )

    def _check_delivery(self, policies: Policies) -> None:
        if policies.siblings is None:
            if self.siblings is not None:
                raise ConfigError(
                    f'siblings is {self.siblings} with delivery="groups", which delivers all '
                    'rollouts of a prompt at once; set delivery="samples" too, or leave it out.'
                )
            return
        if policies.siblings >= self.group_size:
            raise ConfigError(
                f"siblings must be below group_size={self.group_size}, got {policies.siblings}; a "
                "rollout has only the other members of its group as siblings."
            )
        if policies.refill.defers:
            raise ConfigError(
                f'refill="{policies.refill.name}" runs or defers a whole group by the end of its '
                "last member, and single samples leave their group before that; set "
                'refill="wave" or "pool", or delivery="groups".'
            )

    def _check_rolling(self) -> None:
        if self.pace != "asynchronous" or self.straggler_name != "run":
            raise ConfigError(
                f'refit="rolling" lets responses run on under their version, which '
                f'pace="{self.pace}" with straggler="{self.straggler_name}" does not; set '
                'pace="asynchronous" and straggler="run".'
            )
        if self.automatic:
            raise ConfigError(
                'over_provision="auto" is tried out with refits of all engines together, so it is '
                'refused with refit="rolling"; set a ratio.'
            )
        if self.follow_weights:
            raise ConfigError(
                'refit="rolling" brings every version to the engines itself, so '
                "follow_weights=True is refused; leave it False."
            )
