"""Checks engines before anything is launched, and refuses those that cannot do what is needed.

An engine that may be used is running, and where a refit flushes the cache it was flushed before its
first request too: when the run is opened, when the engine joins, and when it comes back. A run with
"in_place" before this one leaves prefixes of all its versions in the cache; the prompts of this run
would find them, and have logprobs that no weights give.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aprilsched.config import SchedulerConfig
from aprilsched.coordinator.sharing import say_who_is_there
from aprilsched.core.messages.events import EngineInfo, Opened
from aprilsched.core.policies.straggler import BEHAVIOURS
from aprilsched.engines.base import Engine
from aprilsched.engines.selfcheck import check, paused
from aprilsched.errors import ConfigError, InconsistentWeights

__all__ = ["check_engines", "examine"]


async def check_engines(
    engines: Sequence[Engine], config: SchedulerConfig, *, resumed: bool = False
) -> Opened:
    """Check and flush all engines, and describe them for the core.

    In a `resumed` run an engine may have any version, or inconsistent weights. An engine without
    the run's own version waits for a refit.

    Raises:
        ConfigError: if the engines have different policy versions, or if an engine cannot do what
            `config` needs.
        EngineError: if an engine does not answer, or does not flush its cache.
    """
    if not engines:
        raise ConfigError("the fleet has no engines; give at least one.")
    for engine in engines:
        _check_engine(engine, config)
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
            _info(engine, version) for engine, version in zip(engines, versions, strict=True)
        )
    )


async def examine(engine: Engine, config: SchedulerConfig) -> EngineInfo:
    """Check and flush one engine that joins or comes back, and describe it for the core.

    Raises:
        ConfigError: if it cannot do what `config` needs.
        EngineError: if it does not answer, does not pass the quick checks or does not flush.
    """
    _check_engine(engine, config)
    version = await check(engine)
    await _flush(engine, config)
    return _info(engine, version)


async def _flush(engine: Engine, config: SchedulerConfig) -> None:
    if config.cached_kv == "recompute":
        async with paused(engine):
            await engine.flush()


async def _version(engine: Engine, resumed: bool) -> int | None:
    try:
        return await engine.version()
    except InconsistentWeights:
        if resumed:
            return None
        raise


def _check_engine(engine: Engine, config: SchedulerConfig) -> None:
    """Raise ConfigError if the engine cannot do what `config` needs."""
    able, behaviour = engine.capabilities, BEHAVIOURS[config.straggler]
    exact = able.version_spans or config.allow_inexact_versions
    if behaviour.needs_spans and not exact:
        raise ConfigError(
            f"{engine.name} ({able.server}) cannot tell which version sampled a token, so "
            f'straggler="{config.straggler}" would mix versions without a record; use '
            'straggler="abort", or set allow_inexact_versions.'
        )
    if behaviour.needs_flush_while_paused(config.cached_kv) and not able.flush_while_paused:
        raise ConfigError(
            f"{engine.name} ({able.server}) cannot flush its cache between pause and continue, so "
            f'straggler="{config.straggler}" would continue with stale keys; use straggler="abort".'
        )


def _info(engine: Engine, version: int | None) -> EngineInfo:
    able = engine.capabilities
    return EngineInfo(
        name=engine.name,
        version=version,
        holds_stragglers=able.release_while_paused,
        keeps_weights=able.keeps_released_weights,
        kv_tokens=able.kv_tokens,
        max_running=able.max_running_requests,
    )
