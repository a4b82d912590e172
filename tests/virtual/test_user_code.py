"""Tests code of the user that raises exceptions which asyncio reserves, or that does not end.

Such an exception becomes an entry of the ledger with its cause, an error of the call, or the end of
the run with one sentence. It never ends a task of the scheduler without a message.
"""

# User functions have no types.
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import copy
import functools
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from aprilsched import Prompt, RolloutScheduler, SamplingParams, SimFleet, SimPublisher, Turn
from aprilsched.config import Refill, Retries
from aprilsched.errors import (
    CallbackError,
    ConfigError,
    InvariantViolation,
    PromptsExhausted,
    RefitError,
    RunEnded,
    RunGivenUp,
    SchedulerClosed,
)
from aprilsched.fronts import blocking
from aprilsched.fronts.process import Raised
from aprilsched.kernel.core.policies.refill import PoolView
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.shell.tasks import Tasks
from aprilsched.kernel.store import MemoryStore
from aprilsched.planning import Planner
from aprilsched.simulation.engine import SimEngine, run_virtual
from tests.support import small
from tests.support.table import each_row

pytestmark = pytest.mark.virtual_time

SHORT = SamplingParams(max_new_tokens=20, ignore_eos=True)
ONE = np.array([1], dtype=np.int32)
LONG_S = 10_000
"""Limit in seconds of virtual time; nothing new happens after it."""

STRANGE = [
    asyncio.CancelledError,
    StopIteration,
    StopAsyncIteration,
    GeneratorExit,
    SystemExit,
]


config = functools.partial(
    small.config,
    batch_groups=2,
    group_size=2,
    over_provision=1.0,
    retries=Retries(failed_groups=4),
)
workload = functools.partial(small.workload, median=40, sigma=0.5, cap=200, group_size=2)


def raising(error: type[BaseException]) -> Callable[..., Any]:
    """A coroutine function that raises `error`; Python makes a RuntimeError of StopIteration."""

    async def callback(*_: Any) -> Any:
        raise error("of the user's")

    return callback


def opened(
    source: Any = None, *, fleet: SimFleet | None = None, **arguments: Any
) -> RolloutScheduler:
    """Return a scheduler that is not open yet."""
    prompts = workload() if source is None else source
    settings = arguments.pop("config", config())
    return RolloutScheduler(fleet or SimFleet(1), prompts, config=settings, **arguments)


def after_a_turn(fail: Callable[..., Any]) -> Callable[..., Any]:
    async def episode(turn: Turn, prompt: Prompt) -> float:
        await turn.generate(prompt.input_ids, SHORT)
        return await fail()

    return episode


@each_row("error", STRANGE)
@each_row(
    ("function", "more", "ledger"),
    [
        ("reward", {}, {Reason.REWARD_FAILED: 8}),
        ("reward", {"reward_scope": "group"}, {Reason.REWARD_FAILED: 8}),
        ("accept", {}, {Reason.REWARD_FAILED: 8}),
        ("episode", {}, {Reason.EPISODE_FAILED: 4, Reason.SIBLING_FAILED: 4}),
    ],
)
async def test_a_function_that_raises_anything_costs_its_group(
    error: type[BaseException], function: str, more: dict[str, Any], ledger: dict[Reason, int]
):
    fail = raising(error)
    given = after_a_turn(fail) if function == "episode" else fail
    async with opened(**{function: given}, **more) as rollouts:
        with pytest.raises(RunGivenUp, match=r"of the user's|StopIteration"):
            async with asyncio.timeout(LONG_S):
                await rollouts.next_batch()
        found = rollouts.state.in_flight.ledger
    assert found.rollouts == ledger
    if function == "reward":
        assert "the reward function raised" in found.entries[0].cause


async def test_plain_functions_in_threads_may_raise_anything():
    def no_match(rollout: Any, prompt: Any) -> float:
        return next(reward for reward in list[float]())

    def ends_the_process(rollout: Any, prompt: Any) -> float:
        raise SystemExit(3)

    def cancelled(rollout: Any, prompt: Any) -> float:
        raise asyncio.CancelledError

    for reward, printed in (
        (no_match, "StopIteration"),
        (ends_the_process, "SystemExit"),
        (cancelled, "CancelledError"),
    ):
        async with RolloutScheduler(
            SimFleet(1, time_scale=0.001), workload(), reward=reward, config=config()
        ) as rollouts:
            with pytest.raises(RunGivenUp, match=f"the reward function raised {printed}"):
                await rollouts.next_batch()


@pytest.mark.parametrize("error", STRANGE)
@pytest.mark.parametrize("plain", [True, False])
async def test_a_source_of_prompts_that_raises_anything_ends_the_run(
    error: type[BaseException], plain: bool
):
    class Source:
        def __init__(self) -> None:
            self.left = 3

        def __iter__(self) -> Source:
            return self

        def __next__(self) -> Prompt:
            self.left -= 1
            if self.left < 0:
                raise error("of the user's")
            return Prompt(input_ids=ONE, sampling=SHORT)

    class AsyncSource(Source):
        __iter__ = None  # type: ignore[assignment]

        def __aiter__(self) -> AsyncSource:
            return self

        async def __anext__(self) -> Prompt:
            return self.__next__()

    ends = StopIteration if plain else StopAsyncIteration

    if plain and error is StopAsyncIteration:
        pytest.skip("an ordinary exception there")
    async with asyncio.timeout(LONG_S), opened(Source() if plain else AsyncSource()) as rollouts:
        await rollouts.next_batch()
        if error is ends:
            assert len((await rollouts.next_batch()).groups) == 1
            return
        for _ in range(2):
            with pytest.raises((CallbackError, RuntimeError, StopAsyncIteration)):
                await rollouts.next_batch()


async def test_a_source_that_waits_for_more_does_not_hold_closing_up():
    class Pushed:
        """Yields some prompts and then waits for more, as a queue does."""

        def __init__(self, count: int) -> None:
            self.left, self.waits, self.cancelled = count, False, False

        def __aiter__(self) -> Pushed:
            return self

        async def __anext__(self) -> Prompt:
            if not self.left:
                self.waits = True
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled = True
            self.left -= 1
            return Prompt(input_ids=ONE, sampling=SHORT)

    settings = config(pace="asynchronous", over_provision=1.5)
    for count in range(1, 12):
        source = Pushed(count)
        async with asyncio.timeout(LONG_S), opened(source, config=settings):
            await asyncio.sleep(100)
        assert source.cancelled == source.waits


class Publisher(SimPublisher):
    """A publisher that raises `error` in the named method."""

    def __init__(self, method: str, error: BaseException) -> None:
        super().__init__()
        self.method, self.error = method, error

    def _at(self, method: str) -> None:
        if self.method == method:
            raise self.error

    async def prepare(self, version: int) -> None:
        self._at("prepare")

    def holds(self, version: int) -> bool:
        self._at("holds")
        return False

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        self._at("publish")
        return await super().publish(version, engines)


@each_row("error", STRANGE)
@each_row("method", ["prepare", "holds", "publish"])
async def test_a_publisher_that_raises_anything_fails_its_update(
    error: type[BaseException], method: str
):
    async with opened() as rollouts:
        async with asyncio.timeout(LONG_S):
            await rollouts.next_batch()
            with pytest.raises(Exception, match=r".") as caught:
                await rollouts.update_weights(Publisher(method, error("of the user's")))
            assert isinstance(
                caught.value, CallbackError | RefitError | RuntimeError | StopAsyncIteration
            )
            assert rollouts.version == 0
            await rollouts.update_weights(SimPublisher())
            assert rollouts.version == 1
            assert (await rollouts.next_batch()).version == 1


async def test_a_value_that_is_not_a_publisher_is_refused():
    """An adapter of a trainer takes a folder, so users may pass a folder here too."""
    async with opened() as rollouts:
        with pytest.raises(ConfigError, match=r"got '/weights', .*give a publisher"):
            await rollouts.update_weights("/weights")  # pyright: ignore[reportArgumentType]
        await rollouts.update_weights(SimPublisher())


@each_row("text", ["What is 2+2?", ["What", "is"]])
def test_text_in_the_place_of_ids_is_named(text: Any):
    with pytest.raises(ConfigError, match="input_ids is text; give the ids"):
        Prompt(input_ids=text)


async def test_a_publisher_that_returns_none_gets_a_remedy():
    class Silent(SimPublisher):
        async def publish(self, version: int, engines: Sequence[Engine]) -> Any:
            await super().publish(version, engines)

    async with opened() as rollouts:
        await rollouts.next_batch()
        with pytest.raises(RefitError, match="return a mapping from each engine's name"):
            await rollouts.update_weights(Silent())
        await rollouts.update_weights(SimPublisher())
        await rollouts.next_batch()


@each_row("error", STRANGE)
async def test_a_listener_that_raises_anything_is_detached(error: type[BaseException]):
    class Listener:
        calls = 0

        def on_event(self, event: Any, now: float) -> None:
            self.calls += 1
            raise error("of the user's")

        def on_command(self, command: Any, now: float) -> None:
            self.calls += 1

    listener = Listener()
    async with opened(listeners=[listener]) as rollouts:
        async with asyncio.timeout(LONG_S):
            await rollouts.next_batch()
    assert listener.calls == 1


@each_row("error", [*STRANGE, None])
async def test_a_planner_that_raises_anything_keeps_the_schedule(error: type[BaseException] | None):
    class Raising(Planner):
        calls = 0

        def plan(self, command: Any, config: Any) -> Any:
            self.calls += 1
            if error is not None:
                raise error("of the user's")

    planner = Raising()
    planner.inline = True
    async with opened(config=config(over_provision="auto"), planner=planner) as rollouts:
        async with asyncio.timeout(LONG_S):
            for _ in range(6):
                await rollouts.next_batch()
    assert planner.calls


@each_row("reward", [{0: 1.0, 1: 2.0}, "12", {1.0, 2.0}])
async def test_a_group_reward_that_is_not_a_sequence_is_refused(reward: Any):
    async def wrong(group: Any) -> Any:
        return reward

    async with opened(reward=wrong, reward_scope="group") as rollouts:
        with pytest.raises(RunGivenUp, match="return one reward for each rollout, in order"):
            await rollouts.next_batch()


async def test_an_array_is_a_group_reward():
    async def scores(group: Any) -> Any:
        return np.array([1.0, 2.0], dtype=np.float32)

    async with opened(reward=scores, reward_scope="group") as rollouts:
        batch = await rollouts.next_batch()
        assert [rollout.reward for rollout in batch.rollouts] == [1.0, 2.0] * 2


def test_ctrl_c_inside_user_code_releases_the_engines():
    fleet = SimFleet(2)

    async def episode(turn: Turn, prompt: Prompt) -> float:
        await turn.generate(prompt.input_ids, SHORT)
        raise KeyboardInterrupt

    async def main() -> None:
        async with RolloutScheduler(fleet, workload(), episode=episode, config=config()) as r:
            await r.next_batch()

    with pytest.raises(KeyboardInterrupt):
        run_virtual(main())
    assert not any(engine.batcher.paused or engine.batcher.running for engine in fleet.engines)


async def test_user_code_that_ignores_its_cancellation_is_left_behind(
    caplog: pytest.LogCaptureFixture,
):
    ends = False

    async def stubborn(rollout: Any, prompt: Any) -> float:
        while not ends:
            try:
                await asyncio.sleep(LONG_S)
            except asyncio.CancelledError:
                continue
        return 1.0

    async with asyncio.timeout(LONG_S):
        async with opened(reward=stubborn) as rollouts:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(rollouts.next_batch(), 50)
    ends = True
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    assert "the reward function ignores that it was cancelled" in caplog.text


async def test_cancelling_the_schedulers_tasks_ends_with_an_error():
    async with opened() as rollouts:
        waiting = asyncio.create_task(rollouts.next_batch())
        await asyncio.sleep(0.01)
        for task in asyncio.all_tasks() - {asyncio.current_task(), waiting}:
            if task.get_name() != "aprilsched":
                task.cancel()
        with pytest.raises((InvariantViolation, CallbackError, SchedulerClosed)):
            async with asyncio.timeout(LONG_S):
                await waiting


async def test_a_key_that_is_in_use_is_not_given_twice():
    tasks = Tasks()
    async with asyncio.TaskGroup() as group:
        tasks.run_in(group)
        tasks.start("one", asyncio.sleep(0))
        with pytest.raises(InvariantViolation, match="runs already"):
            tasks.start("one", asyncio.sleep(0))


async def test_work_added_while_the_tasks_end_does_not_run():
    """A trainer's call may come between the failure of a task and the end of its group."""
    tasks, late = Tasks(), asyncio.Event()

    async def work() -> None:
        late.set()

    async def fails() -> None:
        async with asyncio.TaskGroup() as group:
            tasks.run_in(group)
            tasks.fail(ValueError("it broke"))
            try:
                await asyncio.sleep(10)
            finally:
                tasks.start("late", work())

    with pytest.raises(ExceptionGroup) as raised:
        await fails()
    assert [str(error) for error in raised.value.exceptions] == ["it broke"]
    assert not late.is_set()


# --- prompts ---------------------------------------------------------------------------------


def bad_prompts() -> list[Any]:
    return [
        np.array([1, 2, 3]),
        Prompt(input_ids=ONE, sampling=(SHORT, SHORT, SHORT)),
        Prompt(input_ids=ONE, sampling={"max_tokens": 5}),  # type: ignore[arg-type]
        Prompt(input_ids=ONE, sampling=SamplingParams(extra={"n": 4})),
        Prompt(input_ids=ONE, sampling=SamplingParams(extra={"max_new_tokens": 4})),
    ]


@each_row("plain", [True, False])
async def test_a_bad_prompt_is_a_ledger_entry_and_ends_no_run(plain: bool):
    good = Prompt(input_ids=ONE, sampling=SHORT)
    source = [item for bad in bad_prompts() for item in (good, bad, good)]

    async def slowly() -> AsyncIterator[Any]:
        for item in source:
            yield item

    async with opened(source if plain else slowly()) as rollouts:
        assert sum([len(batch.groups) async for batch in rollouts]) == 10
        ledger = rollouts.state.in_flight.ledger
        assert ledger.rollouts == {Reason.BAD_PROMPT: 5}
        causes = [entry.cause for entry in ledger.entries]
        for cause, printed in zip(
            causes,
            ("wrap token ids", "3 sampling", "give SamplingParams", "group_size", "outside"),
            strict=True,
        ):
            assert printed in cause


async def test_a_prompt_that_fails_to_build_is_a_ledger_entry():
    def made(row: Any) -> Prompt:
        sampling = SamplingParams(max_new_tokens=row, ignore_eos=True)
        return Prompt(input_ids=ONE, sampling=sampling)

    rows: list[Any] = [20, 20.5, 20, float("nan"), np.int64(20), np.int32(20)]

    async with opened(map(made, rows)) as rollouts:
        assert sum([len(batch.groups) async for batch in rollouts]) == 4
        assert rollouts.state.in_flight.ledger.rollouts == {Reason.BAD_PROMPT: 2}
    # A generator ends when it raises: its later prompts are lost, and the run ends with the error.
    async with RolloutScheduler(
        SimFleet(1), (made(row) for row in rows), config=config()
    ) as rollouts:
        with pytest.raises(ConfigError, match=r"max_new_tokens is 20\.5"):
            async for _ in rollouts:
                pass


async def test_engines_continue_while_a_plain_source_is_read(monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    resume = SimEngine.resume

    async def seen(engine: SimEngine) -> None:
        calls.append("continue")
        await resume(engine)

    def read(prompt: Prompt) -> Prompt:
        calls.append("prompt")
        return prompt

    monkeypatch.setattr(SimEngine, "resume", seen)
    more = {"straggler": "in_place", "over_provision": 2.0}
    async with RolloutScheduler(
        SimFleet(2), map(read, workload()), config=config(**more)
    ) as rollouts:
        await rollouts.next_batch()
        await rollouts.update_weights(SimPublisher())
        calls.clear()
        await rollouts.next_batch()
    assert calls[: calls.index("prompt")] == ["continue"] * 2


async def test_a_resumed_run_passes_over_bad_prompts_too():
    def source() -> list[Any]:
        rows = [
            Prompt(input_ids=np.array([i + 1], dtype=np.int32), key=i, sampling=SHORT)
            for i in range(12)
        ]
        return [None if i % 3 == 1 else row for i, row in enumerate(rows)]

    store = MemoryStore()
    async with opened(source(), store=store) as rollouts:
        batch = await rollouts.next_batch()
        batch.acknowledge()
        keys: list[Any] = [group.prompt.key for group in batch.groups]
    async with opened(source(), store=store) as rollouts:
        keys += [group.prompt.key async for batch in rollouts for group in batch.groups]
        assert rollouts.state.in_flight.ledger.rollouts == {Reason.BAD_PROMPT: 4}
    assert sorted(keys) == [i for i in range(12) if i % 3 != 1]


# --- evaluations -----------------------------------------------------------------------------


@each_row("straggler", ["retract", "abort", "run"])
@each_row("delay", [0.01, 0.5])
async def test_a_cancelled_evaluation_ends_and_no_update_waits_for_it(straggler: str, delay: float):
    long = SamplingParams(max_new_tokens=100_000, ignore_eos=True)
    fleet = SimFleet(1, stream_interval=8)
    async with opened(fleet=fleet, config=config(straggler=straggler)) as rollouts:
        await rollouts.next_batch()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(delay):
                await rollouts.evaluate([Prompt(input_ids=ONE, sampling=long)] * 3)
        async with asyncio.timeout(50):
            await rollouts.update_weights(SimPublisher())
            await rollouts.next_batch()
        in_flight = rollouts.state.in_flight
        assert not rollouts.state.evaluations.running
        assert in_flight.ledger.rollouts == {Reason.WITHDRAWN: 3}
        assert in_flight.counters.tokens_discarded == sum(in_flight.ledger.tokens.values())


async def test_an_evaluation_of_empty_groups_is_refused():
    async with opened() as rollouts:
        for size in (0, -1):
            with pytest.raises(ConfigError, match="group_size"):
                await rollouts.evaluate([Prompt(input_ids=ONE)], group_size=size)


# --- functions that cannot be called, and runs that must not end well ----------------------------


class Takes:
    """Functions with every kind of parameters."""

    def method(self, rollout: Any, prompt: Any) -> float:
        return 1.0

    def __call__(self, rollout: Any, prompt: Any, *, scale: float = 1.0) -> float:
        return scale

    @staticmethod
    def three(rollout: Any, prompt: Any, judge: Any) -> float:
        return 1.0


@functools.wraps(Takes.three)
def judged(rollout: Any, prompt: Any) -> float:
    """A decorated function, whose signature is that of the function inside."""
    return Takes.three(rollout, prompt, None)


@each_row(
    ("arguments", "printed"),
    [
        ({"reward": 1.0}, r"reward is a float; give .*\(rollout, prompt\)"),
        (
            {"reward": lambda rollout: 1.0},
            r"reward takes \(rollout\) \(too many.*\(rollout, prompt\)",
        ),
        ({"reward": Takes.three}, "missing a required argument: 'judge'"),
        ({"reward": functools.partial(Takes.three, 1, 2)}, "too many positional arguments"),
        ({"reward": lambda r, p: [1.0], "reward_scope": "group"}, r'"group" takes \(r, p\)'),
        ({"accept": lambda: True}, r"accept takes \(\)"),
        ({"accept": True}, "accept is a bool"),
        ({"episode": lambda turn: None}, r"episode takes .*\(turn, prompt\)"),
    ],
)
def test_a_function_of_a_wrong_signature_is_refused_at_once(
    arguments: dict[str, Any], printed: str
):
    with pytest.raises(ConfigError, match=printed):
        RolloutScheduler(SimFleet(1), workload(), **arguments)
    with pytest.raises(ConfigError, match=printed):
        blocking.RolloutScheduler(SimFleet(1), workload(), **arguments)


@each_row(
    "reward",
    [
        Takes().method,
        Takes(),
        judged,
        functools.partial(Takes.three, judge=None),
        lambda *both: 1.0,
        lambda rollout, prompt=None, **more: 1.0,
        min,
        max,
    ],
)
def test_a_function_that_may_be_callable_is_taken(reward: Any):
    RolloutScheduler(SimFleet(1), workload(), reward=reward)


@dataclass(frozen=True)
class Stingy(Refill):
    """A rule that starts `groups` groups in all, at the first batch."""

    name: ClassVar[str] = "stingy"

    groups: int

    def launches(self, view: PoolView) -> int:
        return self.groups if view.wave_due else 0

    def describe(self, ratio: str) -> str:
        return f"{self.groups} groups of {ratio} batches"


@each_row("delivery", ["groups", "samples"])
@each_row(
    ("groups", "accept"), [(-1, None), (0, None), (1, None), (3, lambda unit: unit.prompt.key == 0)]
)
async def test_a_refill_rule_that_starts_too_little_is_named(
    groups: int, accept: Any, delivery: Any
):
    async def reward(*_: Any) -> float:
        await asyncio.sleep(5)
        return 1.0

    settings = config(refill=Stingy(groups), delivery=delivery, over_provision=2.0)
    rollouts = opened(config=settings, reward=reward, accept=accept)
    async with rollouts, asyncio.timeout(LONG_S):
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"of refill 'stingy' must be .*, got (0|-1)\."):
                await rollouts.next_batch()


async def ended(count: int = 9, **arguments: Any) -> RunEnded:
    """Run to the end of the prompts with `async for`, which must raise; returns the error."""
    arguments = {"config": config(retries=Retries(failed_groups=1000)), **arguments}
    async with opened(workload(count), **arguments) as rollouts, asyncio.timeout(LONG_S):
        with pytest.raises(RunGivenUp) as raised:
            async for _ in rollouts:
                pass
        with pytest.raises(RunGivenUp):
            await rollouts.next_batch()
        with pytest.raises(RunGivenUp):
            async for _ in rollouts.stream():
                pass
    return raised.value


async def test_a_reward_that_always_fails_raises_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
):
    async def no_answer(rollout: Any, prompt: Any) -> float:
        return {}["answer"]

    error = await ended(reward=no_answer)
    cause = "the reward function raised KeyError('answer')"
    assert str(error) == (
        f"the prompts have ended and no group was delivered: 9 of 9 failed, most often because "
        f"{cause}; correct that."
    )
    assert (error.delivered, error.failed, error.causes) == (0, 9, {cause: 9})
    assert isinstance(error.__cause__, KeyError)
    (record,) = [r for r in caplog.records if "reward" in r.getMessage()]
    assert record.levelname == "ERROR"
    assert "no_answer (" in record.getMessage()
    assert record.exc_info is not None
    names = [frame.name for frame in traceback.extract_tb(record.exc_info[2])]
    assert names == ["no_answer"], "no line of the library precedes the caller's"


@each_row(
    ("value", "printed"),
    [
        (None, "None; return a number or a Score"),
        ("1.0", "'1.0'; return a number"),
        ([1.0], "[1.0]; return a number"),
        (float("nan"), "nan (the reward is nan"),
    ],
)
@each_row("scope", ["rollout", "group"])
async def test_a_reward_that_is_not_a_number_is_an_error(
    caplog: pytest.LogCaptureFixture, value: Any, printed: str, scope: Any
):
    async def reward(*_: Any) -> Any:
        return value if scope == "rollout" else [value, value]

    error = await ended(reward=reward, reward_scope=scope)
    assert f"because the reward function returned {printed}" in str(error)
    assert "reward" in caplog.text
    assert f"({__file__}:" in caplog.text


class Lies(Exception):
    """An exception that cannot be printed."""

    def __repr__(self) -> str:
        raise RuntimeError

    __str__ = __repr__


async def lies(rollout: Any, prompt: Any) -> float:
    raise Lies


async def forgets(group: Any) -> Any:
    _ = group.rollouts[0].reward


async def never(group: Any) -> bool:
    return False


@each_row(
    ("functions", "failed", "printed"),
    [
        ({"reward": lies}, 9, "raised Lies, which cannot be printed"),
        ({"accept": forgets}, 9, "the accept function returned None; return True or False"),
        ({"accept": never}, 0, "no group was delivered: all 9 were rejected or became too stale"),
    ],
)
async def test_a_run_without_a_group_reports_why(
    functions: dict[str, Any], failed: int, printed: str
):
    error = await ended(**functions)
    assert printed in str(error)
    assert error.failed == sum(error.causes.values()) == failed


@each_row("share", [0.5, 0.7, 1.0])
async def test_a_run_may_end_with_a_share_of_failed_groups(
    caplog: pytest.LogCaptureFixture, share: float
):
    async def sometimes(rollout: Any, prompt: Any) -> float:
        if prompt.metadata["index"] % 3:
            raise ValueError(f"prompt {prompt.metadata['index']}")
        return 1.0

    settings = config(retries=Retries(failed_share=share))
    delivered, error = 0, None
    async with opened(numbered(9), reward=sometimes, config=settings) as rollouts:
        while error is None:
            try:
                delivered += len((await rollouts.next_batch()).groups)
            except RunEnded as end:
                error = end
    assert type(error) is (RunGivenUp if share == 0.5 else PromptsExhausted)
    assert (delivered, error.delivered, error.failed) == (3, 3, 6)
    assert len(error.causes) == 6
    assert "6 of 9 groups failed" in str(error) or "and 6 failed" in str(error)
    assert copy.copy(error).causes == error.causes, "as pickle does it"
    assert vars(cast("Any", Raised.of(error).error())) == vars(error)
    assert len([r for r in caplog.records if "the reward function" in r.getMessage()]) == 1


def numbered(count: int) -> list[Prompt]:
    return [
        Prompt(input_ids=ONE, sampling=SHORT, metadata={"index": index}) for index in range(count)
    ]


async def test_the_counts_of_a_resumed_run_are_those_of_the_whole_run():
    async def fails(rollout: Any, prompt: Any) -> float:
        raise KeyError("answer")

    async def scores(rollout: Any, prompt: Any) -> float:
        return 1.0

    store, settings = MemoryStore(), config()
    source = numbered(10)
    async with opened(source, reward=scores, config=settings, store=store) as rollouts:
        (await rollouts.next_batch()).acknowledge()
    scheduler = RolloutScheduler(SimFleet(1), source, reward=fails, config=settings, store=store)
    async with scheduler as rollouts:
        with pytest.raises(RunGivenUp, match=r"4 groups in a row.*2 groups were delivered"):
            await rollouts.next_batch()
    async with opened(source, reward=scores, config=settings, store=store) as rollouts:
        assert sum([len(batch.groups) async for batch in rollouts]) == 4
        with pytest.raises(PromptsExhausted) as raised:
            await rollouts.next_batch()
        assert (raised.value.delivered, raised.value.failed) == (6, 4)


async def test_distinct_failures_are_bounded_in_logs_and_counts(
    caplog: pytest.LogCaptureFixture,
):
    async def differs(rollout: Any, prompt: Any) -> Any:
        return f"answer {rollout.rollout_id}"

    error = await ended(100, reward=differs)
    assert error.failed == 100
    assert len(error.causes) < 40
    assert len([r for r in caplog.records if "the reward function" in r.getMessage()]) < 40


async def test_prompts_that_engines_refuse_raise_with_the_cause(
    caplog: pytest.LogCaptureFixture,
):
    fleet = SimFleet(1, kv_tokens=100)
    too_long = [Prompt(input_ids=np.ones(500, np.int32), sampling=SHORT) for _ in range(3)]
    async with RolloutScheduler(fleet, too_long, config=config()) as rollouts:
        with pytest.raises(RunGivenUp) as raised:
            await rollouts.next_batch()
    error = raised.value
    assert "3 of 3 failed, most often because refused at attempt" in str(error)
    assert len([r for r in caplog.records if "refused at attempt" in r.getMessage()]) == 1


async def test_an_accept_function_that_rejects_all_is_logged(caplog: pytest.LogCaptureFixture):
    error = await ended(150, accept=never)
    assert "all 150 were rejected" in str(error)
    (warning,) = [
        r.getMessage() for r in caplog.records if "has accepted nothing" in r.getMessage()
    ]
    assert "rejected_in_a_row=100" in warning
    assert "never (" in warning


@each_row("delivery", ["groups", "samples"])
async def test_a_filter_that_rejects_endless_prompts_ends_the_run(delivery: Any):
    settings = config(retries=Retries(rejected_groups=20), delivery=delivery)
    error = await ended(10_000, accept=never, config=settings, reward=lambda *_: 1.0)
    assert f"accept rejected 20 {delivery} in a row" in str(error)
