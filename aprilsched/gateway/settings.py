"""Settings of a gateway, and the settings of its scheduler that follow from serving clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from aprilsched.core.config import Dispatch, Retries, SchedulerConfig
from aprilsched.core.policies.bounds import AT_LEAST_0, AT_LEAST_1, check_settings
from aprilsched.core.policies.refill import PoolView, Refill
from aprilsched.errors import ConfigError
from aprilsched.serving.listening import check_port

__all__ = ["GatewaySettings", "OnDemand", "for_clients"]

_NEVER = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class OnDemand(Refill):
    """Starts every prompt that is there: the clients decide how many there are."""

    name: ClassVar[str] = "on_demand"

    limit: Annotated[int, AT_LEAST_1]
    """Largest number of rollouts in flight."""

    def launches(self, view: PoolView) -> int:
        return max(0, self.limit - view.in_flight)

    def told(self, ratio: str) -> str:
        return f"what clients ask for, at most {self.limit} rollouts at a time"


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewaySettings:
    """How a gateway listens, and how much it takes on.

    Raises:
        ConfigError: if a value is out of its range.
    """

    host: str = "127.0.0.1"
    """Address to listen at; any address but loopback lets other machines connect."""
    port: int = 30000
    """Port to listen at; 0 for any free one."""
    max_requests: Annotated[int, AT_LEAST_1] = 4096
    """Largest number of open responses. A request beyond it is answered with 503 at once."""
    drain_s: Annotated[float, AT_LEAST_0] = 30.0
    """Seconds for which open responses may go on when the gateway stops. Those that are left then
    end as aborted, with their tokens."""

    def __post_init__(self) -> None:
        check_settings(self)
        check_port(self.port)


def for_clients(config: SchedulerConfig, limit: int) -> SchedulerConfig:
    """`config` with the settings that follow from serving clients in the place of a trainer.

    Raises:
        ConfigError: if a setting cannot work behind a gateway.
    """
    if not config.behaviour.waits_inside:
        raise ConfigError(
            f'straggler="{config.straggler}" does not let requests wait inside a paused engine; a '
            'gateway needs "retract" or "in_place".'
        )
    if config.max_staleness is not None:
        raise ConfigError(
            "max_staleness bounds the batches of a trainer, and a gateway has none; leave it out, "
            "and look at weight_versions in the answers."
        )
    return SchedulerConfig(
        batch_groups=1,
        group_size=1,
        over_provision=1.0,
        refill=OnDemand(limit=limit),
        straggler=config.straggler,
        pace="asynchronous",
        # Complete rollouts wait for the end of an update, and must not hold new ones up.
        ready_batches=limit,
        kv_after_refit=config.kv_after_refit,
        follow_weights=config.follow_weights,
        dispatch=Dispatch(placement="prefix", max_in_flight=config.dispatch.max_in_flight),
        retries=Retries(
            attempts=config.retries.attempts,
            interruptions=config.retries.interruptions,
            # A client whose requests are refused must not end the service for the others.
            failed_groups=_NEVER,
        ),
        health=config.health,
        timeouts=config.timeouts,
        allow_inexact_versions=config.allow_inexact_versions,
    )
