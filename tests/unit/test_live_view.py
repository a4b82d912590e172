"""Tests the tables of the live view, on terminals of several sizes and without one."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from aprilsched.observe.figures.figures import Figures, ForecastFigures, figures_in
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.live.live_model import EngineRow, RunFacts, Snapshot
from aprilsched.observe.live.view import (
    LiveView,
    clock_time,
    figure_texts,
    frame,
    percent,
    plural,
    short_number,
)


def row(name: str, **changes: object) -> EngineRow:
    values: dict[str, object] = {
        "state": "generating",
        "running": 48,
        "queued": 0,
        "max_running": 64,
        "kv_tokens": 120_000,
        "kv_pool": 200_000,
        "tokens_per_s": 2_310.0,
        "version": 12,
        "busy": 0.8,
    }
    return EngineRow(name=name, **{**values, **changes})  # type: ignore[arg-type]


RECENT = Figures(efficiency=0.71, staleness_mean=0.41, staleness_max=2)
SNAPSHOT = Snapshot(
    facts=RunFacts(title="run", where="runs/x", batches=40, batch_groups=64),
    elapsed=754.0,
    left=1_202.0,
    batches=12,
    version=12,
    ready=16,
    in_flight={"decoding": 300, "decoding, carried": 60, "scoring": 20},
    utilization=0.63,
    idle=(("tail", 0.21), ("refit", 0.09), ("re_prefill", 0.05), ("pause", 0.02)),
    tokens_per_s=152_310.0,
    recent=RECENT,
    dropped={},
    engines_lost=0,
    retries=0,
    fault="",
    fault_age=0.0,
    engines=(
        row("http://10.0.0.1:30000"),
        row("http://10.0.0.2:30000", state="lost", running=0, kv_tokens=0, busy=0.0),
        row("http://10.0.0.3:30000", queued=16, running=64, kv_tokens=230_000),
        row("http://10.0.0.4:30000", state="refitting", version=None, kv_pool=None),
    ),
)
FAULTY = replace(
    SNAPSHOT,
    dropped={"stale": 20, "failed": 4},
    engines_lost=1,
    retries=12,
    fault="10.0.0.2:30000 lost: it does not answer",
    fault_age=31.0,
)


def drawn(snapshot: Snapshot, width: int) -> str:
    """The text of a frame on a terminal of `width` columns."""
    console = Console(file=io.StringIO(), record=True, width=width)
    console.print(frame(snapshot, width=width))
    return console.export_text()


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_run_is_shown_as_tables():
    lines = [line.rstrip() for line in drawn(SNAPSHOT, 88).splitlines()]
    assert lines[0] == "run         12:34 elapsed, about 20:02 left  runs/x"
    assert lines[1].startswith("batches     ━━━━━")
    assert lines[1].endswith("12 of 40 delivered")
    assert lines[2].endswith("16 of 64 groups ready")
    assert lines[3:] == [
        "in flight   380 rollouts: 300 decoding; 60 decoding, carried; 20 scoring",
        "engines     2 generating, 1 lost, 1 refitting; time so far: 63% busy, 21% waiting for",
        "            the last responses, 9% new weights, 5% recomputing contexts",
        "speed       152k tokens/s, policy v12, efficiency 71%, staleness 0.41, max 2",
        "faults      none",
        "",
        "engine          state        running    KV  tokens/s  policy  busy (1 min)",
        "10.0.0.1:30000  generating     48/64   60%     2,310     v12  ━━━━━━━━━━━     80%",
        "10.0.0.2:30000  lost            0/64    0%     2,310     v12                   0%",
        "10.0.0.3:30000  generating  64+16/64  115%     2,310     v12  ━━━━━━━━━━━     80%",
        "10.0.0.4:30000  refitting      48/64  120k     2,310   mixed  ━━━━━━━━━━━     80%",
    ]


@pytest.mark.parametrize(("width", "engines"), [(40, 1), (40, 100), (200, 0), (200, 100)])
def test_a_frame_fits_the_width_and_has_few_rows(width: int, engines: int):
    rows = tuple(row(f"http://10.0.{i}.1:30000", busy=i / 100) for i in range(engines))
    lines = drawn(replace(FAULTY, engines=rows), width).splitlines()
    assert max(len(line) for line in lines) <= width
    if width == 200:
        assert len(lines) < 40


def test_of_many_engines_the_lost_and_the_least_busy_are_shown():
    rows = [row(f"sim-{i}", busy=0.5 + i / 1_000) for i in range(100)]
    rows[70] = row("sim-70", state="lost", busy=0.9)
    rows[90] = row("sim-90", busy=0.1)
    text = drawn(replace(SNAPSHOT, engines=tuple(rows)), 100)
    assert "sim-70" in text
    assert "sim-90" in text
    assert "sim-60" not in text
    assert "and 76 more" in text


def test_faults_are_counted_and_the_latest_is_named():
    assert words(
        "faults 24 rollouts dropped (20 stale, 4 failed); 1 engine lost, 1 still out; 12 retries;"
        " 0:31 ago: 10.0.0.2:30000 lost: it does not answer"
    ) in words(drawn(FAULTY, 100))


def test_a_gateway_shows_no_batches_and_a_note_is_next_to_the_run():
    facts = RunFacts(title="gateway", batches=0, batch_groups=1, modelled=True)
    lines = drawn(replace(SNAPSHOT, facts=facts, note="reading, 43%"), 100).splitlines()
    assert words(lines[0]) == "gateway 12:34 elapsed (modelled) reading, 43%"
    assert lines[1].startswith("in flight")


def test_unknown_figures_are_left_out():
    text = drawn(replace(SNAPSHOT, left=None, idle=(), recent=None, in_flight={}), 100)
    assert "left" not in text
    assert "speed       152k tokens/s, policy v12 " in text
    assert "in flight   0 rollouts " in text


@pytest.mark.parametrize("height", [3, 40])
def test_a_terminal_of_any_height_keeps_the_last_frame(height: int):
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=height)
    with LiveView(console, SNAPSHOT.facts, LiveFigures(clock=None)):
        pass
    assert isinstance(console.file, io.StringIO)
    assert "0 of 40 delivered" in console.file.getvalue()


def test_an_output_of_ascii_gets_the_last_frame_once():
    output = io.BytesIO()
    console = Console(file=io.TextIOWrapper(output, encoding="ascii"), width=60)
    with LiveView(console, SNAPSHOT.facts, LiveFigures(clock=None)):
        pass
    console.print(frame(FAULTY, width=60))
    console.file.flush()
    assert output.getvalue().count(b"0 of 40 delivered") == 1


def test_an_error_of_the_view_does_not_end_the_run(caplog: pytest.LogCaptureFixture):
    console = Console(file=io.StringIO(), force_terminal=True)
    view = LiveView(console, SNAPSHOT.facts, LiveFigures(clock=None))
    view.model.facts = None  # type: ignore[assignment]
    with view:
        pass
    assert "the live view could not be drawn; the run continues" in caplog.text


def test_every_figure_with_a_name_for_the_view_is_shown():
    forecast = ForecastFigures(
        seconds=10.0,
        seconds_forecast=9.0,
        efficiency=0.68,
        efficiency_forecast=0.71,
        off_policy_token_share=0.5,
        off_policy_token_share_forecast=0.5,
    )
    named = {name: figure for name, figure in figures_in(Figures).items() if figure.live}
    values = dict.fromkeys(named.keys() - {"efficiency", "staleness_mean", "staleness_max"}, 0.19)
    texts = figure_texts(replace(RECENT, forecast=forecast, **values))  # type: ignore[arg-type]
    assert [text.rpartition(" ")[0] for text in texts[:-1]] == [f.live for f in named.values()]
    assert "length distance 19%" in texts
    assert texts[-1] == "forecast 71%, outcome 68%"


def test_numbers_become_words():
    assert [clock_time(61), clock_time(3_599.9), clock_time(90_061)] == [
        "1:01",
        "59:59",
        "25:01:01",
    ]
    assert [percent(0.004), percent(0.5)] == ["<1%", "50%"]
    assert [short_number(9_999.6), short_number(999_600)] == ["10k", "1.0M"]
    assert plural(2_000, "engine") == "2,000 engines"
