"""Schedulers that tests have in a process or an actor of their own, and their parts.

They are functions of a module, because the other process imports them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from aprilsched import (
    LongTailWorkload,
    MemberLost,
    MemoryStore,
    Prompt,
    PromptQueue,
    Rollout,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    Score,
    SGLangFleet,
    SimFleet,
    Turn,
)
from aprilsched.config import Retries
from aprilsched.kernel.engines.base import Engine
from tests.support.companions import EXPERTS, MASK
from tests.support.small import by_length

__all__ = [
    "Mute",
    "Raising",
    "Unpicklable",
    "blocked",
    "forking",
    "long",
    "losing_parts",
    "made",
    "parts",
    "pushed",
    "pushed_parts",
    "raised_parts",
    "raising",
    "sample_parts",
    "secretive",
    "served",
    "simple",
    "slow_parts",
    "wrong",
]

CONFIG = SchedulerConfig(
    batch_groups=2, group_size=2, over_provision=1.5, companions=(EXPERTS, MASK)
)


def workload(count: int | None = None, median: int = 9) -> LongTailWorkload:
    return LongTailWorkload(median=median, cap=40, group_size=2, count=count, seed=1)


def parts(
    count: int | None = None, *, stored: bool = False, time_scale: float = 0.002, **changes: Any
) -> dict[str, Any]:
    """The parts of a scheduler with simulated engines, in real time."""
    return {
        "fleet": SimFleet(1, time_scale=time_scale),
        "prompts": workload(count),
        "config": replace(CONFIG, **changes),
        "store": MemoryStore() if stored else None,
    }


def sample_parts() -> dict[str, Any]:
    """They deliver single samples, each with one sibling."""
    return {**parts(delivery="samples"), "reward": by_length}


def pushed_parts(queue: PromptQueue) -> dict[str, Any]:
    """They have the prompts that the trainer pushes."""
    return {**parts(over_provision=1.0), "prompts": queue}


def losing_parts(where: str, rule: Any) -> dict[str, Any]:
    """Their reward, or their episode, loses the second of three members the first time that it is
    asked about it. The scores say how often it was asked."""
    asked = Counter[tuple[bytes, int]]()

    def score(prompt: Prompt, index: int) -> Score:
        member = prompt.input_ids.tobytes(), index
        asked[member] += 1
        if index == 1 and asked[member] == 1:
            raise MemberLost("the sandbox is gone")
        return Score(reward=1.0, info={"asked": asked[member]})

    def reward(rollout: Rollout, prompt: Prompt) -> Score:
        return score(prompt, rollout.index)

    async def episode(turn: Turn, prompt: Prompt) -> Score:
        await turn.generate(prompt.input_ids)
        return score(prompt, turn.index)

    return {
        **parts(group_size=3, retries=Retries(member=rule)),
        "prompts": LongTailWorkload(median=9, cap=40, group_size=3, seed=1),
        where: {"reward": reward, "episode": episode}[where],
    }


def slow_parts() -> dict[str, Any]:
    """They take an hour to open."""

    class Fleet(SimFleet):
        async def open(self) -> None:
            await asyncio.sleep(3600)

    return {**parts(), "fleet": Fleet(1)}


def raised_parts() -> dict[str, Any]:
    """There are none: the function of the user raises."""
    raise FileNotFoundError(2, "No such file", "prompts.jsonl")


def made(make: Callable[..., dict[str, Any]], *arguments: Any, **named: Any) -> RolloutScheduler:
    """The scheduler of these parts."""
    return RolloutScheduler(**make(*arguments, **named))


def simple(count: int | None = None, **changes: Any) -> RolloutScheduler:
    return made(parts, count, **changes)


def long() -> RolloutScheduler:
    """Its batches are larger than what goes through the pipe."""
    prompts = (Prompt(input_ids=np.arange(1, 20_000, dtype=np.int32)) for _ in range(4))
    return RolloutScheduler(SimFleet(1, time_scale=0.0001), prompts, config=CONFIG)


def secretive(*, raises: bool) -> RolloutScheduler:
    """Its first prompt has metadata that cannot be sent, with an error that has no text or one that
    has."""
    ids = np.array([1], dtype=np.int32)
    check = Unpicklable() if raises else lambda: True
    prompts = [Prompt(input_ids=ids, metadata={"check": check}) for _ in range(2)]
    return RolloutScheduler(SimFleet(1, time_scale=0.0001), prompts, config=CONFIG)


def pushed(queue: PromptQueue, *, batch_groups: int) -> RolloutScheduler:
    config = SchedulerConfig(batch_groups=batch_groups, group_size=2)
    return RolloutScheduler(SimFleet(1, time_scale=0.001), queue, config=config)


class Odd(Exception):
    """An exception that cannot be made again from its arguments, nor be sent as a whole."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code} in {where}")
        self.code = code
        self.hook = lambda: code


class Mute(Exception):
    """An exception without a text: str() raises CancelledError, which is not an Exception."""

    def __str__(self) -> str:
        raise asyncio.CancelledError


class Unpicklable(Exception):
    """An exception that raises when it is sent, with an error that has no text."""

    def __reduce__(self) -> Any:
        raise Mute

    def __getattribute__(self, name: str) -> Any:
        if name in ("__dict__", "__cause__"):
            raise Mute
        return super().__getattribute__(name)


def raising() -> RolloutScheduler:
    raise Odd(7, where="here")


def wrong() -> Any:
    return SimFleet(1)


def served(url: str) -> RolloutScheduler:
    """It generates on a server with a small vocabulary."""
    config = SchedulerConfig(
        batch_groups=2,
        group_size=2,
        over_provision=2.0,
        sampling=SamplingParams(max_new_tokens=40),
    )
    ids = (np.array([number % 100 + 5, 6, 7], dtype=np.int32) for number in itertools.count())
    return RolloutScheduler(
        SGLangFleet([url]), (Prompt(input_ids=each) for each in ids), config=config
    )


def forking(sign: Path) -> RolloutScheduler:
    """Its process forks another one, which outlives it, and writes its number into a file."""
    forked = os.fork()
    if not forked:
        time.sleep(3600)
        os._exit(0)
    sign.write_text(str(forked))
    return simple()


def blocked(sign: Path) -> RolloutScheduler:
    """Return a scheduler whose reward function blocks the event loop, and makes a file first."""

    async def score(rollout: Rollout, prompt: Prompt) -> float:
        sign.touch()  # noqa: ASYNC240
        while True:
            time.sleep(3600)  # noqa: ASYNC251

    return RolloutScheduler(SimFleet(1, time_scale=0.001), workload(), reward=score, config=CONFIG)


class Raising:
    """A publisher whose error has a cause."""

    async def prepare(self, version: int) -> None: ...

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        raise OSError(28, "No space left on device")
