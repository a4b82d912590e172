"""Draws faults from a seed: every kind, at random times, on one engine, some or all."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from tests.support import faults as of
from tests.support.faults import (
    KINDS,
    Answer,
    Corrupt,
    Cut,
    Delay,
    Fault,
    Garbage,
    Hang,
    LoseAnswer,
    Restart,
)

OPEN_S = 1.0
"""The fleet is open by this time; an earlier fault would only make the opening fail."""
_FLOOD_BYTES = 2**22
_TOKENS = (0, 16, 100, 300)
_ROUTES = (
    of.GENERATE,
    ("/pause_generation",),
    ("/continue_generation",),
    of.ABORT,
    ("/model_info",),
    of.STEERING,
    of.UPDATES,
    of.CONTROL,
    of.INFO,
    of.ALL,
)
_CHANGES = (
    of.few_logprobs,
    of.no_logprobs,
    *map(of.strange_logprob, ("null", "NaN", "Infinity", "1e999", '"-0.5"')),
    of.other_ids,
    of.out_of_order,
    of.twice,
    of.twice_at_the_finish,
    *map(of.more_tokens, (1, 16, 1000)),
)

Script: TypeAlias = list[tuple[Fault, list[int]]]
"""Faults, and the engines that they affect."""


def random_script(seed: int, *, engines: int, horizon_s: float) -> Script:
    """Draw faults that start before `horizon_s`.

    Even seeds have one fault, each kind equally often; odd ones have two to five.
    """
    rng = np.random.default_rng((seed, 1))
    alone = seed % 2 == 0
    chosen = [KINDS[seed // 2 % len(KINDS)]]
    if not alone:
        chosen += [KINDS[rng.integers(len(KINDS))] for _ in range(rng.integers(1, 5))]
    script: Script = []
    for kind in chosen:
        size = int(rng.choice([1, 2, engines], p=[0.6, 0.2, 0.2]))
        hit = sorted(rng.choice(engines, size, replace=False).tolist())
        script.append((_at_some_time(_fault(kind, rng), rng, horizon_s, alone=alone), hit))
    return script


def _at_some_time(
    fault: Fault, rng: np.random.Generator, horizon_s: float, *, alone: bool
) -> Fault:
    start = round(float(rng.uniform(OPEN_S, 0.6 * horizon_s)), 3)
    if isinstance(fault, Hang | Restart):
        if rng.random() < 0.6:
            return replace(fault, at=start)
        return replace(fault, at=start, routes=_ROUTES[rng.integers(len(_ROUTES))], times=1)
    if rng.random() < 0.1:
        when: dict[str, Any] = {"at": OPEN_S}  # until the end
    else:
        when = {"at": start, "until": round(start + 1 + float(rng.exponential(60)), 3)}
    counts: dict[str, list[float]] = {
        "after": [2, 3, 10],
        "probability": [0.1, 0.5],
        "times": [1, 3],
    }
    for name, values in counts.items():
        if not alone and rng.random() < 0.3:
            when[name] = values[rng.integers(len(values))]
    return replace(fault, **when)


def _fault(kind: type[Fault], rng: np.random.Generator) -> Fault:
    seconds = round(math.exp(rng.normal(math.log(40), 1.3)), 3)
    routes = _ROUTES[rng.integers(len(_ROUTES))]
    in_stream = bool(rng.random() < 0.5)
    where: dict[str, Any] = {"routes": routes}
    if in_stream:
        where = {"after_tokens": int(rng.choice(_TOKENS))}
    if kind is Answer:
        return _answer(where, rng)
    if kind is Delay:
        if rng.random() < 0.3:
            pieces = int(rng.choice([1, 16, 256]))
            return Delay(seconds=0.2, piece=pieces, **where)
        endless = rng.random() < 0.3
        return Delay(seconds=float("inf") if endless else seconds / 10, **where)
    if kind is Hang:
        rate = float(rng.choice([0.0, 0.01, 0.1, 0.5]))
        return Hang(seconds=seconds * 3, rate=rate)
    if kind is Cut:
        return Cut(clean=bool(rng.random() < 0.5), **where)
    if kind is Corrupt:
        change = _CHANGES[rng.integers(len(_CHANGES))]
        return Corrupt(change=change, after_tokens=int(rng.choice(_TOKENS)))
    if kind is Garbage:
        what = str(rng.choice(["noise", "raw", "half", "endless", "comments"]))
        size = _FLOOD_BYTES if what in ("endless", "comments") else 256
        return Garbage(what=what, size=size, **where)  # type: ignore[arg-type]
    if kind is LoseAnswer:
        return LoseAnswer(silent=bool(rng.random() < 0.5), routes=_ROUTES[rng.integers(1, 10)])
    endless = rng.random() < 0.1
    return Restart(
        seconds=float("inf") if endless else seconds, keeps_weights=bool(rng.random() < 0.3)
    )


def _answer(where: dict[str, Any], rng: np.random.Generator) -> Answer:
    """Draw a refusal, a refused update, or a false answer."""
    shape = rng.choice(["refused", "refused update", "stuck version", "ignored abort"])
    if shape == "refused update":
        message = str(rng.choice(["Failed to get weights iterator", "Failed to update weights"]))
        return of.failed_update(int(rng.choice([200, 400, 500])), message)
    if shape == "stuck version":
        done = {"success": True, "message": "Succeeded to update model weights."}
        return Answer(status=200, content=done, routes=of.UPDATES)
    if shape == "ignored abort":
        return Answer(status=200, routes=of.ABORT)
    status = int(rng.choice([400, 401, 404, 408, 429, 500, 502, 503]))
    return Answer(status=status, retry_after=2.0 if rng.random() < 0.5 else None, **where)
