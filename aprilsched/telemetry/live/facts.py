"""What is known of a run before it begins."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RunFacts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Attributes:
    title: begins the view, and every plain line.
    where: behind it in the view, such as the run's folder.
    batches: how many the run will deliver.
    batch_groups: that of the scheduler.
    modelled: the run's seconds are not the wall's.
    """

    title: str
    batches: int
    batch_groups: int
    where: str = ""
    modelled: bool = False
