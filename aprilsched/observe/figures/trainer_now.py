"""The open calls of the trainer and of the prompt source: why engines have nothing to do."""

from __future__ import annotations

from typing import Literal

from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.shell.listener import DispatchingListener
from aprilsched.observe.figures.engine_time import Cause
from aprilsched.observe.figures.rollouts_now import RolloutsNow


class TrainerNow(DispatchingListener):
    """Keeps what the trainer waits for.

    Args:
        batch_groups: number of groups per batch; None takes it from the first delivered batch, and
            so do runs that deliver samples.

    Attributes:
        version: policy version of the fleet.
    """

    def __init__(self, batch_groups: int | None) -> None:
        super().__init__()
        self.version = 0
        self._batch_groups = batch_groups
        self._delivered = False
        self._waits = False
        self._offered = False
        """Whether the batch that the trainer waits for is complete and offered."""
        self._updating = False
        self._evaluations: set[int] = set()
        self._fetching = False
        """Whether requested prompts are pending."""
        self._prompts_ended = False
        self._launches_unasked = False
        """Whether a group was launched while the trainer was not waiting for a batch, since the
        last change of pace. This happens only at the asynchronous pace, so it identifies the pace.
        An engine's mode does not: at the synchronous pace, an idle engine is not even paused while
        the trainer trains."""
        self._handlers = {
            of.RunOpened: self._run_opened,
            of.BatchRequested: lambda _: self._wait(True),
            of.PromptsEnded: lambda _: self._wait(False),
            of.SampleReady: self._sample_ready,
            of.BatchOffered: lambda _: self._offer(True),
            of.OfferWithdrawn: lambda _: self._offer(False),
            of.BatchDelivered: self._batch_delivered,
            of.EvaluationRequested: lambda fact: self._evaluations.add(fact.evaluation_id),
            of.EvaluationWithdrawn: lambda fact: self._evaluations.discard(fact.evaluation_id),
            of.EvaluationDelivered: lambda fact: self._evaluations.discard(fact.evaluation_id),
            of.UpdateWanted: self._update_wanted,
            of.UpdateBegun: lambda _: self._update(True),
            of.UpdateFinished: self._update_finished,
            of.ScheduleChanged: self._schedule_changed,
            of.PromptsRequested: self._prompts_requested,
            of.PromptsReceived: self._prompts_received,
            of.GroupLaunched: self._group_launched,
        }

    def free_for(self, rollouts: RolloutsNow) -> Cause:
        """Return why an engine that generates has free slots."""
        wanted = self._wanted or bool(self._evaluations)
        if not wanted and not self._launches_unasked:
            return "trainer"
        if self._fetching or self._prompts_ended:
            return "prompts"
        full = self._batch_groups
        if wanted:
            short = full is not None and rollouts.ready < full <= rollouts.generated
            return "rewards" if short else "tail"
        # While the batch size is unknown, a batch counts as full once every response has ended.
        if full is None:
            return "tail" if rollouts.generated < rollouts.training else "trainer"
        if rollouts.ready >= full or not rollouts.training:
            return "trainer"
        return "rewards" if rollouts.generated >= full else "tail"

    def paused_for(self) -> Literal["pause", "trainer"]:
        """Return why an engine is paused while no weights are loaded."""
        return "pause" if self._wanted or self._updating or self._evaluations else "trainer"

    @property
    def _wanted(self) -> bool:
        """Return whether the trainer waits for an incomplete batch. An offered batch waits for the
        trainer or the store, and needs no work from the engines."""
        return self._waits and not self._offered

    def _run_opened(self, fact: of.RunOpened) -> None:
        self.version = max(self.version, fact.version)
        self._waits = self._offered = self._updating = False
        self._fetching = self._prompts_ended = False
        self._evaluations.clear()

    def _wait(self, waits: bool) -> None:
        self._waits = waits

    def _offer(self, offered: bool) -> None:
        self._offered = offered

    def _sample_ready(self, _: of.SampleReady) -> None:
        # Its batches have samples, whose number is not known before the first one.
        if not self._delivered:
            self._batch_groups = None

    def _batch_delivered(self, fact: of.BatchDelivered) -> None:
        self._waits = self._offered = False
        self._delivered = True
        self._batch_groups = len(of.unit_ids(fact.rollouts))

    def _update_wanted(self, fact: of.UpdateWanted) -> None:
        self._evaluations.difference_update(fact.evaluations)
        if fact.batch:
            self._waits = False

    def _update(self, updating: bool) -> None:
        self._updating = updating

    def _update_finished(self, fact: of.UpdateFinished) -> None:
        self._updating = False
        if not fact.cause:
            self.version = fact.version

    def _schedule_changed(self, fact: of.ScheduleChanged) -> None:
        if fact.pace is not None:
            self._launches_unasked = fact.pace == "asynchronous"

    def _prompts_requested(self, _: of.PromptsRequested) -> None:
        self._launches_unasked |= not self._wanted
        self._fetching = True

    def _prompts_received(self, fact: of.PromptsReceived) -> None:
        self._fetching = fact.partial
        self._prompts_ended = self._prompts_ended or fact.last

    def _group_launched(self, fact: of.GroupLaunched) -> None:
        if fact.evaluation_id is None and fact.restored is None:
            self._launches_unasked |= not self._wanted
