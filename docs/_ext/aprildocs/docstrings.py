"""Corrects what autodoc and napoleon make of the package's classes.

Napoleon would read "Text: more text" below a field or a property as a type and its description.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

__all__ = ["setup"]

_BEFORE_NAPOLEON = 400
_IN_A_UNION = re.compile(r"TypeAliasForwardRef\('(\w+)'\)")
"""The text that autodoc writes for an alias in a union."""
_ANNOTATED = re.compile(r"(?:~?typing\.)?Annotated\[([\w.]+), [^\]]*\]")
"""The text that autodoc writes for a type with a bound. Readers need the type only."""


def _say_no_type(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Put an empty type before the first colon, so that napoleon keeps the text whole."""
    if what in ("attribute", "data", "property") and lines:
        lines[0] = f": {lines[0]}"


def _legible(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Make a signature readable. A default "<factory>" is not Python, so the whole signature would
    not be parsed. A protocol gets no signature, because it is never called."""
    if getattr(obj, "_is_protocol", False):
        return ("", "")
    legible = _IN_A_UNION.sub(r"\1", (signature or "").replace("<factory>", "..."))
    legible = _ANNOTATED.sub(r"\1", legible)
    return (legible, returns) if signature else None


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", _say_no_type, priority=_BEFORE_NAPOLEON)
    app.connect("autodoc-process-signature", _legible)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
