"""Reports slow engines and the loss of the whole fleet, in the log and to waiting calls."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import datetime, timedelta

from aprilsched.errors import FleetLost, RefitError
from aprilsched.kernel.core.messages import facts

log = logging.getLogger("aprilsched")


def report_slow(command: facts.EngineSlow) -> None:
    """Log that an engine is slow."""
    log.warning(
        "engine %s is slow: %s; it stays in use, because there is no other engine to compare it "
        "with",
        command.engine,
        command.cause,
    )


def report_busy(command: facts.EngineBusy) -> None:
    """Log that an engine has no room for all requests, and what avoids that."""
    log.warning(
        "engine %s has no room for in_flight=%d, so requests wait; raise its bound "
        "(--max-queued-requests), or lower dispatch.max_in_flight: %s",
        command.engine,
        command.in_flight,
        command.cause,
    )


def report_outage(command: facts.FleetAwaited) -> None:
    """Log that no engine is left, and until when one may return."""
    now = datetime.now().astimezone()
    log.error(
        "no engine is left since %s; the scheduler waits until %s for one to come back: %s",
        _clock(now - timedelta(seconds=command.waited_s)),
        _clock(now + timedelta(seconds=command.left_s)),
        _causes(command.lost),
    )


def fleet_lost(command: facts.FleetGivenUp) -> FleetLost:
    """Return the error for every call after no engine has returned."""
    return FleetLost(
        f"no engine is left and none came back within {command.waited_s:.0f} s "
        f"({_causes(command.lost)}); restart the servers, or raise health.fleet_wait_s."
    )


def wants_update(engines: Iterable[str], version: int, base: int | None) -> RefitError:
    """The error for a call that waits for tokens which no engine can generate before an update.

    Args:
        engines: names of the engines that are there.
        version: the fleet's version.
        base: the full model that the fleet's adapters belong to; None without adapters.
    """
    whole = (
        "" if base is None else f", as a full model where an engine does not have version {base}"
    )
    return RefitError(
        f"no engine has the fleet's weights ({', '.join(engines)} wait for them); call "
        f"update_weights(publisher, version={version}), or with newer ones, first{whole}."
    )


def _clock(when: datetime) -> str:
    return when.strftime("%H:%M:%S")


def _causes(lost: tuple[tuple[str, str], ...]) -> str:
    return "; ".join(f"{engine}: {cause}" for engine, cause in lost)
