"""Settings of a gateway, and the settings of its scheduler that follow from serving clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar

from aprilsched.errors import ConfigError
from aprilsched.kernel.core.config import Dispatch, Retries, SchedulerConfig
from aprilsched.kernel.core.policies.staleness import Staleness
from aprilsched.kernel.core.policies.stop import CompleteGroup, Groups
from aprilsched.kernel.core.policies.tail_batching import OnDemand
from aprilsched.kernel.values.bounds import AT_LEAST_0, AT_LEAST_1, PORT, check_settings
from aprilsched.kernel.values.checks import request_fields
from aprilsched.kernel.values.companions import KINDS, Companion, top_logprobs
from aprilsched.types import MEDIA, MediaKind

_NEVER = 2**31 - 1
_RETURN = "return_"
TOP_FIELD = "top_logprobs_num"
"""SGLang's name for the number of top logprobs."""
MEDIA_FIELDS: Mapping[str, MediaKind] = {f"{kind}_data": kind for kind in MEDIA}
"""The kind of media in each request field that carries media."""


@dataclass(frozen=True, slots=True)
class Everything(Groups):
    """A batch is all responses that have ended. A store writes them to the disk together, and
    further responses end during the write."""

    name: ClassVar[str] = "everything"
    fixed_groups: ClassVar[bool] = False

    def take(self, groups: Sequence[CompleteGroup]) -> int | None:
        return len(groups) or None


@dataclass(frozen=True, slots=True)
class Versions(Staleness):
    """Ends responses at the update that would make their oldest tokens too stale.

    New responses wait while enough are open for the versions that may consume them.
    """

    per_version: int | None = None
    """Number of responses that a version consumes; None for no limit."""

    def admissible(
        self, *, batch_groups: int, outstanding: int, batches_since_update: int, wanted: bool
    ) -> int | None:
        """Return how many responses may still start; None for no limit.

        If responses are counted, each is a batch, so `batches_since_update` of them have ended
        since the update.
        """
        if self.bound is None or self.per_version is None:
            return None
        limit = (self.bound + 1) * self.per_version
        return max(0, limit - batches_since_update - outstanding)

    def oldest_unmasked(self, version: int) -> int | None:
        """Return None: a client gets every token with its version, and masks as it likes."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewaySettings:
    """The address and the limits of a gateway.

    Raises:
        ConfigError: if a value is out of its range.
    """

    host: str = "127.0.0.1"
    """Address to listen at; any address but loopback lets other machines connect."""
    port: Annotated[int, PORT] = 31000
    """Port to listen at; 0 for any free one. It differs from SGLang's default, so both can run on
    one machine."""
    served_model_name: str | None = None
    """The model's name for clients; requests for another one are refused. None takes the folder of
    the model, and accepts any name in a request."""
    max_requests: Annotated[int, AT_LEAST_1] = 4096
    """Maximum number of open responses. Requests beyond it get 503 at once."""
    drain_s: Annotated[float, AT_LEAST_0] = 30.0
    """Seconds that open responses may continue when the gateway stops. After that they end as
    aborted, with their tokens. With a store they end with 503, and clients may request them again
    after the restart."""
    tokenizer: Path | None = None
    """Folder of the model's tokenizer, for text and chats. None takes the folder of the servers'
    model, if this machine can read it."""
    response_template: Path | None = None
    """JSON file that describes how the model writes tool calls and reasoning, in the form of
    transformers. None takes the one of the tokenizer's files, or TRL's for the same chat
    template."""
    store: Path | None = None
    """File that keeps the open responses with their tokens across a restart or a crash. A client
    that sends the same rid with the same prompt again gets the tokens so far and the rest. None
    keeps nothing."""
    max_staleness: Annotated[int, AT_LEAST_0] | None = None
    """Maximum number of versions between a token's weights and the newest ones. A response with an
    older token ends at the update, as aborted and with its tokens. None for no limit."""
    per_version: Annotated[int, AT_LEAST_1] | None = None
    """Number of responses that a version of the weights consumes. With `max_staleness`, at most
    (max_staleness + 1) * per_version responses are open or have ended since the last update; others
    wait. None for no limit."""
    fleet_wait_s: Annotated[float, AT_LEAST_0] | None = None
    """Seconds for which requests wait while no server is left. After that they end with the reason,
    and the gateway exits; 600 if not given."""
    stall_s: Annotated[float, AT_LEAST_1] | None = None
    """Seconds without a token for any request of a server after which the server is lost; 60 if not
    given."""
    reclaim_s: Annotated[float, AT_LEAST_0] = 600.0
    """Seconds after a restart for which responses of the prior process wait for their clients.
    After that, unclaimed responses are given up."""

    top_logprobs: Annotated[int, AT_LEAST_0] = 5
    """Maximum number of top logprobs per token that a client may request. Each request that wants
    some passes this number to the servers; the others pass none. vLLM returns one fewer than its
    --max-logprobs, which is 20."""

    client_fields: tuple[str, ...] = ()
    """Further request fields that clients may set, such as priority or image_data. They pass to the
    servers unchanged; image_data also lets chats contain images. A client that may set
    custom_logit_processor can run its own code on the servers. A companion after "return_", such as
    return_sampling_mask or return_routed_experts=uint8[48,8], lets clients of /generate request
    its rows."""

    def __post_init__(self) -> None:
        check_settings(self)
        request_fields({name: None for name in self.passed_on if name not in MEDIA_FIELDS})
        if self.per_version is not None and self.max_staleness is None:
            raise ConfigError(
                "per_version is how many responses a version consumes, which matters to "
                "max_staleness alone; set max_staleness too."
            )

    @property
    def passed_on(self) -> list[str]:
        """The client fields that are not companions."""
        return [name for name in self.client_fields if _companion(name) is None]

    @property
    def companions(self) -> dict[str, Companion]:
        """The companions whose rows clients may request, by request field."""
        likely = {TOP_FIELD: top_logprobs(self.top_logprobs)} if self.top_logprobs else {}
        found = filter(None, map(_companion, self.client_fields))
        return likely | {f"{_RETURN}{each.name}": each for each in found}


@cache
def _companion(field: str) -> Companion | None:
    """Return the companion that a request field selects; None if it selects none."""
    written = field.removeprefix(_RETURN)
    asks = written != field and written.partition("=")[0].rstrip("!") in KINDS
    return Companion.of(written) if asks else None


def for_clients(config: SchedulerConfig, settings: GatewaySettings) -> SchedulerConfig:
    """`config` with the settings that follow from serving clients instead of a trainer.

    Raises:
        ConfigError: if a setting cannot work behind a gateway.
    """
    if not config.behaviour.waits_inside:
        raise ConfigError(
            f'straggler="{config.straggler_name}" does not let requests wait inside a paused '
            'engine; a gateway needs "retract" or "in_place".'
        )
    if config.max_staleness not in ("auto", None):
        raise ConfigError(
            "max_staleness of SchedulerConfig bounds the batches of a trainer, and a gateway has "
            "none; set max_staleness of GatewaySettings."
        )
    limit, bound = settings.max_requests, settings.max_staleness
    return SchedulerConfig(
        batch_groups=1,
        group_size=1,
        over_provision=1.0,
        # The limit per version counts batches of one.
        stop=Everything(1) if settings.per_version is None else Groups(1),
        refill=OnDemand(limit=limit),
        straggler=config.straggler,
        pace="asynchronous",
        max_staleness=None if bound is None else Versions(bound, "evict", settings.per_version),
        # Complete rollouts wait for the end of an update, and must not block new ones.
        ready_batches=limit,
        kv_after_refit=config.kv_after_refit,
        follow_weights=config.follow_weights,
        dispatch=Dispatch(placement="prefix", max_in_flight=config.dispatch.max_in_flight),
        retries=Retries(
            attempts=config.retries.attempts,
            interruptions=config.retries.interruptions,
            # The client has already read tokens of the response, so it gets the failure.
            member="drop_group",
            # One client's refused requests must not end the service for the others.
            failed_groups=_NEVER,
        ),
        health=replace(
            config.health,
            fleet_wait_s=(
                config.health.fleet_wait_s
                if settings.fleet_wait_s is None
                else settings.fleet_wait_s
            ),
            stall_s=settings.stall_s or config.health.stall_s,
        ),
        timeouts=config.timeouts,
        save_interval_s=config.save_interval_s,
        companions=tuple(settings.companions.values()),
        allow_inexact_versions=config.allow_inexact_versions,
    )
