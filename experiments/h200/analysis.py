"""Makes frontier.json, the tables of README.md and the picture from the measured cells.

    python experiments/h200/analysis.py [FOLDER MACHINE | draws NUMBER CELL… | predict COMMIT CELL…]

FOLDER has the files of run.sh: cells-N.jsonl and steps-N-KIND.txt.gz of each GPU. Its cells come to
those of frontier.json, in the place of cells of the same name; MACHINE is its letter in the table.
Without a folder the tables and the picture are made from frontier.json again. "draws" simulates
cells NUMBER times with other random tokens, and "predict" writes down what the simulator
expects of cells that predictions.json does not have. Intervals are from the 5th to the 95th
percentile of 10,000 bootstrap samples of the counted batches, drawn in blocks of two that follow
each other.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from dataclasses import replace
from math import erf, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parents[1])]

from schedules import ARMS, COMPARED, Cell, figures, simulated  # noqa: E402

from aprilsched.errors import AprilschedError  # noqa: E402
from aprilsched.planning.step_times.calibration import fit  # noqa: E402
from aprilsched.planning.step_times.model import StepTimeModel  # noqa: E402
from aprilsched.planning.step_times.server_log import read_log, windows_of  # noqa: E402
from experiments.library import table  # noqa: E402

MARKS = ("<!-- tables -->\n", "\n<!-- end of tables -->")
DIGITS = {"generated_s": 0, "delivered_s": 0, "staleness": 2, "off_policy": 2}
WHOLE_RULE = ("5e2993a5", "39232f9f")
"""Commits of predictions with the whole rule of admission."""
_SAMPLES = 10_000


def interval(rows: list[dict[str, Any]]) -> list[float]:
    """The interval of generated tokens per second."""
    tokens = np.array([row["generated"] for row in rows], dtype=float)
    seconds = np.array([row["step_s"] for row in rows])
    random, blocks = np.random.default_rng(0), -(-len(rows) // 2)
    first = random.integers(len(rows), size=(_SAMPLES, blocks, 1))
    drawn = ((first + np.arange(2)) % len(rows)).reshape(_SAMPLES, -1)[:, : len(rows)]
    return np.quantile(tokens[drawn].sum(1) / seconds[drawn].sum(1), [0.05, 0.95]).tolist()


def collected(folder: Path, machine: str, found: dict[str, Any]) -> None:
    """Add what the files of another run have."""
    cells, machines, failed = found["cells"], found["machines"], found["failed"]
    for path in sorted(folder.glob("cells-*.jsonl")):
        number = path.stem.partition("-")[2]
        gpu = machine + number
        for line in map(json.loads, path.read_text().splitlines()):
            if "boot_s" in line:
                own = fitted(folder / f"steps-{number}-{line['kind']}.txt.gz")
                machines[f"{gpu} {line['kind']}"] = own | {"boot_s": line["boot_s"]}
                continue
            cell = Cell.of(line["cell"])
            own = machines[f"{gpu} {cell.server}"]
            rows = line.pop("batches")
            counted = rows[cell.burn_in :]
            if len(counted) < 2:
                failed[cell.name] = line["error"] or "fewer than two batches were counted"
                continue
            since = {}
            if model := own.get("model"):
                since = figures(simulated(cell, StepTimeModel(**model), len(rows))[cell.burn_in :])
            cells[cell.name] = {
                **figures(counted), "interval": interval(counted), "gpu": gpu,
                "simulated_since": since, "error": line["error"], "wrong": line["wrong"],
                "cpu_share": line["cpu_s"] / line["seconds"], "schedule": line["schedule"],
                "code": line["code"], "rows": rows,
            }  # fmt: skip
            failed.pop(cell.name, None)


def fitted(path: Path) -> dict[str, Any]:
    """Return the step times of one server's log, if it has enough windows."""
    if not path.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        log.write(gzip.decompress(path.read_bytes()))
        log.flush()
        try:
            found = fit(windows_of(read_log(Path(log.name))))
        except AprilschedError as error:
            return {"error": str(error)}
    names = StepTimeModel.__dataclass_fields__
    return {
        "model": {name: getattr(found.model, name) for name in names},
        "median_error": found.steady.median,
    }


def rounded(found: Any) -> Any:
    """Return the values with five significant digits."""
    return json.loads(json.dumps(found), parse_float=lambda text: float(f"{float(text):.5g}"))


def shown(row: dict[str, Any] | None, name: str) -> str:
    """Return one figure of a row, or nothing without the row."""
    return f"{row[name]:,.{DIGITS[name]}f}" if row else ""


def rows_table(found: dict[str, Any], predicted: dict[str, Any]) -> str:
    """The table of every cell, predicted and measured."""
    head = ["arm", "GPU", "batches", "generated tokens/s", "predicted", "simulated since",
            "delivered tokens/s", "mean staleness", "predicted", "oldest", "off-policy share",
            "mean length"]  # fmt: skip
    lines = []
    order = {name: place for place, name in enumerate(ARMS)}
    names = {name for name in (*predicted, *found["cells"]) if not Cell.of(name).is_fleet}
    names = sorted(names, key=lambda name: (name[-1], order[Cell.of(name).arm]))
    for name in names:
        cell, row, expected = Cell.of(name), found["cells"].get(name), predicted.get(name)
        spread = "" if row is None else " ({:,.0f} to {:,.0f})".format(*row["interval"])
        lines.append([
            cell.title, row["gpu"] if row else "", row["batches"] if row else "",
            shown(row, "generated_s") + spread, shown(expected, "generated_s"),
            shown(row and row["simulated_since"], "generated_s"), shown(row, "delivered_s"),
            shown(row, "staleness"), shown(expected, "staleness"), row["oldest"] if row else "",
            shown(row, "off_policy"), f"{row['mean_length']:.0f}" if row else "",
        ])  # fmt: skip
    return table(head, lines)


def compared_table(found: dict[str, Any], predicted: dict[str, Any]) -> str:
    """The table of arms against each other, on the same GPU if both ran there."""
    lines = []
    for seed in (0, 1):
        for first, second in COMPARED:
            names = [f"{arm}:s{seed}" for arm in (first, second)]
            cells = [found["cells"].get(name) for name in names]
            expected = [predicted.get(name) for name in names]
            if not all(cells) and not all(expected):
                continue
            pairs = [
                [f"{a['generated_s'] / b['generated_s']:.2f}",
                 f"{a['staleness'] / b['staleness']:.2f}" if b["staleness"] else "—"]
                if a and b else ["", ""] for a, b in (cells, expected)
            ]  # fmt: skip
            gpus = {cell["gpu"] for cell in cells if cell}
            where = "" if not all(cells) else ("one" if len(gpus) == 1 else "two")
            title = f"{ARMS[first].title} against {Cell.of(names[1]).title}"
            lines.append([title, where, pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]])
    head = ["compared", "GPUs", "generated tokens/s", "predicted", "mean staleness", "predicted"]
    return table(head, lines)


def forecast(found: dict[str, Any], predicted: dict[str, Any], name: str, words: str) -> str:
    """Return how many cells were predicted within 4 %."""
    errors = {
        cell: predicted[cell][name] / row[name] - 1
        for cell, row in found["cells"].items() if cell in predicted and row[name]
    }  # fmt: skip
    near = sum(abs(error) <= 0.04 for error in errors.values())
    worst = max(errors, key=lambda cell: abs(errors[cell]))
    return (
        f"{words} within 4 % of the prediction: {near} of {len(errors)} cells. The largest error "
        f"is {errors[worst] * 100:+.0f} % ({Cell.of(worst).title})."
    )


def draw(cells: dict[str, Any], number: int, names: list[str]) -> None:
    """Simulate these cells `number` times with other random tokens."""
    for name in names:
        cell, count = Cell.of(name), len(cells[name]["rows"])
        runs = [simulated(replace(cell, draw=n), batches=count) for n in range(number)]
        cells[name]["draws"] = [figures(rows[cell.burn_in :])["generated_s"] for rows in runs]


def chance(cells: dict[str, Any], predicted: dict[str, Any]) -> str:
    """Return how many forecasts miss a measurement by more than a second draw would."""
    kinds = [name.partition("@")[0].partition(":")[0] for name in cells]
    # The relative variance for one counted batch, which cells of a kind share.
    each: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind, row in zip(kinds, cells.values(), strict=True):
        if "draws" in row:
            found = (stdev(row["draws"]) / fmean(row["draws"])) ** 2 * row["batches"]
            each[kind] += [found] * (len(row["draws"]) - 1)
    near, missed, beyond = 0.0, 0, 0
    for kind, (name, row) in zip(kinds, cells.items(), strict=True):
        spread = sqrt(2 * fmean(each[kind]) / row["batches"])
        error = abs(predicted[name]["generated_s"] / row["generated_s"] - 1)
        near += erf(0.04 / sqrt(2) / spread)
        missed += error > 0.04
        beyond += error > max(0.04, 1.96 * spread)
    return (
        f"Two simulations of a cell that differ in their random tokens are within 4 % of each "
        f"other in {near:.0f} of {len(cells)} cells. {beyond} of the {missed} predictions that "
        f"miss by more than 4 % miss by more than 95 % of such differences."
    )


def predict(names: list[str]) -> None:
    """Write down what the simulator expects of cells that predictions.json does not have."""
    known, (code, *cells) = loaded()[1], names
    for name in cells:
        if name not in known:
            row = figures(simulated(Cell.of(name))[Cell.of(name).burn_in :])
            known[name] = {key: round(value, 4) for key, value in row.items()} | {"code": code}
            (HERE / "predictions.json").write_text(json.dumps(known, indent=1) + "\n")


def markdown(found: dict[str, Any], predicted: dict[str, Any]) -> str:
    """The tables of README.md."""
    wrong = {name: row["wrong"] for name, row in found["cells"].items()
             if any(row["wrong"].values())}  # fmt: skip
    whole = {name: row for name, row in predicted.items() if row["code"] in WHOLE_RULE}
    text = [rows_table(found, predicted), compared_table(found, predicted)]
    for name, words in (("generated_s", "Generated tokens/s"), ("staleness", "Mean staleness")):
        text.append(forecast(found, predicted, name, words))
        text.append(forecast(found, whole, name, f"{words}, by the whole rule of admission,"))
    text.append(chance(found["cells"], predicted))
    text.append(f"Responses that ended otherwise, were delivered twice or had other than 4 "
                f"siblings: {wrong or 'none'}.")  # fmt: skip
    return "\n\n".join(text)


LINES = {
    "whole groups": ("sync", "wave@1.5", "wave@2.0", "wave@3.0", "wave@3.5"),
    "single samples": ("samples@1.5", "samples@2.0"),
}
"""The arms that the picture joins, by increasing ratio."""
LABELS = {
    "sync": ("synchronous", (10, -4)), "wave@2.0": ("ratio 2.0 (APRIL)", (10, -8)),
    "wave@1.5": ("ratio 1.5", (10, -6)), "wave@3.0": ("ratio 3.0", (10, -8)),
    "wave@3.5": ("ratio 3.5", (-26, 11)), "auto": ("auto, unbounded", (8, -13)),
    "samples@1.5": ("ratio 1.5", (-30, -18)), "samples@2.0": ("ratio 2.0", (-62, 6)),
    "auto-samples": ("auto, unbounded", (10, 2)), "auto@4": ("auto, at most 4", (-50, 11)),
    "auto-samples@4": ("auto, at most 4", (-102, 2)),
}  # fmt: skip
"""The arms of the picture, with their labels and the offsets of these in points."""


def picture(cells: dict[str, Any], path: Path) -> None:
    """Draw generated tokens per second against the mean staleness: each seed, and their means."""
    from aprilsched.observe.report.style import INK, PALETTE, new_figure, save

    figure = new_figure(8, 4.4)
    axes = figure.subplots()
    colours = {"whole groups": PALETTE[0], "single samples": PALETTE[5]}
    means: dict[str, tuple[float, float]] = {}
    for arm, (label, offset) in LABELS.items():
        seeds = [(row["staleness"], row["generated_s"]) for name, row in cells.items()
                 if Cell.of(name).arm == arm]  # fmt: skip
        unit = "single samples" if "samples" in arm else "whole groups"
        marker = "*" if arm.startswith("auto") else "o"
        means[arm] = (fmean(x for x, _ in seeds), fmean(y for _, y in seeds))
        axes.plot(*zip(*seeds, strict=True), marker, color=colours[unit], alpha=0.35, markersize=5)
        axes.plot(*means[arm], marker, color=colours[unit], markersize=13 if marker == "*" else 8)
        axes.annotate(label, means[arm], offset, textcoords="offset points", color=INK, fontsize=9)
    for unit, arms in LINES.items():
        axes.plot(*zip(*(means[arm] for arm in arms), strict=True), "-", color=colours[unit],
                  label=unit)  # fmt: skip
    axes.set(xlabel="mean staleness of delivered tokens, updates", ylabel="generated tokens/s",
             xlim=(-0.1, 3.3), ylim=(0, 13_000))  # fmt: skip
    axes.legend(frameon=False, loc="lower right")
    save(figure, path)


def written(text: str, page: Path) -> None:
    """Replace the tables of a page."""
    before, _, rest = page.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    page.write_text(before + MARKS[0] + text + MARKS[1] + after)


def loaded() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the measured cells and the predictions."""
    names = ("frontier.json", "predictions.json")
    found, predicted = (json.loads((HERE / name).read_text()) for name in names)
    return found, predicted


def main() -> None:
    command, *names = sys.argv[1:] or [""]
    found = loaded()[0]
    if command == "predict":
        predict(names)
    elif command == "draws":
        draw(found["cells"], int(names[0]), names[1:])
    elif command:
        collected(Path(command), names[0], found)
    (HERE / "frontier.json").write_text(json.dumps(rounded(found), indent=1) + "\n")
    written(markdown(*loaded()), HERE / "README.md")
    picture(found["cells"], HERE / "frontier.png")


if __name__ == "__main__":
    main()
