"""Tests the help of a command that fits on one screen."""

from __future__ import annotations

import pytest

from aprilsched.__main__ import main
from aprilsched.cli import run, simulate

COMMANDS = {"run": run.EVERYDAY, "simulate": simulate.EVERYDAY}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_everyday_flags_fit_on_one_screen(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert lines[-1] == f"aprilsched {command} --help-all lists every option."


@pytest.mark.parametrize("command", COMMANDS)
def test_the_whole_help_has_the_everyday_flags_and_others(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help-all"])
    assert not ended.value.code
    found = {word for word in capsys.readouterr().out.split() if word.startswith("--")}
    everyday = {f"--{flag}" for group in COMMANDS[command].values() for flag in group}
    assert everyday < found
