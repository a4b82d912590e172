"""What happens to the rollouts that still run when their batch is full, or at an update.

========  =============================================  ===========================
rule      when a synchronous batch is full               at an update
========  =============================================  ===========================
retract   engines paused, requests stay inside           KV flushed and recomputed
in_place  engines paused, requests stay inside           KV kept: stale keys
abort     requests come back with their tokens           sent again, to any engine
run       nothing: they run on, nothing new is sent      waited for; none is mixed
choose    one of these for each, by what it costs
========  =============================================  ===========================

What ``choose`` weighs, all in seconds of an engine: to interrupt a rollout costs the prefill of
its context later (context / prefill rate) and the staleness of its group's tokens (their price);
to let it run costs the steps that the engine makes for fewer sequences than it could, t0 for each.
Where the KV can stay (kept apart by version), a token that attends to stale keys has a price too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Prices", "Straggler", "StragglerRule", "keeps_kv", "pause_mode", "run_out_tokens"]

StragglerRule: TypeAlias = Literal["retract", "in_place", "abort", "run", "choose"]

_HORIZONS = (16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """What interrupting and waiting cost, in seconds of an engine.

    The defaults are those of one H200 with a 4B model; ``aprilsched calibrate`` measures them.
    """

    step_seconds: float = 3.66e-3
    """A decode step's part that does not depend on the batch."""
    prefill_tokens_per_s: float = 59_900.0
    stale_token_seconds: float = 0.0
    """What the trainer would pay for a token not to become off-policy."""
    stale_key_seconds: float = 0.0
    """What it would pay for a token not to attend to keys of older weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """One of them. Tokens."""

    context: int
    """Prompt and response so far: prefilled again if it is interrupted."""
    group_tokens: int
    """Of its group, on-policy until the update; 0 if it is not the group's last."""
    ends_within: Callable[[int], float]
    """The probability that it ends within so many more tokens."""


def pause_mode(rule: StragglerRule, *, keeps: bool = False) -> Literal["retract", "in_place"]:
    """How engines are paused around a refit.

    Under "abort" and "run" nothing is inside them by then; retract lets the cache be flushed,
    so that no later request finds a prefix computed under older weights.
    """
    return "in_place" if rule == "in_place" or (rule == "choose" and keeps) else "retract"


def run_out_tokens(stragglers: Sequence[Straggler], prices: Prices, *, usual: float) -> int:
    """How many more tokens the stragglers may run before they are interrupted; 0 for none.

    `usual` is how many sequences decode together in the mean of a batch: a step for fewer wastes
    that share of its fixed part.
    """
    best, gain = 0, 0.0
    for horizon in _HORIZONS:
        saved = ending = 0.0
        for straggler in stragglers:
            ends = straggler.ends_within(horizon)
            saved += ends * straggler.context / prices.prefill_tokens_per_s
            saved += ends * straggler.group_tokens * prices.stale_token_seconds
            ending += ends
        # Those that end leave the steps emptier: half of them on average.
        busy = max(0.0, len(stragglers) - ending / 2)
        idle = max(0.0, 1 - busy / usual) if usual else 1.0
        net = saved - horizon * prices.step_seconds * idle
        if net > gain:
            best, gain = horizon, net
    return best


def keeps_kv(*, context: int, remaining: float, prices: Prices) -> bool:
    """Is it cheaper to keep the KV of older weights than to compute it again?"""
    return remaining * prices.stale_key_seconds <= context / prices.prefill_tokens_per_s
