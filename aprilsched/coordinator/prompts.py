"""The source of prompts: any iterable or async iterable of them, read as far as needed."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator

from aprilsched.errors import ConfigError
from aprilsched.types import Prompt

__all__ = ["PromptSource", "checked"]


class PromptSource:
    """Reads prompts one by one, and checks each before anything is launched for it."""

    def __init__(
        self, prompts: Iterable[Prompt] | AsyncIterable[Prompt], *, group_size: int
    ) -> None:
        self._group_size = group_size
        self._async: AsyncIterator[Prompt] | None = None
        self._sync: Iterator[Prompt] = iter(())
        if isinstance(prompts, AsyncIterable):
            self._async = aiter(prompts)
        elif isinstance(prompts, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            self._sync = iter(prompts)
        else:
            raise ConfigError(
                f"prompts is a {type(prompts).__name__}; give an iterable or async iterable of "
                "Prompt."
            )

    async def take(self, count: int) -> tuple[tuple[Prompt, ...], bool]:
        """Up to `count` prompts, and whether the source has ended.

        Raises:
            ConfigError: if something else than a usable Prompt comes; and whatever the source
                itself raises.
        """
        taken: list[Prompt] = []
        while len(taken) < count:
            try:
                prompt = await anext(self._async) if self._async else next(self._sync)
            except (StopIteration, StopAsyncIteration):
                return tuple(taken), True
            taken.append(checked(prompt, self._group_size))
        return tuple(taken), False


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
