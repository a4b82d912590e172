"""Tests the parts of a report: its figures, the faults found in events, its sentences."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from aprilsched.__main__ import main
from aprilsched.cli.runs.pictures import draw_comparison
from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.observe.figures.engine_time import BUSY, PARTS
from aprilsched.observe.figures.faults import Faults
from aprilsched.observe.log.run import read_run
from aprilsched.observe.log.usage import usage_of
from aprilsched.observe.report import page as page_module
from aprilsched.observe.report.batch_charts import forecasts, staleness_by_batch
from aprilsched.observe.report.chart_model import Axis, Chart, Series
from aprilsched.observe.report.charts import spec
from aprilsched.observe.report.compare import differences, verdict
from aprilsched.observe.report.gather import run_report
from aprilsched.observe.report.page import page
from aprilsched.observe.report.report_data import RunReport
from aprilsched.observe.report.sections import CARDS, cards
from aprilsched.observe.report.time_charts import gpu, losses, lost_most, utilization
from aprilsched.observe.report.words import percent, ran, written
from aprilsched.observe.sampling.labels import NVML_UTILIZATION, STEP_SHARE
from aprilsched.observe.sampling.sample_log import DescriptionLine, DeviceLine, EngineLine, GpuLine
from aprilsched.simulation import compare
from tests.support import facts
from tests.support.reported import with_reports

SMALL = ["--batch-groups", "4", "--group-size", "4", "--median", "60", "--cap", "600"]
STEP = ["--batches", "6", "--sim.engines", "2", "--sim.stream-interval", "8"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("runs") / "simulated"
    out = ["--policy", "sync,april", "--sim.refit-seconds", "1", "--out", str(root), "--json"]
    assert main(["simulate", *SMALL, *STEP, *out]) == 0
    return {name: root / name for name in ("sync", "april")}


@pytest.fixture(scope="module")
def reports(folders: Mapping[str, Path]) -> Mapping[str, RunReport]:
    return {name: run_report(folder) for name, folder in folders.items()}


# --- figures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sync", "april"])
def test_the_parts_of_the_time_are_all_of_it(reports: Mapping[str, RunReport], name: str):
    report = reports[name]
    time = report.figures.time
    assert [part.part for part in time.parts] == list(PARTS)
    assert sum(part.share for part in time.parts) == pytest.approx(1)
    assert sum(part.seconds for part in time.parts) == pytest.approx(time.engines * time.wall)
    drawn = [np.asarray(series.y) for series in utilization(report, time.wall).series]
    assert np.sum(drawn, axis=0) == pytest.approx(np.ones(drawn[0].size))
    busy = sum(part.share for part in time.parts if part.part in BUSY)
    assert time.utilization == pytest.approx(busy)


@pytest.mark.parametrize("name", ["sync", "april"])
def test_figures_are_those_of_the_run(
    folders: Mapping[str, Path], reports: Mapping[str, RunReport], name: str
):
    summary, report = read_run(folders[name]).summary, reports[name]
    shown = {figure.key: figure.value for figure in report.figures.headlines}
    assert shown["delivered_tokens_per_s"] == summary.delivered_tokens_per_s
    assert shown["efficiency"] == summary.efficiency
    assert shown["staleness_max"] == summary.staleness_max
    assert shown["utilization"] == usage_of(folders[name]).utilization
    stale = 1 - np.array(staleness_by_batch(report).series[0].y)
    assert stale == pytest.approx([b.off_policy_token_share for b in summary.per_batch])
    assert report.figures.summary == replace(summary, per_batch=[])


def test_a_run_that_was_cut_off_has_the_same_report(
    folders: Mapping[str, Path], reports: Mapping[str, RunReport], tmp_path: Path
):
    for name in ("config.toml", "events.jsonl"):
        (tmp_path / name).write_bytes((folders["april"] / name).read_bytes())
    report, whole = run_report(tmp_path), reports["april"]
    assert report.figures.time == whole.figures.time
    assert report.summary.bias == whole.summary.bias
    assert any("was killed" in warning for warning in report.figures.warnings)


def test_a_run_without_a_batch_has_a_page(folders: Mapping[str, Path], tmp_path: Path):
    lines = (folders["april"] / "events.jsonl").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if '"fact":"BatchDelivered"' in line)
    (tmp_path / "config.toml").write_bytes((folders["april"] / "config.toml").read_bytes())
    for count in (1, 5, first):
        (tmp_path / "events.jsonl").write_text("\n".join(lines[:count]) + "\n")
        report = run_report(tmp_path)
        assert report.figures.headline("rollouts.delivered").value == 0
        assert "No batch was delivered" in page([report], library="")


@pytest.mark.long
def test_the_size_of_a_report_does_not_grow_with_the_run(tmp_path: Path):
    sizes: list[int] = []
    for batches in (40, 160):
        out = tmp_path / str(batches)
        few = ["--policy", "april", "--batches", str(batches), "--out", str(out), "--json"]
        assert main(["simulate", *SMALL, *few]) == 0
        sizes.append(len(page([run_report(out / "april")], library="")))
    assert sizes[1] < 1.5 * sizes[0]


GPU_LINES = [DeviceLine(t=0.0, device=1, name="H100"), GpuLine(t=1.0, device=1, utilization=0.5)]


@pytest.mark.parametrize(
    ("lines", "name", "label"),
    [
        (GPU_LINES, "1: H100", NVML_UTILIZATION),
        ([EngineLine(t=1.0, engine="a", step_share=0.5)], "a", STEP_SHARE),
    ],
    ids=["GPUs", "engines"],
)
def test_samples_are_drawn_with_what_they_mean(
    folders: Mapping[str, Path], tmp_path: Path, lines: Sequence[Any], name: str, label: str
):
    for file in ("config.toml", "events.jsonl", "summary.json"):
        (tmp_path / file).write_bytes((folders["april"] / file).read_bytes())
    encoded = [msgspec.json.encode(line) for line in (DescriptionLine(t=0.0, interval=1.0), *lines)]
    (tmp_path / "samples.jsonl").write_bytes(b"\n".join(encoded) + b"\n")
    chart = gpu(run_report(tmp_path), 10.0)
    assert [(series.name, list(series.y)) for series in chart.series] == [(name, [0.5])]
    assert chart.title.startswith("Samplers saw 50 %")
    assert chart.note == label


# --- the trainer's log-probabilities ---------------------------------------------------------


def test_a_report_without_the_trainer_s_logprobs_says_nothing_of_them(
    reports: Mapping[str, RunReport],
):
    assert reports["april"].summary.alignment is None
    assert "agree with the trainer" not in page([reports["april"]], library="")


def test_a_mismatch_of_engines_is_shown(
    folders: Mapping[str, Path], reports: Mapping[str, RunReport], tmp_path: Path
):
    off = {"sim-0": 0.01, "sim-1": 0.2}
    report = run_report(with_reports(folders["april"], tmp_path / "off", engines=off))
    assert report.summary.alignment is not None
    k3 = sum(math.exp(d) - 1 - d for d in off.values()) / 2
    assert report.figures.headline("alignment.whole.k3").value == pytest.approx(k3)
    assert report.summary.alignment.whole.tokens == 200 * len(report.summary.alignment.by_batch)
    shown = page([report], library="").replace("&nbsp;", " ")
    assert f"differ by {k3:.2g} nats, and 50 % of the tokens by more than 0.1 nats" in shown
    assert "sim-1 differs by 0.021 nats; sim-0 differs by 5e-05 nats." in shown
    assert "differ most from position 256 to 511 of the response" in shown
    # The text appears also in a comparison, for the first and for the second run.
    assert "A: With the same weights" in page([report, reports["sync"]], library="")
    assert "B: With the same weights" in page([reports["sync"], report], library="")
    found = next(
        d for d in differences(report.figures, report.figures) if d.difference == "+0 nats"
    )
    assert found.verdict == "same"


def test_a_run_of_stale_tokens_only_has_nothing_to_compare(
    folders: Mapping[str, Path], tmp_path: Path
):
    folder = with_reports(folders["april"], tmp_path / "stale", engines={"sim-0": 0.2})
    log = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").write_text(
        re.sub(
            r'"by_engine": .*?"by_staleness": \[\{.*?\}',
            '"by_engine": {}, "by_position": [], "by_staleness": [{}',
            log,
        )
    )
    shown = page([run_report(folder)], library="")
    assert "No token of staleness 0 was compared." in shown
    assert "agree at every position" not in shown


# --- faults ----------------------------------------------------------------------------------


def heard(*what: tuple[float, Fact | Sequence[Fact]]) -> Faults:
    faults = Faults()
    for at, received in what:
        faults.on_facts([received] if isinstance(received, Fact) else received, at)
    return faults


def test_faults_are_derived_from_facts():
    broken = "the server reset the connection"
    failed: Any = {"outcome": "failed", "cause": broken, "retried": True}
    ledger = heard(
        (0.0, facts.opened("a")),
        (0.5, [facts.sent(1, 1), facts.sent(2, 1)]),
        *((1.0, of.AttemptEnded(request_id=i, **failed)) for i in (1, 2)),
        (2.0, of.EngineLost(engine="a", cause="no answer", last=True)),
        (3.0, of.EngineAdmitted(engine="a", version=3)),
        (4.0, facts.dropped(1, 1, 2, 3, reason="stale", cause="too old")),
        (5.0, facts.opened("a", resumed=True)),
    ).ledger()
    assert [(e.time, e.engine, e.what, e.cause) for e in ledger.events] == [
        (2.0, "a", "lost; quarantined", "no answer"),
        (3.0, "a", "takes part again, with version 3", ""),
        (5.0, "", "another process went on with the run", ""),
    ]
    assert (ledger.engines_lost, ledger.engines_admitted, ledger.resumed) == (1, 1, 1)
    assert [(r.cause, r.attempts) for r in ledger.retries] == [(broken, 2)]
    assert [(d.reason, d.cause, d.rollouts) for d in ledger.drops] == [("stale", "too old", 3)]


def test_many_faults_are_counted_and_not_all_kept():
    ledger = heard(
        *((float(i), of.EngineLost(engine="a", cause="x" * 9999)) for i in range(500))
    ).ledger()
    assert ledger.engines_lost == ledger.events_in_all == 500
    assert len(ledger.events) < 100
    assert len(ledger.events[0].cause) < 500


# --- words -----------------------------------------------------------------------------------


def test_the_largest_loss_is_named(reports: Mapping[str, RunReport]):
    report = reports["sync"]
    most = lost_most(report.figures.time)
    assert most is not None
    assert most.share == max(p.share for p in report.figures.time.parts if p.part not in BUSY)
    title = losses([report]).title
    assert title.startswith(percent(most.share))
    assert percent(report.figures.time.utilization) in title


def test_settings_are_listed(folders: Mapping[str, Path]):
    summary = read_run(folders["sync"]).summary
    scheduler = {"over_provision": 1.5, "refill": {"rule": "pool", "together": 4}}
    listed = ran({"engine": ["sim"], "scheduler": scheduler}, summary)
    assert listed[0] == (
        "Engines: 2 (embedded, modelled on one H200 with a 4B model), on a virtual clock."
    )
    assert listed[2] == "Scheduler: over_provision = 1.5, refill = (rule = pool, together = 4)."
    assert ran({}, summary)


def test_figures_become_words():
    assert [percent(share) for share in (None, 0.0, 0.0004, 0.05, 0.123)] == [
        "unknown",
        "0 %",
        "< 0.1 %",
        "5.0 %",
        "12 %",
    ]
    assert [written(s, "seconds") for s in (0.5, 59.0, 61.0, 9_000.0)] == [
        "0.5 s",
        "59.0 s",
        "1 min 1 s",
        "2.5 h",
    ]
    assert written(-0.0213, "share", signed=True) == "\N{MINUS SIGN}2.1 %"
    assert [written(1234, "tokens"), written(0.41, "versions")] == ["1,234", "0.41"]


def test_two_runs_are_held_against_each_other(reports: Mapping[str, RunReport]):
    a, b = reports["sync"].figures, reports["april"].figures
    found = {difference.label: difference for difference in differences(a, b)}
    assert found["Delivered tokens per second"].verdict == "better"
    assert found["Delivered tokens per second"].ratio == pytest.approx(
        (b.headline("delivered_tokens_per_s").value or 0)
        / (a.headline("delivered_tokens_per_s").value or 1)
    )
    assert found["Off-policy tokens"].verdict == "worse"
    assert found["Lost"].verdict == "same"
    assert found["Responses delivered"].verdict == ""
    turned = {difference.label: difference.verdict for difference in differences(b, a)}
    assert turned["Delivered tokens per second"] == "worse"
    assert {difference.verdict for difference in differences(a, a)} <= {"same", ""}
    assert verdict(a, b).startswith("Over the whole run, B delivers ")
    assert "more tokens per second" in verdict(a, b)
    assert "as fast as" in verdict(a, a)


def test_a_comparison_of_unknown_staleness_has_no_points(folders: Mapping[str, Path]):
    plots = pytest.importorskip("aprilsched.observe.plots")
    runs = {"sync": read_run(folders["sync"])}
    (row,) = compare({"sync": runs["sync"].summary}).policies
    for known, labels in ((0.0, ["sync"]), (None, [])):
        figure = plots.comparison(runs, [replace(row, staleness_mean=known)])
        assert [text.get_text() for text in figure.axes[1].texts] == labels


def test_the_price_of_policies_is_drawn_at_their_tokens_per_second(folders: Mapping[str, Path]):
    """Efficiency cannot be compared between policies on different numbers of engines."""
    plots = pytest.importorskip("aprilsched.observe.plots")
    runs = {name: read_run(folder) for name, folder in folders.items()}
    rows = compare({name: run.summary for name, run in runs.items()}).policies
    figure = plots.comparison(runs, rows)
    heights = [line.get_ydata()[0] for line in figure.axes[1].lines]
    assert heights == [row.delivered_tokens_per_s for row in rows]


def test_a_comparison_of_many_policies_draws_the_fastest(
    folders: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
):
    plots = pytest.importorskip("aprilsched.observe.plots")
    (row,) = compare({"sync": read_run(folders["sync"]).summary}).policies
    rows = [replace(row, policy=f"p{n}", delivered_tokens_per_s=float(n)) for n in range(1, 11)]
    draw, figures = plots.comparison, list[Any]()

    def drawn(*arguments: Any) -> Any:
        figures.append(draw(*arguments))
        return figures[-1]

    monkeypatch.setattr(plots, "comparison", drawn)
    names = {each.policy: "sync" for each in rows}
    draw_comparison(folders["sync"].parent, names, rows, Console())
    (figure,) = figures
    bars = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert bars == [f"p{n}" for n in range(10, 2, -1)]
    assert figure.get_suptitle() == "The 8 fastest of 10 policies"


def test_a_comparison_names_what_happened_to_kv(folders: Mapping[str, Path]):
    plots = pytest.importorskip("aprilsched.observe.plots")
    found = {name: read_run(folder) for name, folder in folders.items()}
    runs = {
        "sync": found["sync"],
        "april": found["april"],
        **{
            rule: replace(found["april"], config={"scheduler": {"straggler": rule}})
            for rule in ("in_place", "run")
        },
        "own": replace(found["april"], config={"scheduler": {"straggler": {"name": "own"}}}),
    }
    figure = plots.comparison(runs)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "sync", "april (KV recomputed)", "in_place (KV kept)", "run", "own",
    ]  # fmt: skip


# --- the page --------------------------------------------------------------------------------


def test_the_page_loads_nothing_and_contains_its_figures(reports: Mapping[str, RunReport]):
    written = page([reports["april"]], library="/* plotly */")
    assert "http://" not in written.replace("http://www.w3.org", "")
    assert "https://" not in written
    start = written.index('id="figures">') + len('id="figures">')
    figures = json.loads(written[start : written.index("</script>", start)])
    assert figures["name"] == "april"
    assert figures["time"]["utilization"] == reports["april"].figures.time.utilization


def test_six_figures_are_cards_and_the_others_are_in_a_table(reports: Mapping[str, RunReport]):
    report = reports["april"]
    html = page([report], library="")
    names = re.findall("<dt>(.*?)</dt>", html)
    assert len(names) == 6
    assert "Staleness, mean and largest" in names
    mean, largest = (report.figures.headline(f"staleness_{which}") for which in ("mean", "max"))
    assert f"<strong>{mean.text} / {largest.text}</strong>" in html
    rows = [name for name, *_ in cards(report)[1]]
    for figure in report.figures.headlines:
        assert (figure.label in rows) != (figure.key in CARDS or figure.key == "staleness_max")
    assert all(f'<th scope="row">{name}' in html for name in rows)
    assert "All faults: none." in html


def test_backticks_become_code_and_only_markup_of_ours_is_markup(reports: Mapping[str, RunReport]):
    report = reports["april"]
    warnings = ["`path` must be above 0, got <b>`1`</b>.", "a ` alone", "7 % of `a`"]
    named = replace(report, figures=replace(report.figures, warnings=warnings, name="a`b`"))
    html = page([named, reports["sync"]], library="")
    assert "<code>path</code> must be above 0, got &lt;b&gt;<code>1</code>&lt;/b&gt;." in html
    assert "a ' alone" in html
    assert "7&nbsp;% of <code>a</code>" in html
    assert "<title>Report: A: a&#x27;b&#x27;, B: sync</title>" in html
    texts = re.sub("(?s)<script.*?</script>", "", html)
    assert "`" not in texts
    for drawn in (
        chart for chart in json.loads(html.split('id="charts">')[1].split("</script>")[0])
    ):
        assert "`" not in json.dumps(drawn["data"])


@pytest.mark.parametrize(
    ("last", "step"), [(1, 1), (8, 1), (9, 1), (10, 2), (60, 10), (240, 50), (100_000, 20_000)]
)
def test_ticks_of_batches_are_whole_numbers(last: int, step: int):
    batches = Series(name="", x=[1, last], y=[0, 1], colour="@ink")
    chart = Chart(series=[batches], x=Axis(label="batch", unit="whole"), y=Axis(label=""))
    axis = spec(chart)["layout"]["xaxis"]
    assert (axis["dtick"], axis["tickformat"], axis["fixedrange"]) == (step, "d", True)
    assert "dtick" in spec(replace(chart, series=[]))["layout"]["xaxis"]


@pytest.mark.parametrize("package", ["jinja2", "plotly.offline"])
def test_a_missing_package_is_named(
    package: str,
    folders: Mapping[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["report", str(folders["sync"]), "--out", str(tmp_path / "x.html")]) == 2
    missing = rf"{package} is not installed; pip install .*\[report\]'\."
    assert re.search(missing, capsys.readouterr().err)
    assert not (tmp_path / "x.html").exists()
    # What a run leaves at its end is a gift: without it the run is as good.
    assert main(["run", *SMALL, *STEP, "--out", str(tmp_path / "run")]) == 0
    assert re.search(f"No report: {missing}", capsys.readouterr().err)
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_broken_report_breaks_no_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("of a chart")

    monkeypatch.setattr(page_module, "write_report", broken)
    assert main(["run", *SMALL, *STEP, "--out", str(tmp_path / "run")]) == 0
    assert "No report: ZeroDivisionError: of a chart" in capsys.readouterr().err


def test_a_run_ends_with_its_report(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    folder = tmp_path / "run"
    assert main(["run", *SMALL, *STEP, "--out", str(folder)]) == 0
    text = capsys.readouterr().err
    for name in ("report.html", "trace.json"):
        assert (folder / name).stat().st_size > 1000
        assert str(folder / name) in text
    for flag in ("--quiet", "--no-report"):
        other = tmp_path / flag
        assert main(["run", *SMALL, *STEP, flag, "--out", str(other)]) == 0
        assert not (other / "report.html").exists()
        assert not (other / "trace.json").exists()


@pytest.mark.long
def test_simulate_ends_with_the_report_of_the_best(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    out = ["--policy", "sync,april", "--out", str(tmp_path / "both")]
    assert main(["simulate", *SMALL, *STEP, *out]) == 0
    assert str(tmp_path / "both" / "report.html") in capsys.readouterr().err
    assert "B: april" in (tmp_path / "both" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("count", [0, 3])
def test_one_run_or_two(
    folders: Mapping[str, Path], count: int, capsys: pytest.CaptureFixture[str]
):
    assert main(["report", *[str(folders["sync"])] * count]) == 2
    assert "name one, or two" in capsys.readouterr().err


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(tmp_path)]) == 2
    assert "is no whole run folder" in capsys.readouterr().err


def test_forecasts_are_drawn_with_their_outcomes(tmp_path: Path):
    out = ["--policy", "sync,auto", "--out", str(tmp_path / "runs"), "--json"]
    assert main(["simulate", *SMALL, *STEP, *out]) == 0
    waiting, auto = (run_report(tmp_path / "runs" / name) for name in ("sync", "auto"))
    assert forecasts(waiting) is None
    chart = forecasts(auto)
    assert chart is not None
    assert chart.series[0].x == [2, 3, 4, 5, 6], "the first choice follows the first batch"
    steady = auto.summary.steady_state.forecast
    assert steady is not None
    assert steady.batches == 5
    assert "of the bound were forecast for the batches after the burn-in" in chart.title
    html = page([auto], library="")
    assert "What was forecast, and what came" in html
    assert "What was forecast, and what came" not in page([waiting], library="")
