"""Automatic over-provisioning: learns the engines' step times, and chooses schedules by them.

:class:`StepTimes` is a listener that keeps the planner's model up to date. :class:`Planning`
carries out the command Plan in a process of its own, because choosing a schedule takes seconds of
Python code, which must stop neither the event loop nor the trainer
(:mod:`~aprilsched.coordinator.replanning`).

Tokens are seen when a chunk arrives, not when they are sampled. So StepTimes times each request
from one of its chunks to the next: the tokens of a chunk are the decode steps of that time. (The
tokens of all requests divided by the mean number of requests would be wrong by a third: the
requests of a wave stream in step, so a window has about one chunk of each more or less at its
ends.) The first chunk of a request after it was sent, or after a pause, is not timed. It shows that
its context was read: until then the request does not decode, and then a prefill pass counts. After
an update contexts are read for seconds among the decode steps. While more than half of them are
unread there is no window. (When their passes were not seen, steps of a mixture of experts were
learnt with 69 ns for a context token, where 34 are true.) A window ends with a pause, or after
`WINDOW` seconds. The errors that remain average out over many windows, and windows that are unlike
the others count little (:mod:`~aprilsched.timing.online`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import multiprocessing.spawn
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

from aprilsched.coordinator.tasks import Part, Shell
from aprilsched.core.config import SchedulerConfig
from aprilsched.core.messages import facts as of
from aprilsched.core.messages.commands import Plan
from aprilsched.core.messages.events import Planned
from aprilsched.core.messages.facts import Fact
from aprilsched.core.policies.schedule import Schedule
from aprilsched.driver.callbacks import called_now
from aprilsched.planning import Planner
from aprilsched.telemetry.base import TokenChunks
from aprilsched.timing.online import Observation, OnlineFit

log = logging.getLogger("aprilsched")

WINDOW = 2.0
"""Length of a window in seconds. It has a few hundred decode steps, in which each request streams a
few chunks. In a longer window the batch shrinks so much that the terms of a step's time cannot be
distinguished: of a doubled t0, windows of 10 s found a tenth, windows of 2 s four fifths."""
_LEAST_TOKENS = 256
"""A window with fewer timed tokens is ignored."""
_BURST = 2e-3
"""Requests that are sent to an engine within so many seconds, and whose first tokens come within so
many seconds, count as one prefill pass."""
_MANY = 1 / 2
"""Share of the requests of an engine whose contexts may be unread in a window. With an eighth there
was no window for a whole batch where a full KV pool let contexts be read only a few at a time."""


@dataclass(slots=True, kw_only=True)
class _Window:
    """What one engine did since `began`; seconds are on the run's clock."""

    began: float
    at: float
    running: dict[int, int] = field(default_factory=dict[int, int])
    """Number of context tokens of each open attempt, by request."""
    held: int = 0
    """Number of context tokens of all open attempts."""
    running_time: float = 0.0
    """Integral of the number of open attempts over time."""
    held_time: float = 0.0
    """Integral of `held` over time."""
    since: dict[int, float] = field(default_factory=dict[int, float])
    """Time of the last chunk of each request that is timed."""
    timed: float = 0.0
    """Sum over the timed requests of the seconds between their chunks."""
    tokens: int = 0
    """Number of tokens that arrived in the `timed` seconds."""
    passes: int = 0
    """Number of prefill passes."""
    prefilled: int = 0
    """Number of tokens that the prefill passes computed."""
    unread: dict[int, tuple[float, int]] = field(default_factory=dict[int, tuple[float, int]])
    """When each request was sent that has not sent a chunk since, or since its KV was dropped, and
    the tokens of its context; 0 after a pause, because then its next chunk does not tell when it
    was read."""
    queued: int = 0
    """Number of the unread requests that were sent, and do not decode yet."""
    queued_tokens: int = 0
    """Number of tokens of their contexts."""
    read: tuple[float, float] = (-1.0, -1.0)
    """When the request with the latest first chunk was sent, and when that came."""
    keeps: bool = False
    """Whether the present or last pause keeps the KV."""

    def advance(self, now: float) -> None:
        seconds = now - self.at
        self.running_time += (len(self.running) - self.queued) * seconds
        self.held_time += (self.held - self.queued_tokens) * seconds
        self.at = now

    def restart(self, now: float) -> None:
        self.began = self.at = now
        self.running_time = self.held_time = self.timed = 0.0
        self.tokens = self.passes = self.prefilled = 0

    @property
    def mostly_unread(self) -> bool:
        """Whether there is no window because too many contexts are unread."""
        return len(self.unread) > _MANY * len(self.running)

    def send(self, key: int, context: int, now: float) -> None:
        """Count a request that is sent."""
        self.running[key] = context
        self.unread[key] = (now, context)
        self.held += context
        self.queued += 1
        self.queued_tokens += context

    def read_one(self, key: int, now: float) -> tuple[float, int]:
        """Note that the context of a request is read, or not wanted any more; returns what
        `unread` has of it."""
        sent, context = self.unread.pop(key, (now, 0))
        self.queued -= context > 0
        self.queued_tokens -= context
        return sent, context

    def arrived(self, key: int, tokens: int, now: float) -> None:
        """Count a chunk of a request."""
        sent, context = self.read_one(key, now)
        if not self.since or self.mostly_unread:
            # Before the first chunk the engine was idle, was prefilling, or did something unknown.
            self.restart(now)
            self.since.clear()
        elif key in self.since:
            self.timed += now - self.since[key]
            self.tokens += tokens
        elif context:
            self.prefilled += context
            self.passes += sent - self.read[0] > _BURST or now - self.read[1] > _BURST
        if context:
            self.read = (sent, now)
        self.since[key] = now

    def go_on(self, now: float) -> None:
        """End a pause."""
        self.since.clear()
        if not self.keeps:
            self.unread = {key: self.unread.get(key, (now, 0)) for key in self.running}

    def observation(self) -> Observation | None:
        seconds = self.at - self.began
        if seconds <= 0 or not self.running_time or self.tokens < _LEAST_TOKENS:
            return None
        return Observation(
            running=self.running_time / seconds,
            kv_tokens=self.held_time / seconds,
            seconds_per_step=self.timed / self.tokens,
            seconds=seconds,
            prefill_passes=self.passes,
            prefilled_tokens=self.prefilled,
        )


class StepTimes:
    """A listener that fits the planner's step-time model to the run."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._fit = OnlineFit(planner.model)
        self._fitted_at = -math.inf
        self._engines: dict[str, _Window] = {}
        self._where: dict[int, str] = {}
        """Engine of each request that has an open attempt."""

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            match fact:
                case of.AttemptSent():
                    self._send(fact, now)
                case of.TokensReceived():
                    self._tokens(fact, now)
                case of.AttemptEnded():
                    self._end(fact, now)
                case of.EngineModeChanged(finish="pausing"):
                    window = self._window(fact.engine, now)
                    self._stop(window, now)
                    window.keeps = fact.pause == "in_place"
                case of.EngineModeChanged(start="continuing"):
                    self._window(fact.engine, now).go_on(now)
                case of.EngineLost():
                    self._lose(fact.engine)
                case _:
                    pass

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        for fact, at in chunks:
            self._tokens(fact, at)

    def _window(self, engine: str, now: float) -> _Window:
        window = self._engines.get(engine)
        if window is None:
            window = self._engines[engine] = _Window(began=now, at=now)
        window.advance(now)
        return window

    def _send(self, fact: of.AttemptSent, now: float) -> None:
        window = self._window(fact.engine, now)
        self._where[fact.request_id] = fact.engine
        window.send(fact.request_id, fact.tokens, now)
        if window.since and window.mostly_unread:
            self._stop(window, now)

    def _tokens(self, fact: of.TokensReceived, now: float) -> None:
        key = fact.request_id
        engine = self._where.get(key)
        if engine is None:
            return
        window, tokens = self._window(engine, now), fact.tokens
        window.running[key] += tokens
        window.held += tokens
        window.arrived(key, tokens, now)
        if now - window.began >= WINDOW:
            self._close(window, now)

    def _end(self, fact: of.AttemptEnded, now: float) -> None:
        key = fact.request_id
        engine = self._where.pop(key, None)
        if engine is not None:
            window = self._window(engine, now)
            window.held -= window.running.pop(key)
            window.since.pop(key, None)
            window.read_one(key, now)
            if not window.since:
                self._close(window, now)

    def _stop(self, window: _Window, now: float) -> None:
        self._close(window, now)
        window.since.clear()

    def _lose(self, engine: str) -> None:
        window = self._engines.pop(engine, None)
        for key in window.running if window is not None else ():
            self._where.pop(key, None)

    def _close(self, window: _Window, now: float) -> None:
        seen = window.observation()
        if seen is not None:
            self._fit.observe(seen)
            # One fit takes milliseconds, and a large fleet ends hundreds of windows a second.
            if now - self._fitted_at >= WINDOW / 2:
                self._planner.model, self._fitted_at = self._fit.model, now
        window.restart(now)


class Planning(Part):
    """Carries out Plan. A failure is logged, and the current schedule stays in use."""

    def __init__(self, shell: Shell, planner: Planner) -> None:
        super().__init__(shell)
        self._planner = planner

    def plan(self, command: Plan) -> None:
        if self._planner.inline:
            self._feed(self._planned_here(command))
        else:
            self._tasks.start(("planning", command), self._plan(command))

    async def _plan(self, command: Plan) -> None:
        try:
            schedule = await planned_apart(self._planner, command, self._config)
            self._feed(_planned(schedule, command))
        except Exception as error:
            self._feed(_failed(error))

    def _planned_here(self, command: Plan) -> Planned:
        try:
            schedule = called_now("the planner", self._planner.plan, command, self._config)
            return _planned(schedule, command)
        except Exception as error:
            return _failed(error)


def _planned(schedule: Schedule, command: Plan) -> Planned:
    if not schedule.same_as(command.current):
        log.info("from now on %s", schedule.why)
    return Planned(schedule=schedule)


def _failed(error: Exception) -> Planned:
    log.error("no schedule could be chosen; the current one stays in use", exc_info=error)
    return Planned(schedule=None, cause=repr(error))


# --- planning process ----------------------------------------------------------------------------

# Makes one choice of a schedule in a process of its own.
#
# A choice is seconds of Python code. In a thread of the trainer's process it would take Python's
# lock from the trainer for that time. So it is made by a process that begins for it, with low
# priority, and ends with it. That process is a plain ``python -c`` and no process of
# :mod:`multiprocessing`, which would begin by importing the trainer's main module: a script
# without ``if __name__ == "__main__"`` would train a second time.
#
# Invariants:
# - The process ends when its choice is made, when it is not wanted any more, after :data:`LIMIT_S`,
#   and a moment after the trainer's process, whatever ended that.
# - What goes through its pipes was pickled by the other end, and nobody else has them.

LIMIT_S = 600.0
"""Seconds after which a choice is given up. It takes seconds on an idle core, and much longer
beside a trainer that uses all of them."""
_NICENESS = 5
"""Of two threads that want one core, the trainer's gets three quarters. With 10 it gets nine
tenths; choices then took a minute on a machine that had too few cores."""
_BEGUN = b"\0"
"""What the process says when it has imported everything. Without it, it could not begin."""
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from aprilsched.coordinator.replanning import child
child(int(sys.argv[2]))
"""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class NoProcess(Exception):
    """This choice cannot be made in a process of its own; the message says why."""


class _Failed(Exception):
    """The choice failed in its process."""


class _RaisedThere(_Failed):
    """An exception of the planner, which looks here as it did there."""

    def __init__(self, shown: str, trace: str) -> None:
        super().__init__(shown)
        self.add_note(f"In the process of the planner:\n{trace}")

    def __repr__(self) -> str:
        return str(self)


# --- the trainer's process -----------------------------------------------------------------------


async def planned_apart(planner: Planner, command: Plan, config: SchedulerConfig) -> Schedule:
    """The result of ``planner.plan(command, config)`` on copies of all three.

    Raises:
        NoProcess: if pickle cannot take one of them, if the process cannot read it, or if no
            process can be started.
        Exception: if the planner raises, or if the process ends or takes too long.
    """
    try:
        order = pickle.dumps((planner, command, config))
    except Exception as error:
        raise NoProcess(
            f"the planner must be picklable ({error}); define its class in a module."
        ) from error
    process = _Process()
    try:
        answer = await asyncio.to_thread(process.ask, order)
    finally:
        process.end()
    if not answer:
        raise NoProcess("the process ended before it began, which its output explains")
    try:
        kind, *rest = pickle.loads(answer.removeprefix(_BEGUN))  # noqa: S301
    except Exception as error:
        raise _Failed(
            f"its process ended with exit code {process.exit_code} and without an answer"
        ) from error
    match kind:
        case "unreadable":
            raise NoProcess(
                f"its process cannot import the planner ({rest[0]}); define it in a module."
            )
        case "raised":
            raise _RaisedThere(*rest)
        case _:
            return rest[0]


class _Process:
    """The process of one choice. :meth:`ask` is for a thread, :meth:`end` for any other one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted = True

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.returncode

    def ask(self, order: bytes) -> bytes:
        """Start the process, and wait for its answer."""
        with self._lock:
            if not self._wanted:
                return b""
            self._process = _started()
        with self._process as process:
            try:
                return process.communicate(order, timeout=LIMIT_S)[0]
            except subprocess.TimeoutExpired as late:
                raise _Failed(f"its process had no answer after {LIMIT_S:g} s") from late
            finally:
                process.kill()

    def end(self) -> None:
        with self._lock:
            self._wanted = False
            if self._process is not None:
                self._process.kill()


def _started() -> subprocess.Popen[bytes]:
    # A program in which Python is embedded says here what its Python is.
    python = multiprocessing.spawn.get_executable()
    if not python:
        raise NoProcess("nothing says where Python is")
    paths = json.dumps(sys.path, default=str)
    try:
        return subprocess.Popen(  # noqa: S603 (our own program)
            # -P keeps a file in the current directory from taking the place of a module.
            [os.fsdecode(python), "-P", "-c", _PROGRAM, paths, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_ONE_THREAD},
            # Ctrl-C on a terminal is for the trainer.
            process_group=0,
        )
    except OSError as error:
        raise NoProcess(f"no process can be started ({error})") from error


# --- the process of the choice -------------------------------------------------------------------


def child(parent: int) -> None:
    """Read an order, carry it out, and write the answer; `parent` is the trainer's process."""
    os.nice(_NICENESS)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    answers = os.dup(1)
    try:
        os.dup2(2, 1)  # A planner may print, and the answer is the only thing in its pipe.
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with os.fdopen(answers, "wb") as pipe:
        order = sys.stdin.buffer.read()
        pipe.write(_BEGUN)
        pipe.flush()
        pipe.write(pickle.dumps(_answer(order)))


def _answer(order: bytes) -> tuple[object, ...]:
    try:
        planner, command, config = pickle.loads(order)  # noqa: S301
    except Exception as error:
        return "unreadable", repr(error)
    try:
        schedule = planner.plan(command, config)
        pickle.dumps(schedule)
    except BaseException as error:
        return "raised", repr(error), traceback.format_exc()
    return "schedule", schedule


def _end_with(parent: int) -> None:
    """End this process a moment after its parent. Its pipes do not say when that is, because they
    are open in everything that the trainer's process has forked."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
