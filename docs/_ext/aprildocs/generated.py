"""The parts of pages that are written from the code: ``python docs/_ext/aprildocs/generated.py``.

A page holds such a part between two comments, so it can be read without building the site::

    <!-- generated: settings -->
    ...
    <!-- end: settings -->

`make docs` writes all parts again, and a test compares them with the code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from aprildocs import command_line, tables
from aprildocs.shown import shown
from aprildocs.state_diagram import draw, moves_table
from aprilsched.kernel.core.state.records import MOVES

__all__ = ["GENERATORS", "pages", "setup", "with_generated_parts"]

GENERATORS: dict[str, Callable[[], str]] = {
    "command-line": command_line.command_line,
    "fact-lines": tables.fact_lines,
    "fact-parts": tables.fact_parts,
    "metrics": tables.metrics,
    "moves": lambda: moves_table(MOVES),
    "samples": tables.sampled_figures,
    "sampling": tables.sampling_settings,
    "setting_parts": tables.setting_parts,
    "setting_policies": tables.setting_policies,
    "settings": tables.settings,
    "shown": shown,
    "summary": tables.summary_figures,
    "tracked": tables.tracked_figures,
    "usage-parts": tables.usage_parts,
}
"""By the name in a page's comments."""

_PART = re.compile(r"<!-- generated: (\S+) -->\n.*?<!-- end: \1 -->", flags=re.DOTALL)


def with_generated_parts(page: str) -> str:
    """Return the Markdown of a page with its generated parts as the code has them now.

    Raises:
        KeyError: if a part has a name that is not in :data:`GENERATORS`.
    """

    def part(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- generated: {name} -->\n\n{GENERATORS[name]()}\n\n<!-- end: {name} -->"

    return _PART.sub(part, page)


def pages() -> list[Path]:
    """Return the files of the pages that have generated parts."""
    docs = Path(__file__).parents[2]
    found = (p for p in docs.rglob("*.md") if "_build" not in p.relative_to(docs).parts)
    return sorted(p for p in found if _PART.search(p.read_text(encoding="utf-8")))


class StateDiagram(SphinxDirective):
    """``{state-diagram}``: the table of legal moves as a drawing."""

    def run(self) -> list[nodes.Node]:
        scrolled = f'<div class="state-diagram-scroll">{draw(MOVES)}</div>'
        return [nodes.raw("", scrolled, format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("state-diagram", StateDiagram)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    for path in pages():
        text = path.read_text(encoding="utf-8")
        path.write_text(with_generated_parts(text), encoding="utf-8")
