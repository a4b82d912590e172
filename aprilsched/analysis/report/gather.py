"""Computes everything that a report shows from the material of a run folder."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprilsched.analysis.chart_model import AGE_COLOURS
from aprilsched.analysis.lengths_of_run import Launches
from aprilsched.analysis.rebuild import Rebuilding, written_summary
from aprilsched.analysis.report.report_data import (
    MARKED,
    Drop,
    EngineTime,
    EpisodeLedger,
    FaultEvent,
    FaultLedger,
    ForecastLedger,
    GpuLine,
    Headline,
    LengthCurve,
    PartTime,
    ReportData,
    ResponseBar,
    Retry,
    StalenessLedger,
    Timeline,
    TimelineEngine,
)
from aprilsched.analysis.report.words import amount, nats, percent, ran, seconds, signed_percent
from aprilsched.analysis.run import History, Run, bars, readable, tokens_by_class
from aprilsched.analysis.samples import gpu_utilization, read_samples
from aprilsched.analysis.usage import RunUsage, UsageRecorder
from aprilsched.core.lengths.laws import KaplanMeier, kaplan_meier
from aprilsched.core.messages import facts as of
from aprilsched.core.state.ledger import Reason
from aprilsched.telemetry.base import DispatchingListener, Listener
from aprilsched.telemetry.engine_time import BUSY, PART_INDEX, PART_LABELS, PARTS
from aprilsched.telemetry.event_log.reading import replay
from aprilsched.telemetry.figures import AlignmentFigures, Figure, RunSummary, headlines_in
from aprilsched.telemetry.run_folder import CONFIG, EVENTS
from aprilsched.telemetry.sampling.sample_log import STEP_SHARE
from aprilsched.types import NO_VERSION

_BINS = 240
_SHOWN_BATCHES = 5
_SHOWN_ROLLOUTS = 240
_SHOWN_ENGINES = 12
_SHOWN_DELIVERIES = 400
_SHOWN_PAUSES = 200
_CURVE_POINTS = 240
_AGES = len(AGE_COLOURS)
_BATCH_BARS = 60


def report_data(folder: Path) -> ReportData:
    """Compute what a report shows of the run in `folder`.

    Raises:
        RunFolderError: if a file is missing or cannot be understood.
    """
    material = read_material(folder)
    run, usage = material.run, material.usage
    lines, label = gpu_lines(folder)
    return ReportData(
        name=material.name,
        version=version("aprilsched"),
        clock=run.summary.clock,
        interrupted=run.summary.interrupted,
        warnings=_warnings(run),
        ran=ran(run.config, run.summary),
        headlines=headlines(run.summary, usage.utilization),
        time=_time(run, usage),
        timeline=_timeline(run, usage),
        lengths=_lengths(material),
        staleness=_staleness(run),
        bias=run.summary.bias,
        faults=material.faults,
        forecasts=_forecasts(run),
        episodes=_episodes(run.summary),
        alignment=_alignment(run),
        gpu=lines,
        gpu_label=label,
    )


def _forecasts(run: Run) -> ForecastLedger | None:
    found = [(each.index, each.forecast) for each in run.summary.per_batch if each.forecast]
    if not found:
        return None
    shown = found[_thinning(len(found), _SHOWN_DELIVERIES)]
    return ForecastLedger(
        batches=[index for index, _ in shown],
        by_batch=[figures for _, figures in shown],
        steady=run.summary.steady_state.forecast,
    )


def _episodes(summary: RunSummary) -> EpisodeLedger | None:
    if summary.turns_mean is None:
        return None
    rollouts = summary.rollouts
    return EpisodeLedger(
        seconds=summary.rollout_seconds,
        turns=summary.turns_mean,
        branches=summary.branches,
        drift=summary.drift_tokens,
        ends={"delivered": rollouts.delivered, **rollouts.dropped},
    )


def _warnings(run: Run) -> list[str]:
    summary = run.summary
    log = summary.event_log_error
    return [
        text
        for text in (
            "The run was ended by Ctrl-C; the figures are those until then."
            if summary.interrupted
            else "",
            summary.error or "",
            f"The event log is not complete: {log}." if log else "",
            summary.bias.censoring.warning or "",
        )
        if text
    ]


# --- time ----------------------------------------------------------------------------------------


def _time(run: Run, usage: RunUsage) -> EngineTime:
    totals, shares = usage.seconds.sum(axis=0), usage.shares
    # Pieces that are about as long as a batch would show the phase of the batch in which they
    # begin.
    batches = len(run.deliveries)
    bins = _BINS if batches <= MARKED else min(_BINS // 2, max(MARKED, batches // 2))
    return EngineTime(
        engines=len(usage.engines),
        batches=batches,
        wall=usage.wall,
        utilization=usage.utilization,
        parts=[
            PartTime(
                part=part,
                label=PART_LABELS[part],
                seconds=_figure(totals[index]),
                share=shares[part],
                meaning=PARTS[part],
            )
            for part, index in PART_INDEX.items()
        ],
        stops=_rounded(np.linspace(0, usage.wall, bins + 1)[1:]),
        series=_shares(usage.series(bins).sum(axis=1)),
        deliveries=_rounded(_thinned(_times(run), _SHOWN_DELIVERIES)),
        by_engine={
            name: _busy(seconds) for name, seconds in zip(usage.engines, usage.seconds, strict=True)
        },
    )


def _timeline(run: Run, usage: RunUsage) -> Timeline:
    first, last = _window(run)
    times = _times(run)
    start = float(times[first - 1]) if first else 0.0
    end = float(times[last]) if times.size else run.end
    series = usage.series(_BINS, start=start, end=end)
    shown = [i * len(usage.engines) // _SHOWN_ENGINES for i in range(_SHOWN_ENGINES)]
    if len(usage.engines) <= _SHOWN_ENGINES:
        shown = list(range(len(usage.engines)))
    responses = bars(run, end, at_most=_SHOWN_ROLLOUTS, start=start)
    there = {a.rollout_id for a in run.attempts if a.start < end and a.end > start}
    return Timeline(
        start=start,
        end=end,
        first_batch=first,
        last_batch=last,
        stops=_rounded(np.linspace(start, end, _BINS + 1)[1:]),
        engines=[
            TimelineEngine(
                name=usage.engines[index],
                utilization=_busy(series[:, index].sum(axis=0)),
                series=_shares(series[:, index]),
            )
            for index in shown
        ],
        engines_in_all=len(usage.engines),
        deliveries=_rounded(times[first : last + 1]),
        pauses=_pauses(run, start, end),
        responses=[
            ResponseBar(pieces=[(_figure(a), _figure(b), v) for a, b, v in pieces])
            for pieces in responses
        ],
        responses_in_all=len(there),
    )


def _window(run: Run) -> tuple[int, int]:
    """The first and the last batch of the close view: after the burn-in, if there are enough
    batches."""
    batches = len(run.deliveries)
    first = max(0, min(run.summary.steady_state.burn_in, batches - _SHOWN_BATCHES))
    return first, max(0, min(batches, first + _SHOWN_BATCHES) - 1)


def _pauses(run: Run, start: float, end: float) -> list[tuple[float, float]]:
    """Join the times in which some engine was paused, if they meet."""
    met: list[tuple[float, float]] = []
    for pause in sorted(run.pauses, key=lambda pause: pause.start):
        if pause.end < start or pause.start > end:
            continue
        if met and pause.start <= met[-1][1]:
            met[-1] = (met[-1][0], max(met[-1][1], _figure(pause.end)))
        elif len(met) < _SHOWN_PAUSES:
            met.append((_figure(pause.start), _figure(pause.end)))
    return met


def _times(run: Run) -> NDArray[np.float64]:
    return np.array([delivery.time for delivery in run.deliveries], dtype=np.float64)


def _busy(seconds: NDArray[np.float64]) -> float:
    total = float(seconds.sum())
    return float(seconds[[PART_INDEX[part] for part in BUSY]].sum()) / total if total else 0.0


def _shares(seconds: NDArray[np.float64]) -> dict[str, list[float]]:
    """The share of each part that occurs, in each bin, from float64 [bins, parts]."""
    totals = seconds.sum(axis=1, keepdims=True)
    shares = np.divide(seconds, totals, out=np.zeros_like(seconds), where=totals > 0)
    return {
        part: [round(share, 4) for share in shares[:, index].tolist()]
        for part, index in PART_INDEX.items()
        if shares[:, index].any()
    }


# --- lengths -------------------------------------------------------------------------------------


def _lengths(material: Material) -> dict[str, LengthCurve]:
    run = material.run
    everything = [r.tokens for d in run.deliveries for r in d.rollouts]
    first = [r.tokens for d in run.deliveries[:1] for r in d.rollouts]
    curves = {
        "drawn": _curve(material.seen, material.unfinished),
        "delivered": _curve(np.maximum(everything, 1), None),
        "first": _curve(np.maximum(first, 1), None),
    }
    return {name: curve for name, curve in curves.items() if curve is not None}


def _curve(lengths: NDArray[np.int64], censored: NDArray[np.bool_] | None) -> LengthCurve | None:
    unknown = np.zeros(lengths.size, dtype=np.bool_) if censored is None else censored
    if unknown.all():
        return None
    law = kaplan_meier(lengths, unknown)
    at, longer = _steps(law)
    return LengthCurve(responses=lengths.size, mean=law.mean(), lengths=at, longer=longer)


def _steps(law: KaplanMeier) -> tuple[list[float], list[float]]:
    """The survival function, thinned evenly on both logarithmic axes."""
    known = law.survival > 0
    lengths = np.append(1, law.lengths[known]).astype(np.float64)
    survival = np.append(1.0, law.survival[known])
    if lengths.size > _CURVE_POINTS:
        right, down = np.log(lengths), -np.log(survival)
        way = right / max(1.0, float(right[-1])) + down / max(1.0, float(down[-1]))
        chosen = np.searchsorted(way, np.linspace(0, float(way[-1]), _CURVE_POINTS))
        kept = np.unique(np.minimum(chosen, lengths.size - 1))
        lengths, survival = lengths[kept], survival[kept]
    return lengths.tolist(), [_figure(share) for share in survival.tolist()]


# --- staleness -----------------------------------------------------------------------------------


def _staleness(run: Run) -> StalenessLedger:
    by_batch = tokens_by_class(run, _AGES)
    versions = np.zeros(_AGES)
    for delivery in run.deliveries:
        for rollout in delivery.rollouts:
            sampled = {s.version for s in rollout.segments if s.version != NO_VERSION}
            if sampled:
                versions[min(len(sampled), _AGES) - 1] += 1
    pieces = np.array_split(np.arange(len(run.deliveries)), min(_BATCH_BARS, len(by_batch)) or 1)
    sums = np.array([by_batch[piece].sum(axis=0) for piece in pieces])
    return StalenessLedger(
        tokens_by_age=_normal(by_batch.sum(axis=0)),
        responses_by_versions=_normal(versions),
        batches=[int(piece[0]) for piece in pieces if piece.size],
        by_batch=np.array([_normal(row) for row in sums]).T.tolist() if len(by_batch) else [],
    )


def _normal(counts: NDArray[np.float64] | NDArray[np.int64]) -> list[float]:
    total = float(counts.sum()) or 1.0
    return [_figure(count / total) for count in counts]


def _alignment(run: Run) -> AlignmentFigures | None:
    """The summary's own, with its batches thinned."""
    found = run.summary.alignment
    if found is None:
        return None
    shown = found.by_batch[_thinning(len(found.by_batch), _CURVE_POINTS)]
    return replace(found, by_batch=shown)


# --- numbers -------------------------------------------------------------------------------------


def _thinned(values: NDArray[np.float64], at_most: int) -> NDArray[np.float64]:
    return values[_thinning(values.size, at_most)]


def _thinning(count: int, at_most: int) -> slice:
    """Which of `count` values are shown: at most so many, at equal distances."""
    return slice(None, None, max(1, -(-count // at_most)))


def _rounded(values: Sequence[float] | NDArray[np.float64]) -> list[float]:
    return [_figure(value) for value in values]


def _figure(value: float) -> float:
    """Round to seven digits, which are more than a screen shows."""
    return float(f"{float(value):.7g}")


# --- headlines -----------------------------------------------------------------------------------

# The headlines of the table of figures, in its order.

_UTILIZATION = Figure(
    help="The share of the engines' slots and time in which responses grew or prompts were read.",
    unit="share",
    headline="Engine utilization",
    better="higher",
)


def headlines(summary: RunSummary, utilization: float) -> list[Headline]:
    """The headline figures of a run whose engines were busy for the share `utilization` of their
    time."""
    found = list(headlines_in(summary))
    found.insert(2, ("utilization", _UTILIZATION, utilization))
    notes = _notes(summary)
    return [
        _headline(key, figure, value, notes.get(key, ""))
        for key, figure, value in found
        if key != "rewards.mean" or value is not None
    ]


def _headline(key: str, figure: Figure, value: Any, note: str) -> Headline:
    number: float | None = sum(value.values()) if isinstance(value, dict) else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType, reportUnknownVariableType]
    return Headline(
        key=key,
        label=figure.headline,
        value=number,
        text=_text(figure, number),
        explanation=f"{figure.help} {note}".strip(),
        better=figure.better,
        unit=figure.unit,
    )


def _text(figure: Figure, value: float | None) -> str:
    match figure.unit:
        case "share":
            return signed_percent(value) if figure.better == "zero" else percent(value)
        case "seconds":
            return seconds(value)
        case "nats":
            return nats(value)
        case "reward":
            return amount(value, 3)
        case "versions" if isinstance(value, float):
            return f"{value:.2f}"
        case _:
            return amount(value)


def _notes(summary: RunSummary) -> dict[str, str]:
    """What this run adds to the meaning of a headline."""
    steady, rollouts = summary.steady_state, summary.rollouts
    reference = {"workload_mean": "the workload's mean", "run_after_burn_in": "the later batches"}
    against = reference.get(summary.bias.bias_reference or "", "the mean")
    parts = ", ".join(f"{name}: {amount(mean, 3)}" for name, mean in summary.rewards.parts.items())
    reasons = ", ".join(f"{name}: {n:,}" for name, n in rollouts.dropped.items())
    return {
        "delivered_tokens_per_s": f"After the start (batches up to {steady.burn_in:,}) "
        f"{amount(steady.delivered_tokens_per_s)}.",
        "staleness_max": f"{summary.staleness_max_trained:,} of those that count in the loss.",
        "rewards.mean": f"Means of its parts: {parts}." if parts else "",
        "rollouts.delivered": f"{rollouts.launched:,} were started; {rollouts.in_flight:,} were in "
        "flight at the end.",
        "rollouts.dropped": f"({reasons})" if reasons else "",
        "tokens.reprefilled": f"{summary.tokens.generated:,} tokens were generated.",
        "seconds.wall": f"On a {summary.clock} clock; an engine was paused for "
        f"{seconds(summary.seconds.pause)} of them.",
        "bias.bias_estimate": f"Held against {against}; short responses come first, so a young run "
        "is negative.",
    }


# --- material ------------------------------------------------------------------------------------

# Reads a run folder for a report, in one pass over its event log.


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """What a report needs of a run folder.

    Attributes:
        seen: number of tokens of each response that was launched for training, int64 [n].
        unfinished: whether each of these responses had not ended, bool [n].
    """

    name: str
    run: Run
    usage: RunUsage
    faults: FaultLedger
    seen: NDArray[np.int64]
    unfinished: NDArray[np.bool_]


def read_material(folder: Path) -> Material:
    """Read the run in `folder`.

    Raises:
        RunFolderError: if a file is missing or cannot be understood.
    """
    with readable(folder):
        config = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
        scheduler: dict[str, Any] = config.get("scheduler", {})
        summing, summary = _summing(folder, config)
        history, launches, faults = History(), Launches(), Faults()
        usage = UsageRecorder(batch_groups=scheduler.get("batch_groups"))
        end = replay(
            folder / EVENTS,
            [usage, faults, history, launches, *summing],
        )
        run, members = history.run(config, summary(), end), launches.members()
    tokens = np.array([member.tokens for member in members], dtype=np.int64)
    finished = np.array([member.finished for member in members], dtype=np.bool_)
    return Material(
        name=folder.resolve().name,
        run=run,
        usage=usage.usage(end),
        faults=faults.ledger(),
        seen=np.where(finished, np.maximum(tokens, 1), np.maximum(tokens, 0)),
        unfinished=~finished,
    )


def _summing(
    folder: Path, config: dict[str, Any]
) -> tuple[Sequence[Listener], Callable[[], RunSummary]]:
    """The listeners that are needed to sum the run up after its log was read."""
    written = written_summary(folder)
    if written is not None:
        return (), lambda: written
    rebuilding = Rebuilding(config)
    return rebuilding.listeners, rebuilding.result


# --- faults --------------------------------------------------------------------------------------

# Collects what went wrong in a run and what was done about it, from its facts.

_SHOWN = 40
_CAUSE = 240
"""Number of characters of a cause that are shown, because a server's own message may be a page
long."""


class Faults(DispatchingListener):
    """A listener that collects faults; :meth:`ledger` returns them."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[FaultEvent] = []
        self._in_all = 0
        self._lost = self._admitted = self._opened = 0
        self._failed: Counter[str] = Counter()
        self._groups: Counter[tuple[str, str]] = Counter()
        self._rollouts: Counter[tuple[str, str]] = Counter()
        self._handlers = {
            of.RunOpened: self._open,
            of.AttemptEnded: self._attempt_ended,
            of.ControlCallFailed: lambda fact: self._note(
                fact.engine, f"its {fact.call} call failed", fact.cause
            ),
            of.EngineJoined: lambda fact: self._note(fact.info.name, "joined", ""),
            of.EngineLost: self._lose,
            of.EngineAdmitted: self._admit,
            of.EngineSlow: lambda fact: self._note(
                fact.engine, "is slow, and stays in use", fact.cause
            ),
            of.FleetAwaited: lambda _: self._note("", "no engine was left: waiting for one", ""),
            of.FleetGivenUp: lambda _: self._note("", "no engine came back in time", ""),
            of.GroupsFailed: lambda fact: self._note("", "the run was given up", fact.cause),
            of.UpdateFinished: self._update_finished,
            of.GroupDropped: lambda fact: self._drop(fact.reason, fact.cause, len(fact.rollouts)),
            of.PromptRefused: lambda fact: self._drop(Reason.BAD_PROMPT.value, fact.cause, 1),
        }

    def ledger(self) -> FaultLedger:
        """The faults up to now."""
        return FaultLedger(
            events=self._events,
            events_in_all=self._in_all,
            engines_lost=self._lost,
            engines_admitted=self._admitted,
            resumed=max(0, self._opened - 1),
            failed_attempts=self._failed.total(),
            retries=[Retry(cause=c, attempts=n) for c, n in self._failed.most_common(_SHOWN)],
            dropped_groups=self._groups.total(),
            drops=[
                Drop(reason=key[0], cause=key[1], groups=n, rollouts=self._rollouts[key])
                for key, n in self._groups.most_common(_SHOWN)
            ],
        )

    def _note(self, engine: str, what: str, cause: str) -> None:
        self._in_all += 1
        if len(self._events) < _SHOWN:
            self._events.append(
                FaultEvent(time=self._now, engine=engine, what=what, cause=_short(cause))
            )

    def _open(self, _: of.RunOpened) -> None:
        self._opened += 1
        if self._opened > 1:
            self._note("", "another process went on with the run", "")

    def _attempt_ended(self, fact: of.AttemptEnded) -> None:
        if fact.outcome == "failed":
            self._failed[_short(fact.cause)] += 1

    def _lose(self, fact: of.EngineLost) -> None:
        self._lost += 1
        what = "lost; it waits for the next weights" if fact.standby else "lost; quarantined"
        self._note(fact.engine, what, fact.cause)

    def _admit(self, fact: of.EngineAdmitted) -> None:
        self._admitted += 1
        self._note(fact.engine, f"takes part again, with version {fact.version}", "")

    def _update_finished(self, fact: of.UpdateFinished) -> None:
        if fact.cause:
            self._note("", f"the update to version {fact.version} failed", fact.cause)

    def _drop(self, reason: str, cause: str, rollouts: int) -> None:
        key = (reason, _short(cause))
        self._groups[key] += 1
        self._rollouts[key] += rollouts


def _short(cause: str) -> str:
    text = " ".join(cause.split())
    return text if len(text) <= _CAUSE else f"{text[: _CAUSE - 1]}…"


# --- sampled -------------------------------------------------------------------------------------

# Reads the samples of GPUs and engines for a report, if there are any.

_POINTS = 240
_LINES = 16


def gpu_lines(folder: Path) -> tuple[list[GpuLine], str]:
    """Read the samples as percent over time, one line for each GPU (by NVML) or otherwise for each
    engine (by its own counters), with a sentence that says what they mean. A run that was not
    sampled has no lines.

    Raises:
        RunFolderError: if the samples cannot be read.
    """
    samples = read_samples(folder)
    if samples.devices:
        found = gpu_utilization(folder, bins=_POINTS)
        return _lines({name: (s.t, s.share) for name, s in found.series.items()}), found.label
    told = {n: (e.t, e.step_share) for n, e in samples.engines.items()}
    lines = _lines(told)
    return lines, STEP_SHARE if lines else ""


def _lines(
    series: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]],
) -> list[GpuLine]:
    found: list[GpuLine] = []
    for name, (times, share) in series.items():
        known = np.isfinite(share)
        if not known.any() or len(found) == _LINES:
            continue
        t, percent = _means(times[known], 100 * share[known])
        found.append(GpuLine(name=name, times=t, percent=percent))
    return found


def _means(
    times: NDArray[np.float64], values: NDArray[np.float64]
) -> tuple[list[float], list[float]]:
    """Average neighbouring samples, so that there are no more than a screen shows."""
    pieces = np.array_split(np.arange(times.size), min(_POINTS, times.size))
    return (
        [round(float(times[piece].mean()), 3) for piece in pieces],
        [round(float(values[piece].mean()), 2) for piece in pieces],
    )
