"""Stop rules: a batch is full when it has enough whole groups, samples or tokens.

Gates, refill rules and ratios count groups. This module converts the unit of the rule to groups by
the *usual* group, which is the expected amount of one group in that unit. The conversion yields the
number of groups that a batch takes, and the number that the complete groups are equivalent to. It
is exact for groups, and for samples if all prompts have the same group size.

A new unit is one class here, which a configuration takes as a value. Everything that depends on the
unit, automatic over-provisioning included, calls the class. The amount must be a sum over complete
groups. A name for the command line and for files is a line of
:mod:`aprilsched.kernel.core.policies.kinds`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Protocol

from aprilsched.kernel.values.bounds import AT_LEAST_1
from aprilsched.kernel.values.checks import suggesting


class CompleteGroup(Protocol):
    """A complete group as the rule sees it."""

    @property
    def members(self) -> Sequence[object]: ...
    @property
    def tokens(self) -> int: ...


class CompleteGroups(Protocol):
    """All complete groups as the rule sees them."""

    @property
    def samples(self) -> int: ...
    @property
    def tokens(self) -> int: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Stop(ABC):
    """A batch is full when its groups contain at least `amount` of the rule's unit."""

    amount: Annotated[int, AT_LEAST_1]
    """Number of groups, rollouts or response tokens that fill a batch."""

    name: ClassVar[str]
    fixed_groups: ClassVar[bool] = False
    """Whether every batch has the same number of groups."""
    learns: ClassVar[bool] = False
    """Whether the amount of a group becomes known only during the run."""

    @abstractmethod
    def usual_group(
        self, group_size: float, group_tokens: Callable[[], float | None]
    ) -> float | None:
        """Return the expected amount of one group; None while unknown.

        Args:
            group_size: number of rollouts of one prompt; the mean if prompts have different sizes.
            group_tokens: returns the mean number of tokens of a group, or None while no length is
                known.
        """

    @abstractmethod
    def total(self, complete: CompleteGroups) -> int:
        """Return the total amount of the complete groups."""

    @abstractmethod
    def measure(self, group: CompleteGroup) -> int:
        """Return the amount of one complete group."""

    def enough(self, complete: CompleteGroups, *, batches: float = 1) -> bool:
        """Return whether the complete groups are enough for this number of batches."""
        return self.total(complete) >= batches * self.amount

    def batch_groups(self, usual: float) -> int:
        """Return the number of groups that a batch takes if each counts `usual`."""
        # Guards against rounding up a whole number with an error in the last place.
        return max(1, math.ceil(self.amount / usual - 1e-9))

    def as_groups(self, complete: CompleteGroups, usual: float) -> int:
        """Return the number of usual groups that are equivalent to the complete ones.

        It is smaller than the number that a batch takes if the complete groups are not enough for
        one.
        """
        return math.floor(self.total(complete) / usual + 1e-9)

    def take(self, groups: Sequence[CompleteGroup]) -> int | None:
        """Return how many of `groups`, from the first one on, make a batch; None if too few."""
        held = 0
        for count, group in enumerate(groups, 1):
            held += self.measure(group)
            if held >= self.amount:
                return count
        return None


@suggesting()
@dataclass(frozen=True, slots=True)
class Groups(Stop):
    """A batch is full when it has `amount` groups."""

    name: ClassVar[str] = "groups"
    fixed_groups: ClassVar[bool] = True

    def usual_group(self, group_size: float, group_tokens: Callable[[], float | None]) -> float:
        return 1.0

    # Equivalent to the base methods, which would call `held` and `usual_group` at most events of a
    # run.

    def batch_groups(self, usual: float) -> int:
        return self.amount

    def as_groups(self, complete: CompleteGroups, usual: float) -> int:
        return len(complete)

    def total(self, complete: CompleteGroups) -> int:
        return len(complete)

    def enough(self, complete: CompleteGroups, *, batches: float = 1) -> bool:
        return len(complete) >= batches * self.amount

    def measure(self, group: CompleteGroup) -> int:
        return 1


@suggesting()
@dataclass(frozen=True, slots=True)
class Samples(Stop):
    """A batch is full when its whole groups have at least `amount` rollouts."""

    name: ClassVar[str] = "samples"
    learns: ClassVar[bool] = True

    def usual_group(self, group_size: float, group_tokens: Callable[[], float | None]) -> float:
        return float(group_size)

    def total(self, complete: CompleteGroups) -> int:
        return complete.samples

    def measure(self, group: CompleteGroup) -> int:
        return len(group.members)


@suggesting()
@dataclass(frozen=True, slots=True)
class SingleSamples(Samples):
    """A batch is full when it has `amount` samples, each delivered by itself."""

    fixed_groups: ClassVar[bool] = True


@suggesting()
@dataclass(frozen=True, slots=True)
class Tokens(Stop):
    """A batch is full when its whole groups have at least `amount` response tokens."""

    name: ClassVar[str] = "tokens"
    learns: ClassVar[bool] = True

    def usual_group(
        self, group_size: float, group_tokens: Callable[[], float | None]
    ) -> float | None:
        return group_tokens()

    def total(self, complete: CompleteGroups) -> int:
        return complete.tokens

    def measure(self, group: CompleteGroup) -> int:
        return group.tokens
