"""Makes the short help of a command: the flags that most runs use, each in one line.

``--help`` prints this help. ``--help-all`` prints every flag with its whole text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

__all__ = ["asked_for_help", "everyday_help"]

_LONGEST = 20
"""Most characters of a default that is shown; the flag's text describes a longer one."""

Flags = Mapping[str, Mapping[str, str]]
"""Groups of flags by title. Each flag, as on the command line, has a text of one line."""


def asked_for_help(arguments: Sequence[str]) -> bool:
    """Whether the arguments ask for the short help."""
    return any(argument in ("-h", "--help") for argument in arguments)


def everyday_help(prog: str, what: str, flags: Flags, command: object) -> str:
    """The help text for `flags`, with the defaults of `command`.

    Raises:
        KeyError: if the command has no such flag.
    """
    defaults = _defaults(command)
    shown = {
        flag: f"--{flag}{_shown(defaults[flag])}" for group in flags.values() for flag in group
    }
    width = max(map(len, shown.values()))
    lines = [f"usage: {prog} [OPTIONS]", "", what]
    for title, group in flags.items():
        lines += ["", f"{title}:"]
        lines += [f"  {shown[flag]:<{width}}  {text}" for flag, text in group.items()]
    return "\n".join([*lines, "", f"{prog} --help-all lists every option."])


def _shown(default: Any) -> str:
    """The default as it stands after a flag: nothing for a switch, "..." if it is not set."""
    if default is False:
        return ""
    if isinstance(default, tuple):
        default = " ".join(map(str, cast("tuple[object, ...]", default)))
    unset = default is None or default == "" or len(str(default)) > _LONGEST
    return " ..." if unset else f" {default}"


def _defaults(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Every flag of a command, as the parser names it, with its default."""
    found: dict[str, Any] = {}
    for field in fields(settings):
        value, name = getattr(settings, field.name), field.name.replace("_", "-")
        if is_dataclass(value):
            # The flags of these parts have no prefix.
            flat = field.name in ("settings", "scheduler", "workload")
            found |= _defaults(value, prefix if flat else f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
