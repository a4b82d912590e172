"""What happens to the rollouts that still run when their batch is full, or at an update.

Each behaviour is one entry of :data:`BEHAVIOURS`, and everything that depends on it asks that
entry: the core (when engines are paused, what is called back, what a refit or a sleep waits for),
the configuration (which settings of the cached KV are possible), the check of the engines when a
run begins, and the report. So a new behaviour is one entry here and one name in
:data:`StragglerRule`. If it decides for each rollout, it has a function as ``decide``.

========  =============================================  ===========================
rule      when a synchronous batch is full               at an update
========  =============================================  ===========================
retract   engines paused, requests stay inside           KV flushed and recomputed
in_place  engines paused, requests stay inside           KV kept: stale keys
abort     requests come back with their tokens           sent again, to any engine
run       nothing: they run on, nothing new is sent      waited for; none is mixed
choose    some run on up to a limit, the others stay     as for those that stay
========  =============================================  ===========================

What ``choose`` compares, all in seconds of an engine: to interrupt a rollout costs the prefill of
its context later (context / prefill rate) and the staleness of its group's tokens (their price);
to let it run costs the steps that the engine makes for fewer sequences than it could, t0 for each.
Where the KV can stay (kept apart by version), a token that attends to stale keys has a price too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal, TypeAlias

from aprilsched.core.policies.bounds import ABOVE_0, AT_LEAST_0

__all__ = [
    "BEHAVIOURS",
    "Behaviour",
    "CachedKV",
    "Decision",
    "Prices",
    "Situation",
    "Straggler",
    "StragglerRule",
    "keeps_kv",
    "rules_that",
    "run_out_tokens",
]

StragglerRule: TypeAlias = Literal["retract", "in_place", "abort", "run", "choose"]

CachedKV: TypeAlias = Literal["recompute", "keep", "apart"]

_HORIZONS = (16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """What interrupting and waiting cost, in seconds of an engine.

    The defaults are those of one H200 with a 4B model; ``aprilsched calibrate`` measures them.

    Attributes:
        step_seconds: The part of a decode step's duration that does not depend on the batch.
        prefill_tokens_per_s: The number of tokens that an engine prefills in a second.
        stale_token_seconds: What it is worth to the trainer that a token is not off-policy.
        stale_key_seconds: What it is worth to the trainer that a token does not attend to keys of
            older weights.
    """

    step_seconds: Annotated[float, AT_LEAST_0] = 3.66e-3
    prefill_tokens_per_s: Annotated[float, ABOVE_0] = 59_900.0
    stale_token_seconds: Annotated[float, AT_LEAST_0] = 0.0
    stale_key_seconds: Annotated[float, AT_LEAST_0] = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rollout that still generates when its batch is full. Lengths are in tokens."""

    context: int
    """Prompt and response so far: prefilled again if it is interrupted."""
    group_tokens: int
    """Of its group, on-policy until the update; 0 if it is not the group's last."""
    ends_within: Callable[[int], float]
    """The probability that it ends within so many more tokens."""
    remaining: Callable[[], float]
    """The tokens that it is expected to need still."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """What a behaviour that decides for each straggler knows beside the stragglers."""

    prices: Prices
    usual: float
    """How many sequences decode together in the mean of a batch."""
    kv: CachedKV
    """What becomes of the cached KV at a refit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What becomes of one straggler. Without either it stays inside the paused engine."""

    run_on: int = 0
    """How many more tokens it may generate before its engine is paused."""
    call_back: bool = False
    """It comes back with its tokens before the pause, and is sent again afterwards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Behaviour:
    """One way to treat stragglers: everything that the rest of the program asks about it.

    Requests that are always called back never wait inside, and only where requests wait inside can
    there be a decision for each of them.
    """

    told: str
    """What happens to unfinished responses, for a report: a sentence."""
    kv: tuple[CachedKV, ...]
    """What may become of the cached KV at a refit; the first is what "auto" means."""
    waits_inside: bool
    """Requests wait inside their paused engine until the next batch, and through a refit.
    Otherwise engines are left running, and a refit waits until they are empty."""
    waits_asleep: bool = False
    """They also wait there while memory is released, where the engines can do that."""
    called_back: Literal["always", "for sleep", "never"] = "for sleep"
    """When open requests are aborted to come back with their tokens: whenever no training rollout
    should run, before memory is released under them, or never (they are waited for)."""
    deferrable: bool = False
    """A rollout may be called back and kept waiting for batches, as length buckets do it."""
    decide: Callable[[Sequence[Straggler], Situation], Sequence[Decision]] | None = None
    """Decides for each straggler once, when the batch is full or an update begins."""

    def pause_mode(self, kv: CachedKV) -> Literal["retract", "in_place"]:
        """How engines are paused around a refit.

        Retract lets the cache be flushed, so that no later request finds a prefix computed under
        older weights. In place is for requests inside that keep their KV.
        """
        return "in_place" if self.waits_inside and kv != "recompute" else "retract"

    @property
    def needs_spans(self) -> bool:
        """The engines must tell the version of each token, since a request that waits through a
        refit has tokens of several."""
        return self.waits_inside

    def needs_flush_while_paused(self, kv: CachedKV) -> bool:
        """The engines must be able to flush the cache around requests that wait inside them."""
        return self.waits_inside and kv == "recompute"


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


def _cheapest(stragglers: Sequence[Straggler], situation: Situation) -> list[Decision]:
    prices = situation.prices
    tokens = run_out_tokens(stragglers, prices, usual=situation.usual)
    return [
        Decision(call_back=True)
        if situation.kv == "apart"
        and not keeps_kv(context=s.context, remaining=s.remaining(), prices=prices)
        else Decision(run_on=tokens)
        for s in stragglers
    ]


BEHAVIOURS: Mapping[StragglerRule, Behaviour] = MappingProxyType(
    {
        "retract": Behaviour(
            told="Unfinished responses are carried over: they pause while new weights come in, "
            "their context is read again, and they go on.",
            # A retracted request finds its own older prefix in a cache that was not flushed.
            kv=("recompute",),
            waits_inside=True,
            waits_asleep=True,
            deferrable=True,
        ),
        "in_place": Behaviour(
            told="Unfinished responses are carried over and keep their KV: new weights come in "
            "under them.",
            # Nothing can be flushed while requests keep their KV.
            kv=("keep", "apart"),
            waits_inside=True,
        ),
        "abort": Behaviour(
            told="Unfinished responses are called back when a batch is full, and go on from what "
            "they have in the next one.",
            kv=("recompute", "apart"),
            waits_inside=False,
            called_back="always",
            deferrable=True,
        ),
        "run": Behaviour(
            told="Unfinished responses run on under the weights they began with.",
            kv=("recompute", "apart"),
            waits_inside=False,
            called_back="never",
        ),
        "choose": Behaviour(
            told="What happens to unfinished responses is chosen for each by its price.",
            kv=("recompute", "apart"),
            waits_inside=True,
            decide=_cheapest,
        ),
    }
)
"""By the name that the configuration has for it."""


def rules_that(holds: Callable[[Behaviour], bool]) -> tuple[StragglerRule, ...]:
    """The names of those of which something holds, for an error that says what to choose."""
    return tuple(name for name, behaviour in BEHAVIOURS.items() if holds(behaviour))
