"""Turns engines into lines: all of them if they fit, otherwise the most interesting ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from aprilsched.telemetry.live.bars import Glyphs, bar
from aprilsched.telemetry.live.view_data import EngineRow
from aprilsched.telemetry.live.words import cut, host, percent, thousands

__all__ = ["chosen", "engine_lines"]

_NAME, _BAR = 24, 10
"""Largest width of a name."""
_STATE, _RUNNING, _PERCENT, _RATE, _VERSION = 10, 11, 5, 8, 7
_STYLES = {
    "generating": "green",
    "paused": "magenta",
    "refitting": "yellow",
    "asleep": "blue",
    "lost": "bold red",
}


def engine_lines(
    rows: Sequence[EngineRow], *, width: int, height: int, glyphs: Glyphs
) -> list[Text]:
    """At most `height` lines with a heading. If there are more engines, the last line counts the
    others."""
    if height < 2 or not rows:
        return []
    shown = chosen(rows, height - 1)
    if len(shown) < len(rows):
        shown = chosen(rows, height - 2)
    columns = _columns(rows, width)
    lines = [_head(columns), *(_line(row, columns, glyphs) for row in shown)]
    if len(shown) < len(rows):
        lines.append(_others([row for row in rows if row not in shown], glyphs))
    return lines


def chosen(rows: Sequence[EngineRow], count: int) -> list[EngineRow]:
    """Choose the engines to show if there are too many: first the worst (out of use, then least
    busy), then the fullest, in their own order."""
    if len(rows) <= count:
        return list(rows)
    worst = sorted(rows, key=lambda row: (row.state != "lost", row.busy))
    picked = worst[: (count + 1) // 2]
    fullest = sorted(rows, key=lambda row: (-(row.kv_share or 0.0), -row.kv_tokens))
    picked += [row for row in fullest if row not in picked][: count - len(picked)]
    return [row for row in rows if row in picked]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Columns:
    """Widths of the columns. `kv` and `busy` are the widths of the bars without their figures."""

    name: int
    kv: int
    busy: int


def _columns(rows: Sequence[EngineRow], width: int) -> _Columns:
    fixed = 1 + _STATE + _RUNNING + _PERCENT + _RATE + _VERSION + _PERCENT + 2
    longest = max(len("engine"), *(len(host(row.name)) for row in rows))
    name = max(6, min(_NAME, longest, width - fixed))
    bars = max(0, width - fixed - name)
    busy = min(_BAR, (bars + 1) // 2)
    return _Columns(name=name, kv=min(_BAR, bars - busy), busy=busy)


def _head(columns: _Columns) -> Text:
    kv = "KV" if columns.kv < 3 else "KV pool"
    busy = "busy" if columns.busy < 7 else "busy (1 min)"
    return Text(
        f"{'engine':<{columns.name}} {'state':<{_STATE}}{'running':>{_RUNNING}} "
        f"{kv:>{columns.kv + _PERCENT}}{'tokens/s':>{_RATE + 1}}{'policy':>{_VERSION}}"
        f"{busy:>{columns.busy + _PERCENT}}",
        style="bold dim",
        no_wrap=True,
    )


def _line(row: EngineRow, columns: _Columns, glyphs: Glyphs) -> Text:
    most = "" if row.max_running is None else f"/{row.max_running}"
    queued = f"+{row.queued}" if row.queued else ""
    version = "mixed" if row.version is None else f"v{row.version}"
    line = Text(no_wrap=True)
    line.append(f"{cut(host(row.name), columns.name):<{columns.name}} ")
    line.append(f"{row.state:<{_STATE}}", style=_STYLES[row.state])
    line.append(f"{row.running}{queued}{most}".rjust(_RUNNING) + " ")
    _bar(line, row.kv_share, columns.kv, "blue", glyphs)
    if row.kv_share is None:
        line.append(f"{thousands(row.kv_tokens):>{_PERCENT}}")
    else:
        line.append(f"{percent(row.kv_share):>{_PERCENT}}")
    line.append(f"{thousands(row.tokens_per_s):>{_RATE + 1}}{version:>{_VERSION}} ")
    _bar(line, row.busy, columns.busy, "green", glyphs)
    line.append(f"{percent(row.busy):>{_PERCENT - 1}}")
    return line


def _bar(line: Text, share: float | None, width: int, style: str, glyphs: Glyphs) -> None:
    if share is None:
        line.append(" " * width)
        return
    full, empty = bar(share, width, glyphs)
    line.append(full, style=style)
    line.append(empty, style="dim")


def _others(rows: Sequence[EngineRow], glyphs: Glyphs) -> Text:
    states = Counter(row.state for row in rows)
    said = [f"{count} {state}" for state, count in states.most_common()]
    speed = thousands(sum(row.tokens_per_s for row in rows))
    busy = percent(sum(row.busy for row in rows) / len(rows))
    what = [", ".join(said), f"{speed} tokens/s", f"{busy} busy"]
    return Text(f"and {len(rows)} more: {glyphs.dot.join(what)}", style="dim", no_wrap=True)
