"""How a run begins.

A run that begins with all groups at once delivers the shortest first: a bias of lengths that
goes away only with the number of batches (:mod:`aprilsched.core.lengths.identity`). While it
starts up with "wait", each batch is launched alone and waited for, so there is no bias until then;
with "ramp" the ratio grows from 1 to its value over the batches, which spreads the same bias
evenly over them. Both cost the speed that the missing groups would have bought.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from aprilsched.core.policies.bounds import AT_LEAST_1

__all__ = ["StartUp", "StartUpRule"]

StartUpRule: TypeAlias = Literal["at_once", "ramp", "wait"]


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
        """Is a run that has delivered so many batches still beginning?"""
        return not self.at_once and batches < self.batches

    def target_groups(self, batches: int, *, batch_groups: int, target: int) -> int:
        """Groups to keep open while it lasts, instead of `target`."""
        if self.rule == "wait":
            return batch_groups
        share = batches / self.batches
        return batch_groups + math.ceil(share * max(0, target - batch_groups))
