"""Everything a scheduler knows. The other modules of the core are functions on it."""

from __future__ import annotations

from collections import deque

from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.events import EvaluationRequested
from aprilsched.core.messages.facts import Fact
from aprilsched.core.policies.resume import place_of
from aprilsched.core.policies.schedule import Schedule, first_schedule
from aprilsched.core.rules import Rules
from aprilsched.core.state.engine_control import FleetControl, Mode
from aprilsched.core.state.engine_health import EngineHealth
from aprilsched.core.state.expectation import Expectations
from aprilsched.core.state.in_flight import InFlight
from aprilsched.core.state.journal import DeliveredBatch, Offered
from aprilsched.core.state.phases import Outage, Sleep, Update
from aprilsched.core.state.queues import DueGroups
from aprilsched.core.state.records import GroupRecord, group_lengths
from aprilsched.core.state.versions import PolicyVersionTracker
from aprilsched.types import Batch, Prompt, RefusedPrompt

__all__ = ["SchedulerState"]


class SchedulerState:
    """The state of one scheduler, and the commands that the event in work has given so far."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.expectations = Expectations()
        self.in_flight = InFlight(lambda r: place_of(r, rules.resume, self.expectations.remaining))
        self.weights.versions = PolicyVersionTracker()
        self.fleet.control = FleetControl(
            pause_mode=rules.behaviour.pause_mode(rules.kv),
            flushes=rules.kv == "recompute",
            tell=self.tell,
        )
        self.plan.schedule = (
            first_schedule(parks=rules.parks)
            if rules.automatic
            else Schedule(over_provision=rules.over_provision, refill=rules.refill)
        )
        """What is in force now."""
        self.plan.usual_group = rules.stop.amount / rules.batch_groups
        """What one group counts towards a batch, in the unit of the stop rule."""
        self.plan.target_groups = 0
        """Groups to keep open for the batch in work."""
        self.stragglers.run_on: dict[int, int] = {}
        """Requests that may run on although their batch is full, and to which length."""
        self.stragglers.calling_back: set[int] = set()
        """Requests that come back before the engines are paused."""
        self.stragglers.resolved = True
        """What becomes of the stragglers of this stop is decided."""
        self.plan.requested = False
        """A schedule has been asked for."""
        self.plan.planned_at = 0
        """Batches that had been delivered then."""
        self.plan.planned_for: float | None = None
        """The median length that was planned for."""
        self.plan.looked_at = 0
        """Batches that had been delivered when it was last asked whether a plan is due."""
        self.now = 0.0
        self.commands: list[Command] = []
        self.facts: list[Fact] = []
        """What the event in work has made true so far."""
        self.tells_tokens = False
        """Facts have the tokens themselves, and not only their number: a listener asks for them."""
        self.delivery.batch_requested = False
        """The trainer waits for a batch."""
        self.delivery.offer: Offered | None = None
        """The batch that the trainer may take, and has not yet."""
        self.plan.wave_due = rules.pace == "asynchronous"
        self.plan.round_due = False
        """The rollouts of the next round are to be chosen."""
        self.must_deliver = DueGroups(rules.staleness)
        self.delivery.batches_since_update = 0
        self.prompts.stock: deque[Prompt | RefusedPrompt] = deque()
        self.prompts.cursor = 0
        """Prompts of the source that were launched."""
        self.delivery.unacknowledged: dict[int, DeliveredBatch] = {}
        """Batches that the trainer may have to be given again, by index."""
        self.delivery.redelivery: deque[Batch] = deque()
        """Those of them that it has not been given since the run was resumed."""
        self.resumed = False
        """The run goes on where a former one ended."""
        self.prompts.fetching = False
        self.prompts.dry = False
        """What is being fetched is not there yet, and nobody knows when it will be."""
        self.prompts.exhausted = False
        self.prompts.consecutive_failures = 0
        """Groups dropped for a failure since the last one that was accepted."""
        self.weights.update: Update | None = None
        self.weights.republishable = False
        """The fleet's version can be published again."""
        self.weights.base = 0
        """The last version that was no adapter."""
        self.weights.adapter: int | None = None
        """The version of the adapter that new requests sample with."""
        self.weights.adapters: dict[str, set[int]] = {}
        """Adapters loaded on each engine."""
        self.sleep: Sleep | None = None
        self.fleet.sends = 0
        """Attempts that were sent."""
        self.fleet.health = EngineHealth()
        self.fleet.outage: Outage | None = None
        self.fleet.lost: dict[str, str] = {}
        """Engines that were lost last and are not back, with causes."""
        self.fleet.hoped_until = 0.0
        """While none is in use, another may come back with the fleet's version until then."""
        self.evaluations.running: dict[int, list[GroupRecord]] = {}
        """Groups of the evaluations under way, in the order of their prompts."""
        self.evaluations.waiting: list[EvaluationRequested] = []
        """Evaluations that were asked for during an update and begin after it."""

    def tell(self, fact: Fact) -> None:
        """Something has come true in the event in work."""
        self.facts.append(fact)

    def note_lengths(self, group: GroupRecord) -> None:
        """The group has ended, complete or dropped: its lengths are evidence for others'."""
        lengths = group_lengths(group)
        self.expectations.observed.add_group(lengths)
        self.in_flight.journal.note_lengths(lengths)

    def note_work(self, engine: str) -> None:
        """The number of its open requests is about to change, or it stopped or went on."""
        control = self.fleet.control.engines.get(engine)
        if control is not None:
            works = control.mode in (Mode.RUNNING, Mode.PAUSING, Mode.VERIFYING)
            self.fleet.health.of(engine).advance(
                self.now, self.in_flight.open[engine] if works else 0
            )

    @property
    def collecting(self) -> bool:
        """The trainer waits for a batch that is not there yet."""
        return self.delivery.batch_requested and self.delivery.offer is None

    @property
    def offered_groups(self) -> int:
        """Groups in flight that are in the batch that is offered."""
        return 0 if self.delivery.offer is None else len(self.delivery.offer.groups)

    @property
    def begun(self) -> int:
        """Batches before the one in work: those that were taken, and the one that is offered."""
        return self.in_flight.counters.batches + (self.offered_groups > 0)

    @property
    def usual_running(self) -> float:
        """Rollouts that generate together in the mean of a batch, about: half of those launched
        run to its end."""
        return self.plan.target_groups * self.rules.group_size / 2

    @property
    def batch_groups(self) -> int:
        """Groups that a batch takes, as far as is known."""
        return self.rules.stop.batch_groups(self.plan.usual_group)

    @property
    def ready_groups(self) -> int:
        """The complete groups, counted as usual ones."""
        return self.rules.stop.as_groups(self.in_flight.ready, self.plan.usual_group)

    @property
    def given_up(self) -> bool:
        """So many groups failed in a row that nothing new is launched."""
        return self.prompts.consecutive_failures >= self.rules.max_failed_groups

    @property
    def asynchronous(self) -> bool:
        return self.rules.pace == "asynchronous"
