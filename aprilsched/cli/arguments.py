"""Parses the arguments of every command: lists in all their forms, and errors of one sentence.

A list may stand behind one flag or behind several, as ``--engine A B`` or as ``--engine A --engine
B``. tyro takes the last of several flags and says nothing of the others, and half of a fleet would
be idle. So the flags of a list are joined before tyro sees them.
"""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import partial
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro

from aprilsched.config import SamplingParams, SchedulerConfig
from aprilsched.errors import ConfigError
from aprilsched.runs.config_file import (
    POLICIES,
    SHORT,
    changed,
    config_of,
    plain,
    shorthand_of,
    table_of,
)
from aprilsched.runs.settings import COMMAS

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


def value_of(flag: str, arguments: Sequence[str], what: str) -> str | None:
    """The last value of a flag, which is the one that the parser takes; None without the flag.

    Args:
        flag: the flag, which is needed before all are parsed.
        arguments: the arguments of the command.
        what: what the flag names, for the error.

    Raises:
        ConfigError: if nothing stands behind it.
    """
    found = None
    for argument, after in itertools.zip_longest(arguments, arguments[1:]):
        if argument.startswith(f"{flag}="):
            found = argument.removeprefix(f"{flag}=")
        elif argument == flag:
            found = after
            if after is None:
                raise ConfigError(f"{flag} names no {what}.")
    return found


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
    if re.fullmatch(r"Error parsing \w+", kind):
        return detail  # a sentence of the settings themselves, which check what they are given
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


# --- everyday help -------------------------------------------------------------------------------

# Makes the short help of a command: the flags that most runs use, each in one line.
#
# ``--help`` prints this help. ``--help-all`` prints every flag with its whole text.

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
    for each in fields(settings):
        value, name = getattr(settings, each.name), each.name.replace("_", "-")
        if is_dataclass(value):
            # The flags of these parts have no prefix.
            flat = each.name in ("settings", "scheduler", "workload")
            found |= _defaults(value, prefix if flat else f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


# --- field texts ---------------------------------------------------------------------------------

# Reads what the source says of the fields of a class, for the flags and for the reference.


def field_texts(kind: type[Any]) -> dict[str, str]:
    """The text of every field of a class; the fields of its bases come first."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("aprilsched."):
            texts |= _own_texts(base)
    return texts


def _own_texts(kind: type[Any]) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    body = next(found for found in ast.walk(tree) if isinstance(found, ast.ClassDef))
    texts: dict[str, str] = {}
    name = ""
    for statement in body.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)):
                pass
            case ast.Expr(value=ast.Constant(value=str(text))) if name:
                texts[name] = inspect.cleandoc(text)
                name = ""
            case _:
                name = ""
    return {**_attributes(inspect.getdoc(kind) or ""), **texts}


def _attributes(doc: str) -> dict[str, str]:
    """The entries of an "Attributes:" section."""
    texts: dict[str, str] = {}
    found = re.search(r"^(?:Attributes|Args):\n((?:    .*\n?|\n)+)", doc + "\n", flags=re.MULTILINE)
    if found is None:
        return texts
    for entry in re.split(r"^    (?=\w)", found.group(1), flags=re.MULTILINE)[1:]:
        names, _, text = entry.partition(":")
        for name in names.split(","):
            texts[name.strip()] = " ".join(text.split())
    return texts


# --- scheduler flags -----------------------------------------------------------------------------

# The flags of a scheduler's settings, made from the fields of SchedulerConfig.
#
# A flag is the path of its setting: ``--batch-groups``, ``--retries.attempts``. A setting that is
# a policy has a flag for its shorthand, and one for each setting of its rules: ``--refill pool
# --refill.together 4``.

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
    found: list[Flag] = [
        ("sampling", SamplingFlags, field(default_factory=SamplingFlags)),
        ("companions", tuple[str, ...], field(default=())),
    ]
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
