"""Facts: the state changes of a run, for everything that watches, counts or records it.

Events and commands are the protocol between the core and the shell that drives it. Facts are the
outcome: an attempt was sent, tokens were received, a rollout finished, an engine changed its mode.
A fact on which the shell acts is a command too (:class:`Order`). The core emits facts with its
commands, in the order in which they become true, so no listener has to derive them again.

A fact contains counts and names only. Tokens, log-probabilities and prompt keys are added if a
listener requires them (:attr:`~aprilsched.kernel.core.state.state.SchedulerState.tells_tokens`).
Input that the core ignores (an answer to a closed attempt, a reward for a dropped group) produces
no fact. A fact has no timestamp: listeners get it with the time of its event.

The names of the facts and of their fields are the format of events.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from msgspec import Struct

from aprilsched.kernel.core.messages.commands import Command
from aprilsched.kernel.core.messages.events import ControlCall, EngineInfo, LogprobComparison
from aprilsched.kernel.core.policies.schedule import Forecast, Pace
from aprilsched.types import NO_VERSION, Batch, EpisodeWait, FinishReason, Rollout, Sample

Outcome: TypeAlias = Literal["finished", "interrupted", "busy", "failed", "engine_lost"]
"""How an attempt ended: it finished, it ended early (aborted or never sent), its engine was busy,
it failed, or its engine was lost."""


class Fact(
    Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag_field="fact", tag=True
):
    """A state change of the run.

    Facts are msgspec structs because a run has a million of them: the construction of one takes a
    third of the time of a frozen dataclass, and it is encoded directly.
    """


class Order(Fact, Command, frozen=True):
    """A fact on which the shell acts too."""


# --- the run and the trainer -------------------------------------------------------------------


class RunOpened(Fact, frozen=True):
    """The fleet is up, and `version` is the run's policy version. In a `resumed` run everything in
    flight is gone, except the restored groups that are launched next. `siblings`: number of
    siblings of a delivered sample; None if whole groups are delivered. `pace`: the pace at the
    start. `batches`: number of batches delivered before a resumption. `standby`: names of the
    engines on standby."""

    engines: tuple[EngineInfo, ...]
    version: int
    resumed: bool = False
    siblings: int | None = None
    pace: Pace = "synchronous"
    batches: int = 0
    standby: tuple[str, ...] = ()


class BatchRequested(Fact, frozen=True):
    """The trainer waits for its next batch."""


class BatchRequestWithdrawn(Fact, frozen=True):
    """The trainer no longer waits for a batch, because its call was cancelled. The batch stays in
    work for its next call."""


class GroupStreamed(Fact, frozen=True):
    """The trainer has taken a group of a batch that is not complete yet."""

    batch: int
    group_id: int


class BatchOffered(Fact, frozen=True):
    """The batch is complete, and the trainer may take it."""

    batch: int
    version: int


class OfferWithdrawn(Fact, frozen=True):
    """The offer was withdrawn, because a new version comes."""

    batch: int


class DeliveredRollout(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A rollout in a batch.

    Attributes:
        tokens: tokens of the response, including those of the environment.
        segments: start, end, version and engine of each run of one version, see
            :class:`~aprilsched.types.Segment`.
        masked: sampled tokens that are masked in the loss because they are too stale.
        companions: the size of each companion's rows, in bytes.
        sample: whether it was delivered by itself, and not with its group.
    """

    rollout_id: int
    group_id: int
    prompt_tokens: int
    tokens: int
    segments: tuple[tuple[int, int, int, str | None], ...]
    finish_reason: FinishReason = "length"
    reward: float | None = None
    reward_parts: dict[str, float] = {}
    turns: int = 1
    masked: int = 0
    versions_exact: bool = True
    stale_keys: bool = False
    companions: dict[str, int] = {}
    key: str | int | None = None
    input_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    sample: bool = False


class BatchDelivered(Fact, frozen=True):
    """The trainer has taken the batch. `again`: it was also delivered before the run was resumed.
    `distance`: the Kolmogorov distance of its lengths from the distribution of all lengths, as
    estimated at the time. `iid_distance`: the distance expected of random groups with the same
    number of responses. Both are None if unknown."""

    batch: int
    version: int
    rollouts: tuple[DeliveredRollout, ...]
    again: bool = False
    distance: float | None = None
    iid_distance: float | None = None


class BatchesAcknowledged(Fact, frozen=True):
    """The trainer is done with these batches."""

    batches: tuple[int, ...]


class LogprobsCompared(Fact, frozen=True):
    """The trainer's log-probabilities of a batch were compared with the engines'."""

    comparison: LogprobComparison


class PromptsEnded(Fact, frozen=True):
    """The prompts have ended and everything was delivered, so the trainer no longer waits."""


class PromptsRequested(Order, frozen=True):
    """The source must supply `count` prompts. The answer is PromptsArrived."""

    count: int


class PromptsReceived(Fact, frozen=True):
    """`prompts` prompts arrived from the source. `last`: the source has ended. `partial`: the rest
    of the requested prompts follows later."""

    prompts: int
    last: bool = False
    partial: bool = False
    asked: list[dict[str, Any]] | None = None
    """Key and token ids of each prompt, if a listener requires tokens."""


class EvaluationRequested(Fact, frozen=True):
    """The trainer waits for the responses to `prompts` prompts."""

    evaluation_id: int
    prompts: int
    group_size: int


class EvaluationWithdrawn(Fact, frozen=True):
    """The trainer no longer waits for the evaluation, or it is abandoned."""

    evaluation_id: int


class EvaluationDelivered(Fact, frozen=True):
    """The trainer has the responses of the evaluation."""

    evaluation_id: int
    version: int
    rollouts: tuple[DeliveredRollout, ...]


class ScheduleChanged(Fact, frozen=True):
    """A schedule is now in force: automatic scheduling has chosen it, possibly again, or a resumed
    run continues with its saved one.

    Attributes:
        schedule: the schedule and the reason of its choice, in words.
        forecast: the forecast for its batches; None if unknown.
        refill: the name of its refill rule.
        kept: whether it is the previous schedule with a new forecast.
        pace: its pace, if that is chosen during the run.
    """

    schedule: str
    forecast: Forecast | None = None
    refill: str = ""
    kept: bool = False
    pace: Pace | None = None


class ScheduleRefused(Fact, frozen=True):
    """A chosen schedule cannot be used, so the current one stays in force.

    Attributes:
        schedule: the schedule and the reason of its choice, in words.
        cause: why it cannot be used.
    """

    schedule: str
    cause: str


# --- groups and rollouts -----------------------------------------------------------------------


class RestoredLengths(Struct, frozen=True, kw_only=True, gc=False):
    """For each member of a restored group: the number of response tokens, the number of sampled
    ones, and whether the response is finished."""

    tokens: tuple[int, ...]
    sampled: tuple[int, ...]
    finished: tuple[bool, ...]


class GroupLaunched(Fact, frozen=True):
    """The group is in flight; `rollout_ids` are its members in their order.

    `restored` contains the members' lengths if the group was restored in a resumed run. `again` is
    the previous group of the same prompt, whose tokens were discarded for staleness.
    """

    group_id: int
    rollout_ids: tuple[int, ...]
    prompt_tokens: int
    evaluation_id: int | None = None
    restored: RestoredLengths | None = None
    again: int | None = None
    key: str | int | None = None
    input_ids: list[int] | None = None


class MemberLaunched(Fact, frozen=True):
    """A replacement is in flight for a lost member of the group, which has left the group and was
    dropped."""

    group_id: int
    rollout_id: int
    instead_of: int
    evaluation_id: int | None = None


class EpisodeStarted(Fact, frozen=True):
    """The episode that drives the rollout was started."""

    rollout_id: int


class TurnBegun(Fact, frozen=True):
    """An episode requests a turn. `environment` tokens were added to the response before it;
    `prompt_tokens` is the length of the first turn's context."""

    rollout_id: int
    prompt_tokens: int
    environment: int = 0


class EpisodeWaiting(Fact, frozen=True):
    """An episode between turns reports what it waits for: its tools (the default after each turn),
    an agent that drives it, or its score."""

    rollout_id: int
    what: EpisodeWait


class TeardownFailed(Fact, frozen=True):
    """A teardown function of an episode raised or timed out."""

    rollout_id: int
    cause: str


class TurnEnded(Fact, frozen=True):
    """An episode has the answer to its turn. `withdrawn`: the episode withdrew the turn after
    `tokens` tokens. `refused`: why the engines refuse the turn, without which the episode
    continues."""

    rollout_id: int
    tokens: int
    finish_reason: FinishReason
    withdrawn: bool = False
    refused: str = ""


class TokensDiscarded(Fact, frozen=True):
    """The last tokens of the response are discarded, and the rollout continues. `sampled` of them
    are counted in the ledger under `reason`; `environment` of them come from the environment."""

    rollout_id: int
    sampled: int
    environment: int
    reason: str


class RolloutFinished(Fact, frozen=True):
    """The response is finished: the request of a single turn has ended, or the whole episode."""

    rollout_id: int
    group_id: int


class RewardRequested(Fact, frozen=True):
    """The reward function is called for one rollout, or for the group if `rollout_id` is None."""

    group_id: int
    rollout_id: int | None = None


class RolloutScored(Fact, frozen=True):
    """The rollout has its reward, which is None without a reward function. `reward_parts` and
    `info` come from the caller's :class:`~aprilsched.types.Score`."""

    rollout_id: int
    group_id: int
    reward: float | None = None
    reward_parts: dict[str, float] = {}
    info: dict[str, Any] = {}


class VerdictRequested(Fact, frozen=True):
    """The user's accept function is called for the group."""

    group_id: int


class GroupAccepted(Fact, frozen=True):
    """The group is complete, scored and accepted, and waits for its batch. `group_id` may be that
    of a single sample, see SampleReady."""

    group_id: int


class SampleReady(Fact, frozen=True):
    """The rollout leaves its group, as a unit with its own id, because its `siblings` are known:
    the first other members whose generation ended."""

    rollout_id: int
    group_id: int
    siblings: tuple[int, ...]


class DroppedRollout(Struct, frozen=True, kw_only=True, gc=False):
    """A member of a dropped group, with the ledger's reason and its number of sampled tokens."""

    rollout_id: int
    reason: str
    tokens: int


class GroupDropped(Order, frozen=True):
    """The group was dropped. `culprit` is the rollout whose failure caused the drop, if any."""

    group_id: int
    reason: str
    cause: str
    rollouts: tuple[DroppedRollout, ...]
    culprit: int | None = None

    @property
    def rollout_ids(self) -> tuple[int, ...]:
        return tuple(rollout.rollout_id for rollout in self.rollouts)


class PromptRefused(Order, frozen=True):
    """A prompt of the source is unusable. It gets one entry in the ledger, like a rollout that is
    launched and dropped at once."""

    rollout_id: int
    group_id: int
    cause: str


class GroupsFailed(Fact, frozen=True):
    """`groups` groups, or single samples, failed in a row, so nothing more is launched."""

    groups: int
    cause: str


# --- attempts ----------------------------------------------------------------------------------


class AttemptSent(Fact, frozen=True):
    """A request was sent to an engine, for the `attempt`-th time. A request has at most one open
    attempt. `tokens` is the length of its context: the prompt and the response so far."""

    engine: str
    request_id: int
    attempt: int
    rollout_id: int
    group_id: int
    tokens: int
    max_new_tokens: int
    adapter: int | None = None
    cache_key: str | None = None
    input_ids: list[int] | None = None


class AttemptCalledBack(Fact, frozen=True):
    """The engine is asked to abort the open attempt."""

    request_id: int


class TokensReceived(Fact, frozen=True):
    """New tokens of the open attempt. Before them the engine recomputed `recomputed` context
    tokens, after an interruption. `dropped`: the reason for which the rollout was dropped before
    the tokens arrived, so they are discarded. `decode_seconds`: the time since the first of them,
    if they are the first after a prefill; None if the engine does not report it.
    """

    request_id: int
    tokens: int
    recomputed: int = 0
    dropped: str | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    decode_seconds: float | None = None


class AttemptEnded(Fact, frozen=True):
    """The attempt is closed. The outcome "busy" means that the engine has no room now, so the
    request waits. `retried`: it failed, and its request will be sent again. `spans` (version,
    start, end) contains the versions of its tokens, as the engine reports them. `answers` contains
    the sizes in bytes of other fields of the engine's answer that are kept, by name."""

    request_id: int
    outcome: Outcome
    cause: str = ""
    retried: bool = False
    spans: tuple[tuple[int, int, int], ...] | None = None
    answers: dict[str, int] | None = None


# --- engines -----------------------------------------------------------------------------------


class EngineJoined(Fact, frozen=True):
    """The engine is connected. It comes into use when it is admitted."""

    info: EngineInfo


class EngineAdmitted(Order, frozen=True):
    """The engine comes into use, because it has the fleet's version."""

    engine: str
    version: int


class EngineLost(Order, frozen=True):
    """The engine is out of use. `standby`: it still answers, and the next refit that reaches it
    brings it back into use. `last`: no engine is left, neither in use nor on standby."""

    engine: str
    cause: str
    standby: bool = False
    last: bool = False


class EngineModeChanged(Fact, frozen=True):
    """The engine's control mode (:class:`~aprilsched.kernel.core.state.engine_control.Mode`)
    changed from `start` to `finish`. `pause` is the kind of a new pause. `tags` is the memory that
    is being released or reclaimed."""

    engine: str
    start: str
    finish: str
    pause: str = ""
    tags: tuple[str, ...] = ()


class RefitBegun(Order, frozen=True):
    """These engines load the version, and each answers with Refitted. `adapter`: the version is an
    adapter, for which no engine is paused. `external`: another process loads it, and the engines,
    running or not, are only queried. `followed`: it is external, and was seen on an engine without
    a report by the trainer. `catch_up`: it is already the fleet's version, published again for an
    engine on standby."""

    version: int
    engines: tuple[str, ...]
    adapter: bool = False
    catch_up: bool = False
    external: bool = False
    followed: bool = False


class EngineRefitted(Fact, frozen=True):
    """The engine reports `version` after a refit; None means inconsistent weights. `cause` is the
    error, or empty."""

    engine: str
    version: int | None
    cause: str = ""
    catch_up: bool = False


class AdapterRetired(Order, frozen=True):
    """An adapter is unloaded from the engine, because no request there uses it any longer."""

    engine: str
    version: int


class EngineSlow(Order, frozen=True):
    """The engine is slow, but stays in use because no other engine is left to compare it with."""

    engine: str
    cause: str


class EngineBusy(Order, frozen=True):
    """The engine has no room for its `in_flight` requests. It gets fewer from now on, and the
    others wait. This is reported once per engine."""

    engine: str
    in_flight: int
    cause: str


class ControlCallFailed(Fact, frozen=True):
    """A control call failed, or the engine did not answer it in time. The engine is lost next."""

    engine: str
    call: ControlCall
    cause: str


class FleetAwaited(Order, frozen=True):
    """No engine is left, and the run waits for one. `lost` contains the engines lost last, with
    causes."""

    lost: tuple[tuple[str, str], ...]
    waited_s: float
    left_s: float


class FleetGivenUp(Order, frozen=True):
    """No engine rejoined in time, so the fleet is given up."""

    lost: tuple[tuple[str, str], ...]
    waited_s: float


class UpdateWanted(Order, frozen=True):
    """Only `engines` are left, and none of them has the fleet's weights. Calls that wait for a
    batch (if `batch`) or for `evaluations` raise an error that asks for a new version."""

    engines: tuple[str, ...]
    version: int
    batch: bool
    evaluations: tuple[int, ...]
    base: int | None = None
    """Version of the full model that the fleet's adapters belong to; None without adapters."""


# --- updates and sleep -------------------------------------------------------------------------


class UpdateBegun(Fact, frozen=True):
    """An update to a new version has started. `adapter`: the version is an adapter. `external`:
    another process has already loaded the version into the engines."""

    version: int
    adapter: bool = False
    external: bool = False


class UpdateWithdrawn(Fact, frozen=True):
    """The update ends because the trainer's call was cancelled before any weights were loaded.
    UpdateFinished follows. If weights are already being loaded, the update continues and this fact
    is not emitted."""

    version: int


class UpdateFinished(Order, frozen=True):
    """The update is over. `failed` contains the engines without the version, with causes. If
    `cause` is not empty, no engine has it, and the fleet continues under the old version."""

    version: int
    failed: tuple[tuple[str, str], ...] = ()
    cause: str = ""


class SleepRequested(Fact, frozen=True):
    """The trainer asked the engines to sleep, and to release the memory of these tags."""

    tags: tuple[str, ...]


class SleepBegun(Order, frozen=True):
    """Every engine sleeps: its memory is released for the trainer."""


class WakeRequested(Fact, frozen=True):
    """The trainer asked the engines to wake."""


class SleepEnded(Order, frozen=True):
    """Every engine is awake and has its memory again."""


def delivered_rollouts(batch: Batch, *, tokens: bool = False) -> tuple[DeliveredRollout, ...]:
    """Return the rollouts of a batch in the form of facts, with their tokens if `tokens`."""
    return tuple(
        _delivered(
            rollout,
            unit.prompt.key if tokens else None,
            tokens=tokens,
            sample=isinstance(unit, Sample),
        )
        for unit in batch.units
        for rollout in unit.rollouts
    )


def _delivered(
    rollout: Rollout, key: str | int | None, *, tokens: bool, sample: bool
) -> DeliveredRollout:
    """Return a rollout as one sequence: its own tokens, then the unshared ones of each branch."""
    segments: list[tuple[int, int, int, str | None]] = []
    sequences = (rollout, *rollout.branches)
    sampled = trained = size = 0
    for each in sequences:
        for part in each.segments:
            start, end = max(part.start, each.shared), part.end
            if start >= end:
                continue
            moved = size - each.shared
            segments.append((start + moved, end + moved, part.version, part.engine))
            # The version of a segment identifies tokens of the environment.
            if part.version != NO_VERSION:
                sampled += end - start
        trained += int(np.count_nonzero(each.loss_mask))
        size += len(each) - each.shared
    return DeliveredRollout(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        prompt_tokens=len(rollout.prompt_ids),
        tokens=size,
        segments=tuple(segments),
        finish_reason=rollout.finish_reason,
        reward=rollout.reward,
        reward_parts=dict(rollout.reward_parts),
        turns=rollout.turns,
        masked=sampled - trained,
        versions_exact=rollout.versions_exact,
        stale_keys=rollout.stale_keys,
        companions={
            name: sum([each.companions[name].rows.nbytes for each in sequences])
            for name in rollout.companions
        },
        key=key,
        input_ids=rollout.prompt_ids.tolist() if tokens else None,
        token_ids=_joined([e.token_ids[e.shared :] for e in sequences]) if tokens else None,
        logprobs=_joined([e.logprobs[e.shared :] for e in sequences]) if tokens else None,
        sample=sample,
    )


def _joined(parts: Sequence[np.ndarray]) -> list[Any]:
    return np.concatenate(parts).tolist()


def unit_ids(rollouts: Iterable[DeliveredRollout]) -> list[int]:
    """Return the ids of the groups or single samples of these rollouts, each once, in order."""
    return list(dict.fromkeys(r.rollout_id if r.sample else r.group_id for r in rollouts))


def by_delivery(facts: Sequence[Fact]) -> Iterator[Sequence[Fact]]:
    """Split the facts of one event after each delivery.

    Otherwise a listener that reads the state of the run at a delivery would see later changes of
    the same event.
    """
    first = 0
    for end, fact in enumerate(facts, start=1):
        if fact.__class__ is BatchDelivered:
            yield facts[first:end]
            first = end
    if first < len(facts):
        yield facts[first:]
