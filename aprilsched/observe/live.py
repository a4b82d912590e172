"""The live view: tables of a run on a terminal, which change while it goes on.

A run waits for the view only while the tables are filled, under the lock of the figures. A chunk of
tokens costs nothing here, because the figures count it. If the output is not a terminal with a
movable cursor, there is one line for each batch, and the last frame at the end.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from aprilsched.kernel.core.messages.facts import BatchDelivered, Fact
from aprilsched.kernel.core.state.ledger import Counters, Ledger
from aprilsched.kernel.shell.listener import Listener, TokenChunks
from aprilsched.kernel.values.extras import extra
from aprilsched.observe.figures.engine_time import BUSY, PART_LABELS, EngineUsage, Part
from aprilsched.observe.figures.faults import Faults
from aprilsched.observe.figures.figures import Figures, figures_in
from aprilsched.observe.figures.live_figures import LiveFigures

with extra("cli"):
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

log = logging.getLogger("aprilsched")

_FRAMES_PER_S = 1.0
_SAMPLE_INTERVAL_S = 5.0
_RATE_INTERVAL_S = 60.0
"""Time over which an engine's rates are averaged: longer than most batches, so that the rates do
not jump at every pause."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What is known of a run before it starts.

    Attributes:
        title: the first words of the view.
        where: location of the run, such as its folder.
        batches: number of batches that the run will deliver; 0 if unknown, or for a gateway.
        batch_units: number of groups, or of single samples, per batch: ``batch_units`` of the
            scheduler's configuration.
        modelled: whether the run uses a virtual clock.
    """

    title: str
    batches: int
    batch_units: int
    where: str = ""
    modelled: bool = False


class LiveView:
    """Shows a run on `console` within ``with view:``. The last frame stays.

    Args:
        facts: what is known of the run before it starts.
        figures: the figures of the run, an earlier listener.

    Attributes:
        note: an additional text, for example that the run has been silent for some time.
    """

    def __init__(self, console: Console, facts: RunFacts, figures: LiveFigures) -> None:
        self.note = ""
        self._console = console
        self.restart(facts, figures)
        self._live = Live(
            console=console, get_renderable=self._drawn, refresh_per_second=_FRAMES_PER_S
        )

    def restart(self, facts: RunFacts, figures: LiveFigures) -> None:
        """Start over: the current :attr:`listeners` receive the facts of the run from its start."""
        self.facts = facts
        self._figures = figures
        self._faults = Faults()
        self._rates = _Rates()
        self._prior_batches = 0

    def start(self, counters: Counters, ledger: Ledger, *, batches: int) -> None:
        """Use the scheduler's counters. `batches` is the number of batches that the prior run
        delivered."""
        self._figures.count_with(counters, ledger)
        self._prior_batches = batches

    @property
    def listeners(self) -> Sequence[Listener]:
        """The listeners of the view, in the order in which they must be called."""
        return (self._figures, self)

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        with self._figures.lock:
            self._faults.on_facts(facts, now)
            self._rates.sample(now, self._figures)
            if self._console.is_interactive or not self._live.is_started:
                return
            if not any(isinstance(fact, BatchDelivered) for fact in facts):
                return
            text = f"{clock_time(self._elapsed(now))}  batch {self._batches:,}: {self._speed()}"
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        if now >= self._rates.next_at:
            with self._figures.lock:
                self._rates.sample(now, self._figures)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        if not self._console.is_interactive:
            self._console.line()

    def _drawn(self) -> RenderableType:
        try:
            return self.frame()
        except Exception:
            # An error of the view must not end the run.
            log.exception("the live view could not be drawn; the run continues")
            return Text()

    def frame(self) -> RenderableType:
        """Return the current frame."""
        with self._figures.lock:
            now = self._figures.advance()
            self._rates.sample(now, self._figures)
            tables: list[RenderableType] = [self._run(now)]
            if self._figures.state.engines:
                tables += [Text(), self._engines(wide=self._console.width >= _NARROW)]
            return Group(*tables)

    @property
    def _batches(self) -> int:
        return max(self._prior_batches, self._figures.state.batches)

    def _elapsed(self, now: float) -> float:
        opened_at = self._figures.state.opened_at
        return 0.0 if opened_at is None else now - opened_at

    def _run(self, now: float) -> Table:
        facts = self.facts
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(ratio=1, overflow="fold")
        title = Text(self._times(now), overflow="fold")
        if self.note:
            title.append(f"  {self.note}", style="bold yellow")
        title.append(f"  {facts.where}", style="dim")
        table.add_row(Text(facts.title, style="bold cyan"), title)
        if facts.batches:
            state = self._figures.state
            ready, noun = min(state.units_ready, facts.batch_units), f"{state.delivers} ready"
            table.add_row("batches", _bar(self._batches, facts.batches, "delivered"))
            table.add_row("this batch", _bar(ready, facts.batch_units, noun))
        elif self._batches:
            table.add_row("batches", f"{self._batches:,} delivered")
        found = phases(self._figures)
        texts = "; ".join(f"{count:,} {phase}" for phase, count in found.items())
        total = plural(sum(found.values()), "rollout")
        table.add_row("in flight", f"{total}: {texts}" if texts else total)
        table.add_row("engines", self._time_of_engines())
        table.add_row("speed", self._speed())
        table.add_row("faults", self._fault_texts(now))
        return table

    def _times(self, now: float) -> str:
        text = f"{clock_time(self._elapsed(now))} elapsed"
        recent, remaining = self._figures.recent, self.facts.batches - self._batches
        if recent and remaining > 0 and not self.note:
            mean = sum(each.step_s for each in recent) / len(recent)
            left = mean * remaining - min(mean, now - self._figures.delivered_at)
            text += f", about {clock_time(left)} left"
        return f"{text} (modelled)" if self.facts.modelled else text

    def _time_of_engines(self) -> str:
        """Return the states of the engines, and the largest parts of their time so far."""
        state = self._figures.state
        states = Counter(engine.state for engine in state.engines.values())
        counted = [f"{count} {name}" for name, count in states.most_common()]
        seconds = state.seconds()
        wall = sum(seconds.values()) or 1.0
        busy = sum(seconds[part] for part in BUSY)
        idle: list[tuple[float, Part]] = [
            (spent, part) for part, spent in seconds.items() if spent and part not in BUSY
        ]
        shares = [f"{percent(busy / wall)} busy"] + [
            f"{percent(spent / wall)} {PART_LABELS[part]}"
            for spent, part in sorted(idle, reverse=True)[:_MAX_CAUSES]
        ]
        times = f"time so far: {', '.join(shares)}"
        return f"{', '.join(counted)}; {times}" if counted else times

    def _tokens_per_s(self) -> float:
        return sum(self._rates.of(each)[0] for each in self._figures.state.engines.values())

    def _speed(self) -> str:
        state, recent = self._figures.state, self._figures.recent
        version = max([state.version, *(each.version or 0 for each in state.engines.values())])
        texts = [f"{short_number(self._tokens_per_s())} tokens/s", f"policy v{version}"]
        return ", ".join(texts + (figure_texts(Figures.over(recent)) if recent else []))

    def _fault_texts(self, now: float) -> Text:
        figures, texts = self._figures, list[str]()
        engines = figures.state.engines.values()
        # The scheduler's ledger has no lock, so it is copied in one step.
        if dropped := dict(figures.ledger.rollouts):
            reasons = sorted(dropped.items(), key=lambda row: -row[1])
            each = ", ".join(f"{count:,} {reason}" for reason, count in reasons)
            texts.append(f"{plural(sum(dropped.values()), 'rollout')} dropped ({each})")
        lost = sum(engine.state == "lost" for engine in engines)
        if losses := sum(engine.losses for engine in engines):
            texts.append(f"{plural(losses, 'engine')} lost, {lost} still out")
        if retries := figures.counters.retries:
            texts.append("1 retry" if retries == 1 else f"{retries:,} retries")
        if (fault := self._faults.latest) is not None:
            texts.append(f"{clock_time(max(0.0, now - fault.time))} ago: {fault.text}")
        if not texts:
            return Text("none", style="dim")
        return Text("; ".join(texts), style="red" if lost else "yellow", overflow="fold")

    def _engines(self, *, wide: bool) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold dim")
        table.add_column("engine", overflow="fold")
        table.add_column("state", no_wrap=True)
        for heading in ("running", "KV", "tokens/s"):
            table.add_column(heading, justify="right", no_wrap=True)
        if wide:
            table.add_column("policy", justify="right", no_wrap=True)
            table.add_column("busy (1 min)", width=14)
        table.add_column("" if wide else "busy", justify="right", no_wrap=True)
        engines = list(self._figures.state.engines.values())
        rates = {engine.name: self._rates.of(engine) for engine in engines}
        ranked = sorted(engines, key=lambda each: (each.state != "lost", rates[each.name][1]))
        shown = {engine.name for engine in ranked[:_MAX_ROWS]}
        for engine in (engine for engine in engines if engine.name in shown):
            table.add_row(*_cells(engine, *rates[engine.name], wide=wide))
        if len(engines) > len(shown):
            table.add_row(f"and {len(engines) - len(shown)} more, which are busier", style="dim")
        return table


class _Rates:
    """The rates of the engines over the last minute.

    Attributes:
        next_at: time of the next sample.
    """

    def __init__(self) -> None:
        self.next_at = 0.0
        self._samples: deque[tuple[float, dict[str, tuple[float, float, int]]]] = deque()
        """Busy seconds, all seconds and tokens since the start, by engine, with the time of the
        sample. The oldest sample may be older than a minute."""

    def sample(self, now: float, figures: LiveFigures) -> None:
        """Take a sample if one is due; the lock of `figures` must be held."""
        if now < self.next_at:
            return
        self.next_at = now + _SAMPLE_INTERVAL_S
        figures.state.advance(max(now, figures.state.now))
        sums = {
            name: (engine.busy, engine.wall, engine.tokens)
            for name, engine in figures.state.engines.items()
        }
        self._samples.append((now, sums))
        while len(self._samples) > 1 and self._samples[1][0] <= now - _RATE_INTERVAL_S:
            self._samples.popleft()

    def of(self, engine: EngineUsage) -> tuple[float, float]:
        """Return tokens per second and busy share of an engine."""
        sums = self._samples[0][1] if self._samples else {}
        busy, wall, tokens = sums.get(engine.name, (0.0, 0.0, 0))
        spent = engine.wall - wall
        if spent <= 0:
            return 0.0, 0.0
        return (engine.tokens - tokens) / spent, min(1.0, max(0.0, (engine.busy - busy) / spent))


def phases(figures: LiveFigures) -> dict[str, int]:
    """Return the number of rollouts in flight by phase, without phases that have none.

    A carried rollout was launched for an earlier batch. A paused one is on an engine that does not
    generate. One without an engine is held back by the scheduler if an engine has room for it. A
    complete one waits for its group or siblings, its batch or the trainer. The lock of `figures`
    must be held.
    """
    state = figures.state
    generating = [each for each in state.engines.values() if each.state == "generating"]
    room = any(
        each.in_flight < (each.info.able.max_running_requests or math.inf) for each in generating
    )
    parts = Counter(clock.part for clock in figures.rollouts.values())
    decoding = [state.rollouts[each] for each in state.decoding() if each in state.rollouts]
    carried = sum(rollout.carried for rollout in decoding)
    counts: dict[str, int] = {
        "decoding": sum(engine.decode for engine in generating) - carried,
        "decoding, carried": carried,
        "prefilling": sum(engine.prefill for engine in generating),
        "re-prefilling": sum(engine.re_prefill for engine in generating),
        "paused": parts["paused"],
        "held back" if room else "waiting for an engine": parts["queue"],
        "using tools": parts["tools"],
        "scoring": parts["score"],
        "waiting for an agent": parts["agent"],
        "complete": parts["batch"],
    }
    return {phase: count for phase, count in counts.items() if count > 0}


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


def _bar(done: int, total: int, noun: str) -> Table:
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, min_width=24)
    row.add_row(
        ProgressBar(total=total, completed=done, complete_style="cyan", finished_style="cyan"),
        f"{done:,} of {total:,} {noun}",
    )
    return row


def _cells(
    engine: EngineUsage, tokens_per_s: float, busy: float, *, wide: bool
) -> list[RenderableType]:
    """Return the cells of an engine's row. Requests beyond ``max_running`` wait inside the engine,
    and are shown after a plus sign."""
    limit, pool = engine.info.able.max_running_requests, engine.info.able.kv_tokens
    running = engine.in_flight if limit is None else min(engine.in_flight, limit)
    queued = f"+{engine.in_flight - running}" if engine.in_flight > running else ""
    used = engine.context_tokens
    version = "mixed" if engine.version is None else f"v{engine.version}"
    bar = ProgressBar(total=1.0, completed=busy, complete_style="green")
    return [
        engine.name.removeprefix("http://").removeprefix("https://"),
        Text(engine.state, style=_STATE_STYLES[engine.state]),
        f"{running}{queued}{'' if limit is None else f'/{limit}'}",
        percent(used / pool) if pool else short_number(used),
        short_number(tokens_per_s),
        *([version, bar] if wide else []),
        percent(busy),
    ]


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
