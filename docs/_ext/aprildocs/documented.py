"""Reads the documentation of classes for the tables of the reference."""

from __future__ import annotations

import inspect
import re
from typing import Any

from aprilsched.cli.arguments import field_texts

__all__ = ["cell", "field_texts", "type_text"]

_ROLE = re.compile(r":[a-z:]+:`~?(?:[\w.]*\.)?(\w+)`")
_LITERAL = re.compile(r"``([^`]+)``")


def cell(text: str) -> str:
    """A piece of a docstring as one line of Markdown, fit for a table."""
    line = " ".join(text.split())
    line = _ROLE.sub(r"`\1`", line)
    line = _LITERAL.sub(r"`\1`", line)
    return line.replace("|", "\\|")


def type_text(kind: type[Any], name: str) -> str:
    """A field's type as it is written."""
    for base in kind.__mro__:
        annotations = inspect.get_annotations(base)
        if name in annotations:
            return str(annotations[name])  # a string, because annotations are not evaluated
    return ""
