"""``aprilsched calibrate LOG``: fits the step-time model of a server to the server's log."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from aprilsched.cli.arguments import POSITIONAL, parsed
from aprilsched.kernel.values.bounds import AT_LEAST_1, check_range
from aprilsched.kernel.values.extras import extra
from aprilsched.planning.step_times import (
    Fit,
    Windows,
    fit,
    predicted_seconds,
    read_log,
    save_model,
    windows_of,
)
from aprilsched.planning.step_times.model import StepTimeModel

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_UNITS = {
    "t0": (1e3, "ms a step"),
    "t1": (1e6, "µs a sequence"),
    "t2": (1e9, "ns a context token"),
    "t0_wide": (1e3, "ms a step of a wide batch"),
    "wide_from": (1.0, "sequences"),
    "t0_experts": (1e3, "ms for all experts"),
    "expert_share": (1.0, "of the experts for a sequence"),
    "fill": (1.0, "sequences"),
    "prefill_pass": (1e3, "ms a pass"),
    "prefill_rate": (1.0, "tokens/s"),
    "prefill_chunk": (1.0, "tokens"),
}
_LIMIT = 40.0
"""Largest error that the picture shows, in percent; larger ones are drawn at the edge."""


@dataclass(frozen=True, kw_only=True)
class CalibrateCommand:
    """Fit step and prefill times to an SGLang server's log, or to a table of its decode lines."""

    log: Annotated[Path, POSITIONAL]
    """The server's log, or a CSV with running_requests, kv_tokens and decode_tokens_per_s."""
    json: bool = False
    """Print an object on stdout instead of tables."""
    plot: Path | None = None
    """Draw measured and predicted step times and their errors here (PNG, SVG or PDF)."""
    out: Path | None = None
    """Write the model here (TOML), for ``load_model``."""
    linear: bool = False
    """Fit t0, t1 and t2 only; otherwise further terms are added where they reduce the error."""
    steps: int = 40
    """Decode steps between two lines of the log: the server's --decode-log-interval."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        AprilschedError: if the log cannot be read, or has too few lines for a fit.
    """
    command = parsed(CalibrateCommand, arguments, "aprilsched calibrate")
    check_range(AT_LEAST_1, steps=command.steps)
    windows = windows_of(read_log(command.log), steps=command.steps)
    found = fit(windows, linear=command.linear)
    if command.json:
        sys.stdout.write(msgspec.json.encode(asdict(found)).decode() + "\n")
    else:
        _print(found)
    if command.out is not None:
        save_model(found.model, command.out, _origin(command.log, found))
    if command.plot is not None:
        _draw(found.model, windows, command.plot)
    return 0


def _origin(log: Path, found: Fit) -> tuple[str, ...]:
    steady = found.steady
    origin = (
        f"Fitted to {steady.windows} windows of decoding in {log.name}:",
        f"median error {steady.median:.1%}, 90th percentile {steady.p90:.1%}.",
    )
    if not found.assumed:
        return origin
    return (*origin, f"Assumed, of Qwen3-4B on an H200: {', '.join(found.assumed)}.")


def _print(found: Fit) -> None:
    console = Console(highlight=False)
    console.print(_parameters(found))
    console.print(_summary(found))
    console.print(
        f"{found.ignored} windows (or rows) ignored: the batch of the next one differs by too much."
    )


def _parameters(found: Fit) -> Table:
    table = Table("parameter", title="model")
    for name in ("value", "standard error"):
        table.add_column(name, justify="right")
    table.add_column("unit")
    for name, (scale, unit) in _UNITS.items():
        error = found.errors.get(name)
        note = "assumed, of an H200" if name in found.assumed else "-"
        value = f"{scale * getattr(found.model, name):,.6g}"
        table.add_row(name, value, note if error is None else f"{scale * error:.2g}", unit)
    for batch, tokens in found.model.tokens_per_step:
        table.add_row("tokens_per_step", f"{tokens:.3g}", "-", f"tokens at {batch:.0f} sequences")
    return table


def _summary(found: Fit) -> Table:
    table = Table("windows", title="errors of predicted seconds")
    for name in ("number", "median", "90th percentile", "predicted / measured, all"):
        table.add_column(name, justify="right")
    for name, of in (("decoding", found.steady), ("with prefill", found.stalled)):
        if of is not None:
            table.add_row(
                name, str(of.windows), f"{of.median:.1%}", f"{of.p90:.1%}", f"{of.total:.3f}"
            )
    return table


def _draw(model: StepTimeModel, windows: Windows, path: Path) -> None:
    """Draw measured and predicted step times and their errors.

    Raises:
        ConfigError: if matplotlib is missing or the file cannot be written.
    """
    with extra("plots"):
        from aprilsched.observe.report.style import finish, new_figure, save
    figure = new_figure(12, 4.6)
    left, middle, right = figure.subplots(1, 3)
    _steps(left, model, windows)
    finish(left, title="Decode step", x="predicted, ms", y="measured, ms")
    _errors(middle, model, windows, windows.running)
    finish(middle, title="Error by batch", x="running requests", y="predicted / measured - 1, %")
    _errors(right, model, windows, windows.kv)
    finish(right, title="Error by context", x="context tokens", y="predicted / measured - 1, %")
    save(figure, path)


def _steps(axes: Axes, model: StepTimeModel, windows: Windows) -> None:
    from aprilsched.observe.report.style import GREY, PALETTE

    steady = windows.where(windows.steady)
    predicted = 1e3 * predicted_seconds(model, steady) / steady.steps
    axes.scatter(predicted, 1e3 * steady.seconds / steady.steps, s=6, color=PALETTE[0])
    top = float(predicted.max())
    axes.plot([0, top], [0, top], color=GREY, linewidth=1)
    axes.set_xlim(0, 1.05 * top)
    axes.set_ylim(0, 1.3 * top)


def _errors(axes: Axes, model: StepTimeModel, windows: Windows, x: np.ndarray) -> None:
    from aprilsched.observe.report.style import GREY, PALETTE

    error = 100 * (predicted_seconds(model, windows) / windows.seconds - 1)
    error = np.clip(error, -_LIMIT, _LIMIT)
    kinds = (("decoding", windows.steady), ("with prefill", windows.stalled))
    for (name, chosen), color in zip(kinds, PALETTE, strict=False):
        axes.scatter(x[chosen], error[chosen], s=6, color=color, label=name)
    axes.axhline(0, color=GREY, linewidth=1)
    axes.set_xscale("log")
    axes.set_ylim(-_LIMIT, _LIMIT)
    axes.legend(frameon=False, fontsize=9)
