"""The state of a run, computed from its facts, for everything that shows or exports the run.

:class:`RunState` receives the facts of a run in progress or of an event log, with the same result.
It passes them on to three listeners: of the rollouts, of the trainer, and of the engines' time. The
summary, the live view, the metrics, the trackers and the report read the state here, and compute
only figures that no other reader needs.

A second :class:`~aprilsched.kernel.core.messages.facts.RunOpened` comes from a process that resumes
the run. Everything in flight is then gone, except for groups that are launched as restored
afterwards. Tokens that were generated and lost stay counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from aprilsched.kernel.core.lengths.observed import GroupLengths
from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.shell.listener import TokenChunks
from aprilsched.observe.figures.engine_time import PARTS, EngineTime, Part, Recording
from aprilsched.observe.figures.rollouts_now import RolloutsNow
from aprilsched.observe.figures.trainer_now import TrainerNow

_OF_NO_CAUSE = frozenset({of.AttemptEnded, of.AttemptSent, of.TokensReceived})
"""Kinds of facts that cannot change why slots are free; most facts are of these kinds."""


class RunState:
    """A listener that keeps the state of a run up to date.

    Args:
        batch_units: number of groups, or of single samples, per batch: the `batch_units` of the
            scheduler's configuration. None takes it from the first delivered batch.
        recording: receives each stretch of each engine's time.

    Attributes:
        now: time of the last fact, in seconds.
        opened_at: time at which the first process opened the run; None before.
        counters: counts since the start of the run.
        ledger: rollouts and tokens by reason.
        rollouts: the rollouts in flight, by id.
        groups: the groups in flight, by id.
        outside: the episodes without a request at an engine, and what they wait for.
        engines: the engines and their time by part, by name, in the order of joining.
        attempts: the open attempts, by the id of their request.
    """

    def __init__(
        self, *, batch_units: int | None = None, recording: Recording | None = None
    ) -> None:
        self.now = 0.0
        self.opened_at: float | None = None
        self._rollouts = RolloutsNow()
        self._trainer = TrainerNow(batch_units)
        self._time = EngineTime(recording)
        self.counters, self.ledger = self._rollouts.counters, self._rollouts.ledger
        self.rollouts, self.groups = self._rollouts.rollouts, self._rollouts.groups
        self.outside = self._rollouts.outside
        self.engines, self.attempts = self._time.engines, self._time.attempts

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        self.now = now
        may_differ = False
        for fact in facts:
            kind = fact.__class__
            if isinstance(fact, of.TokensReceived):
                self.on_tokens([(fact, now)], now)
                continue
            if kind is of.RunOpened and self.opened_at is None:
                self.opened_at = now
            for listener in (self._rollouts, self._trainer, self._time):
                listener.hear(fact, now)
            may_differ |= kind not in _OF_NO_CAUSE
        if may_differ:
            free = self._trainer.free_for(self._rollouts)
            self._time.wait_for(free, self._trainer.paused_for(), len(self._rollouts.outside))

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        # The most frequent kind of fact, so one loop handles it without a call per fact.
        attempts, rollouts, counters = self.attempts, self.rollouts, self.counters
        generated = 0
        for fact, at in chunks:
            tokens = fact.tokens
            generated += tokens
            if fact.recomputed:
                counters.tokens_reprefilled += fact.recomputed
            attempt = attempts.get(fact.request_id)
            if attempt is None:
                continue
            attempt.context += tokens
            attempt.engine.tokens += tokens
            rollout = rollouts.get(attempt.rollout_id)
            if rollout is not None:
                rollout.sampled += tokens
            elif fact.dropped is not None:
                counters.tokens_discarded += tokens
                self.ledger.late_tokens(Reason(fact.dropped), tokens)
            if attempt.watched:
                self._time.watch(attempt, fact, at)
        counters.tokens_generated += generated
        self.now = now

    def advance(self, now: float) -> None:
        """Count the engines' time up to `now`, a time on the clock of the facts."""
        self._time.advance(now)

    @property
    def version(self) -> int:
        """Policy version of the fleet."""
        return self._trainer.version

    @property
    def batches(self) -> int:
        """Number of batches that the trainer has received."""
        return self._rollouts.batches

    @property
    def units_ready(self) -> int:
        """Number of accepted groups, or single samples, that wait for their batch."""
        return self._rollouts.ready

    @property
    def delivers(self) -> Literal["groups", "samples"]:
        """The units of which batches are made."""
        return "groups" if self._rollouts.siblings is None else "samples"

    def seconds(self) -> dict[Part, float]:
        """Return the seconds of all engines together, by part."""
        columns = zip(*(engine.seconds for engine in self.engines.values()), strict=True)
        sums = [sum(column) for column in columns] or [0.0] * len(PARTS)
        return dict(zip(PARTS, sums, strict=True))

    def decoding(self) -> Iterable[int]:
        """Ids of the rollouts whose response is being decoded now."""
        return self._time.decoding()

    def open_groups(self) -> list[GroupLengths]:
        """Return the lengths so far of the responses of each training group in flight."""
        return self._rollouts.open_groups()

    def lengths_of(self, group_id: int) -> GroupLengths:
        """Return the lengths so far of the responses of a group in flight."""
        return self._rollouts.lengths_of(group_id)
