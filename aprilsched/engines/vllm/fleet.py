"""Fleets of vLLM servers of one model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from aprilsched.engines.fleet import ListedFleet, UrlFleet
from aprilsched.engines.http import HttpLimits
from aprilsched.engines.vllm.engine import VLLMEngine


class VLLMFleet(UrlFleet[VLLMEngine]):
    """The vLLM servers at `urls`.

    Args:
        urls: one URL for each server, as ``http://host:port``.
        api_key: the servers' ``--api-key``, where they have one.
        model_path: refuse servers that serve another model; None accepts any one model.
        stream_interval: tokens between two events of a stream.
        limits: timeouts and sizes, for each server.
        first_version: version of the weights that the servers label "0".

    Raises:
        ConfigError: if there is no URL, a bad one, or the same one twice.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str | None = None,
        model_path: str | None = None,
        stream_interval: int = 64,
        limits: HttpLimits | None = None,
        first_version: int = 0,
    ) -> None:
        engine = partial(
            VLLMEngine,
            api_key=api_key,
            stream_interval=stream_interval,
            limits=limits,
            first_version=first_version,
        )
        super().__init__(urls, engine, model_path=model_path)


class VLLMListedFleet(ListedFleet[VLLMEngine]):
    """The vLLM servers that a function lists, as they come and go.

    A server joins and leaves as with :class:`~aprilsched.SGLangListedFleet`.

    Args:
        list_urls: ``async def list_urls()`` returns the URLs of the servers that run now, as
            ``http://host:port``.
        api_key: the servers' ``--api-key``, where they have one.
        model_path: refuse servers that serve another model; None accepts any one model.
        stream_interval: tokens between two events of a stream.
        limits: timeouts and sizes, for each server.
        poll_s: seconds between two calls of `list_urls`.

    Raises:
        ConfigError: if `poll_s` is not above 0.
    """

    def __init__(
        self,
        list_urls: Callable[[], Awaitable[Sequence[str]]],
        *,
        api_key: str | None = None,
        model_path: str | None = None,
        stream_interval: int = 64,
        limits: HttpLimits | None = None,
        poll_s: float = 5.0,
    ) -> None:
        engine = partial(
            VLLMEngine, api_key=api_key, stream_interval=stream_interval, limits=limits
        )
        super().__init__(list_urls, engine, model_path=model_path, poll_s=poll_s)
