"""``aprilsched calibrate LOG``: fits the step-time model of a server to the server's log."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from rich.console import Console
from rich.table import Table

from aprilsched.cli.arguments import POSITIONAL, parsed
from aprilsched.kernel.values.bounds import AT_LEAST_1, check_range
from aprilsched.planning.step_times import Fit, fit, read_log, save_model, windows_of

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


@dataclass(frozen=True, kw_only=True)
class CalibrateCommand:
    """Fit step and prefill times to an SGLang server's log, or to a table of its decode lines."""

    log: Annotated[Path, POSITIONAL]
    """The server's log, or a CSV with running_requests, kv_tokens and decode_tokens_per_s."""
    json: bool = False
    """Print an object on stdout instead of tables."""
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
    found = fit(windows_of(read_log(command.log), steps=command.steps), linear=command.linear)
    if command.json:
        sys.stdout.write(msgspec.json.encode(asdict(found)).decode() + "\n")
    else:
        _print(found)
    if command.out is not None:
        save_model(found.model, command.out, _origin(command.log, found))
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
