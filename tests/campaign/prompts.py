"""Prompts of a run, from a source that raises, dries up, or gives what is not a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from aprilsched import Prompt, SamplingParams
from tests.campaign.mix import Mix

if TYPE_CHECKING:
    from tests.campaign.life import Life


def prompt_of(mix: Mix, index: int, group_size: int) -> Prompt:
    """Return prompt `index` of the run, the same in every life."""
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


class Source(Iterator[Any]):
    """Prompts of one life, sync or async, from the first one.

    It raises at an index once in a run, and dries up now and then.
    """

    def __init__(self, life: Life) -> None:
        self._life = life
        self._mix = mix = life.mix
        self._group_size: int = mix.settings["group_size"]
        self._broken = life.trial.broken
        self._next = 0
        draw = mix.draw("source")
        count = mix.prompts
        self._raises_at = set(draw.sample(range(count), 2)) if mix.has("bad_sources") else set()
        self._bad_at = set(draw.sample(range(count), 3)) if mix.has("bad_prompts") else set()
        dry = mix.has("dry_sources")
        self._dry_at = set(draw.sample(range(count), 3)) if dry else set()
        self.dry_forever_at = draw.randrange(1, count) if dry and draw.random() < 0.3 else None
        self._slow = draw.choice([0.0, 0.0, 0.3]) if dry else 0.0
        self.dry = False
        """Whether it waits for more prompts while none arrives."""

    def __call__(self) -> Any:
        """Return the source for the scheduler."""
        return _Async(self) if self._mix.async_source else self

    def __next__(self) -> Any:
        """Return the next prompt; raises StopIteration at the end."""
        index = self._next
        if index >= self._mix.prompts:
            raise StopIteration
        if index in self._raises_at and index not in self._broken:
            self._broken.add(index)
            # The ends of iterators: a source that raises them has ended.
            raise self._life.trial.callers.throw(StopIteration, StopAsyncIteration)
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
            self._life.note(f"the source is dry at {index}")
            self.dry = True
            await asyncio.sleep(self._mix.draw(f"dry {index}").choice([3.0, 60.0, 300.0]))
            self.dry = False
        if index == self.dry_forever_at:
            self._life.note(f"the source is dry forever at {index}")
            self.dry = True
            await asyncio.Event().wait()


class _Async(AsyncIterator[Any]):
    def __init__(self, source: Source) -> None:
        self._source = source

    async def __anext__(self) -> Any:
        await self._source.wait()
        try:
            return next(self._source)
        except StopIteration:
            raise StopAsyncIteration from None
