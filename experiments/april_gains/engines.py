"""Step-time models of APRIL's engines: two GPUs each, scaled from one H200 and a 4B model.

t0 of the fitted model is the time to read the weights and the other fixed cost of a step. With two
GPUs, each reads half of the weights, the other cost is the same, and every step of 36 layers waits
for 72 all-reduces. The work for a sequence and the reads of KV are halved, and the prefill rate is
doubled. An 8B model reads twice the weights and does twice the work for a token. Its KV is as large
as the 4B model's (both have 36 layers of 8 KV heads of 128), so t2 is the same.
"""

from __future__ import annotations

from dataclasses import replace

from aprilsched.timing.model import H200_QWEN3_4B_LINEAR, StepTimeModel

__all__ = ["engine_of_two_gpus"]

_BYTES_A_SECOND = 4.8e12
"""Of an H200's memory."""
_WEIGHTS = 8.05e9
"""Bytes of the 4B model in bf16."""
_ALL_REDUCES = 72
_ALL_REDUCE_SECONDS = 10e-6
"""Of a small message between two GPUs over NVLink; assumed."""


def engine_of_two_gpus(size: float) -> StepTimeModel:
    """`size`: parameters over those of the 4B model."""
    one = H200_QWEN3_4B_LINEAR
    weights = _WEIGHTS / _BYTES_A_SECOND
    beside = one.t0 - weights
    return replace(
        one,
        t0=beside + size * weights / 2 + _ALL_REDUCES * _ALL_REDUCE_SECONDS,
        t1=size * one.t1 / 2,
        t2=one.t2 / 2,
        prefill_rate=2 * one.prefill_rate / size,
    )
