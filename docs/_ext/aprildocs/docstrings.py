"""Keeps napoleon from reading "Text: more text" below a field or a property as a type and more."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

__all__ = ["setup"]

_BEFORE_NAPOLEON = 400


def _say_no_type(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """An empty type in front of the first colon is none, and the rest stays whole."""
    if what in ("attribute", "data", "property") and lines:
        lines[0] = f": {lines[0]}"


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", _say_no_type, priority=_BEFORE_NAPOLEON)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
