"""The step-time model: how long one engine takes, in closed form.

One decode step of ``b`` sequences that read ``kv`` tokens of context takes

    t(b, kv) = t0 + t1 * b + t2 * kv * max(1, fill / b) + (t0_wide if b > wide_from)
             + t0_experts * (1 - (1 - expert_share) ** b)

The terms are: reading the weights; work for each sequence; reading the KV, more slowly while fewer
than ``fill`` sequences read; the additional cost of wide batches; reading the experts that any of
the sequences uses. Every step adds ``b`` tokens to ``kv``. The model is linear with ``fill``,
``t0_wide`` and ``t0_experts`` at 0, their defaults. A prefill pass takes
``prefill_pass + tokens / prefill_rate``, and decoding waits for it.

With speculative decoding, a step of ``b`` sequences gives each of them ``tokens(b)`` tokens. The
model then divides a step into that number of equal ones, so that each gives a sequence one token.
These are the steps of its methods.

Invariants: the batch is constant within a call, so a step's time is linear in ``kv``;
``decode_seconds(b, kv, n)`` is the sum of n single steps, and
``steps_within(b, kv, s)`` is the largest n with ``decode_seconds(b, kv, n) <= s``.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from aprilsched.errors import ConfigError
from aprilsched.kernel.values.bounds import AT_LEAST_0, AT_LEAST_1, NOT_NEGATIVE, POSITIVE

Acceptance: TypeAlias = tuple[tuple[float, float], ...]
"""Pairs of a batch and of the tokens that a step of this batch gives each sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimeModel:
    """The parameters of one model on one machine.

    Attributes:
        t0: seconds of every step, whatever the batch (the weights are read once).
        t1: seconds for each sequence in a step.
        t2: seconds for each context token that a step reads.
        prefill_pass: seconds of every prefill pass.
        prefill_rate: tokens per second within a pass.
        prefill_chunk: largest number of tokens in one pass.
        wide_from: size of the largest batch whose steps do not cost `t0_wide`.
        t0_wide: additional seconds of a step of a larger batch.
        fill: number of sequences that use the full memory bandwidth; fewer sequences read at
            their share of it. With 0, any number uses it fully.
        t0_experts: seconds for reading all experts of a mixture of experts, in addition to `t0`.
        expert_share: share of the experts that one sequence uses: 1/16 for 8 of 128.
        tokens_per_step: tokens that a step gives each sequence, by the batch, with speculative
            decoding: pairs (batch, tokens) in the order of the batches. Between them the number is
            linear in the batch. Without pairs it is 1.
    """

    t0: Annotated[float, NOT_NEGATIVE]
    t1: Annotated[float, NOT_NEGATIVE]
    t2: Annotated[float, NOT_NEGATIVE]
    prefill_pass: Annotated[float, NOT_NEGATIVE]
    prefill_rate: Annotated[float, POSITIVE]
    prefill_chunk: Annotated[int, AT_LEAST_1] = 8192
    wide_from: Annotated[int, AT_LEAST_0] = 0
    t0_wide: Annotated[float, NOT_NEGATIVE] = 0.0
    fill: Annotated[float, NOT_NEGATIVE] = 0.0
    t0_experts: Annotated[float, NOT_NEGATIVE] = 0.0
    expert_share: Annotated[float, NOT_NEGATIVE] = 0.0
    tokens_per_step: Acceptance = ()

    def __post_init__(self) -> None:
        try:
            pairs = tuple((float(batch), float(tokens)) for batch, tokens in self.tokens_per_step)
        except (TypeError, ValueError):
            pairs = ((0.0, 0.0),)
        batches = [0.0, *(batch for batch, _ in pairs), math.inf]
        growing = all(low < high for low, high in itertools.pairwise(batches))
        if not growing or not all(1 <= tokens < math.inf for _, tokens in pairs):
            raise ConfigError(
                "tokens_per_step must be pairs of a growing batch and at least 1 token, got "
                f"{self.tokens_per_step!r}."
            )
        object.__setattr__(self, "tokens_per_step", pairs)

    def tokens(self, batch: float) -> float:
        """Return the tokens that a step of `batch` sequences gives each of them; at least 1."""
        pairs = self.tokens_per_step
        if not pairs:
            return 1.0
        after = bisect(pairs, (batch, math.inf))
        if after in (0, len(pairs)):
            return pairs[max(0, after - 1)][1]
        (low, of_low), (high, of_high) = pairs[after - 1], pairs[after]
        return of_low + (of_high - of_low) * (batch - low) / (high - low)

    def step_seconds(self, batch: float, kv: float) -> float:
        """Return seconds of one step; the arguments may be means over several steps."""
        return self._work_seconds(batch) + self._read_seconds(batch) * kv

    def decode_seconds(self, batch: int, kv: int, steps: int) -> float:
        """Seconds of `steps` steps of `batch` sequences; the first step reads `kv` tokens."""
        read = self._read_seconds(batch)
        growth = read * batch * (steps * (steps - 1) / 2)
        return steps * (self._work_seconds(batch) + read * kv) + growth

    def steps_within(self, batch: int, kv: int, seconds: float) -> int:
        """Return the largest number of whole steps that take at most `seconds`."""
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
        """Return seconds to prefill `tokens` in as few passes as `prefill_chunk` allows."""
        passes = max(1, -(-tokens // self.prefill_chunk))
        return passes * self.prefill_pass + tokens / self.prefill_rate

    def token_seconds(self, max_running: int) -> float:
        """Return the seconds of T_bound per token, without reads of its context.

        They are its own work, and its part of a weight read that serves `max_running` tokens.
        """
        return (self.t1 + self._weight_seconds(max_running) / max_running) / self._most_tokens

    @property
    def read_seconds(self) -> float:
        """The seconds of T_bound for each context token that a token reads."""
        return self.t2 / self._most_tokens

    def bound_seconds(
        self,
        prompt_lengths: Sequence[int] | NDArray[np.integer],
        lengths: Sequence[int] | NDArray[np.integer],
        max_running: int,
        engines: int = 1,
    ) -> float:
        """T_bound: a lower bound of the seconds of any schedule of these responses on equal
        `engines`.

        t1 * sum(L) + t2 * sum(p * L + L^2 / 2) + t0 * sum(L) / max_running, where t0 includes the
        experts that `max_running` sequences use: each token costs its own work and the context that
        it reads; one read of the weights serves `max_running` tokens; prefill and the terms of
        `fill` and `t0_wide` cost nothing. With speculative decoding each step gives the largest of
        `tokens_per_step`. Both arrays have one entry for each response, in tokens.
        Several engines take their share of that each.

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
        return (self.token_seconds(max_running) * total + self.read_seconds * reads) / engines

    def _work_seconds(self, batch: float) -> float:
        """Return seconds of a step without its reads of KV."""
        wide = self.t0_wide if batch > self.wide_from else 0.0
        return (self._weight_seconds(batch) + self.t1 * batch + wide) / self.tokens(batch)

    def _weight_seconds(self, batch: float) -> float:
        """Return seconds of reading the weights."""
        return self.t0 + self.t0_experts * share_of_experts(self.expert_share, batch)

    def _read_seconds(self, batch: float) -> float:
        """Return seconds for each context token of a step."""
        return self.t2 * max(1.0, self.fill / max(batch, 1.0)) / self.tokens(batch)

    @property
    def _most_tokens(self) -> float:
        return max((tokens for _, tokens in self.tokens_per_step), default=1.0)


@overload
def share_of_experts(share: float, batch: float) -> float: ...
@overload
def share_of_experts(share: float, batch: NDArray[np.float64]) -> NDArray[np.float64]: ...
def share_of_experts(
    share: float, batch: float | NDArray[np.float64]
) -> float | NDArray[np.float64]:
    """Return the share of the experts that at least one of `sequences` sequences uses.

    Each sequence uses a `share` of the experts, independently of the others.
    """
    return 1.0 - (1.0 - share) ** batch


H200_QWEN3_4B = StepTimeModel(
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
"""The default everywhere. Fitted on one H200 with SGLang 0.5.17 and the shape of Qwen3-4B in bf16
(triton attention, no prefill CUDA graphs), to 1,267 windows of 40 steps (``aprilsched calibrate``).
On 840 windows of decoding only, the median error is 1.5 % and the 90th percentile 4.9 % (linear:
2.8 and 17 %); on 375 windows with prefill passes, 4.0 and 11 %. Fitted without the servers' first,
second or third run, it predicts the run that was left out with median errors of 2.5, 3.2 and 1.6 %
(linear: 6.8, 3.3 and 2.8 %); without the second, the windows do not determine `fill`."""

H200_QWEN3_4B_LINEAR = StepTimeModel(
    t0=3.66e-3,
    t1=0.0119e-3,
    t2=43.9e-9,
    prefill_pass=18.9e-3,
    prefill_rate=59_900.0,
    prefill_chunk=8192,
)
"""Fitted to the same windows without `fill` and `t0_wide`: median error 3.4 %, 90th percentile
16 %. Experiments that were recorded before the model above was the default use it, and formulas
that are derived for a linear model."""
