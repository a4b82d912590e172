"""How a run begins.

A run that begins with all groups at once delivers the shortest responses first. This bias of the
lengths disappears only with the number of batches (:mod:`aprilsched.core.lengths.identity`). With
"wait" each of the first batches is launched alone and waited for, so there is no bias during that
time. With "ramp" the ratio grows from 1 to its value, which spreads the same bias evenly over the
first batches. Both are slower at first, because fewer groups are open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from aprilsched.checks import suggesting
from aprilsched.core.policies.bounds import AT_LEAST_1

__all__ = ["StartUp", "StartUpRule"]

StartUpRule: TypeAlias = Literal["at_once", "ramp", "wait"]


@suggesting()
@dataclass(frozen=True, slots=True)
class StartUp:
    """How a run begins."""

    rule: StartUpRule = "at_once"
    """"at_once" launches all groups together, so the first batches consist of the shortest
    responses. "wait" waits for every response of the first batches, which are then not biased.
    "ramp" lets over-provisioning grow over the first batches, which spreads the bias evenly."""
    batches: Annotated[int, AT_LEAST_1] = 8
    """Number of batches that the start takes, for "wait" and "ramp"."""

    @property
    def at_once(self) -> bool:
        return self.rule == "at_once"

    def lasts(self, batches: int) -> bool:
        """Whether the start of a run is not over yet after so many delivered batches."""
        return not self.at_once and batches < self.batches

    def target_groups(self, batches: int, *, batch_groups: int, target: int) -> int:
        """Number of groups to keep open during the start, instead of `target`."""
        if self.rule == "wait":
            return batch_groups
        share = batches / self.batches
        return batch_groups + math.ceil(share * max(0, target - batch_groups))
