"""Reads what a run launched from its event log: every group, its prompt and its response lengths.

Invariants:

- Groups are in the order of their launches, and members in that of their ids. Evaluations are left
  out.
- The length of a response that ended is the recorded one, whether it was delivered or not. Other
  lengths are imputed: they are drawn from the law of all lengths (Kaplan and Meier, unfinished ones
  censored) given the tokens so far, so they are longer than those. The draws are a function of the
  log and the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aprilsched.analysis.rebuild import summary_of_run
from aprilsched.analysis.run import readable
from aprilsched.core.lengths.laws import KaplanMeier, kaplan_meier
from aprilsched.core.lengths.observed import GroupLengths, hashed_uniforms, pooled
from aprilsched.core.messages import facts as of
from aprilsched.core.messages.events import EngineInfo
from aprilsched.core.messages.facts import Fact
from aprilsched.core.state.ledger import Reason
from aprilsched.errors import RunFolderError
from aprilsched.telemetry.event_log.reading import read_facts, replay
from aprilsched.telemetry.figures import BatchFigures, RunSummary, SteadyState, divided
from aprilsched.telemetry.run_folder import EVENTS

_LEAVING = frozenset({Reason.OUTRACED, Reason.MEMBER_LOST})
"""Reasons of rollouts that leave a group which goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedGroup:
    """The lengths of a prompt and of its responses, in tokens.

    Attributes:
        so_far: the known tokens of the members whose length is imputed, by their position.
    """

    prompt_tokens: int
    lengths: tuple[int, ...]
    so_far: Mapping[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """What a run had to do according to its folder, whatever its schedule was."""

    summary: RunSummary
    groups: tuple[RecordedGroup, ...]
    batches: tuple[RecordedBatch, ...]
    costs: RecordedCosts
    updates: int
    """Number of updates that engines have taken."""
    kv_tokens: int | None
    """Number of tokens of the smallest KV pool; None if an engine does not say it."""
    whole: bool
    """Whether the source of prompts ended and all its prompts were launched."""

    @property
    def imputed(self) -> int:
        """Number of responses whose length is imputed."""
        return sum(len(group.so_far) for group in self.groups)

    @property
    def known(self) -> int:
        """Number of responses whose length is recorded."""
        return sum(len(group.lengths) for group in self.groups) - self.imputed


def read_record(folder: Path, *, seed: int = 0) -> RecordedRun:
    """Read the run in `folder` with groups of `group_size`; `seed` is the seed of the imputed
    lengths.

    Raises:
        RunFolderError: if a file is missing, incomplete or cannot be understood, if the run
            delivered nothing, or if it has episodes.
    """
    launches, costs = Launches(), CostsOfRun()
    with readable(folder):
        summary = summary_of_run(folder)
        replay(folder / EVENTS, [launches, costs])
        _check(folder, summary, launches)
        groups = _groups(launches.by_group(), seed)
    return RecordedRun(
        summary=summary,
        groups=groups,
        batches=tuple(launches.batches),
        costs=costs.costs(),
        updates=launches.updates,
        kv_tokens=launches.kv_tokens,
        whole=launches.ended and launches.fetched == len(groups),
    )


def _check(folder: Path, summary: RunSummary, launches: Launches) -> None:
    found = len(launches.batches)
    whole = found == summary.batches == len(summary.per_batch)
    if summary.event_log_error is not None or not whole:
        raise RunFolderError(
            f"{folder} has {found} of {summary.batches} batches in its event log; name a run "
            "whose log is complete."
        )
    if not found:
        raise RunFolderError(f"{folder} has no delivered batch; name a longer run.")
    if launches.episodes:
        raise RunFolderError(
            f"{folder} was driven by episodes, whose tools' time is not in it; name a run of "
            "single turns."
        )


def _groups(members: Sequence[Sequence[Member]], seed: int) -> tuple[RecordedGroup, ...]:
    drawn = iter(_lengths([member for group in members for member in group], seed).tolist())
    return tuple(
        RecordedGroup(
            prompt_tokens=group[0].prompt,
            lengths=tuple(islice(drawn, len(group))),
            so_far={i: m.tokens for i, m in enumerate(group) if not m.finished},
        )
        for group in members
    )


def _lengths(members: Sequence[Member], seed: int) -> NDArray[np.int64]:
    """The lengths, int64 [n]: recorded ones, and draws for unfinished responses."""
    finished = np.array([member.finished for member in members], dtype=np.bool_)
    tokens = np.array([member.tokens for member in members], dtype=np.int64)
    seen = np.where(finished, np.maximum(tokens, 1), tokens)
    law = kaplan_meier(seen, ~finished)
    drawn = law.residual_quantile(hashed_uniforms(seen.shape, seed=seed), seen)
    return np.where(finished, seen, drawn)


# --- launches ------------------------------------------------------------------------------------

# Collects the launched groups and the delivered batches of a run from its facts.
#
# Invariant: the number of a member's tokens is the one known at the last fact, however often its
# request was interrupted, failed and sent again before.


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedBatch:
    """A delivered batch: the lengths of its prompts and of its responses, one for each rollout."""

    prompts: Sequence[int]
    lengths: Sequence[int]


@dataclass(kw_only=True, slots=True)
class Member:
    """A rollout according to the log so far; `prompt` and `tokens` are lengths."""

    group_id: int
    prompt: int
    tokens: int = 0
    finished: bool = False


class Launches:
    """Takes the facts of a run in order."""

    def __init__(self) -> None:
        self.batches: list[RecordedBatch] = []
        self.episodes = False
        """Whether the run has episodes."""
        self.updates = 0
        """Number of updates that engines have taken."""
        self.kv_tokens: int | None = None
        """Number of tokens of the smallest KV pool; None if an engine does not say it."""
        self.fetched = 0
        """Number of prompts that arrived from the source."""
        self.ended = False
        """Whether the source of prompts has ended."""
        self._members: dict[int, Member] = {}
        self._sizes: dict[int, int] = {}
        """Number of members that each group was launched with."""
        self._groups: dict[int, int] = {}
        """Group id of each rollout that was launched."""
        self._requests: dict[int, int] = {}
        """Rollout id of each request."""
        self._evaluated: set[int] = set()
        self._settled: set[int] = set()
        """Ids of the groups that were delivered or dropped."""
        self._begun_again: set[int] = set()
        """Ids of the dropped groups whose prompts were launched again as other groups."""
        self._began = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            of.RunOpened: self._opened,
            of.PromptsReceived: self._received,
            of.GroupLaunched: self._launched,
            of.MemberLaunched: self._launched_again,
            of.EpisodeStarted: self._episode,
            of.AttemptSent: self._sent,
            of.TokensReceived: self._tokens,
            of.RolloutFinished: self._finished,
            of.GroupDropped: self._dropped,
            of.PromptRefused: self._dropped,
            of.UpdateFinished: self._updated,
            of.BatchDelivered: self._delivered,
            of.EvaluationDelivered: self._evaluation_delivered,
        }

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            handler = self._handlers.get(fact.__class__)
            if handler is not None:
                handler(fact)

    def by_group(self) -> list[list[Member]]:
        """Groups in the order of launches, without those that were only evaluated. A member that
        was launched and never sent has no tokens. Of a prompt that was generated again, this is
        the last group."""
        left_out = self._evaluated | self._begun_again
        groups: dict[int, list[Member]] = {}
        for _, member in sorted(self._members.items()):
            if member.group_id not in left_out:
                groups.setdefault(member.group_id, []).append(member)
        for group_id, group in groups.items():
            missing = self._sizes.get(group_id, 0) - len(group)
            group.extend(Member(group_id=group_id, prompt=group[0].prompt) for _ in range(missing))
        return [group for _, group in sorted(groups.items())]

    def _sent(self, fact: of.AttemptSent) -> None:
        self._requests[fact.request_id] = fact.rollout_id
        member = self._members.setdefault(
            fact.rollout_id, Member(group_id=fact.group_id, prompt=fact.tokens)
        )
        # The context of a request that is sent again has only the tokens that arrived.
        member.tokens = fact.tokens - member.prompt
        member.finished = False

    def _tokens(self, fact: of.TokensReceived) -> None:
        rollout_id = self._requests.get(fact.request_id)
        if rollout_id is not None:
            self._members[rollout_id].tokens += fact.tokens

    def _finished(self, fact: of.RolloutFinished) -> None:
        member = self._members.get(fact.rollout_id)
        if member is not None:
            member.finished = True

    def _opened(self, fact: of.RunOpened) -> None:
        self.kv_tokens = _smallest_pool(fact.engines)
        if self._began:
            self._forget_open()
        self._began = True

    def _forget_open(self) -> None:
        """Forget what was in flight: it is launched again, as restored or from its beginning if it
        was not saved."""
        kept = {id_: m for id_, m in self._members.items() if m.group_id in self._settled}
        self._members = kept
        self._requests.clear()
        groups = {member.group_id for member in kept.values()}
        self.fetched = len(groups - self._evaluated - self._begun_again)

    def _launched(self, fact: of.GroupLaunched) -> None:
        if fact.evaluation_id is not None:
            self._evaluated.add(fact.group_id)
            return
        # The ids of rollouts that were not saved are given to other rollouts.
        self._evaluated.discard(fact.group_id)
        self._settled.discard(fact.group_id)
        self._begun_again.discard(fact.group_id)
        self._sizes[fact.group_id] = len(fact.rollout_ids)
        self._groups.update(dict.fromkeys(fact.rollout_ids, fact.group_id))
        if fact.again is not None:
            self._begun_again.add(fact.again)
        if fact.restored is not None:
            self._restore(fact, fact.restored)

    def _restore(self, fact: of.GroupLaunched, lengths: of.RestoredLengths) -> None:
        self.fetched += 1
        ended = zip(fact.rollout_ids, lengths.tokens, lengths.finished, strict=True)
        for rollout_id, tokens, finished in ended:
            self._members[rollout_id] = Member(
                group_id=fact.group_id,
                prompt=fact.prompt_tokens,
                tokens=tokens,
                finished=finished,
            )

    def _received(self, fact: of.PromptsReceived) -> None:
        self.fetched += fact.prompts
        self.ended = self.ended or fact.last

    def _updated(self, fact: of.UpdateFinished) -> None:
        self.updates += not fact.cause

    def _dropped(self, fact: of.GroupDropped | of.PromptRefused) -> None:
        self._settled.add(fact.group_id)
        if isinstance(fact, of.GroupDropped) and fact.reason in _LEAVING:
            self._left(fact)

    def _launched_again(self, fact: of.MemberLaunched) -> None:
        if fact.group_id in self._sizes:
            self._sizes[fact.group_id] += 1
            self._groups[fact.rollout_id] = fact.group_id

    def _left(self, fact: of.GroupDropped) -> None:
        """Forget members that their group goes on without."""
        for rollout_id in fact.rollout_ids:
            group_id = self._groups.get(rollout_id)
            if group_id is not None:
                self._members.pop(rollout_id, None)
                self._sizes[group_id] -= 1

    def _episode(self, _: of.EpisodeStarted) -> None:
        self.episodes = True

    def _evaluation_delivered(self, fact: of.EvaluationDelivered) -> None:
        self._settled.update(rollout.group_id for rollout in fact.rollouts)

    def _delivered(self, fact: of.BatchDelivered) -> None:
        if fact.again:
            return
        self._settled.update(rollout.group_id for rollout in fact.rollouts)
        for rollout in fact.rollouts:
            # A request that began before the log has no AttemptSent, or its context has tokens of
            # the response.
            self._members[rollout.rollout_id] = Member(
                group_id=rollout.group_id,
                prompt=rollout.prompt_tokens,
                tokens=rollout.tokens,
                finished=True,
            )
        self.batches.append(
            RecordedBatch(
                prompts=[rollout.prompt_tokens for rollout in fact.rollouts],
                lengths=[rollout.tokens for rollout in fact.rollouts],
            )
        )


def _smallest_pool(engines: Sequence[EngineInfo]) -> int | None:
    known = [engine.kv_tokens for engine in engines if engine.kv_tokens is not None]
    return min(known) if known and len(known) == len(engines) else None


# --- lengths known -------------------------------------------------------------------------------

# Computes what a run knew of its response lengths at one moment, and how well this determines the
# law.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LawBand:
    """A confidence band of the law: between `low` and `high` at each of `lengths`, float64 [n], and
    with a mean between `mean_low` and `mean_high`."""

    lengths: NDArray[np.int64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    mean_low: float
    mean_high: float


def known_lengths(folder: Path, *, until: float | None = None) -> list[GroupLengths]:
    """Groups that were launched for training in the first `until` seconds of the run in `folder`,
    with the tokens that were known then.

    The tokens of unfinished responses are exact after an update, and otherwise up to a chunk
    behind.

    Raises:
        RunFolderError: if the log is missing or cannot be understood.
    """
    launches = Launches()
    with readable(folder):
        for facts, at in read_facts(folder / EVENTS):
            if until is not None and at > until:
                break
            launches.on_facts(facts, at)
    return [
        GroupLengths(
            launched=place,
            tokens=np.array([max(m.tokens, m.finished) for m in members], dtype=np.int64),
            finished=np.array([m.finished for m in members], dtype=np.bool_),
        )
        for place, members in enumerate(launches.by_group())
    ]


def law_of(groups: Sequence[GroupLengths]) -> KaplanMeier:
    """Kaplan and Meier's estimate, in which unfinished responses are censored.

    Raises:
        ValueError: if there are no groups.
    """
    tokens, finished = pooled(groups)
    return kaplan_meier(tokens, ~finished)


def law_band(
    groups: Sequence[GroupLengths], *, level: float = 0.9, draws: int = 200, seed: int = 0
) -> LawBand:
    """A bootstrap band over whole groups. The members of a group are alike, so a formula for
    independent responses (Greenwood's) would give too narrow a band."""
    random = np.random.default_rng(seed)
    grid = np.unique(np.geomspace(1, law_of(groups).end, 120).astype(np.int64))
    laws = [law_of(_resampled(groups, random)) for _ in range(draws)]
    tails = (0.5 - level / 2, 0.5 + level / 2)
    low, high = np.quantile([law.survival_at(grid) for law in laws], tails, axis=0)
    mean_low, mean_high = np.quantile([law.mean() for law in laws], tails)
    return LawBand(
        lengths=grid, low=low, high=high, mean_low=float(mean_low), mean_high=float(mean_high)
    )


def _resampled(groups: Sequence[GroupLengths], random: np.random.Generator) -> list[GroupLengths]:
    return [groups[int(place)] for place in random.integers(0, len(groups), len(groups))]


# --- costs of run --------------------------------------------------------------------------------

# Measures the costs of a run besides decoding, from its event log.
#
# Each figure is a median over the whole run, so one slow refit or reward among many does not
# change it.


_Work: TypeAlias = tuple[str, Hashable]
"""A kind of work, and what it is done for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCosts:
    """Median seconds of each kind of work; 0 for work that never happened.

    Attributes:
        train_seconds: from a delivery to the next request of the trainer, an update or a batch.
        refit_seconds: from the begin of a refit to the last engine's answer, with the flush and
            continue calls of the engines.
        pause_seconds: from a pause call to its answer, which includes the step in progress.
        reward_seconds: from the request for a reward of a rollout (or a group) to the reward.
    """

    train_seconds: float
    refit_seconds: float
    pause_seconds: float
    reward_seconds: float


class CostsOfRun:
    """Takes the facts of a run in order."""

    def __init__(self) -> None:
        self._since: dict[_Work, float] = {}
        """When each piece of work began that has not ended."""
        self._took: dict[str, dict[tuple[_Work, float], float]] = {}
        """Seconds of each piece of work by its kind, itself and its begin."""

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            self._take(fact, now)

    def _take(self, fact: Fact, now: float) -> None:
        match fact:
            case of.RunOpened():
                # The process that would have ended what had begun was killed.
                self._since.clear()
            case of.BatchDelivered():
                self._begin("trainer", "", now)
            case of.UpdateBegun() | of.BatchRequested():
                self._end("trainer", "", now)
            case of.EngineModeChanged():
                self._end(fact.start, fact.engine, now)
                if fact.finish in ("pausing", "flushing", "continuing"):
                    self._begin(fact.finish, fact.engine, now)
            case of.RefitBegun(catch_up=False):
                self._begin("refit", fact.version, now)
            case of.EngineRefitted(catch_up=False):
                self._extend("refit", fact.version, now)
            case of.RewardRequested(rollout_id=None):
                self._begin("reward", ("group", fact.group_id), now)
            case of.RewardRequested():
                self._begin("reward", ("rollout", fact.rollout_id), now)
            case of.RolloutScored():
                self._end("reward", ("rollout", fact.rollout_id), now)
                self._end("reward", ("group", fact.group_id), now)
            case _:
                pass

    def costs(self) -> RecordedCosts:
        """The costs according to the facts so far."""
        return RecordedCosts(
            train_seconds=self._median("trainer"),
            refit_seconds=sum(map(self._median, ("flushing", "refit", "continuing"))),
            pause_seconds=self._median("pausing"),
            reward_seconds=self._median("reward"),
        )

    def _begin(self, kind: str, what: Hashable, now: float) -> None:
        self._since.setdefault((kind, what), now)

    def _end(self, kind: str, what: Hashable, now: float) -> None:
        """Take the end of a piece of work; only the first one counts."""
        self._extend(kind, what, now)
        self._since.pop((kind, what), None)

    def _extend(self, kind: str, what: Hashable, now: float) -> None:
        """Take an end of a piece of work that begins once for several ends; the last one counts."""
        work = kind, what
        if work in self._since:
            since = self._since[work]
            self._took.setdefault(kind, {})[work, since] = now - since

    def _median(self, kind: str) -> float:
        return median(self._took.get(kind, {}).values() or (0.0,))


# --- predictions -------------------------------------------------------------------------------

# Compares the figures of a recorded run with those of its replay over the same batches.


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionError:
    """Relative error of each figure (replayed / recorded - 1); 0 if both are 0, and None if one is
    not known."""

    burn_in: int
    """Number of batches that are left out at the start."""
    batches: int
    """Number of batches that are compared after those."""
    delivered_tokens_per_s: float | None
    efficiency: float | None
    off_policy_share: float | None
    step_s: float | None
    """Of the mean seconds of whole steps, the trainer's time included."""


def prediction_error(
    recorded: RunSummary, replayed: RunSummary, *, burn_in: int
) -> PredictionError:
    """The error of a replay under the run's own settings, over the batches that both have."""
    end = min(recorded.batches, replayed.batches)
    real, guess = (each.per_batch[:end] for each in (recorded, replayed))
    was, came = steady_state_of(real, burn_in), steady_state_of(guess, burn_in)
    steps = [sum(batch.step_s for batch in each[burn_in:]) for each in (guess, real)]
    return PredictionError(
        burn_in=burn_in,
        batches=was.batches,
        delivered_tokens_per_s=_error(came.delivered_tokens_per_s, was.delivered_tokens_per_s),
        efficiency=_error(came.efficiency, was.efficiency),
        off_policy_share=_error(came.off_policy_token_share, was.off_policy_token_share),
        step_s=_error(*steps) if was.batches else None,
    )


def recorded_summary(
    record: RecordedRun,
    *,
    batches: int,
    burn_in: int,
    bound: Callable[[Sequence[int], Sequence[int]], float],
) -> RunSummary:
    """The run's own summary, with the per-batch and steady-state figures of its first `batches`.

    Args:
        bound: gives T_bound in seconds for the lengths of prompts and responses. The efficiency of
            the recorded run and of the replay are computed with the same model, which also works
            for a run on servers.
    """
    pairs = zip(record.summary.per_batch[:batches], record.batches, strict=False)
    figures = [_bounded(one, bound(batch.prompts, batch.lengths)) for one, batch in pairs]
    return replace(
        record.summary, per_batch=figures, steady_state=steady_state_of(figures, burn_in)
    )


def steady_state_of(batches: Sequence[BatchFigures], burn_in: int) -> SteadyState:
    """The figures over `batches`, without the first `burn_in`, that a replay is compared by."""
    kept = batches[burn_in:]
    seconds = sum(batch.seconds for batch in kept)
    tokens = sum(batch.tokens for batch in kept)
    off_policy = sum((batch.off_policy_token_share or 0.0) * batch.tokens for batch in kept)
    bounds = [batch.t_bound for batch in kept if batch.t_bound is not None]
    return SteadyState(
        burn_in=burn_in,
        batches=len(kept),
        mean_batch_seconds=divided(seconds, len(kept)),
        delivered_tokens_per_s=divided(tokens, sum(batch.step_s for batch in kept)),
        efficiency=divided(sum(bounds), seconds) if len(bounds) == len(kept) else None,
        off_policy_token_share=divided(off_policy, tokens),
    )


def _bounded(figures: BatchFigures, bound: float) -> BatchFigures:
    return replace(figures, t_bound=bound, efficiency=divided(bound, figures.seconds))


def _error(replayed: float | None, recorded: float | None) -> float | None:
    if replayed is None or recorded is None:
        return None
    if not recorded:
        return 0.0 if not replayed else None
    return replayed / recorded - 1
