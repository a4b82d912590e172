"""Reads what the source says of the fields of a class, for the flags and for the reference."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import Any

__all__ = ["field_texts"]


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
