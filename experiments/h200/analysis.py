"""Makes result.json, the tables and the picture of README.md from raw/ and predictions.json.

    python experiments/h200/analysis.py

`raw/models.json` has the step times of each machine, which `analysis.py --fit` fits to the logs of
its servers, and `simulated.json` what the simulator says with them (`analysis.py --simulate`).
Intervals are from the 5th to the 95th percentile of 10,000 bootstrap samples of the counted
batches, drawn in blocks of four that follow each other, because a batch depends on the last one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from predict import cells as all_cells  # noqa: E402
from schedules import EXPERTS, MAX_RUNNING, MODEL, VARIANTS, Cell, figures, simulated  # noqa: E402

from aprilsched.timing import StepTimeModel  # noqa: E402
from aprilsched.timing.calibration import fit  # noqa: E402
from aprilsched.timing.server_log import LogLine, read_log, windows_of  # noqa: E402

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
OTHERS = ("auto", "auto-kept", "auto-fresh", "auto-fast", "auto-kept-fast")
"""Automatic scheduling with other objectives than the default. Not all their cells are wanted."""
MACHINES = {
    "first machine, 4B": ("steps-1", "steps-2", "steps-3"),
    "second machine, 4B": ("steps-4", "steps-5"),
    "second machine, 8B": ("steps-6",),
    "third machine, 4B": ("steps-7", "steps-8", "steps-9"),
    "fourth machine, 4B": ("steps-10",),
    "fifth machine, 4B": ("steps-14",),
    "fifth machine, experts": ("steps-11", "steps-12", "steps-13", "steps-15"),
    "sixth machine, 4B": ("steps-16", "steps-19"),
    "sixth machine, experts": ("steps-17", "steps-18"),
    "seventh machine, 4B": ("steps-20",),
    "seventh machine, experts": ("steps-21",),
}
"""Logs of servers, in raw/, that have the same step times."""
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
STEPS = 40
"""Number of decode steps between two lines about decoding."""
BLOCK, SAMPLES = 4, 10_000
FEWEST = 8
"""A cell with fewer counted batches counts as missing, unless half of its batches are fewer."""
Rows = Sequence[dict[str, Any]]


def lines(name: str) -> list[dict[str, Any]]:
    """Everything that cells.py wrote on all machines but the sixth, or on the sixth."""
    return [json.loads(line) for line in (HERE / "raw" / name).read_text().splitlines()]


def found(name: str = "cells.jsonl") -> dict[str, dict[str, Any]]:
    """The longest run of each cell that has enough batches, and the last of equally long ones, by
    the cell's name."""
    best: dict[str, dict[str, Any]] = {}
    for line in lines(name):
        if line.get("kind") != "cell" or line["error"] not in ("", "the time ended"):
            continue
        batches, cell = len(line["batches"]), Cell.of(line["cell"])
        wanted = cell.batches - cell.burn_in
        if batches - cell.burn_in < min(FEWEST, wanted // 2):
            continue
        if batches >= len(best.get(line["cell"], {"batches": ()})["batches"]):
            best[line["cell"]] = line
    return best


def drawn(count: int) -> NDArray[np.int64]:
    """Indices of bootstrap samples, int64 [SAMPLES, count], in blocks that wrap around. The few
    batches of waiting in full size do not depend on each other, and are drawn alone."""
    random, block = np.random.default_rng(0), BLOCK if count >= 2 * BLOCK else 1
    starts = random.integers(count, size=(SAMPLES, -(-count // block)))
    return ((starts[:, :, None] + np.arange(block)) % count).reshape(SAMPLES, -1)[:, :count]


def interval(rows: Rows, of: Callable[[NDArray[np.int64]], NDArray[np.float64]]) -> list[float]:
    low, high = np.quantile(of(drawn(len(rows))), [0.05, 0.95])
    return [float(low), float(high)]


def seconds(rows: Rows) -> Callable[[NDArray[np.int64]], NDArray[np.float64]]:
    values = np.array([row["step_s"] for row in rows])
    return lambda index: values[index].mean(1)


def efficiency(rows: Rows) -> Callable[[NDArray[np.int64]], NDArray[np.float64]]:
    bounds = np.array([row["bound_s"] for row in rows])
    values = np.array([row["step_s"] for row in rows])
    return lambda index: bounds[index].sum(1) / values[index].sum(1)


def forecast(line: dict[str, Any], burn_in: int) -> dict[str, float] | None:
    """The planner's own forecasts that were in force, as means over the counted batches."""
    told: list[dict[str, Any]] = []
    for batch in range(burn_in, len(line["batches"])):
        before = [each["forecast"] for each in line["chosen"] if each["batch"] <= batch]
        if before and before[-1]:
            told.append(before[-1])
    if not told:
        return None
    return {
        name: float(np.mean([each[name] for each in told]))
        for name in ("step_seconds", "efficiency", "off_policy_share", "mean_age")
        if all(each.get(name) is not None for each in told)
    }


def fitted() -> dict[str, dict[str, Any]]:
    """The step-time model of each machine, with the median error on its own windows."""
    models: dict[str, dict[str, Any]] = {}
    for name, logs in MACHINES.items():
        lines = [replace(line, engine=log) for log in logs for line in decoded(log)]
        assumed = EXPERTS if "experts" in name else MODEL
        found = fit(windows_of(lines, steps=STEPS), assumed=assumed, replicates=2)
        stalled = found.stalled
        models[name] = {
            "model": asdict(found.model), "assumed": found.assumed,
            "steady": [found.steady.windows, found.steady.median],
            "stalled": None if stalled is None else [stalled.windows, stalled.median],
        }  # fmt: skip
    return models


@cache
def own_models() -> dict[str, StepTimeModel]:
    """The model of each log's machine."""
    path = HERE / "raw" / "models.json"
    models = json.loads(path.read_text()) if path.exists() else {}
    own = {name: StepTimeModel(**models[name]["model"]) for name in models}
    return {log: model for name, model in own.items() for log in MACHINES[name]}


@cache
def passes_known() -> set[str]:
    """The logs of machines whose prefill passes are known from at least 40 windows."""
    models = json.loads((HERE / "raw" / "models.json").read_text())
    return {
        log
        for name, model in models.items()
        if model["stalled"] is not None and model["stalled"][0] >= 40
        for log in MACHINES[name]
    }


@cache
def decoded(log: str) -> list[LogLine]:
    """The lines about decoding in a server's log."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / log
        path.write_bytes(gzip.decompress((HERE / "raw" / f"{log}.txt.gz").read_bytes()))
        return read_log(path)


def machine(line: dict[str, Any]) -> str:
    """The machine on which a cell was measured, in words."""
    log = (line.get("log") or [""])[0]
    return next((name.partition(",")[0] for name, logs in MACHINES.items() if log in logs), "")


Times = Callable[[str, int], tuple[float, float] | None]
"""Seconds of a token in a full batch and of reading a context token on one engine, by the log of
the engine and the batch; None if they are not known."""


def windows(
    line: dict[str, Any], first: int, last: int | None = None
) -> tuple[float, list[tuple[str, int, LogLine, LogLine]]]:
    """The seconds from batch `first` to batch `last`, and each window of decode steps of the
    servers in them: its log, its batch, and the lines at its ends."""
    if not line.get("log"):
        return 0.0, []
    midnight = datetime.fromtimestamp(line["began"], UTC).replace(hour=0, minute=0, second=0)
    began = line["began"] - midnight.replace(microsecond=0).timestamp()
    ends = began + np.cumsum([0.0] + [row["step_s"] for row in line["batches"]])
    begin, end = ends[first], ends[len(ends) - 1 if last is None else last]
    found: list[tuple[str, int, LogLine, LogLine]] = []
    for log in line["log"]:
        for old, new in pairwise(decoded(log)):
            hours, minutes, seconds = map(int, new.time.split(":"))
            at = 3600 * hours + 60 * minutes + seconds
            if begin <= at <= end:
                batch = min(int(np.searchsorted(ends, at)), len(ends) - 1) - 1
                found.append((log, batch, old, new))
    return float(end - begin), found


def generated(
    line: dict[str, Any], times: Times, first: int, last: int | None = None
) -> float | None:
    """T_bound of what the cell's engines generated from batch `first` to batch `last`, by the
    servers' logs, over the time."""
    took, several = windows(line, first, last)
    work = 0.0
    for log, batch, old, new in several:
        found = times(log, batch)
        if found is None:
            return None
        token, read = found
        work += STEPS * (token * (old.running + new.running) + read * (old.kv + new.kv)) / 2
    return work / took / len(line["log"]) if work else None


def split(line: dict[str, Any], first: int) -> dict[str, float] | None:
    """Shares of the engines' time in the counted batches, by the machine's own step times: work is
    T_bound of what was generated; `thin` is what decode steps took beyond it; `prefill` are the
    passes; the rest are pauses and the server's host."""
    took, several = windows(line, first)
    if not several or several[0][0] not in passes_known():
        return None
    decode = work = prefill = 0.0
    for log, _, old, new in several:
        model = own_models()[log]
        running, kv = (old.running + new.running) / 2, (old.kv + new.kv) / 2
        decode += STEPS * model.step_seconds(running, kv)
        work += STEPS * (model.token_seconds(MAX_RUNNING) * running + model.t2 * kv)
        prefill += new.passes * model.prefill_pass + new.prefilled / model.prefill_rate
    took *= len(line["log"])
    shares = {"work": work, "thin": decode - work, "prefill": prefill,
              "rest": took - decode - prefill}  # fmt: skip
    return {name: seconds / took for name, seconds in shares.items()}


def of_model(cell: Cell, own: bool) -> Times:
    """The step times of each log's machine, or those that were known before."""

    def times(log: str, _: int) -> tuple[float, float]:
        model = own_models().get(log, cell.model) if own else cell.model
        return model.token_seconds(MAX_RUNNING), model.t2

    return times


def of_forecasts(line: dict[str, Any]) -> Times:
    """The step times of the planner's forecasts that were in force."""

    def times(_: str, batch: int) -> tuple[float, float] | None:
        told = [each["forecast"] for each in line["chosen"] if each["batch"] <= batch]
        if not told or "token_seconds" not in told[-1]:
            return None
        # They are those of a fleet as fast as all engines together.
        engines = len(line["log"])
        return told[-1]["token_seconds"] * engines, told[-1]["read_seconds"] * engines

    return times


def own_efficiency(line: dict[str, Any], cell: Cell) -> float | None:
    """T_bound / T of the delivered batches by the machine's own step times."""
    if not line.get("log") or line["log"][0] not in own_models():
        return None
    model, known = own_models()[line["log"][0]], cell.model
    work = 0.0
    rows = line["batches"][cell.burn_in :]
    for row in rows:
        reads = row["bound_s"] * cell.engines - known.token_seconds(MAX_RUNNING) * row["tokens"]
        work += model.token_seconds(MAX_RUNNING) * row["tokens"] + model.t2 * reads / known.t2
    return work / cell.engines / sum(row["step_s"] for row in rows)


def table(runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of each measured cell, beside what was expected of it."""
    expected = {row["cell"]: row for row in json.loads((HERE / "predictions.json").read_text())}
    result = []
    for name, line in runs.items():
        cell = Cell.of(name)
        rows = line["batches"][cell.burn_in :]
        row = {"cell": name, "counted": len(rows), "code": line.get("code"), **figures(rows)}
        row["step_interval"] = interval(rows, seconds(rows))
        row["efficiency_interval"] = interval(rows, efficiency(rows))
        row["schedule"] = line["chosen"][-1]["schedule"] if line["chosen"] else ""
        row["generated"] = generated(line, of_model(cell, own=False), cell.burn_in)
        row["own_generated"] = generated(line, of_model(cell, own=True), cell.burn_in)
        row["own_efficiency"] = own_efficiency(line, cell)
        row["machine"] = machine(line)
        took, several = windows(line, cell.burn_in)
        row["passes_s"] = sum(new.passes for *_, new in several) / took if several else None
        row["split"] = split(line, cell.burn_in)
        if name in expected:
            row["predicted_step_s"] = expected[name]["step_s"]
            row["predicted_efficiency"] = expected[name]["efficiency"]
            row["predicted_off_policy"] = expected[name]["off_policy"]
        if (told := forecast(line, cell.burn_in)) is not None:
            row["forecast"] = told
            told["efficiency_found"] = generated(line, of_forecasts(line), cell.burn_in)
        result.append(row)
    return result


def model_errors() -> dict[str, Any]:
    """Seconds of decode windows in the servers' logs, against the model's."""
    logs = [log for name, logs in MACHINES.items() if "4B" in name for log in logs]
    ratios = [
        (
            line.running,
            MODEL.step_seconds(line.running, line.kv) * line.tokens_per_s / line.running,
        )
        for log in logs
        if (HERE / "raw" / f"{log}.txt.gz").exists()
        for line in decoded(log)
        if line.running and line.tokens_per_s
    ]
    result = {}
    for low, high in ((1, 8), (9, 64), (65, 256), (257, 512)):
        own = [ratio for running, ratio in ratios if low <= running <= high]
        if own:
            result[f"{low} to {high}"] = {
                "windows": len(own), "median": float(np.median(own)),
                "quartiles": [float(x) for x in np.quantile(own, [0.25, 0.75])],
            }  # fmt: skip
    return result


def result() -> dict[str, Any]:
    """Everything that README.md says."""
    runs, since = found(), HERE / "simulated.json"
    again = json.loads(since.read_text()) if since.exists() else {}
    everything = {
        "cells": [
            row | ({"simulated_s": again[row["cell"]]} if row["cell"] in again else {})
            for row in table(runs)
        ],
        "missing": [name for name in all_cells() if name not in runs
                    and name.split(":")[0] not in OTHERS],
        "windows_predicted_over_measured": model_errors(),
        "sixth": table(found("cells-6.jsonl")) if (HERE / "raw" / "cells-6.jsonl").exists() else [],
    }  # fmt: skip
    return json.loads(json.dumps(everything), parse_float=lambda text: float(f"{float(text):.4g}"))


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
                (low, high), told = row["step_interval"], row.get("forecast", {})
                other = rows.get(f"{AGAINST.get(name)}:0:1{variant}{seed}")
                same = other is not None and row["machine"] == other["machine"]
                where = "" if row["machine"] == "fifth machine" else f" ({row['machine']})"
                where += f", seed {seed[2:]}" if seed else ""
                said = ""
                if told:
                    said = f"{told['step_seconds']:.1f} s, {share(told['efficiency'])}"
                    if told["efficiency_found"] is not None:
                        said += f" (found: {share(told['efficiency_found'])})"
                text.append(
                    f"| {shape}, {NAMES[name]}{where} "
                    f"| {row['counted']} | {row['step_s']:.1f} ({low:.1f} to {high:.1f}) "
                    f"| {row['predicted_step_s']:.1f} "
                    f"| {format(row['simulated_s'], '.1f') if 'simulated_s' in row else ''} "
                    f"| {row['tokens_s']:,.0f} "
                    f"| {times(row, other) if same else ''} "
                    f"| {format(row['generated_s'], ',.0f') if 'generated_s' in row else ''} "
                    f"| {share(row['own_generated'])} | {share(row['off_policy'])} "
                    f"| {row['age']:.1f}, {row['oldest']} | {row['mean_length']:.0f} | {said} |"
                )
    return "\n".join(text)


def simulate() -> dict[str, float]:
    """The simulator's mean step of each cell of that table with the step times of its machine."""
    told: dict[str, float] = {}
    for name, line in found().items():
        model = own_models().get(line["log"][0]) if line.get("log") else None
        if is_alike(name) and model is not None:
            told[name] = round(simulated(Cell.of(name), model)["step_s"], 2)
            print(name, told[name], flush=True)
    return told


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
            (low, high), told, compared, said = row["step_interval"], row.get("forecast"), "", ""
            if above is not None:
                ratios = [row[name] / above[name] for name in ("tokens_s", "generated_s")]
                compared = "{:.2f} (generated: {:.2f})".format(*ratios)
            if told:
                said = f"{told['step_seconds']:.2f} s, {share(told['efficiency'])} "
                said += f"(found: {share(told['efficiency_found'])})"
            text.append(
                f"| {titled(row['cell'])} | {row['counted']} "
                f"| {row['step_s']:.2f} ({low:.2f} to {high:.2f}) | {row['tokens_s']:,.0f} "
                f"| {row['generated_s']:,.0f} | {compared} | {row['passes_s']:.1f} "
                f"| {share(row['own_generated'])} | {share(row['off_policy'])} "
                f"| {row['age']:.1f}, {row['oldest']} | {row['mean_length']:.0f} | {said} |"
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
        told = row.get("forecast", {})
        said = f"{told['step_seconds']:.2f} s, {told['efficiency']:.2f}" if told else ""
        if told.get("efficiency_found") is not None:
            said += f" (found: {told['efficiency_found']:.2f})"
        text.append(
            f"| {titled(row['cell'])} | {row['counted']} "
            f"| {row['step_s']:.2f} ({low:.2f} to {high:.2f}) "
            f"| {share(row.get('predicted_step_s'))} "
            f"| {row['efficiency']:.2f} ({least:.2f} to {most:.2f}) "
            f"| {share(row.get('predicted_efficiency'))} | {share(row['generated'])} "
            f"| {share(row['own_efficiency'])}, {share(row['own_generated'])} "
            f"| {row['tokens_s']:,.0f} "
            f"| {row['off_policy']:.2f} | {row['age']:.1f}, {row['oldest']} "
            f"| {row['mean_length']:.0f} | {said} |"
        )
    return "\n".join(text)


def picture(everything: dict[str, Any], path: Path) -> None:
    """Seconds of a step of each cell with its interval, and what was expected."""
    from matplotlib.patches import Patch

    from aprilsched.analysis.style import GREY, INK, PALETTE, new_figure, save

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the machines' step times again")
    parser.add_argument("--simulate", action="store_true", help="simulate with them again")
    options = parser.parse_args()
    if options.fit:
        text = json.dumps(fitted(), indent=1) + "\n"
        (HERE / "raw" / "models.json").write_text(text)
    if options.simulate:
        (HERE / "simulated.json").write_text(json.dumps(simulate(), indent=1) + "\n")
    everything = result()
    (HERE / "result.json").write_text(json.dumps(everything, indent=1) + "\n")
    print(alike(everything))
    print(markdown(everything))
    print(splits(everything))
    print(sixth(everything))
    print("missing:", ", ".join(everything["missing"]))
    print(json.dumps(everything["windows_predicted_over_measured"], indent=1))
    picture(everything, HERE / "h200.png")


if __name__ == "__main__":
    main()
