"""Turns a snapshot into text for a terminal. The functions are pure.

Invariants: no line is wider than requested, and there are no more lines than requested. With little
room, the least important parts are left out first.
"""

from __future__ import annotations

from rich.text import Text

from aprilsched.telemetry.live.bars import BLOCKS, Glyphs
from aprilsched.telemetry.live.engine_rows import engine_lines
from aprilsched.telemetry.live.lines import all_lines, any_fault
from aprilsched.telemetry.live.view_data import Snapshot
from aprilsched.telemetry.live.words import thousands

__all__ = ["frame", "one_line"]

_SMALL = 4
"""Smallest number of lines of a frame; with fewer lines, the short form is shown."""
_SPARE = ("faults", "groups", "speed", "idle", "legend")
"""Lines that are left out to make room for engines, in this order."""


def frame(snapshot: Snapshot, *, width: int, height: int, glyphs: Glyphs = BLOCKS) -> Text:
    """The frame for a terminal of `width` columns and `height` lines."""
    if height < _SMALL:
        return one_line(snapshot, width=width)
    lines = all_lines(snapshot, width, glyphs)
    wanted = min(len(snapshot.engines) + 1, _SMALL)
    for name in _SPARE:
        if height - sum(map(len, lines.values())) >= wanted or not snapshot.engines:
            break
        if name == "faults" and any_fault(snapshot.faults):
            continue
        lines.pop(name)
    shown = [line for some in lines.values() for line in some][:height]
    if snapshot.engines and height - len(shown) > len(snapshot.engines) + 1:
        shown.append(Text())
    shown += engine_lines(snapshot.engines, width=width, height=height - len(shown), glyphs=glyphs)
    for line in shown:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(shown)


def one_line(snapshot: Snapshot, *, width: int) -> Text:
    """The short form of the view: one line."""
    facts, latest = snapshot.facts, snapshot.latest
    total = sum(snapshot.in_flight.values())
    stale = 0.0 if latest is None else latest.staleness_mean
    line = Text(
        f"{facts.title} {min(snapshot.batches + 1, facts.batches)}/{facts.batches}"
        f" | groups {min(snapshot.ready, facts.batch_groups)}/{facts.batch_groups}"
        f" | {total} in flight ({snapshot.carried} carried)"
        f" | {thousands(snapshot.tokens_per_s)} tokens/s"
        f" | v{snapshot.version} | stale {stale:.2f}",
        no_wrap=True,
    )
    line.truncate(width, overflow="ellipsis")
    return line
