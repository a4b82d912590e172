"""Checks engines before anything is launched, and refuses those that cannot do what is needed.

An engine that passes is running. If refits flush the cache, it is also flushed before the engine's
first request: when the run is opened, when the engine joins, and when it returns. A run with
"in_place" before this one leaves prefixes of all its versions in the cache; the prompts of this run
would find them, and have logprobs that no weights give.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from aprilsched.config import SchedulerConfig
from aprilsched.errors import ConfigError, InconsistentWeights
from aprilsched.kernel.core.messages.events import EngineInfo, Opened
from aprilsched.kernel.engines.base import Engine, HasLabel, label_parts
from aprilsched.kernel.engines.self_check import check, pause_during
from aprilsched.kernel.shell.sharing import SHOWN, claim, log_pause, say_who_is_there
from aprilsched.kernel.values.companions import TOP

log = logging.getLogger("aprilsched")


def join_run(engines: Sequence[Engine], process: str, former: str | None, *, decimal: bool) -> None:
    """Let the engines' labels name this `process`, and count those of the `former` one.

    A fresh run, whose `former` is None, takes the weights with the largest number for its own.
    With `decimal`, labels that are decimal numbers count too."""
    labelled = [engine for engine in engines if isinstance(engine, HasLabel)]
    fresh = former is None
    if fresh and labelled:
        former = max(label_parts(engine.label) for engine in labelled)[1]
    for engine in labelled:
        engine.join_run(process, former or "", decimal=decimal, fresh=fresh)


async def keep_labels(engines: Sequence[Engine], opened: Opened, newest: int | None) -> None:
    """Label the weights up to version `newest`, or of any if it is None, as this process's.

    All others are another run's."""

    async def keep(engine: Engine, version: int | None) -> None:
        if isinstance(engine, HasLabel):
            is_known = version is not None and (newest is None or version <= newest)
            await engine.keep_label(known=is_known)

    await asyncio.gather(*map(keep, engines, (info.version for info in opened.engines)))


_FIRST_LABELS = ("default", "0")
"""Labels of the weights that a server was started with."""


async def check_engines(
    engines: Sequence[Engine],
    config: SchedulerConfig,
    *,
    may_differ: bool = False,
    trusted: bool = False,
) -> Opened:
    """Check and flush all engines, and describe them for the core.

    If versions `may_differ`, an engine may have any version, or inconsistent weights. One without
    the run's own version waits for a refit; a fresh run takes the newest for its own. Labelled
    weights are logged, because they come from an earlier run, unless this run has published them or
    the trainer labels them itself (`trusted`).

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
    await asyncio.gather(*map(log_pause, engines))
    # A run that was killed may have left its engines paused. Continuing a running engine is
    # harmless.
    await asyncio.gather(*(engine.resume() for engine in engines))
    versions = await asyncio.gather(*(_version(engine, may_differ) for engine in engines))
    if len(set(versions)) > 1 and not may_differ:
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
            ", ".join(tiered[:SHOWN]),
            ", …" if len(tiered) > SHOWN else "",
        )
    if not trusted:
        _log_labels(engines, versions)
    # Before the first pause, which stops the requests of others, and after which SGLang's figures
    # are old.
    await say_who_is_there(engines)
    # All are waited for, because a fleet that is closed earlier could not continue them.
    for failure in await asyncio.gather(
        *(_flush(engine, config) for engine in engines), return_exceptions=True
    ):
        if failure is not None:
            raise failure
    return Opened(
        engines=tuple(
            EngineInfo(name=engine.name, version=version, able=engine.capabilities)
            for engine, version in zip(engines, versions, strict=True)
        )
    )


async def examine(
    engine: Engine, config: SchedulerConfig, fleet: Iterable[Engine], process: str = ""
) -> EngineInfo:
    """Check and flush one engine that joins `fleet` or returns, and describe it for the core.

    Of labels of runs only those of this `process` count.

    Raises:
        ConfigError: if it cannot do what `config` needs.
        EngineError: if it does not answer, does not pass the quick checks or does not flush.
    """
    _check_engine(engine, config, fleet)
    join_run([engine], process, process, decimal=config.follow_weights)
    version = await check(engine)
    await _flush(engine, config)
    return EngineInfo(name=engine.name, version=version, able=engine.capabilities)


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


async def _version(engine: Engine, may_differ: bool) -> int | None:
    try:
        return await engine.version()
    except InconsistentWeights as error:
        if not may_differ:
            raise
        log.warning("engine %s", error)
        return None


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
            f"{engine.name} ({able.server}) does not report which version sampled a token, so "
            f'straggler="{config.straggler_name}" would mix versions without a record; use '
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
            f'straggler="{config.straggler_name}" would continue with stale keys; use '
            'straggler="abort".'
        )


def _program(engine: Engine) -> str:
    return engine.capabilities.server.partition(" ")[0]
