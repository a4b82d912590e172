"""Checks engines before anything is launched, and refuses those that cannot do what is needed.

An engine that may be used is running, and where a refit flushes the cache it was flushed before its
first request too: when the run is opened, when the engine joins, and when it comes back. A run with
"in_place" before this one leaves prefixes of all its versions in the cache; the prompts of this run
would find them, and have logprobs that no weights give.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from typing import ClassVar

from aprilsched.config import SchedulerConfig
from aprilsched.errors import (
    ConfigError,
    EngineError,
    EngineTaken,
    InconsistentWeights,
)
from aprilsched.kernel.core.messages.events import EngineInfo, Opened
from aprilsched.kernel.engines.base import (
    CLAIM_INTERVAL_S,
    CLAIM_S,
    Claimable,
    Engine,
    HasAddress,
    HasLabel,
    ReportsLoad,
    TellsPause,
)
from aprilsched.kernel.engines.self_check import check, pause_during
from aprilsched.kernel.shell.loop import joining
from aprilsched.kernel.values.companions import TOP

_FIRST_LABELS = ("default", "0")
"""Labels of the weights that a server was started with."""


async def check_engines(
    engines: Sequence[Engine],
    config: SchedulerConfig,
    *,
    resumed: bool = False,
    trusted: bool = False,
) -> Opened:
    """Check and flush all engines, and describe them for the core.

    In a `resumed` run an engine may have any version, or inconsistent weights. An engine without
    the run's own version waits for a refit. In a fresh run labelled weights are logged, because
    they come from an earlier run, unless the trainer labels them itself (`trusted`).

    Raises:
        ConfigError: if the engines have different policy versions, or if an engine cannot do what
            `config` needs.
        EngineTaken: if another process owns an engine.
        EngineError: if an engine does not answer, or does not flush its cache.
    """
    if not engines:
        raise ConfigError("the fleet has no engines; give at least one.")
    for engine in engines:
        _check_engine(engine, config, engines[:1])
    await asyncio.gather(*map(claim, engines))
    await asyncio.gather(*map(_log_pause, engines))
    # A run that was killed may have left its engines paused. Continuing a running engine is
    # harmless.
    await asyncio.gather(*(engine.resume() for engine in engines))
    versions = await asyncio.gather(*(_version(engine, resumed) for engine in engines))
    if len(set(versions)) > 1 and not resumed:
        found = ", ".join(f"{e.name} has {v}" for e, v in zip(engines, versions, strict=True))
        raise ConfigError(
            f"the engines have different policy versions ({found}); restart them, or load one "
            "version into all of them before scheduling."
        )
    if tiered := [e.name for e in engines if e.capabilities.kv_tier != "none"]:
        log.warning(
            "%d engines may keep KV through a flush (%s%s): each request gets a cache key of its "
            "engine's weights, and no response waits inside an engine while KV is recomputed",
            len(tiered),
            ", ".join(tiered[:_SHOWN]),
            ", …" if len(tiered) > _SHOWN else "",
        )
    if not (resumed or trusted):
        _log_labels(engines, versions)
    # Before the first pause, which stops the requests of others, and after which SGLang's figures
    # are old.
    await say_who_is_there(engines)
    # All are waited for, because a fleet that is closed meanwhile could not continue them.
    for failure in await asyncio.gather(
        *(_flush(engine, config) for engine in engines), return_exceptions=True
    ):
        if failure is not None:
            raise failure
    return Opened(
        engines=tuple(
            joining(engine.name, engine.capabilities, version)
            for engine, version in zip(engines, versions, strict=True)
        )
    )


async def examine(engine: Engine, config: SchedulerConfig, fleet: Iterable[Engine]) -> EngineInfo:
    """Check and flush one engine that joins `fleet` or comes back, and describe it for the core.

    Raises:
        ConfigError: if it cannot do what `config` needs.
        EngineError: if it does not answer, does not pass the quick checks or does not flush.
    """
    _check_engine(engine, config, fleet)
    version = await check(engine)
    await _flush(engine, config)
    return joining(engine.name, engine.capabilities, version)


async def _flush(engine: Engine, config: SchedulerConfig) -> None:
    if config.cached_kv == "recompute":
        async with pause_during(engine):
            await engine.flush()


def _log_labels(engines: Sequence[Engine], versions: Sequence[int | None]) -> None:
    """Log a warning if engines have weights of an earlier run, whose number this run continues."""
    for engine, version in zip(engines, versions, strict=True):
        label = engine.label if isinstance(engine, HasLabel) else str(version)
        if label not in _FIRST_LABELS:
            log.warning(
                '%s has weights labelled "%s", of an earlier run; this run takes their tokens for '
                "on-policy unless update_weights() comes before the first batch",
                engine.name,
                label,
            )


async def _version(engine: Engine, resumed: bool) -> int | None:
    try:
        return await engine.version()
    except InconsistentWeights:
        if resumed:
            return None
        raise


def _check_engine(engine: Engine, config: SchedulerConfig, fleet: Iterable[Engine]) -> None:
    """Raise ConfigError if the engine cannot do what `config` needs, or does not fit the `fleet`
    that it is in."""
    able, behaviour = engine.capabilities, config.behaviour
    for other in fleet:
        if _program(other) != _program(engine):
            raise ConfigError(
                f"{engine.name} is {able.server} and {other.name} {other.capabilities.server}, "
                "which give one token different log-probabilities; use engines of one program."
            )
    exact = able.version_spans or config.allow_inexact_versions
    if behaviour.needs_spans and not exact:
        raise ConfigError(
            f"{engine.name} ({able.server}) cannot tell which version sampled a token, so "
            f'straggler="{config.straggler}" would mix versions without a record; use '
            'straggler="abort", or set allow_inexact_versions.'
        )
    for companion in config.policies.companions:
        if companion.name not in able.companions:
            how = f"start it with --enable-return-{companion.name.replace('_', '-')}"
            if companion.name == "sampling_mask":
                how = "use SGLang 0.5.21 or later, or start vLLM with --return-sampling-mask"
            if companion.name == TOP:
                how = "use servers that do"
            raise ConfigError(
                f"{engine.name} ({able.server}) does not return {companion.name}; {how}, or leave "
                "it out of companions."
            )
    if able.kv_tier == "unkeyed" and config.cached_kv != "keep":
        raise ConfigError(
            f"{engine.name} ({able.server}) keeps KV through a flush and shares it among requests "
            "of all cache keys, so tokens would attend to keys of older weights; start it without "
            "a storage for KV, or with SGLang 0.5.23 or a connector of vLLM that heeds cache_salt."
        )
    if behaviour.needs_flush_while_paused(config.cached_kv) and not able.flush_while_paused:
        raise ConfigError(
            f"{engine.name} ({able.server}) cannot flush its cache between pause and continue, so "
            f'straggler="{config.straggler}" would continue with stale keys; use straggler="abort".'
        )


def _program(engine: Engine) -> str:
    return engine.capabilities.server.partition(" ")[0]


# --- sharing -------------------------------------------------------------------------------------

# Detects other users of the same engines.
#
# Two schedulers on one engine would each pause and refit it while the other uses it. Within one
# process, the second scheduler is refused. Across processes it is refused by a claim on the server
# (:class:`~aprilsched.kernel.engines.base.Claimable`), which the first one renews. Clients that make no
# claim are detected by their effects: requests that an engine has when a scheduler opens, aborts
# that the scheduler did not request (see :mod:`aprilsched.kernel.shell.attempts`), and an engine
# that runs although the scheduler has paused it (see :mod:`aprilsched.kernel.shell.controls`). A
# version that the scheduler did not load is detected in every answer of an engine.

log = logging.getLogger("aprilsched")

_SHOWN = 3
"""Number of engines that a warning names."""
_AGAIN_S = 1.0
"""Seconds until an engine is asked again. SGLang's figures are some steps old, and SGLang aborts
the requests of a killed client within this time."""


class Claim:
    """The engines that one open scheduler of this process uses.

    Args:
        run_id: the scheduler's run id, for the error message that another scheduler gets.
    """

    _holders: ClassVar[dict[Hashable, Claim]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()
    """Protects `_holders`, because a blocking scheduler has its loop in a thread of its own."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engines: list[Engine] = []
        """The claimed engines. The references ensure that no other object gets the same id."""

    def take(self, engines: Iterable[Engine]) -> None:
        """Claim these engines too.

        Raises:
            ConfigError: if another open scheduler uses one of them.
        """
        self._loop = asyncio.get_running_loop()
        with self._lock:
            for engine in engines:
                holder = self._holders.get(_key(engine))
                if holder is not None and holder is not self and holder.is_open:
                    raise ConfigError(
                        f"{engine.name} is in use by the open scheduler of run "
                        f"{holder._run_id}, and two schedulers would disturb each other by pauses "
                        "and refits; close that one first."
                    )
            for engine in engines:
                self._holders[_key(engine)] = self
                self._engines.append(engine)

    def give_back(self) -> None:
        """End the claim, so that another scheduler may use the engines."""
        with self._lock:
            for engine in self._engines:
                if self._holders.get(_key(engine)) is self:
                    del self._holders[_key(engine)]
            self._engines = []

    @property
    def is_open(self) -> bool:
        """Whether the scheduler may still use engines. It cannot when its event loop is closed."""
        return self._loop is not None and not self._loop.is_closed()


async def claim(engine: Engine) -> None:
    """Claim an engine across processes; the claim of an owner that was killed is waited for.

    Raises:
        EngineTaken: if another owner renews its claim.
        EngineError: if the engine does not answer.
    """
    if not isinstance(engine, Claimable):
        return
    now = asyncio.get_running_loop().time
    end = now() + CLAIM_S + CLAIM_INTERVAL_S
    while not await engine.claim():
        if now() >= end:
            why = "is owned by another scheduler or gateway, which is alive; stop that one first, "
            raise EngineTaken(engine.name, f"{why}or use other servers.")
        log.info("%s has an owner, or had one until now; its claim is waited for", engine.name)
        await asyncio.sleep(_AGAIN_S)


async def disclaim(engine: Engine) -> None:
    """End the claim on an engine, if there is one; a failure is left to its expiry."""
    if isinstance(engine, Claimable):
        with suppress(EngineError):
            await engine.disclaim()


_PAUSE_ANSWER_S = 5.0
"""Seconds that an engine has to answer whether it is paused; nothing waits for it any longer."""


async def shows_pause(engine: Engine) -> bool | None:
    """Whether a server is paused; None if the engine is no server, or does not report it."""
    if isinstance(engine, TellsPause) and isinstance(engine, HasAddress):
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_PAUSE_ANSWER_S):
                return await engine.is_paused()
    return None


async def _log_pause(engine: Engine) -> None:
    """Log that a server is paused, because it is continued. One that starts shows a pause too."""
    if await shows_pause(engine):
        log.warning("%s was left paused by an earlier client, or still starts", engine.name)


def _key(engine: Engine) -> Hashable:
    return engine.address if isinstance(engine, HasAddress) else id(engine)


async def say_who_is_there(engines: Sequence[Engine]) -> None:
    """Log a warning for each engine that has requests before this run has sent any."""
    found = await _busy(engines)
    if found:
        await asyncio.sleep(_AGAIN_S)
        found = await _busy([engine for engine, _ in found])
    for engine, count in found:
        log.warning(
            "%s has requests of another client (%d of them): this run's pauses and refits stop "
            "those too, and another scheduler's would stop this run's; give each its own engines",
            engine.name,
            count,
        )


async def _busy(engines: Sequence[Engine]) -> list[tuple[Engine, int]]:
    """The engines that have requests, each with their number."""
    counts = await asyncio.gather(*map(_requests, engines))
    return [(engine, count) for engine, count in zip(engines, counts, strict=True) if count]


async def _requests(engine: Engine) -> int:
    if not isinstance(engine, ReportsLoad):
        return 0
    try:
        load = await engine.load()
    except EngineError:
        return 0
    return load.running + load.queued
