"""Reads and checks prompts from any iterable or async iterable, and only those that are needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

from aprilsched.errors import ConfigError
from aprilsched.kernel.store.codec import check_storable
from aprilsched.kernel.values.bounds import AT_LEAST_1, check_range
from aprilsched.kernel.values.companions import Companion, of_prompt
from aprilsched.kernel.values.sampling import check_sampling
from aprilsched.types import Media, Prompt, RefusedPrompt

_END = object()
TOGETHER_S = 0.1
"""Seconds without a new prompt after which the prompts read so far are launched. A prompt that is
launched alone costs a separate prefill pass (hazard 15), which stops the running requests of its
engine for about 20 ms."""


class PromptSource:
    """Reads prompts one by one, and checks each before anything is launched for it."""

    def __init__(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        *,
        group_size: int,
        companions: Sequence[Companion] = (),
    ) -> None:
        self.companions = companions
        """Data that the run requests from the engines in addition to the tokens."""
        self._group_size = group_size
        self._async: AsyncIterator[Prompt] | None = None
        self._sync: Iterator[Prompt] = iter(())
        self._skip: Callable[[int], Any] | None = getattr(prompts, "skip", None)
        self._together_s: float = getattr(prompts, "together_s", TOGETHER_S)
        self._passed = 0
        self._raised: ConfigError | None = None
        """Why the latest prompt was refused; None if it was not."""
        self._storable = False
        self._read(prompts)

    def _read(self, prompts: Iterable[Prompt] | AsyncIterable[Prompt]) -> None:
        if isinstance(prompts, AsyncIterable):
            self._async = aiter(prompts)
        elif isinstance(prompts, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            self._sync = iter(prompts)
        else:
            raise ConfigError(
                f"prompts is a {type(prompts).__name__}; give an iterable or async iterable of "
                "Prompt."
            )

    def must_be_storable(self) -> None:
        """Refuse prompts whose metadata a store cannot save, from now on."""
        self._storable = True

    def pass_over(self, count: int) -> None:
        """Skip the first `count` prompts, which the run launched before it was resumed.

        If the source has a method ``skip(count)``, which returns the source without them, it is
        used. Otherwise the prompts are read and dropped.
        """
        if self._skip is None:
            self._passed = count
        else:
            self._read(self._skip(count))

    async def take(
        self, count: int, early: Callable[[tuple[Prompt | RefusedPrompt, ...]], None]
    ) -> tuple[tuple[Prompt | RefusedPrompt, ...], bool]:
        """Read up to `count` prompts; return them and whether the source has ended.

        If an asynchronous source yields no prompt for its ``together_s`` seconds (by default
        :data:`TOGETHER_S`), `early` is called with the prompts read so far, and only the rest is
        returned.

        Raises:
            Exception: any exception of the source. A ConfigError of the source counts as one bad
                prompt, unless the source ends with it, as a generator does.
        """
        taken: list[Prompt | RefusedPrompt] = []

        def dry() -> None:
            early(tuple(taken))
            taken.clear()

        await self._pass_over()
        for _ in range(count):
            timer = None
            if self._async is not None:
                timer = asyncio.get_running_loop().call_later(self._together_s, dry)
            else:
                # Otherwise no engine would continue until all prompts of a batch are read.
                await asyncio.sleep(0)
            try:
                prompt = await self._usable()
            finally:
                if timer is not None:
                    timer.cancel()
            if prompt is None:
                return tuple(taken), True
            taken.append(prompt)
        return tuple(taken), False

    async def _usable(self) -> Prompt | RefusedPrompt | None:
        """The next prompt, or the reason why it cannot be used; None at the end of the source."""
        try:
            prompt = await self._next()
            if prompt is _END:
                if self._raised is not None:
                    raise self._raised
                return None
            self._raised = None
            usable = checked(prompt, self._group_size, self.companions)
            if self._storable:
                check_storable(usable)
        except ConfigError as error:
            if error is self._raised:
                raise
            self._raised = error
            return RefusedPrompt(cause=str(error))
        return usable

    async def _next(self) -> object:
        """The next object of the source, or :data:`_END`."""
        # A source may have a length, and be false while it is empty.
        if self._async is not None:
            return await anext(self._async, _END)
        return next(self._sync, _END)

    async def _pass_over(self) -> None:
        while self._passed:
            if await self._next() is _END:
                raise ConfigError(
                    f"the prompts ended {self._passed} before the last that the saved run had "
                    "launched; give the same prompts again."
                )
            self._passed -= 1


def checked(
    prompt: object,
    group_size: int,
    companions: Sequence[Companion] = (),
) -> Prompt:
    """`prompt`, if a group can be launched for it, of `group_size` unless it has its own size.
    The run asks for the `companions`.

    Raises:
        ConfigError: if it cannot.
    """
    if not isinstance(prompt, Prompt):
        raise ConfigError(
            f"prompts gave a {type(prompt).__name__}; wrap token ids in Prompt(input_ids=...)."
        )
    size = prompt.group_size or group_size
    if isinstance(prompt.sampling, tuple) and len(prompt.sampling) != size:
        raise ConfigError(
            f"a prompt has {len(prompt.sampling)} sampling parameters for a group of {size}; "
            "give one for each rollout, or one for all."
        )
    check_media(prompt.media, of_prompt(companions, prompt.companions))
    several: Any = prompt.sampling if isinstance(prompt.sampling, tuple) else (prompt.sampling,)
    for sampling in several:
        if sampling is not None:
            check_sampling(sampling)
    return prompt


def check_media(media: Sequence[Media], companions: Sequence[Companion]) -> None:
    """Refuse media in a run that asks for `companions` with a row for each position of a context.

    Raises:
        ConfigError: if there are such media.
    """
    of_context = [each.name for each in companions if each.per == "context"]
    if media and of_context:
        raise ConfigError(
            f"a prompt has media, and a row of {', '.join(of_context)} belongs to a position in "
            "the context with the media expanded, which only the engine knows; leave either out."
        )


def checked_evaluation(
    prompts: Iterable[object], group_size: int, companions: Sequence[Companion] = ()
) -> tuple[Prompt, ...]:
    """Return the prompts of an evaluation, in a run that asks for the `companions`.

    A prompt without a group size gets `group_size` responses.

    Raises:
        ConfigError: if `prompts` is empty, if a prompt cannot be used, or if `group_size` is 0.
    """
    check_range(AT_LEAST_1, group_size=group_size)
    chosen = tuple(checked(prompt, group_size, companions) for prompt in prompts)
    if not chosen:
        raise ConfigError("evaluate() got no prompts; give at least one.")
    return chosen
