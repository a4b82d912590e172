"""Compares the simulated engine and the step-time models with one H200; see README.md."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from measured import SCHEDULES, STRETCHES, Schedule, Stretch, within

from aprilsched.observe.report.style import GREY, PALETTE, finish, new_figure, save
from aprilsched.planning.step_times import (
    LogLine,
    Windows,
    fit,
    predicted_seconds,
    read_log,
    residuals_of,
    windows_of,
)
from aprilsched.planning.step_times.model import H200_QWEN3_4B, H200_QWEN3_4B_LINEAR, StepTimeModel

_LOG = Path(__file__).parent / "h200_qwen3-4b_bf16_triton_sglang0517_decode.csv"
MODELS = {"linear": H200_QWEN3_4B_LINEAR, "refined": H200_QWEN3_4B}


def replay(schedule: Schedule, lines: list[LogLine], seeds: int) -> dict[str, Any]:
    """Measured steps, and what each model's steps are over `seeds`."""
    seconds, rates = schedule.measured(lines)
    found: dict[str, Any] = {"name": schedule.name, "seconds": seconds, "rates": rates}
    for name, timing in MODELS.items():
        rows = np.array([schedule.simulate(seed, timing) for seed in range(seeds)])
        simulated = rows[:, :, 0]
        # The first step has nobody carried over, so it is another distribution.
        later = slice(1, None) if schedule.name != "synchronous" else slice(0, None)
        mean = simulated[:, later].mean(axis=1)
        found[name] = {
            "seconds": simulated.mean(axis=0).tolist(),
            "seconds_sd": simulated.std(axis=0, ddof=1).tolist(),
            "ratios": (simulated.mean(axis=0) / seconds).tolist(),
            "rates": rows[:, :, 1].mean(axis=0).tolist(),
            "rates_sd": rows[:, :, 1].std(axis=0, ddof=1).tolist(),
            "prefilled": rows[:, :, 2].mean(axis=0).tolist(),
            "rate_ratios": (rows[:, :, 1].mean(axis=0) / rates).tolist(),
            "later_steps": {
                "measured": float(np.mean(seconds[later])),
                "simulated": float(mean.mean()),
                "sd_between_seeds": float(mean.std(ddof=1)),
                "ratio": float(mean.mean() / np.mean(seconds[later])),
                "rate_ratio": float(rows[:, later, 1].mean() / np.mean(rates[later])),
            },
        }
    return found


def hold_out(stretch: Stretch, lines: list[LogLine]) -> tuple[dict[str, Any], Windows, Any]:
    """Both kinds of model, fitted without the stretch, on the stretch."""
    everything = [replace(line, engine=_name(line)) for line in lines]
    windows = windows_of(everything)
    inside = windows.engine == stretch.name
    rest, left_out = windows.where(~inside), windows.where(inside)
    left_out = left_out.where(left_out.steady | left_out.stalled)
    found: dict[str, Any] = {"name": stretch.name, "windows": len(left_out)}
    errors = {}
    for name in MODELS:
        model = fit(rest, linear=name == "linear", replicates=2).model
        predicted = predicted_seconds(model, left_out)
        residuals = residuals_of(left_out, predicted)
        found[name] = {"model": asdict(model), "median": residuals.median, "p90": residuals.p90}
        found[name]["total"] = residuals.total
        errors[name] = predicted / left_out.seconds - 1
    return found, left_out, errors


def _name(line: LogLine) -> str:
    return next((s.name for s in STRETCHES if within(s, line)), line.engine)


def known_misses(windows: Windows, model: StepTimeModel) -> dict[str, float]:
    """Median predicted / measured of the steps that the linear model is known to miss."""
    few = (windows.running < 10) & (windows.kv > 1200 * windows.running)
    wide = windows.running >= 400
    ratio = predicted_seconds(model, windows) / windows.seconds
    return {
        "fewer than 5 with over 1,200 tokens each": float(
            np.median(ratio[few & (windows.running < 5) & windows.steady])
        ),
        "5 to 9 with over 1,200 tokens each": float(
            np.median(ratio[few & (windows.running >= 5) & windows.steady])
        ),
        "400 and more, decoding only": float(np.median(ratio[wide & windows.steady])),
    }


def draw(held: list[tuple[Windows, Any]], replays: list[dict[str, Any]], path: Path) -> None:
    """Errors on held-out windows by batch, and simulated against measured rates."""
    figure = new_figure(12, 4.8)
    left, middle, right = figure.subplots(1, 3)
    for axes, name in ((left, "linear"), (middle, "refined")):
        for kind, color in (("steady", PALETTE[0]), ("stalled", PALETTE[1])):
            chosen = [(w.running, e[name], getattr(w, kind)) for w, e in held]
            x = np.concatenate([running[mask] for running, _, mask in chosen])
            y = 100 * np.concatenate([error[mask] for _, error, mask in chosen])
            label = "decoding only" if kind == "steady" else "with prefill passes"
            axes.scatter(x, np.clip(y, -40, 40), s=5, color=color, label=label)
        axes.axhline(0, color=GREY, linewidth=1)
        axes.set_xscale("log")
        axes.set_ylim(-40, 40)
        axes.legend(frameon=False, fontsize=9, loc="upper left")
        y = "predicted / measured - 1, %"
        finish(axes, title=f"Held-out windows, {name}", x="running requests", y=y)
    for at, item in enumerate(replays):
        for name, shift, color in (("linear", -0.12, PALETTE[5]), ("refined", 0.12, PALETTE[2])):
            rates = np.array(item[name]["rate_ratios"])
            spread = np.array(item[name]["rates_sd"]) / np.array(item["rates"])
            y = at + shift + np.linspace(-0.08, 0.08, len(rates))
            right.errorbar(rates, y, xerr=spread, fmt="o", ms=3, lw=0.8, color=color)
    for factor in (0.9, 1.0, 1.1):
        right.axvline(factor, color=GREY, linewidth=1, linestyle="-" if factor == 1 else ":")
    right.set_yticks(range(len(replays)), [item["name"].replace(", ", ",\n") for item in replays])
    right.invert_yaxis()
    title = "Tokens/s, simulated / measured"
    finish(right, title=title, x="linear (red), refined (green), ± SD of seeds", y="")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path, nargs="?", default=_LOG, help="decode lines (CSV)")
    parser.add_argument("--seeds", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    lines = read_log(arguments.log)
    replays = [replay(schedule, lines, arguments.seeds) for schedule in SCHEDULES]
    held = [hold_out(stretch, lines) for stretch in STRETCHES]
    windows = windows_of(lines)
    result = {
        "seeds": arguments.seeds,
        "steps": replays,
        "held_out": [row for row, _, _ in held],
        "known_misses": {name: known_misses(windows, model) for name, model in MODELS.items()},
    }
    text = json.dumps(result, indent=1, default=float)
    (arguments.out / "result.json").write_text(text + "\n", encoding="utf-8")
    draw([(w, e) for _, w, e in held], replays, arguments.out / "residuals.png")
    for row in replays:
        print(row["name"], "measured", row["seconds"], [round(r) for r in row["rates"]])
        for name in MODELS:
            r = row[name]
            print("  ", name, np.round(r["seconds"], 1), "sd", np.round(r["seconds_sd"], 1))
            print("     ratios", np.round(r["ratios"], 2), "rates", np.round(r["rate_ratios"], 2))
            print("     prefilled", np.round(r["prefilled"], -3))
            print("     later", {k: round(v, 3) for k, v in r["later_steps"].items()})
    for row in result["held_out"]:
        figures = {n: [round(row[n][k], 3) for k in ("median", "p90", "total")] for n in MODELS}
        print(row["name"], row["windows"], figures)
    print(json.dumps(result["known_misses"], indent=1))


if __name__ == "__main__":
    main()
