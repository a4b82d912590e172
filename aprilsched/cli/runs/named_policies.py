"""The policies named on a command line: presets, optionally with changed settings, and arms.

``april`` is an unchanged preset, ``april:over_provision=1.5`` is the preset with another ratio, and
``april:over_provision=1.25|1.5|2`` is three of them, shown as "april@1.25" and so on. A setting is
named by its path in :class:`SchedulerConfig`, as in ``pool:refill.until=0.25``.

An arm is a refill rule or a delivery, or both, with a ratio: ``wave@2``, ``pool@1.75``,
``samples:4@1.5`` (single samples with 4 siblings, from waves), ``samples:4+pool@1.5`` and
``samples:4@auto``. Settings follow here too: ``samples:4@1.5:pace=asynchronous``. A function of
yours may deliver samples too: ``samples:4+my_rules.mine@1.5``.

A name with a dot is an import path, ``my_rules.mine``: a function that changes a configuration as a
preset does, and takes settings and ratios as well: ``my_rules.mine@1.5|2``. It is imported only
from a command line and never from a file of settings.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module  # noqa: TID251 (a name of the command line)
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias, cast

from aprilsched.cli.runs.settings_tables import changed, path_names, table_of, values_of
from aprilsched.config import SchedulerConfig
from aprilsched.errors import AprilschedError, ConfigError
from aprilsched.kernel.core.policies.kinds import REFILLS
from aprilsched.kernel.values.checks import nearest, typed
from aprilsched.planning.presets import PRESETS
from aprilsched.simulation.virtual import checked_config

Preset: TypeAlias = Callable[[SchedulerConfig], SchedulerConfig]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A preset under a name, with settings that differ from it."""

    name: str
    preset: Preset
    changes: tuple[tuple[str, Any], ...] = ()
    """The paths of the settings that differ, with their values."""

    @property
    def what(self) -> str:
        """Return what an unchanged preset does, in one sentence; empty for other policies."""
        return "" if self.changes else (self.preset.__doc__ or "").split("\n", 1)[0]

    @property
    def folder(self) -> str:
        """Return a name for the folder of the policy's run."""
        return re.sub("[:@+ ]", "_", self.name).replace("=", "-")

    def apply(self, config: SchedulerConfig) -> SchedulerConfig:
        """Return the preset of `config`, with the changed settings.

        Raises:
            ConfigError: if a value is wrong, or if two settings contradict each other.
        """
        config = self.preset(config)
        checked_config(config)
        if not self.changes:
            return config
        table = changed(table_of(config), dict(self.changes))
        names = {path.partition(".")[0] for path, _ in self.changes}
        # Only these settings pass through the table, which cannot express the user's own rules.
        return replace(config, **values_of({name: table[name] for name in names}))


def chosen(names: str, presets: Mapping[str, Preset] = PRESETS) -> Sequence[Policy]:
    """Return the policies in a comma-separated list.

    Raises:
        ConfigError: if the list is empty, or if it names an unknown policy or one policy twice.
    """
    listed = [name.strip() for name in names.split(",") if name.strip()]
    if not listed:
        raise ConfigError(f"policy names nothing; choose among {', '.join(presets)}.")
    policies: dict[str, Policy] = {}
    for name in listed:
        for policy in _expand(name, presets):
            if policy.name in policies:
                raise ConfigError(f"The policy {policy.name} is named twice; name each once.")
            policies[policy.name] = policy
    return list(policies.values())


def delivery(text: str) -> dict[str, Any]:
    """Return the settings that "groups", "samples" or "samples:4" (4 siblings) stand for.

    Raises:
        ConfigError: if `text` is something else.
    """
    if not re.fullmatch(r"groups|samples(:\d{1,9})?", text):
        raise ConfigError(f"delivery must be groups, samples or samples:SIBLINGS, got {text!r}.")
    unit, _, siblings = text.partition(":")
    return {"delivery": unit} | ({"siblings": int(siblings)} if siblings else {})


def _expand(name: str, presets: Mapping[str, Preset]) -> list[Policy]:
    what, at, rest = name.partition("@")
    if at:
        ratios, *settings = rest.split(":")
        settings = [f"over_provision={ratios}", *settings]
    else:
        what, *settings = name.split(":")
    preset, arm = presets.get(what), tuple[tuple[str, Any], ...]()
    if "." in what:
        unit, plus, path = what.rpartition("+")
        arm = tuple(delivery(unit).items()) if plus else ()
        preset = _imported(path)
    elif at and preset is None:
        preset, arm = replace, tuple(_arm(what).items())
    if preset is None:
        near = nearest(what, [*presets, *(f"{rule}@2" for rule in REFILLS), "samples:4@2"])
        raise ConfigError(f"{what!r} is no policy; the nearest known one is {near}.")
    policies: list[Policy] = []
    for changes in product(*(_choices(what, setting) for setting in settings)):
        ratio = dict(changes).get("over_provision")
        shown = [f"{key}={value}" for key, value in changes if key != "over_provision"]
        automatic = preset is replace and ratio == "auto"
        policies.append(
            Policy(
                name=" ".join([what if ratio is None else f"{what}@{ratio}", *shown]),
                preset=PRESETS["auto"] if automatic else preset,
                changes=arm + changes,
            )
        )
    return policies


def _arm(what: str) -> dict[str, Any]:
    changes: dict[str, Any] = {"refill": "wave"}
    for part in what.split("+"):
        changes |= {"refill": part} if part in REFILLS else delivery(part)
    return changes


def _imported(path: str) -> Preset:
    """Return the function at an import path; modules in the working directory count too."""
    module, _, name = path.rpartition(".")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = getattr(import_module(module), name)
    except Exception as error:
        raise ConfigError(
            f"{path} must be the import path of a function, got {type(error).__name__}: {error}."
        ) from error
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise ConfigError(f"{path} must be the import path of a function, got {typed(found)}.")

    def preset(config: SchedulerConfig) -> SchedulerConfig:
        try:
            return cast("SchedulerConfig", found(config))
        except AprilschedError:
            raise
        except Exception as error:
            raise ConfigError(f"{path} raised {type(error).__name__}: {error}.") from error

    return preset


def _choices(preset: str, setting: str) -> list[tuple[str, Any]]:
    path, equals, values = setting.partition("=")
    if not equals or not values:
        raise ConfigError(
            f"{setting!r} sets nothing; write {preset}:over_provision=1.5, for example."
        )
    known = path_names()
    if path not in known:
        near = nearest(path, known)
        raise ConfigError(f"{path!r} is no setting of a scheduler; the nearest one is {near}.")
    return [(path, _value(text)) for text in values.split("|")]


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)
