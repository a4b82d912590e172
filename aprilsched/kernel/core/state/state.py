"""The whole state of a scheduler, in one record per subject.

Handlers, decisions and steps that need most of it take the whole :class:`SchedulerState`; the
others take the records that they use. Only the few steps that deal with a subject change its
record.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from aprilsched.kernel.core.config import Caller, SchedulerConfig
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages.facts import Fact, Order
from aprilsched.kernel.core.policies.placement import Place, Placement, place_of
from aprilsched.kernel.core.policies.schedule import Schedule, first_schedule
from aprilsched.kernel.core.policies.straggler import CachedKV
from aprilsched.kernel.core.state.admission import Admission
from aprilsched.kernel.core.state.caller_functions import CallerTimes
from aprilsched.kernel.core.state.delivery import Delivery
from aprilsched.kernel.core.state.durations import TrainerTimes
from aprilsched.kernel.core.state.engine_control import CUDA_GRAPH, WEIGHTS, FleetControl, Mode
from aprilsched.kernel.core.state.engine_health import FleetHealth
from aprilsched.kernel.core.state.engine_index import EngineIndex
from aprilsched.kernel.core.state.expectation import Expectations
from aprilsched.kernel.core.state.in_flight import InFlight
from aprilsched.kernel.core.state.ledger import Outcome
from aprilsched.kernel.core.state.queues import MustDeliver
from aprilsched.kernel.core.state.records import GroupRecord, RequestRecord, group_lengths
from aprilsched.kernel.core.state.session_kv import SessionKv
from aprilsched.kernel.core.state.weights import PolicyVersionTracker, Weights
from aprilsched.types import NO_VERSION, Prompt, RefusedPrompt

_WORKING = (Mode.RUNNING, Mode.PAUSING, Mode.VERIFYING)
"""Modes in which an engine generates."""
_SIZES = 32
"""Largest number of groups in the mean of group sizes: about a batch. A longer window would follow
a curriculum of group sizes too late."""


@dataclass(slots=True, kw_only=True)
class PromptSupply:
    """Prompts between their source and their launch. Steps: ``launch``."""

    stock: deque[Prompt | RefusedPrompt] = field(default_factory=deque["Prompt | RefusedPrompt"])
    """Prompts read from the source and not launched yet."""
    cursor: int = 0
    """Number of launched prompts of the source."""
    fetching: bool = False
    """Whether a request for prompts is pending."""
    dry: bool = False
    """Whether the source has no prompt at the moment, and will have one at an unknown time."""
    exhausted: bool = False
    """Whether the source has ended."""
    consecutive_failures: int = 0
    """Number of failed groups, or single samples, since one was last accepted."""
    consecutive_rejections: int = 0
    """Number of groups, or single samples, rejected by `accept` since one was last accepted."""
    outcome: Outcome = field(default_factory=Outcome)
    """Outcome of the launched prompts."""
    usual_size: float
    """Mean number of rollouts in the latest groups."""
    sizes_seen: int = 0
    """Number of groups in this mean."""
    sizes_vary: bool = False
    """Whether a launched group had another size than the configured one."""

    @property
    def usable(self) -> int:
        """Number of prompts in stock for which a group can be launched."""
        return sum(isinstance(prompt, Prompt) for prompt in self.stock)

    def missing(self, count: int) -> int:
        """Return the number of prompts to fetch, so that `count` groups can be launched."""
        return 0 if self.exhausted else max(0, count - self.usable)

    @property
    def waits(self) -> bool:
        """Whether the prompts in stock wait for missing ones, so that a wave is sent as a whole.

        They must not wait for a source that is dry: the wave stays pending and is completed later.
        They do not wait if the stock contains bad prompts, because a source with nothing else would
        fill the stock without limit.
        """
        return not self.dry and self.usable == len(self.stock)

    def note_size(self, size: int, configured: int) -> None:
        """Record the size of a launched group, next to the configured size."""
        self.sizes_seen = min(self.sizes_seen + 1, _SIZES)
        self.usual_size += (size - self.usual_size) / self.sizes_seen
        self.sizes_vary = self.sizes_vary or size != configured


@dataclass(slots=True)
class Plan:
    """When to start groups, and how many. Steps: ``launch``, ``target``, ``replan``,
    ``stragglers``."""

    schedule: Schedule
    """The schedule in force."""
    usual_group: float
    """Expected share of one group in a batch, in the unit of the stop rule."""
    wave_due: bool
    """Whether the next wave of groups may be launched."""
    target_groups: int = 0
    """Number of groups to keep open for the current batch."""
    groups_unchosen: bool = False
    """Whether the open groups to run in the next batch are still to be chosen (length buckets)."""
    tail_threshold: int = -1
    """Number of generating rollouts, deferred ones included, at which the tail of the batch in work
    starts; -1 if the refill rule does not need to know, or already knows."""
    requested: bool = False
    """Whether a new schedule is requested and has not arrived (automatic over-provisioning)."""
    planned_at: int = 0
    """Number of delivered batches at the last request for a schedule."""
    planned_for: float | None = None
    """Median response length in tokens at that request; None without one."""
    planned_training: float | None = None
    """The trainer's mean time for a batch, in seconds, at that request; None if unknown, as in a
    resumed run."""
    planned_times: tuple[float, float] = (0.0, 0.0)
    """At that request: the mean reward time, and a response's mean time in gaps, in seconds."""
    checked_at_batch: int = 0
    """Number of delivered batches at the last check whether to request a schedule."""


@dataclass(slots=True)
class Stragglers:
    """Rollouts that still run when their batch is full. Steps: ``stragglers``."""

    calling_back: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Requests, each with its attempt, that are being aborted before the engines are paused (length
    buckets). The last one has not ended; others may have."""
    deferred: bool = True
    """Whether the stragglers of the current stop are deferred (length buckets)."""
    rejected_surplus: dict[int, float] = field(default_factory=dict[int, float])
    """Surplus engines of each older version when gathering their requests was last found not worth
    its cost (rolling refits)."""


@dataclass(slots=True)
class Evaluations:
    """Evaluations by their id. Steps: ``launch``, ``batch``."""

    running: dict[int, list[GroupRecord]] = field(default_factory=dict[int, list[GroupRecord]])
    """Groups of the running evaluations, in the order of their prompts."""
    waiting: list[ev.EvaluationRequested] = field(default_factory=list[ev.EvaluationRequested])
    """Evaluations requested during an update, which start after it."""


@dataclass(slots=True, kw_only=True)
class Sleep:
    """One sleep, from the trainer's request until every engine has its memory back."""

    tags: frozenset[str]
    """Kinds of memory that the trainer requested."""
    inside: bool
    """Whether stragglers stay inside the paused engines; otherwise they are aborted first."""
    may_pause: bool = False
    """Whether all that the sleep waits for has ended, so the engines may be paused."""
    asleep: bool = False
    """Whether the trainer has been notified that the memory is released."""
    waking: bool = False
    """Whether the trainer has returned the memory."""

    @property
    def away(self) -> frozenset[str]:
        """Tags of the memory that should be released now."""
        return self.tags if self.may_pause and not self.waking else frozenset()

    @property
    def away_in_refit(self) -> frozenset[str]:
        """Tags of the memory to release during a refit, which needs the weights and the CUDA graphs
        captured with them."""
        return self.away - {WEIGHTS, CUDA_GRAPH}


@dataclass(slots=True)
class Outage:
    """A time in which no engine is in use."""

    since: float | None = None
    """Time when the last engine was lost; None while an engine has always been on standby."""
    said_at: float | None = None
    """Time of the last report that the run waits for an engine; None before the first."""
    given_up: bool = False
    """Whether the loss of the fleet has been reported to the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """An engine's report about its KV pool."""

    used: int
    """Number of tokens in the pool."""
    queued: int
    """Number of requests that wait for room."""
    attempt_tokens: int
    """Number of tokens of all open attempts on the engine at that time, by our own count."""
    at: float


@dataclass(slots=True)
class Fleet:
    """The engines. Steps: ``steering``, ``verification``, ``placement``, ``engines``."""

    control: FleetControl
    """The control state of each engine: running, paused, being refitted, and so on."""
    index: EngineIndex
    """The engines in use by version, mode and work, as they were at its last refresh."""
    health: FleetHealth = field(default_factory=FleetHealth)
    """Token rates, by which silent and slow engines are found."""
    attempts_sent: int = 0
    """Number of attempts sent so far."""
    verifying_since: float | None = None
    """Time of the first version check on behalf of the requests that wait now; None without one."""
    sleep: Sleep | None = None
    """The current sleep, in which the trainer has the engines' memory; None without one."""
    memory_lent_to_trainer: bool = False
    """Whether the trainer has used the engines' memory in this run, so nothing may be generated
    while it trains."""
    paused_by_trainer: bool = False
    """Whether the trainer wants the engines paused, with the requests inside them. Unknown in a
    resumed run."""
    outage: Outage | None = None
    """The outage, while no engine is in use."""
    crowded_engines: set[str] = field(default_factory=set[str])
    """Engines with a nearly full KV pool that are due for a check. Steps: ``migration``."""
    moving: set[int] = field(default_factory=set[int])
    """Requests that are moving to another engine; some may have arrived."""
    examined_at: dict[str, float] = field(default_factory=dict[str, float])
    """Time of the last check of each crowded engine."""
    pools: dict[str, PoolReport] = field(default_factory=dict[str, PoolReport])
    """The latest KV pool report of each engine."""
    admissions: dict[str, Admission] = field(default_factory=dict[str, Admission])
    """Admission limits of engines that have refused a request because they were busy. Steps:
    ``requests``, ``placement``."""
    session_kv: SessionKv = field(default_factory=SessionKv)
    """What engines cache for sessions at their tools."""
    lost: dict[str, str] = field(default_factory=dict[str, str])
    """Causes by engine, for lost engines that have not rejoined."""
    rejoin_expected_until: float = 0.0
    """Time until which, while no engine is in use, one with the fleet's version may rejoin."""


@dataclass(slots=True)
class Outbox:
    """The commands and facts of the event that is being handled."""

    commands: list[do.Command] = field(default_factory=list[do.Command])
    """Commands to the shell, in order."""
    facts: list[Fact] = field(default_factory=list[Fact])
    """Facts that follow from the event, in order."""

    def tell(self, fact: Fact) -> None:
        """Emit a fact to listeners."""
        self.facts.append(fact)

    def announce(self, fact: Order) -> None:
        """Emit a fact to listeners that is also a command to the shell."""
        self.facts.append(fact)
        self.commands.append(fact)


class SchedulerState:
    """The state of one scheduler, with the commands and facts of the current event.

    Attributes:
        config: the settings; they never change.
        caller: the properties of the caller's functions.
        behaviour: the treatment of stragglers.
        cached_kv: the treatment of cached KV at a refit.
        rolling: whether each engine takes a new version alone, so that engines in use may have
            different versions, and a rollout has one.
        now: the time of the event that is being handled, in seconds.
        out: its commands and facts.
        tells_tokens: facts contain the tokens themselves, not only their number.
        process: random name of this process, in the labels of its weights.
        restored: the state is that of a saved run.
        resumed: the state is restored, its run has had a successful update, and an engine has the
            weights of it. Otherwise the engines may have the weights of another run.
    """

    def __init__(self, config: SchedulerConfig, caller: Caller | None = None) -> None:
        self.config = config
        self.caller = caller or Caller()
        policies = config.policies
        self.stop = policies.stop
        self.staleness = policies.staleness
        self.behaviour = config.behaviour
        self.cached_kv: CachedKV = config.cached_kv
        self.rolling = config.refit == "rolling"
        self.now = 0.0
        self.out = Outbox()
        self.tells_tokens = False
        self.process = ""
        self.restored = False
        self.resumed = False
        changed: dict[str, None] = {}
        self.weights = Weights(versions=PolicyVersionTracker(changed))
        # A method, because a scheduler in another process pickles its state, and a lambda cannot be
        # pickled.
        self.expectations = Expectations(self._trainer_version)
        self.in_flight = InFlight(
            self._place,
            self.pinned_version,
            self._is_cold,
            changed,
            policies.companions,
            policies.siblings,
        )
        self.delivery = Delivery(must_deliver=MustDeliver(self.staleness))
        self.prompts = PromptSupply(usual_size=float(config.group_size))
        self.plan = Plan(
            schedule=(
                first_schedule(
                    may_defer=config.may_defer,
                    pace=config.first_pace if config.pace == "auto" else None,
                    waits=policies.staleness.rule == "restart",
                )
                if policies.over_provision is None
                else Schedule(over_provision=policies.over_provision, refill=policies.refill)
            ),
            usual_group=self.stop.amount / config.batch_groups,
            wave_due=config.first_pace != "synchronous",
        )
        self.times = TrainerTimes()
        self.calls = CallerTimes()
        self.stragglers = Stragglers()
        self.evaluations = Evaluations()
        control = FleetControl(
            pause_mode=self.behaviour.pause_mode(self.cached_kv),
            flushes=self.cached_kv == "recompute",
            tell=self.out.tell,
            changed=changed,
        )
        index = EngineIndex(
            control.engines,
            self.weights.versions.engines,
            self.in_flight.open,
            changed,
        )
        self.fleet = Fleet(control=control, index=index)

    def _trainer_version(self) -> int:
        return self.weights.versions.trainer

    def _place(self, request: RequestRecord) -> Place:
        """Return the request's sort key in the queue."""
        rollout = request.rollout
        return place_of(
            training=rollout.group.evaluation_id is None,
            carried=rollout.carried,
            group_id=rollout.group.group_id,
            index=rollout.index,
        )

    def _is_cold(self, request: RequestRecord) -> bool:
        """Return whether a turn would prefill its whole context, which needs room."""
        limit, rollout = self.config.dispatch.max_sessions, request.rollout
        if not self.caller.episodes or limit is None:
            return False
        if isinstance(limit, int):
            return not rollout.carried
        pool = self.fleet.session_kv.pools.get(rollout.engine)
        return pool is None or rollout.rollout_id not in pool.contexts

    @property
    def limits_sessions(self) -> bool:
        """Whether the engines' pools limit the sessions."""
        return self.caller.episodes and self.config.dispatch.max_sessions == "auto"

    def pinned_version(self, request: RequestRecord) -> int | None:
        """Return the only version that may generate the request, with rolling refits.

        It is the version of its rollout's tokens. None without tokens or without rolling refits; -1
        if the tokens have several versions, so that no engine may continue the request.
        """
        log = request.rollout.log
        if not self.rolling:
            return None
        return NO_VERSION if log.mixed else log.oldest_version

    def note_lengths(self, group: GroupRecord) -> None:
        """Add the lengths of a complete or dropped group to the evidence."""
        lengths = group_lengths(group)
        self.expectations.observed.add_group(lengths)
        if not self.in_flight.splits(group):
            self.expectations.note_prompts(group.members)
        self.in_flight.journal.note_lengths(lengths, self.expectations.remember(group))

    def note_work(self, engine: str) -> None:
        """Count the work of an engine up to now.

        It must be called before the number of its open requests changes, and when it stops or
        continues.
        """
        control = self.fleet.control.engines.get(engine)
        if control is None:
            return
        health = self.fleet.health.of(engine)
        if health.at < self.now:  # many requests are sent at one instant
            works = control.mode in _WORKING and control.paused_elsewhere is None
            health.advance(self.now, self.in_flight.open[engine] if works else 0)

    @property
    def asynchronous(self) -> bool:
        """Whether engines generate while the trainer trains, under the schedule in force."""
        return (self.plan.schedule.pace or self.config.pace) == "asynchronous"

    @property
    def placement(self) -> Placement:
        """The placement rule, from the settings or the schedule in force."""
        configured = self.config.dispatch.placement
        return self.plan.schedule.placement or "prefix" if configured == "auto" else configured

    @property
    def open_groups(self) -> int:
        """Number of incomplete training groups; if samples are delivered, the number of groups of
        the usual size that the samples which are not ready make, rounded up."""
        in_flight = self.in_flight
        if in_flight.siblings is None:
            return in_flight.training - len(in_flight.ready) - self.delivery.offered_groups
        left = in_flight.training_rollouts - in_flight.ready.samples - self.delivery.offered_groups
        return math.ceil(left / self.prompts.usual_size)

    @property
    def batch_number(self) -> int:
        """Number of batches before the one in work: the taken batches and the offered one."""
        return self.in_flight.counters.batches + (self.delivery.offered_groups > 0)

    @property
    def batch_groups(self) -> int:
        """Number of groups that a batch is expected to take."""
        return self.stop.batch_groups(self.plan.usual_group)

    @property
    def ready_groups(self) -> int:
        """Number of ready groups, converted to groups of the expected size."""
        return self.stop.as_groups(self.in_flight.ready, self.plan.usual_group)

    @property
    def given_up(self) -> bool:
        """Whether too many units in a row failed or were rejected to launch more."""
        retries = self.config.retries
        return (
            self.prompts.consecutive_failures >= retries.failed_groups
            or self.prompts.consecutive_rejections >= retries.rejected_groups
        )
