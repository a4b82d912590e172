"""The Sphinx extension: ``{generated}`` puts a table or text in that is made from the code.

The Markdown that a generator returns is read as if it stood in the page, so what it links to is
checked like everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from aprildocs import command_line, tables
from aprildocs.state_diagram import draw, moves_table
from aprilsched.kernel.core.state.records import MOVES

__all__ = ["GENERATORS", "setup"]

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
    "summary": tables.summary_figures,
    "tracked": tables.tracked_figures,
    "usage-parts": tables.usage_parts,
}
"""By the name that a page asks for."""


class Generated(SphinxDirective):
    """``{generated} NAME``"""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        if name not in GENERATORS:
            raise self.error(f"{name!r} is not generated; choose one of {', '.join(GENERATORS)}.")
        return self.parse_text_to_nodes(GENERATORS[name](), allow_section_headings=True)


class StateDiagram(SphinxDirective):
    """``{state-diagram}``: the table of legal moves as a drawing."""

    def run(self) -> list[nodes.Node]:
        scrolled = f'<div class="state-diagram-scroll">{draw(MOVES)}</div>'
        return [nodes.raw("", scrolled, format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("generated", Generated)
    app.add_directive("state-diagram", StateDiagram)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
