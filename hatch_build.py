"""Makes the parts of the package's metadata that need the repository's address (pyproject.toml)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
"""A link or picture whose target is a path in the repository."""


class Metadata(MetadataHookInterface):
    """Gives the README links that work outside of the repository, and the project its URLs."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = self.config["repository"].rstrip("/")
        tag = f"v{metadata['version']}"
        text = Path(self.root, "README.md").read_text(encoding="utf-8")

        def link(found: re.Match[str]) -> str:
            picture, words, path, place = found.groups(default="")
            kind = "raw" if picture else "blob"
            return f"{picture}[{words}]({repository}/{kind}/{tag}/{path}{place})"

        metadata["urls"] = {}
        if repository:
            text = LINK.sub(link, text)
            metadata["urls"] = {
                "Repository": repository,
                "Documentation": f"{repository}/tree/{tag}/docs",
                "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
                "Security": f"{repository}/security/policy",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
