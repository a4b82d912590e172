"""A fleet from addresses as users write them: ``vllm+http://…`` is a vLLM server, and any other URL
one of SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from aprilsched.errors import ConfigError
from aprilsched.kernel.engines.sglang.http_engine import SGLangFleet
from aprilsched.kernel.engines.vllm.engine import VLLMFleet

ServerFleet: TypeAlias = SGLangFleet | VLLMFleet

VLLM = "vllm+"


def fleet_at(
    urls: Sequence[str],
    *,
    admin_key: str | None = None,
    api_key: str | None = None,
    stream_interval: int = 64,
    wait_s: float | None = None,
) -> ServerFleet:
    """Return the fleet of the servers at `urls`, which must all run the same program.

    `wait_s` is as in :class:`~aprilsched.kernel.engines.fleet.UrlFleet`.

    Raises:
        ConfigError: if a URL or a key cannot be used, or if the URLs mix the two programs.
    """
    of_vllm = [url.startswith(VLLM) for url in urls]
    if any(of_vllm) and not all(of_vllm):
        raise ConfigError(
            "The fleet mixes vLLM and SGLang servers, whose log-probabilities differ; give servers "
            "of one program."
        )
    fleet = VLLMFleet if any(of_vllm) else SGLangFleet
    return fleet(
        [url.removeprefix(VLLM) for url in urls],
        admin_key=admin_key,
        api_key=api_key,
        stream_interval=stream_interval,
        wait_s=wait_s,
    )
