"""Rollouts of other trainers that programs of their users drive, by sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from aprilsched.agents.chat.tokenizer import ModelTokenizer
from aprilsched.agents.sessions import Limits, Sessions
from aprilsched.agents.sessions.harness import Harness
from aprilsched.errors import ConfigError
from aprilsched.kernel.shell.episodes import Turn
from aprilsched.types import Prompt, SamplingParams, Score


class BySession:
    """What an adapter's scheduler takes as ``episode=``: a harness with sessions, whose address is
    open while there are some.

    Args:
        harness: as for :class:`~aprilsched.agents.sessions.Sessions`.
        tokenizer: the model's own.
        settings: arguments of Sessions that a user may set, with `limits` as a mapping.
        trainer: name of the trainer, for errors.
        sampling: how sessions sample; None leaves it to the scheduler.

    Raises:
        ConfigError: if a setting cannot be used, or a rollout would be more than one sequence.
    """

    def __init__(
        self,
        harness: Harness,
        tokenizer: ModelTokenizer,
        settings: Mapping[str, Any],
        trainer: str,
        *,
        sampling: SamplingParams | None = None,
    ) -> None:
        self._sampling = sampling
        given = dict(settings)
        if given.get("branches") == "all":
            raise ConfigError(
                f'sessions.branches is "all", and {trainer} takes one sequence for each rollout; '
                'give "last" or "longest".'
            )
        if unknown := sorted(given.keys() - _SETTINGS):
            raise ConfigError(
                f"sessions.{unknown[0]} is not known; give some of {', '.join(sorted(_SETTINGS))}."
            )
        limits: dict[str, Any] = given.pop("limits", None) or {}
        try:
            given["limits"] = Limits(**limits)
        except TypeError as error:
            raise ConfigError(f"sessions.limits cannot be used ({error}).") from error
        self._sessions = Sessions(harness, tokenizer=tokenizer, **given)
        self._changing = asyncio.Lock()
        self._is_open = False
        self._driven = 0

    async def __call__(self, turn: Turn, prompt: Prompt) -> Score:
        """Drive a rollout."""
        if self._sampling is not None:
            turn.sampling = self._sampling
        self._driven += 1
        try:
            async with self._changing:
                if not self._is_open:
                    await self._sessions.__aenter__()
                    self._is_open = True
            return await self._sessions(turn, prompt)
        finally:
            self._driven -= 1
            closing = asyncio.ensure_future(self._close())
            # A scheduler that ends may cancel twice, and a socket would stay open.
            while not closing.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([closing])

    async def _close(self) -> None:
        async with self._changing:
            if self._is_open and self._driven == 0:
                self._is_open = False
                await self._sessions.__aexit__()


_SETTINGS = {"branches", "limits", "host", "port", "public_url", "remote_images"}
