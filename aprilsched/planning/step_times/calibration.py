"""Fits a :class:`~aprilsched.planning.step_times.model.StepTimeModel` to windows of steps, with
errors.

Terms beyond the linear ones are chosen by cross-validation, the fewest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np

from aprilsched.errors import ConfigError
from aprilsched.planning.step_times.acceptance import acceptance_of
from aprilsched.planning.step_times.least_squares import robust
from aprilsched.planning.step_times.model import H200_QWEN3_4B, StepTimeModel, share_of_experts
from aprilsched.planning.step_times.server_log import Floats, Windows

BLOCK = 10
"""Number of neighbouring windows, which share their sequences, that a bootstrap draws together."""
_LEAST_WINDOWS = 20
_LINEAR = ("t0", "t1", "t2")
_MORE = ("t0_wide", "t0_experts")
_PREFILL = ("prefill_pass", "prefill_rate")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fitted model, its standard errors and its residuals.

    Attributes:
        model: the model with the fitted parameters.
        errors: standard errors of the fitted coefficients, for the given `fill` and `wide_from`.
        assumed: names of the parameters that the windows do not determine.
        steady: residuals of windows of decoding only.
        stalled: residuals of windows with prefill passes; None if there are none.
        ignored: number of windows whose batch changed too much.
    """

    model: StepTimeModel
    errors: Mapping[str, float]
    assumed: tuple[str, ...]
    steady: Residuals
    stalled: Residuals | None
    ignored: int


def fit(
    windows: Windows,
    *,
    linear: bool = False,
    assumed: StepTimeModel = H200_QWEN3_4B,
    replicates: int = 200,
    seed: int = 0,
) -> Fit:
    """Fit a model to `windows`.

    Args:
        windows: windows of one engine, or of several equal ones.
        linear: fit no terms beyond t0, t1 and t2.
        assumed: model that gives the parameters that the windows do not determine.
        replicates: number of bootstrap draws of blocks of windows; at least 2.
        seed: seed of the bootstrap.

    Raises:
        ConfigError: if there are fewer than 20 steady windows.
    """
    used = windows.where(windows.steady | windows.stalled)
    steady, stalled = used.where(used.steady), used.where(used.stalled)
    if len(steady) < _LEAST_WINDOWS:
        raise ConfigError(
            f"{len(steady)} windows of undisturbed decoding are too few; "
            f"give a log with at least {_LEAST_WINDOWS}."
        )
    shape = LINEAR if linear else choose_shape(used)
    model, missing = _model(shape, used, assumed)
    rng = np.random.default_rng(seed)
    draws = [_model(shape, _resampled(used, rng), model)[0] for _ in range(replicates)]
    return Fit(
        model=model,
        errors=_errors(draws, shape, missing),
        assumed=missing,
        steady=residuals_of(steady, predicted_seconds(model, steady)),
        stalled=residuals_of(stalled, predicted_seconds(model, stalled)) if len(stalled) else None,
        ignored=len(windows) - len(used),
    )


def predicted_seconds(model: StepTimeModel, windows: Windows) -> Floats:
    """Return the seconds that the model predicts for each window, float64 [windows]."""
    step = [model.step_seconds(b, kv) for b, kv in zip(windows.running, windows.kv, strict=True)]
    passes = windows.passes * model.prefill_pass + windows.prefilled / model.prefill_rate
    return windows.steps * np.array(step, dtype=np.float64) + passes


def _model(
    shape: Shape, windows: Windows, assumed: StepTimeModel
) -> tuple[StepTimeModel, tuple[str, ...]]:
    x = robust(shape.window_rows(windows), windows.seconds)
    each_pass, each_token = x[-2:]
    found = dict.fromkeys(_MORE, 0.0) | dict(zip(shape.names, map(float, x), strict=False))
    model = replace(
        assumed,
        fill=shape.fill,
        wide_from=shape.wide_from or 0,
        expert_share=shape.expert_share,
        tokens_per_step=acceptance_of(windows.running, windows.accepted),
        **found,
    )
    if not windows.stalled.any():
        return model, _PREFILL
    model = replace(model, prefill_pass=float(each_pass))
    if each_token <= 0:
        return model, ("prefill_rate",)
    return replace(model, prefill_rate=float(1 / each_token)), ()


def _resampled(windows: Windows, rng: np.random.Generator) -> Windows:
    """Return the same number of windows, drawn with replacement in blocks of neighbours."""
    count = len(windows)
    starts = rng.integers(0, max(1, count - BLOCK + 1), -(-count // BLOCK))
    chosen = (starts[:, None] + np.arange(BLOCK)).ravel()[:count]
    return windows.where(np.minimum(chosen, count - 1))


def _errors(draws: list[StepTimeModel], shape: Shape, missing: tuple[str, ...]) -> dict[str, float]:
    names = [name for name in (*shape.names, *_PREFILL) if name not in missing]
    return {name: float(np.std([getattr(d, name) for d in draws], ddof=1)) for name in names}


WITHIN = 0.05
_FOLDS = 12
_OUTLIER = 0.10
_ROUNDS = 8
_FILLS = (4.0, 6.0, 8.0, 9.0, 10.0, 12.0, 16.0)
_SHARES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4)
_WIDE = (64, 128, 192, 256, 320, 384)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The part of a :class:`~aprilsched.planning.step_times.model.StepTimeModel` that is not a
    coefficient.

    Attributes:
        fill: `fill` of the model.
        wide_from: `wide_from` of the model; None without the term of wide batches.
        expert_share: `expert_share` of the model; 0 without the term of experts.
    """

    fill: float = 0.0
    wide_from: int | None = None
    expert_share: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """The coefficients of decoding."""
        there = (self.wide_from is not None, self.expert_share > 0)
        return _LINEAR + tuple(compress(_MORE, there))

    def step_rows(self, running: Floats, kv: Floats) -> Floats:
        """Return the factors of the coefficients of decoding: [windows, 3 to 5]."""
        read = kv * np.maximum(1.0, self.fill / np.maximum(running, 1.0))
        columns = [np.ones_like(running), running, read]
        if self.wide_from is not None:
            columns.append((running > self.wide_from).astype(np.float64))
        if self.expert_share:
            columns.append(share_of_experts(self.expert_share, running))
        return np.stack(columns, axis=1)

    def window_rows(self, windows: Windows) -> Floats:
        """The factors for the seconds of whole windows; the last two are of passes and tokens."""
        steps = (windows.steps / windows.accepted)[:, None] * self.step_rows(
            windows.running, windows.kv
        )
        return np.column_stack([steps, windows.passes, windows.prefilled])


LINEAR = Shape()


def choose_shape(windows: Windows) -> Shape:
    """Return the simplest shape that is nearly the best on left-out stretches of `windows`."""
    wide = _wide(windows.running)
    kinds: list[list[Shape]] = [
        [LINEAR],
        [Shape(fill=fill) for fill in _FILLS],
        [Shape(wide_from=start) for start in wide],
        [Shape(expert_share=share) for share in _SHARES],
        [Shape(fill=fill, wide_from=start) for fill in _FILLS for start in wide],
    ]
    losses = [_held_out_loss(kind, windows) for kind in kinds]
    good = (1 + WITHIN) * min(losses)
    kind = next(kind for kind, loss in zip(kinds, losses, strict=True) if loss <= good)
    return _best(kind, windows)


def _wide(running: Floats) -> Sequence[int]:
    """Values of `wide_from` with at least a tenth of the windows above and a tenth below."""
    return [start for start in _WIDE if 0.1 <= (running > start).mean() <= 0.9]


def _best(shapes: Sequence[Shape], windows: Windows) -> Shape:
    return min(shapes, key=lambda shape: _loss(shape, windows, windows), default=LINEAR)


def _held_out_loss(shapes: Sequence[Shape], windows: Windows) -> float:
    """Mean loss over the folds: on each fold, of the shape that is best without that fold."""
    if not shapes:
        return np.inf
    folds = list(_folds(len(windows)))
    losses = [
        _loss(_best(shapes, windows.where(rest)), windows.where(rest), windows.where(left_out))
        for left_out, rest in folds
    ]
    return float(np.mean(losses))


def _loss(shape: Shape, fitted: Windows, tested: Windows) -> float:
    """Mean relative error on `tested`, each at most :data:`_OUTLIER`, after a fit to `fitted`."""
    x = robust(shape.window_rows(fitted), fitted.seconds, rounds=_ROUNDS)
    error = np.abs(shape.window_rows(tested) @ x / tested.seconds - 1)
    return float(np.minimum(error, _OUTLIER).mean())


def _folds(count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Folds are stretches of neighbours, because neighbouring windows have the same sequences."""
    for left_out in np.array_split(np.arange(count), _FOLDS):
        yield left_out, np.setdiff1d(np.arange(count), left_out)


@dataclass(frozen=True, kw_only=True, slots=True)
class Residuals:
    """Relative errors of predicted seconds.

    Attributes:
        windows: number of windows.
        median: median of the absolute error.
        p90: 90th percentile of the absolute error.
        total: sum of the predicted seconds divided by the sum of the measured ones.
    """

    windows: int
    median: float
    p90: float
    total: float


def residuals_of(windows: Windows, predicted: Floats) -> Residuals:
    """Compare `predicted` seconds, one for each window, with the measured ones."""
    error = predicted / windows.seconds - 1
    return Residuals(
        windows=len(error),
        median=float(np.median(np.abs(error))),
        p90=float(np.percentile(np.abs(error), 90)),
        total=float(predicted.sum() / windows.seconds.sum()),
    )
