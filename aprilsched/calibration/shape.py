"""Which terms a model has beyond the linear ones: fewest first, chosen by cross-validation.

``fill`` and ``wide_from`` enter the step time non-linearly, so they are searched on a grid; the
rest is linear once they are known. A term has to earn its place: the simplest shape is kept
whose error on windows left out is within :data:`WITHIN` of the best one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from aprilsched.calibration.least_squares import robust
from aprilsched.calibration.records import Floats, Windows

__all__ = ["LINEAR", "WITHIN", "Shape", "choose_shape"]

WITHIN = 0.05
_FOLDS = 12
_OUTLIER = 0.10
_ROUNDS = 8
_FILLS = (4.0, 6.0, 8.0, 9.0, 10.0, 12.0, 16.0)
_WIDE = (64, 128, 192, 256, 320, 384)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The part of a :class:`~aprilsched.timing.StepTimeModel` that is no coefficient.

    Attributes:
        fill: as there.
        wide_from: as there; None without the term.
    """

    fill: float = 0.0
    wide_from: int | None = None

    def step_rows(self, running: Floats, kv: Floats) -> Floats:
        """What t0, t1, t2 and, with the term, t0_wide are multiplied by: [windows, 3 or 4]."""
        read = kv * np.maximum(1.0, self.fill / np.maximum(running, 1.0))
        columns = [np.ones_like(running), running, read]
        if self.wide_from is not None:
            columns.append((running > self.wide_from).astype(np.float64))
        return np.stack(columns, axis=1)

    def window_rows(self, windows: Windows) -> Floats:
        """The same for the seconds of whole windows, and then those of a pass and of a token."""
        steps = windows.steps * self.step_rows(windows.running, windows.kv)
        return np.column_stack([steps, windows.passes, windows.prefilled])


LINEAR = Shape()


def choose_shape(windows: Windows) -> Shape:
    """The simplest shape that is nearly the best on left-out stretches of `windows`."""
    wide = _wide(windows.running)
    kinds: list[list[Shape]] = [
        [LINEAR],
        [Shape(fill=fill) for fill in _FILLS],
        [Shape(wide_from=start) for start in wide],
        [Shape(fill=fill, wide_from=start) for fill in _FILLS for start in wide],
    ]
    losses = [_held_out_loss(kind, windows) for kind in kinds]
    good = (1 + WITHIN) * min(losses)
    kind = next(kind for kind, loss in zip(kinds, losses, strict=True) if loss <= good)
    return _best(kind, windows)


def _wide(running: Floats) -> Sequence[int]:
    """Starts with at least a tenth of the windows above, and a tenth below."""
    return [start for start in _WIDE if 0.1 <= (running > start).mean() <= 0.9]


def _best(shapes: Sequence[Shape], windows: Windows) -> Shape:
    return min(shapes, key=lambda shape: _loss(shape, windows, windows), default=LINEAR)


def _held_out_loss(shapes: Sequence[Shape], windows: Windows) -> float:
    """Mean loss on each fold of the best of `shapes` without that fold."""
    if not shapes:
        return np.inf
    folds = list(_folds(len(windows)))
    losses = [
        _loss(_best(shapes, windows.where(rest)), windows.where(rest), windows.where(left_out))
        for left_out, rest in folds
    ]
    return float(np.mean(losses))


def _loss(shape: Shape, fitted: Windows, tested: Windows) -> float:
    """Mean relative error on `tested`, each at most :data:`_OUTLIER`, as fitted on `fitted`."""
    x = robust(shape.window_rows(fitted), fitted.seconds, rounds=_ROUNDS)
    error = np.abs(shape.window_rows(tested) @ x / tested.seconds - 1)
    return float(np.minimum(error, _OUTLIER).mean())


def _folds(count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Stretches of neighbours, because neighbouring windows have the same sequences."""
    for left_out in np.array_split(np.arange(count), _FOLDS):
        yield left_out, np.setdiff1d(np.arange(count), left_out)
