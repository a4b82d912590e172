"""The trainer in a trace: what it waits for, the batches that it gets and the weights it gives."""

from __future__ import annotations

from aprilsched.analysis.lines import Line
from aprilsched.analysis.trace.bands import Bands
from aprilsched.analysis.trace.trace_file import TraceFile

__all__ = ["TrainerTrack"]

_PID = 1
_EVENTS = 100_001
_WAITS = 100_002
"""Ids of its tracks."""
_BATCH, _UPDATE = "waits for a batch", "updates the engines"


class TrainerTrack:
    """Fed with every line; those that are not the trainer's are passed over."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        file.process(_PID, "trainer")
        file.track(_PID, _EVENTS, "batches and weights")
        self._waits = Bands(file, pid=_PID, first_tid=_WAITS, name="trainer")

    def tell(self, kind: str, line: Line, at: int) -> None:
        match kind:
            case "BatchRequested":
                self._waits.begin(_BATCH, at)
            case "BatchWithdrawn" | "EndOfPrompts":
                self._waits.end(_BATCH, at)
            case "UpdateRequested":
                self._waits.begin(_UPDATE, at, version=line.version)
            case "UpdateWithdrawn":
                self._waits.end(_UPDATE, at)
            case "Deliver" | "Redeliver":
                self._waits.end(_BATCH, at)
                self._delivered(kind, line, at)
            case "DeliverEvaluation":
                self._instant(f"evaluation {line.evaluation_id}", at, rollouts=len(line.rollouts))
            case "FinishUpdate":
                self._waits.end(_UPDATE, at)
                self._updated(line, at)
            case "Resumed":
                self._instant("resumed", at)
            case _:
                pass

    def end(self, at: int) -> None:
        """What it waits for it does not get any more."""
        self._waits.end_all(at)

    def _delivered(self, kind: str, line: Line, at: int) -> None:
        again = " again" if kind == "Redeliver" else ""
        self._instant(
            f"batch {line.batch}{again}",
            at,
            version=line.version,
            rollouts=len(line.rollouts),
            tokens=sum(rollout.tokens for rollout in line.rollouts),
        )

    def _updated(self, line: Line, at: int) -> None:
        if line.cause:
            self._instant(f"no update to v{line.version}", at, cause=line.cause)
        else:
            self._instant(f"weights v{line.version}", at, version=line.version)

    def _instant(self, name: str, at: int, **args: object) -> None:
        self._file.instant(pid=_PID, tid=_EVENTS, at=at, name=name, args=args, category="trainer")
