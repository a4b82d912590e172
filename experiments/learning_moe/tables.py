"""Makes the tables and the picture of README.md from the raw data in this folder.

python experiments/learning_moe/tables.py

Intervals are from the 5th to the 95th percentile. Those of what is learned are of seeds and
evaluations that are drawn again: an evaluation of 512 problems is uncertain by 0.02. The others are
of the seeds alone, as in experiments/learning.
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

from aprilsched.observe.report.style import GREY, PALETTE, new_figure, save  # noqa: E402

NAMES = {
    "sync": "synchronous", "april": "APRIL, recompute", "april-kept": "APRIL, KV kept",
    "april-kept-own": "APRIL, KV kept, own routing", "areal": "AReaL, recompute",
    "auto": "auto, recompute", "auto-kept": "auto, KV kept",
    "auto-kept-own": "auto, KV kept, own routing",
    "auto-kept-4": "auto, KV kept, staleness up to 4",
    "auto-kept-half": "auto, KV kept, half the rate", "auto-kept-clip": "auto, KV kept, clip",
}  # fmt: skip
COLOURS = {
    "sync": GREY, "april": "#999933", "april-kept": PALETTE[1], "april-kept-own": PALETTE[3],
    "areal": PALETTE[0], "auto": PALETTE[2], "auto-kept": PALETTE[5], "auto-kept-own": "#882255",
    "auto-kept-4": "#44aa99", "auto-kept-half": "#88ccee", "auto-kept-clip": "#332288",
}  # fmt: skip
EDGES = np.geomspace(1e-3, 10, 49)
"""The classes of |ln ratio|, as in mixture.py."""
SHARES = (0.25, 0.5, 0.75)
"""Where the three levels lie between the first reward and the synchronous schedule's last one."""
TAIL = 0.999
LAYERS = 6
LAST = 2
"""Evaluations at the end of a cell whose mean is its end level."""
PROBLEMS, DRAWS = 512, 1000
UPDATES = 22
"""Updates that every arm has made, at which they are compared too."""
KINDS = ("moe", "dense", "moe1024")
"""The policies; the last one's responses have at most 1,024 tokens."""
TABLES = ("moe-d", "moe-a", "dense-a", "moe1024-c")
"""The policies by their stretches, since each began with weights of its own, and has its levels."""
FALLEN = 0.2
"""A run whose last reward is so much below its best one has fallen apart."""
SPAN = 10
"""Updates over which the spread of the ratio is told."""
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
    # All cells of a stretch begin with the same weights, which each server evaluated once.
    firsts: dict[tuple[str, str], set[float]] = defaultdict(set)
    for cell in found:
        firsts[cell["stretch"], cell["policy"]].add(cell["evaluations"][0]["held_out"])
    for cell in found:
        values = firsts[cell["stretch"], cell["policy"]]
        cell["evaluations"][0]["held_out"] = float(np.mean(sorted(values)))
        cell["first_evaluations"] = len(values)
    return found


def levels(found: Sequence[Cell]) -> list[float]:
    """The three levels of a policy, from its synchronous cells."""
    synchronous = [cell for cell in found if cell["arm"] == "sync"]
    first = float(np.mean([cell["evaluations"][0]["held_out"] for cell in synchronous]))
    last = float(np.mean([learned(cell, None, [])["end"] for cell in synchronous]))
    return [first + share * (last - first) for share in SHARES]


def fallen(held: Sequence[float]) -> bool:
    """Whether a run of these held-out rewards has fallen apart."""
    return max(held) - held[-1] > FALLEN


def learned(cell: Cell, held: Sequence[float] | None, targets: Sequence[float]) -> dict[str, float]:
    """What follows from the evaluations of a cell, or from others, `held`, at the same places."""
    evaluated = cell["evaluations"]
    held = [each["held_out"] for each in evaluated] if held is None else held
    found = {"end": float(np.mean(held[-LAST:]))}
    if fallen(held):
        # A level was reached before the run fell apart.
        held = held[: int(np.argmax(held)) + 1]
        evaluated = evaluated[: len(held)]
    for key, name in (("seconds", "seconds"), ("update", "updates")):
        at = [each[key] for each in evaluated]
        for number, target in enumerate(targets):
            found[f"{name}_to_{number}"] = reached(held, at, target)
    updates = [each["update"] for each in evaluated]
    found["after_updates"] = float(np.interp(UPDATES, updates, rising(held)))
    return found


def draws(cell: Cell, targets: Sequence[float]) -> dict[str, np.ndarray]:
    """:func:`learned` of evaluations that are drawn again, each as solved problems of as many."""
    random = np.random.default_rng(cell["seed"])
    shares = np.array([each["held_out"] for each in cell["evaluations"]])
    problems = np.full(len(shares), PROBLEMS)
    problems[0] *= cell["first_evaluations"]
    held = random.binomial(problems, shares, size=(DRAWS, len(shares))) / problems
    found = [learned(cell, row, targets) for row in held.tolist()]
    return {name: np.array([each[name] for each in found]) for name in found[0]}


def spent(cell: Cell) -> dict[str, float]:
    """The other figures of one cell."""
    updates = cell["updates"]
    later = updates[3:]  # nothing is carried into the first batches
    total = sum(line["tokens"] for line in later)
    found: dict[str, float] = {}
    for name in ("off_policy", "staleness", "entropy", "truncated", "clipped", "ratio_sd"):
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


def _told(mean: float, drawn: np.ndarray) -> dict[str, float]:
    # A level that is not reached is infinitely far; between such there is nothing to interpolate.
    low, high = np.quantile(drawn, [0.05, 0.95], method="nearest")
    return {"mean": mean, "low": float(low), "high": float(high)}


def table(found: Sequence[Cell]) -> dict[str, Any]:
    """The figures of each arm of one policy in one stretch, and its levels."""
    targets = levels(found)
    by_arm: dict[str, list[Cell]] = defaultdict(list)
    for cell in found:
        by_arm[cell["arm"]].append(cell)
    means: dict[str, dict[str, float]] = {}
    drawn: dict[str, dict[str, np.ndarray]] = {}
    random = np.random.default_rng(0)
    arms: dict[str, Any] = {}
    for arm in filter(by_arm.__contains__, NAMES):
        own = by_arm[arm]
        exact = [learned(cell, None, targets) for cell in own]
        again = [draws(cell, targets) for cell in own]
        means[arm] = {name: float(np.mean([each[name] for each in exact])) for name in exact[0]}
        seeds = random.integers(len(own), size=(DRAWS, len(own)))
        drawn[arm] = {
            name: np.take_along_axis(np.stack([each[name] for each in again], 1), seeds, 1).mean(1)
            for name in exact[0]
        }
        others = [spent(cell) for cell in own]
        arms[arm] = {
            "seeds": len(own),
            **{name: _told(means[arm][name], drawn[arm][name]) for name in exact[0]},
            **{name: interval([[each[name] for each in others]]) for name in others[0]},
        }
    for arm in arms:
        april = "april" + "-kept" * ("kept" in arm) + "-own" * arm.endswith("-own")
        for name, other in (("sync", "sync"), ("april", april)):
            for key in (f"seconds_to_{number}" for number in range(len(SHARES))):
                if other in arms and np.isfinite([means[arm][key], means[other][key]]).all():
                    ratio = means[arm][key] / means[other][key]
                    # Against itself there is nothing to be uncertain of.
                    by = drawn[arm][key] / drawn[other][key] if arm != other else np.ones(1)
                    arms[arm][f"{key}_of_{name}"] = _told(ratio, by[~np.isnan(by)])
    return {"levels": targets, "arms": arms}


# --- ratios --------------------------------------------------------------------------------------


def quantile(counts: np.ndarray, share: float) -> float:
    """A quantile of |ln ratio| from the counts of its classes, interpolated within a class."""
    edges = np.concatenate([[0.0], EDGES, [EDGES[-1] * 2]])
    below = np.concatenate([[0.0], counts.cumsum() / counts.sum()])
    return float(np.interp(share, below, edges))


def ratios(found: Sequence[Cell]) -> list[dict[str, Any]]:
    """By arm, routing, staleness and keys ("own", "older" than the weights, or "all"): tokens, the
    tail of |ln ratio|, and the share of a layer's tokens that the trainer routes otherwise."""
    sums: dict[tuple[Any, ...], np.ndarray] = defaultdict(lambda: np.zeros(len(EDGES) + 1))
    flips: dict[tuple[Any, ...], np.ndarray] = defaultdict(lambda: np.zeros(2))
    for cell in found:
        arm = cell["arm"]
        for routing in ("own", "replayed"):
            for age, kept, moved, place, count in cell["measured"][routing]:
                for keys, routed in (("older" if kept else "own", "any"), ("all", "any"),
                                     ("all", "otherwise" if moved else "same")):  # fmt: skip
                    sums[arm, routing, age, keys, routed][place] += count
        for age, kept, tokens, layers in cell["measured"]["flips"]:
            for keys in ("older" if kept else "own", "all"):
                flips[arm, age, keys] += (tokens, layers / LAYERS)
    rows = []
    for (arm, routing, age, keys, routed), counts in sorted(sums.items()):
        of, layers = flips[arm, age, keys]
        if counts.sum() >= FEWEST:
            rows.append({
                "arm": arm, "routing": routing, "staleness": age, "keys": keys, "routed": routed,
                "tokens": int(counts.sum()), "median": quantile(counts, 0.5),
                "hundredth": quantile(counts, 0.99), "tail": quantile(counts, TAIL),
                "layers": float(layers / of),
            })  # fmt: skip
    return rows


# --- stability -----------------------------------------------------------------------------------


def stability(found: Sequence[Cell]) -> list[dict[str, Any]]:
    """Whether each run fell apart: the spread of its ratios, and its reward at best and last."""
    rows = []
    for cell in found:
        updates = cell["updates"]
        held = [each["held_out"] for each in cell["evaluations"]]
        spread = [line["ratio_sd"] for line in updates]
        aged = sum(line["staleness"] * line["tokens"] for line in updates[3:])
        rows.append({
            "arm": cell["arm"], "seed": cell["seed"], "stretch": cell["stretch"],
            "updates": len(updates),
            "staleness": aged / sum(line["tokens"] for line in updates[3:]),
            "spread": [float(np.median(spread[at : at + SPAN]))
                       for at in range(SPAN, len(spread) - SPAN // 2, SPAN)],
            "best": max(held), "last": held[-1],
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
    """Everything that README.md and the notebook say; None is a time that is not reached."""
    found = cells()
    kinds = sorted({cell["policy"] for cell in found})
    by_kind = {kind: [cell for cell in found if cell["policy"] == kind] for kind in kinds}
    everything = {
        kind: {"ratios": ratios(own), "stability": stability(own)} for kind, own in by_kind.items()
    } | {
        name: table([c for c in found if f"{c['policy']}-{c['stretch']}" == name])
        for name in TABLES
    } | {
        "wrong": checks(found),
        "resumed": [f"{c['policy']} {c['arm']} {c['seed']}" for c in found if c["resumed"]],
    }  # fmt: skip
    return json.loads(
        json.dumps(everything),
        parse_float=lambda text: float(f"{float(text):.4g}"),
        parse_constant=lambda _: None,
    )


def _cell(value: dict[str, float | None], digits: str) -> str:
    mean, low, high = (
        "not reached" if (reached := value[key]) is None else f"{reached:{digits}}"
        for key in ("mean", "low", "high")
    )
    return mean if low == high else f"{mean} ({low} to {high})"


ROWS = (
    *((f"seconds to the {name} level", f"seconds_to_{number}", ".1f")
      for number, name in enumerate(("low", "middle", "high"))),
    ("middle: of the synchronous time", "seconds_to_1_of_sync", ".2f"),
    ("middle: of APRIL's, equal KV and routing", "seconds_to_1_of_april", ".2f"),
    ("high: of the synchronous time", "seconds_to_2_of_sync", ".2f"),
    ("updates to the middle level", "updates_to_1", ".1f"),
    (f"held-out after {UPDATES} updates", "after_updates", ".3f"),
    ("held-out, last two evaluations", "end", ".3f"),
    ("updates", "updates", ".0f"), ("seconds of an update", "update_s", ".2f"),
    ("waits for tokens, s", "waits_s", ".2f"), ("trains, s", "trains_s", ".2f"),
    ("refit, s", "refit_s", ".2f"), ("off-policy share", "off_policy", ".2f"),
    ("mean staleness, versions", "staleness", ".2f"), ("sd of the ratio", "ratio_sd", ".3f"),
    ("truncated share", "truncated", ".5f"), ("entropy, nats", "entropy", ".3f"),
    ("mean length", "length", ".0f"), ("at the cap", "capped", ".3f"),
    ("engine: generating", "engine_decode", ".2f"),
    ("engine: waiting for the last responses", "engine_tail", ".2f"),
    ("engine: waiting for the trainer", "engine_trainer", ".2f"),
    ("engine: recomputing contexts", "engine_re_prefill", ".3f"),
)  # fmt: skip
STALENESS = (0, 1, 2, 4, 6)


def _tail(row: dict[str, Any], kind: str) -> str:
    reached = f"{row['tail']:.3f}"
    return reached if kind == "dense" else f"{reached}, {100 * row['layers']:.1f} %"


def markdown(everything: dict[str, Any]) -> str:
    """The tables of README.md: one of the arms for each policy, one of the ratios, and one of the
    stability of each run."""
    parts: list[str] = []
    for name in TABLES:
        arms = everything[name]["arms"]
        lines = ["| | " + " | ".join(NAMES[arm] for arm in arms) + " |"]
        lines.append("|---" * (1 + len(arms)) + "|")
        lines.append("| seeds | " + " | ".join(str(arms[arm]["seeds"]) for arm in arms) + " |")
        for label, key, digits in ROWS:
            reached = [_cell(arms[arm][key], digits) if key in arms[arm] else "" for arm in arms]
            lines.append(f"| {label} | " + " | ".join(reached) + " |")
        parts.append("\n".join(lines))
    heads = " | ".join(f"staleness {age}" for age in STALENESS)
    lines = [f"| policy, arm | routing | keys | {heads} |", f"{'|---' * (3 + len(STALENESS))}|"]
    for kind in ("moe", "dense"):
        by_key = {(r["arm"], r["keys"], r["routing"], r["staleness"]): r
                  for r in everything[kind]["ratios"] if r["routed"] == "any"}  # fmt: skip
        for arm, keys, routing in sorted({key[:3] for key in by_key}):
            several = (arm, "older", routing, 1) in by_key
            if (keys == "all") == several:
                continue
            found = [by_key.get((arm, keys, routing, age)) for age in STALENESS]
            reached = ["" if row is None else _tail(row, kind) for row in found]
            which = {"own": "the trainer's", "replayed": "replayed"}[routing]
            cells_of_row = [f"{kind}, {NAMES[arm]}", "" if kind == "dense" else which,
                            "own" if keys == "all" else keys, *reached]  # fmt: skip
            lines.append("| " + " | ".join(cells_of_row) + " |")
    parts.append("\n".join(lines))
    spans = range(SPAN, 7 * SPAN, 2 * SPAN)
    head = [f"sd of the ratio, updates {at + 1} to {at + SPAN}" for at in spans]
    lines = ["| policy, arm, seed, stretch | updates | staleness | " + " | ".join(head)
             + " | last | best held-out | last |", "|---" * (len(head) + 6) + "|"]  # fmt: skip
    for kind in KINDS:
        for row in everything[kind]["stability"]:
            spread = row["spread"]
            reached = [f"{spread[at // SPAN - 1]:.3f}" if at // SPAN <= len(spread) else ""
                    for at in spans]  # fmt: skip
            lines.append("| " + " | ".join([
                f"{kind}, {NAMES[row['arm']]}, {row['seed']}, {row['stretch']}",
                str(row["updates"]), f"{row['staleness']:.1f}", *reached, f"{spread[-1]:.3f}",
                f"{row['best']:.3f}", f"{row['last']:.3f}",
            ]) + " |")  # fmt: skip
    parts.append("\n".join(lines))
    return "\n\n".join(parts)


def curves(axes: Any, name: str = "moe-d") -> None:
    """Held-out reward over the wall clock of one policy in one stretch: the mean of each arm, and
    each evaluation."""
    own = [cell for cell in cells() if f"{cell['policy']}-{cell['stretch']}" == name]
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
    """The tail of the ratio by staleness, of auto with KV kept."""
    for kind, arm, routing, label, style, colour in (
        ("moe", "auto-kept", "own", "mixture, the trainer's routing", "o-", PALETTE[1]),
        ("moe", "auto-kept", "replayed", "mixture, replayed routing", "x--", PALETTE[5]),
        ("moe", "auto-kept-clip", "replayed", "mixture, clip", "o-", COLOURS["auto-kept-clip"]),
        ("moe", "auto-kept-half", "replayed", "mixture, half the rate", "o-",
         COLOURS["auto-kept-half"]),
        ("dense", "auto-kept", "own", "dense", "o-", GREY),
    ):  # fmt: skip
        rows = by_staleness(found[kind]["ratios"], arm, routing)
        axes.plot(list(rows), list(rows.values()), style, color=colour, label=label)
    axes.set(xlabel="staleness of the token, versions", ylim=(0, None),
             ylabel="|ln ratio| that 1 of 1,000 tokens exceeds")  # fmt: skip
    axes.legend(frameon=False, fontsize=8)


def spreads(axes: Any, kind: str = "moe1024") -> None:
    """The spread of the ratios of the last updates in each run of a policy, up to a cross where the
    reward has fallen to half of its best."""
    named: set[str] = set()
    for cell in cells():
        if cell["policy"] != kind:
            continue
        arm, updates = cell["arm"], cell["updates"]
        held = [each["held_out"] for each in cell["evaluations"]]
        best = np.maximum.accumulate([line["reward"] for line in updates])
        fell = [at for at, line in enumerate(updates)
                if fallen(held) and line["reward"] < best[at] / 2]  # fmt: skip
        until = fell[0] + 1 if fell else len(updates)
        spread = [
            np.median([line["ratio_sd"] for line in updates[max(0, at - SPAN) : at]])
            for at in range(1, until + 1)
        ]
        axes.plot(range(1, until + 1), spread, "--" if arm.endswith("-own") else "-",
                  color=COLOURS[arm], linewidth=1.5,
                  label=None if arm in named else NAMES[arm])  # fmt: skip
        if fell:
            axes.plot(until, spread[-1], "x", markersize=9, markeredgewidth=2, color=COLOURS[arm])
        named.add(arm)
    cap = "1,024" if kind == "moe1024" else "3,072"
    axes.set(yscale="log", ylim=(5e-3, 10), xlabel=f"updates, at most {cap} tokens",
             ylabel=f"sd of the ratio, median of {SPAN} updates")  # fmt: skip
    axes.legend(frameon=False, loc="upper right", fontsize=8)


FEWEST = 10_000
"""Tokens below which the tail of a class is not told."""


def by_staleness(rows: Sequence[dict[str, Any]], arm: str, routing: str) -> dict[int, float]:
    """The tail by staleness, of all tokens of an arm."""
    key = (arm, routing, "all", "any")
    return {row["staleness"]: row["tail"] for row in rows
            if (row["arm"], row["routing"], row["keys"], row["routed"]) == key}  # fmt: skip


def main() -> None:
    found = result()
    (HERE / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    print(markdown(found))
    print("wrong:", found["wrong"], "resumed:", found["resumed"])
    figure = new_figure(14, 9.5)
    (first, second), (third, fourth) = figure.subplots(2, 2)
    curves(first)
    tails(second, found)
    spreads(third, "moe")
    spreads(fourth)
    save(figure, HERE / "learning_moe.png")


if __name__ == "__main__":
    main()
