"""Parses the arguments of every command: lists in all their forms, and errors of one sentence.

A list may stand behind one flag or behind several, as ``--engine A B`` or as ``--engine A --engine
B``. tyro takes the last of several flags and says nothing of the others, and half of a fleet would
be idle. So the flags of a list are joined before tyro sees them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import is_dataclass
from functools import partial
from typing import Annotated, Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import tyro

from aprilsched.errors import ConfigError
from aprilsched.runs.settings import COMMAS

__all__ = ["flags_of_lists", "given_flags", "parsed"]

Command = TypeVar("Command")

_FLAT = ("settings", "scheduler", "workload", "gateway")
"""Fields of commands and settings whose own fields are flags without a prefix."""
_WORDS = {"INT": "a whole number", "FLOAT": "a number"}
_Lists: TypeAlias = dict[str, bool]


def parsed(
    kind: type[Command], arguments: Sequence[str], command: str, default: Command | None = None
) -> Command:
    """The command of class `kind` that the arguments ask for.

    ``--help``, or ``--help-all`` where a command has a shorter help too, prints the help of every
    flag and ends the process.

    Args:
        kind: the class of the command.
        arguments: the arguments behind the command's name.
        command: what stands before them, such as ``aprilsched run``.
        default: a command with the values of flags that are not given; its class has them if this
            is None.

    Raises:
        ConfigError: if the arguments cannot be used, in one sentence.
    """
    asked = ["--help" if argument == "--help-all" else argument for argument in arguments]
    joined = _joined(asked, dict(flags_of_lists(kind)))
    config = (tyro.conf.FlagCreatePairsOff,)
    parse = partial(tyro.cli, kind, args=joined, prog=command, config=config)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return parse() if default is None else parse(default=default)
    except SystemExit as end:
        if not end.code:
            raise
        raise ConfigError(_sentence(said.getvalue(), joined, command)) from None


def flags_of_lists(kind: Any, prefix: str = "--") -> Iterator[tuple[str, bool]]:
    """The flags of a command that are lists, with whether theirs is one text with commas."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        commas = get_origin(hint) is Annotated and COMMAS in get_args(hint)
        plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        flag = name.replace("_", "-")
        if is_dataclass(plain):
            yield from flags_of_lists(plain, prefix if name in _FLAT else f"{prefix}{flag}.")
        elif commas or get_origin(plain) is tuple:
            yield f"{prefix}{flag}", commas


def given_flags(arguments: Sequence[str]) -> set[str]:
    """The flags that are among the arguments, spelled as in the help."""
    return {_spelled(argument.partition("=")[0]) for argument in arguments}


def _joined(arguments: Sequence[str], lists: _Lists) -> list[str]:
    """The arguments with one flag for each list, behind everything else."""
    rest: list[str] = []
    found: dict[str, list[str]] = {}
    into = rest
    last = ""
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        flag = _spelled(flag)
        if flag in lists:
            into, last = found.setdefault(flag, []), flag
            if not equals:
                continue
            argument = value
        elif argument.startswith("--"):
            into = rest
        into.append(argument)
        if equals or (into is not rest and lists[last] and "," in argument):
            into = rest  # nothing more belongs to the list: a folder may follow
    for flag, values in found.items():
        # A list of nothing stays one, for the sentence that says so.
        rest += [flag, *([",".join(values)] if values and lists[flag] else values)]
    return rest


def _spelled(flag: str) -> str:
    """A flag with hyphens; tyro takes underscores too."""
    return flag.replace("_", "-") if flag.startswith("--") else flag


def _sentence(said: str, arguments: Sequence[str], command: str) -> str:
    """What is wrong, from what tyro says: a title, the problem, and what it is about, in a box if
    the terminal has the characters for one, with a rule after each."""
    parts = re.split("[─-]{5,}", re.sub("[│╭╮╰╯]", " ", said))
    problem, rest = (" ".join(part.split()) for part in [*parts, "", ""][1:3])
    named = re.search(r"--[\w.-]+", problem)
    flag = "" if named is None else named.group()
    kind, _, detail = problem.partition(": ")
    if kind == "Unrecognized options":
        near = re.search(r"Perhaps you meant: +(--[\w.-]+)", rest)
        hint = (
            f"{command} --help lists the options." if near is None else f"did you mean {near[1]}?"
        )
        return f"{flag or detail.split(', ')[0]} is no option of {command}; {hint}"
    if kind.startswith("Missing from"):
        return f"{detail.split()[0]} is missing; {command} --help says what it is."
    if kind.startswith("Missing value"):
        return f"{flag} has no value; give one."
    # A type in the help is INT, {None}|FLOAT or FLOAT|{auto,kv}; a list of them is in brackets.
    shown = re.search(rf"{re.escape(flag)} \[?(\S+)", rest)
    types = [] if shown is None else shown[1].split("|")
    choices = re.findall(r"'([^']*)'", problem.partition("Expected one of ")[2])
    wanted = [_WORDS.get(kind) or _one_of(kind.strip("{}").split(",")) for kind in types]
    wanted = [_one_of(choices)] if choices else [words for words in wanted if words != "None"]
    if not wanted:
        return problem
    return f"{flag} is {_value(flag, arguments)!r}; give {' or '.join(wanted)}."


def _one_of(choices: Sequence[str]) -> str:
    known = [choice for choice in choices if choice != "None"] or choices
    return known[0] if len(known) == 1 else f"{', '.join(known[:-1])} or {known[-1]}"


def _value(flag: str, arguments: Sequence[str]) -> str:
    """The values behind the last flag of this name, as they were given."""
    found: list[str] = []
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            found = ([value] if equals else []) if _spelled(name) == flag else found
        elif _spelled(name) == flag:
            found.append(argument)
    return " ".join(found)
