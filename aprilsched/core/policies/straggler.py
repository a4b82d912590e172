"""What happens to the rollouts that still generate when their batch is full, or at an update.

Each behaviour is one entry of :data:`BEHAVIOURS`, and everything that depends on the behaviour asks
that entry: the core (when engines are paused, what is called back, what a refit or a sleep waits
for), the configuration (what may happen to the cached KV), the check of the engines when a run
begins, and the report. So a new behaviour is one entry here and one name in :data:`StragglerRule`.
If it decides for each rollout, it has a function as ``decide``.

========  =============================================  ===========================
rule      when a synchronous batch is full               at an update
========  =============================================  ===========================
retract   engines paused, requests stay inside           KV flushed and recomputed
in_place  engines paused, requests stay inside           KV kept: stale keys
abort     requests come back with their tokens           sent again, to any engine
run       nothing: they run on, nothing new is sent      waited for; none is mixed
choose    some run on up to a limit, the others stay     as for those that stay
========  =============================================  ===========================

``choose`` compares two costs, both in seconds of an engine. Interrupting a rollout costs the
prefill of its context later (context / prefill rate) and the staleness of its group's tokens (at
their price). Letting it run costs the steps that the engine makes for fewer sequences than it
could, each with the fixed part t0 of a step. If the KV can stay (kept apart by version), a token
that attends to stale keys has a price too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Literal, TypeAlias

from aprilsched.bounds import ABOVE_0, AT_LEAST_0
from aprilsched.checks import suggesting

StragglerRule: TypeAlias = Literal["retract", "in_place", "abort", "run", "choose"]

CachedKV: TypeAlias = Literal["recompute", "keep", "apart"]

_HORIZONS = (16, 32, 64, 128, 256, 512, 1024, 2048)


@suggesting()
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
    """Number of tokens of its prompt and its response so far. An interruption costs their
    prefill."""
    group_tokens: int
    """Number of tokens of its group that are on-policy until the update; 0 if another rollout of
    the group is not finished either."""
    ends_within: Callable[[int], float]
    """Returns the probability that it ends within so many more tokens."""
    remaining: Callable[[], float]
    """Returns the number of tokens that it is expected to need still; 0 while no length is
    known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """What a behaviour that decides for each straggler knows, beside the stragglers."""

    prices: Prices
    """What interrupting and waiting cost."""
    usual: float
    """Mean number of sequences that decode together during a batch, on all engines."""
    engines: int
    """Number of engines. They pause together, so all of them wait for a straggler that runs on."""
    kv: CachedKV
    """What happens to the cached KV at a refit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What happens to one straggler. By default it stays inside the paused engine."""

    run_on: int = 0
    """Number of tokens that it may still generate before its engine is paused."""
    call_back: bool = False
    """Whether it is called back with its tokens before the pause, and sent again afterwards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Behaviour:
    """One way to treat stragglers: everything that the rest of the program asks about it.

    Requests that are always called back never wait inside an engine. A behaviour can decide for
    each straggler only if requests wait inside.
    """

    told: str
    """What happens to unfinished responses, as a sentence for a report."""
    kv: tuple[CachedKV, ...]
    """What may happen to the cached KV at a refit; the first entry is what "auto" means."""
    waits_inside: bool
    """Whether requests wait inside their paused engine until the next batch, and during a refit.
    Otherwise engines are left running, and a refit waits until they are empty."""
    waits_asleep: bool = False
    """Whether requests also wait inside while the memory is released, if the engine can do that."""
    called_back: Literal["always", "for sleep", "never"] = "for sleep"
    """When open requests are aborted to come back with their tokens: whenever no training rollout
    should run, only before memory is released under them, or never, so that they are waited for."""
    deferrable: bool = False
    """Whether a rollout may be called back and wait for several batches, as with length buckets."""
    decide: Callable[[Sequence[Straggler], Situation], Sequence[Decision]] | None = None
    """Decides for each straggler once, when the batch is full or an update begins; None if all are
    treated alike. Not together with `deferrable`: length buckets call every straggler back."""

    def pause_mode(self, kv: CachedKV) -> Literal["retract", "in_place"]:
        """How engines are paused around a refit.

        After "retract" the cache can be flushed, so that no later request finds a prefix that older
        weights computed. "in_place" is for requests that wait inside and keep their KV.
        """
        return "in_place" if self.waits_inside and kv != "recompute" else "retract"

    def called_back_first(self) -> Behaviour:
        """The behaviour with which no request waits inside an engine."""
        return replace(
            self,
            told=BEHAVIOURS["abort"].told,
            waits_inside=False,
            waits_asleep=False,
            called_back="always",
        )

    @property
    def needs_spans(self) -> bool:
        """Whether the engines must tell the version of each token, because a request that waits
        during a refit has tokens of several versions."""
        return self.waits_inside

    def needs_flush_while_paused(self, kv: CachedKV) -> bool:
        """Whether the engines must be able to flush the cache while requests wait inside them."""
        return self.waits_inside and kv == "recompute"


def run_out_tokens(
    stragglers: Sequence[Straggler], prices: Prices, *, usual: float, engines: int
) -> int:
    """Number of tokens that the stragglers may still generate before they are interrupted.

    What is saved and what waiting costs are compared in seconds of one engine.

    Args:
        stragglers: the stragglers of all engines.
        prices: what interrupting and waiting cost.
        usual: mean number of sequences that decode together during a batch, on all engines. A step
            for fewer sequences wastes the missing share of its fixed part.
        engines: number of engines, which all wait.
    """
    best, gain = 0, 0.0
    for horizon in _HORIZONS:
        saved = ending = 0.0
        for straggler in stragglers:
            ends = straggler.ends_within(horizon)
            saved += ends * straggler.context / prices.prefill_tokens_per_s
            saved += ends * straggler.group_tokens * prices.stale_token_seconds
            ending += ends
        # Rollouts that end leave emptier steps behind; on average half of them have ended.
        busy = max(0.0, len(stragglers) - ending / 2)
        idle = max(0.0, 1 - busy / usual) if usual else 1.0
        net = saved - horizon * prices.step_seconds * idle * engines
        if net > gain:
            best, gain = horizon, net
    return best


def keeps_kv(*, context: int, remaining: float, prices: Prices) -> bool:
    """Whether keeping the KV of older weights is cheaper than recomputing it."""
    return remaining * prices.stale_key_seconds <= context / prices.prefill_tokens_per_s


def _cheapest(stragglers: Sequence[Straggler], situation: Situation) -> list[Decision]:
    prices = situation.prices
    tokens = run_out_tokens(stragglers, prices, usual=situation.usual, engines=situation.engines)
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
            told="Unfinished responses are carried over: they pause while new weights are loaded, "
            "their context is recomputed, and they continue.",
            # A retracted request finds its own older prefix in a cache that was not flushed.
            kv=("recompute",),
            waits_inside=True,
            waits_asleep=True,
            deferrable=True,
        ),
        "in_place": Behaviour(
            told="Unfinished responses are carried over and keep their KV while new weights are "
            "loaded.",
            # Nothing can be flushed while requests keep their KV.
            kv=("keep", "apart"),
            waits_inside=True,
        ),
        "abort": Behaviour(
            told="Unfinished responses are called back when a batch is full, and continue in the "
            "next one with their tokens.",
            kv=("recompute", "apart"),
            waits_inside=False,
            called_back="always",
            deferrable=True,
        ),
        "run": Behaviour(
            told="Unfinished responses run to their end with the weights that they began with.",
            kv=("recompute", "apart"),
            waits_inside=False,
            called_back="never",
        ),
        "choose": Behaviour(
            told="What happens to an unfinished response is chosen for each one by its cost.",
            kv=("recompute", "apart"),
            waits_inside=True,
            decide=_cheapest,
        ),
    }
)
"""The behaviours, by their names in the configuration."""


def rules_that(holds: Callable[[Behaviour], bool]) -> tuple[StragglerRule, ...]:
    """The names of the behaviours for which something holds, for an error that says what to
    choose."""
    return tuple(name for name, behaviour in BEHAVIOURS.items() if holds(behaviour))
