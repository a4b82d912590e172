"""From windows to a :class:`~aprilsched.timing.StepTimeModel`, with errors and residuals.

A window takes ``steps * t(running, kv) + passes * prefill_pass + prefilled / prefill_rate``.
Steady windows (no passes) tell the first part, windows with passes what they take beyond it; both
are one system, solved by robust non-negative least squares.

Invariants:
- Every parameter is at least 0; the rate is above 0.
- Parameters that the windows cannot tell are those of the assumed model, and are named in
  ``assumed``.
- The same windows and seed give the same figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from aprilsched.calibration.least_squares import robust
from aprilsched.calibration.records import Floats, Windows
from aprilsched.calibration.residuals import Residuals, residuals_of
from aprilsched.calibration.shape import LINEAR, Shape, choose_shape
from aprilsched.errors import ConfigError
from aprilsched.timing import H200_QWEN3_4B, StepTimeModel

__all__ = ["BLOCK", "Fit", "fit", "predicted_seconds"]

BLOCK = 10
"""Neighbouring windows drawn together for the standard errors: they share their sequences."""
_LEAST_WINDOWS = 20
_DECODING = ("t0", "t1", "t2", "t0_wide")
_PREFILL = ("prefill_pass", "prefill_rate")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A model, how sure it is, and where it misses.

    Attributes:
        model: with the fitted parameters.
        errors: standard errors of fitted coefficients, given the shape (`fill`, `wide_from`).
        assumed: parameters that the windows do not tell.
        steady: how steady windows are met.
        stalled: how windows with prefill passes are met; None without any.
        ignored: windows whose batch changed too much.
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
        windows: of one engine or of several alike.
        linear: no terms beyond t0, t1 and t2.
        assumed: where parameters come from that the windows cannot tell.
        replicates: of the bootstrap over blocks of windows; at least 2.
        seed: of the bootstrap.

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
    """What the model says each window takes, float64 [windows]."""
    step = [model.step_seconds(b, kv) for b, kv in zip(windows.running, windows.kv, strict=True)]
    passes = windows.passes * model.prefill_pass + windows.prefilled / model.prefill_rate
    return windows.steps * np.array(step, dtype=np.float64) + passes


def _model(
    shape: Shape, windows: Windows, assumed: StepTimeModel
) -> tuple[StepTimeModel, tuple[str, ...]]:
    x = robust(shape.window_rows(windows), windows.seconds)
    each_pass, each_token = x[-2:]
    model = replace(
        assumed,
        t0=float(x[0]),
        t1=float(x[1]),
        t2=float(x[2]),
        fill=shape.fill,
        wide_from=shape.wide_from or 0,
        t0_wide=0.0 if shape.wide_from is None else float(x[3]),
    )
    if not windows.stalled.any():
        return model, _PREFILL
    model = replace(model, prefill_pass=float(each_pass))
    if each_token <= 0:
        return model, ("prefill_rate",)
    return replace(model, prefill_rate=float(1 / each_token)), ()


def _resampled(windows: Windows, rng: np.random.Generator) -> Windows:
    """As many windows, drawn in blocks of neighbours with replacement."""
    count = len(windows)
    starts = rng.integers(0, max(1, count - BLOCK + 1), -(-count // BLOCK))
    chosen = (starts[:, None] + np.arange(BLOCK)).ravel()[:count]
    return windows.where(np.minimum(chosen, count - 1))


def _errors(draws: list[StepTimeModel], shape: Shape, missing: tuple[str, ...]) -> dict[str, float]:
    decoding = _DECODING if shape.wide_from is not None else _DECODING[:3]
    names = [name for name in (*decoding, *_PREFILL) if name not in missing]
    return {name: float(np.std([getattr(d, name) for d in draws], ddof=1)) for name in names}
