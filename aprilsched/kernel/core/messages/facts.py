"""Facts: what has become true in a run, for everything that watches, counts or records a run.

Events and commands are the protocol between the core and the shell that drives it. Facts are their
outcome: an attempt was sent, tokens were received, a rollout was finished, an engine changed its
mode. A fact on which the shell acts is a command too
(:class:`Order`). The core emits facts with its commands, in the
order in which they come true, so that no listener has to work out again what the core knew.

A fact has counts and names only. Tokens, log-probabilities and prompt keys are added where a
listener asks for them (:attr:`~aprilsched.kernel.core.state.state.SchedulerState.tells_tokens`).
What the core ignores (an answer to an attempt that is closed, a reward for a group that was
dropped) is no fact. A fact has no time of its own: listeners get it with the time of its event.

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
from aprilsched.types import NO_VERSION, Batch, EpisodeWait, FinishReason, Rollout

Outcome: TypeAlias = Literal["finished", "interrupted", "busy", "failed", "engine_lost"]
"""How an attempt ended: it ran to its end, it came back before that (aborted or never sent), it
failed, or its engine went out of use."""


class Fact(
    Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag_field="fact", tag=True
):
    """Something that has become true.

    Facts are msgspec structs because a run has a million of them: a struct is made in a third of
    the time that a frozen dataclass takes, and is encoded directly.
    """


class Order(Fact, Command, frozen=True):
    """A fact on which the shell acts too."""


# --- the run and the trainer -------------------------------------------------------------------


class RunOpened(Fact, frozen=True):
    """The fleet is up. In a `resumed` run everything that was in flight is gone, except the groups
    that are launched as restored next. `version` is the run's policy version."""

    engines: tuple[EngineInfo, ...]
    version: int
    resumed: bool = False


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


class BatchDelivered(Fact, frozen=True):
    """The trainer has taken the batch. `again`: it was delivered before the run was resumed,
    too. `distance`: Kolmogorov's distance of its lengths from the law that all lengths are drawn
    from, as it was known then; `iid_distance`: the one expected of as many groups drawn at random.
    None if unknown."""

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
    """The trainer's log-probabilities of a batch were compared with those of the engines."""

    comparison: LogprobComparison


class PromptsEnded(Fact, frozen=True):
    """The prompts have ended and everything was delivered, so the trainer no longer waits."""


class PromptsRequested(Order, frozen=True):
    """The source is asked for `count` prompts. The answer is PromptsArrived."""

    count: int


class PromptsReceived(Fact, frozen=True):
    """`prompts` prompts arrived from the source. `last`: the source has ended. `partial`: the rest
    of what was asked for follows later."""

    prompts: int
    last: bool = False
    partial: bool = False
    asked: list[dict[str, Any]] | None = None
    """Key and token ids of each prompt, where a listener asks for tokens."""


class EvaluationRequested(Fact, frozen=True):
    """The trainer waits for the responses to `prompts` prompts."""

    evaluation_id: int
    prompts: int
    group_size: int


class EvaluationWithdrawn(Fact, frozen=True):
    """Nobody waits for the evaluation any more, or it is abandoned."""

    evaluation_id: int


class EvaluationDelivered(Fact, frozen=True):
    """The trainer has the responses of the evaluation."""

    evaluation_id: int
    version: int
    rollouts: tuple[DeliveredRollout, ...]


class ScheduleChanged(Fact, frozen=True):
    """A schedule is in force: automatic scheduling has chosen it, and it may be the one that was in
    force, or a resumed run goes on with the one that it had.

    Attributes:
        schedule: the schedule and the reason of its choice, in words.
        forecast: what is expected of its batches; None if that is not known.
        refill: the name of its refill rule.
        kept: whether it is the schedule that was in force, with another forecast.
        pace: its pace, where that is chosen during the run.
    """

    schedule: str
    forecast: Forecast | None = None
    refill: str = ""
    kept: bool = False
    pace: Pace | None = None


class ScheduleRefused(Fact, frozen=True):
    """A schedule that was chosen cannot be put into force, so the present one stays.

    Attributes:
        schedule: the schedule and the reason of its choice, in words.
        cause: what is wrong with it.
    """

    schedule: str
    cause: str


# --- groups and rollouts -----------------------------------------------------------------------


class RestoredLengths(Struct, frozen=True, kw_only=True, gc=False):
    """For each member of a restored group: the tokens of its response, the number of them that were
    sampled, and whether the response is generated to its end."""

    tokens: tuple[int, ...]
    sampled: tuple[int, ...]
    finished: tuple[bool, ...]


class GroupLaunched(Fact, frozen=True):
    """The group is in flight; `rollout_ids` are its members in their order.

    `restored` has the members' lengths where the group is in flight again after the run was
    resumed. `again` is the group of the same prompt whose tokens were thrown away for staleness.
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
    """A rollout of the group is in flight in the place of a lost one, which has left the group and
    was dropped."""

    group_id: int
    rollout_id: int
    instead_of: int
    evaluation_id: int | None = None


class EpisodeStarted(Fact, frozen=True):
    """The episode that drives the rollout was started."""

    rollout_id: int


class TurnBegun(Fact, frozen=True):
    """An episode asks for a turn. `environment` tokens were added to the response before it;
    `prompt_tokens` is the length of the first turn's context."""

    rollout_id: int
    prompt_tokens: int
    environment: int = 0


class EpisodeWaiting(Fact, frozen=True):
    """An episode that has no turn says what it waits for: its tools, which is also so after each
    turn, an agent that drives it, or its score."""

    rollout_id: int
    what: EpisodeWait


class TeardownFailed(Fact, frozen=True):
    """What an episode had registered for its end raised, or did not end in time."""

    rollout_id: int
    cause: str


class TurnEnded(Fact, frozen=True):
    """An episode has the answer to its turn. `withdrawn`: the episode withdrew the turn, and
    `tokens` had been generated until then. `refused`: why the engines refuse the turn; the episode
    goes on without it."""

    rollout_id: int
    tokens: int
    finish_reason: FinishReason
    withdrawn: bool = False
    refused: str = ""


class TokensDiscarded(Fact, frozen=True):
    """The last tokens of the response are discarded: `sampled` ones, which the ledger counts under
    `reason`, and `environment` ones. The rollout goes on."""

    rollout_id: int
    sampled: int
    environment: int
    reason: str


class RolloutFinished(Fact, frozen=True):
    """The response is generated to its end: the request of a single turn has ended, or the whole
    episode."""

    rollout_id: int
    group_id: int


class RewardRequested(Fact, frozen=True):
    """The reward function is asked about one rollout, or about the whole group (`rollout_id` is
    None)."""

    group_id: int
    rollout_id: int | None = None


class RolloutScored(Fact, frozen=True):
    """The rollout has its reward, which is None where no reward function is given. `reward_parts`
    and `info` are those of the caller's :class:`~aprilsched.types.Score`."""

    rollout_id: int
    group_id: int
    reward: float | None = None
    reward_parts: dict[str, float] = {}
    info: dict[str, Any] = {}


class VerdictRequested(Fact, frozen=True):
    """The user's accept function is asked about the group."""

    group_id: int


class GroupAccepted(Fact, frozen=True):
    """The group is complete, scored and accepted, and waits for its batch."""

    group_id: int


class DroppedRollout(Struct, frozen=True, kw_only=True, gc=False):
    """A member of a dropped group, with the ledger's reason and its number of sampled tokens."""

    rollout_id: int
    reason: str
    tokens: int


class GroupDropped(Order, frozen=True):
    """The group was dropped. `culprit` is the rollout whose failure took the others along, if one
    did."""

    group_id: int
    reason: str
    cause: str
    rollouts: tuple[DroppedRollout, ...]
    culprit: int | None = None

    @property
    def rollout_ids(self) -> tuple[int, ...]:
        return tuple(rollout.rollout_id for rollout in self.rollouts)


class PromptRefused(Order, frozen=True):
    """A prompt of the source cannot be used. It has one entry in the ledger, like a rollout that is
    launched and dropped at once."""

    rollout_id: int
    group_id: int
    cause: str


class GroupsFailed(Fact, frozen=True):
    """`groups` groups failed in a row, so nothing more is launched."""

    groups: int
    cause: str


# --- attempts ----------------------------------------------------------------------------------


class AttemptSent(Fact, frozen=True):
    """A request was sent to an engine, for the `attempt`-th time. A request has at most one open
    attempt. `tokens` is its context: the prompt and the response so far."""

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
    """The engine is told to abort the open attempt."""

    request_id: int


class TokensReceived(Fact, frozen=True):
    """New tokens of the open attempt. Before them the engine recomputed `recomputed` context
    tokens, after an interruption. `dropped`: the rollout was dropped for this reason before the
    tokens arrived, so they are discarded.
    """

    request_id: int
    tokens: int
    recomputed: int = 0
    dropped: str | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None


class AttemptEnded(Fact, frozen=True):
    """The attempt is closed. "busy": the engine has no room for it now, so its request waits.
    `retried`: it failed, and its request will be sent again. `spans` (version, start, end) has the
    versions of its tokens, as the engine reports them. `answers` has the size in bytes of what else
    the engine answered and the request keeps, by name."""

    request_id: int
    outcome: Outcome
    cause: str = ""
    retried: bool = False
    spans: tuple[tuple[int, int, int], ...] | None = None
    answers: dict[str, int] | None = None


# --- engines -----------------------------------------------------------------------------------


class EngineJoined(Fact, frozen=True):
    """The engine is connected. It is in use once it is admitted."""

    info: EngineInfo


class EngineAdmitted(Order, frozen=True):
    """The engine is in use from now on, because it has the fleet's version."""

    engine: str
    version: int


class EngineLost(Order, frozen=True):
    """The engine is out of use. `standby`: it answers, and comes back into use with the next refit
    that reaches it. `last`: no engine is left, neither in use nor on standby."""

    engine: str
    cause: str
    standby: bool = False
    last: bool = False


class EngineModeChanged(Fact, frozen=True):
    """The engine's control mode (:class:`~aprilsched.kernel.core.state.engine_control.Mode`) went
    from `start` to `finish`. `pause` is the kind of a pause that begins. `tags` is the memory that
    is being released or taken back."""

    engine: str
    start: str
    finish: str
    pause: str = ""
    tags: tuple[str, ...] = ()


class RefitBegun(Order, frozen=True):
    """These engines get the version. `adapter`: it is an adapter, for which no engine is paused.
    `external`: somebody else loads it, and the engines are only asked for it, running or not.
    `followed`: it is external, and nobody has asked for it: some engine has shown it. `catch_up`:
    it is the fleet's version already, published again for an engine on standby. Each engine
    answers with Refitted."""

    version: int
    engines: tuple[str, ...]
    adapter: bool = False
    catch_up: bool = False
    external: bool = False
    followed: bool = False


class EngineRefitted(Fact, frozen=True):
    """The engine reports that it has `version` after a refit; None means inconsistent weights.
    `cause` says what failed."""

    engine: str
    version: int | None
    cause: str = ""
    catch_up: bool = False


class AdapterRetired(Order, frozen=True):
    """An adapter is unloaded from the engine, because nothing samples with it there any more."""

    engine: str
    version: int


class EngineSlow(Order, frozen=True):
    """The engine is slow, and stays in use because there is no other engine to compare it with."""

    engine: str
    cause: str


class EngineBusy(Order, frozen=True):
    """The engine has no room for all `in_flight` requests that it was sent. It gets fewer, and the
    others wait. This is reported once for each engine."""

    engine: str
    in_flight: int
    cause: str


class ControlCallFailed(Fact, frozen=True):
    """A control call failed, or the engine did not answer it in time. The engine is lost next."""

    engine: str
    call: ControlCall
    cause: str


class FleetAwaited(Order, frozen=True):
    """No engine is left, and one is waited for. `lost` has those that were lost last, with
    causes."""

    lost: tuple[tuple[str, str], ...]
    waited_s: float
    left_s: float


class FleetGivenUp(Order, frozen=True):
    """No engine came back in time, so the fleet is given up."""

    lost: tuple[tuple[str, str], ...]
    waited_s: float


class UpdateWanted(Order, frozen=True):
    """Only `engines` are left, and none of them has the fleet's weights. The calls that wait for a
    batch (if `batch`) or for `evaluations` end with an error that says to publish a version."""

    engines: tuple[str, ...]
    version: int
    batch: bool
    evaluations: tuple[int, ...]
    base: int | None = None
    """The version of the full model that the fleet's adapters belong to; None if its weights are no
    adapter."""


# --- updates and sleep -------------------------------------------------------------------------


class UpdateBegun(Fact, frozen=True):
    """An update to a new version has begun. `adapter`: the version is an adapter. `external`:
    somebody else has brought the version into the engines already."""

    version: int
    adapter: bool = False
    external: bool = False


class UpdateWithdrawn(Fact, frozen=True):
    """The update ends because the trainer's call was cancelled before any weights were loaded.
    UpdateFinished follows. If weights are being loaded when the call is cancelled, the update goes
    on and this fact is not told."""

    version: int


class UpdateFinished(Order, frozen=True):
    """The update is over. `failed` has the engines that did not take the version, with causes. If
    `cause` is not empty, no engine took it, and the fleet goes on under the old version."""

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
    """The rollouts of a batch, as facts describe them; with their `tokens` if asked for."""
    return tuple(
        _delivered(rollout, group.prompt.key if tokens else None, tokens=tokens)
        for group in batch.groups
        for rollout in group.rollouts
    )


def _delivered(rollout: Rollout, key: str | int | None, *, tokens: bool) -> DeliveredRollout:
    """A rollout as one sequence: after its own tokens come those that each branch has alone."""
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
            # Tokens of the environment are known by the version of their segment.
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
    )


def _joined(parts: Sequence[np.ndarray]) -> list[Any]:
    return np.concatenate(parts).tolist()


def group_ids(rollouts: Iterable[DeliveredRollout]) -> list[int]:
    """The ids of the groups of these rollouts, each once, in their order."""
    return list(dict.fromkeys(rollout.group_id for rollout in rollouts))


def by_delivery(facts: Sequence[Fact]) -> Iterator[Sequence[Fact]]:
    """Split the facts of one event into parts that end with a delivery, so that a listener that
    reads the state of the run at a delivery does not see what followed in the same event."""
    begin = 0
    for end, fact in enumerate(facts, start=1):
        if fact.__class__ is BatchDelivered:
            yield facts[begin:end]
            begin = end
    if begin < len(facts):
        yield facts[begin:]
