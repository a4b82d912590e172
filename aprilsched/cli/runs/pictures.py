"""Writes the pictures, reports and traces that a command leaves in its folders.

Invariant: if one of them fails, the command reports it in one line and continues, because the run
itself is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from aprilsched.errors import AprilschedError, MissingExtra
from aprilsched.observe.log.run import read_run
from aprilsched.simulation import PolicyRow

DRAWN_POLICIES = 8
"""Largest number of policies in a picture whose bars and colours can be distinguished."""


def draw_comparison(
    root: Path, folders: Mapping[str, str], rows: Sequence[PolicyRow], messages: Console
) -> None:
    """Draw the policies, whose runs are in these folders of `root`, in comparison.png there: of
    more than `DRAWN_POLICIES`, the fastest."""
    try:
        from aprilsched.observe import plots
        from aprilsched.observe.report.style import save
    except MissingExtra as error:
        messages.print(f"No pictures: {error}", soft_wrap=True, highlight=False, markup=False)
        return
    drawn = rows
    if len(rows) > DRAWN_POLICIES:
        drawn = sorted(rows, key=lambda row: -(row.delivered_tokens_per_s or 0))[:DRAWN_POLICIES]
    runs = {row.policy: read_run(root / folders[row.policy]) for row in drawn}
    save(plots.comparison(runs, rows), root / "comparison.png")


def leave_report(
    messages: Console, folder: Path, other: Path | None = None, *, out: Path | None = None
) -> None:
    """Write the report of the run in `folder`, with the run `other` side by side if it is given,
    and print its path."""

    def make() -> None:
        from aprilsched.observe.report.page import write_report

        path, _ = write_report(folder, other, out=out)
        messages.print(f"The report is in {path}", soft_wrap=True, highlight=False)

    _attempt("report", make, messages)


def leave_trace(messages: Console, folder: Path) -> None:
    """Write the trace of the run in `folder` for Perfetto, and print its path."""

    def make() -> None:
        from aprilsched.observe.exports.trace_run import write_trace

        path = write_trace(folder)
        messages.print(f"The trace is in {path}", soft_wrap=True, highlight=False)

    _attempt("trace", make, messages)


def _attempt(what: str, make: Callable[[], None], messages: Console) -> None:
    try:
        make()
    except AprilschedError as error:
        messages.print(f"No {what}: {error}", soft_wrap=True, highlight=False, markup=False)
    except Exception as error:
        text = f"No {what}: {type(error).__name__}: {error}"
        messages.print(text, soft_wrap=True, highlight=False, markup=False)
