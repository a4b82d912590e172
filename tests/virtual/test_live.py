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
from aprilsched.observe.live.live_model import LiveModel, RunFacts, Snapshot
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
    """Compares a model with the scheduler itself, at some chunks of tokens. No decision follows a
    chunk, so everything that the scheduler has done was told before."""

    def __init__(self, model: LiveModel, received: Sequence[Listener]) -> None:
        self.in_flight: InFlight | None = None
        self.seen: list[Snapshot] = []
        self._model = model
        self._told = received
        self._random = random.Random(0)

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for listener in self._told:
            listener.on_facts(facts, now)
        if isinstance(facts[0], TokensReceived) and self._random.random() < 0.05:
            self._compare()

    def _compare(self) -> None:
        assert self.in_flight is not None
        seen = self._model.snapshot()
        self.seen.append(seen)
        for row in seen.engines:
            assert row.running + row.queued == self.in_flight.open[row.name]
        assert sum(row.kv_tokens for row in seen.engines) == self.in_flight.held_on.total()
        assert sum(seen.in_flight.values()) == self.in_flight.generating
        # What is offered waits for the trainer as well.
        offered = sum(group.offered for group in self.in_flight.groups.values())
        assert seen.ready == len(self.in_flight.ready) + offered


@pytest.mark.parametrize("pace", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("straggler", ["retract", "in_place", "abort"])
async def test_the_model_says_what_the_scheduler_holds(pace: Pace, straggler: StragglerRule):
    workload = LongTailWorkload(seed=3, group_size=4, median=60, cap=600)
    config = SchedulerConfig(
        batch_groups=4, group_size=4, over_provision=2.0, pace=pace, straggler=straggler
    )
    meter = BatchMeter(trainer_waits=pace == "synchronous")
    figures = LiveFigures(meter=meter, batch_groups=4, clock=None)
    model = LiveModel(RunFacts(title="run", batches=8, batch_groups=4), figures)
    watching = Watching(model, [meter, figures, model])
    fleet = SimFleet(3, stream_interval=8)
    scheduler = RolloutScheduler(fleet, workload, config=config, listeners=[watching])
    async with scheduler as rollouts:
        watching.in_flight = rollouts.state.in_flight
        for _ in range(8):
            (await rollouts.next_batch()).acknowledge()
            await rollouts.update_weights(SimPublisher())
    assert len(watching.seen) > 20
    last = model.snapshot()
    assert (last.batches, last.version, last.left) == (8, 8, 0.0)
    assert (last.dropped, last.engines_lost, last.fault) == ({}, 0, "")
    phases = {phase for seen in watching.seen for phase in seen.in_flight}
    assert {"decoding", "prefilling", "decoding, carried"} <= phases
    assert 0 < last.utilization <= 1
    shares = [share for _, share in last.idle]
    assert shares == sorted(shares, reverse=True)
    assert last.utilization + sum(shares) == pytest.approx(1.0)


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


def test_a_dumb_terminal_gets_a_line_per_batch_and_the_last_frame(tmp_path: Path):
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


def test_simulate_has_one_line_a_policy(tmp_path: Path):
    arguments = ["simulate", "--policy", "sync,april", "--batch-groups", "4", "--batches", "8"]
    with on_a_terminal(*arguments, "--json", "--out", str(tmp_path / "run")) as terminal:
        assert terminal.end() == 0
    for policy in ("sync", "april"):
        assert re.search(rf"{policy} .* 8 of 8 batches, \S+ tokens/s", terminal.text)
    assert "this batch" not in terminal.text
