"""Takes weights that the trainer brings into the engines itself, by its own calls.

- :class:`Handshake` is for a trainer that can wait for the scheduler: the scheduler pauses and
  flushes the engines, the trainer loads the weights and reports it, and the scheduler continues.
- :class:`ExternalWeights` is for a trainer that has paused the engines, loaded the weights,
  labelled them and let the engines continue before the scheduler hears of it. Nothing is paused a
  second time.

Only the label shows which version an engine has, so a version is in use only where the label
names it, as a decimal number. A trainer that does not label its weights so has them labelled here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Protocol, cast

from aprilsched.errors import ConfigError, EngineError, EngineRejected, RefitError
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.engines.refit import RefitElsewhere
from aprilsched.kernel.weights.threads import call_each

_OTHER_VERSION = 409
"""Status of an engine's answer that it has another version."""
_FIRST_LOOK_SECONDS = 0.02
_LAST_LOOK_SECONDS = 1.0
_FOLLOW_SECONDS = 60.0
"""Longest time between the first and the last engine that shows a version which is followed."""


class Handshake:
    """Lets the trainer load weights by its own calls while the scheduler pauses the engines.

    ``paused_for_weights()`` of the scheduler is the shortest way to use it. Where the trainer's
    pause and its continue are two functions, or two threads, one update is::

        handshake = Handshake()
        update = asyncio.create_task(rollouts.update_weights(handshake, version=7))
        engines = await handshake.paused()  # or handshake.wait_paused() in another thread
        ...  # load the weights into these engines, labelled "7"
        handshake.done()  # or handshake.fail(error), from any thread
        report = await update

    From the moment in which :meth:`paused` returns, the weights of the engines count as
    inconsistent. They are in use again when :meth:`done` was called and they report the version. If
    the trainer fails, or is silent for `timeouts.refit_s`, the engines stand by and the next
    update, with a new handshake, repairs them.

    Args:
        label: True if the trainer does not label the weights with the decimal version. The engines
            get the label after :meth:`done`.
        timeout_s: seconds after :meth:`done` within which every engine must report the version.

    Raises:
        ConfigError: if `timeout_s` is negative.
    """

    def __init__(self, *, label: bool = False, timeout_s: float = 10.0) -> None:
        self._label = label
        self._timeout_s = _seconds(timeout_s)
        self._engines: Future[tuple[str, ...]] = Future()
        self._failure: Future[BaseException | None] = Future()
        """Done when the trainer is: None, or what went wrong."""

    # --- for the trainer -----------------------------------------------------------------------

    async def paused(self) -> tuple[str, ...]:
        """Wait until the engines are paused; returns the names of those to load the weights into.

        Raises:
            RefitError: if the update ends before that; ``update_weights()`` raises the cause.
        """
        # Shielded, because the same future answers other waiters too.
        return await asyncio.shield(asyncio.wrap_future(self._engines))

    def wait_paused(self, timeout: float | None = None) -> tuple[str, ...]:
        """:meth:`paused` for a thread other than that of the scheduler's event loop.

        Raises:
            RefitError: if the update ends before that.
            TimeoutError: if the engines are not paused within `timeout` seconds.
        """
        return self._engines.result(timeout)

    def done(self) -> None:
        """Say that all engines have all weights; from any thread.

        Raises:
            ConfigError: if the engines are not paused yet.
            RefitError: if the update is over already, because this came later than
                `timeouts.refit_s` allows.
        """
        if not self._engines.done():
            raise ConfigError("the engines are not paused yet; wait for paused() before loading.")
        self._say(None)

    def fail(self, error: BaseException) -> None:
        """Say that the weights were not loaded, or not into all engines; from any thread.

        Raises:
            RefitError: if the update is over already.
        """
        self._say(error)

    def _say(self, error: BaseException | None) -> None:
        try:
            self._failure.set_result(error)
        except InvalidStateError:
            raise RefitError(
                "the update of this handshake is over; start another one, with a new handshake."
            ) from None

    # --- for the scheduler ---------------------------------------------------------------------

    async def prepare(self, version: int) -> None:
        """Check that this handshake was not used before.

        Raises:
            ConfigError: if it was.
        """
        if self._engines.done():
            raise ConfigError("this handshake was used already; make a new one for each update.")

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Tell the trainer that `engines` are paused, and wait until it has loaded `version`.

        Raises:
            ConfigError: if an engine does not let others load weights.
            RefitError: if the trainer fails.
        """
        for target in [_taker(engine) for engine in engines]:
            target.expect_weights()
        self._engines.set_result(tuple(engine.name for engine in engines))
        error = await asyncio.wrap_future(self._failure)
        if error is not None:
            raise RefitError(f"the trainer did not load version {version}: {error!r}") from error
        return await _accept_all(version, engines, label=self._label, timeout_s=self._timeout_s)

    async def conclude(self) -> None:
        """Release those who wait for :meth:`paused`, if the update ended before."""
        self._failure.cancel()
        if not self._engines.done():
            self._engines.set_exception(
                RefitError("the update ended before the engines were paused.")
            )


class ExternalWeights:
    """Takes a version that the trainer has already brought into the engines.

    ``await rollouts.update_weights(ExternalWeights(), version=7)`` pauses nothing. Every engine is
    asked for its version, and one that does not report version 7 stands by until it does at a later
    update. The engines report which version sampled each token of the requests that were in flight.

    The trainer must have flushed the KV cache in its pause, or `kv_after_refit` must be "keep" or
    "apart": only the trainer knows whether later tokens attend to keys of older weights.

    Args:
        label: True if the trainer does not label its weights with the decimal version. The engines
            get the label, and the trainer vouches that the weights are complete.
            Rollouts in flight get ``versions_exact=False``, because their tokens between the load
            and the label are reported under the old version.
        timeout_s: seconds within which every engine must report the version.

    Raises:
        ConfigError: if `timeout_s` is negative.
    """

    def __init__(self, *, label: bool = False, timeout_s: float = 10.0) -> None:
        self.label = label
        self._timeout_s = _seconds(timeout_s)

    async def prepare(self, version: int) -> None:
        """Do nothing: the trainer has done everything."""

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Wait until every engine reports `version`; none of them needs to be paused."""
        return await _accept_all(version, engines, label=self.label, timeout_s=self._timeout_s)


class FollowedWeights:
    """Waits until engines have a version that another engine has shown, for a minute at most.

    The scheduler uses it with ``follow_weights``. It does not describe the engines: afterwards each
    is asked for its version, as after every update.
    """

    async def prepare(self, version: int) -> None:
        """Do nothing: the version is in some engine already."""

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Wait until every engine reports `version`, or a newer one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_FOLLOW_SECONDS):
                await asyncio.gather(*(_wait_for(version, engine) for engine in engines))
        return {}


async def _wait_for(version: int, engine: Engine) -> None:
    wait = _FIRST_LOOK_SECONDS
    while True:
        try:
            if await engine.version() >= version:
                return
        except EngineError:
            return  # The question that follows finds out whether it works.
        await asyncio.sleep(wait)
        wait = min(2 * wait, _LAST_LOOK_SECONDS)


class _Taker(Engine, RefitElsewhere, Protocol):
    """An engine that others may load weights into."""


async def _accept_all(
    version: int, engines: Sequence[Engine], *, label: bool, timeout_s: float
) -> Mapping[str, Exception | None]:
    """Let every engine take its weights for `version`, within `timeout_s` seconds."""
    return await call_each(engines, lambda engine: _accept(version, engine, label, timeout_s))


async def _accept(version: int, engine: Engine, label: bool, timeout_s: float) -> None:
    now = asyncio.get_running_loop().time
    until, wait = now() + timeout_s, _FIRST_LOOK_SECONDS
    while True:
        try:
            await _taker(engine).accept_weights(version, label=label)
            return
        except EngineRejected as error:
            if error.status != _OTHER_VERSION or now() + wait > until:
                raise
        await asyncio.sleep(wait)
        wait = min(2 * wait, _LAST_LOOK_SECONDS)


def _taker(engine: Engine) -> _Taker:
    """The engine, if others may load weights into it."""
    if not isinstance(engine, RefitElsewhere):
        raise ConfigError(
            f"{engine.name} lets no other program load weights; use another publisher for it."
        )
    return cast(_Taker, engine)


def _seconds(timeout_s: float) -> float:
    if not timeout_s >= 0:
        raise ConfigError(f"timeout_s is {timeout_s}; give seconds, 0 or more.")
    return timeout_s
