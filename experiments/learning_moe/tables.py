"""Makes the tables and the picture of README.md from the raw data in this folder.

python experiments/learning_moe/tables.py

Intervals are from the 5th to the 95th percentile of bootstrap samples of the seeds, as in
experiments/learning. With two seeds they are the range of the seeds.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "learning"))

from analysis import interval, reached, rising  # noqa: E402

from aprilsched.analysis.style import GREY, PALETTE  # noqa: E402

NAMES = {
    "waiting": "waiting", "april": "APRIL, recompute", "april-kept": "APRIL, KV kept",
    "april-kept-own": "APRIL, KV kept, own routing", "areal": "AReaL, recompute",
    "auto": "auto, recompute", "auto-kept": "auto, KV kept",
    "auto-kept-own": "auto, KV kept, own routing",
}  # fmt: skip
COLOURS = {
    "waiting": GREY, "april": "#999933", "april-kept": PALETTE[1], "april-kept-own": PALETTE[3],
    "areal": PALETTE[0], "auto": PALETTE[2], "auto-kept": PALETTE[5], "auto-kept-own": "#882255",
}  # fmt: skip
EDGES = np.geomspace(1e-3, 10, 49)
"""The classes of |ln ratio|, as in mixture.py."""
SHARES = (0.25, 0.5, 0.75)
"""Where the three levels lie between the first reward and waiting's last one."""
TAIL = 0.999
LAST = 2
"""Evaluations at the end of a cell whose mean is its end level."""
Cell = dict[str, Any]


def cells() -> list[Cell]:
    """The finished cells of all stretches, each with its policy's kind and its stretch."""
    found: list[Cell] = []
    for path in sorted((HERE / "raw").glob("cells-*.jsonl.gz")):
        _, stretch, _, kind = path.name.removesuffix(".jsonl.gz").split("-")
        with gzip.open(path, "rt") as file:
            lines = [json.loads(line) for line in file]
        found += [line | {"stretch": stretch, "policy": kind} for line in lines
                  if line["kind"] == "cell"]  # fmt: skip
    return found


def levels(found: Sequence[Cell]) -> list[float]:
    """The three levels of a policy, from its waiting cells."""
    waiting = [cell for cell in found if cell["arm"] == "waiting"]
    first = float(np.mean([cell["evaluations"][0]["held_out"] for cell in waiting]))
    last = float(np.mean([_end(cell) for cell in waiting]))
    return [first + share * (last - first) for share in SHARES]


def _end(cell: Cell) -> float:
    return float(np.mean([each["held_out"] for each in cell["evaluations"][-LAST:]]))


def figures(cell: Cell, targets: Sequence[float]) -> dict[str, float]:
    """The figures of one cell."""
    evaluated, updates = cell["evaluations"], cell["updates"]
    held = [each["held_out"] for each in evaluated]
    found: dict[str, float] = {}
    for key, name in (("seconds", "seconds"), ("update", "updates")):
        at = [each[key] for each in evaluated]
        for number, target in enumerate(targets):
            found[f"{name}_to_{number}"] = reached(held, at, target)
    found["end"] = _end(cell)
    found["best"] = rising(held)[-1]
    later = updates[3:]  # nothing is carried into the first batches
    total = sum(line["tokens"] for line in later)
    for name in ("off_policy", "age", "entropy", "truncated", "clipped", "ratio_sd"):
        found[name] = sum(line[name] * line["tokens"] for line in later) / total
    for name in ("length", "capped", "waits_s", "trains_s", "refit_s"):
        found[name] = sum(line[name] for line in later) / len(later)
    found["updates"] = len(updates)
    found["update_s"] = updates[-1]["seconds"] / len(updates)
    found["last_entropy"] = float(np.mean([line["entropy"] for line in updates[-5:]]))
    whole = sum(cell["engine_s"].values())
    for part, seconds in cell["engine_s"].items():
        found[f"engine_{part}"] = seconds / whole
    return found


def table(found: Sequence[Cell]) -> dict[str, Any]:
    """The figures of each arm of one policy, and its levels."""
    targets = levels(found)
    by_arm: dict[str, list[dict[str, float]]] = defaultdict(list)
    for cell in found:
        by_arm[cell["arm"]].append(figures(cell, targets))
    arms: dict[str, Any] = {}
    for arm in filter(by_arm.__contains__, NAMES):
        own = by_arm[arm]
        arms[arm] = {"seeds": len(own)} | {
            name: interval([[each[name] for each in own]]) for name in own[0]
        }
        others = {"waiting": "waiting",
                  "april": "april-kept" if "kept" in arm else "april"}  # fmt: skip
        for name, other in others.items():
            for number in range(len(SHARES)):
                if other in by_arm:
                    key = f"seconds_to_{number}"
                    times = [[each[key] for each in by_arm[which]] for which in (arm, other)]
                    arms[arm][f"{key}_of_{name}"] = interval(times, lambda a, b: a / b)
    return {"levels": targets, "arms": arms}


# --- ratios --------------------------------------------------------------------------------------


def quantile(counts: np.ndarray, share: float) -> float:
    """A quantile of |ln ratio| from the counts of its classes, interpolated within a class."""
    edges = np.concatenate([[0.0], EDGES, [EDGES[-1] * 2]])
    below = np.concatenate([[0.0], counts.cumsum() / counts.sum()])
    return float(np.interp(share, below, edges))


def ratios(found: Sequence[Cell]) -> list[dict[str, Any]]:
    """By arm, routing, age and whether keys were stale: tokens, and the tail of |ln ratio|."""
    sums: dict[tuple[Any, ...], np.ndarray] = defaultdict(lambda: np.zeros(len(EDGES) + 1))
    other: dict[tuple[Any, ...], np.ndarray] = defaultdict(lambda: np.zeros(2))
    flips: dict[tuple[Any, ...], np.ndarray] = defaultdict(lambda: np.zeros(2))
    for cell in found:
        for routing in ("own", "replayed"):
            for age, kept, moved, place, count in cell["measured"][routing]:
                key = (cell["arm"], routing, age, kept)
                sums[key][place] += count
                other[key] += (count, count * moved)
        for age, kept, tokens, layers in cell["measured"]["flips"]:
            flips[cell["arm"], age, kept] += (tokens, layers)
    rows = []
    for (arm, routing, age, kept), counts in sorted(sums.items()):
        tokens, moved = other[arm, routing, age, kept]
        of, layers = flips[arm, age, kept]
        rows.append({
            "arm": arm, "routing": routing, "age": age, "stale_keys": bool(kept),
            "tokens": int(tokens), "median": quantile(counts, 0.5),
            "tail": quantile(counts, TAIL), "beyond_a_tenth":
            float(counts[np.searchsorted(EDGES, 0.1) + 1 :].sum() / tokens),
            "routed_otherwise": float(moved / tokens), "layers": float(layers / of / 6),
        })  # fmt: skip
    return rows


# --- checks, tables and the picture --------------------------------------------------------------


def checks(found: Sequence[Cell]) -> list[str]:
    """What is wrong in the runs' own summaries."""
    wrong: list[str] = []
    for cell in found:
        rollouts = cell["summary"]["rollouts"]
        for what, count in (
            ("rollouts without exact versions", sum(line["inexact"] for line in cell["updates"])),
            ("lost rollouts", rollouts["lost"]),
            ("rollouts delivered twice", rollouts["duplicated"]),
            ("rollouts dropped", sum(rollouts["dropped"].values())),
            ("lost engines", cell["lost_engines"]),
            ("rows of another pass", cell["measured"]["inexact_rows"]),
            ("restarts that were not ours", cell["opened"] - 1 - cell["resumed"]),
        ):  # fmt: skip
            if count:
                wrong.append(f"{cell['policy']} {cell['arm']} {cell['seed']}: {count} {what}")
    return wrong


def result() -> dict[str, Any]:
    """Everything that README.md and the notebook say."""
    found = cells()
    kinds = sorted({cell["policy"] for cell in found})
    by_kind = {kind: [cell for cell in found if cell["policy"] == kind] for kind in kinds}
    everything = {
        kind: table(own) | {"ratios": ratios(own)} for kind, own in by_kind.items()
    } | {
        "wrong": checks(found),
        "resumed": [f"{c['policy']} {c['arm']} {c['seed']}" for c in found if c["resumed"]],
    }  # fmt: skip
    return json.loads(json.dumps(everything), parse_float=lambda text: float(f"{float(text):.4g}"))
