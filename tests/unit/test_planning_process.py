"""Tests choices of schedules that are made in a process of their own."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from aprilsched.config import SchedulerConfig
from aprilsched.kernel.core.messages.commands import Plan
from aprilsched.kernel.core.messages.events import Event, Planned
from aprilsched.kernel.core.policies.schedule import Schedule
from aprilsched.kernel.core.policies.wave import Wave
from aprilsched.kernel.shell import planning
from aprilsched.kernel.shell.planning import Planning, PlanningFailed, plan_in_process
from aprilsched.kernel.shell.tasks import Shell, Tasks
from aprilsched.planning import Planner
from tests.support.planners import Broken, Dying, Exiting, Hanging, Telling, Unreadable
from tests.unit.test_planning import plan

ROOT = Path(__file__).resolve().parents[2]
CONFIG = SchedulerConfig(batch_groups=16, group_size=4, over_provision="auto")
LONG_S = 300.0


def command() -> Plan:
    current = Schedule(over_provision=1.5, refill=Wave())
    return structs.replace(plan(current), ended=plan(current).ended[:40])


# --- what it gives -------------------------------------------------------------------------------


async def test_the_choice_is_the_one_of_this_process() -> None:
    planner = Planner()
    planner.model = replace(planner.model, t0=2 * planner.model.t0)
    assert await plan_in_process(planner, command(), CONFIG) == planner.plan(command(), CONFIG)


async def test_its_process_is_another_one_of_low_priority_without_heavy_imports(
    capfd: pytest.CaptureFixture[str],
) -> None:
    schedule = await plan_in_process(Telling(), command(), CONFIG)
    pid, nice, own_group, *heavy = schedule.why.split(maxsplit=3)
    assert int(pid) != os.getpid()
    assert int(nice) == min(19, os.nice(0) + 5)
    assert own_group == "True", "so that Ctrl-C is for the trainer"
    assert heavy == ["[]"]
    captured = capfd.readouterr()
    assert len(captured.err) >= 100_000, "what it prints is output"


# --- it fails ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planner", "shown"),
    [
        (Exiting(), r"SystemExit\(7\)"),
        (Dying(), "its process ended with exit code 3 and without an answer"),
    ],
    ids=["exits", "dies"],
)
async def test_a_failure_there_is_one_here(planner: Planner, shown: str) -> None:
    with pytest.raises(PlanningFailed, match=shown):
        await plan_in_process(planner, command(), CONFIG)


async def test_a_failure_there_names_its_place(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="aprilsched")
    (planned,) = await planned_by(Broken())
    assert planned == Planned(schedule=None, cause="ArithmeticError('no such number')")
    assert "planners.py" in caplog.text


async def test_one_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(planning, "LIMIT_S", 0.01)
    with pytest.raises(PlanningFailed, match=r"its process had no answer after 0.01 s"):
        await plan_in_process(Hanging(tmp_path / "pid"), command(), CONFIG)


async def planned_by(planner: Planner) -> list[Planned]:
    """What the shell reports to the core about one choice."""
    planned: list[Planned] = []
    came = asyncio.Event()

    def feed(event: Event) -> None:
        assert isinstance(event, Planned)
        planned.append(event)
        came.set()

    shell = Shell(config=CONFIG, engines={}, feed=feed, tasks=Tasks())
    part = Planning(shell, planner)
    async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as group:
        shell.tasks.run_in(group)
        part.plan(command())
        await came.wait()
    return planned


class _Lambda(Planner):
    """Pickle does not take its function."""

    def __init__(self) -> None:
        super().__init__()
        self.why = lambda: str(os.getpid())

    def plan(self, command: Plan, config: SchedulerConfig) -> Schedule:
        return replace(command.current, why=self.why())


@pytest.mark.parametrize("kind", [_Lambda, Unreadable])
async def test_a_planner_that_no_other_process_can_have_is_reported(
    kind: type[Planner], caplog: pytest.LogCaptureFixture
) -> None:
    (planned,) = await planned_by(kind())
    assert planned.schedule is None
    assert "in a module" in planned.cause
    assert "the current one stays in use" in caplog.text


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/true"])
async def test_the_schedule_stays_if_no_process_can_be_started(
    python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiprocessing.spawn._python_exe", os.fsencode(python))
    (planned,) = await planned_by(Planner())
    assert planned.schedule is None
    assert "process" in planned.cause


# --- it ends -------------------------------------------------------------------------------------


async def test_a_choice_that_is_cancelled_before_its_thread_starts_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = planning._started  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(planning, "_started", lambda: (started.append(start()), started[-1])[1])
    free = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        threads.submit(free.wait)
        choice = asyncio.create_task(plan_in_process(Planner(), command(), CONFIG))
        while not started:  # noqa: ASYNC110
            await asyncio.sleep(0)
        choice.cancel()
        with pytest.raises(asyncio.CancelledError):
            await choice
        free.set()
    assert started[0].returncode == -signal.SIGKILL


async def test_a_choice_that_is_cancelled_leaves_no_process_behind(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pid")
    async with asyncio.timeout(LONG_S):
        choice = asyncio.create_task(plan_in_process(Hanging(tmp_path / "pid"), command(), CONFIG))
        pid = int(await asyncio.to_thread((tmp_path / "pid").read_text))
        choice.cancel()
        with pytest.raises(asyncio.CancelledError):
            await choice
        await asyncio.to_thread(_wait_for_the_end_of, pid)


def _wait_for_the_end_of(pid: int) -> None:
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([ended], [], [], LONG_S)[0]
    finally:
        os.close(ended)


def script(text: str) -> subprocess.Popen[str]:
    """A program that Python reads from its standard input, as `python - <<EOF` has it."""
    process = subprocess.Popen(
        [sys.executable, "-"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(textwrap.dedent(text))
    process.stdin.close()
    process.stdin = None
    return process


def test_a_script_without_a_guard_is_not_run_again() -> None:
    with script(
        """
        import asyncio
        print("starts")
        from aprilsched.kernel.shell.planning import plan_in_process
        from tests.unit.test_planning_process import CONFIG, Telling, command
        print(asyncio.run(plan_in_process(Telling(), command(), CONFIG)).refill)
        """
    ) as process:
        out, _ = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, out
    assert out.count("starts") == 1
    assert "Wave()" in out


def test_a_trainer_that_is_killed_takes_its_choice_with_it(tmp_path: Path) -> None:
    """The output is open as long as one of the two processes lives."""
    path = tmp_path / "pid"
    os.mkfifo(path)
    with script(
        f"""
        import asyncio, pathlib
        from aprilsched.kernel.shell.planning import plan_in_process
        from tests.unit.test_planning_process import CONFIG, Hanging, command

        async def main():
            await plan_in_process(Hanging(pathlib.Path({str(path)!r})), command(), CONFIG)

        asyncio.run(main())
        """
    ) as process:
        child = int(path.read_text())
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=LONG_S)
    _wait_for_the_end_of(child)
