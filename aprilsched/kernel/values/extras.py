"""Optional dependencies: one sentence names the extra that brings a missing one.

`import aprilsched` and a scheduler on SGLang servers need only the packages that the base install
requires. Everything else is imported inside ``with extra(NAME)``, where NAME is an entry of
``[project.optional-dependencies]`` in pyproject.toml.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Generator
from contextlib import contextmanager
from urllib.parse import unquote

from aprilsched.errors import MissingExtra

SOURCE = "."
"""The source of pip's commands in documents, and in errors if an installation has no record of its
own: a checkout until there is a release, and "aprilsched" from then on."""


@contextmanager
def extra(name: str) -> Generator[None]:
    """Put this around imports of packages that the extra `name` brings.

    Raises:
        MissingExtra: if one of them is not installed or cannot be imported.
    """
    try:
        yield
    except MissingExtra:
        raise
    except ImportError as error:
        missing = error.name or str(error)
        if missing.partition(".")[0] == "aprilsched":
            raise  # a mistake of this package, which no installation fixes
        absent = isinstance(error, ModuleNotFoundError)
        what = "is not installed" if absent else f"cannot be imported ({error})"
        raise MissingExtra(f"{missing} {what}; {_command(name)}.") from error


def _command(name: str) -> str:
    """Return the pip command that installs the extra `name` from this installation's source.

    A package index may have no aprilsched, or another one than this folder, file or repository."""
    # Imported only if a package is missing: it takes long.
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        noted = distribution("aprilsched").read_text("direct_url.json")
    except PackageNotFoundError:
        noted = None
    if noted is None:
        return f"pip install '{SOURCE}[{name}]'"
    source = json.loads(noted)
    url = source["url"]
    if "dir_info" in source:
        editable = "-e " if source["dir_info"].get("editable") else ""
        folder = unquote(url.removeprefix("file://"))
        return f"pip install {editable}{shlex.quote(f'{folder}[{name}]')}"
    if "vcs_info" in source:
        url = f"{source['vcs_info']['vcs']}+{url}@{source['vcs_info']['commit_id']}"
    return f"pip install 'aprilsched[{name}] @ {url}'"
