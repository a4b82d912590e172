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
import uuid
from collections.abc import AsyncGenerator, Hashable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import ClassVar

import numpy as np

from aprilsched.companions import TOP
from aprilsched.config import SchedulerConfig
from aprilsched.core.messages.events import EngineInfo, Opened
from aprilsched.driver.loop import joining
from aprilsched.engines.base import Chunk, Engine, GenerationRequest, HasAddress, ReportsLoad
from aprilsched.errors import ConfigError, EngineError, EngineProtocolError, InconsistentWeights
from aprilsched.types import SamplingParams


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
        _check_engine(engine, config, engines[:1])
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
    if behaviour.needs_flush_while_paused(config.cached_kv) and not able.flush_while_paused:
        raise ConfigError(
            f"{engine.name} ({able.server}) cannot flush its cache between pause and continue, so "
            f'straggler="{config.straggler}" would continue with stale keys; use straggler="abort".'
        )


def _program(engine: Engine) -> str:
    return engine.capabilities.server.partition(" ")[0]


# --- sharing -------------------------------------------------------------------------------------

# Detects other users of the same engines: refuses them in this process, warns of others.
#
# Two schedulers on one engine would each pause and refit it while the other uses it. Within one
# process, the second scheduler is refused. Another process is detected only by its effects:
# requests that an engine has when a scheduler opens, and aborts that the scheduler did not request
# (see :mod:`aprilsched.coordinator.attempts`). A version that the scheduler did not load is
# detected in every answer of an engine.

log = logging.getLogger("aprilsched")

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


# --- self-check -----------------------------------------------------------------------------------

# The checks that an engine must pass before it is used again after a loss.
#
# They take seconds and do no harm. They use only the engine's protocol, so they are the same for a
# server, for a server behind a router and for the embedded engine. They check what a run needs: the
# engine tells its version, it generates as many tokens as it is asked for with finite logprobs, it
# pauses and continues with a request in it, and it ends that request when it is aborted. A process
# that answers ``/health`` has shown none of these.
#
# The checks do not compare two greedy answers to the same prompt: on a GPU the second one meets a
# cached prefix, which is computed in another order, so that a near tie may go the other way.

_SHORT = 4
_LONG = 256
"""Tokens of the request that is paused: about a second's work, so that the pause meets it."""
_ABORT_AGAIN_S = 0.25
_CONTINUE_S = 5.0
"""Bound for the continue of an engine whose pause was cancelled."""


async def check(engine: Engine) -> int | None:
    """Check an open engine that nobody else uses; the caller bounds how long it may take.

    Returns:
        The version that the engine reports; None if its weights are inconsistent. The next refit
        repairs such weights, so their logprobs are not checked.

    Raises:
        EngineError: if the engine does not do what a run needs; the message says what.
    """
    # The client that lost the engine may have left it paused.
    await engine.resume()
    try:
        version: int | None = await engine.version()
    except InconsistentWeights:
        version = None
    await check_tokens(engine, finite=version is not None)
    await _check_pause_and_abort(engine)
    return version


@asynccontextmanager
async def pause_during(engine: Engine) -> AsyncGenerator[None]:
    """Pause an engine by "retract" for the block; it continues however the block ends.

    Raises:
        EngineError: if it does not pause or continue.
    """
    try:
        await engine.pause("retract")
        yield
        await engine.resume()
    except BaseException:
        # After a cancellation (because the engine has left the fleet, for example) nobody may ever
        # resume the engine.
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_CONTINUE_S):
                await engine.resume()
        raise


async def check_tokens(engine: Engine, *, finite: bool) -> None:
    """Check that an engine generates a few tokens, with `finite` logprobs where these are due.

    Others may use the engine meanwhile.

    Raises:
        EngineError: if it does not; the message says what it did.
    """
    tokens, finish = 0, None
    async with aclosing(engine.generate(_request(_SHORT))) as chunks:
        async for chunk in chunks:
            ids, logprobs, finish = chunk.token_ids, chunk.logprobs, chunk.finish
            tokens += len(ids)
            if len(ids) != len(logprobs) or (finite and not np.isfinite(logprobs).all()):
                why = f"gave {len(ids)} tokens with the logprobs {logprobs[:_SHORT].tolist()}."
                raise EngineProtocolError(engine.name, why)
    if finish != "length" or tokens != _SHORT:
        why = f"gave {tokens} tokens and the end {finish!r} where {_SHORT} tokens were asked for."
        raise EngineProtocolError(engine.name, why)


async def _check_pause_and_abort(engine: Engine) -> None:
    request = _request(_LONG)
    async with aclosing(engine.generate(request)) as chunks:
        # The first tokens show that the request is registered: an earlier abort would be lost.
        first = await anext(chunks, None)
        if first is None or first.finish is not None:
            return
        async with pause_during(engine):
            pass
        reading = asyncio.ensure_future(_read_to_end(chunks))
        try:
            while not reading.done():
                await engine.abort(request.request_id)
                await asyncio.wait([reading], timeout=_ABORT_AGAIN_S)
            reading.result()
        finally:
            reading.cancel()
            await asyncio.wait([reading])


async def _read_to_end(chunks: AsyncGenerator[Chunk, None]) -> None:
    async for _ in chunks:
        pass


def _request(tokens: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"aprilsched-{uuid.uuid4().hex}",
        input_ids=np.zeros(1, dtype=np.int32),
        # A vLLM server with --return-sampling-mask refuses a temperature of 0.
        sampling=SamplingParams(max_new_tokens=tokens, top_k=1, ignore_eos=True),
    )
