"""Checks settings against what their fields declare: types, choices and ranges.

The range of a field is in its annotation (``batch_groups: Annotated[int, AT_LEAST_1] = 32``),
and the choices of a setting are the members of its ``Literal``. :func:`check_settings` reads both,
so no range or choice is written down a second time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from aprilsched.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The range of a number: at least `least` or above `above`, and at most `most` or below
    `below`."""

    words: str
    """The accepted values, for the error."""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Whether the value is in the range. NaN is in no range."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )


MAX_WHOLE = 2**53
"""Largest integer of a setting without an upper bound: larger ones are not exact as floats, and
overflow NumPy integers."""
AT_LEAST_0 = Bound(least=0, words="0 or more")
AT_LEAST_1 = Bound(least=1, words="1 or more")
ABOVE_0 = Bound(above=0, words="a number above 0")
NOT_NEGATIVE = Bound(least=0, below=math.inf, words="a finite number, 0 or more")
POSITIVE = Bound(above=0, below=math.inf, words="a finite number above 0")
COUNT_32_BITS = Bound(least=1, most=2**31 - 1, words="1 to 2**31 - 1")
PORT = Bound(least=0, most=2**16 - 1, words="0 (any free port) to 65535")
SHARE = Bound(above=0, most=1, words="a share above 0 and at most 1")
SHARE_OR_0 = Bound(least=0, below=1, words="a share below 1, or 0")


def check_range(bound: Bound, **values: float | None) -> None:
    """Check arguments, by their names; None is in every range.

    Raises:
        ConfigError: if a value is out of the range.
    """
    for name, value in values.items():
        if value is not None and not bound.holds(value):
            raise ConfigError(f"{name} is {value}; give {bound.words}.")


def check_settings(settings: Any, path: str = "") -> None:
    """Check every field of a dataclass, and the fields of its parts.

    Args:
        settings: an instance of a dataclass.
        path: prefix of a field's name in an error, such as ``"refill."``.

    Raises:
        ConfigError: if a value has a wrong type, is not one of the choices or is out of range; the
            message names the path of the setting.
    """
    hints = _hints(cast("type[object]", type(settings)))
    for field in fields(settings):
        value, name, hint = getattr(settings, field.name), f"{path}{field.name}", hints[field.name]
        bound = next((found for found in _leaves(hint) if isinstance(found, Bound)), None)
        if bound is not None and _is_number(value, Real):
            check_range(bound, **{name: value})
        bounded = bound is not None and not (bound.most is bound.below is None)
        if _is_number(value, Integral) and not bounded and abs(value) > MAX_WHOLE:
            raise ConfigError(f"{name} must be at most 2**53, got a larger number.")
        if not any(_fits(value, leaf) for leaf in _leaves(hint)):
            raise ConfigError(f"{name} is {value!r}; {_advice(hint)}.")
        if is_dataclass(value):
            check_settings(value, f"{name}.")


@cache
def _hints(kind: type[object]) -> dict[str, Any]:
    """The annotations of a dataclass; Any where a caller's own class has one that only the type
    checker can resolve."""
    try:
        return get_type_hints(kind, include_extras=True)
    except NameError:
        return {field.name: Any for field in fields(cast("Any", kind))}


def _leaves(hint: Any) -> list[Any]:
    """Return the elements of an annotation: classes, the members of literals, and bounds."""
    origin = get_origin(hint)
    if origin in (Union, UnionType, Annotated):
        return [leaf for part in get_args(hint) for leaf in _leaves(part)]
    if origin is Literal:
        return list(get_args(hint))
    return [hint if origin is None else origin]


def _fits(value: Any, leaf: Any) -> bool:
    if isinstance(leaf, str):
        return isinstance(value, str) and value == leaf
    if leaf in (int, float):
        return _is_number(value, Integral if leaf is int else Real)
    if isinstance(leaf, Bound):
        return False
    if not isinstance(leaf, type) or leaf is Any:
        return True
    try:
        return isinstance(value, leaf)
    except TypeError:  # a Protocol of the caller's that is not made for this question
        return True


def _is_number(value: Any, kind: type[Any]) -> bool:
    """Return whether a value, perhaps NumPy's, is a number of this kind; booleans are not."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _advice(hint: Any) -> str:
    """Return the advice for an annotation: which values it accepts."""
    leaves = _leaves(hint)
    bound = next((leaf.words for leaf in leaves if isinstance(leaf, Bound)), "a number")
    words: list[str] = [leaf for leaf in leaves if isinstance(leaf, str)]
    for leaf in leaves:
        if leaf is bool:
            words.append("True or False")
        elif leaf is int:
            words.append(f"a whole number, {bound}")
        elif leaf is float:
            words.append(bound)
        elif leaf is type(None):
            words.append("None")
        elif isinstance(leaf, type):
            words.append(f"an instance of {leaf.__name__}")
    if len(words) == 1:
        return f"give {words[0]}"
    return f"choose one of {', '.join(words)}"
