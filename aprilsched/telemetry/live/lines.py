"""Makes the lines of the live view from a snapshot. The functions are pure."""

from __future__ import annotations

from rich.text import Text

from aprilsched.telemetry.live.bars import Glyphs, bar, divided, sparkline
from aprilsched.telemetry.live.history import COLUMN_SECONDS
from aprilsched.telemetry.live.view_data import Faults, Phase, Snapshot
from aprilsched.telemetry.live.words import CAUSES, clock_time, cut, percent, plural, thousands

__all__ = ["all_lines", "any_fault"]

_LABEL = 11
_RIGHT = 27
"""Columns for the text to the right of a bar."""
_GAP = "   "
_CAUSES_SHOWN = 3
_PHASES: dict[Phase, tuple[str, str]] = {
    "decoding": ("green", "decoding"),
    "straggler": ("cyan", "decoding, carried"),
    "prefilling": ("yellow", "prefilling"),
    "re-prefilling": ("red", "re-prefilling"),
    "paused": ("magenta", "paused"),
    "waiting": ("white", "waiting for an engine"),
    "tools": ("bright_black", "at their tools"),
    "scoring": ("blue", "scoring"),
}
"""Style and name of each phase, in the order of :attr:`Glyphs.fills`."""


def all_lines(snapshot: Snapshot, width: int, glyphs: Glyphs) -> dict[str, list[Text]]:
    """All lines without those of the engines, by name."""
    facts = snapshot.facts
    room = width - _LABEL
    return {
        "title": [_title(snapshot, width, glyphs)],
        "batches": [
            _counted("batches", snapshot.batches, facts.batches, "delivered", room, glyphs)
        ],
        "groups": [
            _counted(
                "this batch",
                min(snapshot.ready, facts.batch_groups),
                facts.batch_groups,
                "groups ready",
                room,
                glyphs,
            )
        ],
        "in flight": [_in_flight(snapshot, room, glyphs)],
        "legend": _legend(snapshot, room, glyphs),
        "busy": [_busy(snapshot, room, glyphs)],
        "idle": [_idle(snapshot, glyphs)],
        "speed": [_speed(snapshot, room, glyphs)],
        "faults": _faults(snapshot, glyphs),
    }


def _label(name: str) -> Text:
    line = Text(no_wrap=True)
    line.append(f"{name:<{_LABEL}}", style="bold")
    return line


def _title(snapshot: Snapshot, width: int, glyphs: Glyphs) -> Text:
    """The run and a note on the left, and its time on the right."""
    facts, note = snapshot.facts, snapshot.note
    when = f"{clock_time(snapshot.elapsed)} elapsed"
    if snapshot.left and not note:
        when += f"{glyphs.dot}about {clock_time(snapshot.left)} left"
    if facts.modelled:
        when += " (modelled)"
    noted = f"{glyphs.dot}{note}" if note else ""
    room = max(0, width - len(when) - 2)
    where = cut(facts.where, max(0, room - len(facts.title) - 1 - len(noted)))
    line = Text(f"{facts.title} {where}".rstrip() + noted, no_wrap=True)
    line.stylize("bold yellow" if note else "bold cyan")
    line.truncate(room, overflow="ellipsis", pad=True)
    line.append(f"  {when}", style="dim")
    return line


def _counted(name: str, done: int, of: int, what: str, room: int, glyphs: Glyphs) -> Text:
    said = f"  {done:,} of {of:,} {what}"
    full, empty = bar(done / of if of else 1.0, max(0, room - _RIGHT), glyphs)
    line = _label(name)
    line.append(full, style="cyan")
    line.append(empty, style="dim")
    line.append(said)
    return line


def _in_flight(snapshot: Snapshot, room: int, glyphs: Glyphs) -> Text:
    line = _label("in flight")
    width = max(0, room - _RIGHT)
    cells = divided(snapshot.in_flight, width)
    for fill, (phase, (style, _)) in zip(glyphs.fills, _PHASES.items(), strict=True):
        line.append(fill * cells.get(phase, 0), style=style)
    line.append(" " * (width - sum(cells.values())))
    line.append(f"  {plural(sum(snapshot.in_flight.values()), 'rollout')}")
    return line


def _legend(snapshot: Snapshot, room: int, glyphs: Glyphs) -> list[Text]:
    """The legend of the bar, on as many lines as it needs."""
    lines = [_label("")]
    for fill, (phase, (style, name)) in zip(glyphs.fills, _PHASES.items(), strict=True):
        count = snapshot.in_flight.get(phase)
        if not count:
            continue
        said = f" {count:,} {name}"
        if len(lines[-1]) > _LABEL:
            if len(lines[-1]) + len(_GAP) + 1 + len(said) <= _LABEL + room:
                lines[-1].append(_GAP)
            else:
                lines.append(_label(""))
        lines[-1].append(fill, style=style)
        lines[-1].append(said)
    return lines


def _busy(snapshot: Snapshot, room: int, glyphs: Glyphs) -> Text:
    """The sparkline of the busy share, with the newest column on the right."""
    width = max(1, room - _RIGHT)
    columns = snapshot.columns[-width:]
    line = _label("busy")
    line.append(sparkline(columns, glyphs).rjust(width), style="green")
    line.append(f"  {percent(snapshot.utilization)} so far")
    if columns:
        line.append(f" ({clock_time(len(columns) * COLUMN_SECONDS)} shown)", style="dim")
    return line


def _idle(snapshot: Snapshot, glyphs: Glyphs) -> Text:
    line = _label("idle")
    causes = [f"{percent(share)} {CAUSES[part]}" for part, share in snapshot.idle[:_CAUSES_SHOWN]]
    line.append(glyphs.dot.join(causes) if causes else "nothing so far")
    return line


def _speed(snapshot: Snapshot, room: int, glyphs: Glyphs) -> Text:
    said = [f"{thousands(snapshot.tokens_per_s)} tokens/s", f"policy v{snapshot.version}"]
    if snapshot.latest is not None:
        latest = snapshot.latest
        said.append(f"staleness {latest.staleness_mean:.2f}, max {latest.staleness_max}")
    if snapshot.efficiency is not None:
        said.append(f"efficiency {percent(snapshot.efficiency)}")
    line = _label("speed")
    line.append(glyphs.dot.join(said))
    forecast = snapshot.forecast
    if forecast is not None and forecast.efficiency is not None:
        expected = percent(forecast.efficiency_forecast)
        compared = f"{glyphs.dot}forecast {expected}, outcome {percent(forecast.efficiency)}"
        if len(line) + len(compared) <= room + _LABEL:
            line.append(compared)
    latest = snapshot.latest
    if latest and latest.length_distance is not None and latest.iid_length_distance is not None:
        off, usual = latest.length_distance, latest.iid_length_distance
        lengths = f"{glyphs.dot}lengths {off:.2f} off the law (at random {usual:.2f})"
        if len(line) + len(lengths) <= room + _LABEL:
            line.append(lengths)
    meant = " (T_bound / time; no schedule beats 100%)"
    if snapshot.efficiency is not None and len(line) + len(meant) <= room + _LABEL:
        line.append(meant, style="dim")
    return line


def _faults(snapshot: Snapshot, glyphs: Glyphs) -> list[Text]:
    """The number of faults of each kind, and the latest one."""
    faults = snapshot.faults
    line = _label("faults")
    if not any_fault(faults):
        line.append("none", style="dim")
        return [line]
    out = sum(engine.state == "lost" for engine in snapshot.engines)
    style = "red" if out else "yellow"
    said: list[str] = []
    if faults.dropped:
        reasons = sorted(faults.dropped.items(), key=lambda row: -row[1])
        why = ", ".join(f"{count:,} {reason}" for reason, count in reasons)
        said.append(f"{plural(sum(faults.dropped.values()), 'rollout')} dropped ({why})")
    if faults.engines_lost:
        said.append(f"{plural(faults.engines_lost, 'engine')} lost, {out} still out")
    if faults.retries:
        said.append("1 retry" if faults.retries == 1 else f"{faults.retries:,} retries")
    latest = f"{clock_time(faults.ago)} ago: {faults.latest}"
    if not said:
        line.append(latest, style=style)
        return [line]
    line.append(glyphs.dot.join(said), style=style)
    if not faults.latest:
        return [line]
    return [line, _label("").append(latest, style="dim")]


def any_fault(faults: Faults) -> bool:
    """Whether there is a fault to show."""
    return bool(faults.dropped or faults.engines_lost or faults.retries or faults.latest)
