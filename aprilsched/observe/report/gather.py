"""Computes everything that a report shows from a run folder, in one pass over its event log."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.shell.listener import DispatchingListener
from aprilsched.kernel.values.files import read_text
from aprilsched.observe.figures.engine_time import PART_INDEX, PART_LABELS, PARTS
from aprilsched.observe.figures.figures import Figure, RunSummary, headlines_in
from aprilsched.observe.log.reading import replay
from aprilsched.observe.log.rebuild import Rebuilding, written_summary
from aprilsched.observe.log.run import History, readable
from aprilsched.observe.log.run_folder import CONFIG, EVENTS
from aprilsched.observe.log.samples import read_samples
from aprilsched.observe.log.usage import RunUsage, UsageRecorder, busy_share
from aprilsched.observe.report.report_data import (
    Drop,
    EngineTime,
    FaultEvent,
    FaultLedger,
    Headline,
    PartTime,
    ReportData,
    Retry,
    RunReport,
)
from aprilsched.observe.report.words import amount, nats, percent, ran, seconds, signed_percent
from aprilsched.observe.sampling.sample_log import NVML_UTILIZATION, STEP_SHARE


def run_report(folder: Path) -> RunReport:
    """Compute what a report shows of the run in `folder`.

    Raises:
        RunFolderError: if a file is missing or cannot be understood.
    """
    with readable(folder):
        config = tomllib.loads(read_text(folder / CONFIG))
        written = written_summary(folder)
        rebuilding = Rebuilding(config) if written is None else None
        history, faults = History(), Faults()
        recorder = UsageRecorder(batch_groups=config.get("scheduler", {}).get("batch_groups"))
        summing = () if rebuilding is None else rebuilding.listeners
        end = replay(folder / EVENTS, [recorder, faults, history, *summing])
    summary = written if rebuilding is None else rebuilding.result()
    assert summary is not None  # noqa: S101 - it is written or rebuilt
    usage = recorder.usage(end)
    gpu, gpu_label = _gpu(folder)
    figures = ReportData(
        name=folder.resolve().name,
        version=version("aprilsched"),
        warnings=_warnings(summary),
        ran=ran(config, summary),
        headlines=headlines(summary, usage.utilization),
        time=_time(usage),
        faults=faults.ledger(),
        summary=replace(summary, per_batch=[]),
    )
    run = history.run(config, summary, end)
    return RunReport(figures=figures, run=run, usage=usage, gpu=gpu, gpu_label=gpu_label)


def _warnings(summary: RunSummary) -> list[str]:
    told = [summary.error, summary.bias.censoring.warning]
    if summary.event_log_error:
        told.insert(1, f"The event log is not complete: {summary.event_log_error}.")
    if summary.interrupted:
        told.insert(0, "The run was ended by Ctrl-C; the figures are those until then.")
    return [text for text in told if text]


def _time(usage: RunUsage) -> EngineTime:
    totals, shares = usage.seconds.sum(axis=0), usage.shares
    return EngineTime(
        engines=len(usage.engines),
        wall=usage.wall,
        utilization=usage.utilization,
        parts=[
            PartTime(
                part=part,
                label=PART_LABELS[part],
                seconds=float(totals[index]),
                share=shares[part],
                meaning=PARTS[part],
            )
            for part, index in PART_INDEX.items()
        ],
        by_engine={
            name: busy_share(seconds)
            for name, seconds in zip(usage.engines, usage.seconds, strict=True)
        },
    )


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
            of.EngineBusy: lambda fact: self._note(
                fact.engine, f"had no room for {fact.in_flight} requests", fact.cause
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

_LINES = 16
_POINTS = 240
_Shares = Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]


def _gpu(folder: Path) -> tuple[_Shares, str]:
    """The samples as shares over time, of each GPU (by NVML) or otherwise of each engine (by its
    own counters), with a sentence that says what they mean. A run that was not sampled has none.

    Raises:
        RunFolderError: if the samples cannot be read.
    """
    samples = read_samples(folder)
    label = STEP_SHARE
    found = {name: (each.t, each.step_share) for name, each in samples.engines.items()}
    if samples.devices:
        label = NVML_UTILIZATION
        found = {
            f"{index}: {gpu.name}": (gpu.t, gpu.utilization)
            for index, gpu in samples.devices.items()
        }
    shown = {
        name: _thinned(t, share) for name, (t, share) in found.items() if np.isfinite(share).any()
    }
    return dict(list(shown.items())[:_LINES]), label if shown else ""


def _thinned(
    times: NDArray[np.float64], share: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Means of neighbouring samples, so that there are no more than a screen shows."""
    known = np.flatnonzero(np.isfinite(share))
    pieces = np.array_split(known, min(_POINTS, known.size))
    means = [np.array([each[piece].mean() for piece in pieces]) for each in (times, share)]
    return means[0], means[1]
