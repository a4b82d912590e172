"""How many steps the state machines made, printed at the end of a run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

RecordSteps = Callable[[str, int], None]

_steps: dict[str, int] = {}


@pytest.fixture
def record_steps() -> RecordSteps:
    """Takes the name of a machine and its steps."""
    return _steps.__setitem__


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, steps in _steps.items():
        terminalreporter.write_line(f"{name}: {steps:,} steps, the invariants checked after each")
