"""What a server logs of its decoding, and the windows of steps made of it.

A server writes a line every `steps` decode steps: who runs then, the cached tokens in use then,
and the tokens per second since the line before. Seconds follow from it: a window in which b
sequences run generates ``steps * b`` tokens, so it takes ``steps * b / tokens_per_s``. Where the
batch changed, b is the mean of the two lines; so is the context.

Invariants:
- A window has two lines of one engine, with decoding between them; ``kv`` is what its mean step
  reads.
- ``steady`` windows hold decoding only; ``stalled`` ones hold prefill passes as well. A window
  whose batch changed by more than :data:`MAX_CHANGE` is neither: its tokens are not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_CHANGE", "Floats", "LogLine", "Windows", "windows_of"]

Floats: TypeAlias = NDArray[np.float64]

MAX_CHANGE = 0.15
"""Of the larger of the two batches at a window's ends. Batches that shrink as their responses
end change by a few per cent a window; a new wave or an abort changes them at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """One line about decoding, and the prefill passes since the one before.

    Attributes:
        engine: whose line it is: a run's name, or a data-parallel rank.
        time: of day, as it was written.
        running: requests in the batch.
        kv: tokens of context in use.
        tokens_per_s: decoded since the line before, pauses included.
        passes: prefill passes since the line before.
        prefilled: tokens computed in them.
    """

    engine: str
    time: str
    running: int
    kv: int
    tokens_per_s: float
    passes: int = 0
    prefilled: int = 0


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Columns of equal length, one entry for each window.

    Attributes:
        engine: as in :class:`LogLine`.
        running: mean batch.
        kv: mean context tokens that a step reads.
        seconds: of the whole window.
        passes: prefill passes in it.
        prefilled: tokens computed in them.
        change: of the batch, as a share of the larger one.
        steps: decode steps in every window.
    """

    engine: NDArray[np.str_]
    running: Floats
    kv: Floats
    seconds: Floats
    passes: Floats
    prefilled: Floats
    change: Floats
    steps: int

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def steady(self) -> NDArray[np.bool_]:
        """Windows of decoding only."""
        return (self.passes == 0) & (self.change <= MAX_CHANGE)

    @property
    def stalled(self) -> NDArray[np.bool_]:
        """Windows with prefill passes."""
        return (self.passes > 0) & (self.change <= MAX_CHANGE)

    def where(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> Windows:
        """The chosen ones: a mask, or indices, which may repeat."""
        return Windows(
            engine=self.engine[chosen],
            running=self.running[chosen],
            kv=self.kv[chosen],
            seconds=self.seconds[chosen],
            passes=self.passes[chosen],
            prefilled=self.prefilled[chosen],
            change=self.change[chosen],
            steps=self.steps,
        )


def windows_of(lines: Sequence[LogLine], *, steps: int = 40) -> Windows:
    """The windows between the lines of each engine, in order; `steps` decode steps in each.

    Lines without throughput or context (an engine that has just emptied) end no window.
    """
    before: dict[str, LogLine] = {}
    pairs: list[tuple[LogLine, LogLine]] = []
    for line in lines:
        last = before.get(line.engine)
        before[line.engine] = line
        if last is not None and line.tokens_per_s > 0 and line.kv > 0 and line.running > 0:
            pairs.append((last, line))
    rows = np.array([_row(old, new, steps) for old, new in pairs]).reshape(-1, 6)
    running, kv, seconds, passes, prefilled, change = rows.T
    return Windows(
        engine=np.array([new.engine for _, new in pairs], dtype=np.str_),
        running=running,
        kv=kv,
        seconds=seconds,
        passes=passes,
        prefilled=prefilled,
        change=change,
        steps=steps,
    )


def _row(old: LogLine, new: LogLine, steps: int) -> tuple[float, ...]:
    running = (old.running + new.running) / 2
    # An unchanged batch grows by a token each step; one that changes, from one line to the other.
    grown = new.kv - (steps - 1) / 2 * new.running
    kv = grown if old.running == new.running and not new.passes else (old.kv + new.kv) / 2
    change = abs(new.running - old.running) / max(new.running, old.running)
    seconds = steps * running / new.tokens_per_s
    return running, kv, seconds, float(new.passes), float(new.prefilled), change
