"""The parts of the page that are no charts, as HTML. What comes from a run folder is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from aprilsched.analysis.colours import PART_COLOURS
from aprilsched.analysis.report.compare import Difference, differences
from aprilsched.analysis.report.figure import Chart, Key
from aprilsched.analysis.report.model import FaultLedger, Headline, ReportData
from aprilsched.analysis.report.words import amount, percent, seconds, signed_percent

__all__ = [
    "bias_ledger",
    "cards",
    "comparison",
    "fault_ledger",
    "figure",
    "letter",
    "parts",
    "what_ran",
]


def what_ran(runs: Sequence[ReportData]) -> str:
    """The configuration of each run, in sentences."""
    return _columns(
        f"<ul class=ran>{''.join(f'<li>{_lead(text)}</li>' for text in run.ran)}</ul>"
        + "".join(f"<p class=warning>{escape(text)}</p>" for text in run.warnings)
        for run in runs
    )


def letter(place: int, name: str) -> str:
    """Which of two runs something is about; nothing if it is about both."""
    return f"<p class=letter>{'AB'[place]}: {escape(name)}</p>" if name else ""


def cards(headlines: Sequence[Headline]) -> str:
    """Figures with one line each."""
    return f"<dl class=cards>{''.join(map(_card, headlines))}</dl>"


def comparison(a: ReportData, b: ReportData) -> str:
    """The figures of both, their difference, and which is better."""
    rows = "".join(map(_difference, differences(a, b)))
    return (
        "<div class=scroll><table class=compare><thead><tr><th>Figure<th>A<th>B"
        f"<th>B less A<th>B / A<th>B is</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def figure(chart: Chart) -> str:
    """The place of a chart, with its title, its legend and how to read it."""
    keys = "".join(
        f'<li><span class="{_key_class(key)}" style="--key:{_css(key.colour)}">'
        f"</span>{escape(key.label)}</li>"
        for key in chart.keys
    )
    legend = f"<ul class=keys>{keys}</ul>" if keys else ""
    return (
        f"<figure><h3>{escape(chart.title)}</h3>{legend}"
        f'<div class=chart id="{escape(chart.id)}" style="height:{chart.height}px" role=img '
        f'aria-label="{escape(chart.title)}"></div>'
        f"<figcaption>{escape(chart.note)}</figcaption></figure>"
    )


def parts(runs: Sequence[ReportData]) -> str:
    """What each part of the engines' time is, with its share and seconds."""
    there = [
        (mine, [run.time.parts[i] for run in runs])
        for i, mine in enumerate(runs[0].time.parts)
        if any(run.time.parts[i].seconds > 0 for run in runs)
    ]
    letters = ["A ", "B "] if len(runs) > 1 else [""]
    rows = "".join(
        f'<li><span class=chip style="--key:{PART_COLOURS[mine.part]}"></span>'
        f"<b>{escape(mine.label)}</b>"
        + "".join(
            f"<span class=share>{letter}{percent(part.share)}</span>"
            f"<span class=seconds>{seconds(part.seconds)}</span>"
            for letter, part in zip(letters, each, strict=True)
        )
        + f"<span class=meaning>{escape(mine.meaning)}</span></li>"
        for mine, each in there
    )
    total = " and ".join(
        f"{letter}{seconds(sum(part.seconds for part in run.time.parts))} of "
        f"{run.time.engines:,} {'engine' if run.time.engines == 1 else 'engines'}"
        for letter, run in zip(letters, runs, strict=True)
    )
    return (
        f'<ul class="{"parts both" if len(runs) > 1 else "parts"}">{rows}</ul>'
        f"<p class=note>Together 100 %: {total}. Causes that did not occur are left out.</p>"
    )


def bias_ledger(runs: Sequence[ReportData]) -> str:
    """What bends the lengths, and by how much."""
    return _columns(_bias(run) for run in runs)


def fault_ledger(runs: Sequence[ReportData]) -> str:
    """What went wrong, and what was done about it."""
    return _columns(_faults(run.faults) for run in runs)


# --- parts ---------------------------------------------------------------------------------------


def _columns(bodies: Iterable[str]) -> str:
    """One below the other on a phone; with the letters of the runs where there are two."""
    there = list(bodies)
    if len(there) == 1:
        return there[0]
    both = "".join(
        f"<div><p class=letter>{x}</p>{b}</div>" for x, b in zip("AB", there, strict=True)
    )
    return f"<div class=pair>{both}</div>"


def _lead(text: str) -> str:
    """A sentence whose subject stands before a colon."""
    head, colon, rest = text.partition(": ")
    if not colon or " " in head:
        return escape(text)
    return f"<b>{escape(head)}:</b> {escape(rest)}"


def _card(headline: Headline) -> str:
    return (
        f"<div><dt>{escape(headline.label)}</dt><dd><strong>{escape(headline.text)}</strong>"
        f"<span>{escape(headline.explanation)}</span></dd></div>"
    )


def _difference(found: Difference) -> str:
    ratio = "" if found.ratio is None else f"{found.ratio:.2f}"
    note = f"<small>{escape(found.explanation)}</small>" if found.explanation else ""
    return (
        f"<tr><th scope=row>{escape(found.label)}{note}</th><td data-of=A>{escape(found.a)}</td>"
        f"<td data-of=B>{escape(found.b)}</td><td data-of='B less A'>"
        f"{escape(found.difference_text)}</td><td data-of='B / A'>{ratio}</td>"
        f"<td data-of='B is' class='{found.verdict}'>{found.verdict}</td></tr>"
    )


def _bias(run: ReportData) -> str:
    bias = run.bias
    rows = [
        ("first batch against the later ones", signed_percent(bias.first_batch_length_bias)),
        ("everything delivered so far", signed_percent(bias.bias_estimate)),
    ]
    if bias.transient is not None:
        rows.append(
            ("of it, because of what is in flight", signed_percent(bias.transient.predicted))
        )
    if bias.in_flight is not None:
        flight = bias.in_flight
        rows.append(
            (
                f"in flight at the end: {flight.rollouts:,} responses of expected mean length",
                f"{amount(flight.expected_mean_length)} tokens",
            )
        )
    for reason, drops in bias.censoring.by_reason.items():
        rows.append((f"dropped ({reason}): {drops.rollouts:,}", signed_percent(drops.effect)))
    if not bias.censoring.by_reason:
        rows.append(("dropped responses, which would bend it for good", "none"))
    return _table(rows)


def _faults(ledger: FaultLedger) -> str:
    said = [
        (ledger.engines_lost, "engine lost", "engines lost"),
        (ledger.engines_admitted, "taken in again", "taken in again"),
        (ledger.failed_attempts, "request failed and was retried or given up",
         "requests failed and were retried or given up"),
        (ledger.dropped_groups, "group dropped", "groups dropped"),
        (ledger.resumed, "new process", "new processes"),
    ]  # fmt: skip
    happened = [f"{n:,} {one if n == 1 else many}" for n, one, many in said if n]
    if not happened and not ledger.events:
        return (
            "<p class=calm>Nothing failed: no engine was lost, no request was retried, no group "
            "was dropped.</p>"
        )
    html = f"<p><b>{escape(', '.join(happened) or 'No loss')}.</b></p>"
    if ledger.events:
        html += _grid(
            ("at", "engine", "what", "cause"),
            [(seconds(e.time), e.engine, e.what, e.cause) for e in ledger.events],
            ledger.events_in_all,
        )
    if ledger.retries:
        html += _grid(
            ("failed attempts", "cause"), [(f"{r.attempts:,}", r.cause) for r in ledger.retries]
        )
    if ledger.drops:
        html += _grid(
            ("dropped groups", "responses", "reason", "cause"),
            [(f"{d.groups:,}", f"{d.rollouts:,}", d.reason, d.cause) for d in ledger.drops],
        )
    return html


def _table(rows: Sequence[tuple[str, str]]) -> str:
    body = "".join(
        f"<tr><th scope=row>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table class=ledger><tbody>{body}</tbody></table>"


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]], in_all: int = 0) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-of="{escape(name)}">{escape(cell)}</td>'
            for name, cell in zip(head, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    more = f"<p class=note>The first {len(rows)} of {in_all:,}.</p>" if in_all > len(rows) else ""
    return f"<table class=faults><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>{more}"


def _key_class(key: Key) -> str:
    if not key.line:
        return "chip"
    return "line dashed" if key.dashed else "line"


def _css(colour: str) -> str:
    return f"var(--{colour[1:]})" if colour.startswith("@") else colour
