"""Finds the policies of a replay: the run's own settings, and presets applied to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from aprilsched.config import SchedulerConfig
from aprilsched.errors import ConfigError
from aprilsched.presets import PRESETS
from aprilsched.runs.policies import chosen

__all__ = ["RECORDED", "Variant", "variants"]

RECORDED = "recorded"
"""Name of the policy that is the run's own settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A policy of a replay: its name, its folder, what it does, and its scheduler's settings."""

    name: str
    folder: str
    what: str
    scheduler: SchedulerConfig


def variants(names: str, run: SchedulerConfig) -> Sequence[Variant]:
    """The run's own settings, and then the policies in `names`, a list with commas.

    Presets keep the settings that they do not decide (group size, stragglers, sampling and others)
    as the run had them. ``recorded:over_provision=1.5`` is the run with another ratio.

    Raises:
        ConfigError: if a policy is unknown, is named twice, or has another group size.
    """
    own = "Its own settings."
    found = [Variant(name=RECORDED, folder=RECORDED, what=own, scheduler=run)]
    for name in filter(None, (name.strip() for name in names.split(","))):
        if name != RECORDED:
            found += _variants(name, run)
    taken: set[str] = set()
    for variant in found:
        if variant.name in taken:
            raise ConfigError(f"The policy {variant.name} is named twice; name each once.")
        if variant.scheduler.group_size != run.group_size:
            raise ConfigError(
                f"{variant.name} has another group size than the record, whose group size is "
                f"{run.group_size}; leave group_size out."
            )
        taken.add(variant.name)
    return found


def _variants(name: str, run: SchedulerConfig) -> list[Variant]:
    preset, colon, changes = name.partition(":")
    if preset == RECORDED:
        # The changes are parsed with any preset as the name, and applied to the run's settings.
        stand_in = next(iter(PRESETS))
        return [
            Variant(
                name=policy.name.replace(stand_in, RECORDED, 1),
                folder=policy.folder.replace(stand_in, RECORDED, 1),
                what="Its own settings but for what is named.",
                scheduler=policy.changed(run),
            )
            for policy in chosen(f"{stand_in}{colon}{changes}")
        ]
    defaults = SchedulerConfig()
    # What a preset may decide begins with its default, and everything else with the run's value.
    base = replace(
        run,
        max_staleness=defaults.max_staleness,
        over_provision=defaults.over_provision,
        pace=defaults.pace,
        refill=defaults.refill,
        dispatch=replace(run.dispatch, order=defaults.dispatch.order),
    )
    return [
        Variant(name=p.name, folder=p.folder, what=p.what, scheduler=p.apply(base))
        for p in chosen(name)
    ]
