"""Prints at the end of a test run how many steps the state machines made."""

from __future__ import annotations

from collections.abc import Callable

import pytest

RecordSteps = Callable[[str, int], None]
STEPS = "steps of "


@pytest.fixture
def record_steps(record_property: Callable[[str, object], None]) -> RecordSteps:
    """A function that records the name of a machine and its number of steps."""
    return lambda name, steps: record_property(STEPS + name, steps)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed"):
        for name, steps in report.user_properties:
            if name.startswith(STEPS):
                machine = name.removeprefix(STEPS)
                terminalreporter.write_line(
                    f"{machine}: {steps:,} steps, the invariants checked after each"
                )
