"""Tests what the live view shows of a snapshot, on terminals of every size."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some
from rich.console import Console
from rich.text import Text

from aprilsched.telemetry.figures import Figures, ForecastFigures, figures_in
from aprilsched.telemetry.live.live_model import EngineRow, Faults, RunFacts, Snapshot
from aprilsched.telemetry.live.view import (
    LiveView,
    clock_time,
    divided,
    frame,
    one_line,
    percent,
    plural,
    thousands,
)
from aprilsched.telemetry.live_figures import LiveFigures


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


FAULTS = Faults(
    dropped={"stale": 20, "failed": 4},
    engines_lost=1,
    retries=12,
    latest="http://10.0.0.2:30000 lost: it answers no more",
    ago=31.0,
)
RECENT = Figures(efficiency=0.71, staleness_mean=0.41, staleness_max=2)
SNAPSHOT = Snapshot(
    facts=RunFacts(title="run", where="runs/x", batches=40, batch_groups=64),
    elapsed=754.0,
    left=1_202.0,
    batches=12,
    version=12,
    ready=16,
    in_flight={"decoding": 300, "straggler": 60, "re-prefilling": 20, "scoring": 20},
    carried=70,
    utilization=0.63,
    columns=(0.0, 0.25, 0.5, 0.75, 1.0),
    idle=(("tail", 0.21), ("refit", 0.09), ("re_prefill", 0.05), ("pause", 0.02)),
    tokens_per_s=152_310.0,
    recent=RECENT,
    faults=Faults(),
    engines=(
        row("http://10.0.0.1:30000"),
        row("http://10.0.0.2:30000", state="lost", running=0, kv_tokens=0, busy=0.0),
        row("http://10.0.0.3:30000", queued=16, running=64, kv_tokens=230_000),
        row("http://10.0.0.4:30000", state="refitting", version=None, kv_pool=None),
    ),
)


def shown(snapshot: Snapshot, width: int, height: int = 40) -> list[str]:
    """The lines as a terminal of this size would have them."""
    console = Console(file=io.StringIO(), record=True, width=width, height=height)
    console.print(frame(snapshot, width=width, height=height))
    return console.export_text().rstrip("\n").split("\n")


def test_all_of_it_at_80_columns():
    assert shown(SNAPSHOT, 80) == [
        "run runs/x                                      12:34 elapsed · about 20:02 left",
        "batches    ━━━━━━━━━━━━━─────────────────────────────  12 of 40 delivered",
        "this batch ━━━━━━━━━━────────────────────────────────  16 of 64 groups ready",
        "in flight  ████████████████████████████████▓▓▓▓▓▓░░▪▪  400 rollouts",
        "           █ 300 decoding   ▓ 60 decoding, carried   ░ 20 re-prefilling",
        "           ▪ 20 scoring",
        "busy                                             ▂▄▆█  63% so far (0:25 shown)",
        "idle       21% tail of the batch · 9% new weights · 5% re-prefill",
        "speed      152k tokens/s · policy v12 · efficiency 71% · staleness 0.41 · max 2",
        "faults     none",
        "",
        "engine         state         running       KV pool tokens/s policy  busy (1 min)",
        "10.0.0.1:30000 generating      48/64 ━━━━━───  60%    2,310    v12 ━━━━━━━── 80%",
        "10.0.0.2:30000 lost             0/64 ────────   0%    2,310    v12 ─────────  0%",
        "10.0.0.3:30000 generating   64+16/64 ━━━━━━━━ 115%    2,310    v12 ━━━━━━━── 80%",
        "10.0.0.4:30000 refitting       48/64          120k    2,310  mixed ━━━━━━━── 80%",
    ]


def test_a_gateway_shows_no_batches():
    gateway = replace(SNAPSHOT, facts=RunFacts(title="gateway", batches=0, batch_groups=1))
    whole, of_a_run = shown(gateway, 80), shown(SNAPSHOT, 80)
    assert whole[1:] == of_a_run[3:]
    assert len(shown(gateway, 80, height=8)) == 8


def test_a_narrow_terminal_has_figures_instead_of_bars():
    lines = shown(SNAPSHOT, 60)
    assert lines[0] == "run runs/x                  12:34 elapsed · about 20:02 left"
    assert lines[1] == "batches    ━━━━━━━───────────────  12 of 40 delivered"
    assert lines[4:6] == [
        "           █ 300 decoding   ▓ 60 decoding, carried",
        "           ░ 20 re-prefilling   ▪ 20 scoring",
    ]
    assert lines[-5:] == [
        "engine      state         running    KV tokens/s policy busy",
        "~.0.1:30000 generating      48/64   60%    2,310    v12  80%",
        "~.0.2:30000 lost             0/64    0%    2,310    v12   0%",
        "~.0.3:30000 generating   64+16/64  115%    2,310    v12  80%",
        "~.0.4:30000 refitting       48/64  120k    2,310  mixed  80%",
    ]


def test_faults_are_counted_and_the_last_one_is_named():
    lines = shown(replace(SNAPSHOT, faults=FAULTS), 100)
    assert lines[8:10] == [
        "faults     24 rollouts dropped (20 stale, 4 failed) · 1 engine lost, 1 still out"
        " · 12 retries",
        "           0:31 ago: http://10.0.0.2:30000 lost: it answers no more",
    ]
    only = replace(SNAPSHOT, faults=Faults(latest="sim-0 is slow", ago=5.0))
    assert shown(only, 100)[8] == "faults     0:05 ago: sim-0 is slow"


def test_what_is_not_known_is_left_out():
    begun = replace(SNAPSHOT, left=None, columns=(), idle=(), recent=None, in_flight={})
    lines = shown(begun, 80)
    assert lines[0].endswith("12:34 elapsed")
    assert lines[3].split() == ["in", "flight", "0", "rollouts"]
    assert lines[4].strip() == ""
    assert lines[5].split() == ["busy", "63%", "so", "far"]
    assert lines[6] == "idle       nothing so far"
    assert lines[7] == "speed      152k tokens/s · policy v12"


def test_modelled_time_is_called_so_and_a_note_stands_beside_the_run():
    facts = replace(SNAPSHOT.facts, modelled=True)
    assert shown(replace(SNAPSHOT, facts=facts), 100)[0].endswith(
        "   12:34 elapsed · about 20:02 left (modelled)"
    )
    top = shown(replace(SNAPSHOT, facts=facts, note="reading, 43%"), 100)[0]
    assert top.startswith("run runs/x · reading, 43%   ")
    assert top.endswith("   12:34 elapsed (modelled)")


def test_a_long_path_gives_way_to_what_is_noted():
    facts = replace(SNAPSHOT.facts, where="/data/experiments/long-tails/20260801T101500Z-0")
    assert shown(replace(SNAPSHOT, facts=facts, note="no new lines for 1:12"), 60)[0] == (
        "run ~260801T101500Z-0 · no new lines for 1:12  12:34 elapsed"
    )


def test_a_terminal_without_blocks_has_one_line():
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=30)
    view = LiveView(console, SNAPSHOT.facts, LiveFigures())
    line = view.frame().plain
    assert line.isascii()
    assert line == "run 1/40 | groups 0/64 | 0 in~"


def test_without_colours_nothing_is_coloured(monkeypatch: pytest.MonkeyPatch):
    def drawn() -> str:
        console = Console(
            file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80
        )
        with console.capture() as capture:
            console.print(frame(SNAPSHOT, width=80, height=40))
        return capture.get()

    coloured = "\x1b[32m"  # green
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert coloured in drawn()
    monkeypatch.setenv("NO_COLOR", "1")
    assert coloured not in drawn()
    assert Text.from_ansi(drawn()).plain.split("\n")[1].startswith("batches    ━━━")


def test_one_line():
    assert one_line(SNAPSHOT, width=100).plain == (
        "run 13/40 | groups 16/64 | 400 in flight (70 carried) | 152k tokens/s | v12 | stale 0.41"
    )
    assert one_line(SNAPSHOT, width=30).plain == "run 13/40 | groups 16/64 | 40~"
    assert frame(SNAPSHOT, width=100, height=3).plain == one_line(SNAPSHOT, width=100).plain


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
@pytest.mark.parametrize("height", [1, 2, 3, 4, 5, 8, 11, 14, 24, 60])
@pytest.mark.parametrize("engines", [0, 1, 4, 100])
def test_it_always_fits(width: int, height: int, engines: int):
    rows = tuple(row(f"http://10.0.{i}.1:30000", busy=i / 100) for i in range(engines))
    snapshot = replace(SNAPSHOT, engines=rows, faults=FAULTS, note="no new lines for 1:12")
    lines = frame(snapshot, width=width, height=height).plain.split("\n")
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_of_many_engines_the_worst_and_the_fullest_are_shown():
    rows = tuple(row(f"sim-{i}", busy=0.5, kv_tokens=1_000 * (i % 50)) for i in range(100))
    changed = list(rows)
    changed[7] = row("sim-7", state="lost", busy=0.5, tokens_per_s=0.0)
    changed[23] = row("sim-23", busy=0.1)
    changed[61] = row("sim-61", busy=0.5, kv_tokens=199_000)
    lines = shown(replace(SNAPSHOT, engines=tuple(changed)), 80, 15)
    assert [line.split()[0] for line in lines[-5:-1]] == ["engine", "sim-7", "sim-23", "sim-61"]
    assert lines[-1] == "and 97 more: 97 generating · 224k tokens/s · 50% busy"


def test_lines_give_way_to_engines():
    lines = shown(SNAPSHOT, 80, 9)
    assert [line.split()[0] for line in lines[:5]] == ["run", "batches", "in", "busy", "engine"]
    assert len(lines) == 9
    broken = shown(replace(SNAPSHOT, faults=FAULTS), 80, 9)
    assert broken[4].startswith("faults     24 rollouts dropped")
    assert broken[-1] == "and 3 more: 2 generating, 1 refitting · 6,930 tokens/s · 80% busy"


def test_every_figure_with_a_name_for_the_view_is_shown_where_there_is_room() -> None:
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
    recent = replace(RECENT, forecast=forecast, **values)  # type: ignore[arg-type]
    snapshot = replace(SNAPSHOT, recent=recent)
    line = next(line for line in shown(snapshot, 300) if line.startswith("speed"))
    texts = line.partition(" (")[0].split(" · ")[2:]
    assert [text.rpartition(" ")[0] for text in texts[:-1]] == [f.live for f in named.values()]
    assert "length distance 19%" in texts
    assert texts[-1] == "forecast 71%, outcome 68%"
    assert shown(snapshot, 80) == shown(SNAPSHOT, 80), "it pushes nothing off"


# --- bars and words ------------------------------------------------------------------------------


@given(some.lists(some.integers(1, 10**6), min_size=1, max_size=8), some.integers(8, 200))
def test_a_divided_bar_is_as_wide_as_asked(counts: list[int], width: int):
    cells = divided(dict(enumerate(counts)), width)
    assert sum(cells.values()) == width
    assert len(cells) == len(counts)
    order = sorted(range(len(counts)), key=lambda part: counts[part])
    assert all(cells[a] <= cells[b] + 1 for a, b in pairwise(order))


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (clock_time(61), "1:01"),
        (clock_time(3_599.9), "59:59"),
        (clock_time(3_600), "1:00:00"),
        (clock_time(90_061), "25:01:01"),
        (percent(0.004), "<1%"),
        (thousands(9_999.6), "10k"),
        (thousands(999_600), "1.0M"),
        (plural(2_000, "engine"), "2,000 engines"),
    ],
)
def test_words(said: str, wanted: str):
    assert said == wanted
