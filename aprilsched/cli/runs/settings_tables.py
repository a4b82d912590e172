"""SchedulerConfig as a table of plain values, for config.toml, flags and policies by name.

A table has the fields of the configuration as keys. A part is a table in it, and a policy is its
shorthand or a table with its settings::

    over_provision = 1.5
    refill = "wave"

    [refill]                # or the same rule with its own settings
    rule = "pool"
    together = 4

    [retries]
    attempts = 5

A *path* joins keys with dots: ``refill.together``, ``retries.attempts``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, cast

from aprilsched.config import SamplingParams, SchedulerConfig, Staleness
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.policies.kinds import REFILLS, STOPS

POLICIES: Mapping[str, Mapping[str, type[Any]]] = {
    "stop": STOPS,
    "refill": REFILLS,
    "max_staleness": {"": Staleness},
}
"""The settings that are policies, and the classes of each by the value of `rule` in its table. A
setting with a single class has no such names; its `rule` is an ordinary field."""

SHORT: Mapping[str, str] = {"max_staleness": "bound"}
"""The field of a policy that its shorthand sets; for the others the shorthand is the rule's
name."""


def table_of(config: SchedulerConfig) -> dict[str, Any]:
    """Return the whole configuration as a table, without values of None.

    The bound on staleness is resolved, and ``"none"`` if there is none.
    """
    policies = config.policies
    found = plain(config)
    found["stop"] = "groups" if policies.stop.name == "groups" else _named(policies.stop)
    found["refill"] = _named(policies.refill)
    found["straggler"] = config.straggler_name
    is_bounded = policies.staleness.bound is not None
    found["max_staleness"] = plain(policies.staleness) if is_bounded else "none"
    return found


def config_of(table: Mapping[str, Any], where: str = "") -> SchedulerConfig:
    """Return the configuration in a table, with defaults for missing settings.

    Args:
        table: settings by name.
        where: prefix of the path in an error about a name.

    Raises:
        ConfigError: if a name or a value is wrong.
    """
    return SchedulerConfig(**values_of(table, where))


def values_of(table: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return the values of the settings in a table, as :class:`SchedulerConfig` takes them.

    Raises:
        ConfigError: if a name is wrong, or a value within a table.
    """
    values: dict[str, Any] = {}
    defaults = SchedulerConfig()
    refuse_unknown(table, (field.name for field in fields(defaults)), where)
    for name, value in table.items():
        path, default = f"{where}{name}.", getattr(defaults, name)
        if name in POLICIES and isinstance(value, Mapping):
            values[name] = _policy(name, cast("Mapping[str, Any]", value), path)
        elif name in SHORT and value == "none":
            values[name] = None
        elif is_dataclass(default):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}{name} is {value!r}; give a table of its settings.")
            values[name] = _made(type(default), cast("Mapping[str, Any]", value), path)
        else:
            values[name] = value
    return values


def changed(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `table` with the values of `changes` at their paths.

    If the rule of a policy changes, the new rule starts from the defaults of its settings.
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
    """Return the shorthand of a policy in a table, without its further settings."""
    if not isinstance(value, Mapping):
        return value
    table = cast("Mapping[str, Any]", value)
    short = SHORT.get(name, "rule")
    return table[short] if short in table else table.get("rule")


def path_names() -> list[str]:
    """Return the paths of all settings except sampling."""
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
    """Return a dataclass as a table of plain values, without values of None."""
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
    """Return the table of a named policy, or only its name if it has no settings."""
    return {"rule": policy.name, **plain(policy)} if fields(policy) else policy.name


def _opened(name: str, value: Any) -> dict[str, Any]:
    """Return the shorthand of a policy as a table."""
    return {} if value in (None, "none") else {SHORT.get(name, "rule"): value}


def _policy(name: str, table: Mapping[str, Any], path: str) -> Any:
    """Return the policy in a table, or its shorthand if the table contains nothing else."""
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
