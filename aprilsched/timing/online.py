"""Following one engine's step times while it runs: recursive least squares with forgetting.

The shape of the model (``fill``, ``wide_from``, the chunk) is the prior's; the coefficients are
fitted to what was observed, the older the less. Everything is relative: a row is what each
coefficient contributes to the time that the model predicts, in units of the prior, so the
rows of decoding add up to about 1 and one weight fits all.

Invariants:
- No coefficient is ever negative, and one that is 0 in the prior stays 0.
- A window counts as if it had been off by at most `clip` of what was predicted, so the
  prediction for a window like it moves by at most `clip`; after n windows like it by about
  ``clip / (n + 1)``.
- Without observations the model is the prior.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from aprilsched.errors import ConfigError
from aprilsched.timing.least_squares import nonnegative
from aprilsched.timing.model import StepTimeModel
from aprilsched.timing.server_log import Floats

__all__ = ["Observation", "OnlineFit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What an engine did in a stretch of time.

    Attributes:
        running: mean batch of its decode steps.
        kv_tokens: mean context tokens that a step read.
        seconds_per_step: `seconds` over the decode steps.
        seconds: of the stretch, prefill passes included.
        prefill_passes: in the stretch.
        prefilled_tokens: computed in them.
    """

    running: float
    kv_tokens: float
    seconds_per_step: float
    seconds: float
    prefill_passes: int = 0
    prefilled_tokens: int = 0


class OnlineFit:
    """A model that is re-fitted with every observation.

    Args:
        prior: where the fit starts, and what it keeps to where nothing is observed.
        prior_weight: of each of its coefficients, in windows; it is never forgotten.
        memory: windows after which an observation counts 1/e.
        clip: the largest relative error that a window may count with.

    Raises:
        ConfigError: if a number is not above 0.
    """

    def __init__(
        self,
        prior: StepTimeModel,
        *,
        prior_weight: float = 0.01,
        memory: float = 50.0,
        clip: float = 0.1,
    ) -> None:
        for name, value in (("prior_weight", prior_weight), ("memory", memory), ("clip", clip)):
            if not value > 0:
                raise ConfigError(f"{name} is {value}; give a number above 0.")
        self._prior = prior
        self._prior_weight = prior_weight
        self._kept = float(np.exp(-1 / memory))
        self._clip = clip
        self._units = _coefficients(prior)
        self._gram = np.zeros((len(self._units), len(self._units)))
        self._moment = np.zeros(len(self._units))
        self._shares = np.ones(len(self._units))
        self.model = prior
        """The latest fit."""
        self.windows = 0
        """Observations that counted."""

    def observe(self, seen: Observation) -> None:
        """Take one observation; those without time or steps, and no finite ones, do not count."""
        usable = np.isfinite(seen.seconds) and seen.seconds > 0
        if not (usable and seen.running > 0 and 0 < seen.seconds_per_step <= seen.seconds):
            return
        row = self._row(seen)
        expected = float(row @ self._shares)
        if not expected > 0:
            return
        error = min(self._clip, max(-self._clip, seen.seconds / expected - 1))
        row = row / expected
        self._gram = self._kept * self._gram + np.outer(row, row)
        self._moment = self._kept * self._moment + row * (1 + error)
        self.windows += 1
        self._solve()

    def _row(self, seen: Observation) -> Floats:
        """Seconds that each coefficient of the prior gives the observation."""
        steps, model = seen.seconds / seen.seconds_per_step, self._prior
        read = seen.kv_tokens * max(1.0, model.fill / max(seen.running, 1.0))
        wide = float(seen.running > model.wide_from)
        decoding = steps * np.array([1.0, seen.running, read, wide])
        passes = [float(seen.prefill_passes), float(seen.prefilled_tokens)]
        return np.concatenate([decoding, passes]) * self._units

    def _solve(self) -> None:
        prior = self._prior_weight * np.eye(len(self._units))
        self._shares = nonnegative(self._gram + prior, self._moment + prior.sum(axis=1))
        t0, t1, t2, t0_wide, each_pass, each_token = (
            float(value) for value in self._shares * self._units
        )
        self.model = replace(
            self._prior,
            t0=t0,
            t1=t1,
            t2=t2,
            t0_wide=t0_wide,
            prefill_pass=each_pass,
            prefill_rate=1 / each_token if each_token > 0 else np.inf,
        )


def _coefficients(model: StepTimeModel) -> Floats:
    """What is fitted: seconds of a step, sequence, context token, wide step, pass and token."""
    return np.array(
        [model.t0, model.t1, model.t2, model.t0_wide, model.prefill_pass, 1 / model.prefill_rate]
    )
