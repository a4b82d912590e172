"""Counters, and the ledger of all rollouts that were dropped.

Every rollout that is neither delivered nor in flight has an entry in the ledger, with the reason,
the cause and its number of tokens. Counts are kept for ever, and the latest entries up to a bound.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum

from aprilsched.errors import PromptsExhausted, RunEnded, RunGivenUp

REFUSED = "refused at attempt"
"""How the cause begins where an engine has refused the request itself (:data:`Reason.FAILED`)."""
BUSY = "busy for too long"
"""What the cause contains where an engine had no room for the request, and none for any other."""


@dataclass(slots=True, kw_only=True)
class Counters:
    """Counts since the run began. Rollouts of evaluations count like any other."""

    launched: int = 0
    delivered: int = 0
    batches: int = 0
    updates: int = 0
    tokens_generated: int = 0
    """Tokens that arrived from engines."""
    tokens_delivered: int = 0
    """Sampled tokens in delivered rollouts. Tokens of environments do not count."""
    tokens_discarded: int = 0
    """Sampled tokens of dropped rollouts, including those that arrive after the drop."""
    tokens_reprefilled: int = 0
    """Context tokens recomputed after an interruption."""
    tokens_masked: int = 0
    """Tokens delivered with loss mask 0 because they are older than the staleness bound."""
    retries: int = 0
    regenerated: int = 0
    """Rollouts that were launched in the place of a lost member of their group."""
    turns_refused: int = 0
    """Turns of episodes that engines refused, such as one beyond the context of the model."""
    teardowns_failed: int = 0
    """Functions for the end of an episode (``Turn.on_end``) that raised or did not end in time."""


_KEPT_ENTRIES = 10_000


class Reason(StrEnum):
    """Why a rollout was dropped."""

    REJECTED = "rejected"
    """The user's accept function rejected its group (dynamic sampling)."""
    FAILED = "failed"
    """Its request failed too often, or was refused by the engine. Also tokens of a turn that was
    refused on its way from one engine to another; their episode goes on."""
    SIBLING_FAILED = "sibling_failed"
    """Another rollout of its group failed, and its group was dropped with it."""
    MEMBER_LOST = "member_lost"
    """It was lost by the infrastructure. Its group goes on without it, or with another rollout in
    its place."""
    BAD_PROMPT = "bad_prompt"
    """The prompt cannot be used. It has one entry, and nothing was generated."""
    REWARD_FAILED = "reward_failed"
    EPISODE_FAILED = "episode_failed"
    STALE = "stale"
    """Evicted at an update because it would pass the staleness bound. This censors lengths."""
    BEGUN_AGAIN = "begun_again"
    """Its tokens were thrown away at an update, because they would pass the staleness bound. Its
    prompt is generated again, as another group."""
    RESTARTED = "restarted"
    """The scheduler was resumed: the rollout belonged to an evaluation, or its tokens to an episode
    that took another way this time."""
    ABANDONED = "abandoned"
    """Its evaluation was abandoned: its engines are gone, and only an update leads on."""
    WITHDRAWN = "withdrawn"
    """The caller gave it up: a rollout of an evaluation whose call was cancelled, or of a client of
    the gateway that has disconnected or aborted it. Also tokens of a turn that an episode withdrew
    and did not keep; their rollout goes on."""
    OTHER_VERSION = "other_version"
    """An engine sampled some tokens of its evaluation under another version. The prompt is
    generated again."""
    VERSION_LOST = "version_lost"
    """Rolling refits: no engine has the version any more that sampled these tokens, or an engine
    had another one. Their rollout begins again; an episode is dropped."""
    OTHER_BRANCH = "other_branch"
    """Tokens of a branch that its episode does not keep; their rollout goes on."""
    DAMAGED = "damaged"
    """The store cannot read it any more."""


FAILURES = frozenset(
    {
        Reason.BAD_PROMPT,
        Reason.FAILED,
        Reason.REWARD_FAILED,
        Reason.EPISODE_FAILED,
        Reason.VERSION_LOST,
        Reason.DAMAGED,
    }
)
"""Reasons of groups that the user did not ask to drop, and that nothing generates again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One dropped rollout."""

    rollout_id: int
    group_id: int
    reason: Reason
    cause: str
    tokens: int
    at: float


class Ledger:
    """Rollouts and tokens by reason, and the latest entries."""

    def __init__(self) -> None:
        self.rollouts: Counter[Reason] = Counter()
        self.tokens: Counter[Reason] = Counter()
        self.entries: deque[Entry] = deque(maxlen=_KEPT_ENTRIES)

    def add(self, entry: Entry) -> None:
        self.rollouts[entry.reason] += 1
        self.tokens[entry.reason] += entry.tokens
        self.entries.append(entry)

    def late_tokens(self, reason: Reason, tokens: int) -> None:
        """Count tokens that arrived for a rollout after it was dropped."""
        self.tokens[reason] += tokens

    @property
    def total(self) -> int:
        """Number of rollouts dropped."""
        return sum(self.rollouts.values())


_CAUSES = 32
"""Largest number of causes that are counted one by one."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of the prompts of a run, in groups."""

    delivered: int = 0
    causes: Counter[str] = field(default_factory=Counter[str])
    """Failed groups, and prompts that cannot be used, by cause."""

    def fail(self, cause: str) -> None:
        """Count a failed group."""
        known = cause in self.causes or len(self.causes) < _CAUSES
        self.causes[cause if known else "of other causes"] += 1

    def given_up(self, groups: int, cause: str) -> RunGivenUp:
        """The error for a run of which `groups` groups in a row failed, the last for `cause`."""
        return RunGivenUp(
            f"{groups} groups in a row failed and none was accepted, the last because {cause}; "
            f"correct that, or raise retries.failed_groups (in all {self.delivered} groups were "
            f"delivered and {self.causes.total()} failed).",
            delivered=self.delivered,
            causes=self.causes,
        )

    def all_rejected(self, groups: int) -> RunGivenUp:
        """The error for a run whose `accept` refused `groups` groups in a row."""
        return RunGivenUp(
            f"accept rejected {groups} groups in a row; correct it, the reward or the prompts, or "
            f"raise retries.rejected_groups (in all {self.delivered} groups were delivered).",
            delivered=self.delivered,
            causes=self.causes,
        )

    def end(self, prompts: int, share: float) -> RunEnded:
        """The error for a trainer that waits for a batch after the last of `prompts` prompts, of
        which the share `share` may fail."""
        kind: type[RunEnded] = RunGivenUp
        failed = self.causes.total()
        why = f"most often because {self.causes.most_common(1)[0][0]}" if failed else ""
        if prompts and not self.delivered:
            said = f"{failed} of {prompts} failed, {why}"
            said = said if failed else f"all {prompts} were rejected or became too stale"
            said = f"no group was delivered: {said}; correct that"
        elif failed > share * prompts:
            said = f"{failed} of {prompts} groups failed, {why}; correct that, or raise "
            said += "retries.failed_share"
        else:
            kind = PromptsExhausted
            said = f"{self.delivered} of {prompts} groups were delivered"
            if failed:
                said += f" and {failed} failed, {why}"
            elif self.delivered < prompts:
                said += ", and the others were rejected or became too stale"
            else:
                said = "everything was delivered"
        return kind(
            f"the prompts have ended and {said}.", delivered=self.delivered, causes=self.causes
        )
