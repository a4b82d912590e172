"""How long one engine takes: the step-time model, in closed form.

One decode step of ``b`` sequences that read ``kv`` tokens of context takes

    t(b, kv) = t0 + t1 * b + t2 * kv * max(1, fill / b) + (t0_wide if b > wide_from)

(weights read; per-sequence work; KV read, slower than the memory can while fewer than ``fill``
sequences read; what wide batches cost more), and every step adds ``b`` tokens to ``kv``. With
``fill`` and ``t0_wide`` at 0, their defaults, it is the linear model. A prefill pass takes
``prefill_pass + tokens / prefill_rate`` and decoding waits for it.

Invariants: the batch is constant within a call, so a step's time is linear in ``kv``;
``decode_seconds(b, kv, n)`` is the sum of n single steps, and
``steps_within(b, kv, s)`` is the largest n with ``decode_seconds(b, kv, n) <= s``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["H200_QWEN3_4B", "H200_QWEN3_4B_REFINED", "StepTimeModel"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimeModel:
    """The parameters of one model on one machine.

    Attributes:
        t0: seconds of every step, whatever the batch (the weights are read once).
        t1: seconds for each sequence in a step.
        t2: seconds for each context token read in a step.
        prefill_pass: seconds of every prefill pass.
        prefill_rate: tokens per second within a pass.
        prefill_chunk: most tokens in one pass.
        wide_from: the largest batch whose steps do not cost `t0_wide` more.
        t0_wide: those seconds of a step.
        fill: sequences that fill the memory's bandwidth; one of fewer reads its context as
            slowly as one of `fill`. 0: any number of them fills it.
    """

    t0: float
    t1: float
    t2: float
    prefill_pass: float
    prefill_rate: float
    prefill_chunk: int = 8192
    wide_from: int = 0
    t0_wide: float = 0.0
    fill: float = 0.0

    def step_seconds(self, batch: float, kv: float) -> float:
        """Seconds of one step; means over several steps may be given."""
        return self._work_seconds(batch) + self._read_seconds(batch) * kv

    def decode_seconds(self, batch: int, kv: int, steps: int) -> float:
        """Seconds of `steps` steps of `batch` sequences; the first one reads `kv` tokens."""
        growth = self._read_seconds(batch) * batch * (steps * (steps - 1) / 2)
        return steps * self.step_seconds(batch, kv) + growth

    def steps_within(self, batch: int, kv: int, seconds: float) -> int:
        """The largest number of whole steps that take at most `seconds`."""
        if seconds <= 0:
            return 0
        half = self._read_seconds(batch) * batch / 2
        linear = self.step_seconds(batch, kv) - half
        # The root of half*n^2 + linear*n = seconds in the form that does not cancel when the
        # quadratic part is small (it is 1e-5 of the linear one at a batch of 1).
        root = 2 * seconds / (linear + math.sqrt(linear * linear + 4 * half * seconds))
        steps = int(root)
        while steps and self.decode_seconds(batch, kv, steps) > seconds:
            steps -= 1
        while self.decode_seconds(batch, kv, steps + 1) <= seconds:
            steps += 1
        return steps

    def prefill_seconds(self, tokens: int) -> float:
        """Seconds to prefill `tokens` in as few passes as `prefill_chunk` allows."""
        passes = max(1, -(-tokens // self.prefill_chunk))
        return passes * self.prefill_pass + tokens / self.prefill_rate

    def bound_seconds(
        self,
        prompt_lengths: Sequence[int] | NDArray[np.integer],
        lengths: Sequence[int] | NDArray[np.integer],
        max_running: int,
    ) -> float:
        """T_bound: what no schedule can go below for these responses on one engine.

        t1 * sum(L) + t2 * sum(p * L + L^2 / 2) + t0 * sum(L) / max_running: each token pays its
        own work and the context that it reads; the weights are read for `max_running` at once;
        prefill is free, and so is what `fill` and `t0_wide` add. Both arrays have one entry for
        each response, in tokens. For a fleet of equal engines divide by their number.

        Raises:
            ValueError: if the arrays differ in length.
        """
        prompts = np.asarray(prompt_lengths, dtype=np.float64)
        outputs = np.asarray(lengths, dtype=np.float64)
        if prompts.shape != outputs.shape:
            raise ValueError(
                f"{prompts.size} prompt lengths for {outputs.size} responses; give one for each."
            )
        total = float(outputs.sum())
        reads = float((prompts * outputs + outputs * outputs / 2).sum())
        return self.t1 * total + self.t2 * reads + self.t0 * total / max_running

    def _work_seconds(self, batch: float) -> float:
        """Of a step, without what it reads of KV."""
        wide = self.t0_wide if batch > self.wide_from else 0.0
        return self.t0 + self.t1 * batch + wide

    def _read_seconds(self, batch: float) -> float:
        """For each context token of a step."""
        return self.t2 * max(1.0, self.fill / max(batch, 1.0))


H200_QWEN3_4B = StepTimeModel(
    t0=3.66e-3,
    t1=0.0119e-3,
    t2=43.9e-9,
    prefill_pass=18.9e-3,
    prefill_rate=59_900.0,
    prefill_chunk=8192,
)
"""Fitted on one H200 with SGLang 0.5.17 and the shape of Qwen3-4B in bf16 (triton attention, no
prefill CUDA graphs): 1,267 windows of 40 steps, median error 3.4 %, 90th percentile 16 %."""

H200_QWEN3_4B_REFINED = StepTimeModel(
    t0=3.574e-3,
    t1=0.01141e-3,
    t2=45.40e-9,
    prefill_pass=14.57e-3,
    prefill_rate=59_520.0,
    prefill_chunk=8192,
    wide_from=256,
    t0_wide=1.301e-3,
    fill=9.0,
)
"""The same windows with the two terms beyond the linear ones (``aprilsched calibrate``): 840
windows of decoding only, median error 1.5 %, 90th percentile 4.9 % (the linear model's are 2.8 and
17 %); 375 windows with prefill passes, 4.0 and 11 %. Fitted without the servers' first, second and
third run in turn, it meets the run left out with median errors of 2.5, 3.2 and 1.6 % (a linear fit
with 6.8, 3.3 and 2.8 %); without the second, no window tells `fill`."""
