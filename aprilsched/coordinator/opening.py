"""What is refused before anything is launched: engines that cannot do what is asked of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aprilsched.config import SchedulerConfig
from aprilsched.core.messages.events import EngineInfo, Opened
from aprilsched.core.policies.straggler import BEHAVIOURS
from aprilsched.engines.base import Engine
from aprilsched.engines.selfcheck import check
from aprilsched.errors import ConfigError, TornWeights

__all__ = ["check_engines", "examine"]


async def check_engines(
    engines: Sequence[Engine], config: SchedulerConfig, *, resumed: bool = False
) -> Opened:
    """The fleet as the core sees it. In a `resumed` run an engine may have any version, or torn
    weights: what has not the run's own waits for it.

    Raises:
        ConfigError: if the engines have different policy versions, or one cannot keep what
            `config` promises.
    """
    if not engines:
        raise ConfigError("the fleet has no engines; give at least one.")
    for engine in engines:
        _check_engine(engine, config)
    # A run that was killed may have left its engines paused. Continuing twice is harmless.
    await asyncio.gather(*(engine.resume() for engine in engines))
    versions = await asyncio.gather(*(_version(engine, resumed) for engine in engines))
    if len(set(versions)) > 1 and not resumed:
        found = ", ".join(f"{e.name} has {v}" for e, v in zip(engines, versions, strict=True))
        raise ConfigError(
            f"the engines have different policy versions ({found}); restart them or bring one "
            "version into all before scheduling."
        )
    return Opened(
        engines=tuple(
            _info(engine, version) for engine, version in zip(engines, versions, strict=True)
        )
    )


async def examine(engine: Engine, config: SchedulerConfig) -> EngineInfo:
    """A single engine that joins, or is back: does it do its work?

    Raises:
        ConfigError: if it cannot keep what `config` promises.
        EngineError: if it does not answer, or does not pass the doctor's quick checks.
    """
    _check_engine(engine, config)
    return _info(engine, await check(engine))


async def _version(engine: Engine, resumed: bool) -> int | None:
    try:
        return await engine.version()
    except TornWeights:
        if resumed:
            return None
        raise


def _check_engine(engine: Engine, config: SchedulerConfig) -> None:
    """Raises ConfigError if the engine cannot keep what `config` promises."""
    able, behaviour = engine.capabilities, BEHAVIOURS[config.straggler]
    exact = able.version_spans or config.allow_inexact_versions
    if behaviour.needs_spans and not exact:
        raise ConfigError(
            f"{engine.name} ({able.server}) cannot tell which version sampled a token, so "
            f'straggler="{config.straggler}" would mix versions unseen; use straggler="abort", '
            "or set allow_inexact_versions."
        )
    if behaviour.needs_flush_while_paused(config.cached_kv) and not able.flush_while_paused:
        raise ConfigError(
            f"{engine.name} ({able.server}) cannot flush its cache between pause and continue, "
            f'so straggler="{config.straggler}" would go on with stale keys; use straggler="abort".'
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
