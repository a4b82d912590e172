"""Makes the parts of the package's metadata that need the repository's address (pyproject.toml)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")
"""A link or picture whose target is a path in the repository."""


def from_outside(text: str, repository: str, version: str) -> str:
    """Markdown with links to the files of a version that work outside of its repository."""

    def link(found: re.Match[str]) -> str:
        picture, words, path = found.groups()
        kind = "raw" if picture else "blob"
        return f"{picture}[{words}]({repository}/{kind}/v{version}/{path})"

    return _LINK.sub(link, text)


class Metadata(MetadataHookInterface):
    """Gives the README links that work outside of the repository, and the project its URLs."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository, version = self.config["repository"], metadata["version"]
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["urls"] = {}
        if repository:
            text = from_outside(text, repository, version)
            metadata["urls"] = {
                "Repository": repository,
                "Documentation": f"{repository}/tree/v{version}/docs",
                "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
                "Security": f"{repository}/security/policy",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
