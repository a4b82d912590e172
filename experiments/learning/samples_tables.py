"""Makes samples.json, the tables of README.md and the picture of groups against samples.

    python experiments/learning/samples_tables.py [FOLDER]

FOLDER has the files of samples.sh, samples-N.jsonl of each GPU, which become raw/samples.jsonl.gz.
Intervals are those of analysis.py: from the 5th to the 95th percentile of bootstrap samples of the
seeds, which with three seeds are hardly more than their range.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parents[1])]

from analysis import checks, interval, reached, rising  # noqa: E402
from baselines import gradients  # noqa: E402

from experiments.library import table  # noqa: E402

ARMS = {
    "april-kept": "groups, ratio 2.0", "samples": "samples, ratio 2.0",
    "samples-1.5": "samples, ratio 1.5", "samples-naive": "all known so far, ratio 2.0",
}  # fmt: skip
TARGET = 0.65
SECONDS, UPDATES = 36.0, 20
MARKS = ("<!-- samples -->\n", "\n<!-- end of samples -->")
ROWS = (
    (f"seconds to {TARGET}", "seconds_to", ".1f"), (f"updates to {TARGET}", "updates_to", ".1f"),
    (f"held-out after {SECONDS:.0f} s", "held_out_at_end", ".3f"),
    (f"held-out after {UPDATES} updates", "held_out_at_updates", ".3f"),
    (f"updates in {SECONDS:.0f} s", "updates", ".1f"), ("delivered tokens/s", "tokens_s", ",.0f"),
    ("mean staleness, versions", "staleness", ".2f"), ("oldest token", "oldest", ".1f"),
    ("off-policy share", "off_policy", ".2f"), ("mean length, last 5 updates", "length", ".0f"),
    ("at the limit", "capped", ".3f"), ("sd of the ratio", "ratio_sd", ".4f"),
)  # fmt: skip
RAW = HERE / "raw" / "samples.jsonl.gz"


def cells() -> list[dict[str, Any]]:
    """The finished cells."""
    with gzip.open(RAW, "rt") as file:
        return [line for line in map(json.loads, file) if line["arm"] in ARMS]


def collect(folder: Path) -> None:
    """Keep the cells of a run."""
    found: list[str] = []
    for path in sorted(folder.glob("samples-*.jsonl")):
        lines = map(json.loads, path.read_text().splitlines())
        kept = [{**line, "gpu": path.stem[-1]} for line in lines if line["kind"] == "cell"]
        found += [json.dumps(line) for line in kept]
    RAW.write_bytes(gzip.compress("".join(f"{line}\n" for line in found).encode(), mtime=0))


def figures(cell: dict[str, Any]) -> dict[str, float]:
    """The figures of one cell."""
    updates, evaluated = cell["updates"], cell["evaluations"]
    held_out = [each["held_out"] for each in evaluated]
    at = {key: [each[key] for each in evaluated] for key in ("seconds", "update")}
    curve = rising(held_out)
    later = updates[3:] or updates
    total = sum(line["tokens"] for line in later)
    return {
        # A seed that does not reach the target counts with its last evaluation.
        "seconds_to": min(reached(held_out, at["seconds"], TARGET), at["seconds"][-1]),
        "updates_to": min(reached(held_out, at["update"], TARGET), at["update"][-1]),
        "held_out_at_end": float(np.interp(SECONDS, at["seconds"], curve)),
        "held_out_at_updates": float(np.interp(UPDATES, at["update"], curve)),
        "updates": float(np.interp(SECONDS, [line["seconds"] for line in updates],
                                   [line["update"] for line in updates])),
        "tokens_s": total / (updates[-1]["seconds"] - updates[-len(later)]["seconds"] or 1.0),
        "oldest": cell["summary"]["staleness_max"],
        "length": float(np.mean([line["length"] for line in updates[-5:]])),
        "capped": float(np.mean([line["capped"] for line in later])),
        **{name: sum(line[name] * line["tokens"] for line in later) / total
           for name in ("staleness", "off_policy", "ratio_sd")},
    }  # fmt: skip


def result() -> dict[str, Any]:
    """Everything that the README shows."""
    found = cells()
    arms: dict[str, Any] = {}
    for arm in ARMS:
        own = [figures(cell) for cell in found if cell["arm"] == arm]
        if own:
            arms[arm] = {name: interval([[each[name] for each in own]]) for name in own[0]}
            arms[arm]["seeds"] = len(own)
    everything = {"arms": arms, "wrong": checks(found), "gradients": gradients()}
    return json.loads(json.dumps(everything), parse_float=lambda text: float(f"{float(text):.4g}"))


def markdown(everything: dict[str, Any]) -> str:
    """The tables of README.md."""
    arms = everything["arms"]
    lines = [
        [title, *("{mean:{0}} ({low:{0}} to {high:{0}})".format(digits, **arms[arm][name])
                  for arm in arms)]
        for title, name, digits in ROWS
    ]  # fmt: skip
    text = [table(["baseline", "mean gradient", "error", "standard deviation"], [
        [row["baseline"], f"{row['gradient']:+.4f}", f"{row['error']:+.1%}".replace("%", " %"),
         f"{row['deviation']:.3f}"]
        for row in everything["gradients"]
    ])]  # fmt: skip
    seeds = ["seeds", *(arms[arm]["seeds"] for arm in arms)]
    text.append(table(["", *(ARMS[arm] for arm in arms)], [seeds, *lines]))
    text.append("![Held-out reward over seconds and over updates](samples.png)")
    text.append(f"Wrong in the runs' own summaries: {'; '.join(everything['wrong']) or 'nothing'}.")
    return "\n\n".join(text)


def picture(path: Path) -> None:
    """Held-out reward over seconds and over updates: the mean of each arm, and each evaluation."""
    from aprilsched.observe.report.style import GREY, PALETTE, new_figure, save

    colours = {"april-kept": PALETTE[0], "samples": PALETTE[5], "samples-1.5": PALETTE[2],
               "samples-naive": GREY}  # fmt: skip
    figure = new_figure(11, 4)
    found = cells()
    for axes, key, label in zip(
        figure.subplots(1, 2), ("seconds", "update"),
        ("seconds of generation and training", "updates"), strict=True,
    ):  # fmt: skip
        for arm, title in ARMS.items():
            own = [cell["evaluations"] for cell in found if cell["arm"] == arm]
            if not own:
                continue
            last = min(each[-1][key] for each in own)
            grid = np.linspace(0, last, 60)
            curves = [np.interp(grid, [e[key] for e in each], [e["held_out"] for e in each])
                      for each in own]  # fmt: skip
            axes.plot(grid, np.mean(curves, axis=0), color=colours[arm], linewidth=2, label=title)
            for each in own:
                axes.plot([e[key] for e in each], [e["held_out"] for e in each], ".",
                          markersize=4, alpha=0.4, color=colours[arm])  # fmt: skip
        axes.set(xlabel=label, ylabel="held-out problems solved", xlim=(0, None))
    axes.legend(frameon=False, loc="lower right")
    save(figure, path)


def main() -> None:
    if len(sys.argv) > 1:
        collect(Path(sys.argv[1]))
    everything = result()
    (HERE / "samples.json").write_text(json.dumps(everything, indent=1) + "\n")
    text = markdown(everything)
    print(text)
    page = HERE / "README.md"
    before, _, rest = page.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    page.write_text(before + MARKS[0] + text + MARKS[1] + after)
    picture(HERE / "samples.png")


if __name__ == "__main__":
    main()
