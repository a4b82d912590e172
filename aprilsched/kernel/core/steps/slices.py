"""Cuts requests into slices, so that engines reserve less room in their KV pools.

An engine that reserves by a request's limit (SGLang) leaves room for tokens that most responses
never generate. With ``dispatch.slice_tokens`` an attempt asks for fewer, and the response continues
with another attempt, with its tokens so far, until it stops or reaches its own limit.

Each slice costs a prefill pass, which stalls the whole engine. So only requests for which a pool
may have no room are cut, and slices continue together.
"""

from __future__ import annotations

import math
from dataclasses import replace

from aprilsched.kernel.core.state.records import RequestRecord
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.values.capabilities import Capabilities, Reservation

_MARGIN = 2.0
"""Size of an automatic slice as a multiple of the expected rest of the response."""
_UNKNOWN = 1 / 16
"""Expected part of the limit while no length is known."""
_LEAST_TOKENS = 64
"""Smallest automatic slice."""
_LEAST_REST = 16
"""Smallest number of tokens that a slice leaves. SGLang refuses prompts that are almost as long as
its context, although a response may become that long."""
_SHARE = 0.098
"""Share of the tokens to come of running requests that SGLang leaves room for at least."""
_TOGETHER = 64
"""Number of requests for which a pool should have room at once."""
_COMPANY = 16
"""Open requests for each slice that continues in one prefill pass."""


def slice_size(state: SchedulerState, request: RequestRecord, engine: str) -> int | None:
    """Return the number of tokens that an attempt should ask for; None for the whole rest."""
    size = state.config.dispatch.slice_tokens
    able = state.fleet.control.engines[engine].able
    if size is None or not _divisible(request, able):
        return None
    if size == "auto":
        if not _crowds(state, request, engine, able):
            return None
        expected = state.expectations.remaining(request) or _UNKNOWN * request.remaining
        size = max(_LEAST_TOKENS, math.ceil(_MARGIN * expected))
    return size if request.remaining - size >= _LEAST_REST else None


def effective(rule: Reservation | None, state: SchedulerState) -> Reservation | None:
    """Return the reservation of engines with the clip that slices amount to, for trials."""
    size = state.config.dispatch.slice_tokens
    if size == "auto":
        size = math.ceil(_MARGIN * state.expectations.mean) or None
    return rule if rule is None or size is None else replace(rule, clip=min(rule.clip, size))


def gathers(state: SchedulerState) -> bool:
    """Return whether nothing waits but slices that continue, and too few of them for a pass."""
    waiting, open_attempts = state.in_flight.queue, state.in_flight.open_attempts
    few = len(waiting) < open_attempts // _COMPANY
    return few and all(request.sliced for request in waiting)


def _divisible(request: RequestRecord, able: Capabilities) -> bool:
    """Return whether the slices of a request give the same response as one attempt."""
    prompt, sampling = request.rollout.group.prompt, request.sampling
    if not (able.stops_first or sampling.ignore_eos) or able.context_tokens is None:
        return False
    # An engine refuses or cuts a request that is too long, by its whole limit.
    if request.rollout.context_tokens + request.remaining > able.context_tokens:
        return False
    # Penalties, stop strings and grammars see the output of one attempt.
    return not (sampling.extra or request.media or prompt.media)


def _crowds(state: SchedulerState, request: RequestRecord, engine: str, able: Capabilities) -> bool:
    """Return whether the engine may have no room for requests with the whole limit of this one.

    It is the rule of :class:`~aprilsched.kernel.values.capabilities.Reservation`.
    """
    if able.reservation is None or able.kv_tokens is None:
        return False
    in_flight = state.in_flight
    rest = min(request.remaining, able.reservation.clip)
    running = in_flight.held_on[engine] + _SHARE * rest * in_flight.open[engine]
    return running + _TOGETHER * rest > able.kv_tokens
