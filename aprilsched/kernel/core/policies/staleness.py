"""Keeps the staleness of samples within a bound.

The staleness of a token is the version that consumes it minus the version that sampled it. The
staleness of a sample is the largest of its tokens. Two things keep it within the bound: admission,
which limits the number of outstanding groups, and a rule for rollouts that reach the bound while
they are in flight:

* ``finish``: a batch is not delivered without the groups that would be too stale afterwards.
  With one update for each batch, admission guarantees that they fit.
* ``mask``: tokens beyond the bound keep their place, with loss mask 0.
* ``evict``: the whole group is dropped at the update. This censors long responses.
* ``restart``: the tokens of the whole group are discarded at the update, and its prompt is
  generated again. Admission then imposes no limit. This rule requires a schedule that eventually
  runs every group to completion; otherwise a prompt with long responses would restart forever.

Tokens that pass the bound under ``finish`` nevertheless, because there were several updates between
two batches, are masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from aprilsched.kernel.values.bounds import AT_LEAST_0
from aprilsched.kernel.values.checks import suggesting

StalenessRule: TypeAlias = Literal["mask", "evict", "finish", "restart"]


@suggesting()
@dataclass(frozen=True, slots=True)
class Staleness:
    """A bound on staleness, and the treatment of rollouts that would pass it."""

    bound: Annotated[int, AT_LEAST_0] | None = None
    """Largest staleness of a delivered token with loss mask 1, in versions; None for no bound."""
    rule: StalenessRule = "mask"
    """Treatment of tokens that would pass the bound: "mask" gives them loss mask 0, "evict" drops
    their groups at the update, "finish" delivers no batch without their groups, and "restart"
    discards the tokens of their groups at the update and generates the prompts again."""

    def admissible(
        self, *, batch_groups: int, outstanding: int, batches_since_update: int, wanted: bool
    ) -> int | None:
        """Return the number of groups that may still be started.

        None without a bound, or if groups that would pass it restart. This is AReaL's gate, (bound
        + version + 1) * N minus the delivered groups and those in flight, relative to the last
        update. While the trainer waits for a batch, at least one batch is admitted. Otherwise a
        trainer that takes several batches under one version would wait forever. `outstanding`
        counts complete groups as usual groups, so it is below a batch while no group is open and
        the batch is not full.
        """
        if self.bound is None or self.rule == "restart":
            return None
        limit = (self.bound + 1 - batches_since_update) * batch_groups
        if wanted:
            limit = max(limit, batch_groups)
        return max(0, limit - outstanding)

    @property
    def finishes(self) -> bool:
        """Whether groups that reach the bound must be in the next batch."""
        return self.rule == "finish"

    def due(self, oldest: int | None, version: int) -> bool:
        """Return whether the rule ``finish`` requires a group in the batch that `version` consumes.

        `oldest` is the version of the group's oldest token.
        """
        return self.finishes and self._reaches(oldest, version, self.bound)

    def evicts(self, oldest: int | None, version: int) -> bool:
        """Return whether the rule ``evict`` drops a group at `version`.

        `oldest` is the version of the group's oldest token.
        """
        return self.rule == "evict" and self._passes(oldest, version)

    def restarts(self, oldest: int | None, version: int) -> bool:
        """Return whether the rule ``restart`` restarts a group at `version`.

        `oldest` is the version of the group's oldest token.
        """
        return self.rule == "restart" and self._passes(oldest, version)

    def oldest_unmasked(self, version: int) -> int | None:
        """Return the oldest version whose tokens keep loss mask 1 in a batch at `version`.

        None without a bound.
        """
        return None if self.bound is None else version - self.bound

    def _passes(self, oldest: int | None, version: int) -> bool:
        return self.bound is not None and self._reaches(oldest, version, self.bound + 1)

    @staticmethod
    def _reaches(oldest: int | None, version: int, staleness: int | None) -> bool:
        return oldest is not None and staleness is not None and version - oldest >= staleness
