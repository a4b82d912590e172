"""Counters, and the ledger of all dropped rollouts.

Every rollout that is neither delivered nor in flight has an entry in the ledger, with the reason,
the cause and its number of tokens. Counts cover the whole run; only the latest entries are kept.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum

from aprilsched.errors import PromptsExhausted, RunEnded, RunGivenUp

REFUSED = "refused at attempt"
"""Prefix of the cause if an engine refused the request itself (:data:`Reason.FAILED`)."""
BUSY = "busy for too long"
"""Part of the cause if an engine had no room for this request or any other."""


@dataclass(slots=True, kw_only=True)
class Counters:
    """Counts since the start of the run, including rollouts of evaluations."""

    launched: int = 0
    delivered: int = 0
    batches: int = 0
    updates: int = 0
    tokens_generated: int = 0
    """Tokens that arrived from engines."""
    tokens_delivered: int = 0
    """Sampled tokens in delivered rollouts, without tokens of environments."""
    tokens_discarded: int = 0
    """Sampled tokens of dropped rollouts, including those that arrive after the drop."""
    tokens_reprefilled: int = 0
    """Context tokens recomputed after an interruption."""
    tokens_masked: int = 0
    """Tokens delivered with loss mask 0 because they are beyond the staleness bound."""
    retries: int = 0
    regenerated: int = 0
    """Rollouts launched to replace a lost member of their group."""
    turns_refused: int = 0
    """Turns of episodes that engines refused, such as one beyond the context of the model."""
    teardowns_failed: int = 0
    """Teardown functions of episodes (``Turn.on_end``) that raised or timed out."""


_KEPT_ENTRIES = 10_000


class Reason(StrEnum):
    """Why a rollout was dropped."""

    REJECTED = "rejected"
    """The user's accept function rejected its group (dynamic sampling)."""
    FAILED = "failed"
    """Its request failed too often, or was refused by the engine. Also tokens of a turn that was
    refused while it moved between engines; the episode continues."""
    SIBLING_FAILED = "sibling_failed"
    """Another rollout of its group failed, so the whole group was dropped."""
    MEMBER_LOST = "member_lost"
    """The infrastructure lost it. Its group continues without it, or with a replacement."""
    BAD_PROMPT = "bad_prompt"
    """The prompt is unusable. It has one entry, and nothing was generated."""
    REWARD_FAILED = "reward_failed"
    EPISODE_FAILED = "episode_failed"
    STALE = "stale"
    """Evicted at an update because it would exceed the staleness bound. This censors lengths."""
    BEGUN_AGAIN = "begun_again"
    """Its tokens were discarded at an update, because they would exceed the staleness bound. The
    prompt is generated again in a new group."""
    RESTARTED = "restarted"
    """The scheduler was resumed, and the rollout belongs to an evaluation. Also tokens of an
    episode that took a different path after the restart."""
    ABANDONED = "abandoned"
    """Its evaluation was abandoned: its engines are gone, and only an update can help."""
    WITHDRAWN = "withdrawn"
    """The caller cancelled it: the call of its evaluation was cancelled, or its client of the
    gateway disconnected or aborted it. Also tokens of a turn that an episode withdrew and did not
    keep; the rollout continues."""
    OTHER_VERSION = "other_version"
    """An engine sampled some tokens of its evaluation under another version. The prompt is
    generated again."""
    VERSION_LOST = "version_lost"
    """Rolling refits: no engine has the version of these tokens any longer, or an engine sampled
    under a wrong one. The rollout restarts; an episode is dropped."""
    OTHER_BRANCH = "other_branch"
    """Tokens of a branch that its episode does not keep; the rollout continues."""
    DAMAGED = "damaged"
    """The store can no longer read it."""


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
"""Reasons for which a group is lost although the user did not drop it, and is not regenerated."""


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
        """Count tokens that arrive for a rollout after its drop."""
        self.tokens[reason] += tokens

    @property
    def total(self) -> int:
        """Number of dropped rollouts."""
        return sum(self.rollouts.values())


_CAUSES = 32
"""Largest number of causes with a count of their own."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The outcome of the prompts of a run, in groups."""

    delivered: int = 0
    causes: Counter[str] = field(default_factory=Counter[str])
    """Numbers of failed groups and unusable prompts, by cause."""

    def fail(self, cause: str) -> None:
        """Count a failed group."""
        known = cause in self.causes or len(self.causes) < _CAUSES
        self.causes[cause if known else "of other causes"] += 1

    def given_up(self, failed: str, cause: str) -> RunGivenUp:
        """Return the error for units that `failed` in a row ("64 groups"), the last for `cause`."""
        return RunGivenUp(
            f"{failed} in a row failed and none was accepted, the last because {cause}; "
            f"correct that, or raise retries.failed_groups (in all {self.delivered} groups were "
            f"delivered and {self.causes.total()} failed).",
            delivered=self.delivered,
            causes=self.causes,
        )

    def all_rejected(self, rejected: str) -> RunGivenUp:
        """Return the error for units that `accept` rejected in a row ("1000 groups")."""
        return RunGivenUp(
            f"accept rejected {rejected} in a row; correct it, the reward or the prompts, or "
            f"raise retries.rejected_groups (in all {self.delivered} groups were delivered).",
            delivered=self.delivered,
            causes=self.causes,
        )

    def end(self, prompts: int, share: float, *, batches: int) -> RunEnded:
        """Return the error for a trainer that waits for a batch after the last prompt.

        The run had `prompts` prompts, of which the share `share` may fail, and `batches` batches.
        """
        kind: type[RunEnded] = RunGivenUp
        failed = self.causes.total()
        why = f"most often because {self.causes.most_common(1)[0][0]}" if failed else ""
        if prompts and not batches:
            outcome = f"{failed} of {prompts} failed, {why}"
            outcome = outcome if failed else f"all {prompts} were rejected or became too stale"
            outcome = f"no group was delivered: {outcome}; correct that"
        elif failed > share * prompts:
            outcome = f"{failed} of {prompts} groups failed, {why}; correct that, or raise "
            outcome += "retries.failed_share"
        else:
            kind = PromptsExhausted
            outcome = f"{self.delivered} of {prompts} groups were delivered"
            if failed:
                outcome += f" and {failed} failed, {why}"
            elif self.delivered < prompts:
                outcome += ", and the others were rejected or became too stale"
            else:
                outcome = "everything was delivered"
        return kind(
            f"the prompts have ended and {outcome}.", delivered=self.delivered, causes=self.causes
        )
