"""The flags of a scheduler's settings, made from the fields of SchedulerConfig.

A flag is the path of its setting: ``--batch-groups``, ``--retries.attempts``. A setting that is a
policy has a flag for its shorthand, and one for each setting of its rules: ``--refill pool
--refill.together 4``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, Union, get_args, get_type_hints

import tyro

from aprilsched.cli.field_texts import field_texts
from aprilsched.config import SamplingParams, SchedulerConfig
from aprilsched.runs.config_tree import (
    POLICIES,
    SHORT,
    changed,
    config_of,
    plain,
    shorthand_of,
    table_of,
)

__all__ = ["SchedulerFlags", "config_of_flags", "flags_of"]

_SIMPLE = (bool, int, float, str, NoneType)

Flag: TypeAlias = tuple[str, Any, Any]
"""A field of the flags: its name, type and default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingFlags(SamplingParams):
    """The fields of SamplingParams, which are checked when all flags are known."""

    def __post_init__(self) -> None:
        pass


def _flags() -> list[Flag]:
    """A field for each flag that is not a field of the configuration."""
    hints = get_type_hints(SchedulerConfig, include_extras=True)
    found: list[Flag] = [("sampling", SamplingFlags, field(default_factory=SamplingFlags))]
    for name, kinds in POLICIES.items():
        default = next(own for own in fields(SchedulerConfig) if own.name == name).default
        found.append((name, _shorthand(hints[name]), field(default=default)))
        flag = name.replace("_", "-")
        inner = {own.name: kind for kind in kinds.values() for own in fields(kind)}
        for own, kind in inner.items():
            if own == SHORT.get(name):
                continue
            rules = ", ".join(rule for rule in kinds if own in _names(kinds[rule]) and rule)
            text = field_texts(kind)[own] + (f" For {rules}." if rules else "")
            shown = tyro.conf.arg(name=f"{flag}.{own.replace('_', '-')}", help=text)
            hint = get_type_hints(kind, include_extras=True)[own]
            optional = Annotated[Union[hint, None], shown]  # noqa: UP007
            found.append((f"{name}__{own}", optional, field(default=None)))
    return found


def _names(kind: type[Any]) -> list[str]:
    return [own.name for own in fields(kind)]


def _shorthand(hint: Any) -> Any:
    """The type of a policy's setting without the policy itself."""
    parts = [part for part in get_args(hint) if not isinstance(part, type) or part in _SIMPLE]
    return Union[tuple(parts)]  # noqa: UP007


if TYPE_CHECKING:
    SchedulerFlags: TypeAlias = SchedulerConfig
else:
    # The flags check nothing: what a file and flags give together is checked as a whole.
    SchedulerFlags = make_dataclass(
        "SchedulerFlags",
        _flags(),
        bases=(SchedulerConfig,),
        namespace={
            "__doc__": "Settings of the scheduler.",
            "__module__": __name__,
            "__post_init__": lambda self: None,
        },
        frozen=True,
        kw_only=True,
    )


def flags_of(config: SchedulerConfig) -> SchedulerFlags:
    """The flags with what a configuration has as their defaults.

    The settings of a rule have no default: what is not given is what the configuration has for the
    same rule, or the rule's own default.
    """
    table = table_of(config)
    values = _values(config)
    values |= {name: shorthand_of(name, table.get(name)) for name in POLICIES}
    values["sampling"] = SamplingFlags(**_values(config.sampling))
    return SchedulerFlags(**values)


def config_of_flags(flags: SchedulerFlags, config: SchedulerConfig) -> SchedulerConfig:
    """The configuration with the flags.

    Args:
        flags: flags that began as :func:`flags_of` the configuration.
        config: the configuration to change.

    Raises:
        ConfigError: if a value is wrong, or if two values contradict each other.
    """
    table = table_of(config)
    changes: dict[str, Any] = {}
    for own in fields(flags):
        name, _, inner = own.name.partition("__")
        value = getattr(flags, own.name)
        if inner:
            if value is not None:
                changes[f"{name}.{inner}"] = value
        elif name not in POLICIES:
            table[name] = plain(value)
        elif value != shorthand_of(name, table.get(name)):
            keeps = "" in POLICIES[name] and value is not None and table.get(name) is not None
            changes[f"{name}.{SHORT[name]}" if keeps else name] = value
    table["sampling"] = _values(flags.sampling)
    return config_of(changed(table, changes))


def _values(settings: Any) -> dict[str, Any]:
    return {own.name: getattr(settings, own.name) for own in fields(settings)}
