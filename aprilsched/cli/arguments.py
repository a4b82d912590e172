"""Parses the arguments of every command: a flag for each field of its settings.

A flag is the path of its setting, such as ``--retries.attempts``; the parts in `FLAT` are left out.
A setting that is a policy has a flag for its shorthand, and one for each setting of its rules:
``--refill pool --refill.together 4``. Only the flags on the command line have values, so a config
file keeps its other settings.

A list may follow one flag or several, as ``--engine A B`` or as ``--engine A --engine B``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import docstring_parser
import msgspec

from aprilsched.cli.runs.settings import COMMAS
from aprilsched.cli.runs.settings_tables import (
    POLICIES,
    SHORT,
    changed,
    config_of,
    plain,
    shorthand_of,
    table_of,
)
from aprilsched.config import SchedulerConfig
from aprilsched.errors import ConfigError

Command = TypeVar("Command")
Values = Mapping[str, Any]
"""The values on the command line, by the paths of fields in the command."""

POSITIONAL = "positional"
"""Marks a field of a command that has no flag."""
FLAT = ("settings", "scheduler", "workload", "gateway")
"""Fields of commands and settings whose own fields are flags without a prefix."""


def parsed(kind: type[Command], arguments: Sequence[str], prog: str, everyday: str = "") -> Command:
    """Return the command of class `kind` for the arguments; see :func:`values_of`.

    Args:
        kind: the class of the command.
        arguments: the arguments after the command's name.
        prog: what precedes them, such as ``aprilsched run``.
        everyday: the flags that the short help shows, with spaces; all if it is empty.

    Raises:
        ConfigError: if the arguments cannot be used, in one sentence.
    """
    return made(kind, values_of(kind, arguments, prog, everyday))


def values_of(kind: type[Any], arguments: Sequence[str], prog: str, everyday: str = "") -> Values:
    """Return the values of the arguments.

    ``--help`` and ``--help-all`` print the help and exit.

    Raises:
        ConfigError: if an argument is unknown or has a wrong value.
    """
    is_short = bool(everyday) and "--help-all" not in arguments
    parser = _Parser(
        prog=prog, add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.description = kind.__doc__
    parser.add_argument("-h", "--help", action="help", help="show this help")
    if everyday:
        parser.usage = f"{prog} [OPTIONS]"
        parser.add_argument("--help-all", action="help", help="show every option")
    wants_help = not {"-h", "--help", "--help-all"}.isdisjoint(arguments)
    for owner, flags in _sections(kind):
        title = None if owner is kind else (owner.__doc__ or "").partition(".\n")[0].rstrip(".")
        group = parser.add_argument_group(title)
        texts = field_texts(owner) if wants_help else {}
        for flag in flags:
            text = texts.get(flag.name, "")
            if is_short:
                is_everyday = flag_of(flag.path).removeprefix("--") in everyday.split()
                text = text.partition(". ")[0] if is_everyday else argparse.SUPPRESS
            flag.add(group, text)
    found, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [flag_of(flag.path) for _, flags in _sections(kind) for flag in flags]
        near = get_close_matches(unknown[0], known, 1)
        hint = f"did you mean {near[0]}?" if near else f"{prog} --help lists the options."
        raise ConfigError(f"{unknown[0]} is not an option of {prog}; {hint}")
    return vars(found)


def flag_of(path: str) -> str:
    """Return the flag of a field at `path` of a command."""
    return "--" + ".".join(p for p in path.split(".") if p not in FLAT).replace("_", "-")


def made(start: Any, values: Values) -> Any:
    """Return a command or settings with other values; errors name the flags of settings.

    Args:
        start: the settings, or their class for its defaults.
        values: the other values by path.

    Raises:
        ConfigError: if a value is wrong, or if two values contradict each other.
    """
    try:
        return _made(start, values)
    except ConfigError as error:
        kind = start if isinstance(start, type) else type(start)
        raise ConfigError(_with_flags(kind, str(error))) from error


def _with_flags(kind: type[Any], text: str) -> str:
    """Return an error with the flags of a command instead of the names of settings."""
    for _, flags in _sections(kind):
        for flag in (flag_of(each.path) for each in flags):
            name = flag.removeprefix("--").replace("-", "_")
            # A plain word is the name of a setting at the start alone.
            start = r"(?<![\w.-])" if re.search("[_.]", name) else "^"
            name += rf"(\.{SHORT.get(name)})?(?![\w-]|\.\w)"
            text = re.sub(start + name, flag, text)
    return text


def _made(start: Any, values: Values) -> Any:
    if isinstance(start, SchedulerConfig):
        return _config(start, values)
    inner: dict[str, dict[str, Any]] = {}
    changes: dict[str, Any] = {}
    for path, value in values.items():
        name, _, rest = path.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            changes[name] = value
    own = {f.name: f for f in fields(start)}
    for name, parts in inner.items():
        part = _default(own[name]) if isinstance(start, type) else getattr(start, name)
        changes[name] = _made(part, parts)
    if not isinstance(start, type):
        return replace(start, **changes)
    for name, each in own.items():
        if name not in changes and _default(each) is MISSING:
            raise ConfigError(f"{flag_of(name)} is missing.")
    return start(**changes)


def _config(config: SchedulerConfig, values: Values) -> SchedulerConfig:
    table = table_of(config)
    changes: dict[str, Any] = {}
    for path, value in values.items():
        now = table.get(path)
        if path not in POLICIES:
            changes[path] = plain(value)
        elif value != shorthand_of(path, now):
            # A new bound keeps the previous rule.
            keeps = "" in POLICIES[path] and value is not None and now is not None
            changes[f"{path}.{SHORT[path]}" if keeps else path] = value
    return config_of(changed(table, changes))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(f"{message}; {self.prog} --help shows the options.")


_UNSHOWN = (None, MISSING, "", (), False)
"""Defaults that the help does not show."""


@dataclass(frozen=True)
class _Flag:
    path: str
    hint: Any
    default: Any

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def is_policy(self) -> bool:
        return "scheduler." in self.path and self.name in POLICIES

    def add(self, group: Any, text: str) -> None:
        """Add the flag to a group of a parser."""
        marks = get_args(self.hint) if get_origin(self.hint) is Annotated else ()
        kinds = _kinds(self.hint)
        if self.default not in _UNSHOWN and text is not argparse.SUPPRESS:
            text = f"{text} (default: {self.default})"
        options: dict[str, Any] = {"help": text.replace("%", "%%")}
        if kinds == [bool]:
            # A flag can switch off a setting that a config file switches on.
            inner = "." in self.path
            options["action"] = argparse.BooleanOptionalAction if inner else "store_true"
        else:
            is_list = get_origin(kinds[0]) is tuple
            options["type"] = _Reader(_kinds(get_args(kinds[0])[0]) if is_list else kinds)
            options["metavar"] = options["type"].__name__
            if COMMAS in marks:
                options |= {"nargs": "+", "action": _JoinAction}
            elif is_list:
                options |= {"nargs": "*" if POSITIONAL in marks else "+", "action": _TupleAction}
        if POSITIONAL in marks:
            group.add_argument(self.path, **options | {"metavar": self.path.upper()})
        else:
            group.add_argument(flag_of(self.path), dest=self.path, **options)


class _TupleAction(argparse.Action):
    """Makes one tuple of the values of all flags of a list."""

    def __call__(self, _: Any, found: argparse.Namespace, values: Any, *__: Any) -> None:
        setattr(found, self.dest, (*getattr(found, self.dest, ()), *values))


class _JoinAction(argparse.Action):
    """Joins the values of all flags of a list with commas."""

    def __call__(self, _: Any, found: argparse.Namespace, values: Any, *__: Any) -> None:
        before = [getattr(found, self.dest)] if hasattr(found, self.dest) else []
        setattr(found, self.dest, ",".join([*before, *values]))


class _Reader:
    """Reads a text as the first of `kinds` that fits; argparse names it in its errors."""

    def __init__(self, kinds: Sequence[Any]) -> None:
        self._kinds = sorted(kinds, key=lambda kind: kind in (str, Path))
        names = ["|".join(get_args(k)) if get_origin(k) is Literal else k.__name__ for k in kinds]
        self.__name__ = " or ".join(name for name in names if name != "NoneType")

    def __call__(self, text: str) -> Any:
        for kind in self._kinds:
            if kind is NoneType and text.lower() == "none":
                return None
            try:
                if kind is dict:
                    return msgspec.json.decode(text, type=dict[str, Any])
                return msgspec.convert(
                    text, kind, strict=False, dec_hook=lambda _, given: Path(given)
                )
            except msgspec.DecodeError:
                continue
        raise ValueError


def _kinds(hint: Any) -> list[Any]:
    """Return those types of a setting that a flag can express."""
    if get_origin(hint) is Annotated:
        return _kinds(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [kind for part in get_args(hint) for kind in _kinds(part)]
    if get_origin(hint) is Mapping:
        return [dict]
    simple = (bool, int, float, str, Path, NoneType)
    return [hint] if hint in simple or get_origin(hint) in (Literal, tuple) else []


def _sections(
    kind: type[Any], path: str = "", start: object = None
) -> Iterator[tuple[type[Any], list[_Flag]]]:
    """Yield the flags of a command and of its parts, by the class that defines the fields."""
    hints, own, parts = get_type_hints(kind, include_extras=True), list[_Flag](), list[_Flag]()
    for each in fields(kind):
        default = _default(each) if start is None else getattr(start, each.name)
        flag = _Flag(f"{path}{each.name}", hints[each.name], default)
        if is_dataclass(default) or flag.is_policy:
            parts.append(flag)
        if _kinds(flag.hint):
            own.append(flag)
    yield kind, own
    for part in parts:
        if not part.is_policy:
            yield from _sections(part.default.__class__, f"{part.path}.", part.default)
            continue
        known = {f"{part.path}.{SHORT.get(part.name)}"}
        for rule in POLICIES[part.name].values():
            ((_, flags),) = _sections(rule, f"{part.path}.")
            yield rule, [flag for flag in flags if flag.path not in known]
            known |= {flag.path for flag in flags}


def _default(each: Field[Any]) -> Any:
    if each.default_factory is not MISSING:
        return each.default_factory()
    return each.default


def field_texts(kind: type[Any]) -> dict[str, str]:
    """Return the docstring of every field of a class, including inherited ones."""
    return {
        each.arg_name: " ".join((each.description or "").split())
        for base in reversed(kind.__mro__[:-1])
        if base.__module__.startswith("aprilsched.")
        for each in docstring_parser.parse_from_object(base).params
    }
