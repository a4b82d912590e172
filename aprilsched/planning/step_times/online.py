"""Fits the model to the running engines: robust least squares with forgetting.

The shape of the model (``fill``, ``wide_from``, ``expert_share``, ``tokens_per_step``, the chunk)
is the prior's. Streams show how long a token takes, and not how many a step gave. The coefficients
are fitted to the latest observations, whose weight decreases with their age.
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

import numpy as np

from aprilsched.errors import ConfigError
from aprilsched.planning.step_times.least_squares import robust
from aprilsched.planning.step_times.model import StepTimeModel, share_of_experts
from aprilsched.planning.step_times.server_log import Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What an engine did in a stretch of time.

    Attributes:
        running: mean batch of its decode steps.
        kv_tokens: mean number of context tokens that a step read.
        seconds_per_step: `seconds` divided by the number of tokens that a sequence got: of its
            decode steps, times the tokens of a step with speculative decoding.
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
"""Largest factor by which an observation counts as faster than the model. Errors are relative to
the measured time, so an observation with a time near 0 would otherwise outweigh all others."""


class OnlineFit:
    """A model that follows the observations.

    Engines that are very unlike the prior have their own model after their first batch. On the log
    of a mixture of experts, whose steps are up to three times as long as those of the prior, steps
    are off by 8 % after 20 windows and by 1 % after 40. It was 18 and 11 % when each window could
    move the model by a tenth at most.

    Args:
        prior: model at which the fit starts, and which it keeps where nothing is observed.
        prior_weight: weight of each coefficient of the prior, in windows; it does not decrease.
        memory: number of windows after which an observation has the weight 1/e. After twice this
            number it is dropped.

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
        """Return the seconds that each coefficient of the prior contributes to the observation."""
        model = self._prior
        steps = seen.seconds / seen.seconds_per_step / model.tokens(seen.running)
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
