"""Draws the trainer in a trace: what it waits for, the batches that it gets and the weights it
gives."""

from __future__ import annotations

from aprilsched.analysis.trace.bands import Bands
from aprilsched.analysis.trace.trace_file import TraceFile
from aprilsched.core.messages import facts as of
from aprilsched.core.messages.facts import Fact

__all__ = ["TrainerTrack"]

_PID = 1
_EVENTS = 100_001
_WAITS = 100_002
"""Ids of the trainer's tracks."""
_BATCH, _UPDATE = "waits for a batch", "updates the engines"


class TrainerTrack:
    """Takes every fact; those that are not about the trainer are ignored."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._began = False
        file.process(_PID, "trainer")
        file.track(_PID, _EVENTS, "batches and weights")
        self._waits = Bands(file, pid=_PID, first_tid=_WAITS, name="trainer")

    def take(self, fact: Fact, at: int) -> None:
        match fact:
            case of.RunOpened():
                if self._began:
                    self._instant("resumed", at)
                self._began = True
            case of.BatchRequested():
                self._waits.begin(_BATCH, at)
            case of.BatchRequestWithdrawn() | of.PromptsEnded():
                self._waits.end(_BATCH, at)
            case of.UpdateBegun():
                self._waits.begin(_UPDATE, at, version=fact.version)
            case of.BatchDelivered():
                self._waits.end(_BATCH, at)
                self._delivered(fact, at)
            case of.EvaluationDelivered():
                self._instant(f"evaluation {fact.evaluation_id}", at, rollouts=len(fact.rollouts))
            case of.UpdateFinished():
                self._waits.end(_UPDATE, at)
                self._updated(fact, at)
            case _:
                pass

    def end(self, at: int) -> None:
        """End a wait that has no result."""
        self._waits.end_all(at)

    def _delivered(self, fact: of.BatchDelivered, at: int) -> None:
        self._instant(
            f"batch {fact.batch}{' again' if fact.again else ''}",
            at,
            version=fact.version,
            rollouts=len(fact.rollouts),
            tokens=sum(rollout.tokens for rollout in fact.rollouts),
        )

    def _updated(self, fact: of.UpdateFinished, at: int) -> None:
        if fact.cause:
            self._instant(f"no update to v{fact.version}", at, cause=fact.cause)
        else:
            self._instant(f"weights v{fact.version}", at, version=fact.version)

    def _instant(self, name: str, at: int, **args: object) -> None:
        self._file.instant(pid=_PID, tid=_EVENTS, at=at, name=name, args=args, category="trainer")
