"""Shows a snapshot of a run as tables, and keeps them up to date on a terminal.

A run waits for the view only while a snapshot is taken. If the output is not a terminal with a
movable cursor, there is one line for each batch, and the last frame at the end.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from aprilsched.kernel.core.messages.facts import BatchDelivered, Fact
from aprilsched.kernel.core.state.ledger import Counters, Ledger
from aprilsched.kernel.shell.listener import Listener
from aprilsched.observe.figures.engine_time import PART_LABELS
from aprilsched.observe.figures.figures import Figures, figures_in
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.live.live_model import EngineRow, LiveModel, RunFacts, Snapshot

log = logging.getLogger("aprilsched")

_FRAMES_PER_S = 1.0
_MAX_ROWS = 24
"""Largest number of engine rows. Lost engines and the least busy ones come first."""
_MAX_CAUSES = 3
_NARROW = 80
"""Columns of a terminal below which engines have no bars and no policy version."""
_STATE_STYLES = {
    "generating": "green",
    "paused": "magenta",
    "refitting": "yellow",
    "asleep": "blue",
    "lost": "bold red",
}


class LiveView:
    """Shows a run on `console` within ``with view:``. The last frame stays.

    Args:
        figures: the figures of the run, an earlier listener.
        compact: whether to show the progress of the batches only.
    """

    def __init__(
        self, console: Console, facts: RunFacts, figures: LiveFigures, *, compact: bool = False
    ) -> None:
        self.model = LiveModel(facts, figures)
        self._console = console
        self._figures = figures
        self._compact = compact
        self._live = Live(
            console=console, get_renderable=self._drawn, refresh_per_second=_FRAMES_PER_S
        )

    @property
    def listeners(self) -> Sequence[Listener]:
        """The listeners of the view, in the order in which they must be called."""
        return (self._figures, self.model, self)

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        """Print one line for a batch where no frame can be drawn again; see
        :class:`~aprilsched.kernel.shell.listener.Listener`."""
        if self._console.is_interactive or self._compact or not self._live.is_started:
            return
        if any(isinstance(fact, BatchDelivered) for fact in facts):
            snapshot = self.model.snapshot()
            text = f"{clock_time(snapshot.elapsed)}  batch {snapshot.batches:,}: {_speed(snapshot)}"
            self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def start(self, counters: Counters, ledger: Ledger, *, batches: int) -> None:
        """Use the scheduler's counters. `batches` is the number of batches that the prior run
        delivered."""
        self._figures.count_with(counters, ledger)
        self.model.skip(batches)

    def restart(self, facts: RunFacts, figures: LiveFigures) -> None:
        """Start over: the current :attr:`listeners` receive the facts of the run from its start."""
        self._figures = figures
        self.model = LiveModel(facts, figures)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        if not self._console.is_interactive:
            self._console.line()

    def frame(self) -> RenderableType:
        """Return the current frame."""
        snapshot = self.model.snapshot()
        if self._compact:
            return _progress(snapshot)
        return frame(snapshot, width=self._console.width)

    def _drawn(self) -> RenderableType:
        try:
            return self.frame()
        except Exception:
            # An error of the view must not end the run.
            log.exception("the live view could not be drawn; the run continues")
            return Text()


def frame(snapshot: Snapshot, *, width: int) -> RenderableType:
    """Return the tables of a run; `width` is the width of the terminal, in columns."""
    parts: list[RenderableType] = [_run(snapshot)]
    if snapshot.engines:
        parts += [Text(), _engines(snapshot.engines, wide=width >= _NARROW)]
    return Group(*parts)


def _run(snapshot: Snapshot) -> Table:
    facts = snapshot.facts
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    title = Text(_times(snapshot), overflow="fold")
    if snapshot.note:
        title.append(f"  {snapshot.note}", style="bold yellow")
    title.append(f"  {facts.where}", style="dim")
    table.add_row(Text(facts.title, style="bold cyan"), title)
    if facts.batches:
        ready = min(snapshot.ready, facts.batch_groups)
        table.add_row("batches", _bar(snapshot.batches, facts.batches, "delivered"))
        table.add_row("this batch", _bar(ready, facts.batch_groups, "groups ready"))
    table.add_row("in flight", _in_flight(snapshot))
    table.add_row("engines", _time_of_engines(snapshot))
    table.add_row("speed", _speed(snapshot))
    table.add_row("faults", _faults(snapshot))
    return table


def _times(snapshot: Snapshot) -> str:
    text = f"{clock_time(snapshot.elapsed)} elapsed"
    if snapshot.left and not snapshot.note:
        text += f", about {clock_time(snapshot.left)} left"
    return f"{text} (modelled)" if snapshot.facts.modelled else text


def _bar(done: int, total: int, noun: str) -> Table:
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, min_width=24)
    row.add_row(
        ProgressBar(total=total, completed=done, complete_style="cyan", finished_style="cyan"),
        f"{done:,} of {total:,} {noun}",
    )
    return row


def _progress(snapshot: Snapshot) -> Table:
    """Return one line with the progress of a run."""
    facts = snapshot.facts
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True, min_width=10)
    row.add_column(ratio=1)
    speed = f"{short_number(snapshot.tokens_per_s)} tokens/s"
    row.add_row(facts.title, _bar(snapshot.batches, facts.batches, f"batches, {speed}"))
    return row


def _in_flight(snapshot: Snapshot) -> str:
    total = sum(snapshot.in_flight.values())
    phases = "; ".join(f"{count:,} {phase}" for phase, count in snapshot.in_flight.items())
    return plural(total, "rollout") + (f": {phases}" if phases else "")


def _time_of_engines(snapshot: Snapshot) -> str:
    """Return the states of the engines, and the largest parts of their time so far."""
    states = Counter(engine.state for engine in snapshot.engines)
    counted = ", ".join(f"{count} {state}" for state, count in states.most_common())
    causes = [f"{percent(snapshot.utilization)} busy"] + [
        f"{percent(share)} {PART_LABELS[part]}" for part, share in snapshot.idle[:_MAX_CAUSES]
    ]
    return "; ".join(text for text in (counted, "time so far: " + ", ".join(causes)) if text)


def _speed(snapshot: Snapshot) -> str:
    texts = [f"{short_number(snapshot.tokens_per_s)} tokens/s", f"policy v{snapshot.version}"]
    return ", ".join(texts + ([] if snapshot.recent is None else figure_texts(snapshot.recent)))


def figure_texts(figures: Figures) -> list[str]:
    """Return each known figure that has a name in the live view, with its value."""
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


def _faults(snapshot: Snapshot) -> Text:
    texts: list[str] = []
    if snapshot.dropped:
        texts.append(_dropped(snapshot.dropped))
    lost = sum(engine.state == "lost" for engine in snapshot.engines)
    if snapshot.engines_lost:
        texts.append(f"{plural(snapshot.engines_lost, 'engine')} lost, {lost} still out")
    if snapshot.retries:
        texts.append("1 retry" if snapshot.retries == 1 else f"{snapshot.retries:,} retries")
    if snapshot.fault:
        texts.append(f"{clock_time(snapshot.fault_age)} ago: {snapshot.fault}")
    if not texts:
        return Text("none", style="dim")
    return Text("; ".join(texts), style="red" if lost else "yellow", overflow="fold")


def _dropped(dropped: Mapping[str, int]) -> str:
    reasons = sorted(dropped.items(), key=lambda row: -row[1])
    texts = ", ".join(f"{count:,} {reason}" for reason, count in reasons)
    return f"{plural(sum(dropped.values()), 'rollout')} dropped ({texts})"


def _engines(rows: Sequence[EngineRow], *, wide: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold dim")
    table.add_column("engine", overflow="fold")
    table.add_column("state", no_wrap=True)
    for heading in ("running", "KV", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    if wide:
        table.add_column("policy", justify="right", no_wrap=True)
        table.add_column("busy (1 min)", width=14)
    table.add_column("" if wide else "busy", justify="right", no_wrap=True)
    shown = sorted(rows, key=lambda row: (row.state != "lost", row.busy))[:_MAX_ROWS]
    for row in (row for row in rows if row in shown):
        queued = f"+{row.queued}" if row.queued else ""
        limit = "" if row.max_running is None else f"/{row.max_running}"
        kv = percent(row.kv_tokens / row.kv_pool) if row.kv_pool else short_number(row.kv_tokens)
        version = "mixed" if row.version is None else f"v{row.version}"
        bar = ProgressBar(total=1.0, completed=row.busy, complete_style="green")
        table.add_row(
            row.name.removeprefix("http://").removeprefix("https://"),
            Text(row.state, style=_STATE_STYLES[row.state]),
            f"{row.running}{queued}{limit}",
            kv,
            short_number(row.tokens_per_s),
            *([version, bar] if wide else []),
            percent(row.busy),
        )
    if len(rows) > len(shown):
        table.add_row(f"and {len(rows) - len(shown)} more, which are busier", style="dim")
    return table


def clock_time(seconds: float) -> str:
    """Return ``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def percent(share: float) -> str:
    """Return a percentage without decimals; small ones that would be 0 % are "<1%"."""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def short_number(value: float) -> str:
    """Return at most four digits, with k or M for larger numbers."""
    if value < 9_999.5:
        return f"{value:,.0f}"
    return f"{value / 1e3:,.0f}k" if value < 999_500 else f"{value / 1e6:.1f}M"


def plural(count: int, noun: str) -> str:
    """Return ``1 engine`` or ``2 engines``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
