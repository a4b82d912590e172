"""The policies that a command line names: presets, each perhaps with settings of its own.

``april`` is a preset as it is, ``april:over_provision=1.5`` is the preset with another ratio, and
``april:over_provision=1.25|1.5|2`` is three of them. A setting is named by its path in
:class:`SchedulerConfig`, as in ``pool:refill.until=0.25``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import product
from typing import Any

from aprilsched.config import SchedulerConfig
from aprilsched.errors import ConfigError
from aprilsched.presets import PRESETS
from aprilsched.runs.config_tree import changed, config_of, path_names, table_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A preset under a name, with settings that differ from it."""

    name: str
    preset: str
    changes: tuple[tuple[str, Any], ...] = ()
    """The paths of the settings that differ, with their values."""

    @property
    def what(self) -> str:
        """What the preset does, in one sentence."""
        return (PRESETS[self.preset].__doc__ or "").split("\n", 1)[0]

    @property
    def folder(self) -> str:
        """A name for the folder of the policy's run."""
        return self.name.replace(":", "_").replace("=", "-")

    def apply(self, config: SchedulerConfig) -> SchedulerConfig:
        """The preset of `config`, with the settings that differ.

        Raises:
            ConfigError: if a value is wrong, or if two settings contradict each other.
        """
        return self.changed(PRESETS[self.preset](config))

    def changed(self, config: SchedulerConfig) -> SchedulerConfig:
        """`config` with the settings that differ, without the preset.

        Raises:
            ConfigError: if a value is wrong, or if two settings contradict each other.
        """
        if not self.changes:
            return config
        table = changed(table_of(config), dict(self.changes))
        return replace(config_of(table), sampling=config.sampling)


def chosen(names: str) -> Sequence[Policy]:
    """The policies in a list with commas.

    Raises:
        ConfigError: if the list is empty, or if it names an unknown policy or one policy twice.
    """
    listed = [name.strip() for name in names.split(",") if name.strip()]
    if not listed:
        raise ConfigError(f"policy names nothing; choose among {', '.join(PRESETS)}.")
    policies = [policy for name in listed for policy in _expand(name)]
    taken: set[str] = set()
    for policy in policies:
        if policy.name in taken:
            raise ConfigError(f"The policy {policy.name} is named twice; name each once.")
        taken.add(policy.name)
    return policies


def _expand(name: str) -> list[Policy]:
    preset, *settings = name.split(":")
    if preset not in PRESETS:
        near = get_close_matches(preset, PRESETS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"{preset!r} is no policy; the nearest known one is {near}.")
    choices = [_choices(preset, setting) for setting in settings]
    return [
        Policy(
            name=":".join([preset, *(f"{key}={value}" for key, value in changes)]),
            preset=preset,
            changes=changes,
        )
        for changes in product(*choices)
    ]


def _choices(preset: str, setting: str) -> list[tuple[str, Any]]:
    path, equals, values = setting.partition("=")
    if not equals or not values:
        raise ConfigError(f"{setting!r} sets nothing; write {preset}:over_provision=1.5, say.")
    known = path_names()
    if path not in known:
        near = get_close_matches(path, known, n=1, cutoff=0.0)[0]
        raise ConfigError(f"{path!r} is no setting of a scheduler; the nearest one is {near}.")
    return [(path, _value(text)) for text in values.split("|")]


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


# --- variants ------------------------------------------------------------------------------------

# Finds the policies of a replay: the run's own settings, and presets applied to them.

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
