"""The caller's functions with all kinds of faults: reward, accept, episode, publisher, prompts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aprilsched import Group, Prompt, Rollout, SamplingParams, SimPublisher, Turn, TurnOutput
from aprilsched.config import SchedulerConfig
from aprilsched.core.messages.commands import Plan
from aprilsched.core.policies.schedule import Schedule
from aprilsched.engines.base import Engine
from aprilsched.engines.sim.sim_engine import SimAdapterPublisher
from aprilsched.errors import AprilschedError
from aprilsched.planning import Planner
from aprilsched.planning.planner import Space, candidates
from experiments.chaos.mix import Mix

__all__ = [
    "Callers",
    "ChaosAdapters",
    "ChaosPlanner",
    "ChaosPublisher",
    "Odd",
    "Source",
    "prompt_of",
]


class Odd(BaseException):
    """What a test framework raises to skip: no Exception."""


RAISED: tuple[Callable[[], BaseException], ...] = (
    lambda: ValueError("of the campaign"),
    lambda: KeyError("of the campaign"),
    lambda: RuntimeError("of the campaign"),
    lambda: StopIteration("of the campaign"),
    lambda: StopAsyncIteration("of the campaign"),
    lambda: asyncio.CancelledError("of the campaign"),
    lambda: TimeoutError("of the campaign"),
    lambda: OSError("of the campaign"),
    lambda: GeneratorExit("of the campaign"),
    lambda: Odd("of the campaign"),
)
BAD_SCORES: tuple[Any, ...] = (None, "much", float("nan"), [1.0], {"a": 1}, object(), 1j)
GOOD_SCORES: tuple[Any, ...] = (0.0, 1, True, np.float32(0.5), np.int64(2), -3.5)


class Callers:
    """The functions of one run. What they raise is kept in `raised`."""

    def __init__(self, mix: Mix) -> None:
        self._mix = mix
        self._draw = mix.draw("callers")
        self.raised: set[int] = set()
        self._kept: list[BaseException] = []
        self.running = 0
        """Calls that have not returned."""
        draw = mix.draw("broken functions")
        self._breaks = draw.choice(["raise", "return None", "block"])
        self._whole = draw.choice([0, 0, 10, 60]) if mix.has("broken_functions") else math.inf
        """Calls after which they are broken."""

    def throw(self, *but: type[BaseException]) -> BaseException:
        """Something to raise, `but` not of these types."""
        error = self._draw.choice(RAISED)()
        while isinstance(error, but):
            error = self._draw.choice(RAISED)()
        self.raised.add(id(error))
        self._kept.append(error)
        return error

    @property
    def _broken(self) -> str:
        """What the functions do in the place of their work; empty if they do it."""
        return self._breaks if self._whole <= 0 else ""

    def _maybe_raise(self, share: float) -> None:
        self._whole -= 1
        if self._broken == "raise":
            error = KeyError("answer")
            self.raised.add(id(error))
            self._kept.append(error)
            raise error
        if self._mix.has("raising") and self._draw.random() < share:
            raise self.throw()

    async def _dawdle(self) -> None:
        draw = self._draw
        seconds = draw.choice([0.0, 0.0, 0.1, 1.0, 10.0])
        if self._broken == "block":
            await asyncio.sleep(600.0)
        elif seconds:
            await asyncio.sleep(seconds * draw.random())

    def _score(self, good: Any) -> Any:
        if self._broken == "return None":
            return None
        if self._mix.has("bad_returns") and self._draw.random() < 0.05:
            return self._draw.choice(BAD_SCORES)
        return good

    # --- rewards and verdicts --------------------------------------------------------------------

    def reward(self) -> Callable[..., Any]:
        draw = self._draw

        def plain(rollout: Rollout, prompt: Prompt) -> Any:
            self._maybe_raise(0.04)
            return self._score(draw.choice(GOOD_SCORES))

        async def slow(rollout: Rollout, prompt: Prompt) -> Any:
            await self._dawdle()
            self._maybe_raise(0.04)
            return self._score(draw.choice(GOOD_SCORES))

        def mixed(rollout: Rollout, prompt: Prompt) -> Any:
            return slow(rollout, prompt) if draw.random() < 0.5 else plain(rollout, prompt)

        return draw.choice([plain, mixed]) if self._mix.plain else slow

    def group_reward(self) -> Callable[..., Any]:
        draw = self._draw

        def plain(group: Group) -> Any:
            self._maybe_raise(0.06)
            scores: Any = [draw.choice(GOOD_SCORES) for _ in group.rollouts]
            if self._mix.has("bad_returns") and draw.random() < 0.1:
                scores = draw.choice([scores[1:], [*scores, 1.0], dict.fromkeys(range(9)), None, 1])
            return scores

        async def slow(group: Group) -> Any:
            await self._dawdle()
            return plain(group)

        return plain if self._mix.plain else slow

    def accept(self) -> Callable[..., Any]:
        draw = self._draw

        def plain(group: Group) -> Any:
            self._maybe_raise(0.05)
            return self._score(draw.random() < 0.8)

        async def slow(group: Group) -> Any:
            await self._dawdle()
            return plain(group)

        return plain if self._mix.plain else slow

    # --- episodes --------------------------------------------------------------------------------

    def episode(self) -> Callable[[Turn, Prompt], Awaitable[float | None]]:
        draw = self._draw

        async def episode(turn: Turn, prompt: Prompt) -> float | None:
            self.running += 1
            try:
                context = prompt.input_ids
                for _ in range(draw.choice([1, 1, 2, 3])):
                    self._maybe_raise(0.02)
                    answered = await self._turn(turn, context)
                    if answered is None:
                        break
                    context = answered
                    self._maybe_raise(0.02)
                    await self._dawdle()
                    told = draw.randrange(0, 4)
                    context = np.concatenate((context, np.full(told, 7, dtype=np.int32)))
                return self._score(draw.choice([None, *GOOD_SCORES]))
            finally:
                self.running -= 1

        return episode

    async def _turn(self, turn: Turn, context: Any) -> Any:
        """Context and output of one turn; None if there is none and the episode is to end."""
        draw, mix = self._draw, self._mix
        sampling = SamplingParams(
            max_new_tokens=1 + int(draw.lognormvariate(0.0, 0.7) * mix.median),
            ignore_eos=True,
            temperature=0.0,
        )
        if mix.has("misused_turns") and draw.random() < 0.1:
            await self._misuse(turn, context, sampling)
        asked = 0
        while True:
            asked += 1
            if not (mix.has("turn_timeouts") and draw.random() < 0.4):
                return _after(context, await turn.generate(context, sampling))
            seconds = draw.choice([0.0, 0.001, 0.3, 3.0, 30.0]) * draw.random()
            try:
                if draw.random() < 0.5:
                    async with asyncio.timeout(seconds):
                        return _after(context, await turn.generate(context, sampling))
                waiting = asyncio.wait_for(turn.generate(context, sampling), seconds)
                return _after(context, await waiting)
            except TimeoutError:
                if draw.random() < 0.5:
                    await self._dawdle()
                after = draw.random()
                if after < 0.15:
                    raise
                if after < 0.35 or asked > 3:
                    return None
                if after < 0.7:
                    # What had come is kept, and asked for once more if it was enough.
                    context = _after(context, await self._partial(turn))

    async def _partial(self, turn: Turn) -> TurnOutput:
        """What came of a turn that was given up; perhaps that is given up, too."""
        while self._draw.random() < 0.3:
            try:
                async with asyncio.timeout(self._draw.random()):
                    return await turn.partial()
            except TimeoutError:
                await self._dawdle()
        return await turn.partial()

    async def _misuse(self, turn: Turn, context: Any, sampling: SamplingParams) -> None:
        """Ways to ask that are refused, or that an episode gives up."""
        draw = self._draw
        match draw.randrange(4):
            case 0:
                await turn.generate([])
            case 1:
                await turn.generate(np.asarray([1.5, 2.5]))  # type: ignore[arg-type]
            case 2:
                first = asyncio.ensure_future(turn.generate(context, sampling))
                try:
                    await asyncio.sleep(0)
                    await turn.generate(context, sampling)
                except AprilschedError:
                    first.cancel()
                    await asyncio.wait([first])
            case _:
                asking = asyncio.ensure_future(turn.generate(context, sampling))
                await asyncio.sleep(draw.random())
                asking.cancel()
                await asyncio.wait([asking])


def _after(context: Any, output: TurnOutput) -> Any:
    return np.concatenate((context, output.token_ids))


# --- publishers ----------------------------------------------------------------------------------


class ChaosPublisher(SimPublisher):
    """Brings weights in, and now and then does not."""

    def __init__(self, mix: Mix, callers: Callers) -> None:
        super().__init__()
        self._mix = mix
        self._callers = callers
        self._draw = mix.draw("publisher")
        self._holds = self._draw.random() < 0.6
        self.fails = True

    def _bad(self, share: float) -> bool:
        return self.fails and self._mix.has("bad_publishers") and self._draw.random() < share

    def holds(self, version: int) -> bool:
        # Rolling refits need a publisher that keeps a version for later.
        return self._holds or self._mix.config().refit == "rolling"

    async def prepare(self, version: int) -> None:
        await asyncio.sleep(self._draw.choice([0.0, 0.0, 0.5]))
        if self._bad(0.05):
            raise self._callers.throw()

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        draw = self._draw
        await asyncio.sleep(draw.choice([0.0, 0.0, 0.5, 4.0]))
        if not self._bad(0.4):
            return await super().publish(version, engines)
        some = [engine for engine in engines if draw.random() < 0.5]
        match draw.randrange(7):
            case 0:
                raise self._callers.throw()
            case 1:
                await super().publish(version, some)
                raise self._callers.throw()
            case 2:
                await super().publish(version, some)
                return None  # type: ignore[return-value]
            case 3:
                await super().publish(version, some)
                return {engine.name: None for engine in engines}
            case 4:
                return dict(await super().publish(version, some))
            case 5:
                results = dict(await super().publish(version, engines))
                return results | {engine.name: ValueError("said the publisher") for engine in some}
            case _:
                await asyncio.sleep(200.0)
                return await super().publish(version, engines)


class ChaosAdapters(SimAdapterPublisher):
    """Loads adapters, and now and then does not."""

    def __init__(self, mix: Mix, callers: Callers) -> None:
        super().__init__()
        self._mix = mix
        self._callers = callers
        self._draw = mix.draw("publisher")
        self._holds = self._draw.random() < 0.6
        self.fails = True

    def holds(self, version: int) -> bool:
        return self._holds

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        draw = self._draw
        await asyncio.sleep(draw.choice([0.0, 0.0, 0.5]))
        if self.fails and self._mix.has("bad_publishers") and draw.random() < 0.2:
            some = [engine for engine in engines if draw.random() < 0.5]
            results = dict(await super().publish(version, some))
            if draw.random() < 0.5:
                raise self._callers.throw()
            return results | {e.name: ValueError("no") for e in engines if e not in some}
        return await super().publish(version, engines)


class ChaosPlanner(Planner):
    """Chooses any of the schedules that could be chosen, and raises now and then."""

    def __init__(self, mix: Mix) -> None:
        super().__init__(inline=mix.draw("planner").random() < 0.5)
        self._draw = mix.draw("planner")
        self._real = self._draw.random() < 0.01

    def plan(self, command: Plan, config: SchedulerConfig) -> Schedule:
        if self._real:
            return super().plan(command, config)
        if self._draw.random() < 0.05:
            raise ValueError("of the campaign")
        space = Space(may_defer=config.may_defer, paces=command.paces)
        schedule = self._draw.choice(candidates(self.setting(command, config), space))
        # Also a pace that is not possible with the rule, or not any more: the core refuses it.
        pace = self._draw.choice(["synchronous", "asynchronous"]) if command.paces else None
        return replace(schedule, pace=pace)


# --- prompts -------------------------------------------------------------------------------------


def prompt_of(mix: Mix, index: int, group_size: int) -> Prompt:
    """Prompt `index` of the run, whatever life asks for it."""
    draw = mix.draw(f"prompt {index}")
    length = draw.randrange(1, 12)

    def sampling(place: int) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=min(700, 1 + int(draw.lognormvariate(0.0, 0.9) * mix.median)),
            ignore_eos=True,
            sampling_seed=index * 100 + place,
        )

    each = tuple(sampling(place) for place in range(group_size))
    return Prompt(
        input_ids=np.asarray([draw.randrange(3, 500) for _ in range(length)], dtype=np.int32),
        sampling=each if index % 5 else each[0],
        key=index if index % 2 else f"prompt {index}",
        metadata={"index": index, "nested": {"list": [1, 2.5, "x"]}},
    )


class Source:
    """Prompts of one life; sync or async, from the begin.

    It raises at an index once in a run (`broken` is the run's), and dries up now and then.
    """

    def __init__(
        self,
        mix: Mix,
        callers: Callers,
        *,
        group_size: int,
        broken: set[int],
        note: Callable[[str], None],
    ) -> None:
        self._mix = mix
        self._callers = callers
        self._group_size = group_size
        self._broken = broken
        self._note = note
        self._next = 0
        draw = mix.draw("source")
        count = mix.prompts
        self._raises_at = set(draw.sample(range(count), 2)) if mix.has("bad_sources") else set()
        self._bad_at = set(draw.sample(range(count), 3)) if mix.has("bad_prompts") else set()
        dry = mix.has("dry_sources")
        self._dry_at = set(draw.sample(range(count), 3)) if dry else set()
        self.dry_for_ever_at = draw.randrange(1, count) if dry and draw.random() < 0.3 else None
        self._slow = draw.choice([0.0, 0.0, 0.3]) if dry else 0.0
        self.dry = False
        """It waits for more prompts, and none comes."""

    def __call__(self) -> Any:
        """What the scheduler is given."""
        return _Async(self) if self._mix.async_source else _Sync(self)

    def give(self) -> Any:
        """The next one; StopIteration at the end."""
        index = self._next
        if index >= self._mix.prompts:
            raise StopIteration
        if index in self._raises_at and index not in self._broken:
            self._broken.add(index)
            # The ends of iterators: a source that raises them has ended.
            raise self._callers.throw(StopIteration, StopAsyncIteration)
        self._next += 1
        if index in self._bad_at:
            return self._bad(index)
        return prompt_of(self._mix, index, self._group_size)

    def _bad(self, index: int) -> Any:
        match self._mix.draw(f"bad prompt {index}").randrange(5):
            case 0:
                return [1, 2, 3]
            case 1:
                return None
            case 4:
                one = SamplingParams(max_new_tokens=5, ignore_eos=True)
                unknown: Any = [self._mix.machine.vocab_size]
                return Prompt(input_ids=unknown, sampling=one, key=f"unknown {index}")
            case 2:
                one = SamplingParams(max_new_tokens=5, ignore_eos=True)
                return Prompt(input_ids=[1], sampling=(one,) * (self._group_size + 1))  # type: ignore[arg-type]
            case _:
                one = SamplingParams(max_new_tokens=5, ignore_eos=True, sampling_seed=1)
                return Prompt(
                    input_ids=[1],  # type: ignore[arg-type]
                    sampling=one,
                    key=f"prompt {index}",
                    metadata={"object": object()},
                )

    async def wait(self) -> None:
        index = self._next
        if self._slow:
            await asyncio.sleep(self._slow * self._mix.draw(f"slow {index}").random())
        if index in self._dry_at:
            self._note(f"the source is dry at {index}")
            self.dry = True
            await asyncio.sleep(self._mix.draw(f"dry {index}").choice([3.0, 60.0, 300.0]))
            self.dry = False
        if index == self.dry_for_ever_at:
            self._note(f"the source is dry at {index}, for ever")
            self.dry = True
            await asyncio.Event().wait()


class _Sync(Iterator[Any]):
    def __init__(self, source: Source) -> None:
        self._source = source

    def __next__(self) -> Any:
        return self._source.give()


class _Async(AsyncIterator[Any]):
    def __init__(self, source: Source) -> None:
        self._source = source

    async def __anext__(self) -> Any:
        await self._source.wait()
        try:
            return self._source.give()
        except StopIteration:
            raise StopAsyncIteration from None
