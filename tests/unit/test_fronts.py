"""Tests what every front of a scheduler promises to a trainer, with simulated engines: whatever
ends a call early, no batch is lost or delivered twice, and no call waits forever.

Each front's own tests cover what only that front has.
"""

# pyright: basic
# Ray has no complete types, and the fronts have no common one.
from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import (
    Batch,
    Handshake,
    Media,
    Prompt,
    PromptQueue,
    SamplingParams,
    SimPublisher,
    advantages,
)
from aprilsched.errors import ConfigError, PromptsExhausted, RefitError, SchedulerClosed
from aprilsched.simulation.engine.sequence import MEDIA_TOKENS
from tests.support import fronts, in_a_process
from tests.support.companions import check_rows
from tests.support.fronts import FRONTS, OWN, Front, in_a_fork, opened
from tests.support.interrupting import InterruptingLoop
from tests.support.ray_cluster import local_cluster, pid_of

LACKS: dict[str, dict[str, str]] = {
    "a_timeout_must_be_a_duration": {
        "asyncio actor": "asyncio has timeouts of its own",
    },
    "a_store_changes_nothing_of_it": {"actor": "the tests of actors that die have a store"},
    "a_forked_process_gets_an_error": {
        "actor": "Ray itself does not work in a forked process",
    },
    "what_was_acknowledged_does_not_come_again": {"actor": "the tests of actors that die have it"},
    "the_trainer_pushes_prompts": {"actor": "its prompts are made in the actor"},
    "an_interrupt_while_it_opens": {"actor": "leaving it leaves the actor as it is"},
    "errors_of_the_users_function_arrive": {
        "asyncio blocking": "the trainer makes it, and gets the error itself",
    },
    "what_cannot_be_sent_is_refused": {"asyncio blocking": "it is in the trainer's process"},
    "a_death_ends_every_call": {"asyncio blocking": "it is in the trainer's process"},
}
"""Which front has no such promise, and why."""


def test_each_exception_names_a_test():
    assert all(f"test_{name}" in globals() for name in LACKS)


# --- what is made once ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_cluster():
        yield


@pytest.fixture(scope="module")
def actor(cluster: None) -> None:
    """The actor that most tests share, one after the other."""
    fronts.start_actor(fronts.ACTOR, in_a_process.parts)


@pytest.fixture(params=FRONTS, ids=lambda front: front.name)
def front(request: pytest.FixtureRequest) -> Front:
    name = request.function.__name__.removeprefix("test_")
    for names, reason in LACKS.get(name, {}).items():
        if request.param.name in names.split():
            pytest.skip(reason)
    if request.param.in_actor:
        request.getfixturevalue("cluster")
    return request.param


@pytest.fixture(autouse=True)
def nothing_is_left(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """No process, no thread and no file outlives a scheduler."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(threading.enumerate())
    yield
    assert not multiprocessing.active_children()
    new = set(threading.enumerate()) - before
    assert not [each for each in new if each.name == "aprilsched-loop"]
    assert not list(tmp_path.glob("aprilsched-*"))


@pytest.fixture
def rollouts(front: Front, request: pytest.FixtureRequest) -> Iterator[Any]:
    """An open front with prompts that do not end. It may have delivered batches before."""
    if front.in_actor:
        request.getfixturevalue("actor")
    # With threads, so that offers and updates come at once. Calls that are to end early must wait.
    pace = "asynchronous" if "thread" in request.node.name else "synchronous"
    # A task that never waits for its engines is over before it is cancelled.
    scale = 0.02 if "interrupt" in request.node.name else 0.002
    with front.make(in_a_process.parts, pace=pace, time_scale=scale) as one:
        yield one


def prompt(*ids: int, **more: Any) -> Prompt:
    return Prompt(input_ids=np.array(ids, dtype=np.int32), **more)


def check(batches: list[Batch]) -> None:
    """Each batch has come once, in order, and so has each group, with all rows of its tokens."""
    indexes = [batch.index for batch in batches]
    assert indexes == list(range(indexes[0], indexes[0] + len(indexes)))
    groups = [group.group_id for batch in batches for group in batch.groups]
    assert len(set(groups)) == len(groups)
    for batch in batches:
        for rollout in batch.rollouts:
            check_rows(rollout)


# --- what a trainer asks for ---------------------------------------------------------------------


def test_batches_updates_evaluations_and_log_probabilities(rollouts: Any):
    base, batches = rollouts.version, [rollouts.next_batch()]
    figures = rollouts.report_logprobs(batches[0], [r.logprobs for r in batches[0].rollouts])
    assert (figures.whole.tokens, figures.whole.largest) == (batches[0].tokens, 0)
    for version in (base + 1, base + 2):
        report = rollouts.update_weights(SimPublisher())
        assert (report.version, rollouts.version, report.quarantined) == (version, version, {})
        batches.append(rollouts.next_batch())
    assert [batch.version for batch in batches] == [base, base + 1, base + 2]
    evaluated = rollouts.evaluate((prompt(number) for number in (1, 2)), group_size=3)
    assert [len(group.rollouts) for group in evaluated.groups] == [3, 3]
    batches += itertools.islice(rollouts, 2)
    check(batches)


def test_media_go_out_and_kept_answers_come_back(front: Front):
    """In a run without routed experts, which refuse media."""
    media = (Media("image", b"\x89PNG"), Media("audio", "http://a/b.wav"))
    kept = SamplingParams(max_new_tokens=5, keep=("prompt_tokens",))
    with opened(front, in_a_process.parts, companions=()) as rollouts:
        shown = rollouts.evaluate([prompt(1, 2, sampling=kept, media=media)], group_size=2)
    (group,) = shown.groups
    assert group.prompt.media == media
    for rollout in group.rollouts:
        (answer,) = rollout.answers
        assert answer.values == {"prompt_tokens": 2 + 2 * MEDIA_TOKENS}


@pytest.mark.parametrize(
    ("where", "rule", "asked"),
    [("episode", "again", {0: 1, 1: 2, 2: 1}), ("reward", "shrink", {0: 1, 2: 1})],
    ids=["episode again", "reward shrink"],
)
def test_groups_continue_without_a_lost_member(
    front: Front, where: str, rule: str, asked: dict[int, int]
):
    with opened(front, in_a_process.losing_parts, where, rule) as rollouts:
        batches = [rollouts.next_batch(), rollouts.next_batch()]
    check(batches)
    for batch in batches:
        for group in batch.groups:
            assert {each.index: each.info["asked"] for each in group.rollouts} == asked


def test_the_trainer_loads_weights_in_a_block(rollouts: Any):
    base = rollouts.version
    with rollouts.paused_for_weights(label=True) as engines:
        assert engines == ("sim-0",)
    assert rollouts.version == base + 1
    with pytest.raises(ZeroDivisionError), rollouts.paused_for_weights():
        raise ZeroDivisionError
    assert rollouts.version == base + 1
    with rollouts.paused_for_weights(version=base + 9, label=True):
        pass  # the engine that was left with inconsistent weights is repaired
    assert rollouts.version == rollouts.next_batch().version == base + 9
    with rollouts.asleep(tags=["kv_cache"]):
        rollouts.update_weights(SimPublisher())
    assert rollouts.next_batch().version == base + 10


def test_streams_are_batches_whose_groups_come_one_by_one(rollouts: Any):
    whole = rollouts.next_batch()
    for number in (1, 2):
        parts = list(rollouts.stream())
        assert {part.index for part in parts} == {whole.index + number}
        assert [part.complete for part in parts] == [False, True]
        assert [len(part.groups) for part in parts] == [1, 1]
        rollouts.update_weights(SimPublisher())
    for _ in rollouts.stream():
        break
    # A whole batch ends the one that was left in the middle.
    assert rollouts.next_batch().index == whole.index + 4


def test_single_samples_come_with_their_siblings(front: Front):
    with opened(front, in_a_process.sample_parts) as rollouts:
        whole = rollouts.next_batch()
        parts = list(rollouts.stream())
        rollouts.update_weights(SimPublisher())
        samples = [*whole.samples, *(sample for part in parts for sample in part.samples)]
    assert [len(part.samples) for part in parts] == [1] * 4
    assert len({sample.unit_id for sample in samples}) == len(samples) == 8
    for sample in samples:
        (sibling,) = sample.siblings
        assert sibling.index != sample.rollout.index
    expected = [sample.reward - sample.siblings[0].reward for sample in whole.samples]
    assert advantages(whole).tolist() == expected


def test_the_prompts_end(front: Front):
    with opened(front, in_a_process.parts, 5) as rollouts:
        assert [len(batch.groups) for batch in rollouts] == [2, 2, 1]
        for ended in (rollouts.next_batch, lambda: list(rollouts.stream())):
            with pytest.raises(PromptsExhausted):
                ended()
        with pytest.raises(ConfigError, match="at least one"):
            rollouts.evaluate([])


def test_the_trainer_pushes_prompts(front: Front):
    queue = PromptQueue()
    queue.put(prompt(1, 2))
    with front.make(in_a_process.pushed_parts, queue) as rollouts:
        own = front.name == "asyncio"
        text = None if own else r"within 0\.2 s; the next call continues"
        with pytest.raises(TimeoutError, match=text):
            rollouts.next_batch(timeout=0.2)
        queue.put(prompt(3, 4, key="second"))
        assert {group.prompt.key for group in rollouts.next_batch().groups} >= {"second"}
        queue.put(prompt(5, 6))
        queue.close()
        assert [len(batch.groups) for batch in rollouts] == [1]


def test_a_run_resumes_from_a_checkpoint(front: Front, tmp_path: Path):
    path = tmp_path / "checkpoint"
    with opened(front, in_a_process.parts, stored=True) as rollouts:
        first = rollouts.next_batch()
        rollouts.checkpoint(path)
        check([first, rollouts.next_batch()])
    with opened(front, in_a_process.parts, stored=True, restore=path) as rollouts:
        # Its groups have ids of their own, because it may be another scheduler's.
        assert rollouts.next_batch().index == first.index + 1


def test_what_was_acknowledged_does_not_come_again(front: Front, tmp_path: Path):
    with opened(front, in_a_process.parts, stored=True) as rollouts:
        trained, untrained = rollouts.next_batch(), rollouts.next_batch()
        trained.acknowledge()
        rollouts.checkpoint(tmp_path / "checkpoint", acknowledge=False)
    saved = tmp_path / "checkpoint"
    with opened(front, in_a_process.parts, stored=True, restore=saved) as rollouts:
        again = rollouts.next_batch()
        assert (again.index, again.redelivered) == (untrained.index, True)
        pairs = zip(again.rollouts, untrained.rollouts, strict=True)
        assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in pairs)
        assert rollouts.next_batch().index == untrained.index + 1


# --- waits that end early ------------------------------------------------------------------------


def test_a_timeout_loses_no_batch(rollouts: Any):
    check(under_timeouts(rollouts, 12))


def under_timeouts(rollouts: Any, least: int) -> list[Batch]:
    """Batches of calls with timeouts, some of which were too short."""
    batches: list[Batch] = []
    timeouts = 0
    for seconds in itertools.cycle((0, 0.0001, 0.01, 0.1)):
        try:
            batches.append(rollouts.next_batch(timeout=seconds))
        except TimeoutError:
            timeouts += 1
        if len(batches) >= least and timeouts:
            break
    return batches


def test_a_timeout_of_a_stream_loses_no_group(rollouts: Any):
    parts: list[Batch] = []
    patience = itertools.cycle((0, 0.001, 0.1))
    while len(parts) < 10:
        with suppress(TimeoutError):
            parts += itertools.islice(rollouts.stream(timeout=next(patience)), 1)
    check_parts(parts)


def test_a_timeout_must_be_a_duration(rollouts: Any):
    for timeout in (-1, float("nan")):
        with pytest.raises(ConfigError, match="give seconds, 0 or more"):
            rollouts.next_batch(timeout=timeout)
        with pytest.raises(ConfigError, match="give seconds, 0 or more"):
            next(rollouts.stream(timeout=timeout))


def under_interrupts(front: Front, rollouts: Any, take: Callable[[], Any], least: int) -> list[Any]:
    """What calls of `take` returned that were interrupted at random moments."""
    got: list[Any] = []
    interrupts = 0
    with InterruptingLoop(seed=3, interrupt=front.interrupt(rollouts)) as alarm:
        while len(got) < least or not interrupts:
            taken = None
            try:
                alarm.start()
                taken = take()
                alarm.stop()
            except KeyboardInterrupt:
                interrupts += 1
            if taken is not None:
                got.append(taken)
        alarm.stop()
    return got


def test_an_interrupt_loses_no_batch(front: Front, rollouts: Any):
    batches = under_interrupts(front, rollouts, rollouts.next_batch, 30)
    check([*batches, rollouts.next_batch()])


def test_a_store_changes_nothing_of_it(front: Front):
    with opened(front, in_a_process.parts, stored=True, time_scale=0.02) as rollouts:
        batches = under_interrupts(front, rollouts, rollouts.next_batch, 30)
        check([*batches, *under_timeouts(rollouts, 12)])


def test_an_interrupt_of_a_stream_loses_no_group(front: Front, rollouts: Any):
    """Each loop takes one group, and the next loop continues."""
    parts: list[Batch] = []

    def take() -> None:
        for part in rollouts.stream():
            parts.append(part)
            break

    def taken() -> int | None:
        # What was taken counts, although the loop that took it was interrupted when it was left.
        before = len(parts)
        with suppress(KeyboardInterrupt):
            take()
            return 1
        if len(parts) == before:
            raise KeyboardInterrupt
        return 1

    under_interrupts(front, rollouts, taken, 30)
    check_parts(parts)


def check_parts(parts: list[Batch]) -> None:
    """Each group has come once, and each batch is whole, but for the first and the last."""
    groups = [group.group_id for part in parts for group in part.groups]
    assert len(set(groups)) == len(groups) == len(parts)
    sizes = [(at, len(list(some))) for at, some in itertools.groupby(p.index for p in parts)]
    assert [at for at, _ in sizes] == list(range(parts[0].index, parts[-1].index + 1))
    assert {size for _, size in sizes[1:-1]} == {2}


def test_an_update_of_another_thread_withdraws_no_batch_on_its_way(rollouts: Any):
    """It had: the trainer got a batch whose groups were offered again."""
    over = threading.Event()

    def update() -> None:
        while not over.is_set():
            rollouts.update_weights(SimPublisher())

    with ThreadPoolExecutor() as threads:
        updates = threads.submit(update)
        batches = list(itertools.islice(rollouts, 60))
        over.set()
        updates.result()
    check(batches)


def test_threads_that_call_at_once_share_no_batch(rollouts: Any):
    """A call that was refused had given back the batch that was on its way to another one."""
    batches: list[Batch] = []

    def take() -> None:
        while len(batches) < 60:
            try:
                batches.append(rollouts.next_batch())
            except ConfigError:  # Six threads that asked again at once took a core each.
                time.sleep(0.002)

    with ThreadPoolExecutor(6) as threads:
        for call in [threads.submit(take) for _ in range(6)]:
            call.result()
    check(sorted(batches, key=lambda batch: batch.index))


def test_an_interrupt_while_it_opens(front: Front):
    rollouts = front.make(in_a_process.slow_parts)
    with InterruptingLoop(seed=0, interrupt=front.interrupt(rollouts)):
        timer = threading.Timer(
            1.0, signal.pthread_kill, (threading.main_thread().ident, signal.SIGALRM)
        )
        timer.start()
        with pytest.raises(KeyboardInterrupt), rollouts:
            pass
        timer.join()


# --- what goes wrong -----------------------------------------------------------------------------


def test_a_publisher_that_raises_is_named(front: Front, rollouts: Any):
    base = rollouts.version
    with pytest.raises(RefitError, match="No space left") as raised:
        rollouts.update_weights(in_a_process.Raising())
    assert isinstance(raised.value.__cause__, OSError)
    assert rollouts.update_weights(SimPublisher()).version == rollouts.version > base
    assert rollouts.next_batch().version == rollouts.version


def test_errors_of_the_users_function_arrive(front: Front):
    with (
        pytest.raises(FileNotFoundError, match=r"prompts\.jsonl") as raised,
        opened(front, in_a_process.raised_parts),
    ):
        pass
    assert "in raised_parts" in raised.value.__notes__[0]


def test_what_cannot_be_sent_is_refused(front: Front, rollouts: Any):
    version, before = rollouts.version, rollouts.next_batch()
    publishers: list[Any] = [Handshake()]
    if not front.in_actor:  # Ray sends functions
        publishers.append(SimPublisher(lambda version: 0))
    for publisher in publishers:
        with pytest.raises(ConfigError, match=r"as FromTrainer\(publisher, fleet\)"):
            rollouts.update_weights(publisher)
    assert rollouts.version == version
    check([before, rollouts.next_batch()])


def test_a_death_ends_every_call(front: Front):
    """A scheduler without a store, whose process is killed."""
    with opened(front, in_a_process.parts) as rollouts:
        rollouts.next_batch()
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(lambda: list(rollouts))
            os.kill(process_of(front), signal.SIGKILL)
            with pytest.raises(SchedulerClosed, match=r"-9; open a new|no store to go on from"):
                waiting.result()
        for call in (rollouts.next_batch, lambda: rollouts.update_weights(SimPublisher())):
            with pytest.raises(SchedulerClosed):
                call()
        with pytest.raises(SchedulerClosed), rollouts.asleep():
            pass


def process_of(front: Front) -> int:
    if front.in_actor:
        import ray

        return pid_of(ray.get_actor(OWN))
    (only,) = multiprocessing.active_children()
    assert only.pid is not None
    return only.pid


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_gets_an_error(rollouts: Any):
    batch = rollouts.next_batch()
    for call in (
        rollouts.next_batch,
        lambda: rollouts.update_weights(SimPublisher()),
        lambda: rollouts.checkpoint("unused"),
    ):
        text = in_a_fork(call)
        assert text.startswith("SchedulerClosed: this process was forked"), text
    # Leaving the block there is nothing, and what the child looks at is its own copy.
    assert in_a_fork(lambda: (rollouts.close(), batch.tokens)) == f"(None, {batch.tokens})"
    check([batch, rollouts.next_batch()])


# --- the end -------------------------------------------------------------------------------------


def test_close_before_it_is_opened(front: Front):
    rollouts = front.make(in_a_process.parts)
    rollouts.close()
    with pytest.raises(SchedulerClosed):
        rollouts.next_batch()


PHASES: dict[str, Callable[[Any], Any]] = {
    "a batch": lambda rollouts: rollouts.next_batch(),
    "a stream": lambda rollouts: list(rollouts.stream()),
    "an update": lambda rollouts: rollouts.update_weights(SimPublisher()),
    "an evaluation": lambda rollouts: rollouts.evaluate([prompt(1)]),
}


@pytest.mark.parametrize("phase", PHASES)
def test_close_ends_a_call_in_each_phase(rollouts: Any, phase: str):
    """Another thread that calls repeatedly receives SchedulerClosed."""
    call, started = PHASES[phase], threading.Event()

    def again_and_again() -> None:
        while True:
            call(rollouts)
            started.set()

    with ThreadPoolExecutor() as threads:
        calls = threads.submit(again_and_again)
        started.wait()
        rollouts.close()
        # The calls of a trainer that leaves an actor are cancelled there.
        with pytest.raises((SchedulerClosed, CancelledError)):
            calls.result()
    rollouts.close()
    with pytest.raises(SchedulerClosed):
        rollouts.next_batch()
