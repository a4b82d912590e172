"""Tests the live view of real runs, on a terminal and without one."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from aprilsched.config import Pace, SchedulerConfig
from aprilsched.kernel.core.messages.facts import Fact, TokensReceived
from aprilsched.kernel.core.policies.straggler import StragglerRule
from aprilsched.kernel.core.state.in_flight import InFlight
from aprilsched.kernel.shell import RolloutScheduler
from aprilsched.kernel.shell.listener import Listener
from aprilsched.observe.figures.batch_figures import BatchMeter
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.live import phases
from aprilsched.simulation.engine import SimFleet, SimPublisher
from aprilsched.simulation.workload import LongTailWorkload
from tests.support.terminal import on_a_terminal

pytestmark = pytest.mark.virtual_time

SMALL = [
    "--batch-groups", "4", "--group-size", "4", "--over-provision", "2", "--median", "60",
    "--cap", "600", "--sim.engines", "2",
]  # fmt: skip
ENDLESS = ["run", *SMALL, "--batches", "1000000", "--no-report"]
COLOUR = re.compile(r"\x1b\[[0-9;]*3[1-7]m")
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"
"""The cursor."""


class Watching:
    """Compares the figures with the scheduler at some chunks of tokens. No decision follows a
    chunk, so the figures have received everything that the scheduler has done."""

    def __init__(self, figures: LiveFigures, listeners: Sequence[Listener]) -> None:
        self.in_flight: InFlight | None = None
        self.phases: set[str] = set()
        self.compared = 0
        self._figures = figures
        self._listeners = listeners
        self._random = random.Random(0)

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for listener in self._listeners:
            listener.on_facts(facts, now)
        if isinstance(facts[0], TokensReceived) and self._random.random() < 0.05:
            self._compare()

    def _compare(self) -> None:
        assert self.in_flight is not None
        self.compared += 1
        state, found = self._figures.state, phases(self._figures)
        self.phases |= found.keys()
        for engine in state.engines.values():
            assert engine.in_flight == self.in_flight.open[engine.name]
        contexts = sum(engine.context_tokens for engine in state.engines.values())
        assert contexts == self.in_flight.held_on.total()
        assert sum(found.values()) == len(self.in_flight.rollouts)
        # Offered groups also wait for the trainer.
        offered = sum(group.offered for group in self.in_flight.groups.values())
        assert state.units_ready == len(self.in_flight.ready) + offered


@pytest.mark.parametrize("pace", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("straggler", ["retract", "in_place", "abort"])
async def test_the_view_shows_what_the_scheduler_holds(pace: Pace, straggler: StragglerRule):
    workload = LongTailWorkload(seed=3, group_size=4, median=60, cap=600)
    config = SchedulerConfig(
        batch_groups=4, group_size=4, over_provision=2.0, pace=pace, straggler=straggler
    )
    meter = BatchMeter()
    figures = LiveFigures(meter=meter, batch_units=4, clock=None)
    watching = Watching(figures, [meter, figures])
    fleet = SimFleet(3, stream_interval=8)
    scheduler = RolloutScheduler(fleet, workload, config=config, listeners=[watching])
    async with scheduler as rollouts:
        watching.in_flight = rollouts.state.in_flight
        for _ in range(8):
            (await rollouts.next_batch()).acknowledge()
            await rollouts.update_weights(SimPublisher())
    assert watching.compared > 20
    assert {"decoding", "prefilling", "decoding, carried"} <= watching.phases
    assert (figures.state.batches, figures.state.version) == (8, 8)


async def test_rollouts_that_a_schedule_defers_are_held_back():
    config = SchedulerConfig(batch_groups=4, group_size=4, over_provision=2.0, refill="buckets")
    figures, seen = LiveFigures(clock=None), set[str]()

    class Looking:
        def on_facts(self, facts: Sequence[Fact], now: float) -> None:
            if isinstance(facts[0], TokensReceived):
                seen.update(phases(figures))

    workload = LongTailWorkload(seed=3, group_size=4, median=60, cap=600)
    fleet = SimFleet(1, stream_interval=8)
    async with RolloutScheduler(
        fleet, workload, config=config, listeners=[figures, Looking()]
    ) as rollouts:
        for _ in range(4):
            (await rollouts.next_batch()).acknowledge()
    assert "held back" in seen
    assert "waiting for an engine" not in seen


# --- on a terminal -----------------------------------------------------------------------------


def test_a_view_is_drawn_during_the_run_and_its_last_frame_stays(tmp_path: Path):
    out = tmp_path / "run"
    arguments = ["run", *SMALL, "--batches", "80", "--out", str(out)]
    with on_a_terminal(*arguments) as terminal:
        terminal.wait_for("in flight")
        assert terminal.end() == 0
    assert COLOUR.search(terminal.raw)
    assert terminal.raw.count(HIDDEN) == terminal.raw.count(SHOWN) == 1
    for label in ("batches", "this batch", "in flight", "engines", "speed", "faults"):
        assert f"\n{label}" in terminal.text
    assert "80 of 80 delivered" in terminal.text
    assert "sim-1" in terminal.text
    assert "delivered tokens/s" in terminal.raw.rpartition(SHOWN)[2]
    assert json.loads((out / "summary.json").read_text())["batches"] == 80


def test_ctrl_c_leaves_the_terminal_as_it_was(tmp_path: Path):
    with on_a_terminal(*ENDLESS, "--out", str(tmp_path / "run")) as terminal:
        terminal.wait_for(" decoding")
        terminal.type(b"\x03")
        assert terminal.end() == 130
    assert terminal.raw.count(HIDDEN) == terminal.raw.count(SHOWN) == 1
    assert "interrupted run" in terminal.raw.rpartition(SHOWN)[2]
    assert "Traceback" not in terminal.raw


def test_a_dumb_terminal_gets_batch_lines_and_the_last_frame(tmp_path: Path):
    arguments = ["run", *SMALL, "--batches", "3", "--out", str(tmp_path / "run")]
    with on_a_terminal(*arguments, environment={"TERM": "dumb"}) as terminal:
        assert terminal.end() == 0
    assert re.findall(r"  batch (\d): .* tokens/s, ", terminal.text) == ["1", "2", "3"]
    assert terminal.text.count("3 of 3 delivered") == 1
    assert "\x1b[" not in terminal.raw


def test_quiet_is_quiet_on_a_terminal(tmp_path: Path):
    arguments = ["run", *SMALL, "--batches", "3", "--quiet", "--out", str(tmp_path / "run")]
    with on_a_terminal(*arguments) as terminal:
        assert terminal.end() == 0
    assert terminal.raw == ""


def test_simulate_has_one_line_of_progress(tmp_path: Path):
    arguments = ["simulate", "--policy", "sync,april", "--batch-groups", "4", "--batches", "8"]
    with on_a_terminal(*arguments, "--json", "--out", str(tmp_path / "run")) as terminal:
        assert terminal.end() == 0
    assert re.search(r"april .* 100%", terminal.text)
    assert "this batch" not in terminal.text
