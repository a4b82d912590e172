"""Tests the blocking RolloutScheduler, for trainers without asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import signal
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

import aprilsched
from aprilsched import (
    Handshake,
    LongTailWorkload,
    MemoryStore,
    Prompt,
    Rollout,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
)
from aprilsched.errors import SchedulerClosed
from aprilsched.fronts import blocking
from aprilsched.kernel.core.messages.events import VersionSeen
from aprilsched.kernel.shell.rollouts import SchedulerOptions
from aprilsched.simulation.engine import run_virtual
from tests.support.fronts import in_a_fork
from tests.support.interrupting import InterruptingLoop

WORKLOAD = LongTailWorkload(median=9, cap=40, group_size=2, seed=1)
CONFIG = SchedulerConfig(batch_groups=2, group_size=2, over_provision=1.5)


def make(
    *, config: SchedulerConfig = CONFIG, time_scale: float = 0.001, **parts: Any
) -> blocking.RolloutScheduler:
    fleet = SimFleet(1, time_scale=time_scale)
    return blocking.RolloutScheduler(fleet, WORKLOAD, config=config, **parts)


def test_asynchronous_functions_can_be_called_on_the_schedulers_loop():
    fleet = SimFleet(1, time_scale=0.01)

    async def seen() -> tuple[str, int]:
        return threading.current_thread().name, await fleet.engines[0].version()

    rollouts = blocking.RolloutScheduler(fleet, WORKLOAD)
    with rollouts:
        rollouts.update_weights(SimPublisher(), version=3)
        assert rollouts.on_loop(seen) == ("aprilsched-loop", 3)
    with pytest.raises(SchedulerClosed):
        rollouts.on_loop(seen)


@pytest.mark.parametrize("late", [False, True], ids=["the loop stops", "the loop is closed"])
def test_a_call_while_another_thread_closes_is_an_error(
    monkeypatch: pytest.MonkeyPatch, late: bool
):
    """Both see an open scheduler, and the other thread is faster."""
    original = blocking.LoopThread.stop
    rollouts = make()

    async def never() -> None:
        await asyncio.Event().wait()

    with rollouts, ThreadPoolExecutor() as threads:
        thread = rollouts._thread
        assert thread is not None

        def stop(self: blocking.LoopThread) -> None:
            if late:
                original(self)
            rollouts._thread = thread
            calls.append(threads.submit(rollouts.on_loop, never))
            while not rollouts._calls and not calls[0].done():
                pass
            rollouts._thread = None
            if not late:
                original(self)

        calls: list[Any] = []
        monkeypatch.setattr(blocking.LoopThread, "stop", stop)
        rollouts.close()
        with pytest.raises(SchedulerClosed):
            calls[0].result()


def test_it_has_every_public_name_of_the_other():
    def public(cls: type) -> set[str]:
        return {name for name in dir(cls) if not name.startswith("_")}

    # What the fronts of a scheduler ask, and a trainer does not.
    fronts = {"acknowledge", "hand_back", "hold", "last_refit", "offered", "restores", "saved"}
    fronts |= {"store_error", "stored", "suspect_weights", "take", "trainer_has", "trust_weights"}
    fronts |= {"republish_with", "withdraw"}
    assert public(aprilsched.RolloutScheduler) - fronts <= public(blocking.RolloutScheduler)


def test_the_options_are_the_keywords_of_the_other():
    parameters = inspect.signature(aprilsched.RolloutScheduler).parameters.values()
    keywords = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert SchedulerOptions.__annotations__.keys() == keywords


class InterruptAt:
    """Raises KeyboardInterrupt at the `line`-th line that a call of the scheduler executes in the
    trainer's thread, in the library or in what it waits with."""

    FILES = ("aprilsched/fronts/blocking.py", "concurrent/futures/_base.py", "threading.py")

    def __init__(self, line: int) -> None:
        self._left = line
        self.raised = False

    def __enter__(self) -> None:
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if frame.f_code.co_filename.endswith(self.FILES) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        # In next_batch() itself Python handles no signal between the last call and the return.
        if event == "line" and not self.raised and frame.f_code.co_name != "next_batch":
            self._left -= 1
            if self._left < 0:
                self.raised = True
                raise KeyboardInterrupt
        return self._line


def test_an_interrupt_at_any_line_is_a_keyboard_interrupt_and_loses_no_batch():
    """One inside of a lock of concurrent.futures had become "cannot release un-acquired lock"."""
    got: list[int] = []
    with make(time_scale=0.01) as rollouts:
        line, interrupted = 0, True
        while interrupted:
            interrupt = InterruptAt(line)
            try:
                with interrupt:
                    batch = rollouts.next_batch()
            except KeyboardInterrupt:
                pass
            else:
                got.append(batch.index)
            interrupted = interrupt.raised
            line += 1
        got.append(rollouts.next_batch().index)
        delivered = rollouts.state.in_flight.counters.batches
    assert line > 20
    assert got == list(range(delivered))


FOLLOWING = replace(CONFIG, pace="asynchronous", follow_weights=True)


@pytest.mark.parametrize("arrives", [False, True])
def test_a_version_that_is_followed_waits_for_a_batch_on_its_way(arrives: bool):
    async def main() -> None:
        async with aprilsched.RolloutScheduler(SimFleet(1), WORKLOAD, config=FOLLOWING) as rollouts:
            await rollouts.offered()
            rollouts._feed(VersionSeen(engine="sim-0", version=5))
            assert rollouts.state.weights.update is None
            if arrives:
                rollouts.take()
            else:
                rollouts.hand_back()
            assert rollouts.state.weights.update is not None
            assert rollouts.state.delivery.offer is None

    run_virtual(main())


def test_what_came_during_an_interrupt_is_offered_and_not_acknowledged():
    with make(config=replace(CONFIG, max_staleness=0), store=MemoryStore()) as rollouts:
        with InterruptingLoop(seed=0) as alarm:
            alarm.start()
            with contextlib.suppress(KeyboardInterrupt):
                for batch in rollouts:
                    batch.acknowledge()
        rollouts.update_weights(SimPublisher())
        first = rollouts.state.in_flight.counters.batches
        batch = rollouts.next_batch()
        assert (batch.index, batch.version) == (first, rollouts.version)


def test_a_second_interrupt_ends_the_wait_for_a_call_that_is_withdrawn():
    busy, go_on = threading.Event(), threading.Event()

    async def hold_the_loop(rollout: Rollout, prompt: Prompt) -> float:
        busy.set()
        go_on.wait(60)
        return 0.0

    with make(reward=hold_the_loop) as rollouts:

        def interrupt_twice() -> None:
            busy.wait()
            for _ in range(2):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
                # The loop is held up, so only the second one can end the wait.
                threading.Event().wait(0.2)
            go_on.set()

        helper = threading.Thread(target=interrupt_twice)
        helper.start()
        with InterruptingLoop(seed=0):
            try:
                rollouts.next_batch()
            except KeyboardInterrupt:
                held = not go_on.is_set()
            else:
                held = False
            helper.join()
        assert held
        assert rollouts.next_batch().index == 0


# --- forks -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_has_no_state_and_acknowledges_nothing():
    with make(store=MemoryStore()) as rollouts:
        batch = rollouts.next_batch()
        text = in_a_fork(lambda: rollouts.state)
        assert text.startswith("SchedulerClosed: this process was forked"), text
        assert "another process" in in_a_fork(batch.acknowledge)
        assert rollouts.next_batch().index == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_the_asyncio_scheduler_is_refused_in_a_forked_process():
    async def main() -> str:
        async with aprilsched.RolloutScheduler(SimFleet(1), WORKLOAD, config=CONFIG) as rollouts:
            await rollouts.next_batch()

            def ended(call: Coroutine[Any, Any, object]) -> str:
                """The call ends at once: there is nothing to wait for in a forked process."""
                try:
                    call.send(None)
                except StopIteration:
                    return "an answer"
                return "a wait"

            assert in_a_fork(lambda: ended(rollouts.close())) == "'an answer'"
            text = in_a_fork(lambda: ended(rollouts.next_batch()))
            assert (await rollouts.next_batch()).index == 1
            return text

    assert run_virtual(main()).startswith("SchedulerClosed: this process was forked")


# --- weights that the trainer moves itself -------------------------------------------------------


def test_another_thread_shakes_hands():
    with make() as rollouts, ThreadPoolExecutor() as threads:
        rollouts.next_batch()
        handshake = Handshake(label=True)
        update = threads.submit(rollouts.update_weights, handshake, version=5)
        assert handshake.wait_paused(60) == ("sim-0",)
        assert not update.done()
        handshake.done()
        assert update.result(60).version == 5


def test_a_thread_that_waits_for_a_pause_that_does_not_come_has_a_timeout():
    with pytest.raises(TimeoutError):
        Handshake().wait_paused(0.01)


def test_an_interrupt_before_the_loop_has_the_call_leaves_no_coroutine(
    monkeypatch: pytest.MonkeyPatch,
):
    """Ctrl-C between the call and its start on the loop. A coroutine that is never awaited would
    be a RuntimeWarning in the user's terminal, and it fails this test."""
    with make() as r:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(blocking._Call, "__init__", interrupt)  # pyright: ignore
            with pytest.raises(KeyboardInterrupt):
                r.next_batch()
            gc.collect()
        assert r.next_batch().index == 0
