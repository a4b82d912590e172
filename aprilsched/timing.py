"""How long one engine takes: the linear step-time model, in closed form.

One decode step of ``b`` sequences that read ``kv`` tokens of context takes

    t(b, kv) = t0 + t1 * b + t2 * kv

(weights read; per-sequence work; KV read), and every step adds ``b`` tokens to ``kv``. A prefill
pass takes ``prefill_pass + tokens / prefill_rate`` and decoding waits for it.

Invariant: ``decode_seconds(b, kv, n)`` is the sum of n single steps, and
``steps_within(b, kv, s)`` is the largest n with ``decode_seconds(b, kv, n) <= s``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["H200_QWEN3_4B", "StepTimeModel"]


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
    """

    t0: float
    t1: float
    t2: float
    prefill_pass: float
    prefill_rate: float
    prefill_chunk: int = 8192

    def decode_seconds(self, batch: int, kv: int, steps: int) -> float:
        """Seconds of `steps` steps of `batch` sequences; the first one reads `kv` tokens."""
        growth = self.t2 * batch * (steps * (steps - 1) / 2)
        return steps * (self.t0 + self.t1 * batch + self.t2 * kv) + growth

    def steps_within(self, batch: int, kv: int, seconds: float) -> int:
        """The largest number of whole steps that take at most `seconds`."""
        if seconds <= 0:
            return 0
        half = self.t2 * batch / 2
        linear = self.t0 + self.t1 * batch + self.t2 * kv - half
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
        prefill is free. Both arrays have one entry for each response, in tokens. For a fleet of
        equal engines divide by their number.

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
