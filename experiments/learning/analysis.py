"""Makes the tables and the picture of README.md from the raw data in this folder.

python experiments/learning/analysis.py

Intervals are from the 5th to the 95th percentile of 10,000 bootstrap samples of the seeds. With two
or three seeds of an arm they say little more than the range of the seeds.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aprilsched.observe.report.style import GREY, INK, PALETTE, new_figure, save

HERE = Path(__file__).resolve().parent
NAMES = {
    "sync": "synchronous", "streamed": "synchronous, streamed",
    "streamed-ready": "the same, gathered", "on-policy": "on_policy",
    "rollpacker": "rollpacker", "april": "APRIL",
    "april-streamed": "APRIL, streamed", "areal": "AReaL", "auto-first": "auto, first planner",
    "auto": "auto, recompute", "auto-kept-first": "auto, KV kept, first planner",
    "auto-kept": "auto, KV kept", "auto-paced": "auto, pace too",
}  # fmt: skip
PICTURED = {
    "sync": GREY, "on-policy": "#999933", "rollpacker": PALETTE[3], "april": PALETTE[1],
    "areal": PALETTE[0], "auto": PALETTE[2], "auto-kept": PALETTE[5],
}  # fmt: skip
"""The arms of the picture and their colours."""
AGAIN = {"begun_again"}
TARGETS = (0.65, 0.7)
TOKENS, UPDATES, SECONDS = 500_000, 15, 36.0
LAGS = (0, 1, 2, 4, 8, 16)
_SAMPLES = 10_000


def cells() -> list[dict[str, Any]]:
    """The finished cells, without the one that warmed the server up."""
    with gzip.open(HERE / "raw" / "cells.jsonl.gz", "rt") as file:
        lines = [json.loads(line) for line in file]
    found = [line for line in lines if line["kind"] == "cell" and line["seed"] < 90]
    for line in found:
        # The first runs of auto had another planner, in a thread of the trainer's process.
        if line["arm"].startswith("auto") and "code" not in line:
            line["arm"] += "-first"
    return found


def ages() -> list[dict[str, Any]]:
    """The lines of usefulness.py."""
    with gzip.open(HERE / "raw" / "usefulness.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def rising(values: Sequence[float]) -> list[float]:
    """The nearest rising curve (least squares), so that a noisy evaluation is no target reached."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([value, 1])
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            (a, n), (b, m) = blocks[-2:]
            blocks[-2:] = [[(a * n + b * m) / (n + m), n + m]]
    return [value for value, count in blocks for _ in range(int(count))]


def reached(held_out: Sequence[float], at: Sequence[float], target: float) -> float:
    """Where the rising curve through the evaluations reaches the target; infinity if nowhere.

    What comes after the highest evaluation is left out: a policy that falls apart later has learnt
    until then.
    """
    curve = rising(held_out[: int(np.argmax(held_out)) + 1])
    if curve[-1] < target:
        return float("inf")
    after = next(place for place, value in enumerate(curve) if value >= target)
    if after == 0:
        return float(at[0])
    share = (target - curve[after - 1]) / (curve[after] - curve[after - 1])
    return float(at[after - 1] + share * (at[after] - at[after - 1]))


def interval(
    samples: Sequence[Sequence[float]], of: Callable[..., float] = lambda a: a
) -> dict[str, float]:
    """A function of the means of some samples, with its interval over the seeds."""
    random = np.random.default_rng(0)
    arrays = [np.asarray(each, dtype=float) for each in samples]
    drawn = [each[random.integers(len(each), size=(_SAMPLES, len(each)))].mean(1)
             for each in arrays]  # fmt: skip
    low, high = np.quantile(of(*drawn), [0.05, 0.95])
    return {"mean": float(of(*(each.mean() for each in arrays))), "low": float(low),
            "high": float(high)}  # fmt: skip


def table(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of each arm."""
    by_arm: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for cell in found:
        by_arm[cell["arm"]].append(_figures(cell))
    result: dict[str, Any] = {}
    for arm in filter(by_arm.__contains__, NAMES):
        own = by_arm[arm]
        figures: dict[str, Any] = {"seeds": len(own)}
        for name in own[0]:
            figures[name] = interval([[each[name] for each in own]])
        for other in ("sync", "april"):
            for target in TARGETS:
                times = [[each[f"seconds_to_{target}"] for each in by_arm[which]]
                         for which in (arm, other)]  # fmt: skip
                figures[f"seconds_to_{target}_of_{other}"] = interval(times, lambda a, b: a / b)
        result[arm] = figures
    return result


def _figures(cell: dict[str, Any]) -> dict[str, float]:
    updates, evaluated = cell["updates"], cell["evaluations"]
    held_out = [each["held_out"] for each in evaluated]
    at = {key: [each[key] for each in evaluated] for key in ("seconds", "tokens", "update")}
    found = {f"seconds_to_{target}": reached(held_out, at["seconds"], target)
             for target in TARGETS}  # fmt: skip
    curve = rising(held_out)
    for name, key, value in (
        ("held_out_at_end", "seconds", SECONDS), ("held_out_at_tokens", "tokens", TOKENS),
        ("held_out_at_updates", "update", UPDATES),
    ):  # fmt: skip
        found[name] = float(np.interp(value, at[key], curve))
    # The first batches are of the start: nothing is carried into them.
    later = updates[3:]
    total = sum(line["tokens"] for line in later)
    for name in ("off_policy", "staleness", "masked", "entropy", "truncated", "clipped",
                 "ratio_sd"):  # fmt: skip
        found[name] = sum(line[name] * line["tokens"] for line in later) / total
    for name in ("length", "capped", "waits_s", "trains_s", "refit_s"):
        found[name] = sum(line[name] for line in later) / len(later)
    found["updates"] = len(updates)
    found["oldest"] = cell["summary"]["staleness_max"]
    found["drawn_length_minus"] = cell["summary"]["bias"]["bias_estimate"]
    return found


def checks(found: list[dict[str, Any]]) -> list[str]:
    """What is wrong in the runs' own summaries: wrong versions, lost rollouts, restarts."""
    wrong: list[str] = []
    for cell in found:
        name = f"{cell['arm']} {cell['seed']}"
        rollouts = cell["summary"]["rollouts"]
        inexact = sum(line["inexact"] for line in cell["updates"])
        for what, count in (
            ("rollouts without exact versions", inexact), ("lost rollouts", rollouts["lost"]),
            ("rollouts delivered twice", rollouts["duplicated"]),
            # Tail batching and on_policy throw tokens away by design, and the prompts begin again.
            ("rollouts dropped", sum(count for reason, count in rollouts["dropped"].items()
                                     if reason not in AGAIN)),
            ("lost engines", cell["lost_engines"]),
            ("restarts that were not ours", cell["opened"] - 1 - cell["resumed"]),
        ):  # fmt: skip
            if count:
                wrong.append(f"{name}: {count} {what}")
    return wrong


def usefulness(lines: list[dict[str, Any]], rate: float, target: float = 0.7) -> dict[str, Any]:
    """Usefulness by staleness: updates to the target when fresh, over those when stale."""
    curves: dict[tuple[bool, int, int], list[tuple[int, float]]] = defaultdict(list)
    for line in lines:
        if line["block"] == "lag" and line["lr"] == rate and "held_out" in line:
            key = (line["corrected"], line["lag"], line["seed"])
            curves[key].append((line["update"], line["held_out"]))
    result: dict[str, Any] = {}
    for corrected in (True, False):
        needed = {}
        ends = {}
        for lag in LAGS:
            own = [curves[key] for key in curves if key[:2] == (corrected, lag)]
            # A seed that never comes there counts as one that comes at the last update.
            needed[lag] = [
                min(reached([y for _, y in curve], [x for x, _ in curve], target), curve[-1][0])
                for curve in own
            ]
            ends[lag] = [float(np.mean([y for _, y in curve[-3:]])) for curve in own]
        rows = [
            {"lag": lag, "updates": interval([needed[lag]]), "end": interval([ends[lag]]),
             "fell": sum(end < 0.6 for end in ends[lag]),
             "usefulness": interval([needed[0], needed[lag]], lambda a, b: a / b)}
            for lag in LAGS
        ]  # fmt: skip

        def slope(*means: Any) -> Any:
            """Least squares for log usefulness = -slope * staleness, through 0."""
            logs = [np.log(mean / means[0]) for mean in means]
            over = sum(lag * value for lag, value in zip(LAGS, logs, strict=True))
            return over / sum(lag**2 for lag in LAGS)

        result["corrected" if corrected else "uncorrected"] = {
            "rows": rows, "slope": interval([needed[lag] for lag in LAGS], slope),
        }  # fmt: skip
    return result


def conditions(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conditions of the blocks carry and likeness: the mean of the last evaluations."""
    held: dict[tuple[Any, ...], dict[int, list[tuple[int, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    off: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for line in lines:
        if line["block"] == "lag":
            continue
        key = (line["block"], line["open"], line["kept"], line["sorted"], line["corrected"])
        if "held_out" in line:
            held[key][line["seed"]].append((line["update"], line["held_out"]))
        elif line["update"] > 4:
            off[key].append(line["stale"] / line["tokens"])
    return [
        {
            "block": key[0], "open": key[1], "kept": key[2], "sorted": key[3],
            "corrected": key[4], "off_policy": float(np.mean(off[key])),
            "updates_to_0.7": interval([[
                reached([y for _, y in c], [x for x, _ in c], 0.7) for c in seeds.values()
            ]]),
            "end": interval([[float(np.mean([y for _, y in c[-3:]])) for c in seeds.values()]]),
        }
        for key, seeds in sorted(held.items())
    ]  # fmt: skip


def result() -> dict[str, Any]:
    """Everything that README.md and the notebook say."""
    found, lines = cells(), ages()
    steps = [json.loads(line) for line in (HERE / "raw" / "steps.jsonl").read_text().splitlines()]
    everything = {
        "arms": table(found),
        "wrong": checks(found),
        "resumed": [f"{each['arm']} {each['seed']}" for each in found if each["resumed"]],
        "usefulness": {"3e-4": usefulness(lines, 3e-4), "1e-3": usefulness(lines, 1e-3)},
        "conditions": conditions(lines),
        "step_ms": {str(step["running"]): 1000 * step["seconds"] for step in steps},
    }
    return json.loads(json.dumps(everything), parse_float=lambda text: float(f"{float(text):.4g}"))


def curves(found: list[dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """The mean held-out reward of each arm over seconds."""
    grid = np.linspace(0, SECONDS, 73)
    return {
        arm: (grid, np.mean([
            np.interp(grid, [e["seconds"] for e in cell["evaluations"]],
                      [e["held_out"] for e in cell["evaluations"]])
            for cell in found if cell["arm"] == arm
        ], axis=0))
        for arm in PICTURED if any(cell["arm"] == arm for cell in found)
    }  # fmt: skip


def picture(axes: Any, arms: Sequence[str] = tuple(PICTURED)) -> None:
    """Held-out reward over the wall clock: the mean of each arm, and each evaluation."""
    colours = PICTURED
    found = cells()
    for arm, (x, y) in curves(found).items():
        if arm not in arms:
            continue
        axes.plot(x, y, color=colours[arm], linewidth=2, label=NAMES[arm])
        for cell in found:
            if cell["arm"] == arm:
                axes.plot([e["seconds"] for e in cell["evaluations"]],
                          [e["held_out"] for e in cell["evaluations"]], ".", markersize=4,
                          alpha=0.4, color=colours[arm])  # fmt: skip
    axes.set(xlabel="seconds of generation and training", ylabel="held-out problems solved",
             ylim=(0.35, 0.95), xlim=(0, 39))  # fmt: skip
    axes.legend(frameon=False, loc="lower right")


def gain(axes: Any, arms: dict[str, Any]) -> None:
    """A line at 0.70 from the time of auto with KV kept to that of sync, with their ratio."""
    first, last = (arms[arm]["seconds_to_0.7"]["mean"] for arm in ("auto-kept", "sync"))
    ratio = arms["auto-kept"]["seconds_to_0.7_of_sync"]["mean"]
    axes.annotate("", (first, 0.7), (last, 0.7), arrowprops={"arrowstyle": "<->", "color": INK})
    axes.annotate(f"0.70 in {ratio:.2f} of the time", (last, 0.7), (6, -12),
                  textcoords="offset points", fontweight="bold")  # fmt: skip


def usefulness_picture(axes: Any, rate: float = 3e-4) -> None:
    """Usefulness of a token by its staleness, with the bootstrap intervals."""
    for kind, colour in (("corrected", PALETTE[2]), ("uncorrected", PALETTE[5])):
        rows = usefulness(ages(), rate)[kind]["rows"]
        means = [row["usefulness"]["mean"] for row in rows]
        below = [row["usefulness"]["mean"] - row["usefulness"]["low"] for row in rows]
        above = [row["usefulness"]["high"] - row["usefulness"]["mean"] for row in rows]
        label = "decoupled PPO" if kind == "corrected" else "clip around the sampling policy"
        axes.errorbar(LAGS, means, (below, above), fmt="o-", capsize=3, color=colour, label=label)
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set(xlabel="staleness of every token, in versions", ylabel="usefulness of a token",
             ylim=(0, 1.3))  # fmt: skip
    axes.legend(frameon=False)


def _cell(value: dict[str, float], digits: str) -> str:
    return f"{value['mean']:{digits}} ({value['low']:{digits}} to {value['high']:{digits}})"


def markdown(everything: dict[str, Any]) -> str:
    """The tables of README.md."""
    arms = everything["arms"]
    lines = ["| | " + " | ".join(NAMES[arm] for arm in arms) + " |"]
    lines.append("|---" * (1 + len(arms)) + "|")
    rows = (
        ("seconds to 0.65", "seconds_to_0.65", ".1f"), ("seconds to 0.70", "seconds_to_0.7", ".1f"),
        ("of the synchronous time", "seconds_to_0.7_of_sync", ".2f"),
        ("of APRIL's", "seconds_to_0.7_of_april", ".2f"),
        ("updates in 36 s", "updates", ".1f"),
        ("held-out after 36 s", "held_out_at_end", ".3f"),
        ("held-out after 500,000 tokens", "held_out_at_tokens", ".3f"),
        ("held-out after 15 updates", "held_out_at_updates", ".3f"),
        ("off-policy share", "off_policy", ".2f"), ("mean staleness, versions", "staleness", ".2f"),
        ("oldest token", "oldest", ".1f"), ("sd of the ratio", "ratio_sd", ".4f"),
        ("clipped share", "clipped", ".5f"), ("truncated share", "truncated", ".6f"),
        ("entropy, nats", "entropy", ".3f"),
        ("mean length", "length", ".0f"), ("at the cap", "capped", ".3f"),
        ("length bias", "drawn_length_minus", "+.3f"),
        ("waits for tokens, s", "waits_s", ".2f"), ("trains, s", "trains_s", ".2f"),
        ("refit, s", "refit_s", ".3f"),
    )  # fmt: skip
    lines.append("| seeds | " + " | ".join(str(arms[arm]["seeds"]) for arm in arms) + " |")
    for title, name, digits in rows:
        found = " | ".join(_cell(arms[arm][name], digits) for arm in arms)
        lines.append(f"| {title} | {found} |")
    lags = " | ".join(map(str, LAGS))
    lines += ["", f"| staleness of every token | {lags} |", "|---" * 7 + "|"]
    for rate, kinds in everything["usefulness"].items():
        for kind, title in (("corrected", "decoupled"), ("uncorrected", "clip")):
            for name, what in (("usefulness", "usefulness"), ("end", "held-out at the end")):
                found = " | ".join(_cell(row[name], ".2f") for row in kinds[kind]["rows"])
                lines.append(f"| {title}, {rate}: {what} | {found} |")
            found = " | ".join(str(row["fell"]) for row in kinds[kind]["rows"])
            lines.append(f"| {title}, {rate}: seeds that end below 0.6 | {found} |")
    lines += ["", "| condition | off-policy share | corrected: updates to 0.70 | at the end "
              "| uncorrected: updates to 0.70 | at the end |", "|---" * 6 + "|"]  # fmt: skip
    by_key = {(c["block"], c["open"], c["kept"], c["sorted"], c["corrected"]): c
              for c in everything["conditions"]}  # fmt: skip
    for key in sorted({key[:4] for key in by_key}):
        block, ratio, kept, likeness = key
        title = f"{ratio:g} batches open, KV {'kept' if kept else 'recomputed'}"
        if block == "likeness":
            title = f"four batches, {'cut by length' if likeness else 'mixed'}"
        yes, no = by_key[*key, True], by_key[*key, False]
        found = " | ".join(
            f"{_cell(each['updates_to_0.7'], '.1f')} | {_cell(each['end'], '.3f')}"
            for each in (yes, no)
        )
        lines.append(f"| {title} | {yes['off_policy']:.2f} | {found} |")
    return "\n".join(lines)


def main() -> None:
    everything = result()
    (HERE / "result.json").write_text(json.dumps(everything, indent=1) + "\n")
    figure = new_figure(11, 4)
    left, right = figure.subplots(1, 2)
    picture(left)
    usefulness_picture(right)
    save(figure, HERE / "learning.png")
    figure = new_figure(8, 4.2)
    axes = figure.subplots()
    picture(axes, ("sync", "april", "auto", "auto-kept"))
    gain(axes, everything["arms"])
    save(figure, HERE.parents[1] / "docs" / "images" / "learning.png")
    print(markdown(everything))
    print("wrong:", everything["wrong"] or "nothing", "resumed:", everything["resumed"])
    for rate, kinds in everything["usefulness"].items():
        for kind, each in kinds.items():
            print(f"{rate}, {kind}: usefulness = exp(-staleness * {_cell(each['slope'], '.3f')})")


if __name__ == "__main__":
    main()
