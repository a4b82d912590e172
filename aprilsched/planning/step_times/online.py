"""Fits the model to the running engines: robust least squares with forgetting.

The shape of the model (``fill``, ``wide_from``, ``expert_share``, the chunk) is the prior's. The
coefficients are fitted to the latest observations, whose weight decreases with their age.
Everything is relative: a row holds the share of each coefficient in the measured time, in units of
the prior, so that the rows of decoding add up to 1 and one weight suits all.

Invariants:
- No coefficient is ever negative, and one that is 0 in the prior stays 0.
- Observations that are further from the others than most count the less for it, so an engine that
  was disturbed in some of its windows has the model of the others.
- With fewer than `LEAST` observations the model is the prior: of two it is unknown which one was
  disturbed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from aprilsched.errors import ConfigError
from aprilsched.planning.step_times.model import StepTimeModel, share_of_experts
from aprilsched.planning.step_times.server_log import Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What an engine did in a stretch of time.

    Attributes:
        running: mean batch of its decode steps.
        kv_tokens: mean number of context tokens that a step read.
        seconds_per_step: `seconds` divided by the number of decode steps.
        seconds: duration of the stretch, prefill passes included.
        prefill_passes: number of prefill passes in the stretch.
        prefilled_tokens: number of tokens that those passes computed.
    """

    running: float
    kv_tokens: float
    seconds_per_step: float
    seconds: float
    prefill_passes: int = 0
    prefilled_tokens: int = 0


LEAST = 3
"""Number of observations with which the model leaves the prior."""
_FASTER = 4.0
"""An observation that seems to be faster than the model by more counts as faster by this factor.
Errors are shares of the measured time, so one of no time at all would outweigh all others."""


class OnlineFit:
    """A model that follows the observations.

    Engines that are very unlike the prior have their own model after their first batch. On the log
    of a mixture of experts, whose steps are up to three times as long as those of the prior, steps
    are off by 8 % after 20 windows and by 1 % after 40. It was 18 and 11 % when each window could
    move the model by a tenth at most.

    Args:
        prior: model at which the fit starts, and which it keeps where nothing is observed.
        prior_weight: weight of each coefficient of the prior, in windows; it does not decrease.
        memory: number of windows after which an observation has the weight 1/e. After twice as many
            it is forgotten.

    Raises:
        ConfigError: if a number is not above 0.
    """

    def __init__(
        self, prior: StepTimeModel, *, prior_weight: float = 0.03, memory: int = 200
    ) -> None:
        for name, value in (("prior_weight", prior_weight), ("memory", memory)):
            if not value > 0:
                raise ConfigError(f"{name} is {value}; give a number above 0.")
        self._prior = prior
        self._prior_weight = prior_weight
        self._memory = memory
        self._units = _coefficients(prior)
        self._shares = np.ones(len(self._units))
        self._rows: deque[Floats] = deque(maxlen=2 * memory)
        self._model: StepTimeModel | None = prior
        self.windows = 0
        """Number of observations that counted."""

    def observe(self, seen: Observation) -> None:
        """Add one observation; it is ignored if it has no time or steps, or is not finite."""
        usable = np.isfinite(seen.seconds) and seen.seconds > 0
        if usable and seen.running > 0 and 0 < seen.seconds_per_step <= seen.seconds:
            row = self._row(seen)
            least = float(row @ self._shares) / _FASTER
            self._rows.append(row / max(seen.seconds, least))
            self._model = None
            self.windows += 1

    @property
    def model(self) -> StepTimeModel:
        """The model of all observations so far; after a new one it takes milliseconds."""
        if self._model is None:
            self._model = self._fitted()
        return self._model

    def _row(self, seen: Observation) -> Floats:
        """The seconds that each coefficient of the prior contributes to the observation."""
        steps, model = seen.seconds / seen.seconds_per_step, self._prior
        read = seen.kv_tokens * max(1.0, model.fill / max(seen.running, 1.0))
        wide = float(seen.running > model.wide_from)
        experts = share_of_experts(model.expert_share, seen.running)
        decoding = steps * np.array([1.0, seen.running, read, wide, experts])
        passes = [float(seen.prefill_passes), float(seen.prefilled_tokens)]
        return np.concatenate([decoding, passes]) * self._units

    def _fitted(self) -> StepTimeModel:
        count, prior = len(self._rows), np.eye(len(self._units))
        if count < LEAST:
            return self._prior
        # The prior is an observation of each coefficient alone.
        rows = np.concatenate([np.array(self._rows), prior])
        ages = np.arange(count)[::-1]
        weights = np.append(np.exp(-ages / self._memory), np.full(len(prior), self._prior_weight))
        self._shares = robust(rows, np.ones(len(rows)), weights=weights)
        found = map(float, self._shares * self._units)
        t0, t1, t2, t0_wide, t0_experts, each_pass, each_token = found
        return replace(
            self._prior,
            t0=t0,
            t1=t1,
            t2=t2,
            t0_wide=t0_wide,
            t0_experts=t0_experts,
            prefill_pass=each_pass,
            prefill_rate=1 / each_token if each_token > 0 else np.inf,
        )


def _coefficients(model: StepTimeModel) -> Floats:
    """The coefficients: seconds of a step, sequence, context token, wide step, all experts, pass
    and token."""
    decoding = [model.t0, model.t1, model.t2, model.t0_wide, model.t0_experts]
    return np.array([*decoding, model.prefill_pass, 1 / model.prefill_rate])


# --- least squares -------------------------------------------------------------------------------

# Least squares with non-negative coefficients, robust against windows that were disturbed.
#
# Errors are relative, because a disturbance changes a window's time in proportion: rows are
# divided by what was measured, and the target is 1.

_TUNING = 1.345
_EXCHANGES = 20
_SLOPE = 1e-12
_MAD_TO_SIGMA = 1.4826
_LEAST_SCALE = 1e-4


def nonnegative(gram: Floats, moment: Floats) -> Floats:
    """The x >= 0 that minimizes ``x @ gram @ x / 2 - moment @ x``, float64 [n].

    With ``gram = A.T @ A`` and ``moment = A.T @ y`` it minimizes ``|A @ x - y|``. Coefficients
    switch between free and zero, all wrong ones at once, until no free one is negative and no zero
    one would help (block principal pivoting; Kim and Park, 2011). If that does not end, every set
    of free coefficients is tried.
    """
    unit = 1 / np.sqrt(np.maximum(np.diag(gram), 1e-300))  # Columns differ by ten decades.
    scaled, target = gram * np.outer(unit, unit), moment * unit
    free = np.ones(len(moment), dtype=np.bool_)
    for _ in range(_EXCHANGES):
        x = _solved(scaled, target, free)
        slope = target - scaled @ x
        wrong = np.where(free, x < 0, slope > _SLOPE * np.abs(target).max(initial=0.0))
        if not wrong.any():
            return x * unit
        free ^= wrong
    return _best_of_all(scaled, target) * unit


def _solved(gram: Floats, moment: Floats, free: NDArray[np.bool_]) -> Floats:
    """The least squares over the free coefficients; the others are 0."""
    x = np.zeros(len(moment))
    if free.any():
        x[free] = np.linalg.lstsq(gram[np.ix_(free, free)], moment[free])[0]
    return x


def _best_of_all(gram: Floats, moment: Floats) -> Floats:
    """The best allowed solution over all sets of free coefficients."""
    sets = product([False, True], repeat=len(moment))
    solutions = [_solved(gram, moment, np.array(free)) for free in sets]
    allowed = [x for x in solutions if (x >= 0).all()]
    return min(allowed, key=lambda x: float(x @ gram @ x / 2 - moment @ x))


def robust(
    rows: Floats, measured: Floats, *, weights: Floats | None = None, rounds: int = 25
) -> Floats:
    """The x >= 0 for which ``rows @ x`` is near `measured`, float64 [columns].

    It minimizes Huber's loss of the relative error by re-weighting: a window whose error is above
    1.345 scales (the scale is the median absolute error times 1.4826) has the weight
    1.345 scales / its error. So windows in which the engine was paused have little influence.
    `weights` are what each window counts for besides; without them all count alike.
    """
    scaled = rows / measured[:, None]
    own = np.ones(len(measured)) if weights is None else weights
    weight = own
    x = np.zeros(rows.shape[1])
    for _ in range(rounds):
        last, weighted = x, scaled * weight[:, None]
        x = nonnegative(weighted.T @ scaled, weighted.sum(axis=0))
        error = np.abs(scaled @ x - 1)
        scale = max(_MAD_TO_SIGMA * _median(error, weights), _LEAST_SCALE)
        weight = own * np.minimum(1.0, _TUNING * scale / np.maximum(error, 1e-300))
        if np.allclose(x, last, rtol=1e-6, atol=0.0):
            break
    return x


def _median(values: Floats, weights: Floats | None) -> float:
    if weights is None:
        return float(np.median(values))
    return float(np.quantile(values, 0.5, weights=weights, method="inverted_cdf"))
