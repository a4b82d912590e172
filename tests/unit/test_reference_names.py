"""Tests that the names in the pages of the reference exist in the package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

PAGES = sorted((Path(__file__).parents[2] / "docs" / "reference").rglob("*.md"))
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: ([\w.]+)$(?:\n +:members: *([\w, ]*)$)?", re.MULTILINE)
MODULE = re.compile(r"^\.\. currentmodule:: ([\w.]+)$", re.MULTILINE)
ABSENT = object()


def found(path: str) -> Any:
    """Return the object of a dotted name, or ABSENT."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            there: Any = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            there = getattr(there, name, ABSENT)
        return there
    return ABSENT


def has(owner: Any, name: str) -> bool:
    """Return whether a class or module has the member, which may be a field without a default."""
    known = {field.name for field in fields(owner)} if is_dataclass(owner) else set[str]()
    return name in known or name in getattr(owner, "__annotations__", {}) or hasattr(owner, name)


def missing() -> Iterator[str]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        module = MODULE.search(text)
        for _, path, members in DIRECTIVE.findall(text):
            within = f"{module[1]}.{path}" if module else path
            owner = there if (there := found(path)) is not ABSENT else found(within)
            if owner is ABSENT:
                yield f"{page.name}: {path}"
                continue
            for name in filter(None, map(str.strip, members.split(","))):
                if not has(owner, name):
                    yield f"{page.name}: {path}.{name}"


def test_every_name_in_the_reference_exists():
    assert sum(len(DIRECTIVE.findall(page.read_text(encoding="utf-8"))) for page in PAGES) > 50
    assert list(missing()) == []
