"""Tests the live view on facts of a run: its figures and tables, on several terminals."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.observe.figures.batch_figures import BatchMeter
from aprilsched.observe.figures.figures import Figures, ForecastFigures, figures_in
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.live import (
    LiveView,
    RunFacts,
    clock_time,
    figure_texts,
    percent,
    phases,
    plural,
    short_number,
)
from aprilsched.types import Batch, Group, Prompt
from tests.support import facts
from tests.support.facts import ABLE, changed

PROMPT = Prompt(input_ids=np.zeros(10, dtype=np.int32))
RUN = RunFacts(title="run", where="runs/x", batches=4, batch_units=1)


class Shown:
    """A live view, and the facts that it receives. Group g has the two rollouts 2g and 2g + 1, with
    requests of the same ids, on the first or the second engine."""

    def __init__(self, run: RunFacts = RUN, *, engines: tuple[str, ...] = ("a", "b")) -> None:
        meter = BatchMeter(bound=lambda prompts, lengths: 6.0)
        self.now = 100.0
        self.figures = LiveFigures(meter=meter, batch_units=1, clock=None)
        self.view = LiveView(Console(file=io.StringIO()), run, self.figures)
        self._engines = engines
        self._listeners = (meter, *self.view.listeners)
        able = replace(ABLE, kv_tokens=100, max_running_requests=1)
        infos = [ev.EngineInfo(name=e, version=0, able=able) for e in engines]
        opened = of.RunOpened(engines=tuple(infos), version=0, pace="asynchronous")
        self.add(opened, of.BatchRequested())

    def add(self, *recorded: Fact, after: float = 0.0) -> None:
        self.now += after
        for listener in self._listeners:
            listener.on_facts(recorded, self.now)

    def launch(self, group: int, *, sent: bool = False) -> None:
        self.add(facts.launched(group, 2 * group, 2 * group + 1, prompt_tokens=10))
        for request in (2 * group, 2 * group + 1) if sent else ():
            self.send(request)

    def send(self, request: int, *, attempt: int = 1, tokens: int = 10, engine: str = "") -> None:
        on = engine or self._engines[request % 2]
        self.add(facts.sent(request, request // 2, attempt=attempt, engine=on, tokens=tokens))

    def grow(self, request: int, tokens: int, *, after: float = 0.0) -> None:
        self.add(facts.received(request, tokens), after=after)

    def finish(self, *requests: int) -> None:
        for request in requests:
            self.add(*facts.ended(request, request // 2))

    def deliver(self, index: int, group: int, *, version: int = 0) -> None:
        rollouts = tuple(
            facts.response([0] * 5, rollout_id=i, group_id=group, prompt_ids=PROMPT.input_ids)
            for i in (2 * group, 2 * group + 1)
        )
        groups = (Group(group_id=group, prompt=PROMPT, rollouts=rollouts),)
        self.add(of.GroupAccepted(group_id=group))
        self.add(facts.delivered(Batch(index=index, version=version, units=groups)))

    @property
    def phases(self) -> dict[str, int]:
        return phases(self.figures)

    def lines(self, width: int = 100) -> list[str]:
        """The frame on a terminal of `width` columns."""
        console = self.view._console = Console(file=io.StringIO(), record=True, width=width)  # pyright: ignore[reportPrivateUsage]
        console.print(self.view.frame())
        return [line.rstrip() for line in console.export_text().splitlines()]

    def text(self, width: int = 100) -> str:
        return " ".join(" ".join(self.lines(width)).split())

    def engine(self, name: str) -> list[str]:
        """The cells of an engine: state, running, KV, tokens/s, policy and busy share."""
        return next(line.split()[1:] for line in self.lines() if line.startswith(f"{name} "))


def test_scoring_lasts_until_every_score_has_arrived():
    shown = Shown()
    shown.launch(0, sent=True)
    shown.finish(0, 1)
    shown.add(of.RewardRequested(group_id=0, rollout_id=0))
    shown.add(of.RewardRequested(group_id=0, rollout_id=1))
    shown.add(of.RolloutScored(rollout_id=0, group_id=0, reward=1.0))
    assert shown.phases == {"scoring": 1, "complete": 1}
    shown.add(of.RolloutScored(rollout_id=1, group_id=0, reward=0.0))
    shown.add(of.VerdictRequested(group_id=0))
    assert shown.phases == {"scoring": 2}
    assert "0 of 1 groups ready" in shown.text()
    shown.add(of.GroupAccepted(group_id=0))
    assert shown.phases == {"complete": 2}
    assert "1 of 1 groups ready" in shown.text()
    shown.add(facts.dropped(0, 0, 1, reason="reward_failed", cause="no\nmodel"))
    assert "2 rollouts dropped (2 reward_failed); 0:00 ago: dropped (reward_failed): no model" in (
        shown.text()
    )


def test_rollouts_that_a_batch_leaves_are_carried():
    shown = Shown()
    for group in (0, 1):
        shown.launch(group, sent=True)
        for request in (2 * group, 2 * group + 1):
            shown.grow(request, 5, after=1.0)
    shown.finish(0, 1)
    shown.deliver(0, 0)
    shown.launch(2)
    shown.send(4)
    shown.grow(4, 5)
    waiting = {"decoding": 1, "waiting for an engine": 1}
    assert shown.phases == {**waiting, "decoding, carried": 2}
    shown.add(*changed("b", "running", "pausing", pause="retract"))
    assert shown.phases == {**waiting, "decoding, carried": 1, "paused": 1}
    shown.add(*changed("b", "pausing", "paused", "continuing", "running"))
    assert shown.phases == {**waiting, "decoding, carried": 1, "re-prefilling": 1}
    shown.finish(2)
    assert "decoding, carried" not in shown.phases


def test_a_row_has_the_requests_and_the_contexts_of_its_engine():
    shown = Shown()
    shown.launch(0)
    shown.send(0)
    shown.send(1, engine="a")
    shown.grow(0, 7)
    shown.grow(1, 3)
    assert shown.engine("a")[:3] == ["generating", "1+1/1", "30%"]
    shown.add(of.AttemptEnded(request_id=0, outcome="interrupted"))
    shown.send(0, attempt=2, tokens=17, engine="b")
    assert [shown.engine(name)[2] for name in "ab"] == ["13%", "17%"]
    shown.add(*facts.lost("b", "it hangs", 0), after=1.0)
    assert shown.engine("b")[:3] == ["lost", "0/1", "0%"]
    shown.add(of.BatchRequested(), after=31.0)
    text = "1 engine lost, 1 still out; 0:31 ago: b lost; quarantined: it hangs"
    assert text in shown.text()


def test_rates_are_those_of_the_last_minute():
    shown = Shown()
    shown.launch(0)
    shown.send(0)
    for _ in range(200):
        shown.grow(0, 10, after=1.0)
    shown.finish(0)
    assert shown.engine("a")[3:] == ["10", "v0", "━━━━━━━━━━━━━━", "100%"]
    shown.add(of.BatchRequested(), after=30.0)
    assert shown.engine("a")[-1] in ("50%", "54%")
    assert shown.engine("b")[-1] == "0%"
    shown.add(of.BatchRequested(), after=1_000.0)
    assert shown.engine("a")[3] == "0"
    assert f"time so far: {200 / 1230 / 2:.0%} busy" in shown.text()


def test_batches_give_figures_and_the_time_that_is_left():
    shown = Shown()
    assert "left" not in shown.text()
    for index in range(2):
        shown.launch(index, sent=True)
        shown.finish(2 * index, 2 * index + 1)
        if index:
            shown.add(of.UpdateFinished(version=index))
        shown.add(of.BatchRequested(), after=10.0)
        shown.deliver(index, index, version=index)
    assert "0:20 elapsed, about 0:20 left runs/x" in shown.text()
    assert "2 of 4 delivered" in shown.text()
    assert "policy v1, efficiency 60%, staleness 0.50, max 1" in shown.text()
    shown.add(of.BatchRequested(), after=4.0)
    assert "about 0:16 left" in shown.text()
    shown.add(of.BatchRequested(), after=400.0)
    assert "about 0:10 left" in shown.text()
    shown.add(of.UpdateFinished(version=8, cause="no disk"))
    assert "ago: the update to version 8 failed: no disk" in shown.text()
    shown.deliver(1, 1, version=1)
    assert "2 of 4 delivered" in shown.text()


def test_a_resumed_run_has_what_was_saved():
    shown = Shown()
    shown.launch(0)
    shown.send(0)
    shown.add(facts.opened("a", resumed=True))
    assert shown.phases == {}
    lengths = of.RestoredLengths(tokens=(5, 9), sampled=(5, 9), finished=(False, True))
    shown.add(of.GroupLaunched(group_id=0, rollout_ids=(0, 1), prompt_tokens=10, restored=lengths))
    assert shown.phases == {"held back": 1, "complete": 1}
    shown.view.start(shown.figures.counters, shown.figures.ledger, batches=3)
    assert "3 of 4 delivered" in shown.text()


def test_episodes_use_tools_between_turns():
    shown = Shown()
    shown.launch(0)
    shown.add(of.EpisodeStarted(rollout_id=0), of.EpisodeStarted(rollout_id=1))
    assert shown.phases == {"using tools": 2}
    shown.add(of.TurnBegun(rollout_id=0, prompt_tokens=10))
    shown.send(0)
    shown.grow(0, 3, after=1.0)
    assert shown.phases == {"decoding": 1, "using tools": 1}
    shown.add(of.AttemptEnded(request_id=0, outcome="finished"))
    shown.add(of.TurnEnded(rollout_id=0, tokens=3, finish_reason="stop"))
    assert shown.phases == {"using tools": 2}


def test_a_run_is_shown_as_tables():
    shown = Shown(engines=("http://10.0.0.1:30000", "b"))
    shown.launch(0, sent=True)
    shown.grow(0, 5, after=2.0)
    lines = shown.lines(88)
    assert lines[0] == "run         0:02 elapsed  runs/x"
    assert lines[1].split() == ["batches", "0", "of", "4", "delivered"]
    assert lines[3:] == [
        "in flight   2 rollouts: 1 decoding; 1 prefilling",
        "engines     2 generating; time so far: 40% busy, 60% queued or reading prompts",
        "speed       2 tokens/s, policy v0",
        "faults      none",
        "",
        "engine          state       running   KV  tokens/s  policy  busy (1 min)",
        "10.0.0.1:30000  generating      1/1  15%         2      v0  ━━━━━━━━━━━     80%",
        "b               generating      1/1  10%         0      v0                   0%",
    ]


@pytest.mark.parametrize(("width", "engines"), [(40, 1), (40, 100), (200, 100)])
def test_a_frame_fits_the_width_and_has_few_rows(width: int, engines: int):
    names = [f"http://10.0.{i}.1:30000" for i in range(engines)]
    shown = Shown(engines=tuple(names))
    if engines == 100:
        shown.add(*facts.lost(names[70], "it hangs"))
    lines = shown.lines(width)
    assert max(map(len, lines)) <= width
    if width == 200:
        assert len(lines) < 40
        assert ["10.0.70.1:30000", "lost"] in [line.split()[:2] for line in lines]
        assert lines[-1] == "and 76 more, which are busier"


def test_a_gateway_shows_no_batches_and_a_note_is_next_to_the_run():
    shown = Shown(RunFacts(title="gateway", batches=0, batch_units=1, modelled=True))
    shown.view.note = "reading, 43%"
    lines = shown.lines()
    assert " ".join(lines[0].split()) == "gateway 0:00 elapsed (modelled) reading, 43%"
    assert lines[1] == "in flight  0 rollouts"


@pytest.mark.parametrize("height", [3, 40])
def test_a_terminal_of_any_height_keeps_the_last_frame(height: int):
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=height)
    with LiveView(console, RUN, LiveFigures(clock=None)):
        pass
    assert isinstance(console.file, io.StringIO)
    assert "0 of 4 delivered" in console.file.getvalue()


def test_an_output_of_ascii_gets_the_last_frame_once():
    output = io.BytesIO()
    console = Console(file=io.TextIOWrapper(output, encoding="ascii"), width=60)
    with LiveView(console, RUN, LiveFigures(clock=None)):
        pass
    console.file.flush()
    assert output.getvalue().count(b"0 of 4 delivered") == 1


def test_an_error_of_the_view_does_not_end_the_run(caplog: pytest.LogCaptureFixture):
    console = Console(file=io.StringIO(), force_terminal=True)
    view = LiveView(console, RUN, LiveFigures(clock=None))
    view.facts = None  # type: ignore[assignment]
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
    values = dict.fromkeys(named, 0.19)
    texts = figure_texts(replace(Figures(forecast=forecast), **values))  # type: ignore[arg-type]
    assert [text.rpartition(" ")[0] for text in texts[:-1]] == [f.live for f in named.values()]
    assert "length distance 19%" in texts
    assert texts[-1] == "forecast 71%, outcome 68%"


def test_numbers_become_words():
    assert [clock_time(61), clock_time(90_061)] == ["1:01", "25:01:01"]
    assert [percent(0.004), percent(0.5)] == ["<1%", "50%"]
    assert [short_number(9_999.6), short_number(999_600)] == ["10k", "1.0M"]
    assert plural(2_000, "engine") == "2,000 engines"
