"""Prints the tables of README.md from result.json, and draws its picture.

    python experiments/h200/analysis.py

result.json was made at commit 352eea8a from the batches of each cell and the logs of the servers.
Intervals are from the 5th to the 95th percentile of 10,000 bootstrap samples of the counted
batches, drawn in blocks of four that follow each other, because a batch depends on the last one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from textwrap import fill
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from predict import cells as all_cells  # noqa: E402
from schedules import VARIANTS, Cell  # noqa: E402

NAMES = {
    "waiting": "waiting", "waiting-streamed": "waiting, streamed", "april": "APRIL",
    "april-kept": "APRIL, KV kept", "april-streamed": "APRIL, streamed",
    "areal": "AReaL", "areal-kept": "AReaL, KV kept",
    "auto": "auto (17), recompute", "auto-kept": "auto (17), KV kept",
    "auto-fresh": "auto (3 %), recompute", "auto-fast": "auto (speed), recompute",
    "auto-kept-fast": "auto (speed), KV kept",
    "auto-default": "auto, recompute", "auto-kept-default": "auto, KV kept",
    "auto-default-streamed": "auto, recompute, streamed",
    "auto-kept-default-streamed": "auto, KV kept, streamed",
}  # fmt: skip
ALIKE = ("waiting", "april", "april-kept", "auto-default", "auto-kept-default")
"""Schedules that the fifth machine measured like against like, in full size."""
AGAINST = {"april": "waiting", "april-kept": "waiting", "auto-default": "april",
           "auto-kept-default": "april-kept"}  # fmt: skip
"""What each of them is compared with."""
SEEDS = ("", ":s1", ":s2")
SIXTH = (
    ("auto-kept-default:0:0.25:single", "auto-kept-default:0:0.25"),
    ("auto-kept-default:0:0.25:single:s1", "auto-kept-default:0:0.25:s1"),
    ("areal-kept:0:0.25:single", "areal-kept:0:0.25"),
    ("april-kept:0:1:moe", "auto-kept-default:0:1:moe"),
    ("auto-default:0:1",),
)
"""Cells of the sixth machine that are compared with each other."""


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def titled(name: str) -> str:
    """A cell in words."""
    cell = Cell.of(name)
    title = f"{NAMES[cell.schedule]}, trainer {cell.train_seconds:g} s"
    title += ", full size" if cell.scale == 1 else ""
    title += f", {VARIANTS[cell.variant]}" if cell.variant else ""
    return title + (f", seed {cell.seed}" if cell.seed else "")


def splits(everything: dict[str, Any]) -> str:
    """The table of README.md of where the engines' time went without a trainer."""
    text = ["| cell | work | thin batches | prefill | rest |", "|---|---|---|---|---|"]
    for row in sorted(
        everything["cells"], key=lambda row: (row["cell"].split(":")[2:], row["cell"])
    ):
        if (parts := row["split"]) is not None and not Cell.of(row["cell"]).trainer:
            shares = (f"{parts[name]:.3f}" for name in ("work", "thin", "prefill", "rest"))
            text.append(f"| {titled(row['cell'])} | {' | '.join(shares)} |")
    return "\n".join(text)


def is_alike(name: str) -> bool:
    """Whether a cell belongs to the table of like against like."""
    cell = Cell.of(name)
    shown = cell.scale == 1 and not cell.trainer and cell.schedule in ALIKE
    return shown and cell.variant in ("", "moe")


def alike(everything: dict[str, Any]) -> str:
    """The table of README.md of schedules in full size without a trainer."""
    head = ["schedule", "batches", "step, s", "expected", "simulated since", "tokens/s", "compared",
            "generated", "of the bound", "off-policy", "age, oldest", "mean length",
            "the planner's own forecast"]  # fmt: skip
    text = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    rows = {row["cell"]: row for row in everything["cells"]}
    for variant, shape in (("", "Qwen3-4B"), (":moe", "Qwen3-30B-A3B")):
        for seed in SEEDS:
            for name in ALIKE:
                row = rows.get(f"{name}:0:1{variant}{seed}")
                if row is None:
                    continue
                (low, high), received = row["step_interval"], row.get("forecast", {})
                other = rows.get(f"{AGAINST.get(name)}:0:1{variant}{seed}")
                same = other is not None and row["machine"] == other["machine"]
                where = "" if row["machine"] == "fifth machine" else f" ({row['machine']})"
                where += f", seed {seed[2:]}" if seed else ""
                printed = ""
                if received:
                    printed = f"{received['step_seconds']:.1f} s, {share(received['efficiency'])}"
                    if received["efficiency_found"] is not None:
                        printed += f" (found: {share(received['efficiency_found'])})"
                text.append(
                    f"| {shape}, {NAMES[name]}{where} "
                    f"| {row['counted']} | {row['step_s']:.1f} ({low:.1f} to {high:.1f}) "
                    f"| {row['predicted_step_s']:.1f} "
                    f"| {format(row['simulated_s'], '.1f') if 'simulated_s' in row else ''} "
                    f"| {row['tokens_s']:,.0f} "
                    f"| {times(row, other) if same else ''} "
                    f"| {format(row['generated_s'], ',.0f') if 'generated_s' in row else ''} "
                    f"| {share(row['own_generated'])} | {share(row['off_policy'])} "
                    f"| {row['age']:.1f}, {row['oldest']} | {row['mean_length']:.0f} | {printed} |"
                )
    return "\n".join(text)


def sixth(everything: dict[str, Any]) -> str:
    """The table of README.md of the sixth machine."""
    head = ["cell", "batches", "step, s", "tokens/s", "generated", "times the cell above",
            "passes a second", "of the bound", "off-policy", "age, oldest", "mean length",
            "the planner's own forecast"]  # fmt: skip
    text = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    rows = {row["cell"]: row for row in everything["sixth"]}
    for several in SIXTH:
        above: dict[str, Any] | None = None
        for row in (rows[name] for name in several):
            (low, high), received, compared, printed = (
                row["step_interval"],
                row.get("forecast"),
                "",
                "",
            )
            if above is not None:
                ratios = [row[name] / above[name] for name in ("tokens_s", "generated_s")]
                compared = "{:.2f} (generated: {:.2f})".format(*ratios)
            if received:
                printed = f"{received['step_seconds']:.2f} s, {share(received['efficiency'])} "
                printed += f"(found: {share(received['efficiency_found'])})"
            text.append(
                f"| {titled(row['cell'])} | {row['counted']} "
                f"| {row['step_s']:.2f} ({low:.2f} to {high:.2f}) | {row['tokens_s']:,.0f} "
                f"| {row['generated_s']:,.0f} | {compared} | {row['passes_s']:.1f} "
                f"| {share(row['own_generated'])} | {share(row['off_policy'])} "
                f"| {row['age']:.1f}, {row['oldest']} | {row['mean_length']:.0f} | {printed} |"
            )
            above = row
    return "\n".join(text)


def times(row: dict[str, Any], other: dict[str, Any]) -> str:
    """How many times the delivered tokens of the other cell, and of what."""
    name = NAMES[Cell.of(other["cell"]).schedule]
    return f"{row['tokens_s'] / other['tokens_s']:.2f} times {name}"


def markdown(everything: dict[str, Any]) -> str:
    """The table of README.md of all other cells."""
    head = ["cell", "batches", "step, s", "expected", "T_bound / T", "expected", "generated",
            "by its own step times", "tokens/s", "off-policy", "age, oldest", "mean length",
            "the planner's own forecast"]  # fmt: skip
    text = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    order = {name: place for place, name in enumerate(all_cells())}
    for row in sorted(everything["cells"], key=lambda row: order.get(row["cell"], 999)):
        if is_alike(row["cell"]):
            continue
        low, high = row["step_interval"]
        least, most = row["efficiency_interval"]
        received = row.get("forecast", {})
        printed = (
            f"{received['step_seconds']:.2f} s, {received['efficiency']:.2f}" if received else ""
        )
        if received.get("efficiency_found") is not None:
            printed += f" (found: {received['efficiency_found']:.2f})"
        text.append(
            f"| {titled(row['cell'])} | {row['counted']} "
            f"| {row['step_s']:.2f} ({low:.2f} to {high:.2f}) "
            f"| {share(row.get('predicted_step_s'))} "
            f"| {row['efficiency']:.2f} ({least:.2f} to {most:.2f}) "
            f"| {share(row.get('predicted_efficiency'))} | {share(row['generated'])} "
            f"| {share(row['own_efficiency'])}, {share(row['own_generated'])} "
            f"| {row['tokens_s']:,.0f} "
            f"| {row['off_policy']:.2f} | {row['age']:.1f}, {row['oldest']} "
            f"| {row['mean_length']:.0f} | {printed} |"
        )
    return "\n".join(text)


def picture(everything: dict[str, Any], path: Path) -> None:
    """Seconds of a step of each cell with its interval, and what was expected."""
    from matplotlib.patches import Patch

    from aprilsched.observe.report.style import GREY, INK, PALETTE, new_figure, save

    colours = {"presets": GREY, "auto": PALETTE[2]}
    rows = {row["cell"]: row for row in everything["cells"]}
    parts = [("Qwen3-4B, full size", ":0:1"), ("Qwen3-30B-A3B, full size", ":0:1:moe")]
    parts += [(f"trainer of {trainer} s, {size}", f":{trainer}:{scale}")
              for scale, size in (("1", "full size"), ("0.25", "a quarter"))
              for trainer in ("0", "5", "20") if (trainer, scale) != ("0", "1")]  # fmt: skip
    parts += [(f"{VARIANTS[name]}, a quarter", f":0:0.25:{name}")
              for name in ("tail", "two", "tp2-8b", "recv8")]  # fmt: skip
    parts = [(title, end) for title, end in parts if sum(name + end in rows for name in NAMES) > 1]
    columns = -(-len(parts) // 2)
    figure = new_figure(4.2 * columns, 6.2)
    axes = figure.subplots(2, columns, squeeze=False)
    for axis in axes.flat[len(parts) :]:
        axis.axis("off")
    for axis, (title, end) in zip(axes.flat, parts, strict=False):
        own = [(name, rows[key + end]) for key, name in NAMES.items() if key + end in rows]
        for place, (name, row) in enumerate(reversed(own)):
            low, high = row["step_interval"]
            colour = colours["auto" if name.startswith("auto") else "presets"]
            spread = [[row["step_s"] - low], [high - row["step_s"]]]
            axis.barh(
                place,
                row["step_s"],
                color=colour,
                height=0.6,
                xerr=spread,
                error_kw={"ecolor": INK, "capsize": 3},
            )
            if "predicted_step_s" in row:
                expected = row["predicted_step_s"]
                (mark,) = axis.plot(expected, place, "D", color=PALETTE[5], markersize=5)
        axis.set_yticks(range(len(own)), [name for name, _ in reversed(own)])
        axis.set(title=fill(title, 32), xlim=(0, None))
        axis.title.set_fontsize(10)
    figure.supxlabel("seconds of a step, with the 5th and the 95th percentile of the mean")
    bars = [Patch(color=colour, label=f"{name}, measured") for name, colour in colours.items()]
    mark.set_label("expected beforehand")
    figure.legend(handles=[*bars, mark], frameon=False, loc="outside upper right", ncols=3)
    save(figure, path)


def main() -> None:
    found = json.loads((HERE / "result.json").read_text())
    print(alike(found))
    print(markdown(found))
    print(splits(found))
    print(sixth(found))
    print("missing:", ", ".join(found["missing"]))
    print(json.dumps(found["windows_predicted_over_measured"], indent=1))
    picture(found, HERE / "h200.png")


if __name__ == "__main__":
    main()
