"""Carries out the trainer's calls update_weights() and asleep(), one at a time.

Each call ends with a result or an error. A cancelled call never leaves an engine paused or asleep:
its work is withdrawn if that is still possible, and otherwise runs to its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress

from aprilsched.errors import ConfigError, RefitError
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.core.steps.outage import stranded
from aprilsched.kernel.engines.refit import SleepingEngine
from aprilsched.kernel.shell.callbacks import called, called_now
from aprilsched.kernel.shell.outages import wants_update
from aprilsched.kernel.shell.refits import RefitReport
from aprilsched.kernel.shell.session import Session
from aprilsched.kernel.weights.external import ExternalWeights, Handshake
from aprilsched.kernel.weights.publisher import (
    AdapterPublisher,
    ConcludingPublisher,
    RepublishingPublisher,
    WeightPublisher,
    WholePublisher,
)

log = logging.getLogger("aprilsched")

_PUBLISHER = "the publisher"
_TAGS = ("kv_cache", "weights", "cuda_graph")


def _warn_of_trained(state: SchedulerState) -> None:
    """Log that a restored run may get weights of a later version under its own number."""
    delivery = state.delivery
    if state.restored and delivery.batches_since_update > len(delivery.unacknowledged):
        log.warning(
            "update_weights() loads version %d, of which a batch was trained on before the run was "
            "saved; publish weights trained on it without version=, and call checkpoint() after "
            "update_weights()",
            state.weights.versions.trainer,
        )


class Updates:
    """Updates the weights of one session's engines, and lets the engines sleep."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = asyncio.Lock()
        self.last: RefitReport | None = None
        """The report of the last update."""

    def check_whole(self) -> None:
        """Raise RefitError if no engine can generate before the next update."""
        state = self._session.state
        if stranded(state):
            raise wants_update(
                state.fleet.control.standby,
                state.weights.versions.trainer,
                state.weights.adapters_base,
            )

    # --- updates -------------------------------------------------------------------------------

    async def update(
        self, publisher: WeightPublisher, version: int | None, *, acknowledge: bool
    ) -> RefitReport:
        """See :meth:`RolloutScheduler.update_weights`."""
        try:
            self.last = await self._update(publisher, version, acknowledge)
            return self.last
        finally:
            if isinstance(publisher, ConcludingPublisher):
                await self._session.refits.conclude(publisher)

    async def _update(
        self, publisher: WeightPublisher, version: int | None, acknowledge: bool
    ) -> RefitReport:
        session = self._session
        session.check_open()
        if not hasattr(publisher, "prepare"):
            raise ConfigError(
                f"update_weights got {publisher!r}, which brings no weights to engines; give a "
                "publisher, such as DiskPublisher(folder, save=...)."
            )
        started = asyncio.get_running_loop().time()
        async with self._lock:
            await self._previous_update()
            new = session.state.weights.versions.trainer + 1 if version is None else version
            self._check(publisher, new)
            again = new == session.state.weights.versions.trainer
            if again:
                _warn_of_trained(session.state)
            await called(_PUBLISHER, publisher.prepare, new)
            await session.waits.until_handed_over()
            session.check_open()
            state = session.state
            again = again or self._is_followed(publisher, new)
            if again and new == state.weights.versions.trainer and state.fleet.control.engines:
                # It was to be brought in once more, and an engine that has it is back by now; or
                # the fleet has followed to it already.
                seconds = asyncio.get_running_loop().time() - started
                return RefitReport(version=new, quarantined={}, seconds=seconds)
            if _loads_in_parts(publisher):
                await session.durability.note_parts()
                session.check_open()
            self._check(publisher, new)  # Engines and versions may be others than before the waits.
            result = await self._run(publisher, new, acknowledge)
        if result.cause:
            raise self._error(result) from session.refits.failure
        await session.durability.safe()
        return RefitReport(
            version=new,
            quarantined=dict(result.failed),
            seconds=asyncio.get_running_loop().time() - started,
        )

    def _check(self, publisher: WeightPublisher, new: int) -> None:
        state = self._session.state
        again = new == state.weights.versions.trainer and (
            # A trainer that restores publishes its version, which live engines may still have.
            not state.fleet.control.engines or (state.restored and self.last is None)
        )
        if self._is_followed(publisher, new):
            return
        if new <= state.weights.versions.trainer and not again:
            raise ConfigError(
                f"version {new} is not newer than {state.weights.versions.trainer}, which is in "
                "use; give a larger number."
            )
        adapter = isinstance(publisher, AdapterPublisher)
        if adapter or not isinstance(publisher, RepublishingPublisher):
            self._check_together(publisher)
        if isinstance(publisher, ExternalWeights) and state.fleet.sleep is not None:
            raise ConfigError(
                "the engines are asleep, and only the scheduler may wake them; use "
                "paused_for_weights() inside of asleep(), or ExternalWeights outside of it."
            )
        if state.weights.adapter is not None and isinstance(publisher, ExternalWeights):
            raise ConfigError(
                "adapters are in use, and the rollouts in flight would end on another model; "
                "continue to publish adapters, or publish the full model by another publisher."
            )
        if adapter and state.fleet.sleep is not None:
            raise ConfigError("the engines are asleep; publish adapters outside of asleep().")

    def _check_together(self, publisher: WeightPublisher) -> None:
        """Refuse a publisher that brings a version only to all engines at the same time."""
        session = self._session
        if session.config.refit == "rolling" and session.state.fleet.sleep is None:
            raise ConfigError(
                f'refit="rolling" gives a version to each engine when that is free, and '
                f"{type(publisher).__name__} does not keep a full model for it; use a "
                'DiskPublisher with save=, or refit="together".'
            )

    def _is_followed(self, publisher: WeightPublisher, new: int) -> bool:
        """Whether the fleet already follows the version that the trainer now reports as loaded."""
        session = self._session
        followed = new == session.state.weights.versions.trainer and session.config.follow_weights
        return followed and isinstance(publisher, ExternalWeights)

    async def _run(
        self, publisher: WeightPublisher, new: int, acknowledge: bool
    ) -> facts.UpdateFinished:
        session = self._session
        adapter = isinstance(publisher, AdapterPublisher)
        name = called_now(_PUBLISHER, publisher.adapter_name, new) if adapter else None
        holds = isinstance(publisher, RepublishingPublisher) and called_now(
            _PUBLISHER, publisher.holds, new
        )
        if not holds and not adapter:
            # A publisher that keeps versions can say only now, after prepare(), whether it keeps
            # this one; others are refused before they prepare anything.
            self._check_together(publisher)
        external = isinstance(publisher, ExternalWeights)
        labelled = not (isinstance(publisher, ExternalWeights) and publisher.label)
        if not labelled and (open_requests := session.state.in_flight.open_attempts):
            log.warning(
                "version %d is labelled after it was loaded: token versions of %d requests in "
                "flight are unknown",
                new,
                open_requests,
            )
        if name is not None:
            session.attempts.adapter_names[new] = name
        session.refits.publisher = publisher
        future = session.waits.for_update()
        session.feed(
            ev.UpdateRequested(
                version=new,
                adapter=adapter,
                external=external,
                labelled=labelled,
                republishable=bool(holds),
                acknowledges=session.durability.trained_on() if acknowledge else (),
            )
        )
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            log.warning("the call that asked for version %d was cancelled", new)
            session.feed(ev.UpdateWithdrawn(version=new))
            raise

    def _error(self, result: facts.UpdateFinished) -> RefitError:
        state = self._session.state
        if state.fleet.control.engines:
            outcome = f"so generation continues under {state.weights.versions.trainer}"
        else:
            outcome = "and none has the fleet's weights; repeat the update"
        return RefitError(f"version {result.version} reached no engine, {outcome}: {result.cause}")

    async def _previous_update(self) -> None:
        """Wait for an update whose caller was cancelled. Two updates at once would mix weights."""
        previous = self._session.waits.update
        if previous is not None and not previous.done():
            await asyncio.wait([previous])

    @asynccontextmanager
    async def paused_for_weights(
        self, version: int | None, *, label: bool, acknowledge: bool
    ) -> AsyncGenerator[tuple[str, ...]]:
        """See :meth:`RolloutScheduler.paused_for_weights`."""
        handshake = Handshake(label=label)
        update = asyncio.create_task(self.update(handshake, version, acknowledge=acknowledge))
        try:
            engines = await handshake.paused()
        except RefitError:
            await update
            raise
        except BaseException as error:
            update.cancel()
            with suppress(RefitError):  # The update ended at the same time.
                handshake.fail(error)
            await _ended(update)
            raise
        try:
            yield engines
        except BaseException as error:
            with suppress(RefitError):
                handshake.fail(error)
            # The block's own error is raised; the update's error follows from it.
            await _ended(update)
            raise
        with suppress(RefitError):  # It came too late; the update reports this itself.
            handshake.done()
        await update

    # --- sleep ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def asleep(self, tags: Sequence[str]) -> AsyncGenerator[None]:
        """See :meth:`RolloutScheduler.asleep`."""
        session = self._session
        session.check_open()
        self._check_sleep(tags)
        async with self._lock:
            await self._previous_update()
            if session.state.fleet.sleep is not None:
                raise ConfigError("the engines are asleep already; asleep() cannot be nested.")
            future = session.waits.for_sleep()
            session.feed(ev.SleepRequested(tags=tuple(tags)))
        try:
            await asyncio.shield(future)
            yield
        finally:
            await self._wake(future)
        self.check_whole()

    async def _wake(self, falling: asyncio.Future[None]) -> None:
        await self._previous_update()
        if not falling.done():
            falling.cancel()
        future = self._session.waits.for_sleep()
        self._session.feed(ev.WakeRequested())
        await asyncio.shield(future)

    def _check_sleep(self, tags: Sequence[str]) -> None:
        unknown = [tag for tag in tags if tag not in _TAGS]
        if unknown or not tags:
            raise ConfigError(f"tags are {list(tags)}; give some of {', '.join(_TAGS)}.")
        for engine in self._session.engines.values():
            if not isinstance(engine, SleepingEngine):
                raise ConfigError(f"{engine.name} cannot release memory; run it without asleep().")


def _loads_in_parts(publisher: WeightPublisher) -> bool:
    """Whether an engine may have parts of two versions while it is loaded."""
    if isinstance(publisher, AdapterPublisher | ExternalWeights):
        return False
    return not (isinstance(publisher, WholePublisher) and publisher.loads_whole)


async def _ended(update: asyncio.Task[RefitReport]) -> None:
    """Wait for the end of an update whose result no caller awaits."""
    await asyncio.wait([update])
    if not update.cancelled():
        update.exception()  # This marks the exception as seen, so that asyncio does not warn.
