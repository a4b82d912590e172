"""Links from a page to files of the repository that are not pages of the site.

In a file browser ``../experiments/frontier`` is a link. In the site it becomes the path in plain
text, or a link to :confval:`repository_url` if the site is built with one. A path that does not
exist gives a warning, which fails the build.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

__all__ = ["RepositoryLinks", "setup"]

_log = logging.getLogger(__name__)


class RepositoryLinks(SphinxTransform):
    """Replaces such links before references are resolved."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        root = Path(self.env.srcdir).parent
        for link in list(self.document.findall(addnodes.pending_xref)):
            if link.get("refdomain") == "doc" or link.get("reftype") == "myst":
                self._replace(link, root)
        for link in list(self.document.findall(addnodes.download_reference)):
            self._replace(link, root)

    def _replace(self, link: nodes.Element, root: Path) -> None:
        target = urlsplit(str(link["reftarget"])).path
        if not target or target.startswith("/"):
            return
        if link.get("refdomain") == "doc":  # the name of a page, without its suffix
            path = Path(self.env.srcdir, f"{target}.md")
        else:
            path = (Path(self.env.doc2path(self.env.docname)).parent / target).resolve()
            if not path.exists() and (root / target).exists():  # of a file that the page includes
                path = root / target
        if not path.is_relative_to(root) or self._is_part_of_the_site(path):
            return
        inside = path.relative_to(root).as_posix()
        if not path.exists():
            _log.warning("%s is not in the repository", inside, location=link, type="repository")
            return
        text = link.astext()
        url = self.config.repository_url
        if url:
            kind = "tree" if path.is_dir() else "blob"
            where = f"{url}/{kind}/main/{inside}"
            link.replace_self(nodes.reference("", "", *link.children, refuri=where))
        elif text == inside:
            link.replace_self(nodes.literal("", inside))
        else:
            shown = [*link.children, nodes.Text(" ("), nodes.literal("", inside), nodes.Text(")")]
            link.replace_self(nodes.inline("", "", *shown))

    def _is_part_of_the_site(self, path: Path) -> bool:
        """Return whether `path` is below docs, and not an excluded page such as a decision."""
        if not path.is_relative_to(self.env.srcdir):
            return False
        is_page = path.suffix == ".md" and path.is_file()
        return not is_page or self.env.path2doc(str(path)) in self.env.found_docs


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("repository_url", "", "env", str)
    app.add_transform(RepositoryLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
