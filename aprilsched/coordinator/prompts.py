"""The source of prompts: any iterable or async iterable of them, read as far as needed."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from aprilsched.errors import ConfigError
from aprilsched.store.codec import check_storable
from aprilsched.types import Prompt

__all__ = ["PromptSource", "checked"]


_END = object()


class PromptSource:
    """Reads prompts one by one, and checks each before anything is launched for it."""

    def __init__(
        self, prompts: Iterable[Prompt] | AsyncIterable[Prompt], *, group_size: int
    ) -> None:
        self._group_size = group_size
        self._async: AsyncIterator[Prompt] | None = None
        self._sync: Iterator[Prompt] = iter(())
        self._skip: Callable[[int], Any] | None = getattr(prompts, "skip", None)
        self._passed = 0
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
        """From now on prompts whose metadata a store cannot keep are refused."""
        self._storable = True

    def pass_over(self, count: int) -> None:
        """The first `count` prompts were taken in a former life: they are not given again.

        They are read and thrown away, unless the source has a method ``skip(count)`` that gives
        the source without them.
        """
        if self._skip is None:
            self._passed = count
        else:
            self._read(self._skip(count))

    async def take(self, count: int) -> tuple[tuple[Prompt, ...], bool]:
        """Up to `count` prompts, and whether the source has ended.

        Raises:
            ConfigError: if something else than a usable Prompt comes; and whatever the source
                itself raises.
        """
        taken: list[Prompt] = []
        await self._pass_over()
        while len(taken) < count:
            prompt = await self._next()
            if prompt is _END:
                return tuple(taken), True
            taken.append(checked(prompt, self._group_size))
            if self._storable:
                check_storable(taken[-1])
        return tuple(taken), False

    async def _next(self) -> object:
        """The next prompt, or :data:`_END`."""
        return await anext(self._async, _END) if self._async else next(self._sync, _END)

    async def _pass_over(self) -> None:
        while self._passed:
            if await self._next() is _END:
                raise ConfigError(
                    f"the prompts ended {self._passed} before the last that the saved run had "
                    "launched; give the same prompts again."
                )
            self._passed -= 1


def checked(prompt: object, group_size: int) -> Prompt:
    """The prompt, if a group of `group_size` can be launched for it.

    Raises:
        ConfigError: if not.
    """
    if not isinstance(prompt, Prompt):
        raise ConfigError(
            f"prompts gave a {type(prompt).__name__}; wrap token ids in Prompt(input_ids=...)."
        )
    if isinstance(prompt.sampling, tuple) and len(prompt.sampling) != group_size:
        raise ConfigError(
            f"a prompt has {len(prompt.sampling)} sampling parameters for a group of "
            f"{group_size}; give one for each rollout, or one for all."
        )
    return prompt
