"""Turns a snapshot into text for a terminal, and draws it there. The functions are pure.

Invariants: no line is wider than requested, and there are no more lines than requested. With little
room, the least important parts are left out first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from aprilsched.core.messages.facts import BatchDelivered, Fact
from aprilsched.core.state.ledger import Counters, Ledger
from aprilsched.telemetry.base import Listener, TokenChunks
from aprilsched.telemetry.engine_time import PART_LABELS
from aprilsched.telemetry.figures import Figures, Measured, figures_in
from aprilsched.telemetry.live.live_model import (
    COLUMN_SECONDS,
    EngineRow,
    Faults,
    LiveModel,
    Phase,
    RunFacts,
    Snapshot,
)
from aprilsched.telemetry.live_figures import LiveFigures

# Short forms of names and figures for the live view.

CAUSES = {**PART_LABELS, "re_prefill": "re-prefill", "tail": "tail of the batch"}
"""Names of the parts, shorter for the two whose names would not fit into 80 columns with others."""

_MINUTE, _HOUR = 60, 3600


def clock_time(seconds: float) -> str:
    """``m:ss`` or ``h:mm:ss``."""
    whole = int(seconds)
    minutes, rest = divmod(whole, _MINUTE)
    if whole < _HOUR:
        return f"{minutes}:{rest:02}"
    return f"{whole // _HOUR}:{minutes % _MINUTE:02}:{rest:02}"


def percent(share: float) -> str:
    """A percentage without decimals, except for small ones that would be 0 %."""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def thousands(value: float) -> str:
    """At most four digits, with k or M for larger numbers."""
    if value < 9_999.5:
        return f"{value:,.0f}"
    return f"{value / 1e3:,.0f}k" if value < 999_500 else f"{value / 1e6:.1f}M"


def plural(count: int, noun: str) -> str:
    """``1 engine``, ``2 engines``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def cut(name: str, width: int) -> str:
    """The end of a name, because the end distinguishes it from its neighbours."""
    if len(name) <= width:
        return name
    return "" if width < 2 else "~" + name[len(name) - width + 1 :]


def host(engine: str) -> str:
    """An engine's name without the parts that all URLs have in common."""
    return engine.removeprefix("http://").removeprefix("https://")


# --- bars ----------------------------------------------------------------------------------------

# Draws bars and sparklines with characters.
#
# Invariant: the result is exactly as wide as requested, and its parts can be told apart without
# colours.

_Key = TypeVar("_Key")


_FULL, _EMPTY = "━", "─"
"""The two parts of a bar."""
_HEIGHTS = " ▁▂▃▄▅▆▇█"
"""Columns of a sparkline, from empty to full."""
_FILLS = "█▓▒░▚▞·▪▫"
"""The parts of a divided bar, in order."""
_DOT = " · "
"""Separates the figures of a line."""


def bar(share: float, width: int) -> tuple[str, str]:
    """The full and the empty part of a bar. A share above 1 is drawn as 1."""
    filled = round(min(1.0, max(0.0, share)) * width)
    return _FULL * filled, _EMPTY * (width - filled)


def divided(counts: Mapping[_Key, int], width: int) -> dict[_Key, int]:
    """Number of cells for each count, in proportion to the counts; together they are `width`. As
    long as there is room, each count that is not 0 has at least one cell."""
    present = {key: count for key, count in counts.items() if count > 0}
    if not present or width < len(present):
        return {}
    total = sum(present.values())
    exact = {key: count / total * width for key, count in present.items()}
    cells = {key: max(1, int(share)) for key, share in exact.items()}
    while (off := width - sum(cells.values())) != 0:
        # Add a cell to the part that lacks the most, or take one from the part that has the largest
        # surplus and more than one cell.
        able = [key for key in cells if off > 0 or cells[key] > 1]
        key = max(able, key=lambda key: (exact[key] - cells[key]) * off)
        cells[key] += 1 if off > 0 else -1
    return cells


def sparkline(shares: Sequence[float]) -> str:
    """A column for each share, from 0 to 1. Any share above 0 can be seen."""
    steps = len(_HEIGHTS) - 1
    return "".join(_HEIGHTS[min(steps, max(share > 0, round(share * steps)))] for share in shares)


# --- engine rows ---------------------------------------------------------------------------------

# Turns engines into lines: all of them if they fit, otherwise the most interesting ones.

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


def engine_lines(rows: Sequence[EngineRow], *, width: int, height: int) -> list[Text]:
    """At most `height` lines with a heading. If there are more engines, the last line counts the
    others."""
    if height < 2 or not rows:
        return []
    shown = chosen(rows, height - 1)
    if len(shown) < len(rows):
        shown = chosen(rows, height - 2)
    columns = _columns(rows, width)
    lines = [_head(columns), *(_line(row, columns) for row in shown)]
    if len(shown) < len(rows):
        lines.append(_others([row for row in rows if row not in shown]))
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


def _line(row: EngineRow, columns: _Columns) -> Text:
    most = "" if row.max_running is None else f"/{row.max_running}"
    queued = f"+{row.queued}" if row.queued else ""
    version = "mixed" if row.version is None else f"v{row.version}"
    line = Text(no_wrap=True)
    line.append(f"{cut(host(row.name), columns.name):<{columns.name}} ")
    line.append(f"{row.state:<{_STATE}}", style=_STYLES[row.state])
    line.append(f"{row.running}{queued}{most}".rjust(_RUNNING) + " ")
    _bar(line, row.kv_share, columns.kv, "blue")
    if row.kv_share is None:
        line.append(f"{thousands(row.kv_tokens):>{_PERCENT}}")
    else:
        line.append(f"{percent(row.kv_share):>{_PERCENT}}")
    line.append(f"{thousands(row.tokens_per_s):>{_RATE + 1}}{version:>{_VERSION}} ")
    _bar(line, row.busy, columns.busy, "green")
    line.append(f"{percent(row.busy):>{_PERCENT - 1}}")
    return line


def _bar(line: Text, share: float | None, width: int, style: str) -> None:
    if share is None:
        line.append(" " * width)
        return
    full, empty = bar(share, width)
    line.append(full, style=style)
    line.append(empty, style="dim")


def _others(rows: Sequence[EngineRow]) -> Text:
    states = Counter(row.state for row in rows)
    said = [f"{count} {state}" for state, count in states.most_common()]
    speed = thousands(sum(row.tokens_per_s for row in rows))
    busy = percent(sum(row.busy for row in rows) / len(rows))
    what = [", ".join(said), f"{speed} tokens/s", f"{busy} busy"]
    return Text(f"and {len(rows)} more: {_DOT.join(what)}", style="dim", no_wrap=True)


# --- lines ---------------------------------------------------------------------------------------

# Makes the lines of the live view from a snapshot. The functions are pure.

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
    "no agent": ("bright_white", "waiting for an agent"),
}
"""Style and name of each phase, in the order of :data:`_FILLS`."""


def all_lines(snapshot: Snapshot, width: int) -> dict[str, list[Text]]:
    """All lines without those of the engines, by name."""
    facts = snapshot.facts
    room = width - _LABEL
    lines = {
        "title": [_title(snapshot, width)],
        "batches": [_counted("batches", snapshot.batches, facts.batches, "delivered", room)],
        "groups": [
            _counted(
                "this batch",
                min(snapshot.ready, facts.batch_groups),
                facts.batch_groups,
                "groups ready",
                room,
            )
        ],
        "in flight": [_in_flight(snapshot, room)],
        "legend": _legend(snapshot, room),
        "busy": [_busy(snapshot, room)],
        "idle": [_idle(snapshot)],
        "speed": [_speed(snapshot, room)],
        "faults": _faults(snapshot),
    }
    if not facts.batches:
        del lines["batches"], lines["groups"]
    return lines


def _label(name: str) -> Text:
    line = Text(no_wrap=True)
    line.append(f"{name:<{_LABEL}}", style="bold")
    return line


def _title(snapshot: Snapshot, width: int) -> Text:
    """The run and a note on the left, and its time on the right."""
    facts, note = snapshot.facts, snapshot.note
    when = f"{clock_time(snapshot.elapsed)} elapsed"
    if snapshot.left and not note:
        when += f"{_DOT}about {clock_time(snapshot.left)} left"
    if facts.modelled:
        when += " (modelled)"
    noted = f"{_DOT}{note}" if note else ""
    room = max(0, width - len(when) - 2)
    where = cut(facts.where, max(0, room - len(facts.title) - 1 - len(noted)))
    line = Text(f"{facts.title} {where}".rstrip() + noted, no_wrap=True)
    line.stylize("bold yellow" if note else "bold cyan")
    line.truncate(room, overflow="ellipsis", pad=True)
    line.append(f"  {when}", style="dim")
    return line


def _counted(name: str, done: int, of: int, what: str, room: int) -> Text:
    said = f"  {done:,} of {of:,} {what}"
    full, empty = bar(done / of if of else 1.0, max(0, room - _RIGHT))
    line = _label(name)
    line.append(full, style="cyan")
    line.append(empty, style="dim")
    line.append(said)
    return line


def _in_flight(snapshot: Snapshot, room: int) -> Text:
    line = _label("in flight")
    width = max(0, room - _RIGHT)
    cells = divided(snapshot.in_flight, width)
    for fill, (phase, (style, _)) in zip(_FILLS, _PHASES.items(), strict=True):
        line.append(fill * cells.get(phase, 0), style=style)
    line.append(" " * (width - sum(cells.values())))
    line.append(f"  {plural(sum(snapshot.in_flight.values()), 'rollout')}")
    return line


def _legend(snapshot: Snapshot, room: int) -> list[Text]:
    """The legend of the bar, on as many lines as it needs."""
    lines = [_label("")]
    for fill, (phase, (style, name)) in zip(_FILLS, _PHASES.items(), strict=True):
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


def _busy(snapshot: Snapshot, room: int) -> Text:
    """The sparkline of the busy share, with the newest column on the right."""
    width = max(1, room - _RIGHT)
    columns = snapshot.columns[-width:]
    line = _label("busy")
    line.append(sparkline(columns).rjust(width), style="green")
    line.append(f"  {percent(snapshot.utilization)} so far")
    if columns:
        line.append(f" ({clock_time(len(columns) * COLUMN_SECONDS)} shown)", style="dim")
    return line


def _idle(snapshot: Snapshot) -> Text:
    line = _label("idle")
    causes = [f"{percent(share)} {CAUSES[part]}" for part, share in snapshot.idle[:_CAUSES_SHOWN]]
    line.append(_DOT.join(causes) if causes else "nothing so far")
    return line


def figure_texts(figures: Figures) -> list[str]:
    """Each figure that has a name in the live view, with its value if this is known."""
    texts: list[str] = []
    for name, figure in figures_in(Figures).items():
        value = getattr(figures, name)
        if figure.live and value is not None:
            number = f"{value:.2f}" if isinstance(value, float) else f"{value:,}"
            texts.append(f"{figure.live} {percent(value) if figure.unit == 'share' else number}")
    forecast = figures.forecast
    if forecast is not None and forecast.efficiency is not None:
        expected, outcome = percent(forecast.efficiency_forecast), percent(forecast.efficiency)
        texts.append(f"forecast {expected}, outcome {outcome}")
    return texts


def _speed(snapshot: Snapshot, room: int) -> Text:
    line = _label("speed")
    line.append(f"{thousands(snapshot.tokens_per_s)} tokens/s{_DOT}policy v{snapshot.version}")
    recent = snapshot.recent
    said = [] if recent is None else [f"{_DOT}{text}" for text in figure_texts(recent)]
    if recent is not None and recent.efficiency is not None:
        said.append(" (efficiency is T_bound / time; no schedule beats 100%)")
    for text in said:
        if len(line) + len(text) > room + _LABEL:
            break
        line.append(text)
    return line


def _faults(snapshot: Snapshot) -> list[Text]:
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
    if faults.regenerated:
        said.append(f"{faults.regenerated:,} generated again")
    latest = f"{clock_time(faults.ago)} ago: {faults.latest}"
    if not said:
        line.append(latest, style=style)
        return [line]
    line.append(_DOT.join(said), style=style)
    if not faults.latest:
        return [line]
    return [line, _label("").append(latest, style="dim")]


def any_fault(faults: Faults) -> bool:
    """Whether there is a fault to show."""
    return bool(faults.dropped or faults.engines_lost or faults.retries or faults.latest)


# --- view ----------------------------------------------------------------------------------------

_SMALL = 4
"""Smallest number of lines of a frame; with fewer lines, the short form is shown."""
_SPARE = ("faults", "groups", "speed", "idle", "legend")
"""Lines that are left out to make room for engines, in this order."""


def frame(snapshot: Snapshot, *, width: int, height: int) -> Text:
    """The frame for a terminal of `width` columns and `height` lines."""
    if height < _SMALL:
        return one_line(snapshot, width=width)
    lines = all_lines(snapshot, width)
    wanted = min(len(snapshot.engines) + 1, _SMALL)
    for name in _SPARE:
        if height - sum(map(len, lines.values())) >= wanted or not snapshot.engines:
            break
        if name == "faults" and any_fault(snapshot.faults):
            continue
        lines.pop(name, None)
    shown = [line for some in lines.values() for line in some][:height]
    if snapshot.engines and height - len(shown) > len(snapshot.engines) + 1:
        shown.append(Text())
    shown += engine_lines(snapshot.engines, width=width, height=height - len(shown))
    for line in shown:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(shown)


def one_line(snapshot: Snapshot, *, width: int) -> Text:
    """The short form of the view: one line, of characters that every terminal has."""
    facts, recent = snapshot.facts, snapshot.recent
    total = sum(snapshot.in_flight.values())
    stale = 0.0 if recent is None else recent.staleness_mean or 0.0
    line = (
        f"{facts.title} {min(snapshot.batches + 1, facts.batches)}/{facts.batches}"
        f" | groups {min(snapshot.ready, facts.batch_groups)}/{facts.batch_groups}"
        f" | {total} in flight ({snapshot.carried} carried)"
        f" | {thousands(snapshot.tokens_per_s)} tokens/s"
        f" | v{snapshot.version} | stale {stale:.2f}"
    )
    return Text(line if len(line) <= width else f"{line[: width - 1]}~", no_wrap=True)


# --- on a terminal --------------------------------------------------------------------------------

# Draws the live view on a terminal, in a thread of its own.
#
# Invariants: a run waits for the drawing only while a snapshot is taken. Drawing takes at most a
# fiftieth of the time, however slow the terminal is. When the block ends, in whatever way, nothing
# of the view is left on the terminal.

log = logging.getLogger("aprilsched")

_REFRESH_SECONDS = 1.0
"""Seconds between two frames. A frame takes 2 ms between other work of the process. With four
frames a second, it would cost a run with 100,000 tokens/s as much as all other telemetry."""
_REST = 20
"""Largest number of lines without those of the engines."""
_SHARE = 50
"""The next frame is drawn after this many times the time that the last one took."""


def can_draw(console: Console) -> bool:
    """Whether the output is a terminal whose cursor can be moved."""
    return console.is_terminal and not console.is_dumb_terminal


class _AsItIs:
    """A text whose lines are known to fit. Searching for places to break them would be a third of
    the time of drawing."""

    def __init__(self, text: Text) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return self._text.render(console, end="\n")


class LiveView:
    """Shows a run on `console`. Use it as ``with view:`` around the run.

    Args:
        figures: the figures of the run, a listener before this one.
        compact: whether to show one line only, which is all that a terminal gets whose encoding
            lacks the characters of bars.
    """

    def __init__(
        self, console: Console, facts: RunFacts, figures: LiveFigures, *, compact: bool = False
    ) -> None:
        self.model = LiveModel(facts, figures)
        self._console = console
        self._figures = figures
        self._compact = compact
        self._live: Live | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def listeners(self) -> Sequence[Listener]:
        """The listeners of the view, in the order in which they must be called."""
        return (self._figures, self.model)

    def begin(self, counters: Counters, ledger: Ledger, *, batches: int) -> None:
        """Use the scheduler's own counters. `batches` is the number of batches that the prior run
        has delivered."""
        self._figures.count_with(counters, ledger)
        self.model.skip(batches)

    def restart(self, facts: RunFacts, figures: LiveFigures) -> None:
        """Begin again: the facts of the run are given to the present :attr:`listeners` from the
        start."""
        self._figures = figures
        self.model = LiveModel(facts, figures)

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            # Ctrl-C may arrive here too. A drawing thread that is not stopped would keep the
            # process alive.
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _begin(self) -> None:
        self._live = Live(
            _AsItIs(self.frame()), console=self._console, auto_refresh=False, transient=True
        )
        self._live.start(refresh=True)
        self._thread = threading.Thread(
            target=self._draw, args=(self._live,), name="live view", daemon=True
        )
        self._thread.start()

    def _end(self) -> None:
        self._ended.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        if self._live is not None:
            self._live.stop()

    def frame(self, *, whole: bool = False) -> Text:
        """The present frame; `whole` ignores the height of the terminal."""
        snapshot = self.model.snapshot()
        width, height = self._console.size
        height = len(snapshot.engines) + _REST if whole else height
        if self._compact or self._console.options.ascii_only:
            return one_line(snapshot, width=width)
        # The cursor is on the line below the frame, so a frame as high as the terminal would scroll
        # it.
        return frame(snapshot, width=width, height=height - 1)

    def _draw(self, live: Live) -> None:
        pause = _REFRESH_SECONDS
        while not self._ended.wait(pause):
            began = time.thread_time()
            try:
                live.update(_AsItIs(self.frame()), refresh=True)
            except Exception:
                log.exception("the live view failed and is drawn no more, the run goes on")
                return
            pause = max(_REFRESH_SECONDS, _SHARE * (time.thread_time() - began))


# --- plain ---------------------------------------------------------------------------------------

# Prints one line for each batch, where the live view cannot be drawn.


class PlainLines:
    """Prints the lines of a run to `console`.

    Args:
        figures: the figures of the run, a listener before this one.

    Attributes:
        said: number of batches whose lines were printed.
    """

    def __init__(
        self, console: Console, facts: RunFacts, figures: LiveFigures, *, said: int = 0
    ) -> None:
        self._console = console
        self._facts = facts
        self._figures = figures
        self.said = said

    @property
    def listeners(self) -> Sequence[Listener]:
        """The listeners, in the order in which they must be called."""
        return (self._figures, self)

    def begin(self, counters: Counters, ledger: Ledger, *, batches: int) -> None:
        """Note that `batches` batches were delivered by the prior run."""
        self._figures.count_with(counters, ledger)
        self.said = batches

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        measured = self._figures.batch
        if measured is None:
            return
        if any(isinstance(fact, BatchDelivered) and not fact.again for fact in facts):
            self._delivered(measured)

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        pass

    def _delivered(self, batch: Measured) -> None:
        # A log that is read again from its start has batches whose lines were printed before.
        if batch.index < self.said:
            return
        self.said = batch.index + 1
        line = (
            f"{self._facts.title}  batch {batch.index + 1}/{self._facts.batches}"
            f"  {batch.step_s:.1f} s  {batch.sums.sampled:,} tokens"
            f"  {len(self._figures.state.growing)} carried  version {batch.version}; lately "
            # The efficiency of a single batch says little, because carried rollouts took time
            # before it.
            + ", ".join(figure_texts(Figures.over(self._figures.recent)))
        )
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)
