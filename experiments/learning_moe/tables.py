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

from aprilsched.analysis.style import GREY, PALETTE, new_figure, save  # noqa: E402

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
    """The three levels of a policy, from its waiting cells; out of reach without any."""
    waiting = [cell for cell in found if cell["arm"] == "waiting"]
    if not waiting:
        return [float("inf")] * len(SHARES)
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


def _cell(value: dict[str, float], digits: str) -> str:
    if value["low"] == value["high"]:
        return f"{value['mean']:{digits}}"
    return f"{value['mean']:{digits}} ({value['low']:{digits}} to {value['high']:{digits}})"


ROWS = (
    *((f"seconds to the {name} level", f"seconds_to_{number}", ".1f")
      for number, name in enumerate(("low", "middle", "high"))),
    ("middle: of waiting's time", "seconds_to_1_of_waiting", ".2f"),
    ("middle: of APRIL's time, equal KV", "seconds_to_1_of_april", ".2f"),
    ("updates to the middle level", "updates_to_1", ".1f"), ("end level", "end", ".3f"),
    ("updates", "updates", ".0f"), ("seconds of an update", "update_s", ".2f"),
    ("waits for tokens, s", "waits_s", ".2f"), ("trains, s", "trains_s", ".2f"),
    ("refit, s", "refit_s", ".2f"), ("off-policy share", "off_policy", ".2f"),
    ("mean age, updates", "age", ".2f"), ("sd of the ratio", "ratio_sd", ".3f"),
    ("truncated share", "truncated", ".5f"), ("entropy, nats", "entropy", ".3f"),
    ("mean length", "length", ".0f"), ("at the cap", "capped", ".3f"),
    ("engine: generating", "engine_decode", ".2f"),
    ("engine: waiting for the last responses", "engine_tail", ".2f"),
    ("engine: waiting for the trainer", "engine_trainer", ".2f"),
    ("engine: recomputing contexts", "engine_re_prefill", ".3f"),
)  # fmt: skip
AGES = (0, 1, 2, 4, 6)


def markdown(everything: dict[str, Any]) -> str:
    """The tables of README.md: one of the arms for each policy, and one of the ratios."""
    parts: list[str] = []
    for kind in ("moe", "dense"):
        arms = everything[kind]["arms"]
        lines = ["| | " + " | ".join(NAMES[arm] for arm in arms) + " |"]
        lines.append("|---" * (1 + len(arms)) + "|")
        lines.append("| seeds | " + " | ".join(str(arms[arm]["seeds"]) for arm in arms) + " |")
        for label, key, digits in ROWS:
            told = [_cell(arms[arm][key], digits) if key in arms[arm] else "" for arm in arms]
            lines.append(f"| {label} | " + " | ".join(told) + " |")
        parts.append("\n".join(lines))
    lines = ["| policy, arm, routing in the ratio | keys | " +
             " | ".join(f"age {age}" for age in AGES) + " |"]  # fmt: skip
    lines.append("|---" * (2 + len(AGES)) + "|")
    for kind in ("moe", "dense"):
        by_key = {(r["arm"], r["routing"], r["stale_keys"], r["age"]): r
                  for r in everything[kind]["ratios"]}  # fmt: skip
        for arm, routing, kept in sorted({key[:3] for key in by_key}):
            found = [by_key.get((arm, routing, kept, age)) for age in AGES]
            told = ["" if r is None or r["tokens"] < FEWEST else
                    f"{r['tail']:.3f}, {r['layers']:.3f}" if kind == "moe" else
                    f"{r['tail']:.3f}" for r in found]  # fmt: skip
            if any(told):
                of = f"{kind}, {NAMES[arm]}, {routing if kind == 'moe' else 'none'}"
                lines.append(f"| {of} | {'older' if kept else 'own'} | " + " | ".join(told) + " |")
    parts.append("\n".join(lines))
    return "\n\n".join(parts)


def curves(axes: Any, kind: str = "moe") -> None:
    """Held-out reward over the wall clock: the mean of each arm, and each evaluation."""
    own = [cell for cell in cells() if cell["policy"] == kind]
    for arm, colour in COLOURS.items():
        found = [cell["evaluations"] for cell in own if cell["arm"] == arm]
        if not found:
            continue
        upto = min(each[-1]["seconds"] for each in found)
        grid = np.linspace(0, upto, 60)
        mean = np.mean([
            np.interp(grid, [e["seconds"] for e in each], [e["held_out"] for e in each])
            for each in found
        ], axis=0)  # fmt: skip
        style = "--" if arm.endswith("-own") else "-"
        axes.plot(grid, mean, style, color=colour, linewidth=2, label=NAMES[arm])
        for each in found:
            axes.plot([e["seconds"] for e in each], [e["held_out"] for e in each], ".",
                      markersize=4, alpha=0.5, color=colour)  # fmt: skip
    axes.set(xlabel="seconds of generation and training", ylabel="held-out problems solved")
    axes.legend(frameon=False, loc="lower right", fontsize=8)


def tails(axes: Any, found: dict[str, Any]) -> None:
    """The tail of the ratio by age, of auto with KV kept."""
    for kind, routing, label, colour in (
        ("moe", "own", "mixture, own routing", PALETTE[1]),
        ("moe", "replayed", "mixture, replayed routing", PALETTE[5]),
        ("dense", "own", "dense", GREY),
    ):  # fmt: skip
        rows = by_age(found[kind]["ratios"], "auto-kept", routing)
        axes.plot(list(rows), list(rows.values()), "o-", color=colour, label=label)
    axes.set(xlabel="age of the token, updates", yscale="log",
             ylabel="|ln ratio| that 1 of 1,000 tokens exceeds")  # fmt: skip
    axes.legend(frameon=False, fontsize=8)


FEWEST = 20_000
"""Tokens below which the tail of a class is not told."""


def by_age(rows: Sequence[dict[str, Any]], arm: str, routing: str) -> dict[int, float]:
    """The tail by age, of the tokens with stale keys where there are enough of them, and of the
    others where not."""
    found: dict[int, float] = {}
    for row in sorted(rows, key=lambda row: row["stale_keys"]):
        if row["arm"] == arm and row["routing"] == routing and row["tokens"] >= FEWEST:
            found[row["age"]] = row["tail"]
    return dict(sorted(found.items()))


def main() -> None:
    found = result()
    (HERE / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    print(markdown(found))
    print("wrong:", found["wrong"], "resumed:", found["resumed"])
    figure = new_figure(12, 4.6)
    left, right = figure.subplots(1, 2)
    curves(left)
    tails(right, found)
    figure.tight_layout()
    save(figure, HERE / "learning_moe.png")


if __name__ == "__main__":
    main()
