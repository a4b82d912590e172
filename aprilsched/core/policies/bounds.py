"""The range of a setting, declared beside its field.

``batch_groups: Annotated[int, AT_LEAST_1] = 32`` is checked by :func:`check_bounds` when the
configuration is made; None, where a field may be that, has no range.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, cast, get_args, get_type_hints

from aprilsched.errors import ConfigError

__all__ = ["ABOVE_0", "AT_LEAST_0", "AT_LEAST_1", "SHARE", "Bound", "check_bounds"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """A value is at least `least`, or above `above`, and at most `most`, or below `below`."""

    words: str
    """What to give, for the error."""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Is the value in the range? A number that is none (NaN) is not."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )


AT_LEAST_0 = Bound(least=0, words="0 or more")
AT_LEAST_1 = Bound(least=1, words="1 or more")
ABOVE_0 = Bound(above=0, words="a number above 0")
SHARE = Bound(above=0, most=1, words="a share above 0 and at most 1")


def check_bounds(settings: Any, path: str = "") -> None:
    """Check every field of a dataclass that has a bound, and those of its parts.

    Raises:
        ConfigError: naming the path of the first setting that is out of its range.
    """
    bounds = _bounds(cast("type[object]", type(settings)))
    for name, bound in bounds.items():
        value = getattr(settings, name)
        if isinstance(value, int | float) and not bound.holds(value):
            raise ConfigError(f"{path}{name} is {value}; give {bound.words}.")
    for field in fields(settings):
        part = getattr(settings, field.name)
        if is_dataclass(part):
            check_bounds(part, f"{path}{field.name}.")


@cache
def _bounds(kind: type[object]) -> dict[str, Bound]:
    hints = get_type_hints(kind, include_extras=True)
    found = {name: _bound(hint) for name, hint in hints.items()}
    return {name: bound for name, bound in found.items() if bound is not None}


def _bound(hint: Any) -> Bound | None:
    """That of an annotation, or of one in it (``Annotated[int, bound] | None``)."""
    if isinstance(hint, Bound):
        return hint
    return next(filter(None, map(_bound, get_args(hint))), None)
