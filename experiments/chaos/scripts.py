"""Draws fault scripts from a seed: every kind, at random times, on one engine, some or all."""

from __future__ import annotations

from typing import Any

import numpy as np

from aprilsched.testing.faults.kinds import KINDS, EngineWide, InStream

__all__ = ["random_script"]

OPEN_S = 1.0
"""By then the fleet is open; faults before that make the opening fail, and that is all."""
_FLOOD_BYTES = 2**22
_TOKENS = (0, 16, 100, 300)
_ROUTES = (
    ["/generate"],
    ["/pause_generation"],
    ["/continue_generation"],
    ["/abort_request"],
    ["/model_info"],
    ["steering"],
    ["updates"],
    ["control"],
    ["info"],
    ["all"],
)

Table = dict[str, Any]


def random_script(seed: int, *, engines: int, horizon_s: float) -> Table:
    """The content of a script, of faults that begin before `horizon_s`.

    Even seeds have one fault, each kind equally often; odd ones have two to five.
    """
    rng = np.random.default_rng((seed, 1))
    kinds = list(KINDS)
    alone = seed % 2 == 0
    chosen = [kinds[seed // 2 % len(kinds)]]
    if not alone:
        chosen += rng.choice(kinds, int(rng.integers(1, 5))).tolist()
    faults = [_fault(kind, rng, engines, horizon_s, alone=alone) for kind in chosen]
    return {"seed": seed, "fault": faults}


def _fault(
    kind: str, rng: np.random.Generator, engines: int, horizon_s: float, *, alone: bool
) -> Table:
    hit = rng.choice(engines, int(rng.choice([1, 2, engines], p=[0.6, 0.2, 0.2])), replace=False)
    fault: Table = {"kind": kind, "engines": sorted(hit.tolist())}
    cls = KINDS[kind]
    begin = round(float(rng.uniform(OPEN_S, 0.6 * horizon_s)), 3)
    fault |= _parameters(kind, rng)
    if issubclass(cls, EngineWide) and rng.random() < 0.6:
        return fault | {"at": begin}
    if issubclass(cls, EngineWide):
        fault |= {"routes": _ROUTES[rng.integers(len(_ROUTES))], "times": 1}
    elif kind == "reset" and rng.random() < 0.5:
        fault |= {"after_tokens": int(rng.choice(_TOKENS)), "carried_out": False}
    elif not cls.routes_are_fixed and rng.random() < 0.5:
        fault |= _routes(kind, rng)
    fault["at"] = begin
    if rng.random() < 0.1:
        fault["at"] = OPEN_S  # and to the end
    else:
        fault["until"] = round(begin + 1 + float(rng.exponential(60)), 3)
    for name, values in (
        ("after", [2, 3, 10]),
        ("every", [2, 5]),
        ("probability", [0.1, 0.5]),
        ("times", [1, 3]),
    ):
        if not alone and rng.random() < 0.3:
            fault.setdefault(name, rng.choice(values).item())
    if issubclass(cls, InStream) or (kind in ("truncate", "garbage") and rng.random() < 0.5):
        fault["after_tokens"] = int(rng.choice(_TOKENS))
    return fault


def _routes(kind: str, rng: np.random.Generator) -> Table:
    if kind == "flood-answer":
        return {"routes": _ROUTES[int(rng.integers(1, len(_ROUTES) - 1))]}
    if kind in ("refit-fails", "stuck-version"):
        return {"routes": ["/update_weights_from_disk"]}
    return {"routes": _ROUTES[rng.integers(len(_ROUTES))]}


def _parameters(kind: str, rng: np.random.Generator) -> Table:
    seconds = round(float(np.exp(rng.normal(np.log(40), 1.3))), 3)
    carried_out = bool(rng.random() < 0.5)
    match kind:
        case "delay":
            return {"seconds": round(seconds / 10, 3), "every_event": bool(rng.random() < 0.3)}
        case "silence":
            return {"seconds": _perhaps_for_ever(seconds, rng), "carried_out": carried_out}
        case "stall":
            return {"seconds": _perhaps_for_ever(seconds, rng)}
        case "reset":
            return {"carried_out": carried_out}
        case "status":
            status = int(rng.choice([400, 401, 404, 408, 429, 500, 502, 503]))
            later = {"retry_after": 2.0} if rng.random() < 0.5 else {}
            return {"status": status, "carried_out": carried_out, **later}
        case "slow-loris":
            return {"bytes": int(rng.choice([1, 16, 256])), "seconds": 0.2}
        case "garbage":
            return {"raw": bool(rng.random() < 0.5)}
        case "refit-fails":
            messages = ["Failed to get weights iterator", "Failed to update weights"]
            return {
                "status": int(rng.choice([200, 400, 500])),
                "message": str(rng.choice(messages)),
            }
        case "error-event":
            return {"code": int(rng.choice([400, 429, 500, 503]))}
        case "flood-answer" | "flood-event" | "flood-comments":
            return {"bytes": _FLOOD_BYTES}
        case "flood-tokens":
            return {"tokens": int(rng.choice([1, 16, 1000]))}
        case "hang":
            return {"seconds": seconds * 2}
        case "slow":
            return {"seconds": seconds * 4, "factor": float(rng.choice([0.01, 0.1, 0.5]))}
        case "die":
            keeps = bool(rng.random() < 0.3)
            return {"seconds": _perhaps_for_ever(seconds, rng, 0.1), "keeps_weights": keeps}
        case _:
            return {}


def _perhaps_for_ever(seconds: float, rng: np.random.Generator, chance: float = 0.4) -> float:
    return float("inf") if rng.random() < chance else seconds
