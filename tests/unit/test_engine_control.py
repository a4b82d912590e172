"""Tests the modes of an engine: the core and its documentation agree with the table of legal
changes."""

from __future__ import annotations

from pathlib import Path

import pytest

import aprilsched.kernel.core
from aprilsched.errors import InvariantViolation
from aprilsched.kernel.core.messages.events import EngineInfo
from aprilsched.kernel.core.messages.facts import EngineModeChanged, Fact
from aprilsched.kernel.core.state.engine_control import CHANGES, EngineControl, FleetControl, Mode
from tests.support.facts import ABLE
from tests.support.table import each_row

README = Path(aprilsched.kernel.core.__file__).with_name("README.md")


def an_engine(mode: Mode, received: list[Fact]) -> tuple[FleetControl, EngineControl]:
    fleet = FleetControl(pause_mode="retract", flushes=True, tell=received.append)
    control = fleet.join(EngineInfo(name="a", version=0, able=ABLE), standby=False, now=0.0)
    control.mode = mode
    return fleet, control


@each_row("start", Mode)
@each_row("finish", Mode)
def test_an_engine_enters_a_mode_only_if_the_table_has_the_change(start: Mode, finish: Mode):
    received: list[Fact] = []
    fleet, control = an_engine(start, received)
    if finish in CHANGES[start]:
        fleet.enter(control, finish)
        assert control.mode is finish
        assert received == [EngineModeChanged(engine="a", start=start.value, finish=finish.value)]
    else:
        with pytest.raises(InvariantViolation, match=f"engine a cannot go from {start} to"):
            fleet.enter(control, finish)
        assert control.mode is start
        assert received == [], "a refused change makes no fact"


def test_every_mode_leads_back_to_running():
    modes = {Mode.RUNNING}
    while before := len(modes):
        modes |= {mode for mode, after in CHANGES.items() if after & modes}
        if len(modes) == before:
            break
    assert modes == set(Mode)


def test_the_readme_shows_the_table():
    shown = {
        Mode(start.strip()): frozenset(Mode(mode.strip()) for mode in after.split(","))
        for line in README.read_text().splitlines()
        if "  ->  " in line
        for start, after in [line.split("->")]
    }
    assert shown == CHANGES
