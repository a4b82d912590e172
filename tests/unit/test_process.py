"""Tests the RolloutScheduler in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import pytest

from aprilsched import (
    DiskPublisher,
    Handshake,
    Prompt,
    PromptQueue,
    SGLangFleet,
    SGLangListedFleet,
    SimPublisher,
)
from aprilsched.errors import AprilschedError, ConfigError, RefitError, SchedulerClosed
from aprilsched.fronts import process
from aprilsched.kernel.engines.base import Engine
from aprilsched.testing import ThreadedServer
from tests.support import in_a_process
from tests.support.interrupting import InterruptingLoop
from tests.support.table import each_row


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process, no thread and no file outlives a scheduler."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert not multiprocessing.active_children()
    for each in threading.enumerate():
        if each.name == "aprilsched-loop":
            each.join()  # After an interrupt in close() it ends by itself.
    assert not list(tmp_path.glob("aprilsched-*"))


def prompt(ids: list[int], **more: Any) -> Prompt:
    return Prompt(input_ids=np.array(ids, dtype=np.int32), **more)


def child() -> Any:
    (only,) = multiprocessing.active_children()
    return only


def test_a_large_batch_goes_through_a_file():
    with process.RolloutScheduler(in_a_process.long) as rollouts:
        batch = rollouts.next_batch()
        assert batch.groups[0].prompt.input_ids.tolist() == list(range(1, 20_000))
        (folder,) = Path(tempfile.gettempdir()).glob("aprilsched-*")
        assert not list(folder.iterdir())
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_written_loses_no_batch():
    with process.RolloutScheduler(in_a_process.long) as rollouts:
        (folder,) = Path(tempfile.gettempdir()).glob("aprilsched-*")
        folder.rmdir()
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"No such file or directory.*free space in"):
                rollouts.next_batch()
        with pytest.raises(FileNotFoundError):
            rollouts.evaluate([prompt(list(range(20_000)))])
        folder.mkdir()
        assert rollouts.next_batch().index == 0
        assert len(rollouts.evaluate([prompt(list(range(20_000)))]).groups) == 1


# --- waits that end early ------------------------------------------------------------------------


def test_ctrl_c_of_a_terminal_leaves_the_schedulers_process_to_the_trainer():
    with process.RolloutScheduler(in_a_process.simple) as rollouts:
        os.kill(child().pid, signal.SIGINT)
        assert rollouts.next_batch().index == 0


# --- what goes wrong -----------------------------------------------------------------------------


@each_row(
    "make, error, why",
    [
        (in_a_process.raising, AprilschedError, "process raised Odd: code 7 in here"),
        (in_a_process.wrong, ConfigError, r"returned a SimFleet; return an aprilsched\.Rollout"),
        (lambda: in_a_process.simple(), ConfigError, "give functions and classes of a module"),
    ],
)
def test_a_failure_at_the_start_is_reported(make: Any, error: type[Exception], why: str):
    with pytest.raises(error, match=why), process.RolloutScheduler(make):
        pass


UNSENDABLE = {"mute": in_a_process.Mute, "unpicklable": in_a_process.Unpicklable}


def hostile(kind: str) -> BaseException:
    """An exception that can hardly be looked at."""
    error: BaseException = UNSENDABLE.get(kind, ValueError)(kind)
    if kind == "circle":
        error.__cause__ = error
    if kind == "chain":
        for number in range(5000):
            error, cause = ValueError(number), error
            error.__cause__ = cause
    if kind == "contexts":
        other = KeyError(kind)
        error.__context__, other.__context__ = other, error
    if kind == "notes":
        error.__notes__ = 7  # pyright: ignore[reportAttributeAccessIssue]
    return error


@each_row("kind", ["circle", "chain", "contexts", "notes", "mute", "unpicklable"])
def test_an_exception_that_cannot_be_looked_at_arrives(kind: str):
    """Otherwise the trainer would wait forever for one whose text or causes raise or do not end."""
    reply: process.Reply = pickle.loads(pickle.dumps(process.Served().refusal(hostile(kind))))  # noqa: S301
    with pytest.raises(AprilschedError if kind in UNSENDABLE else ValueError) as raised:
        reply.get()
    cause = ValueError if kind in ("circle", "chain") else NoneType
    assert isinstance(raised.value.__cause__, cause)


@each_row("raises", [True, False])
def test_what_cannot_come_back_is_named(raises: bool):
    with process.RolloutScheduler(in_a_process.secretive, raises=raises) as rollouts:
        for _ in range(2):
            with pytest.raises(ConfigError, match="give prompts only metadata that pickle can"):
                rollouts.next_batch()
        assert rollouts.update_weights(SimPublisher()).version == 1


def test_a_process_that_does_not_react_is_killed_with_the_second_interrupt(tmp_path: Path):
    """The trainer presses Ctrl-C again and again, because user code blocks the scheduler's loop."""
    sign, over, armed = tmp_path / "blocked", threading.Event(), threading.Event()

    def press() -> None:
        while not sign.exists():
            time.sleep(0.01)
        while not over.wait(0.1):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def interrupt(*_: object) -> None:
        if armed.is_set():
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    rollouts = process.RolloutScheduler(in_a_process.blocked, sign)
    rollouts.__enter__()
    helper = threading.Thread(target=press)
    helper.start()
    calls = 0
    while multiprocessing.active_children():
        try:
            armed.set()
            if calls == 0:
                rollouts.next_batch()
            else:
                rollouts.close()
        except KeyboardInterrupt:
            armed.clear()
            calls += 1
    armed.clear()
    over.set()
    helper.join()
    signal.signal(signal.SIGUSR1, before)
    rollouts._process.end()  # As at the exit of a trainer that was interrupted amid this.
    assert calls > 1


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[process.RolloutScheduler]:
    """A scheduler whose process stands still after its first batch, with prompts on their way."""
    monkeypatch.setattr(process, "SILENCE_S", 0.5)
    monkeypatch.setattr(process, "END_S", 0.5)
    queue = PromptQueue()
    queue.put(*(prompt([number]) for number in range(1, 5)))
    with process.RolloutScheduler(in_a_process.pushed, queue, batch_groups=2) as rollouts:
        rollouts.next_batch()
        os.kill(child().pid, signal.SIGSTOP)
        # More than a pipe holds; a blocking write would block the trainer's loop.
        for _ in range(1000):
            queue.put(prompt(list(range(1, 200))))
        yield rollouts


def test_a_process_that_continues_has_lost_no_batch(stopped: process.RolloutScheduler):
    with pytest.raises(TimeoutError, match="does not answer"):
        stopped.next_batch(timeout=0.1)
    os.kill(child().pid, signal.SIGCONT)
    assert stopped.next_batch().index == 1
    assert stopped.next_batch().index == 2


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 9))]
)
def test_stops_forks_and_short_timeouts_at_random_lose_no_batch(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(process, "SILENCE_S", 0.2)
    rng, got, forks = random.Random(seed), list[int](), list[int]()
    with process.RolloutScheduler(in_a_process.simple, pace="asynchronous") as rollouts:
        scheduler = child().pid
        while len(got) < 40:
            what = rng.choice(
                ["stop", "continue", "continue", "continue", "update", "fork", "", ""]
            )
            if what == "stop":
                os.kill(scheduler, signal.SIGSTOP)
            if what in ("continue", "update"):
                os.kill(scheduler, signal.SIGCONT)
            if what == "update":
                rollouts.update_weights(SimPublisher())
            if what == "fork" and len(forks) < 3:
                forks.append(os.fork())
                if not forks[-1]:
                    time.sleep(3600)
            with suppress(TimeoutError):
                got.append(rollouts.next_batch(timeout=rng.choice([0, 0.01, 0.1])).index)
        os.kill(scheduler, signal.SIGCONT)
    for each in forks:
        os.kill(each, signal.SIGKILL)
        os.waitpid(each, 0)
    assert got == list(range(40))


def test_an_interrupt_ends_the_wait_for_a_stopped_process(
    stopped: process.RolloutScheduler,
):
    """One is enough, and the end of the block does not wait for it either."""
    with InterruptingLoop(seed=0) as alarm:
        alarm.start()
        with pytest.raises(KeyboardInterrupt):
            stopped.next_batch()
        alarm.stop()


def test_what_the_process_has_forked_does_not_hide_its_end(tmp_path: Path):
    sign = tmp_path / "forked"
    with process.RolloutScheduler(in_a_process.forking, sign) as rollouts:
        rollouts.next_batch()
        os.kill(child().pid, signal.SIGKILL)
        with pytest.raises(SchedulerClosed, match="exit code -9"):
            list(rollouts)
    os.kill(int(sign.read_text()), signal.SIGKILL)


TRAINER = """
import os
import sys
import threading
import time
from multiprocessing import active_children
from pathlib import Path
from aprilsched.fronts import process
from tests.support import in_a_process

if __name__ == "__main__":
    how = sys.argv[1]
    sign = Path("blocked").absolute()
    rollouts = process.RolloutScheduler(
        *((in_a_process.blocked, sign) if how == "blocked" else (in_a_process.simple,))
    )
    rollouts.__enter__()
    scheduler, forked = active_children()[0].pid, 0
    if how == "blocked":
        threading.Thread(target=rollouts.next_batch, daemon=True).start()
        while not sign.exists():
            time.sleep(0.01)
    else:
        rollouts.next_batch()
    if how.startswith("fork"):
        forked = os.fork()
        if not forked:
            time.sleep(3600)
    print(scheduler, forked, flush=True)
    if how == "forked, and closes":
        rollouts.close()
    elif how != "leaves":
        sys.stdin.read()
"""


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("how", ["killed", "leaves", "forks", "forked, and closes", "blocked"])
def test_the_process_ends_with_the_trainers(tmp_path: Path, how: str):
    """A trainer that is killed, one that ends without closing the scheduler, and those that have
    forked another process, which lives on with all that is open. User code may block the
    scheduler's loop."""
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    with (
        (tmp_path / "output").open("w") as printed,
        subprocess.Popen(
            [sys.executable, "-W", "ignore::DeprecationWarning", str(script), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "TMPDIR": str(tmp_path),
            },
            text=True,
        ) as trainer,
    ):
        assert trainer.stdout is not None
        scheduler, forked = map(int, trainer.stdout.readline().split())
        if how in ("killed", "forks", "blocked"):
            trainer.kill()
        trainer.wait()
        while runs(scheduler):
            time.sleep(0.01)
        if forked:
            assert runs(forked)
            os.kill(forked, signal.SIGKILL)
    assert "Traceback" not in (tmp_path / "output").read_text()


def runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- weights in the trainer's memory --------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[ThreadedServer]:
    with ThreadedServer() as started:
        yield started


class Saved:
    """The trainer's way of saving its weights, which exists in its process only."""

    def __init__(self) -> None:
        self.count = 0
        self.error: Exception | None = None
        self.saving, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def __call__(self, folder: Path) -> None:
        self.saving.set()
        self.go_on.wait()
        if self.error is not None:
            raise self.error
        self.count += 1
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"%d" % self.count)


class Late(DiskPublisher):
    """Saves when the engines are paused, so that an error comes then."""

    async def prepare(self, version: int) -> None: ...

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        await super().prepare(version)
        return await super().publish(version, engines)


def test_a_publisher_of_the_trainers_process(server: ThreadedServer, tmp_path: Path):
    save = Saved()
    publisher = process.FromTrainer(
        DiskPublisher(tmp_path / "weights", save=save), SGLangFleet([server.url])
    )
    with process.RolloutScheduler(in_a_process.served, server.url) as rollouts:
        for version in (1, 2, 3):
            batch = rollouts.next_batch()
            assert batch.version == version - 1
            report = rollouts.update_weights(publisher)
            assert (report.version, rollouts.version, save.count) == (version, version, version)
        assert rollouts.update_weights(publisher, version=9).version == 9
        with pytest.raises(ConfigError, match="version 9 is not newer than 9"):
            rollouts.update_weights(publisher, version=9)
        assert rollouts.next_batch().version == 9


def test_a_publisher_for_a_list_of_servers(server: ThreadedServer, tmp_path: Path):
    """They are listed again before each update."""
    listed = ["http://127.0.0.1:1"]

    async def list_urls() -> list[str]:
        return listed

    publisher = process.FromTrainer(
        DiskPublisher(tmp_path / "weights", save=Saved()), SGLangListedFleet(list_urls)
    )
    with process.RolloutScheduler(in_a_process.served, server.url) as rollouts:
        rollouts.next_batch()
        with pytest.raises(RefitError, match="has opened no engine"):
            rollouts.update_weights(publisher)
        listed[:] = [server.url]
        assert rollouts.update_weights(publisher).version == 1
        assert rollouts.update_weights(publisher).version == 2
        listed[:] = ["http://127.0.0.1:1"]
        with pytest.raises(RefitError, match="has opened no engine"):
            rollouts.update_weights(publisher)


def test_weights_that_the_trainer_cannot_load(server: ThreadedServer, tmp_path: Path):
    save, url = Saved(), server.url
    save.error = OSError(28, "No space left on device")
    publisher = process.FromTrainer(Late(tmp_path / "weights", save=save), SGLangFleet([url]))
    with ThreadedServer() as other:
        elsewhere = process.FromTrainer(Late(tmp_path, save=save), SGLangFleet([other.url]))
        with process.RolloutScheduler(in_a_process.served, url) as rollouts:
            rollouts.next_batch()
            with pytest.raises(RefitError, match="No space left") as raised:
                rollouts.update_weights(publisher)
            assert isinstance(raised.value.__cause__, OSError)
            with pytest.raises(RefitError, match="give it a fleet of the same servers"):
                rollouts.update_weights(elsewhere)
            save.error = None
            assert rollouts.update_weights(publisher).version == 1
            assert rollouts.next_batch().version == 1


def test_an_interrupted_update_of_the_trainers_process_runs_to_its_end(
    server: ThreadedServer, tmp_path: Path
):
    save = Saved()
    save.go_on.clear()
    publisher = process.FromTrainer(
        Late(tmp_path / "weights", save=save), SGLangFleet([server.url])
    )
    with (
        InterruptingLoop(seed=0),
        process.RolloutScheduler(in_a_process.served, server.url) as rollouts,
    ):
        rollouts.next_batch()

        def press() -> None:
            save.saving.wait()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

        helper = threading.Thread(target=press)
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            rollouts.update_weights(publisher)
        helper.join()
        save.go_on.set()
        assert rollouts.next_batch().version == rollouts.version == 1


def test_the_tables_of_requests_share_no_name():
    assert not process.CALLS.keys() & process.NOTICES.keys()
    assert process.BLOCKS.keys() == {"asleep", "paused_for_weights"}


def test_what_moves_no_tensors_needs_no_wrapper():
    with pytest.raises(ConfigError, match="a Handshake moves no tensors of the trainer"):
        process.FromTrainer(Handshake(), SGLangFleet(["http://127.0.0.1:1"]))
