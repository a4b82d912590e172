"""Tests the worker thread behind the log, the samples, the trackers and queued listeners."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aprilsched.errors import ConfigError
from aprilsched.observe.file_writer import FileWriter
from aprilsched.observe.worker import Worker
from aprilsched.simulation.engine.clock import run_virtual


class Gate:
    """Calls that wait until the gate is opened; `started` is set by the first of them."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.opened = threading.Event()
        self.passed: list[int] = []

    def __call__(self, number: int) -> None:
        self.started.set()
        self.opened.wait()
        self.passed.append(number)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


@pytest.fixture(autouse=True)
def warnings_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="aprilsched")


def worker(
    *, max_pending: int = 10, close_seconds: float = 600.0, patient: bool = False, **more: Any
) -> Worker:
    bounds: dict[str, Any] = {"max_pending": max_pending, "close_seconds": close_seconds}
    return Worker("the disk", "bytes", patient=patient, **bounds, **more)


def busy(gate: Gate, **settings: Any) -> Worker:
    """A worker with a call in the gate."""
    made = worker(**settings)
    assert made.put(gate, 0)
    gate.started.wait()
    return made


# --- what fits and what does not -----------------------------------------------------------------


def test_the_bound_is_on_the_size_of_what_waits(gate: Gate, caplog: pytest.LogCaptureFixture):
    slow = busy(gate, max_pending=10)
    assert slow.put(gate, 1, size=7)
    assert not slow.put(gate, 2, size=4)
    assert slow.put(gate, 3, size=3)
    assert not slow.put(gate, 4, size=1)
    gate.opened.set()
    assert slow.close()
    assert gate.passed == [0, 1, 3]
    assert slow.dropped == 5
    assert [record.getMessage() for record in caplog.records] == [
        "the disk is too slow, and misses what comes while 10 bytes wait for it."
    ]


def test_what_is_larger_than_the_bound_is_taken_when_nothing_else_waits(gate: Gate):
    slow = busy(gate, max_pending=10)
    assert slow.put(gate, 1, size=1000)
    assert not slow.put(gate, 2)
    gate.opened.set()
    assert slow.close()
    assert gate.passed == [0, 1]


def test_a_patient_one_waits_for_a_place(gate: Gate):
    slow = worker(max_pending=2, patient=True)
    helper = threading.Thread(target=lambda: [slow.put(gate, number) for number in range(50)])
    helper.start()
    gate.opened.set()
    helper.join()
    assert slow.close()
    assert gate.passed == list(range(50))
    assert slow.dropped == 0


def test_a_patient_one_that_is_closed_meanwhile_waits_no_more(gate: Gate):
    slow = busy(gate, max_pending=1, patient=True, close_seconds=0.01)
    slow.put(gate, 1)
    answers: list[bool] = []
    helper = threading.Thread(target=lambda: answers.append(slow.put(gate, 2)))
    helper.start()
    slow.close()
    helper.join()
    assert answers == [False]
    assert slow.dropped == 2


def test_a_call_of_a_patient_one_that_puts_more_does_not_wait_for_itself():
    answers: list[bool] = []

    def two_more() -> None:
        answers.extend(patient.put(answers.append, True) for _ in range(2))
        tried.set()

    tried = threading.Event()
    patient = worker(max_pending=1, patient=True)
    patient.put(two_more)
    assert tried.wait(600)
    assert patient.close()
    assert answers == [True, False, True]
    assert patient.dropped == 1


@pytest.mark.parametrize("wrong", [0, -1, math.nan])
def test_bad_numbers_are_refused(wrong: float):
    with pytest.raises(ConfigError, match="max_pending is"):
        worker(max_pending=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="close_seconds is"):
        worker(close_seconds=wrong or -1)


# --- calls that raise ----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError("full"), SystemExit(1), asyncio.CancelledError()])
def test_a_call_that_raises_is_the_last(
    gate: Gate, caplog: pytest.LogCaptureFixture, error: BaseException
):
    def fail() -> None:
        gate(0)
        raise error

    ended: list[str] = []
    failing = worker(at_end=lambda: ended.append("closed"))
    failing.put(fail)
    gate.started.wait()
    failing.put(gate, 1, size=5)
    gate.opened.set()
    assert failing.close()
    assert not failing.put(gate, 2)
    assert failing.error is error
    assert gate.passed == [0]
    assert failing.dropped == 6
    assert ended == ["closed"]
    assert ["the disk raised" in record.getMessage() for record in caplog.records] == [True]


def test_who_waits_for_a_place_is_let_go_when_a_call_raises(gate: Gate):
    def fail() -> None:
        gate(0)
        raise OSError("full")

    failing = worker(max_pending=1, patient=True)
    failing.put(fail)
    gate.started.wait()
    failing.put(gate, 1)
    helper = threading.Thread(target=failing.put, args=(gate, 2))
    helper.start()
    gate.opened.set()
    helper.join()
    assert failing.dropped == 2


def test_an_end_that_raises_is_logged_too(caplog: pytest.LogCaptureFixture):
    def fail() -> None:
        raise OSError("cannot be closed")

    failing = worker(at_end=fail)
    assert failing.close()
    assert isinstance(failing.error, OSError)
    # The thread of another test may still log a record.
    assert sum("cannot be closed" in record.getMessage() for record in caplog.records) == 1


def test_a_thread_that_cannot_start_is_an_error(caplog: pytest.LogCaptureFixture):
    before = threading.stack_size(1 << 46)  # more than any address space has
    try:
        unstarted = worker()
        assert not unstarted.put(print)
        assert not unstarted.put(print)
    finally:
        threading.stack_size(before)
    assert isinstance(unstarted.error, RuntimeError)
    assert unstarted.dropped == 2
    assert unstarted.close()
    assert len(caplog.records) == 1


# --- the end -------------------------------------------------------------------------------------


def test_a_call_that_hangs_does_not_hold_up_the_end(gate: Gate, caplog: pytest.LogCaptureFixture):
    ended = threading.Event()
    hanging = busy(gate, close_seconds=0.01, at_end=ended.set)
    hanging.put(gate, 1, size=4)
    assert not hanging.close()
    assert not hanging.close()
    assert hanging.dropped == 4
    assert [record.getMessage() for record in caplog.records] == [
        "the disk was not done after 0.01 s: it is left with what it has, and misses 4 bytes."
    ]
    gate.opened.set()
    ended.wait()
    assert gate.passed == [0]


def test_one_that_was_never_used_has_no_thread_and_is_closed(gate: Gate):
    threads = threading.active_count()
    unused = worker()
    assert threading.active_count() == threads
    assert unused.close()
    assert not unused.put(gate, 1)
    assert unused.dropped == 1


def test_a_call_may_close_its_worker():
    answers: list[bool] = []
    own = worker(close_seconds=math.inf)
    own.put(lambda: answers.append(own.close()))
    while not answers:
        own.put(lambda: None)
    assert own.close()
    assert answers == [False]


def test_what_was_passed_on_is_not_kept():
    class Large:
        pass

    idle, done = worker(), threading.Event()
    large = Large()
    gone = weakref.ref(large, lambda _: done.set())
    idle.put(lambda _: None, large)
    del large
    assert done.wait(600)
    assert gone() is None
    assert idle.close()


def test_a_process_ends_although_a_call_hangs():
    program = """
import threading
from aprilsched.observe.worker import Worker
started = threading.Event()
hanging = Worker("the disk", "bytes", max_pending=10, close_seconds=0.01)
hanging.put(started.set)
hanging.put(threading.Event().wait)
hanging.put(print, "never")
started.wait()
print("ends")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"ends\n"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_neither_waits_for_the_thread_nor_repeats_its_work(gate: Gate):
    shared = busy(gate)
    shared.put(gate, 1)
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with shared._changed:
            held.set()
            forked.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(600)  # ends a child that waits for the lock
        refused = not shared.put(gate, 2) and not shared.put(gate, 3)
        received = shared.dropped == 2 and shared.close()
        os._exit(0 if refused and received else 1)
    forked.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.opened.set()
    assert shared.close()
    assert gate.passed == [0, 1]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_one_that_is_first_used_in_a_fork_works_there(tmp_path: Path):
    written = tmp_path / "written"
    inherited = worker()
    child = os.fork()
    if child == 0:
        inherited.put(written.write_text, "by the child")
        os._exit(0 if inherited.close() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert written.read_text() == "by the child"
    assert inherited.close()


def test_virtual_time_does_not_pass_while_a_patient_put_waits(gate: Gate):
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        slow = busy(gate, max_pending=1, patient=True)
        slow.put(gate, 1)
        timer = asyncio.create_task(asyncio.sleep(5.0))
        before = loop.time()
        opener = threading.Timer(0.01, gate.opened.set)
        opener.start()
        slow.put(gate, 2)
        assert slow.close()
        after = loop.time()
        await timer
        opener.join()
        return after - before, loop.time()

    assert run_virtual(main()) == (0.0, 5.0)
    assert gate.passed == [0, 1, 2]


# --- files ---------------------------------------------------------------------------------------


def file_writer(path: Path, *, max_bytes: int = 100, close_seconds: float = 600.0) -> FileWriter:
    return FileWriter(path, "wb", max_bytes=max_bytes, close_seconds=close_seconds, patient=False)


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that cannot even be opened until something reads it."""
    path = tmp_path / "lines"
    monkeypatch.setattr("aprilsched.observe.file_writer.open_private", os.open)
    os.mkfifo(path)
    return path


def test_nothing_is_written_that_came_after_the_end_that_could_not_wait(pipe: Path):
    writer = file_writer(pipe, close_seconds=0.01)
    writer.put(b"1\n")
    while writer._worker._calls:  # until the thread has the first block and waits for a reader
        pass
    writer.put(b"2\n")
    writer.close()
    assert pipe.read_bytes() == b"1\n"
    assert writer.error == "the disk did not take 2 lines within 0.01 s"


def test_a_file_without_a_block_is_not_made(tmp_path: Path):
    writer = file_writer(tmp_path / "lines")
    writer.close()
    assert list(tmp_path.iterdir()) == []
    assert writer.error is None
