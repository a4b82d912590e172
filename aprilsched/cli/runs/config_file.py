"""RunSettings as TOML (a run's config.toml is also what ``--config`` takes), and the policies that
a command line names.

Settings that are not set (None) are left out, since TOML has no word for them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast, get_type_hints

import msgspec

from aprilsched.cli.runs.settings import RunSettings
from aprilsched.config import SamplingParams, SchedulerConfig, Staleness
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.policies.kinds import REFILLS, STOPS
from aprilsched.kernel.values.checks import nearest
from aprilsched.kernel.values.files import read_text
from aprilsched.planning.presets import PRESETS

T = TypeVar("T")


def as_toml(settings: RunSettings) -> dict[str, Any]:
    """The settings as nested mappings of what TOML can hold, without what is not set. Sampling is
    left out where the built-in workload has its own."""
    scheduler = table_of(settings.scheduler)
    if settings.prompts is None:
        del scheduler["sampling"]
    return {**plain(settings), "scheduler": scheduler}


def read_settings(path: Path) -> RunSettings:
    """The settings in the file at `path`; what it does not name has its default.

    Raises:
        ConfigError: if the file cannot be read, names something unknown or has a wrong value.
    """
    return read_table(path, _settings)


def read_table(path: Path, made: Callable[[Mapping[str, Any]], T]) -> T:
    """What is `made` of the table in the TOML file at `path`.

    Raises:
        ConfigError: if the file cannot be read, or if nothing can be made of it.
    """
    try:
        content = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"The config file {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config file {path} is no TOML: {error}.") from error
    try:
        return made(content)
    except ConfigError as error:
        raise ConfigError(f"The config file {path} does not fit: {error}") from error


def value_as(hint: Any, name: str, value: Any) -> Any:
    """The value of a setting in a file as the type that the setting has.

    Raises:
        ConfigError: if it is of another type.
    """
    try:
        return msgspec.convert(value, hint, dec_hook=lambda kind, given: kind(given))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name} has a wrong value: {error}.") from error


def _settings(content: Mapping[str, Any]) -> RunSettings:
    defaults, hints = RunSettings(), get_type_hints(RunSettings)
    known = [field.name for field in fields(RunSettings)]
    for part in ("scheduler", "workload", "sim"):
        inner = {field.name for field in fields(getattr(defaults, part))}
        for key in content:
            if key in inner and key not in known:
                raise ConfigError(f"{key} is a setting of {part}; write it below [{part}].")
    refuse_unknown(content, known, "")
    values: dict[str, Any] = {}
    for name, value in content.items():
        if name == "scheduler":
            if not isinstance(value, Mapping):
                raise ConfigError(f"scheduler is {value!r}; give a table of its settings.")
            values[name] = config_of(cast("Mapping[str, Any]", value), "scheduler.")
            continue
        part = getattr(defaults, name)
        if is_dataclass(part) and isinstance(value, Mapping):
            known = (field.name for field in fields(part))
            refuse_unknown(cast("Mapping[str, Any]", value), known, f"{name}.")
        values[name] = value_as(hints[name], name, value)
    settings = RunSettings(**values)
    given = content.get("scheduler", {}).get("sampling", {})
    if "max_new_tokens" in given and settings.prompts is settings.workload.cap is None:
        # The longest response is also that of the built-in workload, if there are no prompts.
        cap = settings.scheduler.sampling.max_new_tokens
        settings = replace(settings, workload=replace(settings.workload, cap=cap))
    return settings


# --- tables of settings ---------------------------------------------------------------------------

# SchedulerConfig as a table of plain values, for config.toml, flags and policies by name.
#
# A table has the fields of the configuration as keys. A part is a table in it, and a policy is its
# shorthand or a table with its settings::
#
#     over_provision = 1.5
#     refill = "wave"
#
#     [refill]                # or the same rule with its own settings
#     rule = "pool"
#     together = 4
#
#     [retries]
#     attempts = 5
#
# A *path* joins keys with dots: ``refill.together``, ``retries.attempts``.

POLICIES: Mapping[str, Mapping[str, type[Any]]] = {
    "stop": STOPS,
    "refill": REFILLS,
    "max_staleness": {"": Staleness},
}
"""The settings that are policies, with the classes of each by the name in its table's `rule`. The
setting with one class has no such name; its `rule` is a field like others."""

SHORT: Mapping[str, str] = {"max_staleness": "bound"}
"""The field of a policy that its shorthand sets; for the others the shorthand is the rule's
name."""


def table_of(config: SchedulerConfig) -> dict[str, Any]:
    """The whole configuration as a table; what is None is left out."""
    policies = config.policies
    found = plain(config)
    found["stop"] = "groups" if policies.stop.name == "groups" else _named(policies.stop)
    found["refill"] = _named(policies.refill)
    if policies.staleness.bound is not None:
        found["max_staleness"] = plain(policies.staleness)
    else:
        found.pop("max_staleness", None)
    return found


def config_of(table: Mapping[str, Any], where: str = "") -> SchedulerConfig:
    """The configuration in a table; what the table does not have is at its default.

    Args:
        table: settings by name.
        where: what stands before a path in an error about a name.

    Raises:
        ConfigError: if a name or a value is wrong.
    """
    values: dict[str, Any] = {}
    defaults = SchedulerConfig()
    refuse_unknown(table, (field.name for field in fields(defaults)), where)
    for name, value in table.items():
        path, default = f"{where}{name}.", getattr(defaults, name)
        if name in POLICIES and isinstance(value, Mapping):
            values[name] = _policy(name, cast("Mapping[str, Any]", value), path)
        elif is_dataclass(default):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}{name} is {value!r}; give a table of its settings.")
            values[name] = _made(type(default), cast("Mapping[str, Any]", value), path)
        else:
            values[name] = value
    return SchedulerConfig(**values)


def changed(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A table with other values at some paths.

    Another rule of a policy begins with the defaults of its own settings.
    """
    found = dict(table)
    for path in sorted(changes, key=lambda path: path.count(".")):
        name, _, inner = path.partition(".")
        if not inner:
            found[name] = changes[path]
            continue
        value = found.get(name)
        if name in POLICIES and not isinstance(value, Mapping):
            value = _opened(name, value)
        found[name] = {**(value or {}), inner: changes[path]}
    return found


def shorthand_of(name: str, value: Any) -> Any:
    """The shorthand of a policy in a table, without the settings of its own."""
    if not isinstance(value, Mapping):
        return value
    table = cast("Mapping[str, Any]", value)
    short = SHORT.get(name, "rule")
    return table[short] if short in table else table.get("rule")


def path_names() -> list[str]:
    """The paths of all settings, but those of sampling."""
    found: list[str] = []
    for field in fields(SchedulerConfig):
        default = None if field.default_factory is MISSING else field.default_factory()
        if field.name in POLICIES:
            found.append(field.name)
            inner = {own.name for kind in POLICIES[field.name].values() for own in fields(kind)}
            found += [f"{field.name}.{name}" for name in sorted(inner)]
        elif default is None:
            found.append(field.name)
        elif not isinstance(default, SamplingParams):
            found += [f"{field.name}.{own.name}" for own in fields(default)]
    return found


def plain(value: Any) -> Any:
    """A dataclass as a table, and what it holds as plain values; what is None is left out."""
    if is_dataclass(value):
        pairs = ((field.name, getattr(value, field.name)) for field in fields(value))
        return {name: plain(part) for name, part in pairs if part is not None and part != {}}
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (tuple, list)):
        return [plain(part) for part in cast("list[Any]", value)]
    return value


def refuse_unknown(table: Iterable[str], known: Iterable[str], where: str) -> None:
    """Refuse a table with a key that is not known.

    Raises:
        ConfigError: naming the nearest known key.
    """
    names = list(known)
    for key in table:
        if key not in names:
            near = get_close_matches(key, names, n=1, cutoff=0.0)[0]
            raise ConfigError(f"unknown key {where}{key}; the nearest known one is {where}{near}.")


def _named(policy: Any) -> Any:
    """A policy with a name: its table, or its name alone if it has no settings."""
    return {"rule": policy.name, **plain(policy)} if fields(policy) else policy.name


def _opened(name: str, value: Any) -> dict[str, Any]:
    """The shorthand of a policy as a table."""
    return {} if value is None else {SHORT.get(name, "rule"): value}


def _policy(name: str, table: Mapping[str, Any], path: str) -> Any:
    """The policy in a table, or its shorthand if the table has nothing but that."""
    kinds = POLICIES[name]
    if "" in kinds:
        return _made(kinds[""], table, path)
    own = dict(table)
    rule = own.pop("rule", None)
    if rule is None:
        raise ConfigError(f"{path}rule is missing; choose one of {', '.join(kinds)}.")
    if not own:
        return rule
    if not isinstance(rule, str) or rule not in kinds:
        raise ConfigError(f"{path}rule is {rule!r}; choose one of {', '.join(kinds)}.")
    known = [field.name for field in fields(kinds[rule])]
    for key in own:
        others = [
            other for other, kind in kinds.items() if key in (field.name for field in fields(kind))
        ]
        if key not in known and others:
            raise ConfigError(
                f'{path}{key} is a setting of {" and ".join(others)}, and {name} is "{rule}"; set '
                f"{name} too."
            )
    return _made(kinds[rule], own, path)


def _made(kind: type[Any], table: Mapping[str, Any], path: str) -> Any:
    refuse_unknown(table, (field.name for field in fields(kind)), path)
    for field in fields(kind):
        if field.name not in table and field.default is field.default_factory is MISSING:
            raise ConfigError(f"{path}{field.name} is missing; set it too.")
    return kind(**table)


# --- policies that a command line names -----------------------------------------------------------

# The policies that a command line names: presets, each perhaps with settings of its own.
#
# ``april`` is a preset as it is, ``april:over_provision=1.5`` is the preset with another ratio, and
# ``april:over_provision=1.25|1.5|2`` is three of them. A setting is named by its path in
# :class:`SchedulerConfig`, as in ``pool:refill.until=0.25``.

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
        """What the preset does, in one sentence."""
        return (self.preset.__doc__ or "").split("\n", 1)[0]

    @property
    def folder(self) -> str:
        """A name for the folder of the policy's run."""
        return self.name.replace(":", "_").replace("=", "-")

    def apply(self, config: SchedulerConfig) -> SchedulerConfig:
        """The preset of `config`, with the settings that differ.

        Raises:
            ConfigError: if a value is wrong, or if two settings contradict each other.
        """
        config = self.preset(config)
        if not self.changes:
            return config
        table = changed(table_of(config), dict(self.changes))
        return replace(config_of(table), sampling=config.sampling)


def chosen(names: str, presets: Mapping[str, Preset] = PRESETS) -> Sequence[Policy]:
    """The policies in a list with commas.

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


def _expand(name: str, presets: Mapping[str, Preset]) -> list[Policy]:
    preset, *settings = name.split(":")
    if preset not in presets:
        near = nearest(preset, presets)
        raise ConfigError(f"{preset!r} is no policy; the nearest known one is {near}.")
    choices = [_choices(preset, setting) for setting in settings]
    return [
        Policy(
            name=":".join([preset, *(f"{key}={value}" for key, value in changes)]),
            preset=presets[preset],
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
