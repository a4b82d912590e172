"""The help of a command on one screen: the flags that most runs use, each in one line.

``--help`` prints this and ``--help-all`` every flag, with its whole text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

__all__ = ["asked_for_help", "everyday_help"]

_LONGEST = 20
"""Characters of a default; a longer one is left to the flag's text."""

Flags = Mapping[str, Mapping[str, str]]
"""By the title of a group: flags, as the command line writes them, with a line each."""


def asked_for_help(arguments: Sequence[str]) -> bool:
    """Is the short help wanted?"""
    return any(argument in ("-h", "--help") for argument in arguments)


def everyday_help(prog: str, what: str, flags: Flags, command: object) -> str:
    """The text for `flags`; their defaults are those of `command`.

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
    """The default behind a flag; a switch has none, and what is not set is left to the text."""
    if default is False:
        return ""
    if isinstance(default, tuple):
        default = " ".join(map(str, cast("tuple[object, ...]", default)))
    unset = default is None or default == "" or len(str(default)) > _LONGEST
    return " ..." if unset else f" {default}"


def _defaults(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Every flag of a command with its default, as the parser names them."""
    found: dict[str, Any] = {}
    for field in fields(settings):
        value, name = getattr(settings, field.name), field.name.replace("_", "-")
        if is_dataclass(value):
            # These parts' flags stand among the command's own.
            flat = field.name in ("settings", "scheduler", "workload")
            found |= _defaults(value, prefix if flat else f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
