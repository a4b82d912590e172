"""Collective steps of the trainer and all engines of a group: joining, or sending one bucket.

- Every engine is waited for, for a bounded time; then the step has succeeded or is broken off.
- An engine that does not take part makes all others wait inside of torch, where nothing can be
  cancelled. It is asked to leave the group, or the trainer's side is closed: either one ends the
  others' waiting with an error that is not their fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from aprilsched.errors import AprilschedError, ControlTimeout, EngineRejected
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.engines.refit import RefitFromGroup
from aprilsched.kernel.weights.threads import call_each, in_daemon

if TYPE_CHECKING:
    pass
from aprilsched.kernel.weights.process_group import GroupBroken, TrainerGroup

_GRACE_SECONDS = 1.0
"""Time in which the others may end a step without an engine that failed in it."""
_LEAVE_SECONDS = 10.0
_OWN_GRACE_SECONDS = 5.0
"""Time beyond the timeout after which torch itself gives up the trainer's side."""


class GroupEngine(Engine, RefitFromGroup, Protocol):
    """An engine that can join a group."""


class BrokenOff(AprilschedError):
    """The step failed, and the group is no longer usable.

    Attributes:
        failures: error of each engine that failed, in the order of the failures.
        behind: names of the engines that caused the failure, as far as one can tell.
    """

    def __init__(self, cause: str, failures: Mapping[str, Exception], behind: set[str]) -> None:
        super().__init__(cause)
        self.failures = failures
        self.behind = behind


def behind(
    failures: Mapping[str, Exception], *, before: Sequence[str], own_failed: bool
) -> set[str]:
    """Decide which engines caused a failure and must be left behind.

    When one engine dies, others refuse calls because their connection to it broke. So if an
    engine does not answer, those that answer are innocent. If all answer, those are to blame that
    had refused `before` the group was closed for the others. If the trainer's own side failed
    without being closed, it is unknown who is to blame.
    """
    silent = {name for name, error in failures.items() if not isinstance(error, EngineRejected)}
    return silent or (set[str]() if own_failed else set(before))


async def together(
    group: TrainerGroup,
    own: Callable[[], None],
    engines: Sequence[GroupEngine],
    call: Callable[[GroupEngine], Awaitable[None]],
    *,
    timeout_s: float,
    own_ended: Callable[[], None] | None = None,
) -> None:
    """Run `own` in a thread and `call` for each engine, all at the same time.

    `own_ended` is called once `own` has succeeded, while engines may still be at work, unless one
    of them has already failed.

    Raises:
        BrokenOff: if one of them failed; the group may be closed then.
    """
    failures: dict[str, Exception] = {}
    before: list[str] | None = None
    own_failure = cause = ""

    async def trainer() -> None:
        nonlocal own_failure, cause
        try:
            async with asyncio.timeout(timeout_s + _OWN_GRACE_SECONDS):
                await in_daemon(own, name="aprilsched-group")
            if own_ended is not None and not failures:
                own_ended()
        except GroupBroken as error:
            cause = str(error)
        except TimeoutError:
            cause = f"the trainer's side did not end within {timeout_s:g} s"
        if cause and before is None:
            own_failure = cause

    async def member(engine: GroupEngine) -> None:
        try:
            await _call_in_time(engine, call, timeout_s)
        except Exception as error:  # One engine's failure must not hide the others' results.
            failures[engine.name] = error

    async with asyncio.TaskGroup() as tasks:
        pending = {tasks.create_task(trainer())}
        pending |= {tasks.create_task(member(engine)) for engine in engines}
        while pending:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if before is not None or not (failures or cause):
                continue
            if not cause and pending:
                _, pending = await asyncio.wait(pending, timeout=_GRACE_SECONDS)
            before = list(failures)
            if pending:
                # Closing the trainer's side is not enough: a gloo broadcast of the trainer, or of
                # an engine that passes it on, ends only with the connection to the engine that it
                # waits for.
                refused = [e for e in engines if isinstance(failures.get(e.name), EngineRejected)]
                await leave(refused, group.refit.name)
                group.close()
    if failures or cause:
        raise BrokenOff(
            cause or str(next(iter(failures.values()))),
            failures,
            behind(failures, before=before or [], own_failed=bool(own_failure)),
        )


async def each(
    engines: Sequence[GroupEngine],
    call: Callable[[GroupEngine], Awaitable[None]],
    *,
    timeout_s: float,
) -> dict[str, Exception]:
    """Call all engines in parallel; return the errors of those that failed."""
    outcomes = await call_each(engines, lambda engine: _call_in_time(engine, call, timeout_s))
    return {name: error for name, error in outcomes.items() if error is not None}


async def leave(engines: Sequence[GroupEngine], name: str) -> None:
    """Let engines leave a group, as far as they still answer."""
    await each(engines, lambda engine: engine.leave_group(name), timeout_s=_LEAVE_SECONDS)


async def _call_in_time(
    engine: GroupEngine, call: Callable[[GroupEngine], Awaitable[None]], seconds: float
) -> None:
    try:
        async with asyncio.timeout(seconds):
            await call(engine)
    except TimeoutError as error:
        raise ControlTimeout(
            engine.name, f"did not end its part of the refit within {seconds:g} s."
        ) from error
