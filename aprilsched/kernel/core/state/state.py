"""Everything that a scheduler knows, in records with names.

The steps (:mod:`aprilsched.kernel.core.steps`) are functions on :class:`SchedulerState`. Each
record below belongs to one subject, and only the few steps that deal with the subject change it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from aprilsched.kernel.core.config import Caller, SchedulerConfig
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
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
from aprilsched.kernel.core.state.weights import PolicyVersionTracker, Weights
from aprilsched.types import NO_VERSION, Prompt, RefusedPrompt

_WORKING = (Mode.RUNNING, Mode.PAUSING, Mode.VERIFYING)
"""Modes in which an engine generates."""
_SIZES = 32
"""Largest number of groups over which the mean of group sizes is taken: about a batch. A mean over
more groups would follow a curriculum of group sizes too late."""


@dataclass(slots=True, kw_only=True)
class PromptSupply:
    """Prompts between their source and their launch. Steps: ``launch``."""

    stock: deque[Prompt | RefusedPrompt] = field(default_factory=deque["Prompt | RefusedPrompt"])
    """Prompts that were read from the source and are not launched yet."""
    cursor: int = 0
    """Number of the source's prompts that were launched."""
    fetching: bool = False
    """Prompts have been asked for and have not all arrived."""
    dry: bool = False
    """The source has no prompt at the moment, and will have one at an unknown time."""
    exhausted: bool = False
    """The source has ended."""
    consecutive_failures: int = 0
    """Groups dropped for a failure since a group was last accepted."""
    consecutive_rejections: int = 0
    """Groups refused by `accept` since a group was last accepted."""
    outcome: Outcome = field(default_factory=Outcome)
    """What became of those that were launched."""
    usual_size: float
    """Mean number of rollouts in the groups launched last."""
    sizes_seen: int = 0
    """Number of groups that the mean is over."""
    sizes_vary: bool = False
    """A group was launched whose size is not that of the configuration."""

    @property
    def usable(self) -> int:
        """Number of prompts at hand for which a group can be launched."""
        return sum(isinstance(prompt, Prompt) for prompt in self.stock)

    def missing(self, count: int) -> int:
        """How many prompts the source should still give, so that `count` groups can be launched."""
        return 0 if self.exhausted else max(0, count - self.usable)

    @property
    def waits(self) -> bool:
        """Whether the prompts at hand wait for those that are missing, because a wave should reach
        the engines together.

        Where the source has no more prompts at the moment, they must not wait for it: the wave
        stays pending and is completed later. Bad prompts are not held either: a source of nothing
        else would fill the stock without end.
        """
        return not self.dry and self.usable == len(self.stock)

    def note_size(self, size: int, configured: int) -> None:
        """Note the size of a group that is launched, and that of the configuration."""
        self.sizes_seen = min(self.sizes_seen + 1, _SIZES)
        self.usual_size += (size - self.usual_size) / self.sizes_seen
        self.sizes_vary = self.sizes_vary or size != configured


@dataclass(slots=True)
class Plan:
    """How many groups to start and when. Steps: ``launch``, ``target``, ``replan``,
    ``stragglers``."""

    schedule: Schedule
    """The schedule that is in force."""
    usual_group: float
    """What one group is expected to count towards a batch, in the unit of the stop rule."""
    wave_pending: bool
    """The next wave of groups may be launched."""
    target_groups: int = 0
    """Groups to keep open for the current batch."""
    choice_pending: bool = False
    """The open groups that run in the next batch are to be chosen (length buckets)."""
    tail_below: int = -1
    """Number of generating rollouts, deferred ones included, from which on the tail of the batch in
    work has begun; -1 if the refill rule is not asked about it, or was asked."""
    requested: bool = False
    """A new schedule has been asked for and has not arrived (automatic over-provisioning)."""
    planned_at: int = 0
    """Batches that had been delivered when a schedule was last asked for."""
    planned_for: float | None = None
    """The median response length, in tokens, that it was asked for."""
    planned_training: float | None = None
    """The trainer's mean time for a batch, in seconds, that it was asked for; None if that was not
    known. A resumed run does not know it any more."""
    planned_times: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """How much of that time was before the trainer had the last group of the batch, and the mean
    times of a reward and of the gaps of a response that it was asked for."""
    checked_at: int = 0
    """Batches that had been delivered when it was last checked whether to ask for a schedule."""


@dataclass(slots=True)
class Stragglers:
    """Rollouts that still run when their batch is full. Steps: ``stragglers``."""

    calling_back: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Requests, each with its attempt, that are being aborted before the engines are paused (length
    buckets). The last one has not ended; others may have."""
    deferred: bool = True
    """The stragglers of the current stop are deferred (length buckets)."""
    looked: dict[int, float] = field(default_factory=dict[int, float])
    """For each older version by how many engines those that have it were too many, when it was
    last found not to be worth it to gather their requests (rolling refits)."""


@dataclass(slots=True)
class Evaluations:
    """Evaluations by their id. Steps: ``launch``, ``batch``."""

    running: dict[int, list[GroupRecord]] = field(default_factory=dict[int, list[GroupRecord]])
    """Groups of the evaluations that have begun, in the order of their prompts."""
    waiting: list[ev.EvaluationRequested] = field(default_factory=list[ev.EvaluationRequested])
    """Evaluations that were asked for during an update and begin after it."""


@dataclass(slots=True, kw_only=True)
class Sleep:
    """One sleep, from the trainer's request until every engine has its memory back."""

    tags: frozenset[str]
    """The kinds of memory that the trainer asked for."""
    inside: bool
    """Stragglers stay inside the paused engines; otherwise they are called back first."""
    may_pause: bool = False
    """Everything that had to end before the sleep has ended, so the engines may be paused."""
    asleep: bool = False
    """The trainer was told that the memory is its own."""
    waking: bool = False
    """The trainer has given the memory back."""

    @property
    def away(self) -> frozenset[str]:
        """The memory that should be released now."""
        return self.tags if self.may_pause and not self.waking else frozenset()

    @property
    def away_in_refit(self) -> frozenset[str]:
        """The memory that should be released while weights are loaded: the weights, and the CUDA
        graphs that were captured with them, must be awake then."""
        return self.away - {WEIGHTS, CUDA_GRAPH}


@dataclass(slots=True)
class Outage:
    """A time in which no engine is in use."""

    since: float | None = None
    """When the last engine was gone; None while there was always one on standby."""
    said_at: float | None = None
    """When the caller was last told that the fleet is waited for."""
    given_up: bool = False
    """The caller was told that the fleet is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """What an engine has reported of its KV pool."""

    used: int
    """Number of tokens in the pool."""
    queued: int
    """Number of requests that wait for room."""
    held: int
    """Tokens of all open attempts on the engine at that time, as they are counted here."""
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
    """Number of attempts that were sent."""
    verifying_since: float | None = None
    """When the engines were first asked for their version on behalf of the requests that wait now;
    None if they were not."""
    sleep: Sleep | None = None
    """The sleep that is under way: the trainer has the engines' memory."""
    lent: bool = False
    """The trainer has asked for the engines' memory in this run, so nothing may be generated while
    it trains."""
    held: bool = False
    """The trainer wants the engines to be paused, with the requests inside them. Not known
    to a resumed run."""
    outage: Outage | None = None
    """The outage, while no engine is in use."""
    crowded: set[str] = field(default_factory=set[str])
    """Engines whose KV pool is nearly full, and that are to be looked at. Steps: ``migration``."""
    moving: set[int] = field(default_factory=set[int])
    """Requests that are on their way to another engine; others may have arrived."""
    looked_at: dict[str, float] = field(default_factory=dict[str, float])
    """When each of them was last looked at."""
    pools: dict[str, PoolReport] = field(default_factory=dict[str, PoolReport])
    """What each engine last reported of its KV pool."""
    admissions: dict[str, Admission] = field(default_factory=dict[str, Admission])
    """What is learned of the engines that have refused a request because they were busy. Steps:
    ``requests``, ``placement``."""
    lost: dict[str, str] = field(default_factory=dict[str, str])
    """Causes by engine, for engines that were lost and have not come back."""
    rejoin_expected_until: float = 0.0
    """While no engine is in use, one with the fleet's version may come back until this time."""


class SchedulerState:
    """The state of one scheduler, with the commands and facts of the event that is being handled.

    Attributes:
        config: the settings; they never change.
        caller: what is known of the caller's functions.
        behaviour: how stragglers are treated.
        cached_kv: what becomes of cached KV at a refit.
        rolling: whether each engine takes a new version alone, so that engines in use may have
            different versions, and a rollout has one.
        now: the time of the event that is being handled, in seconds.
        commands: what the shell is to do, in order.
        facts: what the event has made true, in order.
        tells_tokens: facts have the tokens themselves and not only their number.
        resumed: the run continues one that was saved.
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
        self.commands: list[do.Command] = []
        self.facts: list[facts.Fact] = []
        self.tells_tokens = False
        self.resumed = False
        changed: dict[str, None] = {}
        self.weights = Weights(versions=PolicyVersionTracker(changed))
        # A method, because a scheduler in another process sends its state, and pickle takes no
        # lambda.
        self.expectations = Expectations(self._trainer_version)
        self.in_flight = InFlight(
            self._place,
            self.booked,
            changed,
            policies.companions,
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
            wave_pending=not config.trainer_waits,
        )
        self.times = TrainerTimes()
        self.calls = CallerTimes()
        self.stragglers = Stragglers()
        self.evaluations = Evaluations()
        control = FleetControl(
            pause_mode=self.behaviour.pause_mode(self.cached_kv),
            flushes=self.cached_kv == "recompute",
            tell=self.tell,
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
        """Where the request goes among those that wait to be sent."""
        rollout = request.rollout
        return place_of(
            training=rollout.group.evaluation_id is None,
            carried=rollout.carried,
            group_id=rollout.group.group_id,
            index=rollout.index,
        )

    def booked(self, request: RequestRecord) -> int | None:
        """The version under which alone the request may be generated, with rolling refits: that of
        the tokens of its rollout. None if it has no tokens; -1 if they are of several versions, so
        that no engine may continue it."""
        log = request.rollout.log
        if not self.rolling:
            return None
        return NO_VERSION if log.mixed else log.oldest_version

    def tell(self, fact: facts.Fact) -> None:
        """Tell listeners that something has become true in this event."""
        self.facts.append(fact)

    def announce(self, fact: facts.Order) -> None:
        """Tell listeners something on which the shell acts too."""
        self.facts.append(fact)
        self.commands.append(fact)

    def note_lengths(self, group: GroupRecord) -> None:
        """Let the lengths of a group count as evidence, because it is complete or dropped."""
        lengths = group_lengths(group)
        self.expectations.observed.add_group(lengths)
        self.expectations.note_prompts(group)
        self.in_flight.journal.note_lengths(lengths, self.expectations.remember(group))

    def note_work(self, engine: str) -> None:
        """Count the work of an engine up to now. To be called before the number of its open
        requests changes, and when it stops or continues."""
        control = self.fleet.control.engines.get(engine)
        if control is None:
            return
        health = self.fleet.health.of(engine)
        if health.at < self.now:  # many requests are sent at one instant
            works = control.mode in _WORKING and control.paused_elsewhere is None
            health.advance(self.now, self.in_flight.open[engine] if works else 0)

    @property
    def asynchronous(self) -> bool:
        """Whether generation goes on while the trainer trains, by the schedule in force."""
        return (self.plan.schedule.pace or self.config.pace) == "asynchronous"

    @property
    def placement(self) -> Placement:
        """Which engine a request goes to, by the settings or the schedule in force."""
        configured = self.config.dispatch.placement
        return self.plan.schedule.placement or "prefix" if configured == "auto" else configured

    @property
    def collecting(self) -> bool:
        """Whether a batch is in work that is not offered yet as a whole."""
        offer = self.delivery.offer
        return self.delivery.batch_requested and (offer is None or not offer.part.last)

    @property
    def offered_groups(self) -> int:
        """Number of groups in flight that are in the offered batch."""
        return 0 if self.delivery.offer is None else len(self.delivery.offer.groups)

    @property
    def open_groups(self) -> int:
        """Number of training groups of which something is still to be generated."""
        return self.in_flight.training - len(self.in_flight.ready) - self.offered_groups

    @property
    def begun(self) -> int:
        """Number of batches before the one in work: those that were taken and the one that is
        offered."""
        return self.in_flight.counters.batches + (self.offered_groups > 0)

    @property
    def batch_groups(self) -> int:
        """Number of groups that a batch is expected to take."""
        return self.stop.batch_groups(self.plan.usual_group)

    @property
    def ready_groups(self) -> int:
        """The complete groups, as a number of groups of the expected size."""
        return self.stop.as_groups(self.in_flight.ready, self.plan.usual_group)

    @property
    def given_up(self) -> bool:
        """Whether too many groups in a row failed or were refused to launch more."""
        retries = self.config.retries
        return (
            self.prompts.consecutive_failures >= retries.failed_groups
            or self.prompts.consecutive_rejections >= retries.rejected_groups
        )
