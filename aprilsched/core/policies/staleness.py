"""Keeping the staleness of samples within a bound.

The staleness of a token is the version that consumes it minus the version that sampled it; a
sample's is the largest of its tokens. Two gates keep it below ``bound``: admission (how many
groups may be outstanding) and, for what is in flight when it comes due, a rule.

* ``finish``: a batch is not delivered without the groups that would be too stale afterwards.
  As long as there is one update per batch, the admission gate guarantees that they fit.
* ``mask``: tokens beyond the bound keep their place with loss mask 0.
* ``evict``: at the update the whole group goes to the ledger. This censors long responses.

Whatever passes the bound under ``finish`` all the same (several updates between two batches) is
masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from aprilsched.core.policies.bounds import AT_LEAST_0

__all__ = ["Staleness", "StalenessRule"]

StalenessRule: TypeAlias = Literal["mask", "evict", "finish"]


@dataclass(frozen=True, slots=True)
class Staleness:
    """A bound on staleness, and what happens to the rollouts that would pass it."""

    bound: Annotated[int, AT_LEAST_0] | None = None
    """Largest staleness of a delivered token with loss mask 1, in versions; None for no bound."""
    rule: StalenessRule = "mask"
    """What happens to tokens that would pass the bound: "mask" gives them loss mask 0, "evict"
    drops their groups at the update, and "finish" delivers no batch without their groups."""

    def admissible(
        self, *, batch_groups: int, outstanding: int, batches_since_update: int, wanted: bool
    ) -> int | None:
        """Groups that may still be started; None if there is no bound.

        AReaL's gate, (bound + version + 1) * N minus delivered and in flight, written relative
        to the last update. It is not kept below one batch while one is waited for: a trainer
        that takes several batches under one version would otherwise wait for ever. `outstanding`
        counts complete groups as usual ones, so that it is below a batch while nothing is open
        and the batch is not full.
        """
        if self.bound is None:
            return None
        limit = (self.bound + 1 - batches_since_update) * batch_groups
        if wanted:
            limit = max(limit, batch_groups)
        return max(0, limit - outstanding)

    @property
    def finishes(self) -> bool:
        """Must groups that come due be in the next batch?"""
        return self.rule == "finish"

    def due(self, oldest: int | None, version: int) -> bool:
        """Rule ``finish``: must this be in the batch that `version` consumes?"""
        return self.finishes and self._reaches(oldest, version, self.bound)

    def evicts(self, oldest: int | None, version: int) -> bool:
        """Rule ``evict``: is this too stale for `version`?"""
        beyond = None if self.bound is None else self.bound + 1
        return self.rule == "evict" and self._reaches(oldest, version, beyond)

    def oldest_unmasked(self, version: int) -> int | None:
        """Tokens of versions below this get loss mask 0 in a batch consumed at `version`."""
        return None if self.bound is None else version - self.bound

    @staticmethod
    def _reaches(oldest: int | None, version: int, age: int | None) -> bool:
        return oldest is not None and age is not None and version - oldest >= age
