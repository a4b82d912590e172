"""The sums over the batches of a trial that count, and the outcome that follows from them.

Efficiency counts generated tokens and not delivered ones: in the long run both are the same, and
over a few batches the delivered ones vary four times as much, with what is in flight.

If the trainer is slower than the engines, the time of a step does not depend on its responses, so
random lengths become random work per step. In the long run all candidates do the same work. So the
objective counts the mean work of this number of groups, and the seconds that it would take: the
seconds that depend on the engines are scaled in proportion, the others are unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

from aprilsched.planning.setting import Outcome, Setting
from aprilsched.planning.trial_groups import TrialGroup


class Tally:
    """Sums over the batches that count."""

    def __init__(self) -> None:
        self.bound = 0.0
        """T_bound of the generated tokens, in seconds."""
        self.distance = 0.0
        self.driven = 0.0
        """Seconds that are as long as the engines make them."""
        self._groups = 0
        """Number of delivered groups or single samples."""
        self._seconds = 0.0
        self._waited = 0.0
        self._by_staleness: dict[int, float] = {}
        """Number of delivered tokens by their staleness in versions."""

    def add(
        self, groups: Sequence[TrialGroup], version: int, *, seconds: float, waited: float
    ) -> None:
        """Count a batch that `version` consumes.

        Its step took `seconds`; for `waited` of these seconds the engines waited for the trainer.
        """
        self._seconds += seconds
        self._waited += waited
        self._groups += len(groups)
        for group in groups:
            for sampled, tokens in group.sampled.items():
                staleness = version - sampled
                self._by_staleness[staleness] = self._by_staleness.get(staleness, 0.0) + tokens

    def outcome(
        self, setting: Setting, batches: int, peak_kv: float, fixed_groups: bool
    ) -> Outcome:
        """Return the means over `batches`, with equal numbers of groups if `fixed_groups`."""
        by_staleness, oldest = self._by_staleness, setting.max_staleness
        tokens, distance = sum(by_staleness.values()), self.distance / batches
        worth = setting.objective.usefulness(by_staleness, bound=oldest)
        worth *= setting.objective.share_left(distance, setting.iid_distance)
        groups = self._groups / setting.units_of_group
        mean_work = setting.group_work * groups if fixed_groups else self.bound
        longer = self.driven * (mean_work / self.bound - 1)
        busy = self._seconds - self._waited
        late = 0.0 if oldest is None else sum(n for k, n in by_staleness.items() if k > oldest)
        return Outcome(
            value=mean_work / (self._seconds + longer) * worth,
            step_seconds=busy / batches,
            trainer_seconds=self._waited / batches,
            efficiency=self.bound / busy,
            off_policy_share=1 - by_staleness.get(0, 0.0) / tokens,
            mean_staleness=sum(staleness * n for staleness, n in by_staleness.items()) / tokens,
            distance=distance,
            too_stale_share=late / tokens,
            peak_kv=peak_kv,
        )
