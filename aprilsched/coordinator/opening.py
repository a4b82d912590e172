"""What is refused before anything is launched: engines that cannot do what is asked of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aprilsched.config import SchedulerConfig
from aprilsched.core.events import EngineInfo, Opened
from aprilsched.engines.base import Engine
from aprilsched.errors import ConfigError

__all__ = ["check_engines"]


async def check_engines(engines: Sequence[Engine], config: SchedulerConfig) -> Opened:
    """The fleet as the core sees it.

    Raises:
        ConfigError: if the engines have different policy versions, or one cannot keep what
            `config` promises.
    """
    if not engines:
        raise ConfigError("the fleet has no engines; give at least one.")
    for engine in engines:
        _check_capabilities(engine, config)
    # A run that was killed may have left its engines paused. Continuing twice is harmless.
    await asyncio.gather(*(engine.resume() for engine in engines))
    versions = await asyncio.gather(*(engine.version() for engine in engines))
    if len(set(versions)) > 1:
        found = ", ".join(f"{e.name} has {v}" for e, v in zip(engines, versions, strict=True))
        raise ConfigError(
            f"the engines have different policy versions ({found}); restart them or bring one "
            "version into all before scheduling."
        )
    return Opened(
        engines=tuple(
            EngineInfo(name=engine.name, version=version)
            for engine, version in zip(engines, versions, strict=True)
        )
    )


def _check_capabilities(engine: Engine, config: SchedulerConfig) -> None:
    able = engine.capabilities
    mixes = config.straggler in ("retract", "in_place")
    if mixes and not able.version_spans and not config.allow_inexact_versions:
        raise ConfigError(
            f"{engine.name} ({able.server}) cannot tell which version sampled a token, so "
            f'straggler="{config.straggler}" would mix versions unseen; use straggler="abort", '
            "or set allow_inexact_versions."
        )
    if config.straggler == "retract" and not able.flush_while_paused:
        raise ConfigError(
            f"{engine.name} ({able.server}) cannot flush its cache between pause and continue, "
            'so straggler="retract" would go on with stale keys; use straggler="abort".'
        )
