"""Several SGLang servers of one model, opened together or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from aprilsched.engines.sglang.engine import SGLangEngine
from aprilsched.engines.sglang.limits import SGLangLimits
from aprilsched.engines.sglang.probe import ServerFacts
from aprilsched.errors import ConfigError

__all__ = ["SGLangFleet"]

_MUST_AGREE: Sequence[tuple[str, Callable[[ServerFacts], Any], str]] = (
    ("model", lambda facts: facts.model_path, "serve one model in the whole fleet"),
    ("vocabulary size", lambda facts: facts.vocab_size, "serve one model in the whole fleet"),
    (
        "weight version",
        lambda facts: facts.label,
        "load the same weights everywhere, under the same weight_version, or restart the servers",
    ),
)


class SGLangFleet:
    """The SGLang servers at `urls`.

    Args:
        urls: one for each server, as ``http://host:port``.
        admin_key: the servers' ``--admin-api-key``, where they have one.
        api_key: the servers' ``--api-key``, where they have one.
        model_path: refuse servers that serve another model; None takes any one model.
        stream_interval: tokens between two events of a stream.
        limits: timeouts and sizes, for each server.

    Raises:
        ConfigError: if there is no url, a bad one, or the same one twice.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        admin_key: str | None = None,
        api_key: str | None = None,
        model_path: str | None = None,
        stream_interval: int = 64,
        limits: SGLangLimits | None = None,
    ) -> None:
        if isinstance(urls, str):
            raise ConfigError(f"urls is the string {urls!r}; give a list of URLs.")
        if not urls:
            raise ConfigError("The list of servers is empty; give at least one URL.")
        self._model_path = model_path
        self._engines = tuple(
            SGLangEngine(
                url,
                admin_key=admin_key,
                api_key=api_key,
                stream_interval=stream_interval,
                limits=limits,
            )
            for url in urls
        )
        names = [engine.name for engine in self._engines]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"The server {twice} is listed twice; give each server once.")

    def __repr__(self) -> str:
        return f"SGLangFleet({[engine.name for engine in self._engines]})"

    @property
    def engines(self) -> Sequence[SGLangEngine]:
        """The servers, in the order of their urls."""
        return self._engines

    async def open(self) -> None:
        """Open every server and check that they agree; closes all of them if anything is wrong.

        Raises:
            EngineError: if a server cannot be reached or is no SGLang.
            ConfigError: if the servers differ in model or weights.
        """
        try:
            outcomes = await asyncio.gather(
                *(engine.open() for engine in self._engines), return_exceptions=True
            )
            failures = [outcome for outcome in outcomes if outcome is not None]
            for other in failures[1:]:
                failures[0].add_note(f"also {other}")
            if failures:
                raise failures[0]
            self._check()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close every server's connections."""
        await asyncio.gather(*(engine.close() for engine in self._engines))

    def _check(self) -> None:
        first, *others = self._engines
        if self._model_path is not None and first.facts.model_path != self._model_path:
            raise ConfigError(
                f"{first.name} serves {first.facts.model_path!r} and not {self._model_path!r}; "
                "start it with that model or change model_path."
            )
        for what, of, remedy in _MUST_AGREE:
            for other in others:
                ours, theirs = of(first.facts), of(other.facts)
                if ours != theirs and ours is not None and theirs is not None:
                    raise ConfigError(
                        f"{first.name} and {other.name} disagree on the {what} ({ours!r} and "
                        f"{theirs!r}); {remedy}."
                    )
