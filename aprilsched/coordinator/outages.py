"""Reports slow engines and the loss of the whole fleet, in the log and to waiting calls."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import datetime, timedelta

from aprilsched.coordinator.waits import Waits
from aprilsched.core.messages.commands import AwaitFleet, GiveUpFleet, ReportSlow, WantUpdate
from aprilsched.errors import FleetLost, RefitError

__all__ = ["Outages", "wants_update"]

log = logging.getLogger("aprilsched")


class Outages:
    """Carries out the commands of :mod:`aprilsched.core.steps.outage`."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def report_slow(self, command: ReportSlow) -> None:
        log.warning(
            "engine %s is slow: %s; it stays in use, because there is no other engine to compare "
            "it with",
            command.engine,
            command.cause,
        )

    def wait(self, command: AwaitFleet) -> None:
        now = datetime.now().astimezone()
        log.error(
            "no engine is left since %s; the scheduler waits until %s for one to come back: %s",
            _clock(now - timedelta(seconds=command.waited_s)),
            _clock(now + timedelta(seconds=command.left_s)),
            _causes(command.lost),
        )

    def give_up(self, command: GiveUpFleet) -> None:
        self._waits.fail(
            FleetLost(
                f"no engine is left and none came back within {command.waited_s:.0f} s "
                f"({_causes(command.lost)}); restart the servers, or raise health.fleet_wait_s."
            )
        )

    def want_update(self, command: WantUpdate) -> None:
        error = wants_update(command.engines, command.version, command.base)
        self._waits.refuse(error, batch=command.batch, evaluations=command.evaluations)


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
