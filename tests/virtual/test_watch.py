"""Tests ``aprilsched watch``: it shows a run from its growing event log."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from aprilsched.__main__ import main
from aprilsched.cli.commands import watch as watched_module
from aprilsched.cli.commands.watch import Watched
from aprilsched.errors import RunFolderError
from aprilsched.observe.log.follow import Follower
from aprilsched.observe.log.run_folder import CONFIG, EVENTS, SUMMARY
from aprilsched.observe.log.tail import whole_lines
from tests.support.terminal import on_a_terminal
from tests.virtual.test_resume_folder import resume, start_run

SMALL = [
    "--batch-groups", "4", "--group-size", "4", "--over-provision", "2", "--median", "60",
    "--cap", "600", "--batches", "6",
]  # fmt: skip


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended."""
    out = tmp_path_factory.mktemp("ended") / "run"
    assert main(["run", *SMALL, "--sim.engines", "2", "--quiet", "--out", str(out)]) == 0
    return out


def part_of(run: Path, folder: Path, size: int) -> Path:
    """Return a copy of the run's folder from when its log had `size` bytes."""
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_bytes((run / CONFIG).read_bytes())
    (folder / EVENTS).write_bytes((run / EVENTS).read_bytes()[:size])
    return folder


def watch(folder: Path) -> Watched:
    return Watched(folder, Console(file=io.StringIO(), width=100))


def last_frame(watched: Watched) -> str:
    console = Console(file=io.StringIO(), record=True, width=100)
    watched.view.note = ""
    console.print(watched.view.frame())
    return console.export_text()


# --- the log --------------------------------------------------------------------------------


def test_how_far_it_has_come_is_known(ended: Path):
    follower = Follower(ended / EVENTS)
    lines = (ended / EVENTS).read_bytes().splitlines(keepends=True)
    follower.poll(len(lines) // 2)
    assert follower.caught_up == pytest.approx(0.5, abs=0.1)
    follower.poll(len(lines))
    assert follower.caught_up == pytest.approx(1.0)


def test_a_log_that_was_cut_back_is_given_from_its_start(ended: Path, tmp_path: Path):
    whole = (ended / EVENTS).read_bytes()
    path = tmp_path / EVENTS
    path.write_bytes(whole)
    follower = Follower(path)
    while follower.poll(10_000).lines:
        pass
    path.write_bytes(whole[: len(whole) // 2])
    news = follower.poll(10_000)
    assert news.from_start
    assert whole.startswith(b"".join(news.lines))


def test_a_partial_line_is_awaited_and_damage_is_reported(ended: Path, tmp_path: Path):
    lines = (ended / EVENTS).read_bytes().splitlines(keepends=True)
    path = tmp_path / EVENTS
    path.write_bytes(b"".join(lines[:50]))
    follower = Follower(path)
    assert len(follower.poll(100).lines) == 50
    with path.open("ab") as file:
        file.write(b'{"t": 1.0, \n')
    assert follower.poll(100).lines == ()
    with path.open("ab") as file:
        file.write(lines[50])
    with pytest.raises(RunFolderError, match="damaged in line 51"):
        follower.poll(100)


def test_a_resumed_run_shows_its_counts_at_every_cut(tmp_path: Path):
    """The log comes from two processes, with void and redelivered batches."""
    cut = start_run(tmp_path / "b", times=(4.0,))[0]
    resume(cut)
    log = (cut / "run" / EVENTS).read_bytes()
    assert b'"fact":"LogResumed"' in log
    path = tmp_path / EVENTS
    follower, given = Follower(path), list[bytes]()
    for size in [*range(0, len(log), 20_011), len(log)]:
        path.write_bytes(log[:size])
        while True:
            news = follower.poll(1_000)
            if news.from_start:
                given.clear()
            given += news.lines
            if not news.lines:
                break
        assert given == list(whole_lines(path))


# --- what is shown --------------------------------------------------------------------------


def test_a_run_that_has_ended_is_shown_whole(
    ended: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["watch", str(ended), "--once"]) == 0
    drawn = capsys.readouterr().out
    summary = json.loads((ended / SUMMARY).read_text())
    assert str(ended) in drawn.replace("\n", "")
    assert "6 of 6 delivered" in drawn
    assert f"efficiency {summary['efficiency']:.0%}" in drawn
    assert f"staleness {summary['staleness_mean']:.2f}, max {summary['staleness_max']}" in drawn
    assert "sim-0" in drawn
    assert "sim-1" in drawn
    assert "no new lines" not in drawn


def test_a_file_gets_the_last_frame_and_the_summary(
    ended: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["watch", str(ended)]) == 0
    watched = capsys.readouterr().out
    assert watched.count("6 of 6 delivered") == 1
    assert "delivered tokens/s" in watched
    assert f"The run has ended; it is in {ended}" in watched.replace("\n", " ")


def test_a_growing_log_gives_the_same_as_the_whole(ended: Path, tmp_path: Path):
    whole = (ended / EVENTS).read_bytes()
    at_once = watch(ended)
    at_once.read()
    folder = part_of(ended, tmp_path / "run", 0)
    growing = watch(folder)
    for size in [*range(0, len(whole), 50_021), len(whole)]:
        part_of(ended, folder, size)
        growing.read()
    # A long path is folded.
    shown, wanted = ("".join(last_frame(each).split()) for each in (growing, at_once))
    assert str(folder) in shown
    assert shown == wanted.replace(str(ended), str(folder))


def test_a_run_that_is_resumed_counts_its_batches_once(tmp_path: Path):
    cut = start_run(tmp_path / "b", times=(4.0,))[0]
    watched = watch(cut / "run")
    watched.read()
    assert re.search(r"[1-7] of 8 delivered", last_frame(watched))
    resume(cut)
    watched.read()
    assert (cut / "run" / SUMMARY).exists()
    assert "8 of 8 delivered" in last_frame(watched)


def test_a_run_that_stops_writing_is_reported(
    ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = 1_000.0
    monkeypatch.setattr(watched_module.time, "monotonic", lambda: now)
    size = len((ended / EVENTS).read_bytes())
    folder = part_of(ended, tmp_path / "run", size // 2 + 7)
    watched = watch(folder)

    def note() -> str:
        return watched.view.note

    watched.read()
    assert note() == ""
    now += 12.0
    watched.read()
    assert note() == "no new lines for 0:12"
    now += 60.0
    watched.read()
    assert note() == "no new lines for 1:12: it waits, or was killed"
    part_of(ended, folder, size)
    watched.read()
    assert note() == ""


def test_a_folder_that_is_not_a_run_is_refused(
    tmp_path: Path, ended: Path, capsys: pytest.CaptureFixture[str]
):
    def refusal(folder: Path) -> str:
        assert main(["watch", str(folder)]) == 2
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1
        return printed

    assert "has no run (it has no events.jsonl)" in refusal(tmp_path / "nowhere")
    assert "has no run" in refusal(tmp_path)
    folder = part_of(ended, tmp_path / "run", 1_000)
    (folder / CONFIG).write_text("engine = [")
    assert "cannot be understood" in refusal(folder)
    (folder / CONFIG).write_text("batches = 3")
    assert "lacks something" in refusal(folder)
    folder = part_of(ended, folder, 0)
    (folder / EVENTS).write_bytes(b"{}\n" + (ended / EVENTS).read_bytes())
    assert "damaged in line 1" in refusal(folder)


def test_a_killed_run_is_watched_until_ctrl_c(ended: Path, tmp_path: Path):
    size = len((ended / EVENTS).read_bytes())
    folder = part_of(ended, tmp_path / "run", size // 2 + 7)
    with on_a_terminal("watch", str(folder), columns=120) as terminal:
        terminal.wait_for("no new lines for 0:0")
        terminal.type(b"\x03")
        assert terminal.end() == 130
    assert "Traceback" not in terminal.raw
    assert terminal.raw.count("\x1b[?25h") == 1, "the cursor is shown again"


# --- a live run ---------------------------------------------------------------------------


@contextmanager
def served() -> Generator[list[str]]:
    """The URLs of two engines that run at ten times the speed of the modelled machine."""
    arguments = ["serve-sim", "--port", "0", "--sim.engines", "2", "--time-scale", "0.1"]
    command = [sys.executable, "-m", "aprilsched", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield [process.stdout.readline().split()[-1] for _ in range(2)]
        finally:
            process.kill()


@pytest.mark.long
def test_a_live_run_on_served_engines_is_watched(tmp_path: Path):
    out = tmp_path / "run"
    with served() as urls:
        command = [sys.executable, "-m", "aprilsched"]
        arguments = ["run", *SMALL, "--engine", *urls, "--out", str(out)]
        run = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
        try:
            while not (out / CONFIG).exists():
                assert run.poll() is None
                time.sleep(0.02)
            plain = subprocess.Popen(
                [*command, "watch", str(out)], stdout=subprocess.PIPE, text=True
            )
            with on_a_terminal("watch", str(out), columns=120) as terminal, plain:
                run.communicate(timeout=600)
                received, _ = plain.communicate(timeout=600)
                assert terminal.end() == 0
        finally:
            run.kill()
            run.wait()
    assert run.returncode == plain.returncode == 0
    assert received.count("6 of 6 delivered") == 1
    drawn = terminal.text
    assert "6 of 6 delivered" in drawn
    assert urls[0].removeprefix("http://") in drawn
    assert "The run has ended" in drawn
