"""The settings of one shard, which follow from those of the whole run.

The collector makes every decision that needs the whole run. A shard starts each prompt that it is
given, offers each group alone, and generates until it is told to hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from aprilsched.core.config import SchedulerConfig
from aprilsched.core.policies.refill import PoolView, Refill
from aprilsched.core.policies.staleness import Staleness
from aprilsched.core.policies.stop import Tokens
from aprilsched.errors import ConfigError

__all__ = ["check_shardable", "shard_config"]

_NEVER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class EveryPrompt(Refill):
    """Starts every prompt that is there: the collector decides how many there are."""

    name: ClassVar[str] = "every_prompt"

    def launches(self, view: PoolView) -> int:
        return _NEVER

    def told(self, ratio: str) -> str:
        return "what the collector gives"


@dataclass(frozen=True, slots=True)
class Ungated(Staleness):
    """The bound on staleness without its gate: the collector admits groups for all shards."""

    def admissible(
        self, *, batch_groups: int, outstanding: int, batches_since_update: int, wanted: bool
    ) -> int | None:
        return None


def check_shardable(config: SchedulerConfig) -> None:
    """Refuse settings that need to see every open rollout of the run at once.

    Raises:
        ConfigError: if `config` has one.
    """
    policies = config.policies
    refused = (
        (
            config.automatic,
            'over_provision="auto" learns from every open response; give a ratio',
        ),
        (
            policies.refill.defers,
            f'refill="{policies.refill.name}" chooses among all open groups; set "wave" or "pool"',
        ),
        (
            config.straggler == "choose",
            'straggler="choose" weighs what the whole batch waits for; set another rule',
        ),
        (
            isinstance(policies.stop, Tokens),
            "stop=Tokens(...) estimates from every open response how many groups a batch takes; "
            "let groups or samples fill a batch",
        ),
        (
            policies.staleness.finishes,
            'max_staleness.rule="finish" asks which open groups a batch must have; set "mask" or '
            '"evict"',
        ),
        (
            policies.staleness.rule == "restart",
            'max_staleness.rule="restart" is for batches that wait for all of their groups; set '
            '"mask" or "evict"',
        ),
        (
            config.follow_weights,
            "follow_weights=True would let a shard change its version alone; load weights by "
            "update_weights()",
        ),
        (
            config.refit == "rolling",
            'refit="rolling" would give the shards different versions; set refit="together"',
        ),
        (
            config.dispatch.max_in_flight is not None,
            "dispatch.max_in_flight limits the requests of all engines together; leave it out",
        ),
    )
    for holds, why in refused:
        if holds:
            raise ConfigError(f"{why}, because no shard sees the others.")


def shard_config(config: SchedulerConfig) -> SchedulerConfig:
    """The settings of a shard of a run with these settings."""
    bound = config.policies.staleness
    return replace(
        config,
        batch_groups=1,
        stop="groups",
        over_provision=1.0,
        refill=EveryPrompt(),
        pace="asynchronous",
        # Complete groups may wait for the end of an update, and must not hold new ones up.
        ready_batches=_NEVER,
        max_staleness=Ungated(bound.bound, bound.rule),
    )
