"""Fleets of SGLang servers of one model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from aprilsched.engines.fleet import ListedFleet, UrlFleet
from aprilsched.engines.http import HttpLimits
from aprilsched.engines.sglang.http_engine import SGLangEngine


class SGLangFleet(UrlFleet[SGLangEngine]):
    """The SGLang servers at `urls`.

    Args:
        urls: one URL for each server, as ``http://host:port``.
        admin_key: the servers' ``--admin-api-key``, where they have one.
        api_key: the servers' ``--api-key``, where they have one.
        model_path: refuse servers that serve another model; None accepts any one model.
        stream_interval: tokens between two events of a stream.
        limits: timeouts and sizes, for each server.
        first_version: version of the weights that the servers label "0". It is for a trainer that
            labels its weights from 1 on again in each process, while the versions of a resumed run
            go on from those of the former one.

    Raises:
        ConfigError: if there is no URL, a bad one, or the same one twice.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        admin_key: str | None = None,
        api_key: str | None = None,
        model_path: str | None = None,
        stream_interval: int = 64,
        limits: HttpLimits | None = None,
        first_version: int = 0,
    ) -> None:
        engine = partial(
            SGLangEngine,
            admin_key=admin_key,
            api_key=api_key,
            stream_interval=stream_interval,
            limits=limits,
            first_version=first_version,
        )
        super().__init__(urls, engine, model_path=model_path)


class SGLangListedFleet(ListedFleet[SGLangEngine]):
    """The SGLang servers that a function lists, as they come and go.

    The function is asked when the fleet is opened, and again every `poll_s` seconds. A server that
    is listed joins as soon as it answers. A server that is missing in two lists in a row has left,
    unless it is the last one. An empty list, or a function that raises, changes nothing.

    Args:
        list_urls: ``async def list_urls()`` returns the URLs of the servers that run now, as
            ``http://host:port``.
        admin_key: the servers' ``--admin-api-key``, where they have one.
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
        admin_key: str | None = None,
        api_key: str | None = None,
        model_path: str | None = None,
        stream_interval: int = 64,
        limits: HttpLimits | None = None,
        poll_s: float = 5.0,
    ) -> None:
        engine = partial(
            SGLangEngine,
            admin_key=admin_key,
            api_key=api_key,
            stream_interval=stream_interval,
            limits=limits,
        )
        super().__init__(list_urls, engine, model_path=model_path, poll_s=poll_s)
