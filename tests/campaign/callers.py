"""The caller's functions with all kinds of faults: rewards, verdicts and episodes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from aprilsched import Group, Prompt, Rollout, SamplingParams, Turn, TurnOutput
from aprilsched.errors import AprilschedError
from tests.campaign.mix import Mix


class Odd(BaseException):
    """Raised by test frameworks to skip; not an Exception."""


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
    """The functions of one run; `raised` records their errors."""

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
        """Number of calls after which they are broken."""

    def throw(self, *but: type[BaseException]) -> BaseException:
        """Draw an error to raise, `but` not of these types."""
        error = self._draw.choice(RAISED)()
        while isinstance(error, but):
            error = self._draw.choice(RAISED)()
        return self._noted(error)

    def _noted(self, error: BaseException) -> BaseException:
        self.raised.add(id(error))
        self._kept.append(error)
        return error

    @property
    def _broken(self) -> str:
        """The fault that replaces the work of a function; empty for none."""
        return self._breaks if self._whole <= 0 else ""

    def _maybe_raise(self, share: float) -> None:
        self._whole -= 1
        if self._broken == "raise":
            raise self._noted(KeyError("answer"))
        if self._mix.has("raising") and self._draw.random() < share:
            raise self.throw()

    async def _dawdle(self) -> None:
        seconds = self._draw.choice([0.0, 0.0, 0.1, 1.0, 10.0])
        if self._broken == "block":
            await asyncio.sleep(600.0)
        elif seconds:
            await asyncio.sleep(seconds * self._draw.random())

    def _slow(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a coroutine function that delays `plain`."""

        async def slow(*given: Any) -> Any:
            await self._dawdle()
            return plain(*given)

        return slow

    def _score(self, good: Any) -> Any:
        if self._broken == "return None":
            return None
        if self._mix.has("bad_returns") and self._draw.random() < 0.05:
            return self._draw.choice(BAD_SCORES)
        return good

    def reward(self) -> Callable[..., Any]:
        draw = self._draw

        def plain(rollout: Rollout, prompt: Prompt) -> Any:
            self._maybe_raise(0.04)
            return self._score(draw.choice(GOOD_SCORES))

        slow = self._slow(plain)

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

        return plain if self._mix.plain else self._slow(plain)

    def accept(self) -> Callable[..., Any]:
        def plain(group: Group) -> Any:
            self._maybe_raise(0.05)
            return self._score(self._draw.random() < 0.8)

        return plain if self._mix.plain else self._slow(plain)

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
                    received = draw.randrange(0, 4)
                    context = np.concatenate((context, np.full(received, 7, dtype=np.int32)))
                return self._score(draw.choice([None, *GOOD_SCORES]))
            finally:
                self.running -= 1

        return episode

    async def _turn(self, turn: Turn, context: Any) -> Any:
        """Return context and output of one turn, or None to end the episode."""
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
                    # Continue from the partial output; if that is complete, request it again.
                    context = _after(context, await self._partial(turn))

    async def _partial(self, turn: Turn) -> TurnOutput:
        """Return the partial output of an abandoned turn; this call may be abandoned too."""
        while self._draw.random() < 0.3:
            try:
                async with asyncio.timeout(self._draw.random()):
                    return await turn.partial()
            except TimeoutError:
                await self._dawdle()
        return await turn.partial()

    async def _misuse(self, turn: Turn, context: Any, sampling: SamplingParams) -> None:
        """Make calls that are refused, or that an episode abandons."""
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
